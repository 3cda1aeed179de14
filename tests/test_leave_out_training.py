"""InfoBatch from the command line: what `method.leave_out` builds, and runs whose epochs differ in length."""

import signal

import pytest
import torch

from bullettrain.config import ConfigError
from bullettrain.config.methods import method_name
from bullettrain.data import ImageSet, Loader
from bullettrain.reporting import write_report
from bullettrain.run_folder import RunFolder
from bullettrain.training import minutes
from bullettrain.training import run as runs
from bullettrain.training.setup import load_data
from bullettrain.training.steps import Stepper
from bullettrain.training.timing import Timed
from bullettrain.training.trainer import Trainer
from short_runs import CPU, kinds, small, weights_of

# ------------------------------------------------------------------------------------------------ loaders


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("resident", [True, False])
@pytest.mark.parametrize(("world", "replays"), [(1, 1), (3, 1), (1, 2)])
def test_a_loader_leaves_out_the_others_in_the_same_order(world, replays, resident, shuffle):
    labels = torch.arange(23)
    data = ImageSet(torch.randint(256, (23, 1, 4, 4), dtype=torch.uint8), labels, tuple(map(str, range(23))))
    settings = {"batch_size": 5, "seed": 3, "replays": replays, "resident": resident, "shuffle": shuffle}
    kept = torch.ones(23, dtype=torch.bool)
    kept[[3, 4, 8, 15, 22]] = False
    ranks = [Loader(data, **settings, rank=rank, world=world) for rank in range(world)]
    whole = ranks[0].order(1)
    for loader in ranks:
        loader.keep(kept)
        assert torch.equal(loader.order(1), whole[kept[whole]])
        assert len(loader) == 4 * replays
        assert loader.kept_share == 18 / 23
        for index, (_, y) in enumerate(loader.epoch(1)):
            assert torch.equal(labels[loader.indices(1, index)], y)
    joint = [torch.cat(parts) for parts in zip(*([y for _, y in loader.epoch(1)] for loader in ranks), strict=True)]
    assert torch.equal(torch.cat(joint[::replays]), whole[kept[whole]])
    ranks[0].keep(torch.ones(23, dtype=torch.bool))
    assert torch.equal(ranks[0].order(1), whole)
    assert (len(ranks[0]), ranks[0].kept_share) == (5 * replays, 1)


# ------------------------------------------------------------------------------------------------ runs

LEFT_OUT = ("epochs=8", "training.batch_size=20", "leave_out=0.5", "schedule.name=cosine", "optimizer.lr=0.01")


@pytest.mark.parametrize(
    "settings",
    [
        (),
        ("leave_out_by=chance",),
        ("objective=pgd-at", "beta=null", "boundary=2", "robust=2", "outlier=2", "attack_group=2"),
        ("objective=augmix", "boundary=1", "robust=0", "eps=0.031", "beta=null"),
        ("allocation=history", "objective=mart", "clean_warmup=0.1"),
    ],
    ids=str,
)
def test_a_run_leaves_examples_out_and_counts_what_was_done(tmp_path, settings):
    config = small(*LEFT_OUT, *settings)
    trainer = Trainer(config, RunFolder(tmp_path), CPU, load_data(config, None))
    take, rates, passes = trainer.stepper.take, [], 0.0

    def watched(unit, rate):
        rates.extend(rate(i) for i in range(len(unit)))
        for _, y, _, index in unit:
            assert torch.equal(trainer.loader.data.labels[index], y)
            assert (trainer.engine.history.weight[index] > 0).all()
        return take(unit, rate)

    def output(out, keep=trainer.stepper.on_output):
        nonlocal passes
        passes += out.work.total
        keep(out)

    trainer.stepper.take, trainer.stepper.on_output = watched, output
    assert trainer.run() == "finished"
    epochs, (end,) = kinds(tmp_path, "epoch"), kinds(tmp_path, "end")
    steps = [b["step"] - a["step"] for a, b in zip([{"step": 0}, *epochs], epochs, strict=False)]
    assert steps[0] == steps[-1] == 12
    assert min(steps) < 12
    assert [epoch["left_out"] for epoch in epochs] == pytest.approx([(12 - n) / 12 for n in steps])
    assert int(trainer.engine.history.visits.sum()) == sum(steps) * 20
    assert end["examples"] == 8 * 240
    assert end["work"] == pytest.approx(passes / (8 * 240))
    assert end["theoretical_speedup"] is None
    assert end["work_speedup"] == pytest.approx(end["plain_work"] / end["work"])
    # The learning rate falls by the epoch as in a whole run, whatever the number of steps.
    assert rates == sorted(rates, reverse=True)
    firsts = [rates[sum(steps[:epoch])] for epoch in range(8)]
    assert firsts == pytest.approx([trainer.rate(12 * epoch) for epoch in range(8)])
    assert kinds(tmp_path, "step")[-1]["epoch"] == 8
    assert trainer.display.position == 8 * 12


def test_work_falls_with_what_is_left_out(tmp_path):
    """Nine passes of an example in uniform PGD-AT, and none if it is left out."""
    settings = ("objective=pgd-at", "beta=null", "boundary=3", "robust=3", "outlier=3")
    assert runs.train(small(*LEFT_OUT, *settings), tmp_path / "run", CPU).finished
    epochs = kinds(tmp_path / "run", "epoch")
    assert [epoch["work"] for epoch in epochs] == pytest.approx([9 * (1 - epoch["left_out"]) for epoch in epochs])
    assert min(epoch["work"] for epoch in epochs) < 8
    write_report(tmp_path / "run")
    assert "PGD-AT, leaving out 0.5" in (tmp_path / "run" / "report.html").read_text()


@pytest.mark.parametrize(
    ("settings", "at"), [((), 20), (("leave_out_by=chance",), 15), (("attack_group=2", "training.batch_size=10"), 17)]
)
def test_a_run_resumes_in_the_middle_of_an_epoch_bit_for_bit(tmp_path, monkeypatch, settings, at):
    config = small(*LEFT_OUT, "epochs=4", *settings)
    assert runs.train(config, tmp_path / "whole", CPU).finished
    calls, original = [0], Stepper.take

    def take(self, *args):
        calls[0] += 1
        if calls[0] == at:
            signal.raise_signal(signal.SIGINT)
        return original(self, *args)

    monkeypatch.setattr(Stepper, "take", take)
    assert runs.train(config, tmp_path / "cut", CPU).reason.startswith("stopped")
    monkeypatch.undo()
    state = RunFolder(tmp_path / "cut").load().state
    assert state["position"]["index"] > 0
    assert (state["engine"]["history"]["weight"] == 0).any()
    assert runs.train(config, tmp_path / "cut", CPU, resume=True).finished
    assert weights_of(tmp_path / "cut") == weights_of(tmp_path / "whole")
    for kind, key in (("step", "step"), ("epoch", "left_out"), ("epoch", "loss"), ("end", "work")):
        cut, whole = ([r[key] for r in kinds(tmp_path / name, kind)] for name in ("cut", "whole"))
        assert cut == whole


def test_the_epochs_of_a_time_limit_expect_it(monkeypatch):
    config = small("leave_out=0.5", "training.batch_size=20")
    monkeypatch.setattr(Timed, "epoch_seconds", 100.0)
    monkeypatch.setattr(minutes, "_seconds", lambda function: 0.0)
    assert minutes.measure(config, CPU, load_data(config, None)).epoch == pytest.approx(100 * (1 - 0.875 * 0.25))


# ------------------------------------------------------------------------------------------------ settings


def test_what_the_settings_build():
    method = small("leave_out=0.3", "leave_out_by=chance").method
    made = method.leaves_out(30, 128, 5)
    assert (made.share, made.epochs, made.until, made.by) == (0.3, 30, 0.875, "chance")
    assert (made.multiple, made.seed) == (128, 5)
    assert method.build(7).history.examples == 7
    assert method_name(vars(method)) == "TRADES, leaving out 0.3 by chance"
    assert small().method.leaves_out(30, 128, 5) is None
    plain = small("leave_out=0.3", "leave_out_by=chance").baseline()
    assert plain == small().baseline()
    assert small("leave_out=0.3").identity() != small().identity()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("leave_out=1",), "method.leave_out is 1"),
        (("leave_out_by=chance",), "nothing is left out: --set leave_out=0.5"),
        (("leave_out=0.5", "leave_out_by=luck"), "leave_out_by"),
        (
            ("leave_out=0.5", "objective=grad-align", "beta=null"),
            "leave_out is 0.5, but grad-align takes none",
        ),
    ],
)
def test_mistakes_are_one_line(settings, message):
    with pytest.raises(ConfigError, match=message) as caught:
        small(*settings)
    assert "\n" not in str(caught.value)


def test_a_run_says_that_groups_are_too_large_to_be_left_out():
    assert small("leave_out=0.5").doubts(240) == []
    (doubt,) = small("leave_out=0.5", "attack_group=2").doubts(240)
    assert "whole groups of 100 images, of 240 probably none" in doubt
