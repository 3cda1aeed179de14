"""`bullettrain bench` on the CPU: the figures belong together; how fast it is, is not tested."""

import importlib
import json
import re
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from bullettrain.cli.app import app
from bullettrain.cli.bench import markdown, noise_notes, verdicts
from bullettrain.config import ConfigError, recipe
from bullettrain.history import History
from bullettrain.mining import Category
from bullettrain.processes import Place
from bullettrain.run_folder import SHARES, RunError
from bullettrain.training.bench import bench
from bullettrain.training.setup import load_data
from bullettrain.training.steps import Stepper
from bullettrain.training.timing import Imposed

CPU = Place(torch.device("cpu"))


def test_rows_belong_together(caplog):
    config = recipe("digits").with_settings(["data.train_size=200", "data.validation=0", "training.batch_size=40"])
    data = load_data(config, None)
    caplog.set_level("INFO", "bullettrain")
    result = bench(config, CPU, data, engines=["eager"], train_steps=6, steps=3, repeats=2)
    baseline, mined = result["rows"]
    assert (baseline["method"], mined["method"]) == ("baseline", "bullettrain")
    assert baseline["work"] == 27
    assert mined["work_speedup"] == pytest.approx(27 / mined["work"])
    assert mined["wall_clock_speedup"] == pytest.approx(baseline["step_ms"] / mined["step_ms"])
    assert baseline["epoch_seconds"] == pytest.approx(baseline["step_ms"] / 1000 * 5)
    assert mined["outlier"] + mined["boundary"] + mined["robust"] == pytest.approx(1)
    assert result["environment"]["torch"] == torch.__version__
    assert len(caplog.messages) == 3
    assert result["notes"] == {"eager": []}
    table = markdown(result).splitlines()
    assert len(table) == 4
    plain, own = (dict(zip(baseline, map(str.strip, line.split("|")[1:]), strict=False)) for line in table[2:])
    assert {plain[share] for share in SHARES} == {""}
    assert own["boundary"] == f"{100 * mined['boundary']:.1f} %"
    assert own["work_speedup"] == f"{mined['work_speedup']:.2f}×"
    assert all(line.count("|") == len(baseline) + 1 for line in table)
    history = config.with_settings(["allocation=history", "robust=1"])
    with pytest.raises(ConfigError, match="allocation=history needs a history of the examples"):
        bench(history, CPU, data, engines=["eager"], train_steps=6, steps=3, repeats=1)
    assert bench(history, CPU, data, engines=["eager"], train_steps=10, steps=3, repeats=1)["rows"][0]["work"] == 27
    with pytest.raises(ConfigError, match="eager, graphs, compile"):
        bench(config, CPU, data, engines=["eagre"], train_steps=1, steps=1, repeats=1)


@pytest.mark.parametrize(("own", "said"), [(5.0, "2.00× faster"), (20.0, "2.00× slower")])
def test_how_much_faster_is_said(own, said):
    rows = [{"engine": "eager", "step_ms": 10.0}, {"step_ms": own, "wall_clock_speedup": 10.0 / own}]
    (sentence,) = verdicts({"rows": rows})
    assert (
        sentence
        == f"eager: by the clock BulletTrain is {said} than its baseline ({own:.2f} ms instead of 10.00 a step)"
    )


def test_what_takes_long_is_said_before_it_does(monkeypatch, caplog):
    monkeypatch.setattr("bullettrain.training.bench.LONG_SECONDS", 0.0)
    config = recipe("digits").with_settings(["data.train_size=200", "data.validation=0", "training.batch_size=40"])
    caplog.set_level("INFO", "bullettrain")
    bench(config, CPU, load_data(config, None), engines=["eager"], train_steps=3, steps=1, repeats=1)
    assert re.match(
        r"about .* s of training, and then the timing: --train-steps, --steps and --repeats", caplog.messages[1]
    )


def test_a_checkpoint_that_does_not_fit(tmp_path, robust_run):
    config = recipe("digits").with_settings(["data.train_size=200", "data.validation=0"])
    settings = {"engines": ["eager"], "train_steps": 1, "steps": 1, "repeats": 1}
    other = config.with_settings(["network.name=wrn-10-1"])
    with pytest.raises(RunError, match=r"last\.safetensors does not fit wrn-10-1: Missing key.* \"block1"):
        bench(other, CPU, load_data(config, None), checkpoint=robust_run, **settings)
    (tmp_path / "text.pt").write_text("no weights")
    with pytest.raises(RunError, match=r"text\.pt is not a checkpoint: it is neither"):
        bench(config, CPU, load_data(config, None), checkpoint=tmp_path / "text.pt", **settings)


def test_shares_can_be_imposed():
    category = Imposed((0.18, 0.28, 0.54))(torch.randn(100), 0.5)
    assert [int((category == c).sum()) for c in Category] == [18, 28, 54]
    several = Imposed((0.18, 0.28, 0.54))(torch.randn(3, 100), 0.5)  # each mini-batch by itself
    assert [(several == c).sum(dim=1).tolist() for c in Category] == [[18] * 3, [28] * 3, [54] * 3]


MISTAKES = {
    "a folder": ("adir", "--out adir: give a JSON file"),
    "a folder for the table": ("taken.json", "--out taken.json: give a JSON file"),
    "the table": ("figures.md", "--out figures.md: give a JSON file"),
    "in a file": ("afile/x.json", "--out cannot be written (afile: File exists); choose another --out"),
    "deeper in a file": ("afile/y/x.json", "--out cannot be written (afile/y: Not a directory); choose another --out"),
    "in no file system": ("/proc/x.json", "--out cannot be written (/proc"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_where_nothing_can_be_written_nothing_is_timed(tmp_path, monkeypatch, mistake):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "adir").mkdir()
    (tmp_path / "taken.md").mkdir()
    (tmp_path / "afile").touch()
    module = importlib.import_module("bullettrain.training.bench")
    monkeypatch.setattr(module, "bench", lambda *args, **kwargs: pytest.fail("it has begun"))
    out, message = MISTAKES[mistake]
    with pytest.raises(ConfigError, match=re.escape(message)):
        raise CliRunner().invoke(app, ["bench", "--out", out]).exception
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adir", "afile", "taken.md"]


@pytest.mark.parametrize("words", ["--train-steps -5", "--steps 0", "--repeats 0"])
def test_counts_that_cannot_be(words):
    done = CliRunner(env={"COLUMNS": "120", "NO_COLOR": "1", "TERM": "dumb"}).invoke(app, ["bench", *words.split()])
    assert done.exit_code == 2
    assert f"Invalid value for '{words.split()[0]}'" in done.output


@pytest.mark.parametrize("shares", ["0.5,0.5", "0.5,0.6,0.5", "-0.5,1,0.5", "nan,0.5,0.5"])
def test_shares_that_cannot_be(shares):
    with pytest.raises(ConfigError, match="give three shares that add up to 1"):
        raise CliRunner().invoke(app, ["bench", f"--shares={shares}"]).exception


def test_last_logits_are_known_after_an_epoch(tmp_path):
    small = [f"--set={setting}" for setting in ("selection=last", "data.train_size=200", "data.validation=0")]
    words = ["bench", "digits-augmix", *small, "--steps=1", "--repeats=1", f"--out={tmp_path / 'figures.json'}"]
    with pytest.raises(ConfigError, match="give --shares, or two epochs of training first, --train-steps 2"):
        raise CliRunner().invoke(app, [*words, "--train-steps=0"]).exception
    done = CliRunner().invoke(app, [*words, "--train-steps=4"])
    assert done.exit_code == 0, done.output
    _, mined = json.loads((tmp_path / "figures.json").read_text())["rows"]
    assert mined["work"] == pytest.approx(3 + 6 * mined["boundary"])


def test_cases_begin_with_the_trained_states_scores_and_go_on_with_the_right_examples(monkeypatch):
    settings = ["selection=last", "data.train_size=200", "data.validation=0", "training.batch_size=40"]
    config = recipe("digits-augmix").with_settings(settings)
    data, begun = load_data(config, None), []
    load, take = History.load_state_dict, Stepper.take

    def loaded(history, state):
        load(history, state)
        begun.append(bool(history.visits.all()))

    def taken(stepper, batches, rate):
        for _, y, _, index in batches:
            assert index is None or torch.equal(data[0].labels[index], y)
        return take(stepper, batches, rate)

    monkeypatch.setattr(History, "load_state_dict", loaded)
    monkeypatch.setattr(Stepper, "take", taken)
    options = {"engines": ["eager"], "train_steps": 10, "steps": 2, "repeats": 2}
    bench(config, CPU, data, **options)
    assert begun == [True, True]
    with pytest.raises(ConfigError, match="weights do not hold: give --shares, or leave --checkpoint out"):
        bench(config, CPU, data, **options, checkpoint=Path("x"))


def test_the_command_writes_json_and_markdown(tmp_path):
    words = [
        "bench",
        "--set",
        "data.train_size=200",
        "--set",
        "data.validation=0",
        "--train-steps",
        "2",
        "--steps",
        "1",
    ]
    words += ["--repeats", "1", "--shares", "0.2,0.3,0.5", "--out", str(tmp_path / "figures.json")]
    done = CliRunner(env={"COLUMNS": "80"}).invoke(app, words)
    assert done.exit_code == 0, done.output
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["shares"] == "imposed"
    assert (tmp_path / "figures.md").read_text().startswith("| engine |")
    table = done.output[done.output.index("engine") :].partition("eager: by the clock")[0]
    assert re.search(r"^wall clock speedup +\d+\.\d\d× *$", table, re.MULTILINE)
    assert "memory" not in table  # which a CPU does not tell: rows without figures are left out
    assert max(len(line) for line in table.splitlines()) <= 80


def test_what_is_timed_is_tuned_at_once(monkeypatch):
    """Also by the training before it: in a process the first choice of a convolution stays."""
    module, seen = importlib.import_module("bullettrain.training.bench"), []
    make = module.Trainer
    monkeypatch.setattr(
        module,
        "Trainer",
        lambda config, *rest: seen.append(config.training.cudnn_benchmark_after) or make(config, *rest),
    )
    config = recipe("digits").with_settings(["data.train_size=200", "data.validation=0", "training.batch_size=40"])
    bench(config, CPU, load_data(config, None), engines=["eager"], train_steps=2, steps=1, repeats=1)
    assert config.training.cudnn_benchmark_after > 0
    assert seen
    assert set(seen) == {0.0}


def test_timings_that_vary_as_much_as_they_differ_are_noted():
    def rows(engine: str, spread: float) -> list[dict[str, object]]:
        return [{"engine": engine, "step_ms": ms, "spread_ms": spread} for ms in (10.0, 8.0)]

    result = {"rows": [*rows("eager", 2.0), *rows("graphs", 1.9)]}
    (note,) = noise_notes(result)
    assert note.startswith("eager: timings vary by 2.00 ms, and the difference is 2.00 ms: too close to tell;")
