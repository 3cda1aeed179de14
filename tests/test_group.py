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
from bullettrain.engine.group import GroupEngine, GroupSettings
from bullettrain.engine.plan import Plan, arrange, round_up
from conftest import batch, norm_net, tiny_net

OBJECTIVES = {"pgd": bt.PGDAT, "trades": bt.TRADES, "mart": bt.MART}
BUDGETS = [(4, 2, 0), (4, 0, 0), (4, 2, 1), (3, 3, 3), (3, 2, 2), (0, 0, 0)]


# ------------------------------------------------------------------------------------------------- plans

examples = st.tuples(st.sampled_from(list(Category)), st.integers(1, 9))
groups = st.lists(st.lists(examples, min_size=1, max_size=12), min_size=1, max_size=4)


def drawn(group):
    rows = [row for part in group for row in part]
    category = torch.tensor([int(c) for c, _ in rows])
    svar = torch.tensor([-v / 10 if c == Category.OUTLIER else v / 10 for c, v in rows], dtype=torch.float64)
    return category, svar, tuple(len(part) for part in group)


@given(groups, st.sampled_from(BUDGETS), st.integers(1, 5))
def test_plans_round_towards_care_only(group, counts, bucket):
    category, svar, sizes = drawn(group)
    budget = StepBudget(*counts)
    if budget.uniform_steps is not None:
        return
    order, local, counted = arrange(category, svar, sizes, budget, bucket)
    plan = Plan.read(counted.tolist(), sizes, budget, bucket)
    assert sorted(order.tolist()) == list(range(len(category)))
    exact = budget.allocate(category)
    given_steps = torch.zeros_like(exact)
    at = 0
    for up_to, steps, _ in plan.levels:
        given_steps[order[at:up_to]] = steps
        at = max(at, up_to)
    assert (given_steps >= exact).all()  # nobody gets less
    if bucket == 1:
        assert torch.equal(given_steps, exact)
    assert plan.schedule == [int((given_steps > t).sum()) for t in range(int(given_steps.max()))]
    # Sizes repeat: they are multiples of the bucket, or everything there is.
    total = sum(sizes)
    assert all(n == size or n % bucket == 0 for n, size in zip(plan.touched, sizes, strict=True))
    assert plan.boundary % bucket == 0 or plan.boundary == plan.rows or plan.boundary == total
    at = 0
    for size, touched in zip(sizes, plan.touched, strict=True):
        part = local[at : at + size].tolist()
        assert sorted(part) == list(range(size))
        assert part[:touched] == sorted(part[:touched])  # in their own order
        assert (given_steps[at : at + size][part[:touched]] > 0).all()
        assert (given_steps[at : at + size][part[touched:]] == 0).all()
        at += size
    # Who is moved up is nearest to the class above: no robust example with a lower SVar is left behind.
    robust = (category == Category.ROBUST) & (given_steps == budget.robust) if budget.robust else torch.tensor([False])
    moved = (category == Category.ROBUST) & (given_steps > budget.robust) & (given_steps == budget.boundary)
    if budget.robust and robust.any() and moved.any() and budget.boundary > budget.robust:
        assert svar[moved].max() <= svar[robust].min()


@given(st.integers(0, 200), st.integers(1, 32), st.integers(0, 200))
def test_round_up(n, bucket, room):
    limit = n + room
    rounded = round_up(n, bucket, limit)
    assert n <= rounded <= limit
    assert rounded % bucket == 0 or rounded == limit
    assert rounded < n + bucket


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_at_the_logits(name):
    logits, y = torch.randn(9, 5, dtype=torch.float64, requires_grad=True), torch.randint(5, (9,))
    target = torch.randn(9, 5, dtype=torch.float64).softmax(1)
    (expected,) = torch.autograd.grad(LOSSES[name](logits, y, target).sum(), logits)
    assert torch.allclose(gradient_at_logits(LOSSES[name])(logits.detach(), y, target), expected, atol=1e-14)


# ------------------------------------------------------------------------------------- against the plain step


def engine(name, counts):
    train = BulletTrain(OBJECTIVES[name](eps=0.05), budget=StepBudget(*counts))
    train.robust_fraction.load_state_dict({"value": 0.4, "gamma": 0.8, "momentum": 0.9})
    return train


def learnable(net, seeds, m=12):
    batches = []
    for seed in seeds:
        x, y = batch(m, dtype=torch.float64, seed=seed)
        with torch.no_grad():
            y = torch.where(torch.arange(m) % 4 == 3, y, copy.deepcopy(net)(x).argmax(1))
        batches.append((x, y, x + 0.01 * torch.randn(x.shape, dtype=torch.float64)))
    return batches


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("counts", BUDGETS)
@pytest.mark.parametrize("name", sorted(OBJECTIVES))
def test_one_batch_and_a_bucket_of_one_is_the_plain_step(name, counts, parallel):
    if parallel and name == "mart":
        pytest.skip("MART keeps its clean logits here, so that nothing runs beside them")
    net = norm_net().double()
    batches = learnable(net, range(4))
    theirs = copy.deepcopy(net)
    plain, optimizer = engine(name, counts), torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9)
    own = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    train = engine(name, counts)
    group = GroupEngine(train, net, own.step, settings=GroupSettings(parallel=parallel))
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


@pytest.mark.parametrize("fresh", [0, 1, 2])
@pytest.mark.parametrize("name", sorted(OBJECTIVES))
def test_a_group_is_attacked_with_the_same_weights_and_updated_one_by_one(name, fresh):
    """Written out with the package's public pieces, one mini-batch at a time."""
    counts, budget = (4, 2, 0), StepBudget(4, 2)
    net = norm_net().double()
    batches = [*learnable(net, range(2)), *learnable(net, [7], m=5)]  # the last one short
    theirs = copy.deepcopy(net)
    settings_ = GroupSettings(group=3, fresh=fresh)
    train, own = engine(name, counts), torch.optim.SGD(net.parameters(), lr=0.1)
    outs = GroupEngine(train, net, own.step, settings=settings_).step(batches)

    objective, F_R = OBJECTIVES[name](eps=0.05), bt.RobustFraction()
    F_R.load_state_dict({"value": 0.4, "gamma": 0.8, "momentum": 0.9})
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1)
    attacked = []
    for x, y, start in batches:
        probe = copy.deepcopy(theirs).train(name == "mart")
        s = probe(x).detach()
        category = bt.separate(bt.signed_prediction_variance(s, y), F_R.value)
        steps = budget.allocate(category)
        sizes = budget.step_sizes(category, steps, 0.05)
        aim = copy.deepcopy(theirs).eval()(x).softmax(1).detach()
        kl = {"loss": "kl", "target": aim} if name == "trades" else {}
        # Without steps nothing moves, not even to the start; with fewer than the fresh ones, only to the start.
        stale = (steps - fresh).clamp_min(0)
        x_prime = pgd(theirs, x, y, eps=0.05, steps=stale, step_size=sizes, start=start, **kl)
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
    for a, b in zip(net.parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-12)
    assert float(train.robust_fraction.value) == pytest.approx(float(F_R.value), abs=1e-15)


@settings(max_examples=25)
@given(
    st.sampled_from(sorted(OBJECTIVES)),
    st.sampled_from(BUDGETS),
    st.lists(st.integers(1, 9), min_size=1, max_size=3),
    st.integers(1, 4),
    st.integers(0, 20),
)
def test_counted_work_is_what_the_hooks_see(name, counts, sizes, bucket, seed):
    net = tiny_net(seed=seed)
    batches = []
    for i, m in enumerate(sizes):
        x, y = batch(m, channels=1, size=4, dtype=torch.float64, seed=seed + i)
        batches.append((x, torch.where(torch.arange(m) % 3 > 0, net(x).argmax(1), y), x + 0.01))
    train = engine(name, counts)
    group = GroupEngine(train, net, lambda: None, settings=GroupSettings(group=3, bucket=bucket))
    group._fill(batches, sum(sizes))  # the one forward that finds the number of classes
    seen = {"held": 0, "attack": 0, "train": 0}

    def count(module, args, out):
        attack = args[0].requires_grad
        seen["attack" if attack else "held" if not out.requires_grad else "train"] += len(args[0])

    net.register_forward_hook(count)
    group.shadow.register_forward_hook(count)
    outs = group.step(batches)
    total = sum(out.work.total for out in outs)
    assert total == pytest.approx(seen["held"] + 2 * seen["attack"] + 3 * seen["train"])
    assert sum(int(out.steps.sum()) for out in outs) == seen["attack"]


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


def test_a_network_without_batch_norm_has_a_twin_too():
    net = tiny_net()
    x, y = batch(12, channels=1, size=4, dtype=torch.float64)
    y[:8] = net(x).argmax(1)[:8]
    outs = []
    for parallel in (False, True):
        settings_ = GroupSettings(parallel=parallel)
        group = GroupEngine(engine("trades", (4, 2, 0)), copy.deepcopy(net), lambda: None, settings=settings_)
        outs.append(group.step([(x, y, x + 0.01)])[0])
    assert torch.equal(outs[0].loss, outs[1].loss)


def test_what_cannot_be_sliced_is_said():
    net, nothing = norm_net(), lambda: None
    odd = BulletTrain(bt.TRADES(), budget=StepBudget(1, 2, ordered=False))
    oracle = BulletTrain(bt.TRADES(), budget=StepBudget(2, 1), separation=bt.OracleSeparation(eps=0.1))
    for train, message in (
        (odd, "order boundary"),
        (oracle, "looks at the network"),
        (BulletTrain(bt.AugMix(), budget=StepBudget(1, 0)), "no attack"),
        (BulletTrain(bt.TRADES(attack_mode="train"), budget=StepBudget(2, 1)), "training mode"),
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
