"""Allocations from the command line: what `method.allocation` builds, runs with it, and their controls."""

import pytest
import torch

import bullettrain as bt
from bullettrain.allocation import Allocated, needs_selection
from bullettrain.config import Config, ConfigError, recipe
from bullettrain.config.methods import method_name
from bullettrain.reporting import write_report
from bullettrain.run_folder import RunFolder
from bullettrain.step import BulletTrain
from bullettrain.training import run as runs
from bullettrain.training.setup import WarmedUpBudget
from conftest import counting, tiny_net
from short_runs import CPU, kinds, small
from test_baselines import small_batch

PGD_AT = ("objective=pgd-at", "beta=null")
BUILT = {
    ("gaussian",): bt.GaussianBudget(3, width=0.5, min_steps=1, outlier=0),
    ("gaussian", "allocation_value=0.2", "outlier=1"): bt.GaussianBudget(3, width=0.2, min_steps=1, outlier=1),
    ("history", "robust=0"): bt.HistoryBudget(3, min_steps=0),
    ("early-stop", "allocation_value=2"): bt.EarlyStopBudget(3, extra_steps=2),
    ("radius", "eps=0.1", "allocation_value=0.25"): bt.RadiusBudget(3, eps=0.1, min_radius=0.25),
    ("second-step", "allocation_value=0.5"): bt.SecondStepBudget(3, share=0.5),
}


def config_of(allocation: str, *settings: str) -> Config:
    return small(*PGD_AT, f"allocation={allocation}", *settings)


@pytest.mark.parametrize(("settings", "budget"), BUILT.items(), ids=lambda value: str(value)[:24])
def test_what_each_allocation_builds(settings, budget):
    config = config_of(*settings)
    engine = config.method.build(dataset_size=7)
    assert engine.budget == budget
    assert engine.history.examples == (7 if settings[0] in ("history", "radius") else 0)
    assert engine.needs_selection == (settings[0] == "gaussian")
    plain = config.baseline().method
    assert plain.build(7).budget == bt.StepBudget.uniform(3)
    assert (plain.allocation, plain.allocation_value, plain.shuffled) == ("categories", None, False)
    assert config.identity() != config.baseline().identity()


def test_a_shuffled_control_deals_out_what_the_budget_gives():
    for allocation in ("categories", "gaussian", "history", "radius"):
        engine = config_of(allocation, "shuffled=true").method.build(7)
        assert isinstance(engine.budget, bt.ShuffledBudget)
        assert engine.budget.eps == 0.15
        assert (
            engine.needs_selection
            == needs_selection(engine.budget.budget)
            == (allocation in ("categories", "gaussian"))
        )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("hystory",), "did you mean 'history'"),
        (("history", "allocation_value=2"), "history takes no method.allocation_value"),
        (("categories", "allocation_value=2"), "categories takes no method.allocation_value"),
        (("early-stop", "allocation_value=1.5"), "whole number"),
        (("early-stop", "shuffled=true"), "cannot be dealt out beforehand"),
        (("second-step", "shuffled=true"), "cannot be dealt out beforehand"),
        (("history", "scale=1.7"), "scale needs allocation=categories: --set scale=null"),
        (("history", "robust=5"), "min_steps is 5, more than max_steps"),
        (("second-step", "allocation_value=2"), r"share is 2.0; it has to be at least 0 and at most 1"),
        (("radius", "objective=augmix", "boundary=1", "robust=0"), "allocation is radius, but augmix takes none"),
        (
            ("history", "objective=grad-align"),
            "allocation is history, but grad-align takes none: --set allocation=categories",
        ),
        (("gaussian", "allocation_value=0"), "method.allocation_value is 0"),
    ],
)
def test_mistakes_are_one_line(settings, message):
    with pytest.raises(ConfigError, match=message) as caught:
        config_of(*settings)
    assert "\n" not in str(caught.value)


# ------------------------------------------------------------------------------------------------- runs


@pytest.mark.parametrize(
    ("settings", "work"),
    [
        (("gaussian",), (4, 4 + 6)),  # a forward to select, an update of three, and two for each step
        (("history",), (3 + 2, 3 + 6)),
        (("early-stop",), (3 + 2, 3 + 6)),
        (("radius",), (3 + 6, 3 + 6)),
        (("second-step", "boundary=2"), (3 + 2.4, 3 + 2.6)),  # of batches of 50 and 40, 12 or 10 go on
        (("history", "shuffled=true"), (3 + 2, 3 + 6)),
        (("radius", "shuffled=true", "eps_warmup=0.5"), (3 + 6, 3 + 6)),
        (("early-stop", "clean_warmup=0.34"), (3 + 0.66 * 2, 3 + 4)),
    ],
    ids=str,
)
def test_each_runs_to_its_report_with_its_passes_counted(tmp_path, settings, work):
    config = config_of(*settings)
    result = runs.train(config, tmp_path / "run", CPU)
    assert result.finished
    low, high = work
    assert low <= result.end["work"] <= high
    assert result.end["theoretical_speedup"] is None
    assert result.end["work_speedup"] == pytest.approx((3 + 2 * config.method.boundary) / result.end["work"])
    assert sum(result.end[name] for name in ("outlier", "boundary", "robust")) == pytest.approx(1)
    assert (result.end["boundary"] == 1) == (settings[0] != "gaussian")  # without a selection there are no classes
    write_report(tmp_path / "run")
    page = (tmp_path / "run" / "report.html").read_text()
    assert method_name(config.to_dict()["method"]) in page
    assert ("without categories" in page) == (settings[0] != "gaussian")


def test_steps_by_history_fall_as_margins_grow_and_resume(tmp_path):
    """Nobody is known in the first epoch, so that all get the most; what is remembered is in the checkpoint."""
    config = config_of("history", "epochs=12", "eps=0.01", "boundary=4")
    assert runs.train(config, tmp_path / "run", CPU).finished
    work = [epoch["work"] for epoch in kinds(tmp_path / "run", "epoch")]
    assert work[0] == 3 + 2 * 4
    assert work[-1] < work[0]
    history = RunFolder(tmp_path / "run").load().state["engine"]["history"]
    assert (history["visits"] == 12).all()
    assert set(history["steps"].tolist()) <= {1, 2, 3, 4}


# ------------------------------------------------------------------------------------------- its parts


def test_nothing_is_forwarded_for_a_budget_that_looks_at_no_scores():
    net, (x, y) = tiny_net(), small_batch(8)
    seen = counting(net)
    train = BulletTrain(bt.TRADES(eps=0.1), budget=bt.HistoryBudget(3), dataset_size=8)
    out = train.step(net, x, y, index=torch.arange(8))
    assert seen == {"held": 8, "attack": 24, "train": 16}  # the clean forward is the attack's target
    assert out.work.per_example == 1 + 6 + 6
    assert out.svar is None


def test_a_second_step_goes_to_those_with_the_longest_first_gradient():
    net, (x, y) = tiny_net(), small_batch(12)
    train = BulletTrain(bt.PGDAT(eps=0.1), budget=bt.SecondStepBudget(2, share=0.25))
    start = train.objective.initial_perturbation(x)
    out = train.step(net, x, y, start=start)
    p = net(start).softmax(1)
    wrong = p.argmax(1) != y
    length = (p - torch.nn.functional.one_hot(y, 4)).norm(dim=1)
    expected = sorted(range(12), key=lambda i: (not wrong[i], -length[i].item()))[:3]
    assert out.steps.tolist() == [2 if i in expected else 1 for i in range(12)]
    assert out.work.attack == 2 * (12 + 3)
    once = BulletTrain(bt.PGDAT(eps=0.1), budget=bt.StepBudget.uniform(1, scale=1.25)).step(net, x, y, start=start)
    stopped = out.steps == 1
    assert torch.equal(out.x_prime[stopped], once.x_prime[stopped])


def test_a_warm_up_keeps_what_the_budget_decides():
    grown = WarmedUpBudget(bt.RadiusBudget(2, eps=0.1, min_radius=0.5), 0.1, torch.device("cpu"))
    past = bt.History(4).of(torch.arange(4))._replace(margin=torch.tensor([-1.0, 0.0, 1.0, -0.5]), visits=torch.ones(4))
    category = torch.ones(4, dtype=torch.int64)
    assert not grown.allocate(category, None, past).steps.any()
    grown.begun = True
    grown.part.fill_(0.5)
    given = grown.allocate(category, None, past)
    assert isinstance(given, Allocated)
    assert given.eps.tolist() == pytest.approx([0.025, 0.05, 0.05, 0.0375])
    assert not hasattr(grown, "revise")
    assert hasattr(WarmedUpBudget(bt.EarlyStopBudget(2), None, torch.device("cpu")), "revise")


def test_the_recipe_of_the_study_takes_them():
    for allocation in ("gaussian", "history", "early-stop", "radius", "second-step"):
        config = recipe("cifar10-pgd-short").with_settings([f"allocation={allocation}", "boundary=3", "robust=1"])
        assert method_name(config.to_dict()["method"]) == f"PGD-AT, allocation {allocation}"
