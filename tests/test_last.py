"""Selection by the logits that an example had when it was last trained on: no forward, and no guess at who that was."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import bullettrain as bt
from bullettrain import BulletTrain, Category, StepBudget
from bullettrain.engine import captured
from bullettrain.engine.graphed import materialize, optimizer_tensors
from bullettrain.engine.group import GroupEngine, GroupSettings
from bullettrain.mining import LastScores
from conftest import batch, counting, norm_net, tiny_net
from emulated import Emulated

OBJECTIVES = {"trades": bt.TRADES, "mart": bt.MART}
N = 20


def make(name, examples=N, **settings):
    if name == "augmix":
        return BulletTrain(bt.AugMix(selection="last"), budget=StepBudget(1, 0), examples=examples, **settings)
    objective = OBJECTIVES[name](eps=0.05, selection="last")
    return BulletTrain(objective, budget=StepBudget(4, 2), examples=examples, **settings)


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
    last = LastScores(30)
    index = torch.randperm(30, generator=torch.Generator().manual_seed(seed))[: len(scores)]
    last.keep(index, torch.tensor(scores))
    svar = last.of(index)
    assert torch.equal(svar, torch.tensor(scores))
    assert not last.of(torch.arange(30)[~torch.isin(torch.arange(30), index)]).any()  # nobody else's has changed
    category = last.careful(bt.separate)(svar, F_R)
    new = (svar == 0) & ~torch.signbit(svar)
    assert (category[new] == Category.BOUNDARY).all()
    # Of the others none is robust that would not be by themselves.
    alone = bt.separate(svar[~new], F_R) if (~new).any() else category[~new]
    assert (category[~new][alone != Category.ROBUST] == alone[alone != Category.ROBUST]).all()
    assert ((category[~new] == Category.OUTLIER) == torch.signbit(svar[~new])).all()
    if not new.any():
        assert torch.equal(category, bt.separate(svar, F_R))
    several = last.careful(bt.separate)(torch.stack([svar, svar.flip(0)]), F_R)  # each by itself
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


@settings(max_examples=25)
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
    train.last.keep(torch.arange(N), bt.signed_prediction_variance(net(x).detach(), y))
    parts = torch.split(torch.randperm(N, generator=torch.Generator().manual_seed(seed))[: sum(sizes)], sizes)
    batches = [(x[i], y[i], drawn(train, x[i], 0), i) for i in parts]
    group = GroupEngine(train, net, lambda: None, settings=GroupSettings(group=3, bucket=bucket, captured=True))
    group._fill(batches, sum(sizes))  # the one forward that finds the number of classes
    seen = counting(net, *([] if group.still is None else [group.still.shadow]))
    outs = group.step(batches)
    touched = sum(int((out.steps > 0).sum()) for out in outs)
    assert seen["train"] == sum(sizes) + (2 if name == "augmix" else 1) * touched
    assert seen["held"] == (sum(sizes) if name == "trades" else 0)  # the target of its attack
    total = sum(out.work.total for out in outs)
    assert total == pytest.approx(seen["held"] + 2 * seen["attack"] + 3 * seen["train"])


# ---------------------------------------------------------------------------------------------- its engines


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("name", ["trades", "mart", "augmix"])
def test_a_group_of_one_is_the_plain_step(name, joint):
    net = norm_net().double()
    x, y = examples(net)
    theirs = copy.deepcopy(net)
    plain, train = make(name), make(name)
    optimizer, own = (torch.optim.SGD(n.parameters(), lr=0.1, momentum=0.9) for n in (theirs, net))
    group = GroupEngine(train, net, own.step, settings=GroupSettings(joint=joint))
    for turn, index in enumerate(visits(8, epochs=3)):
        start = drawn(train, x[index], turn)
        expected = plain.step(theirs, x[index], y[index], start=start, index=index)
        optimizer.zero_grad()
        expected.loss.backward()
        optimizer.step()
        (out,) = group.step([(x[index], y[index], start, index)])
        assert torch.equal(out.category, expected.category)
        assert torch.equal(out.steps, expected.steps)
        assert torch.allclose(out.x_prime, expected.x_prime, atol=1e-12, rtol=0)
        assert out.loss.item() == pytest.approx(expected.loss.item(), abs=1e-12)
        assert out.work == expected.work
        assert torch.allclose(train.last.live, plain.last.live, atol=1e-7)
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
        group = GroupEngine(train, net, own.step, settings=GroupSettings(group=k))
        steps = list(enumerate(visits(8, epochs=3)))
        for at in range(0, len(steps), k):
            some = steps[at : at + k]
            group.step([(x[i], y[i], drawn(train, x[i], turn), i) for turn, i in some])
        results.append([*net.state_dict().values(), train.last.live])
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
        group = GroupEngine(train, net, optimizer.step, settings=GroupSettings(group=2, bucket=2, captured=True))
        if emulated:
            group.run = Emulated(lambda g=group, o=optimizer: [*g.tensors(), *optimizer_tensors(o)])
            group.reset = group.run.reset
        steps, seen = list(enumerate(visits(5, epochs=4))), []
        for at in range(0, len(steps), 2):
            some = steps[at : at + 2]
            if at == 8:
                train.load_state_dict(copy.deepcopy(train.state_dict()) | {"scores": train.last.live.flip(0).clone()})
            batches = [(x[i], y[i], drawn(train, x[i], turn), i) for turn, i in some]
            with pytest.MonkeyPatch.context() as patch:  # views as a GPU makes them, of all rows and without looking
                patch.setattr("bullettrain.augmix.operations._apply", lambda change, images, to, _: change(images, to))
                for out in group.step(batches):
                    seen += [out.loss.clone(), out.steps.clone(), out.svar.clone()]
        results.append([*seen, *(t.detach().clone() for t in net.state_dict().values()), train.last.live])
    for a, b in zip(*results, strict=True):
        assert torch.allclose(a, b, atol=1e-12)


@pytest.mark.parametrize("group", [1, 2])
def test_in_a_loop_of_ones_own(group):
    """Without a GPU `Captured` is the plain step, or a group at once: both are told who is trained on."""
    net = norm_net().double()
    x, y = examples(net)
    train = make("augmix")
    fast = bt.Captured(train, net, group=group, say=lambda line: None)
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
    plain = bt.Captured(BulletTrain(bt.TRADES(), budget=StepBudget(3, 1)), net, group=2, say=lambda line: None)
    with pytest.raises(ValueError, match="a mini-batch is x and y here; one with 3 parts was given"):
        list(plain.steps([(x, y, x)]))


def test_scores_of_other_examples_are_the_ones_that_move(monkeypatch):
    """Captured, as if on a GPU: a new table, or one that has been elsewhere meanwhile, is not the one recorded."""
    monkeypatch.setattr(captured, "_on_gpu", lambda x: True)
    monkeypatch.setattr(captured, "Graphs", Emulated)
    net = norm_net().double()
    x, y = examples(net)
    train = make("mart")
    net, x = net.float(), x.float()
    fast, index = bt.Captured(train, net, say=print), torch.arange(N)
    for _ in range(2):
        fast.step(x, y, index=index)
    old = train.last.live
    for fresh in (LastScores(N), LastScores(2 * N)):
        train.last = fresh
        first, second = (fast.step(x, y, index=index) for _ in range(2))
        assert (first.category == Category.BOUNDARY).all()
        assert torch.allclose(second.svar, bt.signed_prediction_variance(first.z, y).float(), atol=1e-6)
        assert fresh.live.any()
        assert fresh.live is not old


# ------------------------------------------------------------------------- what is kept, and what is refused


def test_a_state_goes_on_with_its_scores_and_refuses_others():
    net = norm_net().double()
    x, y = examples(net)
    train, other = make("augmix"), make("augmix")
    train.step(net, x, y, index=torch.arange(N))
    assert train.last.live.any()
    other.load_state_dict(train.state_dict())
    assert torch.equal(other.last.live, train.last.live)
    assert "scores" not in BulletTrain(bt.AugMix(), budget=StepBudget(1, 0)).state_dict()
    few = make("augmix", examples=7)
    before = few.state_dict()
    for scores, message in ((train.last.live, "scores of 20 examples; there are 7 here"), ([1, 2], "no row of num")):
        with pytest.raises(ValueError, match=message):
            few.load_state_dict({**train.state_dict(), "scores": scores})
        assert str(few.state_dict()) == str(before)  # nothing was changed
    old = {name: value for name, value in train.state_dict().items() if name != "scores"}
    with pytest.warns(UserWarning, match="no last scores: until they are trained on again all are on the boundary"):
        other.load_state_dict(old)
    assert not other.last.live.any()


def test_a_forward_that_overflowed_leaves_its_examples_on_the_boundary_and_the_others_alone():
    net = norm_net().double()
    x, y = examples(net)
    train = make("augmix", check_every=0)
    index = torch.arange(N)
    broken = net.register_forward_hook(lambda module, args, out: out.index_fill(0, torch.arange(4), torch.nan))
    train.step(net, x, y, index=index)
    broken.remove()
    assert torch.equal(train.last.live == 0, index < 4)
    train.robust_fraction.load_state_dict({"value": 0.4, "gamma": 0.8, "momentum": 0.9})
    out = train.step(net, x, y, index=index)
    assert (out.category[:4] == Category.BOUNDARY).all()
    assert (out.category[4:] == Category.ROBUST).any()


def test_a_score_that_is_no_number_is_said_before_it_is_remembered():
    net = norm_net().double()
    x, y = examples(net)
    train = make("augmix", score=lambda z, y: z[:, 0] * torch.nan)
    with pytest.raises(ValueError, match="the score returned NaN"):
        train.step(net, x, y, index=torch.arange(N))
    group = GroupEngine(train, net, lambda: None)
    with pytest.raises(ValueError, match="the score returned NaN"):
        group.step([(x, y, drawn(train, x, 0), torch.arange(N))])


@pytest.mark.parametrize("budget", [StepBudget(1, 0), StepBudget.uniform(1)])
def test_settings_that_change_later_are_refused_as_well(budget):
    net = norm_net().double()
    x, y = examples(net)
    train = BulletTrain(bt.AugMix(selection="train" if budget.uniform_steps is None else "last"), budget=budget)
    train.step(net, x, y)
    train.objective.selection, train.budget = "last", StepBudget(1, 0)
    with pytest.raises(ValueError, match="give examples="):
        train.step(net, x, y, index=torch.arange(N))
    with pytest.raises(ValueError, match="give examples="):
        GroupEngine(train, net, lambda: None)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (None, r"index is missing; give \(20,\) int64, which of the 20 examples"),
        (torch.arange(19), r"index is int64 of shape \(19,\)"),
        (torch.arange(20.0), r"index is float32"),
        (torch.arange(20) + 1, "index goes from 1 to 20, but there are examples 0 to 19"),
    ],
)
def test_examples_that_are_not_there_are_refused(index, message):
    net = norm_net().double()
    x, y = examples(net)
    train = make("augmix")
    with pytest.raises(ValueError, match=message):
        train.step(net, x, y, index=index)
    group = GroupEngine(train, net, lambda: None)
    with pytest.raises(ValueError, match=message):
        group.step([(x, y, drawn(train, x, 0), index)])


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: BulletTrain(bt.AugMix(selection="last"), budget=StepBudget(1, 0)), "give examples="),
        (
            lambda: BulletTrain(bt.PGDAT(selection="last"), budget=StepBudget(3, 1), examples=9),
            "PGDAT has no clean log",
        ),
        (
            lambda: BulletTrain(
                bt.TRADES(selection="last"), budget=StepBudget(3, 1), separation=bt.OracleSeparation(), examples=9
            ),
            "the separation looks at what logits are now",
        ),
        (lambda: bt.TRADES(selection="latest"), "'eval' or 'train' mode, or 'last'"),
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
