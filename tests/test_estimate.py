"""How long a reproduction will take: counted passes, and speed that was measured."""

import pytest

from bullettrain.reproduction import STUDIES
from bullettrain.reproduction.estimate import Estimator, Speed, passes
from bullettrain.reproduction.rows import Task
from bullettrain.reproduction.scales import PAPER, SHORT, SMOKE
from bullettrain.training.folder import environment
from test_reproduction_claims import CPU, ROWS, record


def test_expected_passes_are_counted_ones():
    assert passes(ROWS["trades"].config(PAPER)) == 27
    assert passes(ROWS["bt-nr2"].config(PAPER)) == pytest.approx(1 + 2 * (0.28 * 10 + 0.54 * 2) + 3 * (2 - 0.18))
    oracle = {row.name: row for row in STUDIES["fig-oracle"].rows(SHORT)}
    assert passes(oracle["baseline"].config(SHORT)) == 2 * 7 + 3
    assert passes(oracle["b0-o0-r0"].config(SHORT)) == 3  # nobody is attacked: plain training
    assert passes(oracle["b1-o0-r0"].config(SHORT)) == pytest.approx(1 + 2 * 0.28 + 3 + 21)  # the oracle's ten steps


def test_replays_are_part_of_an_estimate(tmp_path):
    plane = {row.name: row for row in STUDIES["plane"].rows(SHORT)}
    free, once = (plane[name].config(SHORT) for name in ("free", "n-fgsm"))
    estimator = Estimator(CPU, known={}, measured={("preact-resnet-18", "cifar10"): Speed(1000.0, "made up")})
    training, _ = estimator.seconds(Task(free, tmp_path, ("clean",)))
    assert training == pytest.approx(free.training.epochs * 8 * 50000 * 3 / 1000)
    training, _ = estimator.seconds(Task(once, tmp_path, ("clean",)))
    assert training == pytest.approx(30 * 50000 * 5 / 1000)


def test_estimates_come_from_runs_here_then_from_records_then_from_a_measurement(tmp_path, monkeypatch):
    here = environment(CPU.device)["device"]
    config = ROWS["trades"].config(SHORT)
    task = Task(config, tmp_path, ("clean", "pgd20"))
    run = record(ROWS["trades"], seconds=1000.0, device=here)
    estimator = Estimator(CPU, {run.name: run})
    training, judging = estimator.seconds(task)
    assert training == pytest.approx(1000.0)  # the same run takes the same time
    assert judging > 0
    assert estimator.speed(config).source == "1 finished run here"
    monkeypatch.setattr("bullettrain.reproduction.estimate.environment", lambda device: {"device": "NVIDIA H200"})
    recorded = Estimator(CPU).speed(config)
    assert recorded.source == "results/bench/h200-preact-resnet-18-k1.json"
    assert 50000 * 27 / recorded.passes == pytest.approx(6.25, rel=0.01)  # seconds an epoch, as in that file
    mined = ROWS["bt-nr2"].config(SHORT)
    assert 50000 * 15.38 / Estimator(CPU).speed(mined).passes == pytest.approx(4.42, rel=0.01)
    plane = {row.name: row for row in STUDIES["plane"].rows(SHORT)}
    plain = Estimator(CPU).speed(plane["pgd-at"].config(SHORT))
    for name in ("grad-align", "yopo", "free"):  # their passes cost more than plain ones; judged they are as any
        config, estimator = plane[name].config(SHORT), Estimator(CPU)
        assert estimator.speed(config).source.endswith("on record")
        assert estimator.speed(config).passes < 0.8 * plain.passes
        assert estimator.speed(config, judged=True) == plain
    smoke = ROWS["trades"].config(SMOKE)
    assert "here and now" in Estimator(CPU).speed(smoke).source
