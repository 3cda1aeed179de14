"""AutoAttack through the adapter: the package's own result, in rounds that can be stopped between."""

import copy
import importlib.util
import json
import logging
import sys
import types

import pytest
import torch
from torch import nn

from bullettrain.data import load, to_unit
from bullettrain.evaluation.accuracy import EvaluatedModel, Round, clean_round, survive
from bullettrain.evaluation.autoattack import Notes, PackageEnsemble, attack_names, installed
from bullettrain.evaluation.evaluate import Plan, evaluate
from bullettrain.evaluation.progress import EvaluationProgress
from bullettrain.evaluation.results import FILE, Store
from bullettrain.evaluation.specs import PGD, AutoAttack, parse_attacks
from bullettrain.loading import LoadedModel, load_model
from conftest import assert_same, few_queries, snapshot

CPU = torch.device("cpu")
real = pytest.mark.skipif(
    importlib.util.find_spec("pyautoattack") is None, reason="pyautoattack is not installed (extra eval)"
)


@pytest.fixture(scope="module")
def digits():
    return load("digits", split="test").subset(torch.arange(24))


def package_rounds(model, attack, classes=10, seed=0, notes=None):
    notes = Notes() if notes is None else notes
    return PackageEnsemble(model, attack, torch.zeros(2, 1, 8, 8), classes, seed, notes).rounds()


class Rounding(EvaluatedModel):
    """A network that in its own precision gets some images wrong, which its float32_logits does not."""

    def __init__(self, network, images, among):
        super().__init__(network)
        self.known, self.among = images.flatten(1).sum(1), among

    def forward(self, x):
        known = (x.flatten(1).sum(1)[:, None] == self.known).any(dim=1, keepdim=True)
        logits = super().forward(x)
        return torch.where(known == self.among, -logits, logits)


@real
@pytest.mark.parametrize("among", [True, False])
def test_where_rounding_misleads_the_search_float32_attacks(robust_run, digits, monkeypatch, among):
    """Wrong from the start, an image would be passed over; wrong after any change, it would be left too early."""
    few_queries(monkeypatch)
    network = load_model(str(robust_run)).network.requires_grad_(False)
    x, y = to_unit(digits.images), digits.labels
    right = network(x).argmax(1) == y
    x, y = x[right], y[right]
    model = Rounding(network, x[:3] if among else x, among)
    assert (model(x).argmax(1) != y).sum() == (3 if among else 0)
    rounds = package_rounds(model, AutoAttack("linf", 0.9), seed=4)
    assert not rounds[0].survives(x, y, 0).any()


@real
@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_rounds_give_what_the_package_gives_in_one_go(robust_run, digits, monkeypatch, norm):
    quick = few_queries(monkeypatch)
    model = load_model(str(robust_run))
    network, eps = model.network.requires_grad_(False), {"linf": 0.1, "l2": 0.6}[norm]
    before, noise = snapshot(network), torch.get_rng_state()
    rounds = package_rounds(network, AutoAttack(norm, eps), seed=4)
    state = survive([clean_round(network), *rounds], digits, device=CPU, batch_size=10)
    assert_same(before, snapshot(network))
    assert torch.equal(noise, torch.get_rng_state())  # the package seeds the global generator; not ours
    assert [part.name for part in rounds] == ["apgd-ce", "apgd-t", "fab-t", "square"]
    assert state.shares == sorted(state.shares, reverse=True)
    assert 0 < state.share < state.shares[0]

    logging.getLogger("auto-attack").setLevel(logging.ERROR)
    theirs = quick(network, eps=eps, norm={"linf": "Linf", "l2": "L2"}[norm], seed=4)
    x, y = to_unit(digits.images), digits.labels
    x_adv, _ = theirs.run_standard_evaluation(x, y, batch_size=10)
    assert torch.equal(network(x_adv).argmax(dim=1) == y, state.alive)


@real
@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_channels_last_as_on_a_gpu(robust_run, digits, monkeypatch, tmp_path, norm):
    """The package views gradients as rows, which channels-last ones cannot be."""
    few_queries(monkeypatch)
    network = load_model(str(robust_run)).network
    colour = nn.Sequential(nn.Conv2d(3, 1, 3, padding=1), network)
    digits = digits.subset(torch.arange(12))
    images = type(digits)(digits.images.expand(-1, 3, -1, -1).contiguous(), digits.labels, digits.classes)
    found = []
    for last in (False, True):
        monkeypatch.setattr("bullettrain.evaluation.accuracy.channels_last", lambda device, last=last: last)
        model = LoadedModel("colour", "colour", network=copy.deepcopy(colour))
        attacks = [PGD(3, 1, 0.02, "ce", norm, 0.05), AutoAttack(norm, 0.05)]
        folder = tmp_path / str(last)
        _, asked = evaluate(
            model, images, "digits", Plan(attacks), device=CPU, store=Store(folder), progress=EvaluationProgress()
        )
        found.append([result.accuracy for result in asked])
    assert found[0] == pytest.approx(found[1], abs=1 / 12 + 1e-9)


@real
def test_an_undefended_network_falls_to_nothing_and_autoattack_is_no_weaker_than_pgd(robust_run, digits, tmp_path):
    torch.manual_seed(0)
    x, y = to_unit(digits.images), digits.labels
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.Adam(network.parameters(), 0.01)
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(x), y).backward()
        optimizer.step()
    attacks = parse_attacks(["pgd20:eps=0.3,step=0.03", "autoattack:eps=0.3", "autoattack:eps=5,norm=l2"])
    entry, (clean, pgd, linf, l2) = evaluate(
        LoadedModel("plain", "plain", network=network), digits, "digits", Plan(attacks), device=CPU,
        store=Store(tmp_path), progress=EvaluationProgress(),
    )  # fmt: skip
    assert clean.accuracy == 1
    assert linf.accuracy <= pgd.accuracy
    assert (linf.accuracy, l2.accuracy) == (0, 0)
    assert entry.worst[0]["attacks"] == ["pgd20", "autoattack"]


@real
def test_autoattack_goes_on_after_each_of_its_attacks(robust_run, digits, tmp_path, monkeypatch):
    few_queries(monkeypatch)
    model, digits = load_model(str(robust_run)), digits.subset(torch.arange(16))

    def evaluate_on(folder):
        plan = Plan([AutoAttack("linf", 0.1)], batch_size=8)
        _, asked = evaluate(
            model, digits, "digits", plan, device=CPU, store=Store(folder), progress=EvaluationProgress()
        )
        return asked[-1]

    whole = evaluate_on(tmp_path / "whole")
    made, original = [], PackageEnsemble.rounds

    def stopping(ensemble):
        def wrap(part):
            def survives(x, y, seed):
                if part.name == stop and part.name not in made:
                    made.append(part.name)
                    raise KeyboardInterrupt
                made.append(part.name)
                return part.survives(x, y, seed)

            return Round(part.name, survives)

        return [wrap(part) for part in original(ensemble)]

    monkeypatch.setattr(PackageEnsemble, "rounds", stopping)
    for stop in ("apgd-t", "square"):
        made.clear()
        folder = tmp_path / stop
        with pytest.raises(KeyboardInterrupt):
            evaluate_on(folder)
        (kept,) = json.loads((folder / FILE).read_text())["unfinished"].values()
        assert len(kept["shares"]) == 1 + ["apgd-ce", "apgd-t", "fab-t", "square"].index(stop)
        made.clear()
        made.append(stop)
        again = evaluate_on(folder)
        assert (again.survived, again.rounds) == (whole.survived, whole.rounds)
        assert "apgd-ce" not in made  # what was done is not done again


class Upstream:
    """The upstream module's interface, which differs: bs=, one tensor back, a logger that prints."""

    def __init__(
        self,
        model,
        norm="Linf",
        eps=0.3,
        seed=None,
        verbose=True,
        attacks_to_run=[],  # noqa: B006
        version="standard",
        is_tf_model=False,
        device="cuda",
        log_path=None,
    ):
        self.model, self.eps, self.verbose, self.norm = model, eps, verbose, norm
        self.attacks_to_run = ["apgd-ce", "apgd-t", "fab-t", "square"]
        self.apgd, self.apgd_targeted, self.fab = (types.SimpleNamespace(n_target_classes=9) for _ in range(3))
        self.logger = None
        made.append(self)

    def run_standard_evaluation(self, x_orig, y_orig, bs=250, return_labels=False):
        (name,) = self.attacks_to_run
        seen.append((name, len(x_orig), bs))
        self.logger.log("Warning: it seems to be a randomized defense! See flags_doc.md for details.")
        self.apgd.logger.log("initial accuracy: 100 %")
        return x_orig + self.eps if name == "fab-t" else x_orig


made, seen = [], []


def test_the_upstream_module_will_do(monkeypatch, digits):
    monkeypatch.setitem(sys.modules, "pyautoattack", None)
    module = types.ModuleType("autoattack")
    module.AutoAttack = Upstream
    module.__spec__ = importlib.util.spec_from_loader("autoattack", loader=None)
    monkeypatch.setitem(sys.modules, "autoattack", module)
    made.clear()
    seen.clear()
    assert installed() == "autoattack of unknown version"

    class Threshold(nn.Module):
        def forward(self, x):
            return nn.functional.one_hot((x.amax(dim=(1, 2, 3)) > 1.01).long(), 10).float()

    labels = torch.zeros(24, dtype=torch.int64)
    images = type(digits)(digits.images, labels, digits.classes)
    notes = Notes()
    rounds = package_rounds(Threshold(), AutoAttack("l2", 0.2), classes=5, notes=notes)
    state = survive(rounds, images, device=CPU, batch_size=10)
    assert state.shares == [1.0, 1.0, 0.0, 0.0]
    assert (made[0].norm, made[0].verbose, made[0].apgd_targeted.n_target_classes) == ("L2", False, 4)
    assert seen[:3] == [("apgd-ce", 10, 10), ("apgd-ce", 10, 10), ("apgd-ce", 4, 4)]
    assert notes == ["it seems to be a randomized defense!"]


@pytest.mark.parametrize(("classes", "count"), [(2, 3), (3, 3), (4, 4), (100, 4)])
def test_few_classes_do_without_the_targeted_dlr_loss(classes, count):
    assert len(attack_names(classes)) == count


@real
@pytest.mark.parametrize("classes", [2, 3, 5])
def test_few_classes_really_run(classes, monkeypatch):
    few_queries(monkeypatch)
    data = load("digits", split="test")
    keep = (data.labels < classes).nonzero()[:12, 0]
    data = type(data)(data.images[keep], data.labels[keep], tuple(str(c) for c in range(classes)))
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, classes)).requires_grad_(False)
    rounds = package_rounds(network, AutoAttack("linf", 0.001), classes=classes)
    state = survive([clean_round(network), *rounds], data, device=CPU)
    assert state.shares[0] >= state.share


def test_notes_are_told_once():
    notes = Notes()
    for _ in range(2):
        notes.warning("there are 3 points with zero gradient! See flags_doc.md for details.")
        notes.info("setting parameters")
        notes.debug("running square")
    assert notes == ["there are 3 points with zero gradient!"]
