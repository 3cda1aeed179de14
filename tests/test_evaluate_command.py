"""`bullettrain evaluate` as a person types it."""

import importlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from bullettrain.cli.app import app
from bullettrain.config import recipe
from bullettrain.models import build
from bullettrain.reporting import Run
from bullettrain.run_folder import RunFolder, pack_weights, read_weights


@pytest.fixture
def run(robust_run, tmp_path, monkeypatch):
    """A copy of a run to evaluate, in the folder where we are."""
    shutil.copytree(robust_run, tmp_path / "runs" / "robust")
    monkeypatch.chdir(tmp_path)
    return Path("runs/robust")


def test_a_small_network_is_evaluated_by_as_many_threads_as_it_was_trained_by(run, monkeypatch):
    asked = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    invoke(run, "--attack", "clean", "--images", 60)
    assert asked == [1]


def invoke(*words, columns=100):
    runner = CliRunner(env={"COLUMNS": str(columns), "NO_COLOR": "1", "TERM": "dumb"})
    result = runner.invoke(app, ["evaluate", *(str(word) for word in words)], prog_name="bullettrain")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return re.sub(r"\x1b\[[0-9;]*m", "", result.output)


def test_a_run_is_evaluated_and_the_report_says_it(run):
    text = invoke(
        run, "--attack", "clean,pgd5", "--attack", "pgd3x2", "--images", 120, "--curves", "--curve-images", 60
    )
    lines = text.splitlines()
    assert lines[0] == "robust, last weights: 120 images of digits on cpu"
    assert re.fullmatch(r"Clean  \d+\.\d\d %  \(\d+\.\d\d to \d+\.\d\d\)  \d+\.\d s", lines[1])
    table = text[text.index("attack ") :]
    assert re.search(r"Clean +\d+\.\d\d % +\d+\.\d\d to \d+\.\d\d +\d+\.\d s", table)
    assert re.search(r"PGD-5 +L∞ 0\.15 +\d+\.\d\d % +\d+\.\d\d to \d+\.\d\d", table)
    assert re.search(r"worst case +L∞ 0\.15 +\d+\.\d\d %", table)
    assert re.search(r"weakest class under PGD-3×2: \d ", table)
    assert "report   runs/robust/report.html" in text
    content = json.loads((run / "evaluation.json").read_text())
    (entry,) = content["evaluations"]
    assert (entry["weights"], entry["data"], entry["examples"], entry["recipe"]) == ("last", "digits", 120, "digits")
    assert {"torch", "commit", "device"} <= set(entry["environment"])
    names = [(result["role"], result["name"]) for result in entry["results"]]
    assert names[:3] == [("attack", "clean"), ("attack", "pgd5"), ("attack", "pgd3x2")]
    assert all(result["interval"][0] <= result["accuracy"] <= result["interval"][1] for result in entry["results"])
    page = (run / "report.html").read_text()
    section = page[page.index('id="evaluated"') : page.index('id="curves"')]
    assert "last weights on digits" in section
    for figure in ("evaluated0-eps", "evaluated0-steps", "evaluated0-classes"):
        assert f'id="{figure}"' in section
    assert "PGD-3×2" in section
    assert "95 % interval" in section
    assert " leaves " not in page[: page.index('id="evaluated"')]  # on fewer images
    invoke(run, "--attack", "pgd5", "--eps", 0.3, "--images", 0)
    assert " leaves " not in (run / "report.html").read_text()  # more than it was trained for
    invoke(run, "--attack", "pgd50x3", "--images", 0)
    head = (run / "report.html").read_text().split('id="evaluated"')[0]
    found = re.search(r"PGD-50×3 \(L∞ 0\.15\) leaves \d+\.\d\s% of \d+ test images \(last weights(.*?)\)\.", head)
    assert found
    assert found[1].startswith("; 95")
    # Other weights of the run stand beside these.
    invoke(run, "--attack", "pgd2", "--images", 60, "--weights", "averaged")
    page = (run / "report.html").read_text()
    assert "averaged weights on digits" in page
    assert "last weights on digits" in page


@pytest.mark.parametrize(
    ("words", "shown"),
    [([], ["Clean", "PGD-20"]), (["--attack", "pgd2"], ["Clean", "PGD-2"]), (["--attack", "clean"], ["Clean"])],
)
def test_clean_accuracy_is_shown_beside_any_attack(run, words, shown):
    text = invoke(run, *words, "--images", 20)
    table = text[text.index("attack ") :].splitlines()[1:]
    assert [line.split()[0] for line in table if "%" in line and "class" not in line] == shown


@pytest.mark.parametrize("columns", [40, 80])
def test_a_narrow_terminal_cuts_no_number(run, columns):
    text = invoke(run, "--attack", "clean,pgd2,pgd2x2", "--images", 40, columns=columns)
    table = text[text.index("attack") :]
    assert re.search(r"\d+\.\d\d %", table)
    assert "…" not in table


def test_a_network_from_elsewhere_has_a_page_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"state_dict": build("wrn-10-1", channels=1).state_dict()}, "their.pt")
    words = ["their.pt", "--network", "wrn-10-1", "--data", "digits", "--attack", "pgd2:eps=8/255", "--images", 20]
    text = invoke(*words)
    assert "PGD-2   L∞ 8/255" in text
    assert "written  runs/evaluate-their.pt/evaluation.json" in text
    page = Path("runs/evaluate-their.pt/report.html").read_text()
    assert "How it was evaluated" in page
    assert "their.pt" in page
    assert "Nothing has been logged" not in page
    assert "metrics.jsonl" not in page
    elsewhere = invoke(*words, "--out", "there")
    assert "written  there/evaluation.json" in elsewhere


def test_a_name_is_printed_as_it_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "oddnet.py").write_text(
        "from bullettrain.models import build\ndef two(): return build('small-cnn', channels=1, image_size=8)\n"
    )
    text = invoke("oddnet:two", "--data", "digits", "--attack", "clean", "--images", 20, "--out", "[/b]exp[a]:car:")
    assert text.startswith("oddnet:two: 20 images of digits")
    assert "\noddnet:two" in text  # above the table
    assert "written  [/b]exp[a]:car:/evaluation.json\nreport   [/b]exp[a]:car:/report.html\n" in text


def test_the_papers_figure_stands_beside_the_papers_recipe(run):
    """A config of the paper's, on a network and data that are not; the column is what is tested."""
    from bullettrain.cli.evaluate import show
    from bullettrain.evaluation.results import Store

    invoke(run, "--attack", "clean,pgd20:eps=0.031", "--images", 20)
    (entry,) = Store(run).entries
    entry.data = "cifar10"
    console = Console(width=100, record=True, file=io.StringIO())
    show(console, entry, entry.results, recipe("cifar10-trades"), curves=False)
    text = console.export_text()
    assert re.search(r"Clean .* 85\.89 %", text)
    assert re.search(r"PGD-20 .* 56\.35 %", text)


def test_an_interrupt_says_how_to_go_on(run):
    words = [sys.executable, "-m", "bullettrain", "evaluate", str(run), "--overwrite", "--attack", "pgd3,pgd100x200"]
    words += ["--batch-size", "60"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment) as process:
        for line in process.stdout:
            if line.startswith("PGD-3 "):
                process.send_signal(signal.SIGINT)
                break
        rest = process.stdout.read()
    assert process.returncode == 130, rest
    how = "resume without --overwrite, which would start over"
    command = "bullettrain evaluate runs/robust --attack pgd3,pgd100x200 --batch-size 60"
    assert f"interrupted; {how}:\n  {command}\n" in rest
    kept = json.loads((run / "evaluation.json").read_text())
    assert [state["batches"] >= 1 for state in kept["unfinished"].values()] == [True]
    assert [result["name"] for result in kept["evaluations"][0]["results"]] == ["clean", "pgd3"]


@pytest.mark.parametrize("again", [[], ["--overwrite"]], ids=["once", "again"])
def test_a_second_ctrl_c_says_how_to_go_on_too(run, monkeypatch, again):
    """Before anything was dropped --overwrite is still to be done."""
    words = ["evaluate", str(run), "--images", "20", *again]
    monkeypatch.setattr(sys, "argv", ["bullettrain", *words])

    def interrupted(*args, **kwargs):
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(importlib.import_module("bullettrain.evaluation.evaluate"), "evaluate", interrupted)
    stopped = CliRunner(env={"COLUMNS": "120"}).invoke(app, words)
    assert stopped.exit_code == 130
    assert stopped.output.endswith(f"interrupted; resume with:\n  bullettrain {' '.join(words)}\n")


def test_images_of_a_folder_are_resized(run, tmp_path):
    from PIL import Image

    for name in "0123456789":
        Path("images", name).mkdir(parents=True)
        for size in (9, 12):
            Image.new("L", (size, size), int(name) * 20).save(f"images/{name}/{size}.png")
    words = [run, "--data", "folder:images", "--attack", "clean", "--out", "there"]
    with pytest.raises(ValueError, match="give an image size"):
        invoke(*words)
    assert "images of folder:images" in invoke(*words, "--image-size", 8)


MISTAKES = {
    "attack": (["runs/robust", "--attack", "pgf"], "there is no attack 'pgf'; there are clean, pgd20, pgd100x10"),
    "parameter": (["runs/robust", "--attack", "pgd:stepz=2"], "there are steps, restarts, step, loss, norm, eps"),
    "eps": (["runs/robust", "--eps", "8"], "did you mean 8/255?"),
    "norm": (["runs/robust", "--norm", "l1"], "there are linf, l2"),
    "precision": (
        ["runs/robust", "--precision", "fp32"],
        "there are float32, tf32, bf16, both; did you mean 'float32'?",
    ),
    "no data": (["their.pt", "--network", "wrn-10-1"], "say which images to evaluate it on"),
    "data": (["runs/robust", "--data", "svhn"], "there is no dataset 'svhn'"),
    "missing data": (["runs/robust", "--data", "cifar10", "--data-dir", "nowhere"], "bullettrain data prepare cifar10"),
    "classes": (["hundred.pt", "--network", "wrn-10-1", "--data", "digits"], "has 100 classes, but digits has 10"),
    "keys": (
        ["their.pt", "--network", "wrn-16-1", "--data", "digits"],
        'state_dict: "block1.layer.1.bn1.weight"',
    ),
    "shape": (
        ["colour.pt", "--network", "wrn-10-1", "--data", "digits"],
        "size mismatch for conv1.weight",
    ),
    "range": (["runs/robust", "--data", "npz:wide.npz"], "has x outside [0, 1] (from 0 to 3)"),
    "text": (
        ["text.pt"],
        "text.pt is not a checkpoint: it is neither",
    ),
    "model": (["nothing"], "'nothing' is no network"),
    "weights": (["runs/robust", "--weights", "best"], "has no 'best' weights"),
    "size": (["runs/robust", "--images", "9999"], "but digits has 359 test images"),
    "corruptions": (["runs/robust", "--attack", "corruptions"], "--corruptions DIR"),
    "their folder": (["runs/robust", "--attack", "corruptions", "--corruptions", "no"], "is no folder"),
    "for nothing": (["runs/robust", "--corruptions", "runs"], "go with --attack corruptions"),
    "baseline": (
        ["runs/robust", "--attack", "corruptions", "--corruptions", "runs", "--mce-baseline", "their.pt"],
        "cannot be read",
    ),
    "mean": (["runs/robust", "--mean", "0.5"], "--mean was given, but the checkpoint defines its normalisation"),
    "number": (["runs/robust", "--mean", "grey"], "is no number"),
    "device": (["runs/robust", "--device", "tpu9"], "no device 'tpu9'"),
    "out": (["runs/robust", "--out", "their.pt"], "is a file; give a folder"),
    "another run": (["their.pt", "--network", "wrn-10-1", "--data", "digits", "--out", "runs/robust"], "not the one"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_and_status_two(run, mistake, monkeypatch, capsys):
    from bullettrain.cli import main

    torch.save(build("wrn-10-1", channels=1).state_dict(), "their.pt")
    torch.save(build("wrn-10-1", channels=3).state_dict(), "colour.pt")
    torch.save(build("wrn-10-1", channels=1, num_classes=100).state_dict(), "hundred.pt")
    Path("text.pt").write_text("version https://git-lfs.github.com/spec/v1")
    np.savez("wide.npz", x=np.linspace(0, 3, 640, dtype=np.float32).reshape(10, 8, 8), y=np.arange(10))
    words, message = MISTAKES[mistake]
    monkeypatch.setattr(sys, "argv", ["bullettrain", "evaluate", *words])
    with pytest.raises(SystemExit) as stop:
        main()
    captured = capsys.readouterr()
    assert stop.value.code == 2
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("bullettrain: ")
    assert captured.out.count("\n") <= 1  # at most the line that says what is evaluated
    assert not (run / "evaluation.json").exists()


def test_autoattack_that_is_not_there_names_the_extra(run, monkeypatch, capsys):
    from bullettrain.cli import main

    for name in ("pyautoattack", "autoattack"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(sys, "argv", ["bullettrain", "evaluate", str(run), "--attack", "autoattack"])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    install = 'in your clone of bullettrain, pip install ".[eval]"'
    assert capsys.readouterr().err == f"bullettrain: AutoAttack needs pyautoattack: {install}\n"


def test_a_report_does_not_trust_the_file(run):
    from bullettrain.reporting import write_report

    (run / "evaluation.json").write_text('{"format": 1, "evaluations": [{"results": 3}]}')
    page = write_report(run).read_text()
    assert "evaluation.json could not be read" in page
    assert 'id="evaluated"' not in page


def test_defaults_come_from_the_run():
    from bullettrain.cli.evaluate import _defaults
    from bullettrain.evaluation.specs import Defaults, parse_attack

    cifar = recipe("cifar10-trades")
    assert parse_attack("pgd20", _defaults(cifar, None, None)) == parse_attack("pgd20", Defaults())
    mnist = _defaults(recipe("mnist-pgd"), None, None)
    assert (mnist.eps, parse_attack("pgd100x20", mnist).step) == (0.3, 0.01)
    assert _defaults(cifar, "8/255", None) == Defaults("linf", 8 / 255)
    assert _defaults(cifar, None, "l2") == Defaults("l2")
    assert _defaults(recipe("cifar10-augmix"), None, None) == Defaults()
    assert _defaults(None, None, None) == Defaults()


def test_a_report_leaves_out_what_was_evaluated_of_earlier_weights(run):
    invoke(run, "--attack", "pgd5", "--images", 60)
    assert Run.read(run).entries
    tensors, about = read_weights(run / "last.safetensors")
    (run / "last.safetensors").write_bytes(pack_weights({key: 2 * value for key, value in tensors.items()}, about))
    later = Run.read(run)
    assert later.entries == []
    assert later.notes[-1].startswith("evaluation.json is of earlier last weights than the present ones: ")
    (run / "last.safetensors").unlink()  # a folder to show, without what it would take to load the network
    assert Run.read(run).entries


def test_a_network_that_pgd_cannot_attack_is_told_in_terminal_and_report(run):
    tensors, about = read_weights(run / "last.safetensors")
    last = list(tensors)[-2:]  # weight and bias of the last layer
    saturated = {key: value * (1e4 if key in last else 1) for key, value in tensors.items()}
    (run / "last.safetensors").write_bytes(pack_weights(saturated, about))
    text = invoke(run, "--attack", "pgd2", "--images", 60, columns=300)
    found = "images that were looked at have an input gradient of exactly 0: PGD cannot attack these"
    assert re.search(rf"^warning pgd2: .*{found}", text, re.MULTILINE)
    assert found in (run / "report.html").read_text()


def test_the_folder_of_a_run_that_is_evaluated_stays_a_run(run):
    invoke(run, "--attack", "pgd2", "--images", 20)
    assert RunFolder(run).finished
    assert not [path for path in run.iterdir() if path.name.startswith(".")]
