import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import bullettrain as bt
from bullettrain import Category, StepBudget, baselines, theoretical_speedup
from bullettrain.history import Past

EVERY = torch.tensor([Category.OUTLIER, Category.BOUNDARY, Category.ROBUST])


def test_steps_and_step_sizes_by_class():
    budget = StepBudget(boundary=10, robust=2)
    steps = budget.allocate(EVERY)
    assert steps.dtype == torch.int64
    assert steps.tolist() == [0, 10, 2]
    assert budget.step_sizes(EVERY, steps, 0.031).tolist() == [0.0, 0.007, 1.7 * 0.031 / 2]
    assert budget.step_sizes(EVERY, steps, 8 / 255).tolist() == [0.0, 2.25 * 8 / 255 / 10, 1.7 * 8 / 255 / 2]


def test_step_sizes_can_be_given():
    assert StepBudget(10, 2, step_size=0.01).boundary_step(0.031) == 0.01
    assert StepBudget(7, 0, 7, ordered=False, scale=1.7).step_sizes(EVERY, EVERY, 0.3).tolist() == [
        pytest.approx(1.7 * 0.3 / 7),
        pytest.approx(1.7 * 0.3 / 7),
        0.0,
    ]


def test_steps_that_do_not_reach_the_edge_of_the_ball_are_warned_of_once():
    """At ε = 0.031 a step is 0.007, as in the paper, whatever their number."""
    with pytest.warns(UserWarning, match="the attack moves") as warned:
        bt.BulletTrain(bt.TRADES(eps=0.031), budget=StepBudget(3, 3, 3))
    assert [str(warning.message) for warning in warned] == [
        "the attack moves an example by 3 × 0.007 = 0.021 at most, less than eps 0.031; for steps of 2.25·eps/3 give "
        "scale=2.25 or step_size=0.02325"
    ]
    assert warned[0].filename == __file__


@pytest.mark.parametrize(
    ("eps", "budget"),
    [
        (0.031, StepBudget(10, 2)),
        (0.031, StepBudget(5, 1)),
        (0.031, StepBudget(3, 1, scale=2.25)),
        (0.031, StepBudget(3, 1, step_size=0.02325)),
        (8 / 255, StepBudget(3, 1)),
        (0.031, StepBudget(0, 0)),
        (torch.full((3, 1, 1), 0.1), StepBudget(3, 1)),
    ],
)
def test_steps_that_reach_the_edge_of_the_ball_are_not_warned_of(eps, budget):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bt.BulletTrain(bt.PGDAT(eps=eps), budget=budget)


def test_the_baselines_reach_the_edge_of_the_ball():
    """YOPO's two passes move ten times."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for make in (baselines.yopo, baselines.fast, baselines.n_fgsm):
            make(bt.TRADES(eps=0.031))
    with pytest.warns(UserWarning, match=r"by 4 × .* give scale=1\.125 or step_size=0\.0174375$"):
        bt.BulletTrain(baselines.yopo(bt.TRADES(), updates=2).objective, budget=StepBudget.uniform(2))


def test_uniform():
    budget = StepBudget.uniform(10)
    assert budget.allocate(EVERY).tolist() == [10, 10, 10]
    assert budget.uniform_steps == 10
    assert StepBudget(10, 2).uniform_steps is None
    assert StepBudget.uniform(0).uniform_steps == 0


@given(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9))
def test_order_is_wanted_unless_it_is_waived(boundary, robust, outlier):
    free = StepBudget(boundary, robust, outlier, ordered=False)
    assert free.allocate(EVERY).tolist() == [outlier, boundary, robust]
    if boundary >= robust >= outlier:
        StepBudget(boundary, robust, outlier)
    else:
        with pytest.raises(ValueError, match="ordered=False"):
            StepBudget(boundary, robust, outlier)


@pytest.mark.parametrize("bad", [-1, 2.5, 3.0, "3", True, None])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_counts_are_whole_numbers(bad, place):
    counts = [10, 2, 0]
    counts[place] = bad
    with pytest.raises((TypeError, ValueError), match=r"boundary|robust|outlier"):
        StepBudget(*counts, ordered=False)


def test_one_step_size_rule_at_a_time():
    with pytest.raises(ValueError, match="give one of them"):
        StepBudget(10, 2, step_size=0.1, scale=2.0)
    with pytest.raises(ValueError, match="above 0"):
        StepBudget(10, 2, step_size=0.0)


# The paper's rows: budget, F_B, F_R, F_O, its theoretical speed-up. YOPO has none, and the N_B sweep no fractions.
PAPER = {
    "TRADES, λ = 1": (StepBudget.uniform(10), (1, 0, 0), 1.0),
    "TRADES, λ = 1/6": (StepBudget.uniform(10), (1, 0, 0), 1.0),
    "TRADES + FAST": (StepBudget.uniform(1), (1, 0, 0), 5.5),
    "TRADES + BT, N_R = 0": (StepBudget(10, 0), (0.26, 0.55, 0.18), 3.0),
    "TRADES + BT, N_R = 2": (StepBudget(10, 2), (0.28, 0.54, 0.18), 2.3),
    "MART": (StepBudget.uniform(10), (1, 0, 0), 1.0),
    "MART + FAST": (StepBudget.uniform(1), (1, 0, 0), 5.5),
    "MART + BT, N_R = 1": (StepBudget(10, 1), (0.29, 0.44, 0.27), 2.5),
    "MART + BT, N_R = 2": (StepBudget(10, 2), (0.30, 0.43, 0.26), 2.2),
    "FAST, N = 2": (StepBudget.uniform(2), (1, 0, 0), 3.7),
    "FAST, N = 3": (StepBudget.uniform(3), (1, 0, 0), 2.8),
    "FAST, N = 4": (StepBudget.uniform(4), (1, 0, 0), 2.2),
    "FAST, N = 5": (StepBudget.uniform(5), (1, 0, 0), 1.8),
}


def overlap(low, high, figure):
    return low <= figure + 0.05 and figure - 0.05 <= high


@pytest.mark.parametrize("row", PAPER)
def test_theoretical_speedup_at_the_papers_fractions(row):
    budget, shares, figure = PAPER[row]

    def at(shift):
        boundary, robust, outlier = (share + shift if 0 < share < 1 else share for share in shares)
        return theoretical_speedup(budget, boundary=boundary, robust=robust, outlier=outlier, steps=10)

    assert overlap(at(0.005), at(-0.005), figure)


@pytest.mark.parametrize(("F_B", "figure"), [(0.35, 1.8), (0.36, 1.8), (1.0, 1.0), (0.0, 3.0)])
def test_theoretical_speedup_of_augmix(F_B, figure):
    def at(shift):
        return theoretical_speedup(StepBudget(1, 0), boundary=F_B + shift, robust=1 - F_B, outlier=0, views=2)

    assert at(0) == pytest.approx(3 / (1 + 2 * F_B))
    assert overlap(at(0.005), at(-0.005), figure)


def test_speedups_against_another_number_of_steps():
    # N_B = 3 against the plain algorithm's 10, at the TRADES row's fractions.
    shares = {"boundary": 0.28, "robust": 0.54, "outlier": 0.18}
    budget = StepBudget(3, 2)
    assert theoretical_speedup(budget, **shares, steps=10) == pytest.approx(11 / (0.28 * 3 + 0.54 * 2 + 1))
    work = 1 + 2 * (0.28 * 3 + 0.54 * 2) + 3 * (2 - 0.18)
    assert work_speedup(bt.TRADES().cost, budget, **shares, steps=10) == pytest.approx(27 / work)


def work_speedup(cost, budget, *, boundary, robust, outlier, steps=None):
    """The work with ``steps`` (None: N_B) for all examples over that of ``budget`` at these fractions."""
    parts = ((boundary, budget.boundary), (robust, budget.robust), (outlier, budget.outlier))
    plain = cost.work(steps=budget.boundary if steps is None else steps, touched=1, selects=False)
    mined = cost.work(steps=sum(share * n for share, n in parts), touched=sum(share for share, n in parts if n))
    return plain.total / mined.total


WORK = {  # SPEC's table: (objective, plain at N = 10, with BulletTrain at N_R = 2 from Σ and s)
    "TRADES": (bt.TRADES(), 27, lambda total, s: 1 + 2 * total + 3 * (2 - s)),
    "MART": (bt.MART(), 26, lambda total, s: 2 * total + 3 * (2 - s)),
    "PGD-AT": (bt.PGDAT(), 23, lambda total, s: 1 + 2 * total + 3),
}


@pytest.mark.parametrize("name", WORK)
@given(shares=st.tuples(st.floats(0, 1), st.floats(0, 1), st.floats(0.01, 1)), robust=st.integers(0, 9))
def test_work_is_the_specified_count(name, shares, robust):
    objective, plain, formula = WORK[name]
    F_B, F_R, F_O = (share / sum(shares) for share in shares)
    total, untouched = F_B * 10 + F_R * robust, F_O + (F_R if robust == 0 else 0)
    assert objective.cost.work(steps=10, touched=1, selects=False).per_example == plain
    mined = objective.cost.work(steps=total, touched=1 - untouched)
    assert mined.per_example == pytest.approx(formula(total, untouched))
    speedup = work_speedup(objective.cost, StepBudget(10, robust), boundary=F_B, robust=F_R, outlier=F_O)
    assert speedup == pytest.approx(plain / mined.per_example)


def test_work_of_augmix():
    cost = bt.AugMix().cost
    assert cost.work(steps=1, touched=1, selects=False).per_example == 9
    assert cost.work(steps=0.35, touched=0.35).per_example == pytest.approx(3 + 6 * 0.35)


@pytest.mark.parametrize(
    ("objective", "robust", "shares", "figure"),
    [
        (bt.TRADES(), 2, (0.28, 0.54, 0.18), 1.90),
        (bt.TRADES(), 0, (0.26, 0.55, 0.18), 2.71),
        (bt.MART(), 1, (0.29, 0.44, 0.27), 2.19),
        (bt.MART(), 2, (0.30, 0.43, 0.26), 2.01),
    ],
)
def test_work_speedup_at_the_papers_fractions(objective, robust, shares, figure):
    boundary, strong, outlier = shares
    speedup = work_speedup(objective.cost, StepBudget(10, robust), boundary=boundary, robust=strong, outlier=outlier)
    assert speedup == pytest.approx(figure, abs=0.03)


@given(
    st.lists(st.lists(st.booleans(), min_size=6, max_size=6), min_size=1, max_size=5),
    st.integers(1, 6),
    st.integers(1, 4),
)
def test_an_attack_stops_some_steps_after_its_first_success(wrong, most, further):
    """Replayed one by one: min(most, t + further) steps, t the first iteration that is wrong."""
    budget, y = bt.EarlyStopBudget(most, extra_steps=further), torch.zeros(len(wrong), dtype=torch.int64)
    remaining, taken = budget.allocate(y), torch.zeros_like(y)
    for t in range(most):
        acting = remaining > 0
        logits = torch.tensor([[0.0, 1.0] if one[t] else [1.0, 0.0] for one in wrong])
        taken += acting
        remaining = torch.where(acting, budget.revise(t, logits, y, (remaining - 1).clamp_min(0)), 0)
    for count, one in zip(taken.tolist(), wrong, strict=True):
        first = next((t for t in range(most) if one[t]), most)
        assert count == min(most, first + further)


@given(st.lists(st.integers(0, 2), min_size=1, max_size=20))
def test_shuffled_steps_are_the_same_steps_with_their_sizes(categories):
    category, inner = torch.tensor(categories), StepBudget(10, 2, 1)
    given_ = bt.ShuffledBudget(inner, 0.031).allocate(category)
    own = inner.allocate(category)
    pairs = zip(own.tolist(), inner.step_sizes(category, own, 0.031).tolist(), strict=True)
    assert sorted(zip(given_.steps.tolist(), given_.step_sizes.tolist(), strict=True)) == sorted(pairs)


@given(st.lists(st.floats(-1, 1, width=32), min_size=1, max_size=8), st.floats(0.1, 1))
def test_radii_shrink_where_the_last_attack_went_far(margins, low):
    margin, y = torch.tensor(margins), torch.zeros(len(margins), dtype=torch.int64)
    past = Past(margin, margin, y, torch.ones_like(y))
    given_ = bt.RadiusBudget(3, eps=0.1, min_radius=low).allocate(y, None, past)
    expected = [0.1 * (1 + (1 - low) * min(m, 0)) for m in margins]
    assert given_.eps.tolist() == pytest.approx(expected, rel=1e-5)
    assert (given_.step_sizes / given_.eps).tolist() == pytest.approx([0.75] * len(margins), rel=1e-5)
    unseen = bt.RadiusBudget(3, eps=0.1, min_radius=low).allocate(y, None, past._replace(visits=torch.zeros_like(y)))
    assert unseen.eps.tolist() == pytest.approx([0.1] * len(margins))


def test_allocations_refuse_what_they_cannot_do():
    with pytest.raises(ValueError, match="it has to be at least 1"):
        bt.EarlyStopBudget(3, extra_steps=0)
    with pytest.raises(ValueError, match="cannot be dealt out"):
        bt.ShuffledBudget(bt.EarlyStopBudget(3), 0.1)
    with pytest.raises(ValueError, match="RadiusBudget needs to know the examples"):
        bt.RadiusBudget(3).allocate(EVERY)


@given(st.floats(0.01, 0.4), st.booleans())
def test_a_budget_has_the_eps_of_the_objective(eps, shuffled):
    """It would replace the objective's without a word."""

    def train(objective, own):
        radius = bt.RadiusBudget(10, eps=own)
        return bt.BulletTrain(objective, budget=bt.ShuffledBudget(radius, eps) if shuffled else radius, dataset_size=4)

    train(bt.PGDAT(eps=eps), eps)
    for norm, own in (("linf", eps / 2), ("l2", 2 * eps)):
        with pytest.raises(ValueError, match=r"^RadiusBudget has eps .*, but PGDAT has .*; give both the same$"):
            train(bt.PGDAT(eps=eps, norm=norm), own)
    with pytest.raises(ValueError, match=r"^RadiusBudget needs a number for eps|^ShuffledBudget .* PGDAT has 1;"):
        train(bt.PGDAT(eps=torch.full((3, 1, 1), eps)), eps)
    tensor = bt.TRADES(eps=torch.full((3, 1, 1), eps))
    bt.BulletTrain(tensor, budget=bt.ShuffledBudget(StepBudget(4, 2), 1.0))
    with pytest.raises(ValueError, match=r"^ShuffledBudget has eps"):
        bt.BulletTrain(tensor, budget=bt.ShuffledBudget(StepBudget(4, 2), eps))
