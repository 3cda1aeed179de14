"""Parts of one's own that are nearly right: each is refused or warned of by name, or simply works."""

import warnings

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import bullettrain as bt
from bullettrain import baselines
from bullettrain.allocation import Allocated
from bullettrain.attacks import Attack, pgd
from bullettrain.attacks.losses import closed_form, gradient_at_logits, kl
from bullettrain.engine.distributed import checksum
from bullettrain.history import HistorySampler, LeaveOut

M, K = 12, 4
X, Y = torch.rand(M, 6, generator=torch.Generator().manual_seed(0)), torch.arange(M) % K
INDEX = torch.arange(M)


def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, K))


class Budget:
    """Steps of one's own: nearly a StepBudget."""

    uniform_steps = None

    def allocate(self, category, score=None, past=None):
        return (torch.arange(len(category)) % 3).to(self.dtype)

    def step_sizes(self, category, steps, eps):
        return torch.full((len(category),), eps / 2)


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.int16])
@pytest.mark.parametrize("revises", [False, True])
def test_steps_may_have_any_integer_dtype(dtype, revises):
    budget = Budget()
    budget.dtype = dtype
    if revises:
        budget.revise = lambda t, logits, y, remaining: remaining
    train = bt.BulletTrain(bt.TRADES(eps=0.1), budget=budget, dataset_size=M)
    out = train.step(network(), X, Y, index=INDEX)
    assert out.steps.tolist() == [0, 1, 2] * 4
    assert train.history.steps.tolist() == out.steps.tolist()


@pytest.mark.parametrize(
    ("returned", "error"),
    [(lambda r: r.new_tensor([0]), "shape"), (lambda r: r.float(), "integer"), (lambda r: None, "NoneType")],
    ids=["shape", "dtype", "none"],
)
def test_what_revise_returns_is_checked(returned, error):
    budget = Budget()
    budget.dtype = torch.int64
    budget.revise = lambda t, logits, y, remaining: returned(remaining)
    with pytest.raises(TypeError, match=f"the budget's revise returned .*{error}"):
        bt.BulletTrain(bt.PGDAT(eps=0.1), budget=budget).step(network(), X, Y)


def test_uniform_steps_has_to_be_a_property():
    budget = Budget()
    budget.uniform_steps = lambda: None
    with pytest.raises(TypeError, match=r"Budget\.uniform_steps is a method; make it a property"):
        bt.BulletTrain(bt.PGDAT(), budget=budget)


class Radii(bt.StepBudget):
    """A radius for each example."""

    def allocate(self, category, score=None, past=None):
        return Allocated(torch.full_like(category, self.boundary), eps=torch.full((len(category),), 0.01))


@pytest.mark.parametrize(
    "objective",
    [
        bt.PGDAT(eps=0.1, attack=baselines.N_FGSM),
        baselines.Free(eps=0.1),
        bt.PGDAT(eps=torch.full((6,), 0.1)),
        bt.AugMix(views=lambda x: (x, x)),
    ],
    ids=["no projection", "free", "tensor eps", "augmix"],
)
def test_a_radius_that_the_attack_would_ignore_is_refused(objective):
    train = bt.BulletTrain(objective, budget=Radii.uniform(1, scale=1.0), check_every=0)
    with pytest.raises(ValueError, match=r"the budget allocates eps, but the attack of .* takes no eps"):
        train.step(network(), X, Y)


def test_radii_of_the_history_are_refused_at_once_where_nothing_projects():
    with pytest.raises(ValueError, match="RadiusBudget gives each example an eps, but PGDAT does not project"):
        bt.BulletTrain(bt.PGDAT(eps=0.1, attack=baselines.N_FGSM), budget=bt.RadiusBudget(1, eps=0.1), dataset_size=M)


def test_the_penalty_of_gradalign_is_weighted():
    class Weighted(bt.StepBudget):
        def allocate(self, category, score=None, past=None):
            return Allocated(torch.ones_like(category), weight=torch.zeros(len(category)))

    train = bt.BulletTrain(baselines.GradAlign(beta=100.0, eps=0.1), budget=Weighted.uniform(1, scale=1.0))
    assert train.step(network(), X, Y).loss.item() == 0


def test_a_target_of_ones_own_has_the_right_gradient_in_closed_form():
    z, target = torch.randn(5, K), torch.rand(5, K)  # rows do not add up to 1
    expected = gradient_at_logits(kl, z, torch.zeros(5, dtype=torch.int64), target)
    assert torch.allclose(closed_form(kl)(z, None, target), expected, atol=1e-6)


def test_an_example_with_score_0_has_been_seen():
    train = bt.BulletTrain(bt.TRADES(eps=0.1, selection="last"), budget=bt.StepBudget(2, 1), dataset_size=M)
    train.score = lambda z, y: torch.where(z.argmax(dim=1) == y, 0.0, -1.0)
    train.history.visits.fill_(1)
    train.history.keep(INDEX, torch.zeros(M), torch.zeros(M), torch.zeros(M, dtype=torch.int64))
    train.robust_fraction.load_state_dict({"value": 1.0, "gamma": 0.8, "momentum": 0.9})
    assert (train.step(network(), X, Y, index=INDEX).category == bt.Category.ROBUST).all()
    assert not torch.signbit(train.history.score).any() or (train.history.score != 0).all()


def test_an_objective_on_the_logits_of_its_start_gets_these():
    class FromStart(bt.PGDAT):
        has_clean_term = True
        z_of = "start"
        own_selection = "train"
        options = ("selection",)

        def loss(self, z, z_prime, y, touched=None, weight=None):
            self.seen = z
            return F.cross_entropy(z_prime, y)

    net, start, objective = network(), X + 0.05, FromStart(eps=0.1, bounds=None)
    bt.BulletTrain(objective, budget=bt.StepBudget(2, 1)).step(net, X, Y, start=start)
    assert torch.equal(objective.seen, net(start))
    with pytest.raises(ValueError, match="has no clean logits; give selection='eval'"):
        bt.BulletTrain(FromStart(eps=0.1, selection="last"), budget=bt.StepBudget(2, 1), dataset_size=M)


@pytest.mark.parametrize("eps", [0.031, float(np.float32(0.031))])
def test_the_papers_step_size_does_not_hang_on_the_last_digit(eps):
    assert bt.StepBudget.uniform(10).boundary_step(eps) == 0.007


@pytest.mark.parametrize("budget", [bt.EarlyStopBudget(3), bt.RadiusBudget(3, eps=0.031)], ids=["early", "radius"])
def test_three_steps_of_other_allocations_reach_across_the_ball(budget):
    train = bt.BulletTrain(bt.PGDAT(), budget=budget, dataset_size=M)
    past = train.history.of(INDEX)
    given = Allocated.of(budget.allocate(torch.ones_like(Y), None, past))
    sizes = budget.step_sizes(torch.ones_like(Y), given.steps, 0.031) if given.step_sizes is None else given.step_sizes
    assert 3 * float(sizes[0]) == pytest.approx(2.25 * 0.031)


def test_short_attacks_are_warned_of_in_a_shuffled_budget_too():
    with pytest.warns(UserWarning, match="the attack moves an example by 3 × 0.007"):
        bt.BulletTrain(bt.PGDAT(), budget=bt.ShuffledBudget(bt.StepBudget.uniform(3), 0.031))


def test_gamma_can_be_changed_between_steps():
    train = bt.BulletTrain(bt.PGDAT(eps=0.1), budget=bt.StepBudget(2, 1), gamma=0.8)
    train.gamma = 0.5
    assert train.gamma == train.robust_fraction.gamma == 0.5
    for wrong in (0.0, 5.0):
        with pytest.raises(ValueError, match="gamma is"):
            train.gamma = wrong
    with pytest.raises(ValueError, match="momentum is 1"):
        train.robust_fraction.momentum = 1.0
    assert train.gamma == 0.5


def test_starting_points_follow_the_examples():
    train = bt.BulletTrain(bt.PGDAT(eps=0.1), budget=bt.StepBudget.uniform(1))
    assert train.step(network(), X, Y, start=X.double()).x_prime.dtype == X.dtype
    with pytest.raises(TypeError, match="start is int64"):
        train.step(network(), X, Y, start=torch.zeros_like(X, dtype=torch.int64))


@pytest.mark.parametrize(
    "state",
    [
        {"robust_fraction": {"value": 0.3}},
        {"robust_fraction": None},
        {"objective": {"weights": torch.ones(2)}},
        {"generators": {"objective": None}},
        {"steps_taken": -1},
    ],
    ids=lambda state: next(iter(state)),
)
def test_a_state_that_does_not_fit_changes_nothing(state):
    train = bt.BulletTrain(bt.TRADES(eps=0.1, generator=torch.Generator()), budget=bt.StepBudget(2, 1))
    before = train.state_dict()
    fine = {"robust_fraction": {"value": 0.3, "gamma": 0.7, "momentum": 0.5}, "steps_taken": 7}
    with pytest.raises(ValueError, match=r"state|checkpoint|steps_taken|gamma"):
        train.load_state_dict({**fine, **state})
    after = train.state_dict()
    assert (after["robust_fraction"], after["steps_taken"]) == (before["robust_fraction"], before["steps_taken"])
    assert torch.equal(after["generators"]["objective"], before["generators"]["objective"])


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"step_size": torch.full((M,), -0.05)}, "step_size has values that are negative"),
        ({"step_size": torch.full((3,), 0.05)}, r"step_size has the shape \(3,\); 12 examples need"),
        ({"step_size": 0.05, "loss": "kl", "target": torch.full((1, K), 1 / K)}, r"target has the shape \(1, 4\)"),
        ({"step_size": 0.05, "random_start": "nope"}, "there is no random start 'nope'"),
    ],
    ids=["negative", "shape", "target", "start"],
)
def test_arguments_of_pgd_are_checked(wrong, match):
    with pytest.raises(ValueError, match=match):
        pgd(network(), X, Y, eps=0.1, steps=2, **wrong)


def test_the_start_of_an_attack_is_checked_when_it_is_made():
    with pytest.raises(ValueError, match="there is no random start 'nope'"):
        Attack(start="nope")


def test_outputs_can_be_compared():
    out = bt.BulletTrain(bt.PGDAT(eps=0.1), budget=bt.StepBudget.uniform(1)).step(network(), X, Y)
    assert out == out
    assert out != out.clone()


def test_a_budget_that_revises_needs_logits():
    with pytest.raises(ValueError, match="revises steps during the attack of AugMix"):
        bt.BulletTrain(bt.AugMix(views=lambda x: (x, x)), budget=bt.EarlyStopBudget(1))
    with pytest.raises(ValueError, match="GaussianBudget needs the scores"):
        bt.GaussianBudget(3).allocate(torch.ones_like(Y))


def test_a_budget_that_reads_the_history_needs_one():
    budget = Budget()
    budget.allocate = lambda category, score=None, past=None: (past.margin < 0).long()
    with pytest.raises(
        ValueError, match=r"the budget reads past, but no history is kept .*give BulletTrain dataset_size="
    ):
        bt.BulletTrain(bt.PGDAT(eps=0.1), budget=budget).step(network(), X, Y)


def test_examples_that_are_there_twice_are_warned_of():
    train = bt.BulletTrain(bt.PGDAT(eps=0.1), budget=bt.StepBudget.uniform(1), dataset_size=M)
    with pytest.warns(UserWarning, match="11 of 12 examples of a mini-batch, over all processes, are repeated"):
        train.step(network(), X, Y, index=torch.zeros_like(INDEX))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train.check_every = 1
        train.step(network(), X, Y, index=INDEX)


def test_a_checksum_is_of_every_bit_of_the_weights():
    weights = [torch.randn(5), torch.randn(3, 2).T, torch.ones(2, dtype=torch.bfloat16), torch.ones(1).double()]
    before = checksum(weights)
    for weight in weights:
        weight[0] += 2e-2
        assert checksum(weights) != before
        before = checksum(weights)
    assert checksum([]) == 0
    assert checksum([torch.zeros(3)]) == 1


def test_a_penalty_of_ones_own_has_to_take_weights():
    class Penalised(bt.PGDAT):
        def penalty(self, model, x, y, start):
            return torch.zeros(())

    class Weighted(bt.StepBudget):
        def allocate(self, category, score=None, past=None):
            return Allocated(torch.ones_like(category), weight=torch.ones(len(category)))

    plain = bt.BulletTrain(Penalised(eps=0.1), budget=bt.StepBudget.uniform(1))
    plain.step(network(), X, Y)
    weighted = bt.BulletTrain(Penalised(eps=0.1), budget=Weighted.uniform(1))
    with pytest.raises(TypeError, match=r"Penalised's penalty takes .*it is called with .*weight"):
        weighted.step(network(), X, Y)


def test_processes_share_the_examples_of_an_epoch():
    train = bt.BulletTrain(bt.PGDAT(eps=0.1), budget=bt.StepBudget.uniform(1), dataset_size=M)
    whole = list(HistorySampler(train.history, LeaveOut(epochs=2)))
    samplers = [HistorySampler(train.history, LeaveOut(epochs=2), num_replicas=5, rank=rank) for rank in range(5)]
    assert [len(sampler) for sampler in samplers] == [2] * 5
    parts = [list(sampler) for sampler in samplers]
    assert [parts[i % 5][i // 5] for i in range(10)] == whole[:10]  # a rest of two is left out
    samplers[0].set_epoch(7)
    assert samplers[0].choose.epoch == 7
    with pytest.raises(ValueError, match="rank is 5"):
        HistorySampler(train.history, LeaveOut(epochs=2), num_replicas=5, rank=5)
