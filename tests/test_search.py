"""Our attacks beside the package's: the same noise, the same survivors; and captured as they are."""

import copy
import importlib.util

import pytest
import torch
from torch import nn

from bullettrain.data import load, to_unit
from bullettrain.evaluation import search
from bullettrain.evaluation.accuracy import EvaluatedModel, clean_round, survive
from bullettrain.evaluation.autoattack import Notes
from bullettrain.evaluation.evaluate import Plan, evaluate
from bullettrain.evaluation.fast_autoattack import FastEnsemble, SearchCopy
from bullettrain.evaluation.progress import EvaluationProgress
from bullettrain.evaluation.results import Store
from bullettrain.evaluation.search import ATTACKS, FAB, NEWTON_STEPS, check_windows, eager, margins, onto_plane
from bullettrain.evaluation.specs import AutoAttack, parse_attacks
from bullettrain.loading import LoadedModel, load_model
from bullettrain.models import build
from conftest import few_queries
from emulated import EmulatedRunner

CPU = torch.device("cpu")
QUERIES = 60
real = pytest.mark.skipif(
    importlib.util.find_spec("pyautoattack") is None, reason="pyautoattack is not installed (extra eval)"
)


@pytest.fixture(scope="module")
def digits():
    return load("digits", split="test").subset(torch.arange(100))


@pytest.fixture(scope="module")
def network(robust_run):
    return load_model(str(robust_run)).network.requires_grad_(False).eval()


@pytest.fixture(scope="module")
def batch(network, digits):
    x, y = to_unit(digits.images), digits.labels
    right = network(x).argmax(1) == y
    return x[right], y[right]


@pytest.fixture
def quick(monkeypatch):
    """As `few_queries` has the package."""
    for name, kind in ATTACKS.items():
        monkeypatch.setattr(kind, "iterations", QUERIES if name == "square" else 10)
    monkeypatch.setattr(search, "check_windows", lambda iterations: check_windows(100)[:iterations])


@real
@pytest.mark.parametrize("scale", [0.01, 0.3, 2.0])
def test_the_projection_is_the_packages(scale):
    from pyautoattack.fab_projections import projection_linf

    x = (1.25 * torch.rand(40, 3, 8, 8) - 0.125).clamp(0, 1)  # some pixels on their bounds
    normal = torch.randn(40, 3, 8, 8) * (torch.rand(40, 3, 8, 8) > 0.2)
    level = (normal * x).sum((1, 2, 3)) + scale * torch.randn(40) * normal.abs().sum((1, 2, 3))
    expected = projection_linf(x.flatten(1), normal.flatten(1), level).view_as(x)
    assert NEWTON_STEPS >= 6
    torch.testing.assert_close(onto_plane(x, normal, level), expected, rtol=1e-4, atol=1e-5)


@real
@pytest.mark.parametrize("name", ["apgd-ce", "apgd-t", "fab-t", "square"])
def test_each_attack_breaks_what_the_packages_breaks(network, batch, name, monkeypatch):
    from pyautoattack import AutoAttack

    (x, y), eps = (part[:40] for part in batch), 0.08
    theirs = AutoAttack(network, eps=eps, seed=3, version="standard")
    theirs.verbose, theirs.attacks_to_run, theirs.logger = False, [name], Notes()
    theirs.apgd_targeted.logger = Notes()
    theirs.square.n_queries, theirs.fab.n_iter = 300, 30
    x_adv, _ = theirs.run_standard_evaluation(x, y, batch_size=len(x))
    expected = network(x_adv).argmax(1) == y

    generator, alive = torch.Generator().manual_seed(3), torch.ones(len(x), dtype=torch.bool)
    order = network(x).argsort(dim=1)
    for job in range(2, 11) if name in ("apgd-t", "fab-t") else [1]:
        rows = alive.nonzero()[:, 0]
        if name in ("square", "fab-t"):
            monkeypatch.setattr(ATTACKS[name], "iterations", 300 if name == "square" else 30)
        found, margin = ATTACKS[name](network, x[rows], eps)(x[rows], y[rows], order[rows, -job], generator)
        reached = (found - x[rows]).abs().flatten(1).amax(1)
        assert reached.max() <= eps + 1e-6
        assert found.min() >= 0
        assert found.max() <= 1
        finite = margin.isfinite()
        torch.testing.assert_close(margin[finite], margins(network(found), y[rows])[finite], rtol=1e-4, atol=1e-4)
        alive[rows] = margin > 0
    assert 0 < alive.sum() < len(x)
    assert (alive != expected).sum() <= 1  # a sum in another order can turn a sign


@pytest.mark.parametrize("name", ["apgd-ce", "apgd-t", "fab-t", "square"])
def test_captured_it_does_the_same(network, batch, name, quick):
    x, y = batch
    target = (y + 1) % 10
    results = []
    for runner in (eager, EmulatedRunner):
        attack = ATTACKS[name](network, x.new_zeros(len(x) + 5, *x.shape[1:]), 0.1, runner)
        for seed in (1, 2):  # the second time every buffer has been used
            rows = slice(None, len(x) - 3 * (seed - 1))
            found = attack(x[rows], y[rows], target[rows], torch.Generator().manual_seed(seed))
        results.append(found)
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def test_windows_of_a_hundred_iterations():
    windows = check_windows(100)
    assert [i + 1 for i, window in enumerate(windows) if window] == [22, 41, 57, 70, 80, 87, 93, 99]


@real
def test_bf16_searches_and_float32_decides(network, digits, batch, monkeypatch, quick):
    """The rounds on a frozen copy leave what the package in float32 leaves, but for an image or two."""
    theirs_class = few_queries(monkeypatch)
    eps = 0.1
    model = EvaluatedModel(copy.deepcopy(network), dtype=torch.bfloat16)
    told = []
    rounds = FastEnsemble(model, AutoAttack("linf", eps), batch[0], 10, 4, Notes(), told.append).rounds()
    state = survive([clean_round(model), *rounds], digits, device=CPU, batch_size=40)
    theirs = theirs_class(network, eps=eps, seed=4)
    theirs.logger = theirs.apgd_targeted.logger = Notes()
    x, y = to_unit(digits.images), digits.labels
    x_adv, _ = theirs.run_standard_evaluation(x, y, batch_size=100)
    assert (state.alive != (network(x_adv).argmax(1) == y)).sum() <= 2
    assert state.shares[0] > state.shares[1] >= state.share
    assert told
    assert max(told) <= 40 * max(part.passes for part in rounds)


def test_images_that_are_close_in_float32_are_searched_in_float32(network, batch, monkeypatch):
    """A copy that never sees an image broken, but comes close, does not have the last word."""
    x, y = batch
    exact = EvaluatedModel(copy.deepcopy(network), dtype=torch.bfloat16)
    calls = []

    class Blind(FAB):
        iterations = 20

        def __call__(self, x, *others):
            found, margin = super().__call__(x, *others)
            calls.append(len(x))
            if len(calls) == 1:
                return x.clone(), margin.clamp_min(0) + 100  # far off: everything is in doubt
            return found, margin

    monkeypatch.setitem(ATTACKS, "fab-t", Blind)
    attack = AutoAttack("linf", 0.3)
    (only,) = FastEnsemble(exact, attack, x, 2, 0, Notes()).rounds(["fab-t"])
    alive = only.survives(x, y, 0)
    assert calls == [len(x), len(x)]
    assert not alive.all()


def test_the_copy_is_close():
    torch.manual_seed(0)
    network = build("preact-resnet-18", num_classes=10, channels=3, image_size=32).eval()
    x = torch.rand(4, 3, 32, 32)
    twin = SearchCopy(network, x)
    exact, rounded = network(x), twin(x)
    assert rounded.dtype == torch.float32
    assert (rounded - exact).abs().max() < 0.05 * exact.abs().max()


@pytest.mark.parametrize(
    "network",
    [
        nn.Sequential(nn.Flatten(), nn.Linear(64, 10)),
        nn.Sequential(nn.Conv2d(1, 4, 3, padding_mode="circular", padding=1), nn.Flatten(), nn.Linear(256, 10)),
        nn.Sequential(nn.Conv2d(1, 10, 8), nn.Flatten()),
    ],
)
def test_copies_of_other_networks(network):
    x = torch.rand(3, 1, 8, 8)
    assert (SearchCopy(network.eval(), x)(x) - network(x)).abs().max() < 0.02


def test_a_layer_by_itself():
    class Own(nn.Linear):
        def forward(self, x):
            return super().forward(x.flatten(1))

    network, x = Own(64, 10).eval(), torch.rand(3, 1, 8, 8)
    assert (SearchCopy(network, x)(x) - network(x)).abs().max() < 0.02


def test_apgd_by_the_evaluation(network, digits, tmp_path, quick, capsys):
    """`--attack apgd` is the first half of `autoattack`, and says how far it is."""
    from rich.console import Console

    attacks = parse_attacks(["apgd:eps=0.1", "autoattack:eps=0.1"])
    plan = Plan(attacks, ("bf16",), batch_size=30)
    progress = EvaluationProgress(Console(width=100))
    digits = digits.subset(torch.arange(40))
    entry, (_, apgd, whole) = evaluate(
        LoadedModel("digits", "digits", network=copy.deepcopy(network)), digits, "digits", plan, device=CPU,
        store=Store(tmp_path), progress=progress,
    )  # fmt: skip
    assert [name for name, _ in apgd.rounds] == ["clean", "apgd-ce", "apgd-t"]
    assert apgd.rounds == whole.rounds[:3]
    assert apgd.attack["attack"] == "apgd"
    said = capsys.readouterr().out
    assert "after apgd-ce" in said
    assert "left" in said
    assert entry.worst[0]["attacks"] == ["apgd", "autoattack"]


def test_the_bar_moves_within_a_batch():
    from io import StringIO

    from rich.console import Console

    with (
        EvaluationProgress(Console(file=StringIO(), force_terminal=True)) as progress,
        progress.attacking("autoattack", 100) as bar,
    ):
        (task,) = progress.progress.tasks
        bar.partly(30)
        assert task.completed == 30
        bar(40)
        bar.partly(10)
        assert (task.completed, task.total) == (50, 100)
