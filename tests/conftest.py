import os
import signal
import warnings
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

from browser import CHROMIUM, Browser

try:
    from hypothesis import HealthCheck, settings
except ImportError:  # a GPU machine may lack it, and the tests marked gpu do without
    pass
else:
    settings.register_profile(
        "default", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow], derandomize=True
    )
    settings.load_profile("default")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background job, whose tests press Ctrl-C, too
    signal.signal(signal.SIGINT, signal.default_int_handler)
if not torch.cuda.is_available():  # Triton's kernels, interpreted; it looks when it is imported
    os.environ.setdefault("TRITON_INTERPRET", "1")
torch.set_num_threads(1)  # tests are small: threads cost more than they give, and workers share the cores


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture
def real_data() -> Path:
    folder = os.environ.get("BULLETTRAIN_DATA")
    if not folder:
        pytest.skip("BULLETTRAIN_DATA is not set: no real data to test on")
    return Path(folder)


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    if CHROMIUM is None:
        pytest.skip("no Chromium here: none of chromium, chromium-browser, google-chrome is on the PATH")
    found = Browser(tmp_path_factory.mktemp("profile"))
    yield found
    found.close()


def tiny_net(classes=4, channels=1, size=4, seed=0) -> nn.Sequential:
    """A smooth network in float64 without batch norm: one example at a time gives what the batch gives."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(channels * size * size, 12), nn.Tanh(), nn.Linear(12, classes)
    ).double()


def norm_net(classes=4, channels=3) -> nn.Sequential:
    """A small convolutional network with batch norm."""
    return nn.Sequential(
        nn.Conv2d(channels, 6, 3, padding=1, bias=False),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(24, classes),
    )


def batch(m=16, classes=4, channels=3, size=6, dtype=torch.float32, seed=1):
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(m, channels, size, size, generator=generator, dtype=dtype)
    return x, torch.randint(classes, (m,), generator=generator)


def snapshot(model: nn.Module):
    """Everything an attack must leave as it was."""
    return (
        {name: value.clone() for name, value in model.state_dict().items()},
        [module.training for module in model.modules()],
        [(p.requires_grad, None if p.grad is None else p.grad.clone()) for p in model.parameters()],
    )


def assert_same(before, after):
    assert before[1] == after[1]
    for name in before[0]:
        assert torch.equal(before[0][name], after[0][name]), name
    for (needs, grad), (needs_now, grad_now) in zip(before[2], after[2], strict=True):
        assert needs == needs_now
        assert (grad is None and grad_now is None) or torch.equal(grad, grad_now)


@pytest.fixture(scope="session")
def robust_run(tmp_path_factory) -> Path:
    """A finished run on the digits, short but somewhat robust; not to be changed."""
    from bullettrain.config import recipe
    from bullettrain.processes import Place
    from bullettrain.training.run import train

    folder = tmp_path_factory.mktemp("runs") / "robust"
    settings = ["epochs=6", "data.validation=0", "probe=0", "evaluation.steps=5", "log_every=50"]
    assert train(recipe("digits").with_settings(settings), folder, Place(torch.device("cpu"))).finished
    return folder


@pytest.fixture(scope="session")
def whole(tmp_path_factory) -> Path:
    """A finished run of a second or two that nothing interrupted; not to be changed."""
    from bullettrain.training.run import train
    from short_runs import CPU, small

    folder = tmp_path_factory.mktemp("runs") / "whole"
    assert train(small(), folder, CPU).finished
    return folder


@contextmanager
def no_waiting():
    """Where the host must not wait for a CUDA device: a RuntimeError if it does."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Synchronization debug mode")  # an error it would leave the mode on
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def few_queries(monkeypatch):
    """Square with fewer than its 5000 queries, and FAB and APGD with fewer iterations: the same code, sooner."""
    import pyautoattack

    original = pyautoattack.AutoAttack

    class Quick(original):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.square.n_queries = 60
            for part in (self.apgd, self.apgd_targeted, self.fab):
                part.n_iter = 10

    monkeypatch.setattr(pyautoattack, "AutoAttack", Quick)
    return Quick


def counting(*networks):
    """Examples forwarded from now on: without a gradient, towards an attack step, to learn from."""
    seen = {"held": 0, "attack": 0, "train": 0}

    def count(module, args, out):
        where = "attack" if args[0].requires_grad else "train" if out.requires_grad else "held"
        seen[where] += len(args[0])

    for network in networks:
        network.register_forward_hook(count)
    return seen
