"""Two gloo processes against one: the joint batch's step, with a module wrapped in DistributedDataParallel."""

import os
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from filelock import FileLock
from torch import nn

import bullettrain as bt
from bullettrain import BulletTrain, StepBudget, baselines
from bullettrain.processes import leave_group
from conftest import batch, norm_net, tiny_net
from grouped import Fast
from short_runs import free_port

OBJECTIVES = {"pgd": bt.PGDAT, "trades": bt.TRADES, "mart": bt.MART, "augmix": bt.AugMix}
BASELINES = {
    "yopo": lambda: baselines.yopo(bt.TRADES(eps=0.05)),
    "grad-align": lambda: baselines.one_step(baselines.GradAlign(eps=0.05)),
    "free": lambda: baselines.one_step(baselines.Free(eps=0.05)),
}
SIZES = (5, 8)  # unequal shares of the joint batch


def make(name, budget):
    objective = bt.AugMix(views=lambda x: (x * 0.9, x * 0.8)) if name == "augmix" else OBJECTIVES[name](eps=0.05)
    return BulletTrain(objective, budget=budget)


def run(model, train, parts):
    """Loss, gradients, categories and F_R of a few steps on ``parts``, one list of batches."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    record = []
    for x, y, start in parts:
        out = train.step(model, x, y, start=None if isinstance(train.objective, bt.AugMix) else start)
        optimizer.zero_grad()
        out.loss.backward()
        record.append(
            (
                out.loss.item(),
                [p.grad.clone() for p in model.parameters()],
                out.category,
                float(train.robust_fraction.value),
            )
        )
        optimizer.step()
    return record


def joint_batches():
    batches = []
    for seed in range(3):
        x, y = batch(sum(SIZES), channels=1, size=4, dtype=torch.float64, seed=seed)
        y[::2] = tiny_net()(x).argmax(1)[::2]
        batches.append(
            (x, y, x + 0.001 * torch.randn(x.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)))
        )
    return batches


def last_steps(model, share):
    """Scores and categories of a few steps that the last logits select for, and the scores at the end."""
    x, y, start = joint_batches()[0]
    train = BulletTrain(bt.MART(eps=0.05, selection="last"), budget=StepBudget(3, 1), dataset_size=len(y))
    optimizer, record = torch.optim.SGD(model.parameters(), lr=0.2), []
    for seed in range(4):  # now with one worker, now with the other
        index = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))[share]
        out = train.step(model, x[index], y[index], start=start[index], index=index)
        record.append((out.svar, out.category))
        optimizer.zero_grad()
        out.loss.backward()
        optimizer.step()
    return record, train.history.score


class Around(nn.Module):
    """A wrapper around the wrapper, as frameworks have."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)


NETS = {"tiny": tiny_net, "deeper": lambda: nn.Sequential(nn.LayerNorm(4), tiny_net()).double()}
FAST = [(name, emulated, "tiny") for name in ("pgd", "trades", "mart") for emulated in (False, True)]
FAST.append(("trades", True, "deeper"))


def by_fast(name, emulated, net, parts):
    """The same record by fast phases; gradients are averaged between them."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.2)
    train = make(name, StepBudget(3, 1))
    # Filling rows add 1e-12 to MART's divergence, by the constants in it.
    fast, record = Fast(train, net, emulated=emulated, size_multiple=1 if name == "mart" else 4), []
    for part in parts:
        (out,) = fast.train_on([part])
        gradients = [p.grad.clone() for p in net.parameters()]
        record.append((out.loss.item(), gradients, out.category, float(train.robust_fraction.value)))
        optimizer.step()
    assert fast.reason is None
    return record


def by_captured(train, net, parts):
    """The gradients of each step."""
    fast, optimizer, record = bt.Captured(train, net, capture=False), torch.optim.SGD(net.parameters(), lr=0.2), []
    for x, y, start in parts:
        fast.step(x, y, start=start)
        record.append([p.grad.clone() for p in net.parameters()])
        optimizer.step()
    return record


def by_itself(part):
    train = BulletTrain(bt.TRADES(eps=0.05), budget=StepBudget(3, 1), joint=False)
    return train.step(tiny_net(), *part[:2], start=part[2]).loss.item()


def warnings_of(net, parts):
    """Train with values checked at other steps in each process; what was warned of."""
    train = BulletTrain(bt.TRADES(eps=0.05), budget=StepBudget(3, 1), check_every=1 + dist.get_rank())
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        run(net, train, parts)
    return [str(warning.message) for warning in found if "weights" in str(warning.message)]


def worker(rank, port, folder):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=2)
    torch.set_num_threads(1)
    share = slice(0, SIZES[0]) if rank == 0 else slice(SIZES[0], None)
    results = {}
    for name in OBJECTIVES:
        budget = StepBudget(1, 0) if name == "augmix" else StepBudget(3, 1)
        model = nn.parallel.DistributedDataParallel(tiny_net())
        results[name] = run(model, make(name, budget), [tuple(t[share] for t in part) for part in joint_batches()])
    for name, train in BASELINES.items():
        model = nn.parallel.DistributedDataParallel(tiny_net())
        results[name] = run(model, train(), [tuple(t[share] for t in part) for part in joint_batches()])
    # With batch norm the buffers are broadcast at each wrapped forward; both losses' graphs must survive that.
    # One rank has nothing to attack: no worker may wait for another's attack.
    norms = nn.parallel.DistributedDataParallel(norm_net())
    x, y = batch(8, seed=rank)
    only = torch.full((16,), bt.Category.OUTLIER)
    only[:3] = bt.Category.BOUNDARY
    for objective in (bt.TRADES, bt.MART):
        train = BulletTrain(objective(), budget=StepBudget(2, 0), separation=lambda svar, F_R: only)
        for _ in range(2):
            out = train.step(norms, x, y)
            assert int((out.steps > 0).sum()) == (3 if rank == 0 else 0)
            out.loss.backward()
    # Compiled and then wrapped, or wrapped and then compiled: the same step.
    for order in ("wrapped", "compiled"):
        net = tiny_net()
        if order == "wrapped":
            model = torch.compile(nn.parallel.DistributedDataParallel(net), backend="eager")
        else:
            model = nn.parallel.DistributedDataParallel(torch.compile(net, backend="eager"))
        parts = [tuple(t[share] for t in part) for part in joint_batches()]
        results[order] = run(model, make("trades", StepBudget(3, 1)), parts)
    # Whatever the model is wrapped in, and by the fast engine, at once or with emulated graphs, without a wrapper.
    results["inside"] = run(
        Around(nn.parallel.DistributedDataParallel(tiny_net())), make("trades", StepBudget(3, 1)), parts
    )
    for name, emulated, net in FAST:
        results[name, emulated, net] = by_fast(name, emulated, NETS[net](), parts)
    alone = BulletTrain(bt.TRADES(eps=0.05), budget=StepBudget(3, 1), joint=False)
    assert alone.step(tiny_net(), *parts[0][:2], start=parts[0][2]).loss.item() == by_itself(parts[0])
    net = tiny_net(seed=rank)  # the first one's weights are taken
    results["apart"] = by_captured(BulletTrain(bt.TRADES(eps=0.05), budget=StepBudget(3, 1), joint=False), net, parts)
    results["warned"] = [
        warnings_of(net, parts) for net in (tiny_net(), nn.parallel.DistributedDataParallel(tiny_net()))
    ]
    results["last"] = last_steps(nn.parallel.DistributedDataParallel(tiny_net()), share)
    results["norm"] = [p.grad.clone() for p in norms.parameters()]
    torch.save(results, f"{folder}/{rank}.pt")
    del model, norms  # they hold the group
    leave_group()


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("this torch build has no gloo")
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "two-workers"  # made once, for all tests
    with FileLock(f"{folder}.lock"):
        if not folder.is_dir():
            made = tmp_path_factory.mktemp("workers")
            mp.spawn(worker, args=(free_port(), str(made)), nprocs=2)
            made.rename(folder)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]


def test_captured_steps_average_gradients_also_where_batches_are_not_joint(two):
    """Each process separates its own examples, and all train one network."""
    nets = [tiny_net() for _ in two]
    trains = [BulletTrain(bt.TRADES(eps=0.05), budget=StepBudget(3, 1), joint=False) for _ in two]
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.2) for net in nets]
    for step, (x, y, start) in enumerate(joint_batches()):
        for train, net, rows in zip(trains, nets, (slice(0, SIZES[0]), slice(SIZES[0], None)), strict=True):
            net.zero_grad()
            train.step(net, x[rows], y[rows], start=start[rows]).loss.backward()
        for i, (a, b) in enumerate(zip(*(net.parameters() for net in nets), strict=True)):
            a.grad = b.grad = (a.grad + b.grad) / 2
            for worker in two:
                assert torch.allclose(worker["apart"][step][i], a.grad, atol=1e-12)
        for optimizer in optimizers:
            optimizer.step()


@pytest.mark.parametrize("order", ["wrapped", "compiled"])
def test_compiled_and_wrapped_in_either_order(two, order):
    for worker in two:
        for plain, other in zip(worker["trades"], worker[order], strict=True):
            assert torch.equal(plain[2], other[2])
            assert other[0] == pytest.approx(plain[0], abs=1e-12)
            assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(plain[1], other[1], strict=True))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_two_workers_take_the_joint_batchs_step(two, name):
    budget = StepBudget(1, 0) if name == "augmix" else StepBudget(3, 1)
    alone = run(tiny_net(), make(name, budget), joint_batches())
    assert len({int(c) for step in alone for c in step[2]}) > 1
    for single, first, second in zip(alone, two[0][name], two[1][name], strict=True):
        assert torch.equal(torch.cat([first[2], second[2]]), single[2])  # quantile over the joint batch
        assert (first[0] + second[0]) / 2 == pytest.approx(single[0], abs=1e-12)
        assert first[3] == second[3] == pytest.approx(single[3], abs=1e-15)
        for g, g1, g2 in zip(single[1], first[1], second[1], strict=True):
            assert torch.equal(g1, g2)
            assert torch.allclose(g, g1, atol=1e-12)


@pytest.mark.parametrize("case", ["inside", *FAST], ids=str)
def test_it_does_not_depend_on_the_wrapper(two, case):
    name, _, net = ("trades", False, "tiny") if case == "inside" else case
    alone = run(NETS[net](), make(name, StepBudget(3, 1)), joint_batches())
    for single, first, second in zip(alone, two[0][case], two[1][case], strict=True):
        assert torch.equal(torch.cat([first[2], second[2]]), single[2])
        assert (first[0] + second[0]) / 2 == pytest.approx(single[0], abs=1e-12)
        assert first[3] == second[3] == pytest.approx(single[3], abs=1e-15)
        for g, g1, g2 in zip(single[1], first[1], second[1], strict=True):
            assert torch.equal(g1, g2)
            assert torch.allclose(g, g1, atol=1e-12)


def test_two_workers_remember_the_scores_of_both(two):
    alone, scores = last_steps(tiny_net(), slice(None))
    (first, firsts), (second, seconds) = (worker["last"] for worker in two)
    for single, one, other in zip(alone, first, second, strict=True):
        assert torch.allclose(torch.cat([one[0], other[0]]), single[0], atol=1e-7)
        assert torch.equal(torch.cat([one[1], other[1]]), single[1])
    assert torch.equal(firsts, seconds)
    assert torch.allclose(firsts, scores, atol=1e-7)


@pytest.mark.parametrize("name", BASELINES)
def test_two_workers_take_a_baselines_step(two, name):
    alone = run(tiny_net(), BASELINES[name](), joint_batches())
    for single, first, second in zip(alone, two[0][name], two[1][name], strict=True):
        assert (first[0] + second[0]) / 2 == pytest.approx(single[0], abs=1e-12)
        for g, g1, g2 in zip(single[1], first[1], second[1], strict=True):
            assert torch.equal(g1, g2)
            assert torch.allclose(g, g1, atol=1e-12)


def test_batch_norm_and_uneven_attacks_do_not_deadlock_or_break_the_graph(two):
    for a, b in zip(two[0]["norm"], two[1]["norm"], strict=True):
        assert torch.equal(a, b)
        assert torch.isfinite(a).all()


def test_a_network_that_is_not_wrapped_is_noticed(two):
    """Gradients are not averaged, so that weights differ after the first step."""
    for process in two:
        bare, wrapped = process["warned"]
        assert len(bare) == 1  # the second process checks the first step and the third
        assert all("different weights, so gradients are not averaged; wrap the network" in text for text in bare)
        assert wrapped == []


def one_that_dies(rank, port, folder):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=2)
    torch.set_num_threads(1)
    train, net, (x, y, start) = make("trades", StepBudget(3, 1)), tiny_net(), joint_batches()[0]
    train.step(net, x, y, start=start)
    if rank == 1:
        os._exit(9)
    try:
        train.step(net, x, y, start=start)
    except RuntimeError as error:
        Path(folder, "said").write_text(str(error), encoding="utf-8")
    os._exit(0)


def test_a_worker_that_dies_ends_the_others_with_a_message(tmp_path):
    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("this torch build has no gloo")
    context = mp.spawn(one_that_dies, args=(free_port(), str(tmp_path)), nprocs=2, join=False)
    for process in context.processes:
        process.join(60)
    assert [process.exitcode for process in context.processes] == [0, 9]
    assert "another process of the group has ended" in (tmp_path / "said").read_text(encoding="utf-8")
