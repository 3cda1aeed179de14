"""Selection by last logits in a run: it names the examples that it trains on, and says what is hardly wanted."""

import pytest
import torch

from bullettrain.data import ImageSet, Loader
from bullettrain.run_folder import RunFolder
from bullettrain.training.collapse import CollapseError
from bullettrain.training.setup import load_data
from bullettrain.training.trainer import Trainer
from short_runs import CPU, small


@pytest.mark.parametrize("resident", [True, False])
@pytest.mark.parametrize(("world", "replays"), [(1, 1), (3, 1), (1, 2)])
def test_loaders_say_which_images_a_batch_has(world, replays, resident):
    labels = torch.arange(23)
    data = ImageSet(torch.randint(256, (23, 1, 4, 4), dtype=torch.uint8), labels, tuple(map(str, range(23))))
    for rank in range(world):
        loader = Loader(data, batch_size=5, seed=3, rank=rank, world=world, replays=replays, resident=resident)
        for epoch in (0, 1, 0):
            for index, (_, y) in enumerate(loader.epoch(epoch)):
                assert torch.equal(labels[loader.indices(epoch, index)], y)


@pytest.mark.parametrize(
    "settings_",
    [
        (),
        ("accumulate=2",),
        ("replays=2",),
        ("attack_group=2",),
        ("replays=2", "attack_group=3"),
        ("clean_warmup=0.4",),
    ],
)
def test_a_run_names_the_examples_it_trains_on(tmp_path, settings_):
    config = small("selection=last", *settings_)
    trainer = Trainer(config, RunFolder(tmp_path), CPU, load_data(config, None))
    take, seen = trainer.stepper.take, []

    def watched(unit, rate):
        for _, y, _, index in unit:
            assert torch.equal(trainer.loader.data.labels[index], y)
            seen.append(index)
        return take(unit, rate)

    trainer.stepper.take = watched
    assert trainer.run() == "finished"
    assert len(seen) == trainer.batches * config.training.epochs
    assert len({tuple(index.tolist()) for index in seen}) > len(seen) // 3  # not the same ones over and over
    assert trainer.engine.history.visits.all()


def test_a_run_says_what_is_hardly_wanted():
    assert small("selection=last").doubts() == []
    (once,) = small("selection=last", "epochs=1").doubts()
    assert "has no logits in the first epoch" in once


def test_a_network_that_gets_everything_wrong_is_noticed_in_the_first_epoch(tmp_path):
    config = small("selection=last", "log_every=2", "optimizer.lr=1e-30", "probe=0", "epochs=2")
    config = config.with_settings(["data.train_size=1400", "data.validation=60"])
    trainer = Trainer(config, RunFolder(tmp_path), CPU, load_data(config, None))
    data = trainer.loader.data
    trainer.loader.data = ImageSet(data.images, torch.zeros_like(data.labels), data.classes)
    trainer.network.register_forward_hook(lambda module, args, out: out - 20 * torch.eye(10)[0])
    with pytest.raises(CollapseError, match="classifies none correctly"):
        trainer.run()
    assert trainer.at.epoch == 0
