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


def test_the_picture_and_the_tables_of_methods_are_what_was_recorded():
    check = [sys.executable, str(ROOT / "benchmarks" / "plane.py"), "--check"]
    done = subprocess.run(check, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_readme_is_short_and_its_table_too():
    assert len(README.split()) <= 1200
    table = README.split("<!-- plane:")[1].split("<!-- /plane -->")[0]
    rows = [line for line in table.splitlines() if line.startswith("|")][2:]
    assert 1 <= len(rows) <= 6
    assert all(re.search(r"\d+ seeds?, [\d,]+ images", row) for row in rows)


def test_claims_on_few_images_say_so_in_the_same_line():
    section = README.split("## Which should I use?", 1)[1].split("\n## ", 1)[0]
    for item in re.split(r"\n(?=\* )", section)[1:]:
        if "AutoAttack" in item:
            assert re.search(r"images", item), item
            assert re.search(r"seed", item), item


def test_the_example_runs():
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "own_loop.py"), "--epochs", "1"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 3
    assert "TRADES + BulletTrain" in done.stdout
