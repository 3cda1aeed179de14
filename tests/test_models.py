"""The networks: names and counts as in published checkpoints, shapes, normalisation, refusals."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bullettrain.models import NETWORKS, Normalize, PreActResNet18, SmallCNN, WideResNet, build

CONSTRUCTORS = {
    "small-cnn": lambda **kw: SmallCNN(image_size=8, **kw),
    "preact-resnet-18": PreActResNet18,
    "wrn-10-1": lambda **kw: WideResNet(10, 1, **kw),
}
MEAN, STD = (0.49, 0.48, 0.45), (0.25, 0.24, 0.26)
BN = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")


def parameters(net: nn.Module) -> int:
    return sum(p.numel() for p in net.parameters())


def images(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


# --- names and counts -------------------------------------------------------------------------------------


def test_wide_resnet_has_the_names_of_robustbench_checkpoints() -> None:
    names = {"conv1.weight", "fc.weight", "fc.bias"} | {f"bn1.{n}" for n in BN}
    for block in ("block1", "block2", "block3"):
        names.add(f"{block}.layer.0.convShortcut.weight")
        for layer in ("0", "1"):
            names |= {f"{block}.layer.{layer}.conv1.weight", f"{block}.layer.{layer}.conv2.weight"}
            names |= {f"{block}.layer.{layer}.{bn}.{n}" for bn in ("bn1", "bn2") for n in BN}
    assert set(WideResNet(16, 2).state_dict()) == names


def test_wide_resnet_of_width_one_needs_no_shortcut_in_its_first_stage() -> None:
    shortcuts = [name for name in WideResNet(10, 1).state_dict() if "convShortcut" in name]
    assert shortcuts == ["block2.layer.0.convShortcut.weight", "block3.layer.0.convShortcut.weight"]


def test_preact_resnet_has_the_names_of_robustbench_checkpoints() -> None:
    names = {"conv1.weight", "linear.weight", "linear.bias"} | {f"bn.{n}" for n in BN}
    for layer in ("layer1", "layer2", "layer3", "layer4"):
        if layer != "layer1":
            names.add(f"{layer}.0.shortcut.0.weight")
        for block in ("0", "1"):
            names |= {f"{layer}.{block}.conv1.weight", f"{layer}.{block}.conv2.weight"}
            names |= {f"{layer}.{block}.{bn}.{n}" for bn in ("bn1", "bn2") for n in BN}
    with torch.device("meta"):
        assert set(PreActResNet18().state_dict()) == names


@pytest.mark.parametrize(
    ("name", "classes", "count"),
    [("wrn-34-10", 10, 46_160_474), ("wrn-40-2", 10, 2_243_546), ("wrn-28-10", 10, 36_479_194)],
)
def test_wide_resnets_have_the_published_parameter_counts(name: str, classes: int, count: int) -> None:
    with torch.device("meta"):
        assert parameters(build(name, num_classes=classes)) == count


def test_preact_resnet_has_the_parameters_of_its_layers() -> None:
    def block(i: int, o: int) -> int:
        shortcut = i * o if i != o else 0
        return 2 * i + 9 * i * o + 2 * o + 9 * o * o + shortcut

    stages = ((64, 64), (64, 128), (128, 256), (256, 512))
    count = 9 * 3 * 64 + sum(block(i, o) + block(o, o) for i, o in stages) + 2 * 512 + 512 * 10 + 10
    assert count == 11_172_170
    with torch.device("meta"):
        assert parameters(PreActResNet18()) == count


def test_small_cnn_has_the_parameters_of_its_layers() -> None:
    count = (16 * 16 + 16) + (16 * 16 * 32 + 32) + (32 * 7 * 7 * 100 + 100) + (100 * 10 + 10)
    assert parameters(SmallCNN()) == count == 166_406


def test_wide_resnet_starts_from_he_weights_and_a_zero_bias() -> None:
    torch.manual_seed(0)
    net = WideResNet(10, 4)
    convs = [m for m in net.modules() if isinstance(m, nn.Conv2d) and m.weight.numel() > 20_000]
    assert len(convs) >= 4
    for conv in convs:
        wanted = (2 / (conv.kernel_size[0] * conv.kernel_size[1] * conv.out_channels)) ** 0.5
        assert conv.weight.std().item() == pytest.approx(wanted, rel=0.03)
    assert not net.fc.bias.any()


# --- forward ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONSTRUCTORS)
@pytest.mark.parametrize(("channels", "classes"), [(1, 2), (3, 10), (1, 100)])
def test_logits_have_one_column_a_class(name: str, channels: int, classes: int) -> None:
    net = CONSTRUCTORS[name](num_classes=classes, channels=channels)
    logits = net(images(2, channels, 8, 8))
    assert logits.shape == (2, classes)
    assert logits.dtype == torch.float32
    assert logits.isfinite().all()


@pytest.mark.parametrize("size", [8, 12, 28, 30, 32])
def test_small_cnn_is_made_for_its_image_size(size: int) -> None:
    assert SmallCNN(image_size=size)(images(2, 1, size, size)).shape == (2, 10)


@pytest.mark.parametrize("shape", [(8, 8), (28, 28), (33, 20)])
@pytest.mark.parametrize("name", ["preact-resnet-18", "wrn-10-1"])
def test_residual_networks_take_any_image_size(name: str, shape: tuple[int, int]) -> None:
    assert build(name).eval()(images(1, 3, *shape)).shape == (1, 10)


@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_channels_last_gives_the_same_logits_and_gradients(name: str) -> None:
    net = CONSTRUCTORS[name](channels=3, mean=MEAN, std=STD).double()
    last = copy.deepcopy(net).to(memory_format=torch.channels_last)
    x = images(3, 3, 8, 8).double().requires_grad_()
    x_last = x.detach().to(memory_format=torch.channels_last).requires_grad_()
    z, z_last = net(x), last(x_last)
    torch.testing.assert_close(z_last, z)
    (grad,) = torch.autograd.grad(z.logsumexp(1).sum(), x)
    (grad_last,) = torch.autograd.grad(z_last.logsumexp(1).sum(), x_last)
    assert grad.any()
    torch.testing.assert_close(grad_last, grad)


@pytest.mark.parametrize("name", ["preact-resnet-18", "wrn-10-1"])
def test_batch_norm_moves_in_training_mode_only(name: str) -> None:
    net = CONSTRUCTORS[name]()
    x = images(4, 3, 8, 8)
    before = {k: v.clone() for k, v in net.state_dict().items()}
    net.eval()
    alone = torch.cat([net(x[:1]), net(x[1:])])
    torch.testing.assert_close(net(x), alone)  # in eval mode examples do not see each other
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())
    net.train()
    net(x)
    moved = {k for k, v in net.state_dict().items() if not torch.equal(v, before[k])}
    assert moved == {k for k in before if k.endswith(("running_mean", "running_var", "num_batches_tracked"))}


@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_the_first_layers_output_is_left_as_it_was(name: str) -> None:
    net = CONSTRUCTORS[name](channels=3)
    seen: list[Tensor] = []
    net.conv1.register_forward_hook(lambda _m, _i, out: seen.extend((out, out.detach().clone())))
    net(images(2, 3, 8, 8))
    assert torch.equal(seen[0], seen[1])


def test_a_gradient_can_be_differentiated_again() -> None:
    net = WideResNet(10, 1).double()
    x = images(2, 3, 8, 8).double().requires_grad_()
    (grad,) = torch.autograd.grad(net(x).logsumexp(1).sum(), x, create_graph=True)
    grad.square().sum().backward()
    assert net.conv1.weight.grad is not None
    assert net.conv1.weight.grad.any()


@pytest.mark.parametrize(
    ("name", "stages", "ends", "shortcut"),
    [
        ("wrn-16-1", [f"block{i}.layer" for i in (1, 2, 3)], ("bn1", "fc"), "convShortcut"),
        ("preact-resnet-18", [f"layer{i}" for i in (1, 2, 3, 4)], ("bn", "linear"), "shortcut.0"),
    ],
)
def test_logits_are_those_of_the_network_written_out(
    name: str, stages: list[str], ends: tuple[str, str], shortcut: str
) -> None:
    net = build(name).double().eval()
    w = net.state_dict()
    for i, (key, value) in enumerate(w.items()):
        if "bn" in key and value.dim():  # no batch norm may pass for the identity
            value.copy_(0.5 + images(*value.shape, seed=i))

    def bn_relu(at: str, x: Tensor) -> Tensor:
        mean, var, scale, shift = (
            w[f"{at}.{n}"][:, None, None] for n in ("running_mean", "running_var", "weight", "bias")
        )
        return ((x - mean) / (var + 1e-5).sqrt() * scale + shift).clamp(min=0)

    x = images(2, 3, 16, 16).double()
    out = F.conv2d(x, w["conv1.weight"], padding=1)
    for i, stage in enumerate(stages):
        for block, stride in ((f"{stage}.0", 1 if i == 0 else 2), (f"{stage}.1", 1)):
            active = bn_relu(f"{block}.bn1", out)
            if f"{block}.{shortcut}.weight" in w:
                out = F.conv2d(active, w[f"{block}.{shortcut}.weight"], stride=stride)
            inner = F.conv2d(active, w[f"{block}.conv1.weight"], stride=stride, padding=1)
            out = out + F.conv2d(bn_relu(f"{block}.bn2", inner), w[f"{block}.conv2.weight"], padding=1)
    bn, linear = ends
    logits = bn_relu(bn, out).mean((2, 3)) @ w[f"{linear}.weight"].T + w[f"{linear}.bias"]
    torch.testing.assert_close(net(x), logits)


@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_one_graph_serves_every_batch_size(name: str) -> None:
    torch.compiler.reset()
    net = CONSTRUCTORS[name](channels=3, mean=MEAN, std=STD).eval()
    compiled = torch.compile(net, backend="eager", fullgraph=True, dynamic=True)
    for m in (4, 3, 7):
        with torch._dynamo.config.patch(error_on_recompile=m != 4):
            x = images(m, 3, 8, 8)
            torch.testing.assert_close(compiled(x), net(x))


# --- normalisation ----------------------------------------------------------------------------------------


def test_normalize_is_what_it_says() -> None:
    x = images(2, 3, 4, 4)
    by_hand = torch.stack([(x[:, c] - MEAN[c]) / STD[c] for c in range(3)], dim=1)
    torch.testing.assert_close(Normalize(MEAN, STD)(x), by_hand)
    assert not Normalize(MEAN, STD).state_dict()
    assert repr(Normalize(MEAN, STD)) == "Normalize(channels=3)"


@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_normalisation_is_inside_the_network_and_outside_its_names(name: str) -> None:
    bare = CONSTRUCTORS[name](channels=3).eval()
    inside = CONSTRUCTORS[name](channels=3, mean=MEAN, std=STD).eval()
    inside.load_state_dict(bare.state_dict())
    assert list(inside.state_dict()) == list(bare.state_dict())
    x = images(2, 3, 8, 8)
    torch.testing.assert_close(inside(x), bare(Normalize(MEAN, STD)(x)))
    assert not torch.equal(inside(x), bare(x))
    assert isinstance(bare.normalize, nn.Identity)


@pytest.mark.parametrize(
    ("mean", "std", "message"),
    [
        ((0.5,), (0.5,), "images have 3 channels"),
        ((0.5,) * 3, (0.5,) * 2, "std has 2"),
        ((0.5,) * 3, None, "give both or neither"),
        (None, (0.5,) * 3, "give both or neither"),
        ((0.5,) * 3, (0.5, 0.0, 0.5), "std is .*; it has to be above 0"),
        ((0.5,) * 3, (0.5, float("nan"), 0.5), "std is .*; it has to be above 0"),
        ((0.5, float("nan"), 0.5), (0.5,) * 3, "mean is nan; it has to be finite"),
    ],
)
@pytest.mark.parametrize("name", ["small-cnn", "preact-resnet-18", "wrn-10-1"])
def test_a_wrong_normalisation_is_refused(name: str, mean: object, std: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(name, mean=mean, std=std)


def test_normalize_alone_wants_as_many_means_as_stds() -> None:
    with pytest.raises(ValueError, match="mean has 2 values and std has 1"):
        Normalize((0.5, 0.5), (0.5,))
    with pytest.raises(ValueError, match="mean has 0 values"):
        Normalize((), ())


# --- checkpoints ------------------------------------------------------------------------------------------


def test_the_unused_sub_block1_of_the_trades_checkpoint_is_dropped() -> None:
    net, other = WideResNet(10, 1), WideResNet(10, 1)
    checkpoint = net.state_dict()
    checkpoint |= {k.replace("block1", "sub_block1"): v + 1 for k, v in checkpoint.items() if "block1" in k}
    names = list(checkpoint)
    assert len(names) > len(net.state_dict())
    other.load_state_dict(checkpoint, strict=True)
    assert all(torch.equal(v, other.state_dict()[k]) for k, v in net.state_dict().items())
    assert list(checkpoint) == names  # the caller's dict is untouched

    wrapped = copy.deepcopy(nn.Sequential(WideResNet(10, 1)))
    wrapped.load_state_dict({f"0.{k}": v for k, v in checkpoint.items()}, strict=True)


@pytest.mark.parametrize("name", ["block4.layer.0.conv1.weight", "sub_block2.x", "sub_block1x", "normalize.mean"])
def test_other_unexpected_names_are_still_refused(name: str) -> None:
    net = WideResNet(10, 1)
    with pytest.raises(RuntimeError, match="Unexpected key"):
        net.load_state_dict({**net.state_dict(), name: torch.zeros(1)})


def test_a_missing_name_is_still_refused() -> None:
    net = WideResNet(10, 1)
    state = net.state_dict()
    del state["fc.bias"]
    with pytest.raises(RuntimeError, match="Missing key"):
        net.load_state_dict(state)


# --- build ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NETWORKS)
def test_every_listed_network_can_be_built(name: str) -> None:
    with torch.device("meta"):
        net = build(name, num_classes=7, channels=1, mean=(0.5,), std=(0.5,))
        assert net(torch.empty(5, 1, 32, 32)).shape == (5, 7)


def test_build_gives_the_class_of_each_name() -> None:
    small = build("small-cnn", channels=1, image_size=8)
    assert isinstance(small, SmallCNN)
    assert small(images(2, 1, 8, 8)).shape == (2, 10)
    assert isinstance(build("wrn-16-1"), WideResNet)
    assert isinstance(build("preact-resnet-18"), PreActResNet18)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("WRN-34-10", "wrn-34-10"),
        ("wrn-40x2", "wrn-40-2"),
        ("wrn-34-10\n", "wrn-34-10"),
        ("resnet18", "preact-resnet-18"),
        ("smallcnn", "small-cnn"),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(ValueError, match=f"did you mean '{nearest}'") as error:
        build(name)
    assert "there are small-cnn, preact-resnet-18 and wrn-D-W" in str(error.value)


def test_even_a_name_like_no_other_is_answered() -> None:
    for name in ("", "vgg"):
        with pytest.raises(ValueError, match=f"no network is called '{name}'; there are small-cnn, .*wrn-34-10$"):
            build(name)


@pytest.mark.parametrize(
    ("depth", "nearest"), [(35, "34 or 40"), (39, "34 or 40"), (4, "10"), (7, "10"), (12, "10 or 16")]
)
def test_a_wrong_depth_is_answered_with_the_nearest(depth: int, nearest: str) -> None:
    with pytest.raises(ValueError, match=rf"depth {depth} is not 6n \+ 4.*: take {nearest}$"):
        build(f"wrn-{depth}-2")


@pytest.mark.parametrize(
    ("name", "sizes", "message"),
    [
        ("wrn-10-0", {}, "width is 0"),
        ("wrn-10-1", {"num_classes": 1}, "num_classes is 1; it has to be at least 2"),
        ("preact-resnet-18", {"channels": 0}, "channels is 0"),
        ("preact-resnet-18", {"num_classes": 10.0}, "num_classes is 10.0"),
        ("small-cnn", {"image_size": 3}, "image_size is 3; it has to be at least 4"),
    ],
)
def test_impossible_sizes_are_refused(name: str, sizes: dict[str, int], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        build(name, **sizes)
