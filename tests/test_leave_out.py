"""InfoBatch: examples that are learnt well are left out of an epoch at random, and those like them count more."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import bullettrain as bt
from bullettrain import BulletTrain, StepBudget
from bullettrain.history import History, HistorySampler, LeaveOut
from conftest import batch, norm_net
from grouped import Fast

MARGINS = st.integers(-64, 64).map(lambda n: n / 64)  # their sums are exact, in any order
PARTS = st.lists(st.tuples(MARGINS, st.booleans()), min_size=1, max_size=40)


def history_of(margins, seen=None):
    history = History(len(margins))
    history.margin.copy_(torch.tensor(margins))
    history.visits.copy_(torch.tensor([1] * len(margins) if seen is None else seen, dtype=torch.int64))
    return history


def chosen(history, epoch=0, **settings):
    """Weights and indices of an epoch."""
    leave_out = LeaveOut(**{"epochs": 10, **settings})
    leave_out.epoch = epoch
    indices = leave_out(history)
    return history.weight.clone(), indices


# ------------------------------------------------------------------------------------------------ the rule


@given(PARTS, st.floats(0, 0.99), st.integers(1, 4), st.integers(0, 99))
def test_some_above_the_mean_are_left_out_and_the_weights_add_up(parts, share, multiple, seed):
    margins, seen = [margin for margin, _ in parts], [known for _, known in parts]
    weight, indices = chosen(history_of(margins, seen), share=share, multiple=multiple, seed=seed)
    known = [margin for margin, k in parts if k]
    above = [k and margin > max(sum(known) / len(known), min(known)) for margin, k in parts]
    number = int(share * sum(above)) // multiple * multiple
    assert int((weight == 0).sum()) == number
    assert sorted(indices.tolist()) == weight.nonzero()[:, 0].tolist()
    assert len(indices) > 0
    for value, could_be in zip(weight.tolist(), above, strict=True):
        expected = sum(above) / (sum(above) - number) if could_be else 1
        assert value == pytest.approx(expected, rel=1e-6) or (value == 0 and could_be)
    assert weight.double().sum() == pytest.approx(len(parts), rel=1e-5)


@given(PARTS, st.floats(0, 0.99), st.integers(1, 4), st.integers(0, 99))
def test_chance_leaves_out_as_many_of_all_that_have_been_seen(parts, share, multiple, seed):
    margins, seen = [margin for margin, _ in parts], [known for _, known in parts]
    settings = {"share": share, "multiple": multiple, "seed": seed}
    ours, _ = chosen(history_of(margins, seen), **settings)
    control, _ = chosen(history_of(margins, seen), by="chance", **settings)
    assert (control == 0).sum() == (ours == 0).sum()
    assert (control[~torch.tensor(seen)] == 1).all()
    assert control[torch.tensor(seen) & (control > 0)].unique().numel() <= 1
    assert control.double().sum() == pytest.approx(len(parts), rel=1e-5)


@pytest.mark.parametrize("by", ["margin", "chance"])
def test_an_example_weighs_one_on_average(by):
    """And among those that may be left out none is preferred: the expected gradient is that of the whole dataset."""
    history = history_of([-0.9, -0.1, 0.0, 0.3, 0.5, 0.8, 0.9, 0.7], [1, 1, 1, 1, 1, 1, 0, 1])
    total = sum(chosen(history, by=by, seed=seed)[0] for seed in range(4000)) / 4000
    assert torch.allclose(total, torch.ones(8), atol=0.07)


@pytest.mark.parametrize("epochs", [1, 2, 3, 8, 30])
def test_nothing_is_left_out_at_the_end(epochs):
    history = history_of([-0.5, 0.1, 0.5, 0.6, 0.7])
    whole = [bool((chosen(history, epoch, epochs=epochs)[0] == 1).all()) for epoch in range(epochs)]
    full = [epoch + 1 > 0.875 * epochs for epoch in range(epochs)]
    assert whole == full
    assert full[-1]


def test_the_choice_follows_from_seed_epoch_and_history():
    history = history_of(torch.linspace(-1, 1, 40).tolist())
    again, other, later = (chosen(history, *e, seed=s)[1] for e, s in (((1,), 3), ((1,), 4), ((2,), 3)))
    assert torch.equal(chosen(history, 1, seed=3)[1], again)
    assert sorted(other.tolist()) != sorted(again.tolist()) != sorted(later.tolist())


def test_examples_that_are_all_alike_or_unknown_stay():
    assert (chosen(history_of([0.1] * 7))[0] == 1).all()  # their mean rounds to less than each
    assert (chosen(history_of([0.1, 0.9], [0, 0]))[0] == 1).all()


def test_wrong_arguments_are_refused():
    for settings, message in (
        ({"share": 1.0}, "share is 1.0; it has to be at least 0 and below 1"),
        ({"until": 2.0}, "until is 2.0"),
        ({"by": "luck"}, "by is 'luck'; it has to be 'margin' or 'chance'"),
    ):
        with pytest.raises(ValueError, match=message):
            LeaveOut(epochs=3, **settings)
    with pytest.raises(ValueError, match=r"weight is .*; it has to be floating-point of shape \(4,\)"):
        History(4).weigh(torch.ones(3))


def test_the_weights_are_part_of_the_state():
    history = history_of([-0.5, 0.1, 0.5, 0.6])
    plain = history.state_dict()
    weight, _ = chosen(history)
    other = History(4)
    other.load_state_dict(history.state_dict())
    assert torch.equal(other.weight, weight)
    assert torch.equal(other.weight_of(torch.tensor([2, 0])), weight[[2, 0]])
    other.load_state_dict(plain)
    assert other.weight is None
    assert other.weight_of(torch.tensor([0])) is None
    history.clear()
    assert history.weight is None


# ------------------------------------------------------------------------------------------------ steps


class Weighted:
    """A budget that gives weights of its own."""

    uniform_steps = None

    def __init__(self, weight):
        self.weight = weight

    def allocate(self, category, score=None, past=None):
        return bt.Allocated(StepBudget(2, 1).allocate(category), weight=self.weight)

    def step_sizes(self, category, steps, eps):
        return StepBudget(2, 1).step_sizes(category, steps, eps)


@pytest.mark.parametrize("objective", [bt.PGDAT, bt.TRADES, bt.MART])
def test_weights_of_the_history_are_those_of_an_allocation(objective):
    x, y = batch(6, dtype=torch.float64)
    index, weight = torch.tensor([5, 1, 3, 0, 2, 7]), torch.tensor([2.0, 1.0, 0.0, 4.0, 1.0, 3.0, 9.0, 0.5])
    net, start, losses = norm_net().double(), (x + 0.01 * torch.randn(x.shape, dtype=x.dtype)).clamp(0, 1), []
    for budget, weights in (
        (Weighted(weight[index]), None),
        (StepBudget(2, 1), weight),
        (Weighted(weight[index].sqrt()), weight.sqrt()),
        (StepBudget(2, 1), None),
    ):
        train = BulletTrain(objective(eps=0.05), budget=budget, dataset_size=8)
        if weights is not None:
            train.history.weigh(weights)
        losses.append(train.step(copy.deepcopy(net), x, y, start=start, index=index).loss.item())
    assert losses[0] == losses[1] == pytest.approx(losses[2], rel=1e-6)
    assert losses[3] != pytest.approx(losses[0])


@pytest.mark.parametrize("group", [1, 2])
def test_replayed_it_is_what_it_is_run_at_once(group):
    """As a CUDA graph would: new weights are read where the old ones were, and no size is captured anew."""
    results = []
    for emulated in (False, True):
        torch.manual_seed(0)
        net = norm_net().double()
        x, y = batch(24, dtype=torch.float64)
        train = BulletTrain(bt.TRADES(eps=0.05), budget=StepBudget.uniform(2), dataset_size=24)
        leave_out = LeaveOut(0.9, epochs=4, until=1.0, multiple=4 * group)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        fast, seen, graphs = Fast(train, net, optimizer, attack_group=group, emulated=emulated), [], []
        for epoch in range(4):
            parts = torch.split(leave_out(train.history), 4)
            noise = torch.Generator().manual_seed(epoch)
            start = (x + 0.01 * torch.randn(x.shape, dtype=x.dtype, generator=noise)).clamp(0, 1)
            for at in range(0, len(parts), group):
                outs = fast.train_on([(x[i], y[i], start[i], i) for i in parts[at : at + group]])
                seen += [out.loss for out in outs]
            seen.append(train.history.weight.clone())
            graphs.append(len(fast.runner.graphs) if emulated else 0)
        assert (seen[-1] == 0).any()
        assert fast.reason is None
        assert graphs == graphs[:1] * 4
        results.append([*seen, *train.history.tensors(), *(t.detach() for t in net.parameters())])
    for a, b in zip(*results, strict=True):
        assert torch.allclose(a, b, atol=1e-12)


def test_in_a_loop_of_ones_own_with_torchs_loader():
    x, y = batch(20, seed=0)
    data = torch.utils.data.TensorDataset(x, y, torch.arange(20))
    train, net = BulletTrain(bt.PGDAT(eps=0.05), budget=StepBudget.uniform(1), dataset_size=20), norm_net()
    sampler = HistorySampler(train.history, LeaveOut(epochs=8, multiple=4))
    loader, sizes = torch.utils.data.DataLoader(data, batch_size=4, sampler=sampler), []
    for _ in range(8):
        before = train.history.visits.clone()
        sizes.append([len(y_) for x_, y_, index in loader if train.step(net, x_, y_, index=index)])
        assert torch.equal(train.history.visits - before, (train.history.weight > 0).long())
    assert sizes[0] == sizes[7] == [4] * 5
    assert min(map(sum, sizes)) < 20
    assert {size for epoch in sizes for size in epoch} == {4}
