"""The documentation's code runs, its commands exist, its links lead somewhere."""

import importlib
import json
import os
import re
import shlex
import subprocess
import sys
from operator import itemgetter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import typer
from typer.testing import CliRunner

from bullettrain.cli.app import app

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
PAGES += sorted(page for page in (ROOT / "docs").rglob("*.md") if "_build" not in page.parts)
LOOP = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Flatten(), nn.Linear(192, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = [(torch.rand(16, 3, 8, 8), torch.randint(0, 10, (16,)))]
"""
"""What a page takes for granted where it shows the five lines alone."""
SEVERAL = "init_process_group"
"""In a script that torchrun starts."""

pytestmark = pytest.mark.skipif(not (ROOT / "docs").is_dir(), reason="docs/ is not here")


def name(page):
    return page.relative_to(ROOT).as_posix()


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.parent.name != "guides" and blocks(page, "python")], ids=name
)
def test_the_code_of_a_page_runs_from_top_to_bottom(page, tmp_path, monkeypatch):
    code = [block for block in blocks(page, "python") if "runs/" not in block]  # a run that the page has made before
    code = [block for block in code if SEVERAL not in block]
    before = LOOP if "in loader" in code[0] and "loader =" not in code[0] else ""
    monkeypatch.chdir(tmp_path)
    exec(compile(before + "\n".join(code), name(page), "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.parent.name == "guides" and blocks(page, "python")], ids=name
)
def test_the_code_of_a_guide_runs(page, tmp_path):
    try:
        importlib.import_module(page.stem)
    except ImportError as error:
        pytest.skip(f"{page.stem} cannot be imported here: {error}")
    script = tmp_path / "guide.py"
    script.write_text("\n".join(blocks(page, "python")), encoding="utf-8")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="this torch build has no gloo")
def test_the_script_for_several_processes_trains_one_network(tmp_path):
    """Both processes of the script, as it stands on the page, end with the same weights."""
    (code,) = (block for block in blocks(ROOT / "docs" / "own_loop.md", "python") if SEVERAL in block)
    save = "torch.save((model.state_dict(), train.state_dict()), f'{dist.get_rank()}.pt')\n"
    (tmp_path / "my.py").write_text(code.replace("del model", f"{save}del model"), encoding="utf-8")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "my.py"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(torchrun, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    (weights, state), (others, other_state) = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert all(torch.equal(weights[name], others[name]) for name in weights)
    assert state["steps_taken"] == other_state["steps_taken"] == 6


def commands(page):
    """The lines of a page's shell blocks that call this program, without comments."""
    for block in blocks(page, "sh"):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words[:1] == ["bullettrain"]:
                yield words[1:]


@pytest.mark.parametrize("page", [page for page in PAGES if list(commands(page))], ids=name)
def test_commands_of_a_page_are_understood(page):
    program = typer.main.get_command(app)
    for words in commands(page):
        command, rest, parent = program, list(words), typer.Context(program, info_name="bullettrain")
        while rest and rest[0] in getattr(command, "commands", {}):
            command, rest = command.commands[rest[0]], rest[1:]
        try:
            command.make_context(command.name, rest, parent=parent)
        except typer.Exit:
            pass  # it shows help
        except Exception as error:  # as click has several
            pytest.fail(f"bullettrain {shlex.join(words)}: {error}")


@pytest.mark.parametrize("page", [page for page in PAGES if "train" in map(itemgetter(0), commands(page))], ids=name)
def test_recipes_and_settings_of_a_page_exist(page):
    for words in commands(page):
        if words[0] == "train" and "--list" not in words:
            shown = [word for word in words if word not in ("--show", "--compare")]
            done = CliRunner().invoke(app, [*shown, "--show"])
            assert done.exit_code == 0, f"bullettrain {shlex.join(words)}: {done.output or done.exception}"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    targets = re.findall(r"\]\((?!https?:|#)([^)\s]+)\)", text) + re.findall(r'src(?:set)?="([^"]+)"', text)
    for target in targets:
        assert (page.parent / target.partition("#")[0]).exists(), target


@pytest.mark.parametrize("notebook", sorted((ROOT / "docs" / "notebooks").glob("*.ipynb")), ids=name)
def test_notebooks_are_kept_without_output(notebook):
    for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
        assert not cell.get("outputs"), "run without saving, or clear all outputs"


def test_the_page_of_commands_is_up_to_date(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    page = importlib.import_module("cli_page").page()
    assert (ROOT / "docs" / "cli.md").read_text(encoding="utf-8") == page, "run python docs/cli_page.py"


def test_the_table_of_the_first_page_is_what_was_recorded():
    """The rows of docs/index.md as benchmarks/plane.py makes them."""
    text = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    names, table = re.search(r"<!-- plane: (.*?) -->\n(.*?)\n<!-- /plane -->", text, re.DOTALL).groups()
    code = "import plane, sys; print(plane.table(plane.read(plane.CSV), sys.argv[1].split(' | ')))"
    made = [sys.executable, "-c", code, names]
    done = subprocess.run(made, capture_output=True, text=True, cwd=ROOT / "benchmarks")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == table
