"""Selection by the logits that an example had when it was last trained on: no forward, and no guess at who that was."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import bullettrain as bt
from bullettrain import BulletTrain, Category, StepBudget
from bullettrain.engine import captured
from bullettrain.engine.cuda_graphs import materialize
from bullettrain.history import History, HistorySampler, margin_of, unseen_on_boundary
from conftest import batch, counting, norm_net, tiny_net
from emulated import EmulatedRunner
from grouped import Fast

OBJECTIVES = {"trades": bt.TRADES, "mart": bt.MART}
N = 20


def make(name, dataset_size=N, **settings):
    if name == "augmix":
        return BulletTrain(bt.AugMix(selection="last"), budget=StepBudget(1, 0), dataset_size=dataset_size, **settings)
    objective = OBJECTIVES[name](eps=0.05, selection="last")
    return BulletTrain(objective, budget=StepBudget(4, 2), dataset_size=dataset_size, **settings)


def examples(net):
    """N images, half of whose labels the network has right."""
    x, y = batch(N, dtype=torch.float64)
    with torch.no_grad():
        y[::2] = copy.deepcopy(net)(x).argmax(1)[::2]
    return (x * 255).round() / 255, y


def drawn(train, x, seed):
    chance = torch.Generator().manual_seed(seed)
    if isinstance(train.objective, bt.AugMix):
        return train.objective.draw(len(x), x.device, chance)
    return (x + 0.01 * torch.randn(x.shape, dtype=x.dtype, generator=chance)).clamp(0, 1)


def visits(sizes, epochs, seed=0):
    """Batches of indices: each epoch all examples once, in another order."""
    chance = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        yield from torch.split(torch.randperm(N, generator=chance), sizes)


# ------------------------------------------------------------------------------------------------ the rule


@given(
    st.lists(st.sampled_from([-0.2, -0.0, 0.0, 0.1, 0.2]), min_size=1, max_size=9), st.floats(0, 1), st.integers(0, 99)
)
def test_who_has_not_been_seen_is_on_the_boundary(scores, F_R, seed):
    history = History(30)
    index = torch.randperm(30, generator=torch.Generator().manual_seed(seed))[: len(scores)]
    history.keep(index, torch.tensor(scores), torch.zeros(len(scores)), torch.zeros_like(index))
    svar = torch.tensor(scores)
    zero = (svar == 0) & ~torch.signbit(svar)  # which means not seen, and is stored as a tiny score
    assert torch.equal(history.of(index).score, svar.masked_fill(zero, torch.finfo(torch.float32).tiny))
    others = torch.arange(30)[~torch.isin(torch.arange(30), index)]
    assert not any(values.any() for values in history.of(others))  # nobody else's has changed
    assert history.of(index).visits.tolist() == [1] * len(scores)
    category = unseen_on_boundary(bt.separate)(svar, F_R)
    new = (svar == 0) & ~torch.signbit(svar)
    assert (category[new] == Category.BOUNDARY).all()
    # Of the others none is robust that would not be by themselves.
    alone = bt.separate(svar[~new], F_R) if (~new).any() else category[~new]
    assert (category[~new][alone != Category.ROBUST] == alone[alone != Category.ROBUST]).all()
    assert ((category[~new] == Category.OUTLIER) == torch.signbit(svar[~new])).all()
    if not new.any():
        assert torch.equal(category, bt.separate(svar, F_R))
    several = unseen_on_boundary(bt.separate)(torch.stack([svar, svar.flip(0)]), F_R)  # each by itself
    assert torch.equal(several, torch.stack([category, category.flip(0)]))


@pytest.mark.parametrize("name", ["trades", "mart", "augmix"])
def test_a_step_selects_by_the_loss_logits_of_the_last_visit(name):
    net = norm_net().double()
    x, y = examples(net)
    train, optimizer = make(name), torch.optim.SGD(net.parameters(), lr=0.1)
    remembered, seen = torch.zeros(N), set()
    for turn, index in enumerate(visits(8, epochs=3)):
        F_R = train.robust_fraction.value
        out = train.step(net, x[index], y[index], start=drawn(train, x[index], turn), index=index)
        assert torch.equal(out.svar, remembered[index])
        new = torch.tensor([int(i) not in seen for i in index])
        safe = torch.where(new, out.svar.max(), out.svar)
        assert torch.equal(out.category, torch.where(new, int(Category.BOUNDARY), bt.separate(safe, F_R)))
        assert out.work.selection == 0
        remembered[index] = bt.signed_prediction_variance(out.z, y[index]).float()
        seen |= set(index.tolist())
        optimizer.zero_grad()
        out.loss.backward()
        optimizer.step()
    assert len({int(c) for c in out.category}) > 1  # it does select


@settings(max_examples=6)
@given(
    name=st.sampled_from(["trades", "mart", "augmix"]),
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=3),
    bucket=st.integers(1, 4),
    known=st.sampled_from([0.0, 0.4, 0.8]),
    seed=st.integers(0, 50),
)
def test_nothing_is_forwarded_to_select(name, sizes, bucket, known, seed):
    """AugMix makes 1 + 2·F_B forwards an example, in the group engine as in the plain step."""
    net = tiny_net(seed=seed)
    x, y = batch(N, channels=1, size=4, dtype=torch.float64, seed=seed)
    right = net(x).argmax(1).detach()
    y = torch.where(torch.arange(N) % 3 > 0, right, y)
    train = make(name)
    train.robust_fraction.load_state_dict({"value": known, "gamma": 0.8, "momentum": 0.9})
    known_scores = bt.signed_prediction_variance(net(x).detach(), y)
    train.history.keep(torch.arange(N), known_scores, torch.zeros(N), torch.zeros(N, dtype=torch.int64))
    parts = torch.split(torch.randperm(N, generator=torch.Generator().manual_seed(seed))[: sum(sizes)], sizes)
    batches = [(x[i], y[i], drawn(train, x[i], 0), i) for i in parts]
    group = Fast(train, net, size_multiple=bucket)
    copy_ = group._phases_for(batches[0][0]).forwards.copy
    seen = counting(net, *([] if copy_ is None else [copy_]))
    outs = group.train_on(batches)
    touched = sum(int((out.steps > 0).sum()) for out in outs)
    least = sum(sizes) + (2 if name == "augmix" else 1) * touched
    assert seen["train"] >= least if bucket > 1 else seen["train"] == least
    assert seen["held"] == (sum(sizes) if name == "trades" else 0)  # the target of its attack
    total = sum(out.work.total for out in outs)
    assert total == pytest.approx(seen["held"] + 2 * seen["attack"] + 3 * seen["train"])


# ---------------------------------------------------------------------------------------------- its engines


@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize("name", ["trades", "mart", "augmix"])
def test_a_group_of_one_is_the_plain_step(name, pair):
    net = norm_net().double()
    x, y = examples(net)
    theirs = copy.deepcopy(net)
    plain, train = make(name), make(name)
    optimizer, own = (torch.optim.SGD(n.parameters(), lr=0.1, momentum=0.9) for n in (theirs, net))
    group = Fast(train, net, own, pair=pair)
    for turn, index in enumerate(visits(8, epochs=3)):
        start = drawn(train, x[index], turn)
        expected = plain.step(theirs, x[index], y[index], start=start, index=index)
        optimizer.zero_grad()
        expected.loss.backward()
        optimizer.step()
        (out,) = group.train_on([(x[index], y[index], start, index)])
        assert torch.equal(out.category, expected.category)
        assert torch.equal(out.steps, expected.steps)
        assert torch.allclose(out.x_prime, expected.x_prime, atol=1e-12, rtol=0)
        assert out.loss.item() == pytest.approx(expected.loss.item(), abs=1e-12)
        assert out.work == expected.work
        for mine, theirs_ in zip(train.history.tensors(), plain.history.tensors(), strict=True):
            assert torch.allclose(mine, theirs_, atol=1e-7)
    for (key, a), b in zip(net.state_dict().items(), theirs.state_dict().values(), strict=True):
        assert torch.allclose(a, b, atol=1e-12, rtol=0), key


def test_a_longer_group_of_augmix_differs_by_nothing_but_an_older_F_R():
    """Neither views nor last scores become stale within a group: with F_R held, k is no matter."""
    results = []
    for k in (1, 3):
        torch.manual_seed(0)
        net = norm_net().double()
        x, y = examples(net)
        train, own = make("augmix", momentum=0.0, gamma=1e-9), torch.optim.SGD(net.parameters(), lr=0.1)
        group = Fast(train, net, own, attack_group=k)
        steps = list(enumerate(visits(8, epochs=3)))
        for at in range(0, len(steps), k):
            some = steps[at : at + k]
            group.train_on([(x[i], y[i], drawn(train, x[i], turn), i) for turn, i in some])
        results.append([*net.state_dict().values(), *train.history.tensors()])
    for a, b in zip(*results, strict=True):
        assert torch.allclose(a, b, atol=1e-12)


@pytest.mark.parametrize("name", ["mart", "augmix"])
def test_replayed_it_is_what_it_is_run_at_once(name):
    """As a CUDA graph would: scores are read and written where they lie, also after a state was loaded."""
    results = []
    for emulated in (False, True):
        torch.manual_seed(0)
        net = norm_net().double()
        x, y = examples(net)
        train, optimizer = make(name), torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        materialize(optimizer)
        group = Fast(train, net, optimizer, attack_group=2, size_multiple=2, emulated=emulated)
        steps, seen = list(enumerate(visits(5, epochs=4))), []
        for at in range(0, len(steps), 2):
            some = steps[at : at + 2]
            if at == 8:
                state = copy.deepcopy(train.state_dict())
                state["history"]["score"] = train.history.score.flip(0).clone()
                train.load_state_dict(state)
            batches = [(x[i], y[i], drawn(train, x[i], turn), i) for turn, i in some]
            with pytest.MonkeyPatch.context() as patch:  # views as a GPU makes them, of all rows and without looking
                patch.setattr("bullettrain.augmix.operations._apply", lambda change, images, to, _: change(images, to))
                for out in group.train_on(batches):
                    seen += [out.loss.clone(), out.steps.clone(), out.svar.clone()]
        results.append([*seen, *(t.detach().clone() for t in net.state_dict().values()), *train.history.tensors()])
    for a, b in zip(*results, strict=True):
        assert torch.allclose(a, b, atol=1e-12)


@pytest.mark.parametrize("group", [1, 2])
def test_in_a_loop_of_ones_own(group):
    """Without a GPU `Captured` is the plain step, or a group at once: both are told who is trained on."""
    net = norm_net().double()
    x, y = examples(net)
    train = make("augmix")
    fast = bt.Captured(train, net, attack_group=group, on_message=lambda line: None)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    parts = list(visits(10, epochs=2))
    if group == 1:
        outs = [(fast.step(x[i], y[i], index=i), optimizer.step())[0] for i in parts]
    else:
        outs = []
        for at in range(0, len(parts), 2):
            for out in fast.steps((x[i], y[i], i) for i in parts[at : at + 2]):
                optimizer.step()
                outs.append(out)
    assert all((out.category == Category.BOUNDARY).all() for out in outs[:2])
    assert (outs[-1].svar != 0).all()
    with pytest.raises(ValueError, match="a mini-batch is x, y and index here; one with 2 parts was given"):
        list(fast.steps([(x, y)]))
    with pytest.raises(ValueError, match="index is missing"):
        fast.step(x, y)
    plain = bt.Captured(
        BulletTrain(bt.TRADES(), budget=StepBudget(3, 1)), net, attack_group=2, on_message=lambda line: None
    )
    with pytest.raises(ValueError, match="a mini-batch is x and y here; one with 3 parts was given"):
        list(plain.steps([(x, y, x)]))


def test_scores_of_other_examples_are_the_ones_that_move(monkeypatch):
    """Captured, as if on a GPU: a new table, or one that has been elsewhere meanwhile, is not the one recorded."""
    monkeypatch.setattr(captured, "_on_gpu", lambda x: True)
    monkeypatch.setattr(captured, "CudaGraphRunner", EmulatedRunner)
    net = norm_net().double()
    x, y = examples(net)
    train = make("mart")
    net, x = net.float(), x.float()
    fast, index = bt.Captured(train, net, on_message=print), torch.arange(N)
    for _ in range(2):
        fast.step(x, y, index=index)
    old = train.history.score
    for fresh in (History(N), History(2 * N)):
        train.history = fresh
        first, second = (fast.step(x, y, index=index) for _ in range(2))
        assert (first.category == Category.BOUNDARY).all()
        assert torch.allclose(second.svar, bt.signed_prediction_variance(first.z, y).float(), atol=1e-6)
        assert fresh.score.any()
        assert fresh.score is not old


# ------------------------------------------------------------------------- what is kept, and what is refused


def test_a_state_goes_on_with_its_scores_and_refuses_others():
    net = norm_net().double()
    x, y = examples(net)
    train, other = make("augmix"), make("augmix")
    train.step(net, x, y, index=torch.arange(N))
    assert train.history.score.any()
    other.load_state_dict(train.state_dict())
    for mine, theirs in zip(other.history.tensors(), train.history.tensors(), strict=True):
        assert torch.equal(mine, theirs)
    assert "history" not in BulletTrain(bt.AugMix(), budget=StepBudget(1, 0)).state_dict()
    few = make("augmix", dataset_size=7)
    before = few.state_dict()
    short = {**few.history.state_dict(), "margin": torch.zeros(2, 3)}
    for history, message in (
        (train.history.state_dict(), "a history of 20 examples; there are 7 here"),
        ([1, 2], "has to have score, margin, steps, visits"),
        (short, "margin are no row of numbers"),
    ):
        with pytest.raises(ValueError, match=message):
            few.load_state_dict({**train.state_dict(), "history": history})
        assert str(few.state_dict()) == str(before)  # nothing was changed
    old = {name: value for name, value in train.state_dict().items() if name != "history"}
    with pytest.warns(UserWarning, match="no history of the examples: all count as not seen yet"):
        other.load_state_dict(old)
    assert not any(values.any() for values in other.history.tensors())
    without = bt.BulletTrain(bt.TRADES(), budget=bt.StepBudget(2, 1))
    with pytest.warns(UserWarning, match="a history of the examples, which is lost; to keep it, give BulletTrain data"):
        without.load_state_dict({name: value for name, value in train.state_dict().items() if name != "generators"})


def test_a_forward_that_overflowed_leaves_its_examples_on_the_boundary_and_the_others_alone():
    net = norm_net().double()
    x, y = examples(net)
    train = make("augmix", check_every=0)
    index = torch.arange(N)
    broken = net.register_forward_hook(lambda module, args, out: out.index_fill(0, torch.arange(4), torch.nan))
    train.step(net, x, y, index=index)
    broken.remove()
    assert torch.equal(train.history.score == 0, index < 4)
    train.robust_fraction.load_state_dict({"value": 0.4, "gamma": 0.8, "momentum": 0.9})
    out = train.step(net, x, y, index=index)
    assert (out.category[:4] == Category.BOUNDARY).all()
    assert (out.category[4:] == Category.ROBUST).any()


def test_an_index_that_nothing_would_use_is_refused():
    net = norm_net().double()
    x, y = examples(net)
    train = BulletTrain(bt.TRADES(eps=0.05), budget=StepBudget(2, 1))
    with pytest.raises(ValueError, match="index is given, but no history is kept; give BulletTrain dataset_size="):
        train.step(net, x, y, index=torch.arange(N))
    assert train.steps_taken == 0


def test_a_score_that_is_no_number_is_said_before_it_is_remembered():
    net = norm_net().double()
    x, y = examples(net)
    train = make("augmix", score=lambda z, y: z[:, 0] * torch.nan)
    with pytest.raises(ValueError, match="the score returned NaN"):
        train.step(net, x, y, index=torch.arange(N))
    group = Fast(train, net)
    with pytest.raises(ValueError, match="the score returned NaN"):
        group.train_on([(x, y, drawn(train, x, 0), torch.arange(N))])


@pytest.mark.parametrize("budget", [StepBudget(1, 0), StepBudget.uniform(1)])
def test_settings_that_change_later_are_refused_as_well(budget):
    net = norm_net().double()
    x, y = examples(net)
    train = BulletTrain(bt.AugMix(selection="train" if budget.uniform_steps is None else "last"), budget=budget)
    train.step(net, x, y)
    train.objective.selection, train.budget = "last", StepBudget(1, 0)
    with pytest.raises(ValueError, match="give dataset_size="):
        train.step(net, x, y, index=torch.arange(N))
    with pytest.raises(ValueError, match="give dataset_size="):
        Fast(train, net).train_on([(x, y, drawn(train, x, 0), torch.arange(N))])


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (None, r"index is missing; give \(20,\) int64, the dataset indices of the batch"),
        (torch.arange(19), r"index is int64 of shape \(19,\)"),
        (torch.arange(20.0), r"index is float32"),
        (torch.arange(20) + 1, "index goes from 1 to 20; there are examples 0 to 19"),
    ],
)
def test_examples_that_are_not_there_are_refused(index, message):
    net = norm_net().double()
    x, y = examples(net)
    train = make("augmix")
    with pytest.raises(ValueError, match=message):
        train.step(net, x, y, index=index)
    group = Fast(train, net)
    with pytest.raises(ValueError, match=message):
        group.train_on([(x, y, drawn(train, x, 0), index)])


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: BulletTrain(bt.AugMix(selection="last"), budget=StepBudget(1, 0)), "give dataset_size="),
        (
            lambda: BulletTrain(bt.PGDAT(selection="last"), budget=StepBudget(3, 1), dataset_size=9),
            "PGDAT has no clean log",
        ),
        (
            lambda: BulletTrain(
                bt.TRADES(selection="last"), budget=StepBudget(3, 1), separation=bt.OracleSeparation(), dataset_size=9
            ),
            "the separation looks at what logits are now",
        ),
        (lambda: bt.TRADES(selection="latest"), "there are eval, train, last"),
    ],
)
def test_what_does_not_go_together_is_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_equal_steps_for_everyone_need_no_scores():
    net = norm_net().double()
    x, y = examples(net)
    train = BulletTrain(bt.TRADES(eps=0.05, selection="last"), budget=StepBudget.uniform(2))
    assert train.step(net, x, y).svar is None


# ------------------------------------------------------------------------------------ allocations that remember


@given(st.integers(1, 12), st.integers(0, 12), st.lists(st.floats(-1, 1), min_size=1, max_size=20), st.integers(0, 50))
def test_steps_from_the_last_margin(most, least, margins, seed):
    if least > most:
        with pytest.raises(ValueError, match="more than max_steps"):
            bt.HistoryBudget(most, min_steps=least)
        return
    budget, history, n = bt.HistoryBudget(most, min_steps=least), History(40), len(margins)
    index = torch.randperm(40, generator=torch.Generator().manual_seed(seed))[: n + 1]
    history.keep(index[:n], None, torch.tensor(margins), torch.zeros(n, dtype=torch.int64))
    steps = budget.allocate(torch.ones(n + 1, dtype=torch.int64), None, history.of(index))
    assert steps[n] == most  # it has not been seen yet
    assert (steps >= least).all()
    assert (steps <= most).all()
    for margin, count in zip(margins, steps[:n].tolist(), strict=True):
        if margin <= 0:
            assert count == most
    order = torch.tensor(margins).argsort()
    assert (steps[:n][order].diff() <= 0).all()  # the larger the margin, the fewer steps


@given(st.integers(1, 12), st.floats(0.05, 2), st.lists(st.floats(-0.25, 0.25), min_size=1, max_size=20))
def test_a_gaussian_over_the_score_has_its_top_at_the_boundary(most, width, scores):
    budget, svar = bt.GaussianBudget(most, width=width), torch.tensor(scores)
    category = bt.separate(svar, 0.5)
    steps = budget.allocate(category, svar)
    outlier = category == Category.OUTLIER
    assert (steps[outlier] == 0).all()
    mine, order = steps[~outlier], svar[~outlier].argsort()
    assert ((mine >= 1) & (mine <= most)).all()
    assert (mine[order].diff() <= 0).all()
    assert (mine[svar[~outlier] == 0] == most).all()


def test_margins_are_of_probabilities_and_of_the_mean_view():
    z, y = torch.randn(2, 5, 3, dtype=torch.float64), torch.randint(3, (5,))
    p = z.softmax(-1)
    expected = [[float(v[i, y[i]] - max(v[i, k] for k in range(3) if k != y[i])) for i in range(5)] for v in p]
    assert torch.allclose(margin_of(z[0], y), torch.tensor(expected[0], dtype=torch.float64))
    assert torch.allclose(margin_of(z, y), torch.tensor(expected, dtype=torch.float64).mean(0))


@pytest.mark.parametrize("emulated", [False, True])
def test_a_budget_by_history_is_the_plain_steps_when_it_is_fast(emulated):
    net = norm_net().double()
    x, y = examples(net)
    plain, train = (
        BulletTrain(bt.PGDAT(eps=0.05), budget=bt.HistoryBudget(4, min_steps=1), dataset_size=N) for _ in range(2)
    )
    theirs = copy.deepcopy(net)
    optimizer, own = (torch.optim.SGD(n.parameters(), lr=0.3) for n in (theirs, net))
    group, steps = Fast(train, net, own, size_multiple=2, pair=True, emulated=emulated), set()
    for turn, index in enumerate(visits(8, epochs=3)):
        start = drawn(train, x[index], turn)
        expected = plain.step(theirs, x[index], y[index], start=start, index=index)
        optimizer.zero_grad()
        expected.loss.backward()
        optimizer.step()
        (out,) = group.train_on([(x[index], y[index], start, index)])
        assert torch.equal(out.steps, expected.steps)
        assert torch.allclose(out.x_prime, expected.x_prime, atol=1e-10)
        steps |= set(out.steps.tolist())
    assert len(steps) > 1
    for mine, other in zip(train.history.tensors(), plain.history.tensors(), strict=True):
        assert torch.allclose(mine, other, atol=1e-6)
    with pytest.raises(ValueError, match="HistoryBudget needs to know the examples"):
        BulletTrain(bt.PGDAT(), budget=bt.HistoryBudget(3)).step(net, x, y)


def test_a_sampler_reads_the_history_when_an_epoch_begins():
    """An epoch of the examples with the lowest margins on x', by torch's own loader."""
    x, y = batch(12, seed=0)
    data = torch.utils.data.TensorDataset(x, y, torch.arange(12))
    train = BulletTrain(bt.MART(eps=0.05), budget=StepBudget(2, 1), dataset_size=12)
    sampler = HistorySampler(train.history, lambda history: history.margin.argsort(stable=True)[:6])
    loader, net = torch.utils.data.DataLoader(data, batch_size=3, sampler=sampler), norm_net()
    train.step(net, x, y, index=torch.arange(12))
    hard = set(train.history.margin.argsort(stable=True)[:6].tolist())
    seen = [index for _, _, index in loader]
    assert set(torch.cat(seen).tolist()) == hard
    assert len(sampler) == 6
    for x_, y_, index in loader:
        train.step(net, x_, y_, index=index)
    assert train.history.visits.sum() == 18
    with pytest.raises(TypeError, match="choose returned bool of shape"):
        list(HistorySampler(train.history, lambda history: history.margin > 0))
    without = BulletTrain(bt.MART(eps=0.05), budget=StepBudget(2, 1))
    with pytest.raises(ValueError, match=r"^the history has no examples; give BulletTrain dataset_size="):
        HistorySampler(without.history, bt.LeaveOut(epochs=3))


def test_a_history_without_an_index_is_refused():
    """It would stay empty without a word."""
    train = bt.BulletTrain(bt.TRADES(), budget=bt.StepBudget(2, 1), dataset_size=40)
    x, y = torch.rand(8, 3, 8, 8), torch.arange(8) % 4
    with pytest.raises(ValueError, match=r"the history of 40 examples is used, and index is missing"):
        train.step(norm_net(), x, y)
    train.step(norm_net(), x, y, index=torch.arange(8))
    assert int(train.history.visits.sum()) == 8
