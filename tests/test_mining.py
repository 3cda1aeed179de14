import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

import bullettrain as bt
import reference
from bullettrain import Category

NAMES = {"outlier": Category.OUTLIER, "boundary": Category.BOUNDARY, "robust": Category.ROBUST}
SCORES = [
    bt.signed_prediction_variance,
    bt.signed_cross_entropy,
    bt.signed_margin,
    bt.signed_gradient_norm,
    bt.random_score,
]

# Few values, so that ties and −0.0 are common.
score_lists = st.lists(st.sampled_from([-0.2, -0.1, -0.0, 0.0, 0.05, 0.1, 0.15, 0.2]), min_size=1, max_size=20)
fractions = st.one_of(st.sampled_from([0.0, 0.25, 0.5, 1.0]), st.floats(0, 1))
logit_arrays = arrays(
    "float64", array_shapes(min_dims=2, max_dims=2, min_side=2, max_side=7), elements=st.integers(-3, 3)
)


@given(logit_arrays, st.data())
def test_svar_is_the_literal_one(values, data):
    labels = data.draw(st.lists(st.integers(0, values.shape[1] - 1), min_size=len(values), max_size=len(values)))
    ours = bt.signed_prediction_variance(torch.from_numpy(values), torch.tensor(labels))
    assert ours.dtype == torch.float64
    for got, row, label in zip(ours.tolist(), values.tolist(), labels, strict=True):
        literal = reference.svar(row, label)
        assert got == pytest.approx(literal, abs=1e-15)
        assert math.copysign(1, got) == math.copysign(1, literal)


@given(score_lists, fractions)
def test_separate_is_the_literal_one(scores, F_R):
    literal = [NAMES[name] for name in reference.separate(scores, F_R)]
    svar = torch.tensor(scores, dtype=torch.float64)
    assert bt.separate(svar, F_R).tolist() == literal
    assert bt.separate(svar, torch.tensor(F_R, dtype=torch.float64)).tolist() == literal


@given(score_lists, st.sampled_from([0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0]))
def test_separate_in_float32_agrees_on_the_float32_scores(scores, F_R):
    svar = torch.tensor(scores, dtype=torch.float32)
    literal = [NAMES[name] for name in reference.separate(svar.double().tolist(), F_R)]
    assert bt.separate(svar, F_R).tolist() == literal


@given(st.lists(st.lists(st.floats(-0.25, 0.25), min_size=4, max_size=4), min_size=1, max_size=5), st.floats(0, 1))
def test_separate_takes_batches_each_by_itself(scores, F_R):
    svar = torch.tensor(scores, dtype=torch.float64)
    assert torch.equal(bt.separate(svar, F_R), torch.stack([bt.separate(one, F_R) for one in svar]))


def test_separate_is_exact_for_large_batches_in_float32():
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):  # float32 ranks would be off by an example here and there
        svar = torch.randint(-50, 100, (501,), generator=generator).float() / 1000
        F_R = int(torch.randint(0, 501, (), generator=generator)) / 500
        literal = [NAMES[name] for name in reference.separate(svar.double().tolist(), F_R)]
        assert bt.separate(svar, F_R).tolist() == literal


@given(score_lists, fractions)
def test_separate_commutes_with_a_permutation(scores, F_R):
    svar = torch.tensor(scores, dtype=torch.float64)
    order = torch.randperm(len(svar))
    assert torch.equal(bt.separate(svar[order], F_R), bt.separate(svar, F_R)[order])


def test_degenerate_batches_have_one_right_answer():
    def names(scores, F_R):
        return [Category(c).name for c in bt.separate(torch.tensor(scores), F_R).tolist()]

    assert names([0.2], 0.0) == names([0.2], 1.0) == ["ROBUST"]  # at its own threshold
    assert names([-0.2], 0.5) == ["OUTLIER"]
    assert names([-0.0, 0.0], 0.0) == ["OUTLIER", "ROBUST"]
    assert names([-0.1, -0.2, -0.0], 0.3) == ["OUTLIER"] * 3
    assert names([0.1, 0.1, 0.1], 0.0) == ["ROBUST"] * 3  # all ties: none is below the threshold
    assert names([0.1, 0.2, 0.3], 1.0) == ["ROBUST"] * 3
    assert names([0.1, 0.2, 0.3], 0.0) == ["BOUNDARY", "BOUNDARY", "ROBUST"]
    assert names([-0.1, 0.1, 0.2, 0.3, 0.4], 0.5) == ["OUTLIER", "BOUNDARY", "ROBUST", "ROBUST", "ROBUST"]


def test_uniform_softmax_is_an_outlier_when_wrong():
    logits = torch.zeros(2, 3)
    svar = bt.signed_prediction_variance(logits, torch.tensor([1, 0]))
    assert torch.signbit(svar).tolist() == [True, False]
    assert bt.separate(svar, 0.5).tolist() == [Category.OUTLIER, Category.ROBUST]


@pytest.mark.parametrize("score", SCORES)
def test_every_score_is_negative_exactly_where_the_prediction_is_wrong(score):
    logits, labels = torch.randn(200, 5), torch.randint(5, (200,))
    logits[:5] = 0.0  # ties
    value = score(logits, labels)
    assert value.shape == (200,)
    assert torch.equal(torch.signbit(value), logits.argmax(1) != labels)
    assert score(logits.double(), labels).dtype == torch.float64
    assert score(logits.bfloat16(), labels).dtype == torch.float32


@pytest.mark.parametrize("score", SCORES)
def test_scores_refuse_float_labels(score):
    with pytest.raises((TypeError, RuntimeError), match=r"class indices as int64|Long|int64"):
        score(torch.rand(4, 3), torch.zeros(4))


@pytest.mark.parametrize("score", SCORES[:-1])
def test_scores_rise_with_confidence_in_the_true_class(score):
    confidence = torch.linspace(0.1, 4, 30)
    logits = torch.stack([confidence, torch.zeros(30), torch.zeros(30)], dim=1)
    value = score(logits, torch.zeros(30, dtype=torch.int64))
    assert (value.diff() > 0).all()


def test_two_class_scores_rank_alike():
    logits = torch.randn(100, 2, dtype=torch.float64)
    labels = logits.argmax(1)
    ranks = [score(logits, labels).argsort().tolist() for score in SCORES[:-1]]
    assert all(rank == ranks[0] for rank in ranks)


@given(
    st.lists(st.lists(st.booleans(), min_size=1, max_size=8), min_size=1, max_size=6),
    st.floats(0.01, 1),
    st.floats(0, 0.99),
)
def test_robust_fraction_is_the_literal_one(batches, gamma, momentum):
    fraction, literal = bt.RobustFraction(gamma, momentum), 0.0
    for hits in batches:
        y = torch.zeros(len(hits), dtype=torch.int64)
        z = torch.tensor([[1.0, 0.0] if hit else [0.0, 1.0] for hit in hits])
        fraction.update(z, y)
        literal = reference.updated_F_R(literal, [0 if hit else 1 for hit in hits], [0] * len(hits), gamma, momentum)
        assert float(fraction.value) == pytest.approx(literal, abs=1e-15)
    assert 0 <= float(fraction.value) <= gamma


def test_a_value_that_was_read_stays():
    fraction = bt.RobustFraction()
    before = fraction.value
    fraction.update(torch.tensor([[1.0, 0.0]]), torch.tensor([0]))
    assert float(before) == 0
    assert float(fraction.value) > 0


def test_robust_fraction_averages_views_and_resumes():
    fraction = bt.RobustFraction(gamma=1.0, momentum=0.5)
    views = torch.tensor([[[1.0, 0.0], [1.0, 0.0]], [[0.0, 1.0], [1.0, 0.0]]])  # hits: 1, 1 and 0, 1
    fraction.update(views, torch.tensor([0, 0]))
    assert float(fraction.value) == 0.5 * 0.75
    resumed = bt.RobustFraction()
    resumed.load_state_dict(fraction.state_dict())
    assert resumed.state_dict() == fraction.state_dict() == {"value": 0.375, "gamma": 1.0, "momentum": 0.5}


@pytest.mark.parametrize(
    ("gamma", "momentum"), [(0.0, 0.9), (1.1, 0.9), (-1, 0.9), (math.nan, 0.9), (0.8, 1.0), (0.8, -0.1)]
)
def test_robust_fraction_refuses(gamma, momentum):
    with pytest.raises(ValueError, match="it has to be"):
        bt.RobustFraction(gamma, momentum)


class Threshold(torch.nn.Module):
    """Class 0 above 0.5, class 1 below: the distance to the boundary is known."""

    def forward(self, x):
        v = x.flatten(1)[:, 0] - 0.5
        return torch.stack([v, -v], dim=1)


def test_oracle_finds_the_true_classes():
    x = torch.tensor([0.1, 0.45, 0.52, 0.58, 0.65, 0.9])[:, None, None, None]
    y = torch.zeros(6, dtype=torch.int64)
    net = Threshold()
    oracle = bt.OracleSeparation(eps=0.1, steps=10)
    found = oracle.bind(net, x, y, net(x))(torch.zeros(6), 0.0)
    assert [Category(c).name[0] for c in found.tolist()] == ["O", "O", "B", "B", "R", "R"]


class Ridge(torch.nn.Module):
    """Class 0 on a ridge whose top has no gradient: only a random start finds the way down."""

    def forward(self, x):
        v = 0.002 - (x.flatten(1)[:, 0] - 0.5) ** 2
        return torch.stack([v, -v], dim=1)


def test_the_oracle_starts_at_random_and_can_be_fixed():
    x, y = torch.full((5, 1, 1, 1), 0.5), torch.zeros(5, dtype=torch.int64)
    oracle = bt.OracleSeparation(eps=0.1, generator=torch.Generator().manual_seed(0))
    assert oracle.bind(Ridge(), x, y, Ridge()(x))(torch.zeros(5), 0.0).tolist() == [Category.BOUNDARY] * 5
    first = oracle.generator.get_state()
    again = bt.OracleSeparation(eps=0.1, generator=torch.Generator().manual_seed(0))
    again.bind(Ridge(), x, y, Ridge()(x))
    assert torch.equal(again.generator.get_state(), first)


@pytest.mark.parametrize(
    "bad", [{"eps": -1.0}, {"eps": 0.1, "steps": 0}, {"eps": 0.1, "norm": "l5"}, {"eps": 0.1, "step_size": 0}]
)
def test_the_oracle_refuses(bad):
    with pytest.raises(ValueError):
        bt.OracleSeparation(**bad)


def test_the_oracle_takes_ball_and_bounds_from_the_objective():
    oracle, x, y = bt.OracleSeparation(steps=3), torch.rand(4, 1, 1, 1), torch.zeros(4, dtype=torch.int64)
    for objective in (bt.TRADES(eps=0.5, norm="l2", bounds=(-1, 1)), bt.PGDAT(eps=0.2)):
        train = bt.BulletTrain(objective, budget=bt.StepBudget(2, 1), separation=oracle)
        suited = train.separation.suited_to(objective)
        assert (suited.eps, suited.norm, suited.bounds) == (objective.eps, objective.norm, objective.bounds)
        train.step(Threshold(), x, y)
    assert oracle.eps is oracle.norm is oracle.bounds is None  # shared by both, and changed by none
    with pytest.raises(ValueError, match="the oracle has no eps; give it one"):
        oracle.bind(Threshold(), x, y, Threshold()(x))


def test_the_oracle_attacks_within_the_objectives_bounds(monkeypatch):
    x, y, seen = torch.tensor([-1.0, -0.4, 0.3, 1.0])[:, None, None, None], torch.zeros(4, dtype=torch.int64), []
    attack = bt.oracle.pgd
    monkeypatch.setattr(bt.oracle, "pgd", lambda *args, **kw: seen.append(attack(*args, **kw)) or seen[-1])
    objective = bt.TRADES(eps=0.1, bounds=(-1, 1))
    for oracle, radius in ((bt.OracleSeparation(), 0.1), (bt.OracleSeparation(eps=0.2, bounds=(-1, 1)), 0.2)):
        bt.BulletTrain(objective, budget=bt.StepBudget(2, 1), separation=oracle).step(Threshold(), x, y)
        assert 0.09 < (seen[-1] - x).abs().max() <= radius + 1e-6


@pytest.mark.parametrize(
    ("objective", "oracle", "message"),
    [
        (bt.TRADES(bounds=(-1, 1)), {"bounds": (0, 1)}, r"the oracle's bounds are \(0, 1\), but the objective's are"),
        (bt.TRADES(), {"norm": "l2"}, "give the oracle eps: .*TRADES has one in another norm"),
        (bt.AugMix(), {}, "give the oracle eps: .*AugMix has no ball"),
    ],
)
def test_an_oracle_that_does_not_go_with_the_objective_is_refused_at_once(objective, oracle, message):
    with pytest.raises(ValueError, match=message):
        bt.BulletTrain(objective, budget=bt.StepBudget(1, 0), separation=bt.OracleSeparation(**oracle))


@given(st.integers(2, 30), st.floats(0.05, 0.95))
def test_share_of_robust_follows_F_R(m, F_R):
    svar = torch.rand(m, dtype=torch.float64)
    assume(len(set(svar.tolist())) == m)
    share = (bt.separate(svar, F_R) == Category.ROBUST).double().mean()
    assert abs(float(share) - F_R) <= 1 / m + 1e-9
