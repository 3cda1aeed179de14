"""AugMix views against Pillow, image by image: every operation at every strength, whole views, what is drawn."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from scipy import stats

import pillow_augmix as pillow
from bullettrain.augmix import Operation, ViewMaker, operate, operations
from bullettrain.augmix import views as making

GEOMETRIC = ("rotate", "shear_x", "shear_y", "translate_x", "translate_y")
SHAPES = [(3, 32, 32), (1, 8, 8), (3, 17, 23), (1, 28, 28), (1, 150, 97), (3, 2, 3), (1, 1, 1)]


def picture(image):
    """A Pillow image of bytes (C, H, W)."""
    return Image.fromarray(image.transpose(1, 2, 0).copy() if len(image) == 3 else image[0])


def array(image):
    """Bytes or floats (C, H, W) of a Pillow image or an array (H, W[, C])."""
    values = np.asarray(image)
    return values.transpose(2, 0, 1) if values.ndim == 3 else values[None]


def images(n, shape, rng):
    """Noise, smooth ramps, narrow ranges, a few colours, and one colour: what tables and edges depend on."""
    channels, height, width = shape
    noise = rng.integers(0, 256, (n, *shape))
    ramp = np.linspace(0, 1, height)[:, None] * rng.uniform(0, 255) + np.linspace(0, 1, width) * rng.uniform(0, 255)
    ramps = (ramp / 2 + rng.uniform(0, 120, (n, channels, 1, 1))).astype(int)
    narrow = noise // 16 + rng.integers(0, 240, (n, channels, 1, 1))
    few = rng.integers(0, 256, (n, channels, 4))[np.arange(n)[:, None, None, None], np.arange(channels)[:, None, None]]
    few = np.take_along_axis(few.reshape(n, channels, 1, 4), noise.reshape(n, channels, -1, 1) % 4, 3)
    kinds = np.stack([noise, ramps, narrow, few.reshape(n, *shape), np.broadcast_to(noise[..., :1, :1], noise.shape)])
    return kinds[np.arange(n) % 5, np.arange(n)].clip(0, 255).astype(np.uint8)


def levels(name, n, rng):
    """Levels in (0, 10) of both signs; where the strength is a whole number, every one occurs."""
    strengths = {"posterize": 4, "rotate": 30, "solarize": 256, "translate_x": 11, "translate_y": 11}.get(name, 1)
    return (np.arange(n) % strengths + rng.uniform(0, 1, n)) * 10 / strengths * rng.choice([-1, 1], n)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", pillow.NAMES)
def test_each_operation_is_pillows(name, shape):
    rng = np.random.default_rng(7)
    n = 260 if shape == (3, 32, 32) else 65
    batch, level = images(n, shape, rng), levels(name, n, rng)
    operation = torch.full((n, 1), Operation[name.upper()])
    ours = operate(torch.from_numpy(batch), operation, torch.from_numpy(level)[:, None]).numpy()
    theirs = np.stack([array(pillow.operate(picture(b), name, v)) for b, v in zip(batch, level.tolist(), strict=True)])
    difference = np.abs(ours.astype(int) - theirs.astype(int))
    if name not in GEOMETRIC:
        assert difference.max() == 0
    else:  # Pillow cuts off: what lies within 1e-12 of a whole byte may fall to either side
        assert difference.max() <= 1
        assert (difference > 0).mean() < 1e-4
    if min(shape[1:]) > 8 and name != "colour":
        assert (ours != batch).any(), "it does something"


@settings(max_examples=40)
@given(
    st.tuples(st.sampled_from([1, 3]), st.integers(1, 12), st.integers(1, 12)),
    st.integers(0, 1000),
    st.sampled_from(pillow.NAMES),
    st.floats(-9.99, 9.99),
)
def test_any_image_at_any_level(shape, seed, name, level):
    image = images(5, shape, np.random.default_rng(seed))[seed % 5]
    operation, levels = torch.tensor([[Operation[name.upper()]]]), torch.tensor([[level]], dtype=torch.float64)
    ours = operate(torch.from_numpy(image)[None], operation, levels)
    difference = ours[0].int() - torch.from_numpy(array(pillow.operate(picture(image), name, level)).astype(np.int32))
    assert difference.abs().max() <= (1 if name in GEOMETRIC else 0)


def mixed_batch(n=60, shape=(3, 20, 24)):
    rng = np.random.default_rng(3)
    batch, level = torch.from_numpy(images(n, shape, rng)), torch.from_numpy(rng.uniform(-9.9, 9.9, (n, 2)))
    return batch, torch.stack([torch.arange(n) % 14 - 1, torch.arange(n) % 5 - 1], dim=1), level


def test_images_of_a_batch_do_not_touch_each_other():
    batch, operation, level = mixed_batch()
    together = operate(batch, operation, level)
    for i in range(len(batch)):
        once = operate(batch[i : i + 1], operation[i : i + 1, :1], level[i : i + 1, :1])
        assert torch.equal(together[i : i + 1], operate(once, operation[i : i + 1, 1:], level[i : i + 1, 1:]))
    untouched = (operation == Operation.NONE).all(dim=1)
    assert untouched.any()
    assert torch.equal(together[untouched], batch[untouched])


def test_what_a_gpu_computes_for_all_images_is_what_a_cpu_computes_for_some(monkeypatch):
    batch, operation, level = mixed_batch()
    some = operate(batch, operation, level)
    monkeypatch.setattr(operations, "_apply", lambda change, images, parameters, nothing: change(images, parameters))
    assert torch.equal(operate(batch, operation, level), some)
    few = (operation < Operation.COLOUR).all(dim=1)
    assert torch.equal(operate(batch[few], operation[few], level[few], enhancing=False), some[few])


# -------------------------------------------------------------------------------------------- whole views


@pytest.mark.parametrize("maker", [ViewMaker(), ViewMaker(severity=8, width=2, depth=2, all_ops=True)], ids=str)
@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 8, 8)], ids=str)
def test_a_view_is_the_one_that_pillow_makes_of_the_same_draws(maker, shape):
    rng = np.random.default_rng(5)
    batch = images(10, shape, rng)
    draws = maker.draw(10, generator=torch.Generator().manual_seed(2))
    made = maker(torch.from_numpy(batch).float() / 255, draws)
    assert made.shape == (2, 10, *shape)
    share, weights, operation, level = (part.numpy() for part in maker.choices(draws))
    for view in range(2):
        for i in range(10):
            mixed = np.zeros(shape)
            for chain in range(maker.width):
                image = picture(batch[i])
                for link in range(maker.links):
                    chosen = operation[view, chain, i, link]
                    if chosen >= 0:
                        image = pillow.operate(image, pillow.NAMES[chosen], float(level[view, chain, i, link]))
                mixed += weights[view, chain, i] * array(image) / 255
            wanted = (1 - share[view, i]) * batch[i] / 255 + share[view, i] * mixed
            assert np.abs(made[view, i].numpy() - wanted).max() < 1e-6


def test_what_is_drawn_has_the_right_distribution():
    maker, n = ViewMaker(), 4000
    share, weights, operation, level = maker.choices(maker.draw(n, generator=torch.Generator().manual_seed(0)))
    used = operation >= 0

    def uniform(values, low=0.0, high=1.0):
        return stats.kstest(values.flatten().numpy(), "uniform", (low, high - low)).pvalue

    assert uniform(share) > 1e-3  # Beta(1, 1)
    assert torch.allclose(weights.sum(dim=1), torch.ones(2, n, dtype=torch.float64))
    for chain in range(3):  # each weight of Dirichlet(1, 1, 1) is Beta(1, 2)
        assert stats.kstest(weights[:, chain].flatten().numpy(), "beta", (1, 2)).pvalue > 1e-3
    covariance = np.cov(weights.movedim(1, 0).flatten(1).numpy())
    assert np.allclose(covariance, np.where(np.eye(3), 1 / 18, -1 / 36), atol=0.003)
    depth = used.sum(dim=-1)
    assert used.int().diff(dim=-1).max() == 0, "a chain has no gaps"
    assert stats.chisquare(torch.bincount(depth.flatten())[1:].numpy()).pvalue > 1e-3
    assert (int(depth.min()), int(depth.max())) == (1, 3)
    assert stats.chisquare(torch.bincount(operation[used], minlength=9).numpy()).pvalue > 1e-3
    assert int(operation.max()) == Operation.TRANSLATE_Y
    assert uniform(level.abs(), 0.1, 3.0) > 1e-3
    assert abs(float((level < 0).double().mean()) - 0.5) < 0.01
    # Nothing hangs on anything else, nor one view on the other.
    columns = torch.stack([share[0], share[1], weights[0, 0], depth[0, 0], level[0, 0, :, 0], operation[0, 0, :, 0]])
    correlation = np.corrcoef(columns.double().numpy()) - np.eye(len(columns))
    assert np.abs(correlation).max() < 4.5 / math.sqrt(n)


def test_views_are_distributed_as_pillows():
    """The same picture many times: mean and variance of each of 16 patches, by Welch's and Levene's tests."""
    rng, n = np.random.default_rng(1), 900
    image = images(5, (3, 32, 32), rng)[1] // 2 + images(5, (3, 32, 32), rng)[0] // 4

    def patches(views):
        return views.reshape(-1, 3, 4, 8, 4, 8).mean(axis=(1, 3, 5)).reshape(len(views), 16)

    maker = ViewMaker()
    draws = maker.draw(n, 1, generator=torch.Generator().manual_seed(4))
    ours = patches(maker(torch.from_numpy(image).float().expand(n, -1, -1, -1) / 255, draws)[0].numpy())
    made = [pillow.view(picture(image), rng) for _ in range(n)]
    theirs = patches(np.stack([array(view) for view, _, _ in made]))
    assert stats.ttest_ind(ours, theirs, equal_var=False).pvalue.min() > 1e-3 / 16
    assert min(stats.levene(a, b).pvalue for a, b in zip(ours.T, theirs.T, strict=True)) > 1e-3 / 16
    share, weights, _, _ = maker.choices(draws)
    assert stats.ks_2samp(weights[0, 0].numpy(), [w[0] for _, w, _ in made]).pvalue > 1e-3
    assert stats.ks_2samp(share[0].numpy(), [s for _, _, s in made]).pvalue > 1e-3


def test_the_same_generator_makes_the_same_views():
    maker = ViewMaker()
    x = torch.rand(6, 3, 16, 16)
    one, two, other = (maker(x, maker.draw(6, generator=torch.Generator().manual_seed(s))) for s in (1, 1, 2))
    assert torch.equal(one, two)
    assert not torch.equal(one, other)
    assert not torch.equal(one[0], one[1])


@settings(max_examples=20)
@given(st.integers(1, 9), st.data())
def test_an_images_views_do_not_depend_on_the_others(n, data):
    maker = ViewMaker()
    x, draws = torch.rand(n, 1, 9, 9), maker.draw(n)
    rows = torch.tensor(data.draw(st.lists(st.integers(0, n - 1), max_size=n)), dtype=torch.int64)
    assert torch.equal(maker(x[rows], draws[rows]), maker(x, draws)[:, rows])


@settings(max_examples=20)
@given(st.lists(st.booleans(), max_size=9), st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
def test_images_that_are_left_are_themselves(left, dtype):
    maker, n, which = ViewMaker(), len(left), torch.tensor(left, dtype=torch.bool)
    x, draws = torch.rand(n, 3, 9, 9).to(dtype), maker.draw(n)
    before = draws.clone()
    made, all_made = maker(x, maker.leave_alone(draws, which)), maker(x, draws)
    assert torch.equal(made[:, which], x[which].expand(2, -1, -1, -1, -1))
    assert torch.equal(made[:, ~which], all_made[:, ~which])
    assert torch.equal(draws, before)


def test_views_keep_shape_range_and_precision():
    maker, draws = ViewMaker(), ViewMaker().draw(4)
    x = torch.randint(256, (4, 3, 12, 10)).double() / 255
    exact = maker(x, draws)
    assert exact.dtype == torch.float64
    assert 0 <= exact.min() <= exact.max() <= 1 + 1e-12
    for dtype, error in ((torch.float32, 1e-6), (torch.bfloat16, 1e-2)):
        made = maker(x.to(dtype), draws)
        assert made.dtype == dtype
        assert (made.double() - maker(x.to(dtype).double(), draws)).abs().max() < error
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(maker(x.float(), draws), maker(x.float().clone(), draws))
        assert (maker(x.float(), draws).double() - exact).abs().max() < 1e-6
    one = ViewMaker(width=1)
    rows = one.draw(4, 1)
    assert torch.equal(one(x.contiguous(memory_format=torch.channels_last), rows), one(x, rows))
    assert not maker(x.requires_grad_(), draws).requires_grad
    assert maker(torch.rand(0, 3, 8, 8), maker.draw(0)).shape == (2, 0, 3, 8, 8)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ViewMaker(severity=0), "severity is 0"),
        (lambda: ViewMaker(severity=math.nan), "severity is nan"),
        (lambda: ViewMaker(width=0), "width is 0; it has to be at least 1"),
        (lambda: ViewMaker(depth=0), "-1 for 1 to 3"),
        (lambda: ViewMaker()(torch.rand(2, 9), ViewMaker().draw(2)), r"images, \(n, C, H, W\)"),
        (lambda: ViewMaker()(torch.rand(2, 3, 4, 4), ViewMaker().draw(3)), "2 images need"),
        (lambda: ViewMaker()(torch.rand(2, 3, 4, 4), ViewMaker(width=2).draw(2)), "2 images need"),
        (lambda: ViewMaker(all_ops=True)(torch.rand(2, 4, 4, 4), ViewMaker().draw(2)), "4 channels"),
    ],
)
def test_what_cannot_be(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# -------------------------------------------------------------------------------------------------- GPU


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")
@pytest.mark.parametrize("maker", [ViewMaker(), ViewMaker(severity=9, all_ops=True)], ids=str)
def test_a_gpu_makes_the_same_views_and_captures_them(maker):
    x = torch.randint(256, (64, 3, 32, 32)).float() / 255
    draws = maker.draw(64)
    wanted = maker(x, draws)
    on_gpu, draws_there = x.cuda(), draws.cuda()
    made = maker(on_gpu, draws_there)
    off = (made.cpu() - wanted).abs()
    assert off.max() < 1.5 / 255
    assert (off > 1e-6).float().mean() < 1e-4
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = maker(on_gpu, draws_there)
    again = maker.draw(64)
    draws_there.copy_(again)
    graph.replay()
    assert torch.equal(captured, maker(on_gpu, again.cuda()))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")
@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 28, 28), (3, 17, 23), (3, 96, 64)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_one_kernel_makes_the_views_of_many(shape, dtype, monkeypatch):
    pytest.importorskip("triton")
    maker = ViewMaker(severity=9)
    x = (torch.from_numpy(images(200, shape, np.random.default_rng(0))).to("cuda", torch.float64) / 255).to(dtype)
    draws = maker.draw(200, 2, device="cuda")
    for layout in (torch.contiguous_format, torch.channels_last):
        fused = maker(x.contiguous(memory_format=layout), draws)
        assert not making._no_kernel
        with monkeypatch.context() as patch:
            patch.setattr(making, "_wants_kernel", lambda images: False)
            plain = maker(x.contiguous(memory_format=layout), draws)
        assert fused.stride() == plain.stride()
        assert torch.equal(fused, plain)
