"""The command as a person types it: in a process of its own, judged by what it prints and how it exits."""

import ast
import dataclasses
import io
import json
import logging
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import typer
import yaml
from rich.console import Console
from typer.testing import CliRunner

import bullettrain
from bullettrain.cli import train as told
from bullettrain.cli.app import app
from bullettrain.config import recipe
from bullettrain.run_folder import RunError, RunFolder
from bullettrain.training import run as run_module
from bullettrain.training.trainer import Trainer

SMALL = ["--set", "epochs=2", "--set", "data.train_size=200", "--set", "data.validation=40", "--set", "probe=20"]

TINY = ["epochs=1", "data.train_size=200", "data.test_size=50", "data.validation=0", "probe=0", "evaluation.steps=2"]
TINY = [word for setting in TINY for word in ("--set", setting)]


def command(*words, cwd=None, env=None):
    """`python -m bullettrain …`, with one thread and no colour."""
    return subprocess.run(
        [sys.executable, "-m", "bullettrain", *map(str, words)],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120", **(env or {})},
    )


def plain(text):
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)


@pytest.fixture(scope="module")
def invoke():
    runner = CliRunner(env={"COLUMNS": "120", "NO_COLOR": "1"})
    return lambda *words: runner.invoke(app, [str(word) for word in words], prog_name="bullettrain")


def test_the_public_names_are_lazy_and_complete():
    tree = ast.parse(Path(bullettrain.__file__).read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    typed = {alias.name for node in block.body for alias in node.names}
    assert typed | {"__version__"} == set(bullettrain.__all__) <= set(dir(bullettrain))
    assert all(getattr(bullettrain, name) is not None for name in bullettrain.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = bullettrain.nothing


def test_help_and_version_do_not_wait_for_torch():
    words = [["--version"], *([*words.split(), "--help"] for words in HELPED)]
    code = """
import contextlib, io, sys
from bullettrain.cli import main
for words in {words}:
    sys.argv = ["bullettrain", *words]
    with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.suppress(SystemExit):
        main()
    assert "ullettrain" in said.getvalue(), words
    print([name for name in ("torch", "numpy", "matplotlib", "yaml") if name in sys.modules], end="")
"""
    done = subprocess.run([sys.executable, "-c", code.replace("{words}", repr(words))], capture_output=True, text=True)
    assert done.stdout == "[]" * len(words), done.stderr


def test_lists_in_help_texts_are_complete(invoke):
    """They are written out, since what they list cannot be imported without torch."""
    from bullettrain.data import SOURCES
    from bullettrain.exporting import FORMATS
    from bullettrain.reproduction.scales import SCALES
    from bullettrain.training.bench import ENGINES

    for words, names in (("data prepare", SOURCES), ("reproduce", SCALES), ("bench", ENGINES), ("export", FORMATS)):
        assert ", ".join(names) in " ".join(plain(invoke(*words.split(), "--help").output).split()), words


def test_version(invoke):
    assert plain(invoke("--version").output).strip() == f"bullettrain {bullettrain.__version__}"


HELPED = ["", "train", "evaluate", "predict", "export", "report", "bench", "reproduce", "data"]
HELPED += ["data list", "data prepare", "data verify", "data corrupt"]


@pytest.mark.parametrize("words", HELPED)
def test_help_shows_an_example(invoke, words):
    result = invoke(*words.split(), "--help")
    assert result.exit_code == 0
    text = plain(result.output)
    assert "Usage" in text
    assert "bullettrain" in text.partition("Usage")[2]
    assert "<bool>" not in text
    if words:
        assert "Example" in text


def test_list_and_show(invoke):
    listed = plain(invoke("train", "--list").output)
    assert "cifar10-trades-short" in listed
    assert "about a minute" in listed
    shown = invoke("train", "cifar10-mart", "--show", "--set", "eps=4/255", "--seed", "3").output
    config = yaml.safe_load(shown)
    assert config["method"]["eps"] == pytest.approx(4 / 255)
    assert (config["training"]["seed"], config["network"]["name"]) == (3, "wrn-34-10")
    assert yaml.safe_load(invoke("train", "--baseline", "--show").output)["method"]["robust"] == 10


def test_train_from_nothing_to_a_report(tmp_path, monkeypatch, invoke):
    done = command("train", *SMALL, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert lines[0] == "runs/digits: digits on cpu"
    assert lines[1].split()[:3] == ["epoch", "loss", "lr"]
    assert [re.match(rf"  {n}/2  +\d\.\d+  +\S+ ", line) is not None for n, line in enumerate(lines[2:4], 1)] == [
        True
    ] * 2
    assert re.search(r"last +\d+\.\d % +\d+\.\d %", done.stdout)
    counted = r"([\d.]+)× less work than TRADES with 10 steps for all \(the paper's formula: ([\d.]+)×\); --compare"
    less, formula = map(float, re.search(counted, done.stdout).groups())
    passes = float(re.search(r", ([\d.]+) passes an example", done.stdout)[1])
    assert less == pytest.approx(27 / passes, rel=0.02)  # TRADES with ten steps has 27
    assert formula != less
    assert (tmp_path / "runs/digits/report.html").stat().st_size > 10_000
    # Again: the finished run is left alone.
    monkeypatch.chdir(tmp_path)
    assert plain(invoke("train", *TINY).output).splitlines()[0] == "runs/digits-2: digits on cpu"
    # The report can be made again from the folder alone.
    (tmp_path / "runs/digits/report.html").unlink()
    assert invoke("report", "runs/digits").exit_code == 0
    assert (tmp_path / "runs/digits/report.html").exists()


def test_compare_prints_one_table(tmp_path):
    done = command("train", "--compare", "--out", "both", *SMALL, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    table = done.stdout[done.stdout.rindex("Clean  PGD-20") :]
    assert re.search(r"baseline +\d+\.\d % +\d+\.\d % +[\d.]+ \w+ +27\.0 +– +– +–", table)
    assert re.search(r"BulletTrain +\d+\.\d % +\d+\.\d % +[\d.]+ \w+ +[\d.]+ +\d+\.\d %", table)
    assert re.search(r"speed-up [\d.]+× theoretical, [\d.]+× counted work, [\d.]+× wall-clock", table)
    assert set(json.loads((tmp_path / "both/comparison.json").read_text())) == {"rows", "speedup", "errors"}
    change = r"[+−]?[\d.]+ ± [\d.]+ points( \(too close to tell\))?"
    assert re.search(f"best weights; against the baseline Clean {change}, PGD-20 {change}\n", table)
    assert "± is one standard error (over the same test images, paired)" in table
    assert (tmp_path / "both/report.html").exists()
    with pytest.raises(ValueError, match=r"give one of them: .*/both/baseline, .*/both/bullettrain$"):
        bullettrain.load(tmp_path / "both")


NARROW = {"COLUMNS": "60", "NO_COLOR": "1", "FORCE_COLOR": "1", "TERM": "xterm"}  # a terminal, as far as rich can tell


def test_a_narrow_terminal_cuts_no_number_and_no_word(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runner = CliRunner(env=NARROW)
    done = runner.invoke(app, ["train", "--compare", "--out", "both", *TINY])
    assert done.exit_code == 0, done.output
    lines = [line.rstrip() for line in plain(done.output).splitlines()]
    lines = lines[lines.index("both") + 1 :]
    assert re.fullmatch(r" +Clean +PGD-2 +training +passes +boundary", lines[0])
    assert re.fullmatch(r"baseline +\d+\.\d % +\d+\.\d % +[\d.]+ \w+ +27\.0 +–", lines[1])
    assert re.fullmatch(r"BulletTrain +\d+\.\d % +\d+\.\d % +[\d.]+ \w+ +[\d.]+ +\d+\.\d %", lines[2])
    assert lines[3] == "the report has more columns"
    prose = " ".join(lines[4:])
    change = r"[+−]?\d+\.\d ± \d+\.\d points"
    assert re.search(f"accuracy of the last weights; against the baseline Clean {change}.*, PGD-2 {change}", prose)
    assert "How much another seed would change is not in it" in prose
    assert max(map(len, lines)) <= 60


@pytest.mark.parametrize("words", ["data list --data-dir nowhere", "train --list", "reproduce"])
def test_a_list_is_wrapped_between_words(words):
    lists = [
        CliRunner(env={**NARROW, "COLUMNS": columns}).invoke(app, words.split()).output for columns in ("60", "500")
    ]
    narrow, wide = ([line.rstrip() for line in plain(text).splitlines()] for text in lists)
    assert max(map(len, narrow)) <= 60 < max(map(len, wide))
    assert " ".join(narrow).split() == " ".join(wide).split()
    assert "…" not in "".join(narrow).replace(" …", "")


ODD_NAMES = ["[/b]", "exp[a]", "a:car:b"]


def test_a_name_is_printed_as_it_is(invoke, tmp_path, monkeypatch):
    """Nothing that comes from outside is markup."""
    name = "".join(ODD_NAMES)
    monkeypatch.chdir(tmp_path)
    done = invoke("train", *TINY, "--out", f"y/{name}")
    assert done.exit_code == 0, done.output
    lines = [line.rstrip() for line in done.output.splitlines()]
    assert lines[0] == f"y/{name}: digits on cpu"
    assert f"y/{name}" in lines  # above the table
    assert lines[-1] == f"report  y/{name}/report.html"
    assert Path("y", name, "report.html").is_file()
    assert f"datasets in {name}" in invoke("data", "list", "--data-dir", name).output.splitlines()
    assert f"{name}/MNIST/raw/" in invoke("data", "verify", "mnist", "--data-dir", name).output


def test_a_message_is_printed_as_it_is(capsys):
    from bullettrain.terminal import logged, terminal

    with logged(terminal()):
        logging.getLogger("bullettrain.training").info("".join(ODD_NAMES))
        logging.getLogger("bullettrain.training").warning("".join(ODD_NAMES))
    assert capsys.readouterr().out.splitlines() == ["".join(ODD_NAMES), "warning " + "".join(ODD_NAMES)]


FIGURES = {
    **{"loss": 1.5, "lr": 0.1, "examples_per_second": 10.0, "robust_fraction": 0.5, "epoch": 1, "step": 3},
    **{"outlier": 0.2, "boundary": 0.3, "robust": 0.5, "seconds": 1.0, "evaluation_seconds": 1.0},
}
LONG = FIGURES | {"loss": 12.3456, "lr": 6.9e-05, "examples_per_second": 123456.7, "seconds": 100.0, "boundary": 1.0}


def test_the_live_lines_show_the_last_validation():
    from bullettrain.training.display import Display

    console, figures = Console(file=io.StringIO(), force_terminal=True, width=80), FIGURES
    with Display(console, recipe("digits").with_settings(["epochs=2"]), 3, with_categories=True) as display:
        display.epoch(figures | {"validation_clean": 0.814, "validation_robust": 0.5})
        assert display.detail.plain.splitlines() == [
            "loss 1.500  lr 0.1  10 ex/s  validation 81.4 %, under PGD 50.0 %",
            "outlier 20 boundary 30 robust 50 %  F_R 0.50",
        ]
        display.interval(figures | {"loss": 0.25})
        assert display.detail.plain.startswith("loss 0.250")
        assert "validation 81.4 %, under PGD 50.0 %" in display.detail.plain
        display.interval(LONG)
        coloured = [display.detail.plain[span.start : span.end] for span in display.detail.spans]
        assert coloured == ["outlier 20", "boundary 100", "robust 50"]
        assert max(map(len, display.detail.plain.splitlines())) <= 80


@pytest.mark.parametrize(("name", "views"), [("digits", "val PGD"), ("digits-augmix", "val views")])
def test_printed_epochs_are_a_table_that_fits_into_100_columns(name, views):
    from bullettrain.training.display import Display

    console = Console(file=io.StringIO(), width=80)
    with Display(console, recipe(name).with_settings(["epochs=100"]), 3, with_categories=True) as display:
        for epoch in (1, 100):
            display.epoch(LONG | {"epoch": epoch, "validation_clean": 1.0, "validation_robust": 0.5})
    heading, first, last = console.file.getvalue().splitlines()
    names = ["epoch", "loss", "lr", "ex/s", "outlier", "boundary", "robust", "F_R", "val clean", views, "time left"]
    assert re.split(r"\s\s+", heading) == names
    cells = ["12.346", "6.9e-05", "123457", "20 %", "100 %", "50 %", "0.50", "100.0 %", "50.0 %"]
    assert re.split(r"\s\s+", first.strip()) == ["1/100", *cells, "2 h 47 min"]
    assert re.split(r"\s\s+", last) == ["100/100", *cells, "0.0 s"]
    assert len(heading) == len(first) == len(last) <= 100


def test_the_heading_of_printed_epochs_comes_again():
    from bullettrain.training.display import Display

    console = Console(file=io.StringIO(), width=80)
    with Display(console, recipe("digits"), 3, with_categories=False) as display:
        for epoch in range(1, 41):
            display.epoch(FIGURES | {"epoch": epoch})
    lines = console.file.getvalue().splitlines()
    assert [index for index, line in enumerate(lines) if line.startswith("epoch")] == [0, 21]


def test_without_a_bar_what_takes_long_is_told_once(monkeypatch):
    from bullettrain import progress
    from bullettrain.training.display import Display

    class Told(io.StringIO):
        def write(self, text):
            written.set()
            return super().write(text)

    written, console = threading.Event(), Console(file=Told(), width=80)
    monkeypatch.setattr(progress, "LONG_SECONDS", 1e-3)
    with Display(console, recipe("digits").with_settings(["epochs=2"]), 3, with_categories=True) as display:
        for epoch in (0, 1):
            with display.training(epoch):
                assert written.wait(60)
        written.clear()
        with display.evaluating("probe for collapse: PGD-10", 48) as bar:
            assert written.wait(60)
            bar(48)
    lines = console.file.getvalue().splitlines()
    assert re.match(r"  epoch 1/2  .* so far$", lines[0])
    assert re.match(r"  probe for collapse: PGD-10  .* so far", lines[-1])
    assert not [line for line in lines if "epoch 2/2" in line]


def test_a_bar_names_what_goes_on_and_shows_the_time_so_far():
    from bullettrain.training.display import Display

    config = recipe("digits").with_settings(["epochs=2", "compile=true"])
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    with Display(console, config, 3, with_categories=True) as display:
        for begin, words in ((display.warming_up, "compiling"), (lambda: display.training(1), "epoch 2/2")):
            with begin():
                console.print(display.progress.get_renderable())
                assert re.search(rf"{words}.*0/6.*\d\d:\d\d so far", plain(console.file.getvalue()))


MISTAKES = {
    "recipe": (["train", "digit"], "`bullettrain train --list` shows all; did you mean 'digits'?"),
    "key": (["train", "--set", "epoch=3"], "did you mean 'epochs'"),
    "value": (["train", "--set", "eps=much"], "no number"),
    "device": (["train", "--device", "tpu9"], "no device 'tpu9'"),
    "both": (["train", "--baseline", "--compare"], "--baseline and --compare do not go together; give one of them"),
    "augmix": (["train", "cifar10-augmix", "--set", "jsd=false"], "add --set robust=1 --set outlier=1"),
    "data": (["train", "mnist-pgd", "--data-dir", "nowhere"], "bullettrain data prepare mnist"),
    "folder": (["train", "--set", "data.name=folder:nowhere"], "nowhere"),
    "out": (["train", "--out", "here"], "is not a run; choose another --out"),
    "report": (["report", "here"], "here"),
    "dataset": (["data", "verify", "svhn"], "mnist, cifar10, cifar100"),
    "network": (["train", "--set", "network.name=wrn-35-10"], "network: "),
    "validation": (["train", "--set", "data.validation=5000"], "data.validation is 5000"),
    "meta": (["train", "--device", "meta"], "there is no device 'meta'; write"),
    "digits": (["data", "verify", "digits"], "comes with scikit-learn"),
    "size": (["train", "--set", "data.train_size=5000"], "but there are"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_and_status_two(tmp_path, mistake, monkeypatch, capsys):
    words, message = MISTAKES[mistake]
    monkeypatch.chdir(tmp_path)
    Path("here").mkdir()
    (Path("here") / "thing").write_text("not a run")
    monkeypatch.setattr(sys, "argv", ["bullettrain", *words])
    from bullettrain.cli import main

    with pytest.raises(SystemExit) as stop:
        main()
    captured = capsys.readouterr()
    assert stop.value.code == 2
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("bullettrain: ")
    assert captured.out == ""
    assert not Path("runs").exists()  # nothing half-written is left


def test_the_library_needs_torch_and_numpy_only(tmp_path):
    heavy = ["typer", "rich", "yaml", "safetensors", "sklearn", "PIL", "matplotlib", "jinja2", "scipy", "torchvision"]
    imports = "import sys, bullettrain, bullettrain.models, bullettrain.data"
    check = f"{imports}\nprint([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.strip() == "[]", done.stderr


def test_sigint_prints_the_command_that_goes_on(tmp_path):
    words = [sys.executable, "-m", "bullettrain", "train", *SMALL, "--set", "epochs=500", "--out", "run"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(words, **pipes, text=True, cwd=tmp_path, env=environment) as process:
        for line in process.stdout:
            if line.strip().startswith("2/500"):
                process.send_signal(signal.SIGINT)
                break
        rest, said = process.communicate()
    assert process.returncode == 130
    assert said == "stopping; this step is finished first\n"
    resume = rest.strip().splitlines()[-1].split()
    assert resume[:3] == ["bullettrain", "train", "digits"]
    assert resume[-1] == "--resume"
    refused = command("train", *SMALL, "--set", "epochs=500", "--out", "run", cwd=tmp_path)
    assert refused.returncode == 2
    assert "--resume" in refused.stderr


@pytest.mark.parametrize("at", ["in a step", "in the report"])
def test_a_second_ctrl_c_prints_the_command_that_goes_on(invoke, tmp_path, monkeypatch, at):
    monkeypatch.chdir(tmp_path)
    take, write = Trainer.take, told.write_report

    def interrupted(trainer, unit):
        out = take(trainer, unit)
        if trainer.at.step == 3:
            signal.raise_signal(signal.SIGINT)
            if at == "in a step":
                signal.raise_signal(signal.SIGINT)
        return out

    def interrupted_report(folder):
        signal.raise_signal(signal.SIGINT)
        return write(folder)

    words = ["train", *TINY, "--set", "epochs=2", "--out", "run"]
    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "take", interrupted)
        if at == "in the report":
            patched.setattr(told, "write_report", interrupted_report)
        stopped = invoke(*words)
    assert stopped.exit_code == 130
    said, printed = stopped.output.splitlines()[-2:]
    assert said == "interrupted; resume with:"
    gone_on = invoke(*shlex.split(printed)[1:])
    assert gone_on.exit_code == 0, gone_on.output
    assert f"run: digits on cpu, from step {2 if at == 'in a step' else 3}" in gone_on.output.splitlines()


@pytest.mark.parametrize("interrupts", [True, False])
def test_ctrl_c_that_ends_a_compiler_too_is_no_error(invoke, tmp_path, monkeypatch, interrupts):
    def broken(trainer, unit):
        if interrupts:
            signal.raise_signal(signal.SIGINT)
        raise RuntimeError("CppCompileError: C++ compile error")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Trainer, "take", broken)
    done = invoke("train", *TINY, "--out", "run")
    assert ("interrupted; resume with:" in done.output) == interrupts
    assert (done.exit_code == 130) == interrupts
    assert isinstance(done.exception, SystemExit if interrupts else RuntimeError)


BEFORE = {
    "device": (sys.modules["bullettrain.processes"], "find_place"),
    "data": (run_module, "load_data"),
    "network": (sys.modules["bullettrain.training.trainer"], "make_network"),
}


@pytest.mark.parametrize("both", [[], ["--compare"]], ids=["one", "both"])
@pytest.mark.parametrize("at", BEFORE)
def test_ctrl_c_before_there_is_a_run_says_that_nothing_was_saved(invoke, tmp_path, monkeypatch, at, both):
    monkeypatch.chdir(tmp_path)
    words = ["train", *TINY, *both, "--out", "run"]
    with monkeypatch.context() as patched:
        patched.setattr(*BEFORE[at], lambda *_: signal.raise_signal(signal.SIGINT))
        stopped = invoke(*words)
    assert stopped.exit_code == 130
    assert stopped.output.splitlines() == ["interrupted before the first step; nothing was saved"]
    assert not Path("run").exists()
    config = recipe("digits")
    RunFolder(Path("run", "baseline" if both else "")).create(config.baseline() if both else config, {})
    with monkeypatch.context() as patched:  # where there is one, it can be gone on with
        patched.setattr(*BEFORE[at], lambda *_: signal.raise_signal(signal.SIGINT))
        stopped = invoke("train", *both, "--out", "run", "--resume")
    assert stopped.exit_code == 130
    assert "interrupted; resume with:" in stopped.output.splitlines()


@pytest.mark.parametrize("both", [[], ["--compare"]], ids=["one", "both"])
def test_after_a_collapse_the_printed_command_goes_on(invoke, tmp_path, monkeypatch, both):
    monkeypatch.chdir(tmp_path)
    words = ["train", *TINY, "--set", "lr=1e30", "--set", "optimizer.name=sgd", "--set", "log_every=1", *both]
    stopped = invoke(*words, "--out", "kg")
    assert stopped.exit_code == 1
    said, printed = stopped.output.splitlines()[-2:]
    assert said == "No epoch was finished before. To continue anyway:"
    with pytest.raises(RunError, match="continue it with: ") as refused:
        raise invoke(*words, "--out", "kg", "--keep-going").exception
    assert str(refused.value).partition("continue it with: ")[2].split() == printed.split()
    gone_on = invoke(*shlex.split(printed)[1:])
    assert gone_on.exit_code == 0, gone_on.output
    assert "warning the loss is NaN" in gone_on.output
    assert Path("kg/report.html").is_file()


def test_a_run_is_a_recipe(invoke, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first = invoke("train", *TINY, "--out", "runs/x")
    assert first.exit_code == 0
    assert re.search(r"^last \(default\) .*\n", first.output, re.MULTILINE)
    again = invoke("train", "runs/x")
    assert again.output.splitlines()[:2] == [
        "runs/x is a run: its settings are trained anew, in runs/x-2",
        "runs/x-2: digits on cpu",
    ]
    one, other = (Path(folder, "last.safetensors").read_bytes() for folder in ("runs/x", "runs/x-2"))
    assert one == other
    log = Path("runs/x/metrics.jsonl")
    log.write_text("".join(line for line in log.read_text().splitlines(True) if '"end"' not in line))
    assert invoke("train", "runs/x", "--resume").output.splitlines()[-1] == "report  runs/x/report.html"
    assert RunFolder(Path("runs/x")).finished


def test_a_file_is_a_recipe(invoke, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shown = invoke("train", *TINY, "--show", "--epochs", 2, "--eps", "8/255").output
    Path("mine.yaml").write_text(shown)
    Path("part.yaml").write_text("recipe: digits\nmethod: {eps: 8/255}\noptimizer: {lr: 1e-3}\n")
    Path("own.yaml").write_text("method: {eps: 8/255}\n")
    assert yaml.safe_load(invoke("train", "mine.yaml", "--show").output) == yaml.safe_load(shown)
    part = yaml.safe_load(invoke("train", "part.yaml", "--show").output)
    assert (part["method"]["eps"], part["optimizer"]["lr"]) == (8 / 255, 1e-3)
    assert (part["optimizer"]["name"], part["training"]["epochs"]) == ("adam", 40)  # of the recipe
    assert yaml.safe_load(invoke("train", "own.yaml", "--show").output)["recipe"] == "own.yaml"
    done = invoke("train", "mine.yaml")
    assert done.output.splitlines()[0] == "runs/mine: digits on cpu"


@pytest.mark.parametrize("file", ["own.yaml", "gone.yaml"])
def test_the_printed_command_goes_on_with_a_file(invoke, tmp_path, monkeypatch, file):
    monkeypatch.chdir(tmp_path)
    Path(file).write_text(invoke("train", *TINY, "--show").output.replace("recipe: digits", "recipe: mine"))
    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "take", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        if file == "gone.yaml":
            patched.setattr(run_module, "check_folder", lambda *_, **__: Path(file).unlink() or False)
        stopped = invoke("train", file, "--seed", 3)
    command = stopped.output.splitlines()[-1].split()
    expected = "train own.yaml --set training.seed=3" if file == "own.yaml" else "train runs/gone"
    assert " ".join(command) == f"bullettrain {expected} --out runs/{file[:-5]} --resume"
    done = invoke(*command[1:])
    assert done.exit_code == 0, done.exception
    assert RunFolder(Path("runs", file[:-5])).config().training.seed == 3


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "my.yaml is missing; give a recipe, a YAML file or a run's folder"),
        ("training: {epochs: many}", "my.yaml: training.epochs is 'many'; it has to be a whole number"),
        ("training: {epoch: 3}", "my.yaml: there is no setting 'training.epoch'; .*did you mean 'epochs'"),
        ("- 3", "my.yaml: it is .3.; it has to be a section of keys"),
        ("{a: [", "my.yaml cannot be read as YAML .*; give a recipe, a YAML file or a run's folder"),
        ("recipe: 3", "my.yaml: recipe is 3; it has to be text"),
    ],
)
def test_files_that_are_no_recipe(invoke, tmp_path, monkeypatch, text, said):
    monkeypatch.chdir(tmp_path)
    if text is not None:
        Path("my.yaml").write_text(text)
    with pytest.raises(ValueError, match=said) as refused:
        raise invoke("train", "my.yaml").exception
    assert "\n" not in str(refused.value)
    assert not Path("runs").exists()


def test_settings_that_have_an_option(invoke):
    words = ["--data", "cifar100", "--network", "wrn-28-10", "--epochs", 3, "--batch-size", 64, "--lr", "1/4"]
    shown = yaml.safe_load(invoke("train", "cifar10-trades", *words, "--eps", "4/255", "--show").output)
    assert (shown["data"]["name"], shown["network"]["name"], shown["method"]["eps"]) == (
        "cifar100",
        "wrn-28-10",
        4 / 255,
    )
    assert (shown["training"]["epochs"], shown["training"]["batch_size"], shown["optimizer"]["lr"]) == (3, 64, 0.25)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("train --weight-decay 1e-4", "No such option: --weight-decay; did you mean --set weight_decay=1e-4?"),
        ("train --momentum=0.8", "did you mean --set method.momentum=0.8 or --set optimizer.momentum=0.8?"),
        ("train --gama --show", "No such option: --gama; did you mean --set gamma=VALUE?"),
        ("train --epoch 3", "No such option: --epoch; did you mean --epochs?"),
        ("train --learning-rate 0.1", "No such option: --learning-rate; did you mean --lr?"),
        ("train --wd 5e-4", "No such option: --wd; did you mean --set weight_decay=5e-4?"),
        ("bench --epochs 3", "No such option: --epochs; did you mean --set epochs=3?"),
        ("bench --step 3", "No such option: --step; did you mean --steps?"),
        ("reproduce fig-nr --epochs=3", "No such option: --epochs; did you mean --set epochs=3?"),
        ("evaluate run --size 100", "No such option: --size; did you mean --images?"),
        ("evaluate run --curve-size=9", "No such option: --curve-size; did you mean --curve-images?"),
        ("evaluate run --again", "No such option: --again; did you mean --overwrite?"),
        ("evaluate run --momentum 3", "No such option: --momentum ╰"),
        ("reproduce --size 100", "No such option: --size; did you mean --images?"),
        ("reproduce --pace", "No such option: --pace; did you mean --timing?"),
        ("export run --weight last", "No such option: --weight; did you mean --weights?"),
        ("data corrupt --data cifar10", "No such option: --data; did you mean --dataset or --data-dir?"),
        ("train --nothing", "No such option: --nothing ╰"),
    ],
)
def test_an_unknown_option_is_told_what_may_have_been_meant(invoke, words, said):
    done = invoke(*words.split())
    assert done.exit_code == 2
    assert said in " ".join(plain(done.output).replace("│", " ").split())


def test_every_setting_says_what_it_is(invoke):
    from bullettrain.config.describe import meanings, sections

    for name, kind in sections().items():
        assert list(meanings(kind)) == [field.name for field in dataclasses.fields(kind)], name
    shown = invoke("train", "--show").output
    assert "  # Attack steps for boundary examples; for other allocations, the most steps.\n  boundary: 10\n" in shown


def test_the_page_of_settings_is_up_to_date():
    from bullettrain.config.describe import page

    kept = Path(__file__).resolve().parent.parent / "docs" / "settings.md"
    assert kept.read_text(encoding="utf-8") == page(), "run python docs/settings_page.py"


@pytest.mark.parametrize("words", [["--out", "none"], [], ["--compare"]])
def test_what_is_not_there_cannot_be_resumed(invoke, tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RunError, match="is not there, so there is nothing to resume; check --out"):
        raise invoke("train", *TINY, *words, "--resume").exception
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("words", "name"), [([], "digits"), (["--compare"], "digits-compare")], ids=["one", "both"])
def test_an_unfinished_run_of_other_settings_is_passed_over(invoke, tmp_path, monkeypatch, words, name):
    monkeypatch.chdir(tmp_path)
    broken = ["train", *TINY, *words, "--set", "lr=1e30", "--set", "optimizer.name=sgd", "--set", "log_every=1"]
    assert invoke(*broken).exit_code == 1
    other = invoke("train", *TINY, *words)
    assert other.exit_code == 0, other.output
    assert other.output.splitlines()[-1] == f"report  runs/{name}-2/report.html"
    with pytest.raises(RunError, match=f"runs/{name} holds an unfinished"):  # one of the same settings is not
        raise invoke(*broken).exception
    gone_on = invoke(*broken, "--resume", "--keep-going")
    assert gone_on.output.splitlines()[-1] == f"report  runs/{name}/report.html"


def test_an_unfinished_run_is_found_to_resume_behind_one_of_other_settings(invoke, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for seed in (1, 2):
        RunFolder(Path("runs", "digits" if seed == 1 else "digits-2")).create(
            recipe("digits").with_settings([*TINY[1::2], f"seed={seed}"]), {}
        )
    gone_on = invoke("train", *TINY, "--seed", "1", "--resume")
    assert gone_on.output.splitlines()[-1] == "report  runs/digits/report.html"
    with pytest.raises(RunError, match=r"runs/digits-2 cannot be resumed with a changed configuration: training\.seed"):
        raise invoke("train", *TINY, "--seed", "3", "--resume").exception
    Path("runs/digits-2/config.yaml").write_text("nonsense")
    assert invoke("train", *TINY, "--seed", "2").output.splitlines()[-1] == "report  runs/digits-3/report.html"


def test_what_the_encoding_lacks_is_replaced(tmp_path):
    done = command("reproduce", cwd=tmp_path, env={"PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stderr) == (0, "")
    assert "Accuracy and speed-up over ?" in done.stdout


def test_data_list_and_verify(invoke, real_data):
    listed = plain(invoke("data", "list", "--data-dir", real_data).output)
    assert re.search(r"cifar10 +here", listed)
    verified = invoke("data", "verify", "mnist", "--data-dir", real_data)
    assert verified.exit_code == 0
    assert plain(verified.output).count("ok ") == 4


def test_verify_fails_where_files_are_missing(invoke, tmp_path):
    verified = invoke("data", "verify", "mnist", "--data-dir", tmp_path)
    assert verified.exit_code == 2
    command = f"bullettrain data prepare mnist --data-dir {tmp_path}"
    assert verified.output.splitlines()[-1] == f"download what is missing or wrong with: {command}"
    listed = " ".join(invoke("data", "list", "--data-dir", tmp_path).output.split())
    assert f"28x28 grey; get it with: {command}" in listed


def test_options_have_one_name_in_small_letters():
    """Typer 0.27 makes the name of an option that has none of its metavar: `--ATTACK`; a flag needs no `--no-`."""
    for words in HELPED:
        command = typer.main.get_command(app)
        for word in words.split():
            command = command.commands[word]
        names = [
            (*option.opts, *option.secondary_opts) for option in command.params if option.param_type_name == "option"
        ]
        assert all(re.fullmatch("--[a-z]+(-[a-z]+)*", name) for (name,) in names), words
