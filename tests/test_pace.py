"""`reproduce --pace`: runs that shared a device are timed one after the other, and what goes wrong stays small."""

import multiprocessing
import threading

import pytest

from bullettrain.reproduction import pace
from bullettrain.reproduction.records import read_records
from bullettrain.training.settings import ConfigError
from test_reproduce import FAST, invoke


def test_runs_that_shared_a_device_are_timed_afterwards(tmp_path):
    words = ("plane", "--rows", "bt-nr2,free", "--out", tmp_path, *FAST)
    invoke(*words, "--train-only")
    before = read_records(tmp_path / "records")
    for record in before.values():
        record.jobs = 3
        record.write(tmp_path / "records")
        assert record.alone is None
    text = invoke(*words, "--pace", "--jobs", 2, columns=300)
    assert "2 finished runs: 2 to be timed" in text
    assert text.count("s an epoch") == 2
    records = read_records(tmp_path / "records")
    for name, record in records.items():
        assert record.figures == before[name].figures
        found, training = record.pace, record.config["training"]
        steps = training["replays"] * 150 / training["batch_size"]
        assert found["epoch_seconds"] == pytest.approx(found["step_ms"] / 1000 * steps)
        assert record.alone == found["epoch_seconds"] * record.epochs
        assert found["environment"]["device"]
        assert found["spread_ms"] >= 0
    again = invoke(*words, "--tables", columns=300)  # what is taken up from a run's folder leaves the pace
    assert again.count("Seconds are of steps that were timed afterwards") == 1
    assert {name: one.pace for name, one in read_records(tmp_path / "records").items()} == {
        name: one.pace for name, one in records.items()
    }
    with pytest.raises(ConfigError, match="--pace goes without"):
        invoke(*words, "--pace", "--dry-run")


def test_runs_that_cannot_be_timed_do_no_harm_to_the_others(tmp_path, monkeypatch):
    """One whose data is gone, one that dies while it is timed, one whose classes are an oracle's."""

    class InThread:
        """A process of its own, as far as this test is concerned."""

        exitcode = -9

        def __init__(self, target, args, daemon):
            def run():
                try:
                    target(*args)
                finally:
                    args[0].end()

            thread = threading.Thread(target=run)
            self.start, self.join, self.terminate = thread.start, thread.join, lambda: None

    class End:
        """The child's end of a pipe, which the parent closes only where both have one."""

        def __init__(self, pipe):
            self.send, self.recv, self.end, self.close = pipe.send, pipe.recv, pipe.close, lambda: None

    def ends():
        mine, theirs = multiprocessing.Pipe()
        return mine, End(theirs)

    class Context:
        Pipe, Process = staticmethod(ends), InThread

    class Quick:
        epoch_seconds = step_ms = 1.0
        spread_ms = 0.0

        def __init__(self, trainer, shares, steps):
            self.dies = trainer.config.method.robust == 2

        def time(self):
            if self.dies:
                raise KeyboardInterrupt

    monkeypatch.setattr(pace.multiprocessing, "get_context", lambda kind: Context)
    monkeypatch.setattr(pace, "Timed", Quick)
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    words = ("plane", "--rows", "trades,bt-nr2,bt-nr0,mart", "--out", tmp_path, *FAST)
    invoke(*words, "--train-only")
    gone, dies, whole, oracle = (
        next(one for one in read_records(tmp_path / "records").values() if f"{part}-o" in one.name)
        for part in ("trades-b10-r10", "trades-b10-r2", "trades-b10-r0", "mart-b10-r10")
    )
    gone.config["data"]["name"] = "cifar10"
    oracle.config["method"] |= {"separation": "oracle", "robust": 2, "outlier": 0}
    found = []
    problems = pace.measure([gone, dies, whole, oracle], pace.How(at_once=4, data_dir=tmp_path), found.append)
    assert found == [whole]
    assert whole.pace["epoch_seconds"] == 1.0
    assert [problem.partition(":")[0] for problem in problems] == [oracle.name, gone.name, dies.name]
    assert "run it alone" in problems[0]
    assert "its process ended with status -9" in problems[2]


@pytest.mark.parametrize(
    ("there", "here", "timed"),
    [
        ("abc123", "abc123", True),
        ("abc123", "abc123def456", True),
        ("abc123", "abc124", False),
        (None, None, False),  # which code that was is not known
        ("abc123-dirty", "abc123-dirty", False),
    ],
)
def test_what_this_code_has_timed_is_not_timed_again(tmp_path, monkeypatch, there, here, timed):
    words = ("plane", "--rows", "trades", "--out", tmp_path, *FAST)
    invoke(*words, "--train-only")
    (record,) = read_records(tmp_path / "records").values()
    monkeypatch.setattr(pace, "environment", lambda device: {**record.environment, "commit": here})
    monkeypatch.setattr(pace, "measure", lambda left, how, found: [])
    record.pace = {"epoch_seconds": 1.0, "environment": {**record.environment, "commit": there}}
    record.write(tmp_path / "records")
    said = "1 finished run: 0 to be timed, 1 from before" if timed else "1 finished run: 1 to be timed"
    assert said in invoke(*words, "--pace")
