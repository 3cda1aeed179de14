"""On a CUDA device: captured steps are the plain ones. Run with `pytest -m gpu tests/test_gpu.py`."""

import copy
import importlib.util
import signal

import pytest
import torch

import bullettrain as bt
from bullettrain import BulletTrain, StepBudget
from bullettrain.baselines import GradAlign, one_step
from bullettrain.config import recipe
from bullettrain.config.methods import with_method
from bullettrain.data import ImageSet, load, to_unit
from bullettrain.engine.cuda_graphs import CudaGraphRunner, materialize
from bullettrain.engine.forwards import FastForwards
from bullettrain.engine.phases import EAGER, Batch
from bullettrain.models import WideResNet, build
from bullettrain.processes import Place
from bullettrain.run_folder import RunFolder, read_weights
from bullettrain.training import run as runs
from bullettrain.training.collapse import CollapseError
from bullettrain.training.metrics import StepMetrics
from bullettrain.training.optimizer import MovingAverage
from bullettrain.training.steps import Stepper
from conftest import batch, few_queries, no_waiting
from grouped import Trained
from short_runs import interrupt_at_the_third_group

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
    # What the compiler and a first capture remark.
    pytest.mark.filterwarnings("ignore:.*Online softmax is disabled"),
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS, but there was no current CUDA context"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores"),  # these tests are without on purpose
]
OBJECTIVES = {"pgd": bt.PGDAT, "trades": bt.TRADES, "mart": bt.MART}
CUDA = torch.device("cuda")
LR = 2**-7  # the fused optimiser reads its rate in single precision: one that it holds exactly


@pytest.fixture(autouse=True)
def _exact():
    before = torch.backends.cudnn.allow_tf32, torch.backends.cudnn.deterministic
    torch.backends.cudnn.allow_tf32, torch.backends.cudnn.deterministic = False, True
    yield
    torch.backends.cudnn.allow_tf32, torch.backends.cudnn.deterministic = before


def on_gpu(m, seed, classes=10):
    x, y = batch(m, classes=classes, size=16, seed=seed)
    x = x.to(CUDA).contiguous(memory_format=torch.channels_last)
    return x, y.to(CUDA), x + 0.02 * torch.randn_like(x)  # far enough for a gradient that rounding leaves alone


def captured(train, net, lr, tune_after=0.0, **settings):
    """Steps with everything captured."""
    optimizer = torch.optim.SGD(net.parameters(), lr=torch.tensor(lr, device=CUDA), momentum=0.9, fused=True)
    materialize(optimizer)
    return Trained(train, net, optimizer, cudnn_benchmark_after=tune_after, **settings)


def make(name, counts, norm="linf"):
    train = BulletTrain(OBJECTIVES[name](eps=0.05 if norm == "linf" else 0.5, norm=norm), budget=StepBudget(*counts))
    train.robust_fraction.load_state_dict({"value": 0.4, "gamma": 0.8, "momentum": 0.9})
    return train


# Double precision over 20 steps in a row. In single and in half precision rounding drifts (after some ten steps by a
# few 1e-5), and a sign turns it into a step of full size: there each of the 20 steps starts from the same weights,
# and L2, where nothing is amplified, shows how exact the rest is.
CASES = {
    "float64": (torch.float64, "linf", 1e-9),
    "float32-l2": (torch.float32, "l2", 2e-5),
    "float32": (torch.float32, "linf", 1e-3),
    "bf16": (torch.bfloat16, "linf", 0.05),
}


@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("counts", [(4, 2, 0), (4, 0, 0), (3, 3, 3)])
@pytest.mark.parametrize("name", sorted(OBJECTIVES))
def test_captured_steps_are_the_plain_ones(name, counts, case, pair):
    compare(name, counts, case, pair=pair)


@pytest.mark.parametrize("case", ["float64", "bf16"])
@pytest.mark.parametrize("name", sorted(OBJECTIVES))
def test_compiled_captured_steps_are_the_plain_ones(name, case):
    compare(name, (4, 2, 0), case, pair=True, compile=True)


@pytest.mark.parametrize("name", sorted(OBJECTIVES))
def test_steps_that_are_tuned_later_are_the_plain_ones(name):
    """Captured by guess, run for a hundredth of a second, tried and captured anew, which needs TF32 to be allowed."""
    torch.backends.cudnn.allow_tf32 = True
    graphs = compare(name, (4, 2, 0), "bf16", pair=True, compile=True, tune_after=0.01)
    assert len(graphs._untuned) < len(graphs.graphs)


@pytest.mark.parametrize("half", [True, False])
@pytest.mark.parametrize("name", ["preact-resnet-18", "wrn-40-2"])
def test_updates_of_the_recipes_networks_are_compiled(name, half):
    """What the compiler does to gradients passes for rounding, on images of 256 levels and without training yet."""
    torch.manual_seed(0)
    said = []
    network = build(name).to(CUDA).to(memory_format=torch.channels_last)
    forwards = FastForwards(network, dtype=torch.bfloat16 if half else None, compile=True, on_message=said.append)
    x = torch.randint(256, (128, 3, 32, 32), device=CUDA) / 255
    forwards.prepare(x.contiguous(memory_format=torch.channels_last))
    assert forwards.paired is not None
    assert not said


def compare(name, counts, case, *, pair, **settings):
    torch.manual_seed(0)
    precision, norm, tolerance = CASES[case]
    half, in_a_row = precision == torch.bfloat16, precision == torch.float64
    dtype = torch.float64 if precision == torch.float64 else torch.float32
    net = WideResNet(10, 1).to(CUDA, dtype).to(memory_format=torch.channels_last)
    theirs = copy.deepcopy(net)
    plain, optimizer = make(name, counts, norm), torch.optim.SGD(theirs.parameters(), lr=LR, momentum=0.9)
    train = make(name, counts, norm)
    engine = captured(train, net, LR, dtype=torch.bfloat16 if half else None, pair=pair, **settings)
    off = []
    for step in range(20):
        x, y, start = (t.to(dtype) if t.is_floating_point() else t for t in on_gpu(24, step % 5))
        with torch.no_grad():
            y = torch.where(torch.arange(24, device=CUDA) % 4 == 3, y, copy.deepcopy(theirs).eval()(x).argmax(1))
        with torch.autocast("cuda", torch.bfloat16, enabled=half):
            expected = plain.step(theirs, x, y, start=start)
        optimizer.zero_grad()
        expected.loss.backward()
        optimizer.step()
        (out,) = engine.train_on([(x, y, start)])
        off.append(abs(out.loss.item() / expected.loss.item() - 1))
        if in_a_row:
            assert torch.equal(out.category, expected.category)
        else:
            net.load_state_dict(theirs.state_dict())
            train.load_state_dict(plain.state_dict())
    # Rounding may flip a ReLU once in a while, and then it shows.
    assert sorted(off)[-2] <= tolerance
    assert max(off) <= 10 * tolerance
    assert engine.reason is None
    assert engine.runner.graphs
    assert (engine.paired is not None) == pair
    if pair and settings.get("compile"):
        assert engine.paired.run is not engine.paired.inner, "its gradients were taken for wrong ones"
    if in_a_row:
        for (key, a), b in zip(net.state_dict().items(), theirs.state_dict().values(), strict=True):
            assert torch.allclose(a, b, atol=tolerance), key
    return engine.runner


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize(
    ("budget", "selection"),
    [
        (StepBudget(1, 0), "train"),
        (StepBudget(1, 0), "eval"),
        (StepBudget(1, 0), "last"),
        (StepBudget.uniform(1), "train"),
    ],
)
def test_captured_augmix_steps_are_the_plain_ones(budget, selection, compile):
    torch.manual_seed(0)
    objective = bt.AugMix(selection=selection)
    net = WideResNet(10, 1).to(CUDA, torch.float64).to(memory_format=torch.channels_last)
    theirs = copy.deepcopy(net)
    plain, train = (BulletTrain(objective, budget=budget, dataset_size=5 * 24) for _ in range(2))
    optimizer = torch.optim.SGD(theirs.parameters(), lr=LR, momentum=0.9)
    engine = captured(train, net, LR, pair=True, compile=compile)
    for step in range(20):
        x, y, _ = on_gpu(24, step % 5)
        index = torch.arange(24, device=CUDA) + 24 * (step % 5)
        x = ((x * 255).round() / 255).double()
        draws = objective.draw(len(x), x.device)
        expected = plain.step(theirs, x, y, start=draws, index=index)
        optimizer.zero_grad()
        expected.loss.backward()
        optimizer.step()
        (out,) = engine.train_on([(x, y, draws, index)])
        assert torch.equal(out.category, expected.category)
        assert out.loss.item() == pytest.approx(expected.loss.item(), rel=1e-9), step
    assert torch.allclose(train.history.score, plain.history.score, atol=1e-7)
    assert engine.reason is None
    for (key, a), b in zip(net.state_dict().items(), theirs.state_dict().values(), strict=True):
        assert torch.allclose(a, b, atol=1e-9), key


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("name", sorted(OBJECTIVES))
def test_captured_groups_are_groups_run_at_once(name, compile):
    """Groups of three with a short last one, buckets, weight decay and clipping; a lone example at the end."""
    nets = [WideResNet(10, 1).to(CUDA, torch.float64).to(memory_format=torch.channels_last)]
    nets.append(copy.deepcopy(nets[0]))
    settings = {"size_multiple": 4, "pair": True, "clip": 1.0}
    optimizers = [
        torch.optim.SGD(net.parameters(), lr=torch.tensor(LR, device=CUDA), momentum=0.9, weight_decay=1e-3, fused=True)
        for net in nets
    ]
    trains = [make(name, (4, 2, 0)) for _ in nets]
    materialize(optimizers[0])

    class AtOnce(Trained):
        def _make_runner(self):
            return EAGER

    engine = Trained(trains[0], nets[0], optimizers[0], compile=compile, **settings)
    plain = AtOnce(trains[1], nets[1], optimizers[1], **settings)
    for turn in range(6):
        sizes = ((24, 24, 24), (24, 24, 7), (24, 1))[turn % 3]
        group = [
            tuple(t.double() if t.is_floating_point() else t for t in on_gpu(m, 10 * turn + i))
            for i, m in enumerate(sizes)
        ]
        for a, b in zip(engine.train_on(group), plain.train_on(group), strict=True):
            assert torch.equal(a.steps, b.steps)
            assert a.loss.item() == pytest.approx(b.loss.item(), rel=1e-9)
            assert a.work == b.work
    assert engine.reason is None
    for (key, a), b in zip(nets[0].state_dict().items(), nets[1].state_dict().values(), strict=True):
        assert torch.allclose(a, b, atol=1e-9), key


def test_a_captured_average_is_the_one_moved_at_once():
    """The share that it keeps changes from update to update, on the device."""
    net = WideResNet(10, 1).to(CUDA).to(memory_format=torch.channels_last)
    plain, average = MovingAverage(net, 0.6), MovingAverage(net, 0.6)
    graphs = CudaGraphRunner(lambda: [*average.parameters(), *average.buffers()])

    def move():
        average.move(net)

    for _ in range(20):
        with torch.no_grad():
            for t in (*net.parameters(), *net.buffers()):
                t.add_(torch.randn_like(t) if t.is_floating_point() else 100)
        plain.move(net)
        graphs(move)
        for (key, mine), expected in zip(average.state_dict().items(), plain.state_dict().values(), strict=True):
            assert torch.equal(mine, expected), key
    assert graphs.reason is None


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("name", ["yopo-2-5", "grad-align", "free-8", "gat", "nuat", "fgsm-pgi"])
def test_a_baselines_captured_step_is_the_plain_one(name, compile):
    """As a run takes them: twelve steps in a row in double precision, also of a shorter batch."""
    settings = [
        "optimizer.name=sgd",
        "optimizer.momentum=0.9",
        "average=0.9",
        "threads=0",
        "clip=1",
        f"compile={compile}",
    ]
    config = with_method(recipe("digits"), name).with_settings(settings)
    torch.manual_seed(0)
    net = WideResNet(10, 1).to(CUDA, torch.float64).to(memory_format=torch.channels_last)
    said, both = [], []
    for whole in (False, True):
        own = copy.deepcopy(net)
        mine = config.with_settings(["precision=float32", f"engine={'graphs' if whole else 'eager'}"])
        parts = config.method.build(), own, MovingAverage(own, 0.9), StepMetrics(CUDA), mine, Place(CUDA)
        both.append(Stepper(*parts, on_message=said.append))
    for step in range(12):
        x, y, start = (t.double() if t.is_floating_point() else t for t in on_gpu(9 if step % 4 == 3 else 24, step % 5))
        outs = [stepper.take([Batch(x, y, start)], lambda i: LR) for stepper in both]
        for field in ("loss", "category", "steps", "x_prime", "z_prime"):
            torch.testing.assert_close(*(getattr(out, field).detach() for out in outs), rtol=0, atol=1e-9)
    assert not said
    plain, whole = both
    assert whole.fast.runner.graphs
    assert plain.metrics.passes == whole.metrics.passes
    states = ([*s.network.state_dict().values(), *s.average.state_dict().values(), s.metrics.sums] for s in both)
    for mine, expected in zip(*states, strict=True):
        torch.testing.assert_close(mine, expected, rtol=0, atol=1e-8)
    assert whole.engine.steps_taken == plain.engine.steps_taken == 12


@pytest.mark.parametrize("name", ["yopo-2-5", "grad-align", "free-4", "gat", "nuat", "fgsm-pgi"])
def test_baselines_are_captured_and_resume(tmp_path, monkeypatch, name):
    config = with_method(small("attack_group=1", "network.name=wrn-10-1", "probe=0"), name)  # some collapse, so small
    whole = runs.train(config, tmp_path / "whole", Place(CUDA))
    assert whole.finished
    assert not [record for record in RunFolder(tmp_path / "whole").records() if record["kind"] == "note"]
    calls, original = [0], Stepper.take

    def take(self, *args):
        calls[0] += 1
        if calls[0] == 3:
            signal.raise_signal(signal.SIGINT)
        return original(self, *args)

    monkeypatch.setattr(Stepper, "take", take)
    assert runs.train(config, tmp_path / "cut", Place(CUDA)).reason.startswith("stopped")
    assert runs.train(config, tmp_path / "cut", Place(CUDA), resume=True).finished
    a, b = (read_weights(tmp_path / name / "last.safetensors")[0] for name in ("whole", "cut"))
    for key, value in a.items():
        assert torch.allclose(value, b[key], atol=0.02), key  # bf16, and signs


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("name", ["trades", "mart", "pgd", "augmix", "grad-align"])
def test_a_loop_of_ones_own_has_the_plain_gradients(name, compile):
    """Adam and a schedule of the loop's, a shorter batch, and the network moved in between."""
    torch.manual_seed(0)
    nets = [WideResNet(10, 1).to(CUDA, torch.float64).to(memory_format=torch.channels_last)]
    nets.append(copy.deepcopy(nets[0]))
    trains = [
        BulletTrain(bt.AugMix(), budget=StepBudget(1, 0))
        if name == "augmix"
        else one_step(GradAlign(eps=0.05))
        if name == "grad-align"
        else make(name, (4, 2, 0))
        for _ in nets
    ]
    said = []
    fast = bt.Captured(trains[1], nets[1], compile=compile, size_multiple=1, on_message=said.append)
    loops = [torch.optim.AdamW(net.parameters(), lr=1e-3) for net in nets]
    for step in range(8):
        x, y, start = (t.double() if t.is_floating_point() else t for t in on_gpu(9 if step % 4 == 3 else 24, step % 5))
        if name == "augmix":
            start = trains[0].objective.initial_perturbation(x)
        for parameter in nets[0].parameters():
            parameter.grad = None
        expected = trains[0].step(nets[0], x, y, start=start)
        expected.loss.backward()
        out = fast.step(x, y, start=start)
        assert torch.equal(out.category, expected.category)
        torch.testing.assert_close(out.loss, expected.loss.detach(), rtol=0, atol=1e-9)
        for mine, theirs in zip(*(net.parameters() for net in nets[::-1]), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=0, atol=1e-8)
        for optimizer in loops:
            for group in optimizer.param_groups:
                group["lr"] *= 0.9
            optimizer.step()
        if step == 3:  # away and back: its memory is another
            nets[1].to("cpu")
            nets[1].to(CUDA)
        with torch.no_grad():  # Adam makes whole steps of rounding
            for mine, theirs in zip(nets[1].state_dict().values(), nets[0].state_dict().values(), strict=True):
                mine.copy_(theirs)
    assert not said
    assert fast.reason is None


def test_no_graph_is_captured_after_the_sizes_have_been_seen():
    net = WideResNet(10, 1).to(CUDA)
    engine = captured(make("trades", (4, 2, 0)), net, 0.0, pair=True, size_multiple=8)
    parts = [[on_gpu(24, 2 * i), on_gpu(24, 2 * i + 1)] for i in range(6)]
    for _ in range(4):  # F_R finds its level
        for part in parts:
            engine.train_on(part)
    seen = set(engine.runner.graphs)
    for part in parts:
        engine.train_on(part)
    assert set(engine.runner.graphs) == seen


def test_batch_sizes_may_change():
    net = WideResNet(10, 1).to(CUDA)
    engine = captured(make("mart", (4, 2, 0)), net, 0.01, size_multiple=8)
    for m in (24, 24, 7, 24, 40, 24):
        (out,) = engine.train_on([on_gpu(m, m)])
        assert torch.isfinite(out.loss)
        assert len(out.category) == m
    assert engine.reason is None


def test_memory_does_not_grow():
    net = WideResNet(10, 1).to(CUDA)
    engine = captured(make("trades", (3, 1, 0)), net, 0.0, pair=True, size_multiple=8)  # standing still: sizes settle
    parts = [[on_gpu(32, i)] for i in range(4)]
    for i in range(200):
        engine.train_on(parts[i % 4])
    torch.cuda.synchronize()
    before, sizes = torch.cuda.memory_allocated(), set(engine.runner.graphs)
    for i in range(500):
        engine.train_on(parts[i % 4])
    torch.cuda.synchronize()
    assert set(engine.runner.graphs) == sizes
    assert torch.cuda.memory_allocated() <= before + 2**20


def test_a_network_that_reads_back_falls_back_with_a_line():
    class Reads(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net = WideResNet(10, 1)

        def forward(self, x):
            return self.net(x) * (1.0 if float(x.detach().mean()) > -1 else 2.0)

    torch.manual_seed(0)
    net, said = Reads().to(CUDA), []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    engine = Trained(make("trades", (2, 1, 0)), net, optimizer, on_message=said.append)
    (out,) = engine.train_on([on_gpu(16, 0)])
    assert torch.isfinite(out.loss)
    assert len(said) == 1
    assert "\n" not in said[0]
    torch.randn(3, device=CUDA)  # the generator is free again


def test_mining_does_not_wait_for_the_device():
    logits, y = torch.randn(64, 10, device=CUDA), torch.randint(10, (64,), device=CUDA)
    fraction = bt.RobustFraction()
    fraction.update(logits, y)
    with no_waiting():
        svar = bt.signed_prediction_variance(logits, y)
        for F_R in (0.5, fraction.value):
            category = bt.separate(svar, F_R)
        fraction.update(logits, y)
        budget = StepBudget(10, 2)
        budget.step_sizes(category, budget.allocate(category), 0.031)


# ------------------------------------------------------------------------------------------ through the command


def small(*settings):
    cuts = ("epochs=2", "data.train_size=400", "data.validation=60", "training.batch_size=50", "log_every=2")
    return recipe("digits").with_settings(
        [*cuts, "probe=20", "threads=0", "attack_group=2", "size_multiple=4", *settings]
    )


def test_a_run_on_the_gpu_resumes_in_the_middle_of_an_epoch(tmp_path, monkeypatch):
    whole = runs.train(small(), tmp_path / "whole", Place(CUDA))
    assert whole.finished
    interrupt_at_the_third_group(monkeypatch)
    assert runs.train(small(), tmp_path / "cut", Place(CUDA)).reason.startswith("stopped")
    monkeypatch.undo()
    assert runs.train(small(), tmp_path / "cut", Place(CUDA), resume=True).finished
    a, b = (read_weights(tmp_path / name / "last.safetensors")[0] for name in ("whole", "cut"))
    for key, value in a.items():
        assert torch.allclose(value, b[key], atol=1e-3), key


def test_a_nan_inside_a_captured_step_is_noticed(tmp_path):
    with pytest.raises(CollapseError, match="NaN"):
        runs.train(small("lr=1e30", "optimizer.name=sgd", "epochs=20"), tmp_path / "run", Place(CUDA))


def test_a_network_is_judged_on_the_gpu_as_on_the_cpu(tmp_path, monkeypatch):
    """Channels last, exact float32: what survives differs by rounding alone. AutoAttack in a short form."""
    from bullettrain.evaluation.evaluate import Plan, evaluate
    from bullettrain.evaluation.progress import EvaluationProgress
    from bullettrain.evaluation.results import Store
    from bullettrain.evaluation.specs import parse_attacks
    from bullettrain.loading import LoadedModel

    digits = load("digits", split="test").subset(torch.arange(64))
    images = digits.images.expand(-1, 3, -1, -1).contiguous()
    network = build("wrn-10-1").eval()
    data = ImageSet(images, network(to_unit(images)).argmax(dim=1), digits.classes)
    texts = ["pgd5x2:eps=0.01", "pgd5:norm=l2,eps=0.1", "pgd5:loss=kl,eps=0.01"]
    if importlib.util.find_spec("pyautoattack") is not None:
        few_queries(monkeypatch)
        texts += ["autoattack:eps=0.002"]
    found = {}
    for device in ("cpu", "cuda"):
        subject = LoadedModel("net", "net", network=copy.deepcopy(network))
        _, asked = evaluate(
            subject,
            data,
            "digits",
            Plan(parse_attacks(texts), ("float32",) if device == "cpu" else ("float32", "tf32", "bf16")),
            device=torch.device(device),
            store=Store(tmp_path / device),
            progress=EvaluationProgress(),
        )
        found[device] = asked
    expected = {on_cpu.name: on_cpu.accuracy for on_cpu in found["cpu"]}
    assert len(found["cuda"]) == 3 * len(expected)
    for there in found["cuda"]:
        tolerance = 0.05 if there.precision == "float32" else 0.15
        assert abs(there.accuracy - expected[there.name]) <= tolerance, (there.name, there.precision)


@pytest.mark.parametrize("half", [False, True])
def test_a_compiled_network_is_judged_as_it_is(half):
    """Logits and gradients of all sizes, of images that lie either way."""
    from bullettrain.evaluation.accuracy import EvaluatedModel
    from bullettrain.precision import arithmetic

    torch.manual_seed(0)
    network = build("preact-resnet-18", num_classes=10).to(CUDA, memory_format=torch.channels_last)
    network.eval().requires_grad_(False)
    dtype = torch.bfloat16 if half else torch.float32
    plain, compiled = EvaluatedModel(network, dtype=dtype), EvaluatedModel(network, dtype=dtype, compiled=True)
    close = {"rtol": 0.05, "atol": 0.02} if half else {"rtol": 1e-3, "atol": 1e-4}
    with arithmetic("bf16" if half else "float32"):
        for m in (64, 37, 8, 1):
            x = torch.rand(m, 3, 32, 32, device=CUDA)
            for images in (x, x.contiguous(memory_format=torch.channels_last)):
                with torch.no_grad():
                    torch.testing.assert_close(compiled(images), plain(images), **close)
                at = images.clone().requires_grad_()
                ours, theirs = (torch.autograd.grad(net(at).logsumexp(1).sum(), at)[0] for net in (compiled, plain))
                assert torch.nn.functional.cosine_similarity(ours.flatten(), theirs.flatten(), dim=0) > 0.99
