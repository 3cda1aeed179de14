"""How steps are taken, through the whole command: by several processes, accumulated, in groups."""

import copy
import os

import pytest
import torch
import torch.multiprocessing

import bullettrain as bt
from bullettrain.evaluation import clean_accuracy
from bullettrain.training import run as runs
from bullettrain.training.folder import RunFolder, read_weights
from bullettrain.training.loop import Trainer
from bullettrain.training.settings import ConfigError
from bullettrain.training.setup import load_data
from short_runs import CPU, free_port, kinds, small

# ------------------------------------------------------------------------------------ several processes


def spawned(rank, port, folder, settings):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), LOCAL_RANK=str(rank))
    os.environ["WORLD_SIZE"] = "2"
    torch.set_num_threads(1)
    from bullettrain.training.setup import find_place, leave_group

    place = find_place("cpu")
    runs.train(small("optimizer.name=sgd", *settings), folder, place)
    leave_group()


def by_two_processes(folder, settings):
    torch.multiprocessing.spawn(spawned, args=(free_port(), folder, settings), nprocs=2)


# SGD: Adam turns the rounding of a gradient near 0 into a whole step.
@pytest.mark.parametrize(
    "settings", [("optimizer.name=sgd",), ("optimizer.name=sgd", "accumulate=2", "objective=mart")]
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


def test_the_captured_average_is_the_plain_one(tmp_path):
    """Weights, statistics and counts, as `AveragedModel` moves them."""
    config = small("attack_group=2", "training.average=0.75", "network.name=wrn-10-1")
    trainer = Trainer(config, RunFolder(tmp_path), CPU, load_data(config, None))
    for step in range(3):
        with torch.no_grad():
            for t in (*trainer.network.parameters(), *trainer.network.buffers()):
                t.add_(step + 1)
        theirs = copy.deepcopy(trainer.average)
        if step == 0:
            trainer.average.update_parameters(trainer.network)  # the first copies
        else:
            trainer.average.move(trainer.network)
        theirs.update_parameters(trainer.network)
        for (key, mine), expected in zip(
            trainer.average.state_dict().items(), theirs.state_dict().values(), strict=True
        ):
            assert torch.allclose(mine, expected, atol=1e-6), key


# ----------------------------------------------------------------------------------- what cannot be had


def test_a_fresh_that_does_not_fit_is_said_in_a_line(tmp_path):
    with pytest.raises(ConfigError, match="fresh is 5"):
        runs.train(small("attack_group=2", "fresh=5"), tmp_path / "run", CPU)


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (("engine=graphs",), "there is no CUDA device"),
        (("attack_group=2", "accumulate=2"), "gradients are accumulated"),
        (("attack_group=2", "separation=oracle"), "looks at the network"),
    ],
)
def test_what_the_fast_engine_cannot_do_is_said_in_a_line(tmp_path, settings, line):
    from rich.console import Console

    console = Console(record=True, width=200)
    assert runs.train(small("epochs=1", *settings), tmp_path / "run", CPU, console=console).finished
    assert line in console.export_text()


def test_what_cannot_be_had_is_kept_with_the_run(tmp_path):
    result = runs.train(small("engine=graphs", "epochs=1"), tmp_path / "run", CPU)
    assert len(result.end["notes"]) == 1
    assert result.end["notes"][0].startswith("CUDA graphs are off")
