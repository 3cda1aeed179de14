"""The README says what the project does: its commands are there to be run, its figures are recorded."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def test_the_speed_table_is_what_was_recorded():
    check = [sys.executable, str(ROOT / "benchmarks" / "speed_table.py"), "--check"]
    done = subprocess.run(check, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_table_of_baselines_is_what_was_recorded():
    check = [sys.executable, str(ROOT / "benchmarks" / "baselines_table.py"), "--check"]
    done = subprocess.run(check, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_two_commands_do_their_own_set_up():
    section = README.split("## Two commands", 1)[1].split("\n## ", 1)[0]
    train, test = re.findall(r"```sh\n(.*?)```", section, re.S)
    assert train.strip().endswith("bullettrain train")
    assert "pytest" in test
    assert all("-c constraints.txt -e" in command and "venv" in command for command in (train, test))


def test_the_page_for_ones_own_loop_runs_from_top_to_bottom(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "own_loop.md").read_text(), re.S)
    assert len(blocks) > 7
    (tmp_path / "page.py").write_text("\n".join(blocks))
    done = subprocess.run([sys.executable, "-W", "error", str(tmp_path / "page.py")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_links_lead_somewhere():
    targets = re.findall(r"\]\((?!http|#)([^)]+)\)", README)
    assert targets
    assert all((ROOT / target).exists() for target in targets)


def test_the_example_runs():
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "own_loop.py"), "--epochs", "1"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 3
    assert "TRADES + BulletTrain" in done.stdout
