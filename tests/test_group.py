"""The group engine against the plain step: exact where it has to be, more careful where it rounds."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import bullettrain as bt
from bullettrain import BulletTrain, Category, StepBudget
from bullettrain.attacks import LOSSES, pgd
from bullettrain.attacks.losses import gradient_at_logits
from bullettrain.checks import DivergedError
from bullettrain.engine.graphed import materialize, optimizer_tensors
from bullettrain.engine.group import GroupEngine, GroupSettings
from bullettrain.engine.plan import Plan, allot, arrange, coarse, turns
from conftest import batch, counting, norm_net, tiny_net
from emulated import Emulated
from grouped import BUDGETS, OBJECTIVES, engine, learnable

# ------------------------------------------------------------------------------------------------- plans

examples = st.tuples(st.sampled_from(list(Category)), st.integers(1, 9))
groups = st.lists(st.lists(examples, min_size=1, max_size=12), min_size=1, max_size=4)


def drawn(group):
    rows = [row for part in group for row in part]
    category = torch.tensor([int(c) for c, _ in rows])
    svar = torch.tensor([-v / 10 if c == Category.OUTLIER else v / 10 for c, v in rows], dtype=torch.float64)
    return category, svar, tuple(len(part) for part in group)


@given(groups, st.sampled_from(BUDGETS), st.integers(1, 5), st.integers(0, 2))
def test_plans_round_towards_care_only(group, counts, bucket, fresh):
    category, svar, sizes = drawn(group)
    budget = StepBudget(*counts)
    if budget.uniform_steps is not None:
        return
    fresh = min(fresh, next(n for n in (budget.outlier, budget.robust, budget.boundary) if n))
    order, local, counted = arrange(category, svar, sizes, budget, bucket, fresh)
    plan = Plan.read(counted.tolist(), sizes, budget, bucket, fresh)
    assert sorted(order.tolist()) == list(range(len(category)))
    exact = budget.allocate(category)
    treated, steps, step_sizes = allot(counted, category[order], budget, 0.1, torch.float64)
    given_steps = torch.zeros_like(exact).index_copy(0, order, steps)
    assert torch.equal(steps.sort(descending=True).values, steps)  # the most careful first
    assert (given_steps >= exact).all()  # nobody gets less
    assert torch.equal(treated[steps == 0], category[order][steps == 0])
    assert torch.equal(step_sizes, torch.where(steps > 0, budget.step_sizes(treated, steps, 0.1), 0.0))
    if bucket == 1:
        assert torch.equal(given_steps, exact)
    # Every row has its turns, never two at once, and nobody else has any.
    who = turns(counted, len(category), budget, fresh)
    had = torch.zeros(len(category) + 1, dtype=torch.int64)
    for now, n in zip(who, plan.schedule, strict=False):
        there = now[:n][now[:n] < len(category)]
        assert len(there.unique()) == len(there)
        had[now[:n]] += 1
    assert torch.equal(had[:-1], (steps - fresh).clamp_min(0))
    idle, every = int(had[-1]), budget.boundary - fresh
    if bucket == 1:
        assert idle == 0
    elif budget.robust and plan.boundary < plan.rows:  # what room there is goes to the boundary
        assert idle < every + max(budget.boundary - budget.robust, budget.boundary - budget.outlier)
    if not budget.robust:  # nobody takes turns: the rows at work are the first ones
        assert all(torch.equal(now[: plan.rows], torch.arange(plan.rows)) for now in who)
    # Sizes repeat: they are multiples of the bucket, or everything there is.
    assert all(n == size or n % bucket == 0 for n, size in zip(plan.touched, sizes, strict=True))
    assert all(run == sum(sizes) or run % coarse(bucket, len(sizes)) == 0 for run in plan.schedule)
    at = 0
    for size, touched in zip(sizes, plan.touched, strict=True):
        part = local[at : at + size].tolist()
        assert sorted(part) == list(range(size))
        assert part[:touched] == sorted(part[:touched])  # in their own order
        assert (given_steps[at : at + size][part[:touched]] > 0).all()
        assert (given_steps[at : at + size][part[touched:]] == 0).all()
        at += size
    if budget.robust:  # an outlier is never moved up by two classes
        moved_far = (category == Category.OUTLIER) & (given_steps > max(budget.robust, budget.outlier))
        assert not moved_far.any()
    # Who is moved up is nearest to the class above: no robust example with a lower SVar is left behind.
    robust = (category == Category.ROBUST) & (given_steps == budget.robust) if budget.robust else torch.tensor([False])
    moved = (category == Category.ROBUST) & (given_steps > budget.robust) & (given_steps == budget.boundary)
    if budget.robust and robust.any() and moved.any() and budget.boundary > budget.robust:
        assert svar[moved].max() <= svar[robust].min()


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_at_the_logits(name):
    logits, y = torch.randn(9, 5, dtype=torch.float64, requires_grad=True), torch.randint(5, (9,))
    target = torch.randn(9, 5, dtype=torch.float64).softmax(1)
    (expected,) = torch.autograd.grad(LOSSES[name](logits, y, target).sum(), logits)
    assert torch.allclose(gradient_at_logits(LOSSES[name])(logits.detach(), y, target), expected, atol=1e-14)


# ------------------------------------------------------------------------------------- against the plain step


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("counts", BUDGETS)
@pytest.mark.parametrize("name", sorted(OBJECTIVES))
def test_one_batch_and_a_bucket_of_one_is_the_plain_step(name, counts, joint):
    net = norm_net().double()
    batches = learnable(net, range(4))
    theirs = copy.deepcopy(net)
    plain, optimizer = engine(name, counts), torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9)
    own = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    train = engine(name, counts)
    group = GroupEngine(train, net, own.step, settings=GroupSettings(joint=joint))
    for x, y, start in batches:
        expected = plain.step(theirs, x, y, start=start)
        optimizer.zero_grad()
        expected.loss.backward()
        optimizer.step()
        (out,) = group.step([(x, y, start)])
        assert torch.equal(out.category, expected.category)
        assert torch.equal(out.steps, expected.steps)
        assert torch.allclose(out.x_prime, expected.x_prime, atol=1e-12, rtol=0)
        assert out.loss.item() == pytest.approx(expected.loss.item(), abs=1e-12)
        assert out.work == expected.work
        assert (out.svar is None) == (expected.svar is None)
        assert torch.allclose(out.z_prime, expected.z_prime, atol=1e-12)
        for (key, a), b in zip(net.state_dict().items(), theirs.state_dict().values(), strict=True):
            assert torch.allclose(a, b, atol=1e-12, rtol=0), key
        assert float(train.robust_fraction.value) == pytest.approx(float(plain.robust_fraction.value), abs=1e-15)


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("fresh", [0, 1, 2])
@pytest.mark.parametrize("name", sorted(OBJECTIVES))
def test_a_group_is_attacked_with_the_same_weights_and_updated_one_by_one(name, fresh, joint):
    """Written out with the package's public pieces, one mini-batch at a time."""
    counts, budget = (4, 2, 0), StepBudget(4, 2)
    net = norm_net().double()
    batches = [*learnable(net, range(2)), *learnable(net, [7], m=5)]  # the last one short
    theirs = copy.deepcopy(net)
    settings_ = GroupSettings(group=3, fresh=fresh, joint=joint)
    train, own = engine(name, counts), torch.optim.SGD(net.parameters(), lr=0.1)
    group = GroupEngine(train, net, own.step, settings=settings_)
    outs = group.step(batches)
    assert (group.joint is not None) == joint

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
        # Without steps nothing moves, not even to the start; with fewer than the fresh ones, only to the start.
        stale = (steps - fresh).clamp_min(0)
        # MART's clean forwards, which select, have moved the statistics that its attack sees.
        x_prime = pgd(probe, x, y, eps=0.05, steps=stale, step_size=sizes, start=start, **kl)
        only_start = (steps > 0) & (stale == 0)
        x_prime[only_start] = start[only_start]
        attacked.append((steps, sizes, x_prime))
    for (x, y, _), (steps, sizes, x_prime), out in zip(batches, attacked, outs, strict=True):
        aim = copy.deepcopy(theirs).eval()(x).softmax(1).detach()
        kl = {"loss": "kl", "target": aim} if name == "trades" else {}
        last = steps.clamp_max(fresh)
        moved = pgd(theirs, x, y, eps=0.05, steps=last, step_size=sizes, start=x_prime, **kl)
        x_prime = torch.where((steps > 0)[:, None, None, None], moved if fresh else x_prime, x)
        z = None if name == "pgd" else theirs(x)
        z_prime = objective.corrupted_logits(theirs, x_prime, z, steps)
        loss = objective.loss(z, z_prime, y, steps.nonzero()[:, 0])
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
    group, given = GroupEngine(train, net, lambda: None), []
    compiled = group.loss
    group.loss = lambda *parts: given.append(parts) or compiled(*parts)
    with torch.no_grad():
        right = copy.deepcopy(net).eval()(x).argmax(1)
    for labels in ((right + 1) % 4, right):
        (out,) = group.step([(x, labels, train.objective.opening(x))])
        assert bool(out.steps.sum()) == bool(given)
        assert out.loss.item() > 0
    assert len(given) == 1


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("case", ["mined", "mined in eval mode", "everyone", "no jsd"])
def test_augmix_in_a_group_is_the_plain_step(case, joint):
    """Views do not become stale, so that a group of one is the plain step, and a longer one selects earlier only."""
    budget = StepBudget(1, 0) if case.startswith("mined") else StepBudget.uniform(1)
    objective = bt.AugMix(jsd=case != "no jsd", selection="eval" if "eval" in case else "train")
    net = norm_net().double()
    theirs = copy.deepcopy(net)
    plain, train = (BulletTrain(objective, budget=budget) for _ in range(2))
    for one in (plain, train):
        one.robust_fraction.load_state_dict({"value": 0.4, "gamma": 0.8, "momentum": 0.9})
    optimizer, own = (torch.optim.SGD(n.parameters(), lr=0.1, momentum=0.9) for n in (theirs, net))
    group = GroupEngine(train, net, own.step, settings=GroupSettings(joint=joint))
    for i, (x, y, _) in enumerate(learnable(net, range(4))):
        x = (x * 255).round() / 255
        draws = objective.draw(len(x), x.device, torch.Generator().manual_seed(i))
        expected = plain.step(theirs, x, y, start=draws)
        optimizer.zero_grad()
        expected.loss.backward()
        optimizer.step()
        (out,) = group.step([(x, y, draws)])
        assert torch.equal(out.category, expected.category)
        assert torch.equal(out.steps, expected.steps)
        assert torch.allclose(out.x_prime, expected.x_prime)
        assert out.loss.item() == pytest.approx(expected.loss.item(), abs=1e-12)
        assert out.z_prime.shape == expected.z_prime.shape
        assert torch.allclose(out.z_prime, expected.z_prime, atol=1e-12)
        assert out.work == expected.work
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
    group = GroupEngine(train, net, torch.optim.SGD(net.parameters(), lr=0.1).step, settings=GroupSettings(group=3))
    outs = group.step(batches)
    for (x, y, _), out in zip(batches, outs, strict=True):
        expected = bt.separate(bt.signed_prediction_variance(probe(x).detach(), y), 0.4)
        assert torch.equal(out.category, expected)
        # One more forward than 3 + 6·F_B: the weights have moved since the selection.
        assert out.work.total == 4 * len(y) + 6 * int((expected == Category.BOUNDARY).sum())
    with pytest.raises(ValueError, match="AugMix has no such steps"):
        GroupEngine(train, net, lambda: None, settings=GroupSettings(group=2, fresh=1))


@settings(max_examples=40)
@given(
    st.sampled_from(sorted(OBJECTIVES)),
    st.sampled_from(["eval", "train"]),
    st.sampled_from(BUDGETS),
    st.lists(st.integers(1, 9), min_size=1, max_size=3),
    st.integers(1, 4),
    st.integers(0, 4),
    st.booleans(),
    st.integers(0, 20),
    st.booleans(),
)
def test_counted_work_is_what_the_hooks_see(name, selection, counts, sizes, bucket, fresh, captured, seed, hopeless):
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
    fresh = min(fresh, next((n for n in (counts[2], counts[1]) if n), counts[0]))
    settings_ = GroupSettings(group=3, bucket=bucket, fresh=fresh, captured=captured)
    group = GroupEngine(train, net, lambda: None, settings=settings_)
    group._fill(batches, sum(sizes))  # the one forward that finds the number of classes
    seen = counting(net, group.still.shadow)
    outs = group.step(batches)
    total = sum(out.work.total for out in outs)
    assert total == pytest.approx(seen["held"] + 2 * seen["attack"] + 3 * seen["train"])
    idle = seen["attack"] - sum(int(out.steps.sum()) for out in outs)
    assert idle == 0 if bucket == 1 else idle >= 0


@settings(max_examples=40)
@given(
    name=st.sampled_from(sorted(OBJECTIVES)),
    norm=st.sampled_from(["linf", "l2"]),
    counts=st.sampled_from([*BUDGETS[:3], (10, 2, 0), (5, 5, 0), (2, 1, 0), (6, 3, 2)]),
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    bucket=st.sampled_from([1, 2, 4, 8]),
    fresh=st.integers(0, 2),
    known=st.sampled_from([0.0, 0.4, 1.0]),
    seed=st.integers(0, 50),
)
def test_what_is_reported_is_what_was_done(name, norm, counts, sizes, bucket, fresh, known, seed):
    """Steps and categories of every example, through PGD by itself, give its x'."""
    net, budget = tiny_net(seed=seed), StepBudget(*counts)
    train = BulletTrain(OBJECTIVES[name](eps=0.05, norm=norm), budget=budget)
    train.robust_fraction.load_state_dict({"value": known, "gamma": 0.8, "momentum": 0.9})
    batches = []
    for i, m in enumerate(sizes):
        x, y = batch(m, channels=1, size=4, dtype=torch.float64, seed=100 * seed + i)
        y = torch.where(torch.arange(m) % 3 > 0, net(x).argmax(1), y)
        batches.append((x, y, (x + 0.01 * torch.randn(x.shape, dtype=torch.float64)).clamp(0, 1)))
    fresh = min(fresh, next(n for n in (*counts[:0:-1], counts[0]) if n))
    settings_ = GroupSettings(group=3, bucket=bucket, fresh=fresh)
    outs = GroupEngine(train, net, lambda: None, settings=settings_).step(batches)
    for (x, y, start), out in zip(batches, outs, strict=True):
        aim = {"loss": "kl", "target": net(x).softmax(1).detach()} if name == "trades" else {}
        sizes_ = budget.step_sizes(out.category, out.steps, 0.05)
        expected = pgd(net, x, y, eps=0.05, steps=out.steps, step_size=sizes_, start=start, norm=norm, **aim)
        assert torch.allclose(out.x_prime, expected, atol=1e-11)


def test_larger_buckets_differ_only_for_those_moved_up():
    net = norm_net().double()
    (one,) = learnable(net, [3], m=24)
    outs = []
    for bucket in (1, 8):
        settings_ = GroupSettings(bucket=bucket)
        group = GroupEngine(engine("trades", (4, 2, 0)), copy.deepcopy(net), lambda: None, settings=settings_)
        outs.append(group.step([one])[0])
    exact, rounded = outs
    same = exact.steps == rounded.steps
    assert (~same).any()
    assert (rounded.steps >= exact.steps).all()
    assert torch.allclose(rounded.x_prime[same], exact.x_prime[same], atol=1e-12)
    assert torch.equal(rounded.category[same], exact.category[same])
    assert rounded.work.total > exact.work.total


# -------------------------------------------------------------------------------------------- as if captured


@settings(max_examples=12)
@given(
    name=st.sampled_from([*sorted(OBJECTIVES), "augmix"]),
    counts=st.sampled_from(BUDGETS[:-1]),
    sizes=st.lists(st.lists(st.sampled_from([1, 2, 7, 12]), min_size=1, max_size=3), min_size=2, max_size=4),
    bucket=st.integers(1, 4),
    fresh=st.integers(0, 1),
    joint=st.booleans(),
    half=st.booleans(),
)
def test_replayed_pieces_are_pieces_run_at_once(name, counts, sizes, bucket, fresh, joint, half):
    """As a CUDA graph would: what is left to Python, to the host or to memory that graphs share shows here."""
    if name == "augmix":
        counts, fresh = ((1, 0, 0) if min(counts) == 0 else (1, 1, 1)), 0
    if 0 < next((n for n in (counts[2], counts[1]) if n), counts[0]) < fresh:
        fresh = 0
    dtype, results = torch.float32 if half else torch.float64, []
    for emulated in (False, True):
        torch.manual_seed(0)
        net = norm_net().to(dtype)
        objective = bt.AugMix() if name == "augmix" else OBJECTIVES[name](eps=0.05)
        train = BulletTrain(objective, budget=StepBudget(*counts))
        train.robust_fraction.load_state_dict({"value": 0.4, "gamma": 0.8, "momentum": 0.9})
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-2)
        materialize(optimizer)
        settings_ = GroupSettings(group=3, bucket=bucket, fresh=fresh, joint=joint, half=half, captured=True)
        group = GroupEngine(train, net, optimizer.step, settings=settings_)
        if emulated:
            group.run = Emulated(lambda g=group, o=optimizer: [*g.tensors(), *optimizer_tensors(o)])
            group.reset = group.run.reset
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
                outs = group.step(batches)
            for out in outs:
                seen += [out.loss.clone(), out.steps.clone(), out.category.clone(), out.x_prime.clone()]
                seen.append(torch.tensor(out.work.total))
        results.append([*seen, *(t.detach().clone() for t in net.state_dict().values()), train.robust_fraction.value])
    for a, b in zip(*results, strict=True):
        assert torch.allclose(a, b, atol=1e-12 if not half else 1e-6)


class Own(bt.TRADES):
    def attack_target(self, model, x, s):
        return super().attack_target(model, x, s).roll(1, dims=1)


def test_what_cannot_be_sliced_is_said():
    net, nothing = norm_net(), lambda: None
    odd = BulletTrain(bt.TRADES(), budget=StepBudget(1, 2, ordered=False))
    oracle = BulletTrain(bt.TRADES(), budget=StepBudget(2, 1), separation=bt.OracleSeparation(eps=0.1))
    for train, message in (
        (odd, "order boundary"),
        (oracle, "looks at the network"),
        (BulletTrain(bt.AugMix(views=lambda x: (x, x)), budget=StepBudget(1, 0)), "function of its own"),
        (BulletTrain(bt.TRADES(attack_mode="train"), budget=StepBudget(2, 1)), "training mode"),
        (BulletTrain(Own(), budget=StepBudget(2, 1)), "a way of its own"),
        (BulletTrain(bt.AugMix(), budget=StepBudget(2, 1)), "AugMix has one step"),
    ):
        with pytest.raises(ValueError, match=message):
            GroupEngine(train, net, nothing)
    with pytest.raises(ValueError, match="fresh is 3"):
        GroupEngine(engine("trades", (4, 2, 0)), net, nothing, settings=GroupSettings(group=2, fresh=3))


def test_batches_may_grow_and_shrink():
    net = norm_net().double()
    group = GroupEngine(engine("mart", (3, 1, 0)), net, lambda: None, settings=GroupSettings(group=2, bucket=4))
    for sizes in ((8, 8), (8, 3), (5,), (12, 12), (1,)):
        batches = [one for i, m in enumerate(sizes) for one in learnable(net, [i], m=m)]
        outs = group.step(batches)
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
    group = GroupEngine(train, net, torch.optim.SGD(net.parameters(), lr=0.1).step, settings=GroupSettings(group=2))
    batches = list(learnable(net, range(2)))
    for _ in range(2):  # and again
        with pytest.raises((TypeError, ValueError), match=message):
            group.step(batches)
    assert all(torch.equal(a, b) for a, b in zip(before.values(), net.state_dict().values(), strict=True))


def test_images_out_of_range_are_named_each_time():
    net = norm_net().double()
    train = BulletTrain(bt.TRADES(), budget=StepBudget(2, 1))
    group = GroupEngine(train, net, torch.optim.SGD(net.parameters(), lr=0.1).step)
    x, y, start = learnable(net, [0])[0]
    for _ in range(2):
        with pytest.raises(ValueError, match="outside"):
            group.step([(3 * x, y, start)])


def test_a_network_that_returns_nan_is_not_the_scores_fault_and_may_be_gone_on_with():
    net = norm_net().double()
    batches = list(learnable(net, range(2)))
    with torch.no_grad():
        next(net.parameters()).fill_(float("nan"))
    for check_every in (100, 0):
        train = BulletTrain(bt.TRADES(), budget=StepBudget(2, 1), check_every=check_every)
        group = GroupEngine(train, net, torch.optim.SGD(net.parameters(), lr=0.1).step, settings=GroupSettings(group=2))
        if check_every:
            with pytest.raises(DivergedError, match="NaN"):
                group.step(batches)
        else:
            assert len(group.step(batches)) == 2


@pytest.mark.parametrize(("k", "more"), [(1, 2.8), (8, 1.8)])
def test_rounding_moves_the_boundary_as_far_as_the_docs_say(k, more):
    """docs/speed.md: points of the boundary's share above the rule's, categories drawn at the paper's shares."""
    generator, found = torch.Generator().manual_seed(0), []
    for _ in range(400):
        category = torch.multinomial(torch.tensor([0.18, 0.28, 0.54]), 128 * k, True, generator=generator)
        _, _, counts = arrange(category, torch.rand(128 * k, generator=generator), [128] * k, StepBudget(10, 2), 8)
        found.append(100 * (int(counts[0]) - int((category == Category.BOUNDARY).sum())) / (128 * k))
    assert sum(found) / len(found) == pytest.approx(more, abs=0.3)
