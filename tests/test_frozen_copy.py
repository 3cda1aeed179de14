"""The copy that is attacked: what it computes is the network in eval mode, its norms folded or not."""

import copy

import pytest
import torch

from bullettrain.engine.forwards import FastForwards
from bullettrain.engine.frozen_copy import FrozenCopy
from bullettrain.models import build
from conftest import batch, norm_net


class Norms(torch.nn.Module):
    """One norm in two places, one without weights, one without statistics."""

    def __init__(self):
        super().__init__()
        self.conv, self.twice = torch.nn.Conv2d(3, 6, 3), torch.nn.BatchNorm2d(6, eps=0.1)
        self.plain = torch.nn.BatchNorm1d(6, affine=False)
        self.of_batch = torch.nn.BatchNorm1d(6, track_running_stats=False)
        self.head = torch.nn.Linear(6, 4)

    def forward(self, x):
        x = self.twice(torch.relu(self.twice(self.conv(x)))).mean(dim=(2, 3))
        return self.head(self.of_batch(self.plain(x)))


class Looks(torch.nn.Module):
    """Asks its norm for something that a scale and a shift do not have."""

    def __init__(self):
        super().__init__()
        self.net = norm_net()

    def forward(self, x):
        return self.net(x) * self.net[1].num_features


class Pair(torch.nn.Module):
    """Returns something that is no tensor."""

    def __init__(self):
        super().__init__()
        self.net = norm_net()

    def forward(self, x):
        return self.net(x), None


class Keeps(torch.nn.Module):
    """Keeps its norm's weight where a copy without that norm does not find it."""

    def __init__(self):
        super().__init__()
        self.net = norm_net()
        self.kept = [self.net[1].weight]

    def forward(self, x):
        return self.net(x) * self.kept[0].mean()


class Other(torch.nn.BatchNorm2d):
    """A norm that is more than one, behind weights that are zero at first."""

    def __init__(self, channels):
        super().__init__(channels)
        self.gate = torch.nn.Parameter(torch.zeros(()))

    def forward(self, x):
        y = super().forward(x)
        return y + self.gate * y.tanh()


def moved(network):
    """Weights and statistics as after some training."""
    with torch.no_grad():
        for tensor in [*network.parameters(), *network.buffers()]:
            if tensor.is_floating_point():
                tensor.add_(torch.rand_like(tensor))
    return network


@pytest.mark.parametrize("folded", [False, True])
@pytest.mark.parametrize("make", [norm_net, Norms, lambda: build("wrn-10-1"), lambda: build("preact-resnet-18")])
def test_the_copy_is_the_network_in_eval_mode_after_each_refresh(make, folded):
    torch.manual_seed(0)
    network, (x, _) = make().double(), batch(3, size=8, dtype=torch.float64)
    assert FrozenCopy.folds(network, x)
    frozen = FrozenCopy(network, None, folded=folded)
    assert folded != any(isinstance(module, torch.nn.BatchNorm2d) for module in frozen.modules())
    for _ in range(2):
        frozen.refresh()
        theirs, mine = x.clone().requires_grad_(), x.clone().requires_grad_()
        expected, logits = copy.deepcopy(network).eval()(theirs), frozen(mine)
        assert torch.allclose(logits, expected, rtol=1e-10, atol=1e-10)
        expected.square().sum().backward()
        logits.square().sum().backward()
        assert torch.allclose(mine.grad, theirs.grad, rtol=1e-8, atol=1e-10)
        assert all(p.grad is None for p in frozen.parameters())
        moved(network)


def test_a_network_that_fails_is_not_folded_and_fails_later():
    x, _ = batch(1, size=8)
    assert not FrozenCopy.folds(Pair(), x)
    assert not FrozenCopy.folds(torch.nn.Linear(3, 4), x)
    assert not FrozenCopy.folds(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.BatchNorm1d(192), Norms()), x)


def test_norms_are_folded_for_a_compiler_alone_and_only_where_that_changes_nothing():
    x, _ = batch(3, size=4)
    more = norm_net()
    more[1] = Other(more[1].num_features)
    hooked = norm_net()
    hooked[1].register_forward_hook(lambda module, args, y: y.tanh())
    for network, compile, folds in [
        (norm_net(), True, True),
        (norm_net(), False, False),
        (Looks(), True, False),
        (Keeps(), True, False),
        (more, True, False),
        (hooked, True, False),
    ]:
        before = copy.deepcopy(network.state_dict())
        forwards = FastForwards(network, compile=compile, pair=False)
        forwards.prepare(x)
        assert folds != any(isinstance(module, torch.nn.BatchNorm2d) for module in forwards.copy.modules())
        assert torch.allclose(forwards.copy(x), copy.deepcopy(network).eval()(x), atol=1e-6)
        assert all(torch.equal(value, before[key]) for key, value in network.state_dict().items())
