"""Statistics of averaged weights: taken anew, of what training steps show them."""

import copy
import signal

import pytest
import torch
from torch import nn

from bullettrain import BulletTrain
from bullettrain.config.methods import with_method
from bullettrain.evaluation.accuracy import clean_accuracy
from bullettrain.run_folder import RunFolder, read_weights
from bullettrain.training import run as runs
from bullettrain.training import state
from bullettrain.training import trainer as trainer_module
from bullettrain.training.optimizer import MovingAverage, average_statistics, norms, statistics_anew
from bullettrain.training.setup import load_data
from bullettrain.training.trainer import Trainer
from conftest import norm_net
from short_runs import CPU, small

NORMS = ("network.name=wrn-10-1", "epochs=2", "data.train_size=120", "training.batch_size=30", "training.probe=0")


def buffers(network):
    return {name: buffer.clone() for name, buffer in network.named_buffers()}


def is_average(network):
    """Averaged weights learn nothing themselves."""
    return not any(parameter.requires_grad for parameter in network.parameters())


def test_statistics_are_the_plain_mean_of_what_is_seen():
    torch.manual_seed(0)
    net = norm_net().double()
    batches = [torch.rand(m, 3, 8, 8, dtype=torch.float64) for m in (4, 9, 6)]
    for _ in range(3):
        net(batches[0])
    momenta, before = [norm.momentum for norm in norms(net)], buffers(net)
    seen, first = [], norms(net)[0]
    hook = first.register_forward_pre_hook(lambda module, args: seen.append(args[0].detach()))
    with statistics_anew(net, 5 + torch.rand(7, 3, 8, 8, dtype=torch.float64)):
        assert first.running_mean.abs().min() > 0  # not what nobody has seen
        seen.clear()
        for x in batches:
            net(x)
    hook.remove()
    means = torch.stack([x.mean(dim=(0, 2, 3)) for x in seen]).mean(dim=0)
    variances = torch.stack([x.var(dim=(0, 2, 3)) for x in seen]).mean(dim=0)
    assert torch.allclose(first.running_mean, means, atol=1e-12)
    assert torch.allclose(first.running_var, variances, atol=1e-12)
    assert [norm.momentum for norm in norms(net)] == momenta
    assert all(torch.equal(b, before[name]) for name, b in net.named_buffers() if name.endswith("tracked"))


def test_a_frozen_norm_keeps_its_own():
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4))
    net[1].eval()
    x = torch.rand(6, 3, 8, 8)
    net(x)
    before = buffers(net)
    with statistics_anew(net, x):
        net(x)
    assert torch.equal(net[1].running_mean, before["1.running_mean"])
    assert not torch.equal(net[3].running_mean, before["3.running_mean"])


@pytest.mark.parametrize("settings", [[], ["objective=pgd-at", "beta=null"], ["objective=mart", "selection=last"]])
def test_a_run_judges_and_keeps_averaged_weights_with_statistics_of_their_own(tmp_path, monkeypatch, settings):
    made, step = [], BulletTrain.step

    def watched(self):
        for around in (lambda: None, lambda: average_statistics(self)):
            around()
            engine, scores = self.engine.robust_fraction.value, self.engine.history.score.clone()
            made.append((copy.deepcopy(self.average.module), copy.deepcopy(self.network), float(engine), scores))
        return True

    def seen(self, model, x, y, **given):
        out = step(self, model, x, y, **given)
        if made:  # after training
            shares.append(out.shares)
        return out

    shares = []
    monkeypatch.setattr(trainer_module, "average_statistics", watched)
    monkeypatch.setattr(BulletTrain, "step", seen)
    config = small(*NORMS, "data.validation=0", *settings)
    result = runs.train(config, tmp_path / "run", CPU)
    (before, network, was, scores), (after, same, still, kept_scores) = made
    assert still == was
    assert torch.equal(scores, kept_scores)
    assert len(shares) == 4  # all that an epoch has
    if config.method.selection != "last":  # by statistics of images, not of nobody, from the first mini-batch on
        assert abs(shares[0]["outlier"] - shares[1]["outlier"]) < 0.4
    for a, b in zip(network.state_dict().values(), same.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    for a, b in zip(before.parameters(), after.parameters(), strict=True):
        assert torch.equal(a, b)
    assert not any(torch.equal(a.running_var, b.running_var) for a, b in zip(norms(before), norms(after), strict=True))
    kept, _ = read_weights(tmp_path / "run" / "averaged.safetensors")
    assert all(torch.equal(kept[name], value) for name, value in after.state_dict().items())
    assert result.accuracy["averaged"]["clean"] == clean_accuracy(after, load_data(config, None)[2], device=CPU.device)


def test_they_are_nearer_to_what_the_averaged_network_sees(tmp_path):
    """Of the images of a whole epoch in training mode, by the sum of squared errors of every norm's mean."""
    config = small(
        *NORMS, "data.validation=0", "epochs=6", "optimizer.lr=0.01", "schedule.name=constant", "average=0.98"
    )
    data = load_data(config, None)
    trainer = Trainer(config, RunFolder(tmp_path), CPU, data)
    for _ in range(config.training.epochs):
        for index, (x, y) in enumerate(trainer.loader.epoch(trainer.at.epoch)):
            trainer.take([trainer.batch(x, y, trainer.at.epoch, index)])
        trainer.at.epoch, trainer.at.index = trainer.at.epoch + 1, 0
    mean_of_others = copy.deepcopy(trainer.average.module)
    average_statistics(trainer)
    true = copy.deepcopy(trainer.average.module)
    with statistics_anew(true, x), torch.no_grad():
        for x, _ in trainer.loader.epoch(0):
            true(x)

    def off(network):
        pairs = zip(norms(network), norms(true), strict=True)
        return sum(((a.running_mean - b.running_mean) / b.running_var.sqrt()).square().sum().item() for a, b in pairs)

    assert off(trainer.average.module) < 0.5 * off(mean_of_others)


def test_weights_without_norms_are_left_as_they_are(tmp_path, monkeypatch):
    saved, save = [], Trainer.save
    monkeypatch.setattr(Trainer, "save", lambda self: saved.append(self.at.epoch) or save(self))
    runs.train(small("epochs=1"), tmp_path / "run", CPU)
    assert saved == [1]
    assert not norms(MovingAverage(nn.Sequential(nn.BatchNorm2d(3, track_running_stats=False)), 0.9).module)


@pytest.mark.parametrize("settings", [(), ("shuffled=true",)])
def test_a_run_that_comes_to_its_end_again_ends_the_same(tmp_path, settings):
    """As one does that was killed while it was judged; a shuffled budget draws from torch's generator."""
    config = small(*NORMS, "data.validation=0", *settings)
    runs.train(config, tmp_path / "run", CPU)
    once = (tmp_path / "run" / "averaged.safetensors").read_bytes()
    trainer = Trainer(config, RunFolder(tmp_path / "run"), CPU, load_data(config, None))
    state.resume(trainer)
    for norm in norms(trainer.average.module):
        norm.running_mean.add_(1)  # whatever it had
    average_statistics(trainer)
    trainer.save()
    assert (tmp_path / "run" / "averaged.safetensors").read_bytes() == once


def test_a_run_that_is_stopped_while_statistics_are_taken_resumes_to_the_same_end(tmp_path, monkeypatch):
    config = small(*NORMS, "data.validation=0")
    runs.train(config, tmp_path / "whole", CPU)
    step, asked = BulletTrain.step, []

    def interrupting(self, model, x, y, **given):
        if is_average(model):
            asked.append(len(y))
            if len(asked) == 2:
                signal.raise_signal(signal.SIGTERM)
        return step(self, model, x, y, **given)

    monkeypatch.setattr(BulletTrain, "step", interrupting)
    assert runs.train(config, tmp_path / "run", CPU).signal == signal.SIGTERM
    assert len(asked) == 2
    assert runs.train(config, tmp_path / "run", CPU, resume=True).finished
    files = [(tmp_path / folder / "averaged.safetensors").read_bytes() for folder in ("run", "whole")]
    assert files[0] == files[1]


def test_a_replay_is_shown_once(tmp_path, monkeypatch):
    """Free trains eight times on a mini-batch."""
    shown, step = [], BulletTrain.step

    def seen(self, model, x, y, **given):
        if is_average(model):
            shown.append(len(y))
        return step(self, model, x, y, **given)

    monkeypatch.setattr(BulletTrain, "step", seen)
    free = with_method(small(*NORMS, "data.validation=0", "epochs=4", "boundary=10", "robust=2"), "free-4")
    runs.train(free, tmp_path / "run", CPU)
    assert shown == [30] * 4
