"""Fast phases against the plain step: groups, packed schedules, paired forwards, replayed graphs."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import bullettrain as bt
from bullettrain import BulletTrain, Category, StepBudget
from bullettrain.attacks import LOSSES, pgd
from bullettrain.attacks.losses import closed_form, gradient_at_logits
from bullettrain.attacks.schedule import packed, packed_sizes, ragged, ragged_sizes
from bullettrain.engine.cuda_graphs import materialize
from bullettrain.validation import DivergedError
from conftest import batch, counting, norm_net, tiny_net
from grouped import BUDGETS, OBJECTIVES, Fast, engine, learnable

# --------------------------------------------------------------------------------------------- schedules


@given(st.lists(st.integers(0, 7), min_size=1, max_size=30), st.integers(1, 5))
def test_packed_every_example_has_its_steps_and_never_meets_itself(counts, multiple):
    steps, most, sizes = torch.tensor(counts), max(counts), packed_sizes(counts, multiple)
    assert len(sizes) == min(most, sum(counts))
    if not sizes:
        return
    rows, had = packed(steps, most, sizes[0]), torch.zeros(len(counts) + 1, dtype=torch.int64)
    for t, n in enumerate(sizes):
        there = rows[t, :n]
        assert len(there[there < len(counts)].unique()) == int((there < len(counts)).sum())
        had.index_add_(0, there, torch.ones_like(there))
        assert n == len(counts) or n % multiple == 0
    assert torch.equal(had[:-1], steps)
    if multiple == 1:
        assert had[-1] == 0  # nobody stands idle
    # As few places as the steps need.
    assert sizes[0] < -(-sum(counts) // most) + multiple


@given(st.lists(st.integers(0, 7), min_size=1, max_size=30))
def test_ragged_is_who_has_more_than_t_steps_the_most_first(counts):
    steps = torch.tensor(counts)
    found = list(ragged(steps, counts))
    assert len(found) == max(counts) == len(ragged_sizes(counts))
    for t, rows in enumerate(found):
        rows = torch.arange(len(counts)) if rows is None else rows
        expected = sorted((i for i in range(len(counts)) if counts[i] > t), key=lambda i: -counts[i])
        assert rows.tolist() == expected


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_at_the_logits(name):
    logits, y = torch.randn(9, 5, dtype=torch.float64, requires_grad=True), torch.randint(5, (9,))
    target = torch.randn(9, 5, dtype=torch.float64).softmax(1)
    (expected,) = torch.autograd.grad(LOSSES[name](logits, y, target).sum(), logits)
    for found in (
        closed_form(LOSSES[name])(logits.detach(), y, target),
        gradient_at_logits(LOSSES[name], logits, y, target),
    ):
        assert torch.allclose(found, expected, atol=1e-14)


# ------------------------------------------------------------------------------------- against the plain step


@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize("counts", BUDGETS)
@pytest.mark.parametrize("name", sorted(OBJECTIVES))
def test_one_batch_and_a_bucket_of_one_is_the_plain_step(name, counts, pair):
    net = norm_net().double()
    batches = learnable(net, range(4))
    theirs = copy.deepcopy(net)
    plain, optimizer = engine(name, counts), torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9)
    own = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    train = engine(name, counts)
    group = Fast(train, net, own, pair=pair)
    for x, y, start in batches:
        expected = plain.step(theirs, x, y, start=start)
        optimizer.zero_grad()
        expected.loss.backward()
        optimizer.step()
        (out,) = group.train_on([(x, y, start)])
        assert torch.equal(out.category, expected.category)
        assert torch.equal(out.steps, expected.steps)
        assert torch.allclose(out.x_prime, expected.x_prime, atol=1e-12, rtol=0)
        assert out.loss.item() == pytest.approx(expected.loss.item(), abs=1e-12)
        again = len(y) if name == "mart" and train.needs_selection else 0  # its logits are not kept for the loss
        assert out.work.total == expected.work.total + again
        assert (out.svar is None) == (expected.svar is None)
        assert torch.allclose(out.z_prime, expected.z_prime, atol=1e-12)
        for (key, a), b in zip(net.state_dict().items(), theirs.state_dict().values(), strict=True):
            assert torch.allclose(a, b, atol=1e-12, rtol=0), key
        assert float(train.robust_fraction.value) == pytest.approx(float(plain.robust_fraction.value), abs=1e-15)


@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize("name", sorted(OBJECTIVES))
def test_a_group_is_attacked_with_the_same_weights_and_updated_one_by_one(name, pair):
    """Written out with the package's public pieces, one mini-batch at a time."""
    counts, budget = (4, 2, 0), StepBudget(4, 2)
    net = norm_net().double()
    batches = [*learnable(net, range(2)), *learnable(net, [7], m=5)]  # the last one short
    theirs = copy.deepcopy(net)
    train, own = engine(name, counts), torch.optim.SGD(net.parameters(), lr=0.1)
    group = Fast(train, net, own, pair=pair)
    outs = group.train_on(batches)
    assert (group._phases.forwards.paired is not None) == pair

    objective, F_R = OBJECTIVES[name](eps=0.05), bt.RobustFraction()
    F_R.load_state_dict({"value": 0.4, "gamma": 0.8, "momentum": 0.9})
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1)
    attacked = []
    probe = copy.deepcopy(theirs).train(name == "mart")
    selecting = [probe(x).detach() for x, _, _ in batches]
    for (x, y, start), s in zip(batches, selecting, strict=True):
        category = bt.separate(bt.signed_prediction_variance(s, y), F_R.value)
        steps = budget.allocate(category)
        sizes = budget.step_sizes(category, steps, 0.05)
        aim = copy.deepcopy(theirs).eval()(x).softmax(1).detach()
        kl = {"loss": "kl", "target": aim} if name == "trades" else {}
        # MART's clean forwards, which select, have moved the statistics that its attack sees.
        attacked.append((steps, pgd(probe, x, y, eps=0.05, steps=steps, step_size=sizes, start=start, **kl)))
    for (x, y, _), (steps, x_prime), out in zip(batches, attacked, outs, strict=True):
        z = None if name == "pgd" else theirs(x)
        some = steps.nonzero()[:, 0]
        z_prime = theirs(x_prime) if z is None else z.index_copy(0, some, theirs(x_prime[some]))
        loss = objective.loss(z, z_prime, y, some)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        F_R.update(z_prime, y)
        assert torch.equal(out.steps, steps)
        assert torch.allclose(out.x_prime, x_prime, atol=1e-12)
        assert out.loss.item() == pytest.approx(loss.item(), abs=1e-12)
    for (key, a), b in zip(net.state_dict().items(), theirs.state_dict().values(), strict=True):
        assert torch.allclose(a, b, atol=1e-12), key
    assert float(train.robust_fraction.value) == pytest.approx(float(F_R.value), abs=1e-15)


def test_where_nobody_gets_views_no_loss_is_compiled_for_it():
    """An empty batch is a program of its own; it comes while everyone is still wrong, and then no more."""
    net = norm_net().double()
    train, x = BulletTrain(bt.AugMix(selection="eval"), budget=StepBudget(1, 0)), learnable(net, [0])[0][0]
    x = (x * 255).round() / 255
    group, given = Fast(train, net), []
    group._phases_for(x)
    compiled = group._phases.loss_of
    group._phases.loss_of = lambda *parts: given.append(parts) or compiled(*parts)
    with torch.no_grad():
        right = copy.deepcopy(net).eval()(x).argmax(1)
    for labels in ((right + 1) % 4, right):
        (out,) = group.train_on([(x, labels, train.objective.initial_perturbation(x))])
        assert bool(out.steps.sum()) == bool(given)
        assert out.loss.item() > 0
    assert len(given) == 1


@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize("case", ["mined", "mined in eval mode", "everyone", "no jsd"])
def test_augmix_in_a_group_is_the_plain_step(case, pair):
    """Views do not become stale, so that a group of one is the plain step, and a longer one selects earlier only."""
    budget = StepBudget(1, 0) if case.startswith("mined") else StepBudget.uniform(1)
    objective = bt.AugMix(jsd=case != "no jsd", selection="eval" if "eval" in case else "train")
    net = norm_net().double()
    theirs = copy.deepcopy(net)
    plain, train = (BulletTrain(objective, budget=budget) for _ in range(2))
    for one in (plain, train):
        one.robust_fraction.load_state_dict({"value": 0.4, "gamma": 0.8, "momentum": 0.9})
    optimizer, own = (torch.optim.SGD(n.parameters(), lr=0.1, momentum=0.9) for n in (theirs, net))
    group = Fast(train, net, own, pair=pair)
    for i, (x, y, _) in enumerate(learnable(net, range(4))):
        x = (x * 255).round() / 255
        draws = objective.draw(len(x), x.device, torch.Generator().manual_seed(i))
        expected = plain.step(theirs, x, y, start=draws)
        optimizer.zero_grad()
        expected.loss.backward()
        optimizer.step()
        (out,) = group.train_on([(x, y, draws)])
        assert torch.equal(out.category, expected.category)
        assert torch.equal(out.steps, expected.steps)
        assert torch.allclose(out.x_prime, expected.x_prime)
        assert out.loss.item() == pytest.approx(expected.loss.item(), abs=1e-12)
        assert out.z_prime.shape == expected.z_prime.shape
        assert torch.allclose(out.z_prime, expected.z_prime, atol=1e-12)
        again = len(y) if case == "mined" else 0
        assert out.work.total == expected.work.total + again
        for (key, a), b in zip(net.state_dict().items(), theirs.state_dict().values(), strict=True):
            assert torch.allclose(a, b, atol=1e-12, rtol=0), key
        assert float(train.robust_fraction.value) == pytest.approx(float(plain.robust_fraction.value), abs=1e-15)


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_a_group_of_augmix_selects_all_and_then_learns(mode):
    objective = bt.AugMix(selection=mode)
    train = BulletTrain(objective, budget=StepBudget(1, 0))
    train.robust_fraction.load_state_dict({"value": 0.4, "gamma": 0.8, "momentum": 0.9})
    net = norm_net().double()
    batches = [
        (x, y, objective.draw(len(x), x.device)) for x, y, _ in [*learnable(net, range(2)), *learnable(net, [5], m=5)]
    ]
    probe = copy.deepcopy(net).train(mode == "train")
    outs = Fast(train, net, torch.optim.SGD(net.parameters(), lr=0.1)).train_on(batches)
    for (x, y, _), out in zip(batches, outs, strict=True):
        expected = bt.separate(bt.signed_prediction_variance(probe(x).detach(), y), 0.4)
        assert torch.equal(out.category, expected)
        # One more forward than 3 + 6·F_B: the weights have moved since the selection.
        assert out.work.total == 4 * len(y) + 6 * int((expected == Category.BOUNDARY).sum())


@settings(max_examples=10)
@given(
    st.sampled_from(sorted(OBJECTIVES)),
    st.sampled_from(["eval", "train"]),
    st.sampled_from(BUDGETS),
    st.lists(st.integers(1, 9), min_size=1, max_size=3),
    st.integers(1, 4),
    st.integers(0, 20),
    st.booleans(),
)
def test_counted_work_is_what_the_hooks_see(name, selection, counts, sizes, bucket, seed, hopeless):
    net = tiny_net(seed=seed)
    batches = []
    for i, m in enumerate(sizes):
        x, y = batch(m, channels=1, size=4, dtype=torch.float64, seed=seed + i)
        right = net(x).argmax(1)
        y = (right + 1) % 3 if hopeless else torch.where(torch.arange(m) % 3 > 0, right, y)
        batches.append((x, y, x + 0.01))
    train = engine(name, counts)
    if name != "pgd":
        train.objective.selection = selection
    group = Fast(train, net, size_multiple=bucket)
    group._phases_for(batches[0][0])
    seen = counting(net, group._phases.forwards.copy)
    outs = group.train_on(batches)
    total = sum(out.work.total for out in outs)
    assert total == pytest.approx(seen["held"] + 2 * seen["attack"] + 3 * seen["train"])
    idle = seen["attack"] - sum(int(out.steps.sum()) for out in outs)
    assert idle == 0 if bucket == 1 else idle >= 0


@settings(max_examples=10)
@given(
    name=st.sampled_from(sorted(OBJECTIVES)),
    norm=st.sampled_from(["linf", "l2"]),
    counts=st.sampled_from([*BUDGETS[:3], (10, 2, 0), (5, 5, 0), (2, 1, 0), (6, 3, 2)]),
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    bucket=st.sampled_from([1, 2, 4, 8]),
    known=st.sampled_from([0.0, 0.4, 1.0]),
    seed=st.integers(0, 50),
)
def test_what_is_reported_is_what_was_done(name, norm, counts, sizes, bucket, known, seed):
    """Steps and categories of every example, through PGD by itself, give its x'."""
    net, budget = tiny_net(seed=seed), StepBudget(*counts)
    train = BulletTrain(OBJECTIVES[name](eps=0.05, norm=norm), budget=budget)
    train.robust_fraction.load_state_dict({"value": known, "gamma": 0.8, "momentum": 0.9})
    batches = []
    for i, m in enumerate(sizes):
        x, y = batch(m, channels=1, size=4, dtype=torch.float64, seed=100 * seed + i)
        y = torch.where(torch.arange(m) % 3 > 0, net(x).argmax(1), y)
        batches.append((x, y, (x + 0.01 * torch.randn(x.shape, dtype=torch.float64)).clamp(0, 1)))
    outs = Fast(train, net, size_multiple=bucket).train_on(batches)
    for (x, y, start), out in zip(batches, outs, strict=True):
        aim = {"loss": "kl", "target": net(x).softmax(1).detach()} if name == "trades" else {}
        sizes_ = budget.step_sizes(out.category, out.steps, 0.05)
        expected = pgd(net, x, y, eps=0.05, steps=out.steps, step_size=sizes_, start=start, norm=norm, **aim)
        assert torch.allclose(out.x_prime, expected, atol=1e-11)


@pytest.mark.parametrize("name", sorted(OBJECTIVES))
@pytest.mark.parametrize("counts", [(4, 2, 0), (4, 0, 0), (3, 2, 1)])
def test_rounding_sizes_up_changes_nothing_but_the_passes(name, counts):
    """Idle places: nobody's category, steps, x', loss, gradient or statistics."""
    net = norm_net().double()
    batches, found = learnable(net, range(3), m=23), []
    for multiple in (1, 8):
        mine, train = copy.deepcopy(net), engine(name, counts)
        group = Fast(train, mine, torch.optim.SGD(mine.parameters(), lr=0.1), pair=True, size_multiple=multiple)
        found.append((group.train_on(batches), mine, train))
    (exact, one, train), (rounded, other, twin) = found
    for a, b in zip(exact, rounded, strict=True):
        assert torch.equal(a.category, b.category)
        assert torch.equal(a.steps, b.steps)
        assert torch.allclose(a.x_prime, b.x_prime, atol=1e-10)
        assert torch.allclose(a.z_prime, b.z_prime, atol=1e-10)
        assert a.loss.item() == pytest.approx(b.loss.item(), abs=1e-10)  # MART's constants
    for (key, a), b in zip(one.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.allclose(a, b, atol=1e-10), key
    assert float(train.robust_fraction.value) == pytest.approx(float(twin.robust_fraction.value), abs=1e-15)
    assert sum(b.work.total for b in rounded) > sum(a.work.total for a in exact)


# -------------------------------------------------------------------------------------------- as if captured


@settings(max_examples=6)
@given(
    name=st.sampled_from([*sorted(OBJECTIVES), "augmix"]),
    counts=st.sampled_from(BUDGETS[:-1]),
    sizes=st.lists(st.lists(st.sampled_from([1, 2, 7, 12]), min_size=1, max_size=3), min_size=2, max_size=4),
    bucket=st.integers(1, 4),
    joint=st.booleans(),
    half=st.booleans(),
)
def test_replayed_pieces_are_pieces_run_at_once(name, counts, sizes, bucket, joint, half):
    """As a CUDA graph would: what is left to Python, to the host or to memory that graphs share shows here."""
    if name == "augmix":
        counts = (1, 0, 0) if min(counts) == 0 else (1, 1, 1)
    dtype, results = torch.float32 if half else torch.float64, []
    for emulated in (False, True):
        torch.manual_seed(0)
        net = norm_net().to(dtype)
        objective = bt.AugMix() if name == "augmix" else OBJECTIVES[name](eps=0.05)
        train = BulletTrain(objective, budget=StepBudget(*counts))
        train.robust_fraction.load_state_dict({"value": 0.4, "gamma": 0.8, "momentum": 0.9})
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-2)
        materialize(optimizer)
        dtype_ = torch.bfloat16 if half else None
        more = {"size_multiple": bucket, "pair": joint, "dtype": dtype_, "emulated": emulated}
        group = Fast(train, net, optimizer, **more)
        seen = []
        for turn, part in enumerate(sizes):
            batches = []
            for i, m in enumerate(part):
                (x, y, start), seed = learnable(norm_net().double(), [10 * turn + i], m=m)[0], 10 * turn + i
                if name == "augmix":
                    start = objective.draw(m, x.device, torch.Generator().manual_seed(seed))
                    batches.append((x.to(dtype), y, start))
                else:
                    batches.append((x.to(dtype), y, start.to(dtype)))
            with pytest.MonkeyPatch.context() as patch:  # views as a GPU makes them, of all rows and without looking
                patch.setattr("bullettrain.augmix.operations._apply", lambda change, images, to, _: change(images, to))
                outs = group.train_on(batches)
            for out in outs:
                seen += [out.loss.clone(), out.steps.clone(), out.category.clone(), out.x_prime.clone()]
                seen.append(torch.tensor(out.work.total))
        results.append([*seen, *(t.detach().clone() for t in net.state_dict().values()), train.robust_fraction.value])
    for a, b in zip(*results, strict=True):
        assert torch.allclose(a, b, atol=1e-12 if not half else 1e-6)


def test_batches_may_grow_and_shrink():
    net = norm_net().double()
    group = Fast(engine("mart", (3, 1, 0)), net, size_multiple=4)
    for sizes in ((8, 8), (8, 3), (5,), (12, 12), (1,)):
        batches = [one for i, m in enumerate(sizes) for one in learnable(net, [i], m=m)]
        outs = group.train_on(batches)
        assert [len(out.category) for out in outs] == list(sizes)
        assert all(torch.isfinite(out.loss) for out in outs)


def several(separation):
    """One that takes several mini-batches at once."""
    separation.over_batches = True
    return separation


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"score": lambda z, y: z}, "the score returned float64 of shape"),
        ({"score": lambda z, y: z[:, 0] * float("nan")}, "the score returned NaN"),
        ({"separation": lambda svar, F_R: svar > 0}, "the separation returned bool"),
        ({"separation": lambda svar, F_R: (svar > 0).long() + 2}, "categories from 2 to 3; there are 0 to 2"),
        ({"separation": several(lambda svar, F_R: svar > 0)}, "the separation returned bool"),
        ({"separation": several(lambda svar, F_R: None)}, "the separation returned NoneType"),
    ],
)
def test_a_selection_that_selects_nothing_is_named(wrong, message):
    """As in the plain step: a score of NaN would make every example robust, without a word."""
    net = norm_net().double()
    train = BulletTrain(bt.TRADES(), budget=StepBudget(2, 1), **wrong)
    before = copy.deepcopy(net.state_dict())
    group = Fast(train, net, torch.optim.SGD(net.parameters(), lr=0.1))
    batches = list(learnable(net, range(2)))
    for _ in range(2):  # and again
        with pytest.raises((TypeError, ValueError), match=message):
            group.train_on(batches)
    assert all(torch.equal(a, b) for a, b in zip(before.values(), net.state_dict().values(), strict=True))


def test_images_out_of_range_are_named_each_time():
    net = norm_net().double()
    train = BulletTrain(bt.TRADES(), budget=StepBudget(2, 1))
    group = Fast(train, net, torch.optim.SGD(net.parameters(), lr=0.1))
    x, y, start = learnable(net, [0])[0]
    for _ in range(2):
        with pytest.raises(ValueError, match="outside"):
            group.train_on([(3 * x, y, start)])


def test_a_network_that_returns_nan_is_not_the_scores_fault_and_may_be_gone_on_with():
    net = norm_net().double()
    batches = list(learnable(net, range(2)))
    with torch.no_grad():
        next(net.parameters()).fill_(float("nan"))
    for check_every in (100, 0):
        train = BulletTrain(bt.TRADES(), budget=StepBudget(2, 1), check_every=check_every)
        group = Fast(train, net, torch.optim.SGD(net.parameters(), lr=0.1))
        if check_every:
            with pytest.raises(DivergedError, match="NaN"):
                group.train_on(batches)
        else:
            assert len(group.train_on(batches)) == 2
