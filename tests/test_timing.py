"""`reproduce --timing`: runs that shared a device are timed one after the other, and what goes wrong stays small."""

import pytest

from bullettrain.config.settings import ConfigError
from bullettrain.reproduction import runs
from bullettrain.reproduction.records import read_records
from test_reproduce import FAST, invoke


def test_runs_that_shared_a_device_are_timed_afterwards(tmp_path):
    words = ("plane", "--rows", "bt-nr2,free", "--out", tmp_path, *FAST)
    invoke(*words, "--train-only")
    before = read_records(tmp_path / "records")
    for record in before.values():
        record.jobs = 3
        record.write(tmp_path / "records")
        assert record.timed_seconds is None
    text = invoke(*words, "--timing", columns=300)
    assert "2 finished runs: 2 to be timed" in text
    assert text.count("s an epoch") == 2
    records = read_records(tmp_path / "records")
    for name, record in records.items():
        assert record.figures == before[name].figures
        found, training = record.timing, record.config["training"]
        steps = training["replays"] * 150 / training["batch_size"]
        assert found["epoch_seconds"] == pytest.approx(found["step_ms"] / 1000 * steps)
        assert record.timed_seconds == found["epoch_seconds"] * record.epochs
        assert found["environment"]["device"]
        assert found["spread_ms"] >= 0
    invoke(*words, "--tables")  # what is taken up from a run's folder leaves the timing
    page = (tmp_path / "plane.md").read_text()
    assert page.count("Seconds are of steps that were timed afterwards") == 1
    assert {name: one.timing for name, one in read_records(tmp_path / "records").items()} == {
        name: one.timing for name, one in records.items()
    }
    with pytest.raises(ConfigError, match="--timing and --dry-run do not go together"):
        invoke(*words, "--timing", "--dry-run")


def test_runs_that_cannot_be_timed_do_no_harm_to_the_others(tmp_path):
    """One whose data is not there, one whose settings make no sense any more, one whose classes are an oracle's."""
    invoke("plane", "--rows", "trades,bt-nr2", "--out", tmp_path, *FAST, "--train-only")
    whole, mined = read_records(tmp_path / "records").values()
    data, method = whole.config["data"], whole.config["method"]
    mined.config["method"]["separation"] = "oracle"
    assert "run it alone" in runs.time_run(mined, tmp_path / "records").problem
    whole.config["data"] = {**data, "name": "cifar10"}
    assert "cifar10" in runs.time_run(whole, tmp_path / "records", data_dir=tmp_path).problem
    whole.config["data"], whole.config["method"] = data, {**method, "eps": 7}
    assert "eps is 7" in runs.time_run(whole, tmp_path / "records").problem
    assert not any(record.timing for record in read_records(tmp_path / "records").values())


@pytest.mark.parametrize(
    ("there", "here", "timed"),
    [
        ("abc123", "abc123", True),
        ("abc123", "abc124", False),
        (None, None, False),  # which code that was is not known
        ("abc123-dirty", "abc123-dirty", False),
    ],
)
def test_what_this_code_has_timed_is_not_timed_again(tmp_path, monkeypatch, there, here, timed):
    words = ("plane", "--rows", "trades", "--out", tmp_path, *FAST)
    invoke(*words, "--train-only")
    (record,) = read_records(tmp_path / "records").values()
    monkeypatch.setattr(runs, "environment", lambda device: {**record.environment, "commit": here})
    monkeypatch.setattr(runs, "time_run", lambda one, *arguments: runs.TaskResult(one.name))
    record.timing = {"epoch_seconds": 1.0, "environment": {**record.environment, "commit": there}}
    record.write(tmp_path / "records")
    said = "1 finished run: 0 to be timed, 1 from before" if timed else "1 finished run: 1 to be timed"
    assert said in invoke(*words, "--timing")
