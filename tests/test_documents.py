"""The documentation's code runs, its commands exist, its links lead somewhere."""

import importlib
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from bullettrain.commands import app

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
PAGES += sorted(page for page in (ROOT / "docs").rglob("*.md") if "_build" not in page.parts)
NEEDS = {"lightning": "lightning", "accelerate": "accelerate", "transformers": "transformers", "timm": "timm"}
"""What the code of a guide imports besides what the tests install."""
LOOP = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Flatten(), nn.Linear(192, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = [(torch.rand(16, 3, 8, 8), torch.randint(0, 10, (16,)))]
"""
"""What a page takes for granted where it shows the five lines alone."""

pytestmark = pytest.mark.skipif(not (ROOT / "docs").is_dir(), reason="docs/ is not here")


def name(page):
    return page.relative_to(ROOT).as_posix()


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def run(code, folder, *, strict=True):
    script = folder / "page.py"
    script.write_text(code, encoding="utf-8")
    options = ["-W", "error"] if strict else []
    done = subprocess.run([sys.executable, *options, str(script)], capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=name)
def test_the_code_of_a_page_runs_from_top_to_bottom(page, tmp_path):
    needed = NEEDS.get(page.stem)
    if needed:
        try:
            importlib.import_module(needed)
        except ImportError as error:
            pytest.skip(f"{needed} cannot be imported here: {error}")
    code = [block for block in blocks(page, "python") if "runs/" not in block]  # a run that the page has made before
    before = LOOP if "in loader" in code[0] and "loader =" not in code[0] else ""
    run(before + "\n".join(code), tmp_path, strict=not needed)


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
