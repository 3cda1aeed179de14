"""How steps are taken, through the whole command: by several processes, accumulated, in groups."""

import copy
import math
import os
import signal

import pytest
import torch
import torch.multiprocessing

import bullettrain as bt
from bullettrain.evaluation import clean_accuracy
from bullettrain.run_folder import read_weights
from bullettrain.training import run as runs
from bullettrain.training.optimizer import MovingAverage
from bullettrain.training.setup import load_data
from conftest import norm_net
from emulated import EmulatedRunner
from short_runs import CPU, free_port, kinds, small

# ------------------------------------------------------------------------------------ several processes


def spawned(rank, port, folder, settings):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), LOCAL_RANK=str(rank))
    os.environ["WORLD_SIZE"] = "2"
    torch.set_num_threads(1)
    from bullettrain.processes import find_place, leave_group

    place = find_place("cpu")
    runs.train(small("optimizer.name=sgd", *settings), folder, place)
    leave_group()


def by_two_processes(folder, settings):
    torch.multiprocessing.spawn(spawned, args=(free_port(), folder, settings), nprocs=2)


def stopped_at_the_end_of_an_epoch(rank, port, folder):
    """Train whole, and stopped by a signal to the first process after the last step of an epoch, then resumed."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), LOCAL_RANK=str(rank))
    os.environ["WORLD_SIZE"] = "2"
    torch.set_num_threads(1)
    from bullettrain.processes import find_place, leave_group

    place, config = find_place("cpu"), small("data.validation=0", "training.probe=0", "log_every=50", "epochs=2")
    runs.train(config, folder / "whole", place)
    taken, take = [0], runs.Trainer.take

    def stopping(*args):
        out = take(*args)
        taken[0] += 1
        if taken[0] == 6 and place.first:  # 300 images in batches of 50
            signal.raise_signal(signal.SIGINT)
        return out

    runs.Trainer.take = stopping
    assert not runs.train(config, folder / "stopped", place).finished
    runs.Trainer.take = take
    assert runs.train(config, folder / "stopped", place, resume=True).finished
    leave_group()


def test_sums_of_all_processes_outlive_a_stop(tmp_path):
    torch.multiprocessing.spawn(stopped_at_the_end_of_an_epoch, args=(free_port(), tmp_path), nprocs=2)
    (whole,), (stopped,) = (kinds(tmp_path / name, "end") for name in ("whole", "stopped"))
    for name in ("examples", "work", "outlier", "boundary"):
        assert stopped[name] == whole[name]
    losses = [[record["loss"] for record in kinds(tmp_path / name, "epoch")] for name in ("whole", "stopped")]
    assert losses[0] == losses[1]


# SGD: Adam turns the rounding of a gradient near 0 into a whole step.
@pytest.mark.parametrize(
    "settings",
    [
        ("optimizer.name=sgd",),
        ("optimizer.name=sgd", "accumulate=2", "objective=mart"),
        ("optimizer.name=sgd", "leave_out=0.5"),
    ],
)
def test_two_processes_train_what_one_trains(tmp_path, settings):
    by_two_processes(tmp_path / "two", settings)
    one = runs.train(small("optimizer.name=sgd", *settings), tmp_path / "one", CPU)
    for name in ("last", "averaged"):
        mine, theirs = (read_weights(tmp_path / n / f"{name}.safetensors")[0] for n in ("one", "two"))
        for key, value in mine.items():
            assert torch.allclose(value, theirs[key], atol=2e-5), key
    a, b = kinds(tmp_path / "one", "epoch"), kinds(tmp_path / "two", "epoch")
    assert [r["outlier"] for r in a] == pytest.approx([r["outlier"] for r in b], abs=0.01)
    assert [r["loss"] for r in a] == pytest.approx([r["loss"] for r in b], rel=1e-3)
    if "leave_out=0.5" in settings:
        assert [r["left_out"] > 0 for r in a] == [False, True, False]
        assert [r["left_out"] for r in a] == pytest.approx([r["left_out"] for r in b])
    assert [r["robust_fraction"] for r in a] == pytest.approx([r["robust_fraction"] for r in b], abs=0.01)
    assert one.end["work"] == pytest.approx(kinds(tmp_path / "two", "end")[0]["work"], rel=0.02)


def test_the_reported_accuracy_is_that_of_the_saved_weights(tmp_path):
    """With batch norm every process has statistics of its own while it trains."""
    settings = (
        "network.name=wrn-10-1",
        "epochs=2",
        "data.validation=0",
        "training.probe=0",
        "evaluation.batch_size=30",
    )
    by_two_processes(tmp_path / "two", settings)
    test = load_data(small(*settings), None)[2]
    for name in ("last", "averaged"):
        said = [e for e in kinds(tmp_path / "two", "evaluation") if (e["weights"], e["attack"]) == (name, "clean")]
        network = bt.load(tmp_path / "two", weights=name)
        assert said[0]["accuracy"] == clean_accuracy(network, test, device=CPU.device)


# ------------------------------------------------------------------------------ accumulation and groups


def test_accumulation_updates_once_a_group(tmp_path, monkeypatch):
    updates, original = [0], torch.optim.Adam.step

    def step(self, *args, **kwargs):
        updates[0] += 1
        return original(self, *args, **kwargs)

    monkeypatch.setattr(torch.optim.Adam, "step", step)
    runs.train(small("accumulate=2", "epochs=2"), tmp_path / "run", CPU)
    assert updates[0] == 2 * 3 + 1  # five batches an epoch: groups of 2, 2 and 1; and the warm-up


def test_a_group_of_one_trains_what_the_plain_engine_trains(tmp_path, whole):
    """The group engine at once, through the whole command."""
    config = small("attack_group=2")
    runs.train(config, tmp_path / "two", CPU)
    ours, theirs = kinds(tmp_path / "two", "end")[0], kinds(whole, "end")[0]
    assert ours["plain_work"] == theirs["plain_work"]
    assert ours["work"] == pytest.approx(theirs["work"], rel=0.2)


# ------------------------------------------------------------------------------------------- the average


def wandering(steps, seed=0):
    """A network with batch norm after each of some updates; the same module each time."""
    torch.manual_seed(seed)
    network = norm_net()
    for _ in range(steps):
        with torch.no_grad():
            for t in (*network.parameters(), *network.buffers()):
                t.add_(torch.randn_like(t) if t.is_floating_point() else 100)
        yield network


@pytest.mark.parametrize("decay", [0.75, 0.999])
def test_the_average_keeps_less_of_its_first_updates(decay):
    """Weights and statistics, each update by itself: n / (n + 9) of them, and never more than the decay."""
    average = MovingAverage(norm_net(), decay)
    for n, network in enumerate(wandering(40)):
        before = [t.double() for t in average.module.state_dict().values()]
        average.move(network)
        kept = min(decay, n / (n + 9))
        pairs = zip(before, network.state_dict().values(), strict=True)
        expected = [kept * old + (1 - kept) * new.double() if new.is_floating_point() else new for old, new in pairs]
        for mine, value in zip(average.module.state_dict().values(), expected, strict=True):
            assert mine.is_floating_point() or mine.item() == value.item()
            assert not mine.is_floating_point() or torch.allclose(mine.double(), value, atol=1e-5)
        if n == 0:
            assert all(torch.equal(t, network.state_dict()[key]) for key, t in average.module.state_dict().items())
    assert average.n_averaged == 40


def test_a_replayed_average_is_one_moved_at_once_and_goes_on_where_it_was():
    """As a CUDA graph would hold it; resumed after 7 updates, where what it keeps still grows."""
    plain, cut = MovingAverage(norm_net(), 0.6), MovingAverage(norm_net(), 0.6)
    runner = EmulatedRunner(lambda: [*cut.parameters(), *cut.buffers()])
    averages = []

    def move():
        averages[-1][0].move(averages[-1][1])

    for n, network in enumerate(wandering(20)):
        if n == 7:
            saved, cut = copy.deepcopy(cut.state_dict()), MovingAverage(norm_net(), 0.6)
            cut.load_state_dict(saved)
            runner.forget()
        plain.move(network)
        averages.append((cut, network))
        runner(move)
        for (key, mine), expected in zip(cut.state_dict().items(), plain.state_dict().values(), strict=True):
            assert torch.equal(mine, expected), (n, key)


def test_after_thirty_epochs_the_average_is_what_a_steady_decay_makes():
    class Number(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))

    network, updates, steady = Number(), 30 * 391, 0.0
    average = MovingAverage(network, 0.999)
    for n in range(updates):  # falls as losses do, and swings
        now = (1 + n / 100) ** -0.5 + 0.1 * math.sin(n)
        network.weight.data.fill_(now)
        average.move(network)
        steady = now if n == 0 else 0.999 * steady + 0.001 * now
    assert average.module.weight.item() == pytest.approx(steady, abs=5e-4)


def test_the_average_of_a_short_run_has_learned_what_the_run_has(tmp_path):
    result = runs.train(small("training.average=0.999", "epochs=10"), tmp_path / "run", CPU)
    last, averaged = (result.accuracy[name]["clean"] for name in ("last", "averaged"))
    assert averaged > last - 0.1 > 0.5


# ----------------------------------------------------------------------------------- what cannot be had


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (("engine=graphs",), "CUDA graphs are off, steps run one by one: there is no CUDA device"),
        (("attack_group=2", "accumulate=2"), "mini-batches are attacked one by one: gradients are accumulated"),
    ],
)
def test_what_the_fast_engine_cannot_do_is_said_in_a_line_and_kept(tmp_path, caplog, settings, line):
    caplog.set_level("INFO", "bullettrain")
    assert runs.train(small("epochs=1", *settings), tmp_path / "run", CPU).finished
    assert caplog.messages[0] == line
    assert [record["message"] for record in kinds(tmp_path / "run", "note")] == [line]
