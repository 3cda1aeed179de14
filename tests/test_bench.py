"""`bullettrain bench` on the CPU: the figures belong together; how fast it is, is not tested."""

import json

import pytest
import torch
from typer.testing import CliRunner

from bullettrain.commands import app
from bullettrain.mining import Category
from bullettrain.training import ConfigError, recipe
from bullettrain.training.bench import HEADINGS, Imposed, bench, markdown
from bullettrain.training.folder import RunError
from bullettrain.training.setup import Place, load_data

CPU = Place(torch.device("cpu"))


def test_rows_belong_together():
    config = recipe("digits").with_settings(["data.train_size=200", "data.validation=0", "training.batch_size=40"])
    data = load_data(config, None)
    said = []
    result = bench(config, CPU, data, engines=["eager"], train_steps=6, steps=3, repeats=2, say=said.append)
    baseline, mined = result["rows"]
    assert (baseline["method"], mined["method"]) == ("baseline", "bullettrain")
    assert baseline["work"] == 27
    assert mined["work_speedup"] == pytest.approx(27 / mined["work"])
    assert mined["wall_clock_speedup"] == pytest.approx(baseline["step_ms"] / mined["step_ms"])
    assert baseline["epoch_seconds"] == pytest.approx(baseline["step_ms"] / 1000 * 5)
    assert mined["outlier"] + mined["boundary"] + mined["robust"] == pytest.approx(1)
    assert result["environment"]["torch"] == torch.__version__
    assert len(said) == 3
    assert result["notes"] == {"eager": []}
    table = markdown(result).splitlines()
    assert len(table) == 4
    assert table[0].count("|") == len(HEADINGS) + 1
    with pytest.raises(ConfigError, match="eager, graphs, compile"):
        bench(config, CPU, data, engines=["eagre"], train_steps=1, steps=1, repeats=1)


def test_a_checkpoint_that_does_not_fit(tmp_path, robust_run):
    config = recipe("digits").with_settings(["data.train_size=200", "data.validation=0"])
    settings = {"engines": ["eager"], "train_steps": 1, "steps": 1, "repeats": 1, "say": lambda text: None}
    other = config.with_settings(["network.name=wrn-10-1"])
    with pytest.raises(ConfigError, match=r"last\.safetensors does not fit wrn-10-1: it lacks block1"):
        bench(other, CPU, load_data(config, None), checkpoint=robust_run, **settings)
    (tmp_path / "text.pt").write_text("no weights")
    with pytest.raises(RunError, match=r"text\.pt is no checkpoint: it is a text file"):
        bench(config, CPU, load_data(config, None), checkpoint=tmp_path / "text.pt", **settings)


def test_shares_can_be_imposed():
    category = Imposed((0.18, 0.28, 0.54))(torch.randn(100), 0.5)
    assert [int((category == c).sum()) for c in Category] == [18, 28, 54]
    several = Imposed((0.18, 0.28, 0.54))(torch.randn(3, 100), 0.5)  # each mini-batch by itself
    assert [(several == c).sum(dim=1).tolist() for c in Category] == [[18] * 3, [28] * 3, [54] * 3]


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
    assert "wall-clock ×" in done.output
    table = done.output[done.output.index("engine") :].partition("written")[0]
    assert max(len(line) for line in table.splitlines()) <= 80
