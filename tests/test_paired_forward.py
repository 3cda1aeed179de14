"""Two batches in one forward are two forwards: figures, gradients, statistics, compiled or not."""

import copy
import math

import pytest
import torch

from bullettrain.attacks.pgd import take
from bullettrain.attacks.state import training
from bullettrain.engine import paired_forward as paired_module
from bullettrain.engine.forwards import FastForwards
from bullettrain.engine.frozen_copy import FrozenCopy
from bullettrain.engine.paired_forward import PairedForward, _gradients, gradient_error
from bullettrain.models import build
from conftest import batch, norm_net
from grouped import Fast, engine, learnable


def frozen_norm_net():
    net = norm_net()
    net[1].eval()
    return net


class Tied(torch.nn.Module):
    """Two layers that share a weight, a 1-d norm, and parameters that are no layer's."""

    def __init__(self):
        super().__init__()
        self.inner, self.norm, self.head = torch.nn.Linear(48, 48), torch.nn.BatchNorm1d(48), torch.nn.Linear(48, 4)
        self.again, self.gain = torch.nn.Linear(48, 48), torch.nn.Parameter(torch.ones(48))
        self.again.weight = self.inner.weight

    def forward(self, x):
        return self.head(torch.relu(self.norm(self.again(self.gain * self.inner(x.flatten(1))))))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("make", [norm_net, frozen_norm_net, Tied])
@pytest.mark.parametrize("counts", [(5, 3), (4, 4), (6, 0)])
def test_two_batches_in_one_forward_are_two_forwards(make, counts, compiled):
    torch.manual_seed(0)
    m, t = counts
    net = make().double()
    with torch.no_grad():  # statistics far from the batches', which a forward moves far
        for buffer in net.buffers():
            buffer.add_(buffer + 3)
    x, _ = batch(m + t, size=4, dtype=torch.float64)
    assert PairedForward.suits(net, x)
    theirs, joint = copy.deepcopy(net), PairedForward(net, None)
    weights = torch.randn(m + t, 4, dtype=torch.float64)
    joint.prepare(m)
    if compiled:  # partitioned as on a GPU: what a backward recomputes must not have changed meanwhile
        joint.compile(backend="aot_eager_decomp_partition")
    z = joint(x)
    (z * weights).sum().backward()
    expected = torch.cat([theirs(part) for part in (x[:m], x[m:]) if len(part)])
    (expected * weights).sum().backward()
    assert torch.allclose(z, expected, atol=1e-12)
    for (key, a), b in zip(net.state_dict().items(), theirs.state_dict().values(), strict=True):
        assert torch.allclose(a, b, atol=1e-12), key
    for (key, a), b in zip(net.named_parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(a.grad, b.grad, atol=1e-12), key


@pytest.mark.parametrize("folded", [False, True])
@pytest.mark.parametrize("make", [norm_net, Tied])
def test_half_precision_is_autocast_and_leaves_the_weights_in_single(make, folded):
    torch.manual_seed(0)
    net = make()
    x, _ = batch(9, size=4)
    theirs, joint, shadow = (
        copy.deepcopy(net),
        PairedForward(net, torch.bfloat16),
        FrozenCopy(net, torch.bfloat16, folded=folded),
    )
    with torch.no_grad():
        for p, q in zip(net.parameters(), theirs.parameters(), strict=True):
            p.mul_(1.1)
            q.copy_(p)
    joint.prepare(5)
    z = joint(x)
    z.float().square().sum().backward()
    joint.give_back()
    with torch.autocast("cpu", torch.bfloat16):
        expected = torch.cat([theirs(x[:5]), theirs(x[5:])])
    expected.float().square().sum().backward()
    assert z.dtype == torch.bfloat16
    assert torch.allclose(z.float(), expected.float(), atol=0.02 * expected.detach().abs().max().item())
    for (key, a), b in zip(net.named_parameters(), theirs.parameters(), strict=True):
        assert a.dtype == a.grad.dtype == torch.float32
        assert (a.grad - b.grad).norm() <= 0.02 * b.grad.norm() + 1e-3, key
    shadow.refresh()
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        expected = theirs.eval()(x)
    assert torch.allclose(shadow(x).float(), expected.float(), atol=0.02 * float(expected.abs().max()))


def test_a_lone_example_gets_its_own_gradient_only():
    """In half precision its forward is not joined, and the copies' gradients of the update before are gone."""
    grads = []
    for joint in (False, True):
        torch.manual_seed(0)
        net = norm_net()
        group = Fast(engine("pgd", (2, 1, 0)), net, pair=joint, dtype=torch.bfloat16)
        for m in (12, 1):
            x, y = batch(m, seed=m)
            group.train_on([(x, y, x)])
        grads.append([p.grad.clone() for p in net.parameters()])
        assert (group._phases.forwards.paired is not None) == joint
    for a, b in zip(*grads, strict=True):
        assert (a - b).norm() <= 0.05 * a.norm() + 1e-6


def test_sums_that_lie_far_from_zero_do_not_cancel():
    x = 100 + 0.1 * torch.randn(9, 6, 4, 4)
    norm = torch.nn.Sequential(torch.nn.BatchNorm2d(6))
    theirs, joint = copy.deepcopy(norm), PairedForward(norm, None)
    joint.prepare(5)
    expected = torch.cat([theirs(x[:5]), theirs(x[5:])])
    assert torch.allclose(joint(x), expected, atol=1e-3)


def test_the_copy_takes_the_modes_of_training():
    class Looks(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net = norm_net()

        def forward(self, x):
            return self.net(x) * (2.0 if self.training else 1.0)

    losses = []
    for joint in (False, True):
        torch.manual_seed(0)
        net = Looks().double().eval()
        (one,) = learnable(net, [3])
        net.eval()
        group = Fast(engine("trades", (2, 1, 0)), net, pair=joint)
        losses.append(group.train_on([one])[0].loss.item())
        assert (group._phases.forwards.paired is not None) == joint
    assert losses[0] == pytest.approx(losses[1], abs=1e-12)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_compiled_on_a_cpu_it_is_the_plain_step(monkeypatch):
    compile_ = torch.compile
    monkeypatch.setattr(
        torch,
        "compile",
        lambda f, options=None, **more: compile_(f, backend="aot_eager_decomp_partition", **more),
    )
    net = norm_net().double()
    theirs = copy.deepcopy(net)
    plain, train = engine("trades", (3, 1, 0)), engine("trades", (3, 1, 0))
    optimizer, own = (torch.optim.SGD(n.parameters(), lr=0.1, momentum=0.9) for n in (theirs, net))
    group = Fast(train, net, own, compile=True, pair=True)
    for x, y, start in learnable(net, range(3)):
        expected = plain.step(theirs, x, y, start=start)
        optimizer.zero_grad()
        expected.loss.backward()
        optimizer.step()
        (out,) = group.train_on([(x, y, start)])
        assert out.loss.item() == pytest.approx(expected.loss.item(), abs=1e-12)
        assert torch.allclose(out.z_prime, expected.z_prime, atol=1e-12)
        assert float(train.robust_fraction.value) == pytest.approx(float(plain.robust_fraction.value), abs=1e-15)
        for (key, a), b in zip(net.state_dict().items(), theirs.state_dict().values(), strict=True):
            assert torch.allclose(a, b, atol=1e-12, rtol=0), key


@pytest.mark.parametrize("harm", ["cut off", "bent", "rounded"])
def test_a_compiler_that_changes_gradients_is_found_out(monkeypatch, harm):
    """As torch 2.11 has done; what only rounds is let through."""

    class Bent(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient * (1e-6 + 1 if harm == "rounded" else 1.1)

    class Harmed(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x, count, valid):
            weight = self.inner.copy[0].weight.requires_grad_(harm != "cut off")
            logits, *rest = self.inner(x, count, valid)
            weight.requires_grad_(True)
            return Bent.apply(logits) if harm != "cut off" else logits, *rest

    def compile(function, **_):
        return Harmed(function) if type(function).__name__ == "_Inner" else function

    monkeypatch.setattr(torch, "compile", compile)
    net = norm_net().double()
    theirs, before = copy.deepcopy(net), copy.deepcopy(net.state_dict())
    (one,) = learnable(net, [3])
    losses = []
    for network, compiled in ((theirs, False), (net, True)):
        group, said = Fast(engine("trades", (3, 1, 0)), network, compile=compiled, pair=True), []
        group.on_message = said.append
        paired = group._phases_for(one[0]).forwards.paired
        if compiled and harm != "rounded":
            assert len(said) == 1
            assert said[0].startswith("updates are not compiled")
        assert (paired.run is not paired.inner) == (compiled and harm == "rounded")
        assert all(torch.equal(value, before[key]) for key, value in network.state_dict().items())
        losses.append(group.train_on([one])[0].loss.item())
    assert losses[0] == pytest.approx(losses[1], abs=1e-12)
    for a, b in zip(net.parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(a.grad, b.grad, rtol=1e-5)


@pytest.mark.parametrize(("name", "half"), [("wrn-16-2", True), ("wrn-16-2", False)])
def test_rounding_is_told_from_lost_gradients(name, half):
    """On images of 256 levels, as real ones are, and on a network without training yet, where bf16 blurs most."""
    torch.manual_seed(0)
    network, x = build(name, num_classes=10), torch.randint(256, (24, 3, 32, 32)) / 255

    class Otherwise(torch.nn.Module):
        """Rounded in other places, as by a compiler: less often in half precision, in another order in single."""

        def forward(self, x, count, valid):
            if not half:
                return joint.inner(x.contiguous(memory_format=torch.channels_last), count, valid)
            wider = copy.deepcopy(joint.inner).float()
            wider.dtype = None
            for module in wider.modules():
                if isinstance(module, torch.nn.Conv2d):
                    module.register_forward_hook(lambda module, inputs, output: output.bfloat16().float())
            return Through.apply(wider, x.bfloat16().float(), count, valid, *joint.inner.parameters()), [], [], []

    class Through(torch.autograd.Function):
        """Gradients of the wider copy's parameters as those of the network itself."""

        @staticmethod
        def forward(ctx, wider, x, count, valid, *parameters):
            with torch.enable_grad():
                logits, *_ = wider(x, count, valid)
            ctx.inner, ctx.dtypes = (logits, list(wider.parameters())), [p.dtype for p in parameters]
            return logits.detach()

        @staticmethod
        def backward(ctx, gradient):
            logits, parameters = ctx.inner
            found = torch.autograd.grad(logits, parameters, gradient)
            return None, None, None, None, *(g.to(dtype) for g, dtype in zip(found, ctx.dtypes, strict=True))

    with training(network):
        joint = PairedForward(network, torch.bfloat16 if half else None)
        joint.run = Otherwise()
        assert joint.gradient_error(x) < 0.75
        joint.prepare(16)
        exact = copy.deepcopy(joint.inner).double()
        exact.dtype = None
        truth = _gradients(exact, exact, (x.bfloat16() if half else x).double(), joint.count)
        plain, other = (_gradients(run, joint.inner, x, joint.count) for run in (joint.inner, joint.run))
    sizes = torch.stack([t.norm() for t in truth])
    blur = max(((a - t).norm() / t.norm()).item() for t, a in zip(truth, plain, strict=True))
    assert blur > 0.3 if half else blur < 0.02
    assert gradient_error(truth, plain, plain) < 0.75
    assert gradient_error(truth, plain, other) < 0.75
    assert gradient_error(truth, plain, [-g for g in other]) > 1
    assert gradient_error(truth, plain, [1.9 * g for g in other]) > 1
    assert gradient_error(truth, plain, [None, *other[1:]]) == math.inf
    assert gradient_error(truth, plain, [g * float("nan") for g in other]) > 1
    for index, gradient in enumerate(other):
        if sizes[index] > 2e-3 * sizes.norm():
            lost = [*other[:index], torch.zeros_like(gradient), *other[index + 1 :]]
            assert gradient_error(truth, plain, lost) == math.inf
    if not half:  # finer errors show in single precision
        assert gradient_error(truth, plain, [1.1 * g for g in other]) > 1
    none = [torch.zeros_like(t) for t in truth]
    assert gradient_error(none, none, none) == gradient_error([], [], []) == 0


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("error", ["variance held", "weight's halved", "weight's and bias's swapped"])
def test_wrong_gradients_of_norms_do_not_pass_for_rounding(monkeypatch, error, half):
    torch.manual_seed(0)
    network, x = build("wrn-16-2", num_classes=10), torch.randint(256, (24, 3, 32, 32)) / 255
    right = paired_module._Normalise.backward

    def wrong(ctx, gradient, *rest):
        if error == "variance held":
            x, weight, _, batch, member, number, _, inverse = ctx.saved_tensors
            g, scale = gradient.float(), inverse * weight
            total = paired_module._by_batch(member, paired_module._by_row(g))
            dx = g * paired_module._spread(batch, scale, x) - paired_module._spread(batch, scale * total / number, x)
            return dx.to(x.dtype), *right(ctx, gradient, *rest)[1:]
        dx, weight, bias, *others = right(ctx, gradient, *rest)
        weight, bias = (weight / 2, bias) if error == "weight's halved" else (bias, weight)
        return dx, weight, bias, *others

    class Compiled(torch.nn.Module):
        def forward(self, x, count, valid):
            monkeypatch.setattr(paired_module._Normalise, "backward", staticmethod(wrong))
            return joint.inner(x, count, valid)

    with training(network):
        joint = PairedForward(network, torch.bfloat16 if half else None)
        assert joint.gradient_error(x) < 1
        joint.run = Compiled()
        assert joint.gradient_error(x) > 1


def test_networks_whose_examples_see_each_other_are_forwarded_one_after_the_other():
    class Mixes(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net = norm_net()

        def forward(self, x):
            return self.net(x - 0.01 * x.mean(dim=0))

    chance = torch.nn.Sequential(norm_net(), torch.nn.Dropout(0.001))
    cumulative = norm_net()
    cumulative[1].momentum = None
    x, y = batch(12, size=4)
    for net in (Mixes(), chance, cumulative):
        before = copy.deepcopy(net.state_dict())
        assert not PairedForward.suits(net, x)
        for key, value in net.state_dict().items():  # trying leaves no trace
            assert torch.equal(value, before[key])
        group = Fast(engine("trades", (2, 1, 0)), net, pair=True)
        assert torch.isfinite(group.train_on([(x, y, x)])[0].loss)
        assert group._phases.forwards.paired is None


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # the compiler looks, and hides it itself
def test_compiled_once_for_every_size(monkeypatch):
    from torch._dynamo.testing import CompileCounterWithBackend

    counters, compile_ = {}, torch.compile

    def counted(function, *, options=None, **more):
        name = type(function).__name__ if isinstance(function, torch.nn.Module) else function.__name__
        counters[name] = CompileCounterWithBackend("aot_eager")
        return compile_(function, backend=counters[name], fullgraph=True, **more)

    def dynamic(x, dim=0):
        torch._dynamo.maybe_mark_dynamic(x, dim)
        return x

    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", counted)
    for module in ("engine.forwards", "engine.paired_forward", "engine.phases", "attacks.ascent"):
        monkeypatch.setattr(f"bullettrain.{module}.dynamic", dynamic)
    net = norm_net().double()
    group = Fast(engine("trades", (3, 1, 0)), net, size_multiple=2, compile=True, pair=True)
    for sizes in ((12, 12), (12, 12), (12, 7), (9,)):
        group.train_on([one for i, m in enumerate(sizes) for one in learnable(net, [i], m=m)])
    assert counters["_Inner"].frame_count == 1
    assert counters["FrozenCopy"].frame_count == 1
    torch._dynamo.reset()


@pytest.mark.parametrize("t", [0, 3])
def test_images_are_laid_out_alike_whether_any_are_corrupted_or_none(t, monkeypatch):
    """Compiled, another layout is another program: half a minute, and slower from then on."""
    x = batch(8, size=4)[0].contiguous(memory_format=torch.channels_last)
    forwards, seen = FastForwards(norm_net()), []
    forwards.prepare(x)
    pair = forwards._pair
    monkeypatch.setattr(forwards, "_pair", lambda x, *more: seen.append(x) or pair(x, *more))
    z, moved = forwards.learning_logits(x, take(x, torch.arange(t)), None, None)
    assert z.shape == (8, 4)
    assert (moved is None) == (t == 0)
    assert seen[0].is_contiguous(memory_format=torch.channels_last)
    assert not seen[0].is_contiguous()
