"""AugMix's chains in one kernel are those of tensor operations, to the last bit: by Triton's interpreter, on a CPU.

tests/test_augmix.py compares them on a GPU.
"""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bullettrain.augmix import Operation, ViewMaker
from bullettrain.augmix import views as making
from bullettrain.augmix.operations import maps_of, tones_of
from test_augmix import images

pytest.importorskip("triton", reason="Triton, which comes with torch's CUDA builds, is not installed")
pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="where there is a GPU, tests/test_augmix.py runs it there"
)

from bullettrain.augmix import kernel  # noqa: E402 (after the skip)


def laid_out(image, layout):
    """The same image (n, C, H, W), elsewhere in memory."""
    if layout == "channels_last":
        return image.contiguous(memory_format=torch.channels_last)
    return image.transpose(2, 3).contiguous().transpose(2, 3) if layout == "columns" else image


def both(maker, shape, n=3, views=2, seed=0, dtype=torch.float32, layout=None, operation=None):
    """Views by tensor operations and by the kernel, of the same draws."""
    image = laid_out(torch.from_numpy(images(n, shape, np.random.default_rng(seed))).to(dtype) / 255, layout)
    pixels = (image * 255).round().to(torch.uint8)
    share, weights, drawn, level = maker.choices(maker.draw(n, views, generator=torch.Generator().manual_seed(seed)))
    drawn = drawn if operation is None else torch.full_like(drawn, operation)
    share, weights = share.to(dtype), weights.to(dtype)
    factor = share[:, None] * weights / 255
    plain = (1 - share)[..., None, None, None] * image
    fused = plain.clone(memory_format=torch.preserve_format)
    assert fused.stride() == plain.stride()
    making.add_chains(plain, pixels, factor, drawn, level, enhancing=False)
    maps, tones = maps_of(drawn, level, *shape[1:]), tones_of(drawn, level.abs())
    kernel.add_chains(fused, pixels, factor, drawn, maps, tones)
    return plain, fused


@pytest.mark.parametrize("operation", [op for op in Operation if op < Operation.COLOUR], ids=lambda op: op.name.lower())
def test_each_operation(operation):
    plain, fused = both(ViewMaker(severity=9.9), (3, 32, 32), n=5, views=1, operation=int(operation))
    assert torch.equal(plain, fused)


@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 28, 28), (3, 17, 23), (2, 40, 60), (3, 2, 3), (1, 1, 1)], ids=str)
@pytest.mark.parametrize("layout", [None, "channels_last", "columns"])
def test_whole_views(shape, layout):
    plain, fused = both(ViewMaker(), shape, layout=layout)
    assert torch.equal(plain, fused)


@settings(max_examples=15)
@given(
    st.tuples(st.sampled_from([1, 3]), st.integers(1, 12), st.integers(1, 12)),
    st.integers(0, 1000),
    st.sampled_from([ViewMaker(width=1, depth=4, severity=10), ViewMaker(width=4, depth=1), ViewMaker(severity=0.1)]),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_any_views(shape, seed, maker, dtype):
    plain, fused = both(maker, shape, n=2, seed=seed, dtype=dtype)
    assert torch.equal(plain, fused)


def test_no_images_are_no_work(monkeypatch):
    monkeypatch.setattr(kernel, "_add_chains", None)  # a grid of nothing cannot be launched
    mixed, none = torch.empty(2, 0, 3, 8, 8), torch.empty(2, 3, 0, 3)
    pixels = mixed[0].to(torch.uint8)
    kernel.add_chains(mixed, pixels, none[..., 0], none.long(), none.double(), none.int())


# ------------------------------------------------------------------------------------------ which one is used


def made(maker=None, n=3, shape=(3, 16, 16)):
    maker = maker or ViewMaker()
    x = torch.from_numpy(images(n, shape, np.random.default_rng(0))).float() / 255
    return maker(x, maker.draw(n, generator=torch.Generator().manual_seed(0)))


@pytest.fixture
def calls(monkeypatch):
    """As on a GPU: how often the kernel was asked."""
    asked, add = [], kernel.add_chains
    monkeypatch.setattr(kernel, "add_chains", lambda *args: asked.append(1) or add(*args))
    monkeypatch.setattr(making, "_no_kernel", [])
    monkeypatch.setattr(making, "_wants_kernel", lambda images: not making._no_kernel)
    return asked


def test_a_maker_uses_it_where_it_can(calls, monkeypatch):
    fused = made()
    assert len(calls) == 1
    made(ViewMaker(all_ops=True))
    assert len(calls) == 1, "it does not know the last four operations"
    monkeypatch.setattr(making, "_wants_kernel", lambda images: False)
    assert torch.equal(fused, made())
    assert len(calls) == 1


def test_a_maker_does_without_where_it_cannot(calls, monkeypatch):
    def broken(*args):
        raise RuntimeError("Failed to find C compiler.\nPlease specify via CC")

    monkeypatch.setattr(kernel, "add_chains", broken)
    with pytest.warns(UserWarning, match=r"several times as long: .*RuntimeError: Failed to find C compiler\.\)"):
        without = made()
    assert torch.equal(without, made()), "said once"
    monkeypatch.setattr(making, "_wants_kernel", lambda images: False)
    assert torch.equal(without, made())


def test_what_the_other_way_does_not_help_is_raised(calls, monkeypatch):
    def full(*args):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(kernel, "add_chains", full)
    with pytest.raises(torch.OutOfMemoryError):
        made()

    def broken(*args):
        raise RuntimeError("no")

    monkeypatch.setattr(kernel, "add_chains", broken)
    monkeypatch.setattr(making, "_is_capturing", lambda images: True)
    with pytest.raises(RuntimeError, match="no"):
        made()
    assert not making._no_kernel


def test_it_is_launched_with_the_options_that_it_is_compiled_with(monkeypatch):
    launched = []

    class Launch:
        def __getitem__(self, grid):
            return lambda *args, **kwargs: launched.append((grid, kwargs))

    monkeypatch.setattr(kernel, "_add_chains", Launch())
    both(ViewMaker(), (3, 20, 20), n=3)
    ((grid, options),) = launched
    assert grid == (6,)
    assert kernel.OPTIONS.items() <= options.items()


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from bullettrain.augmix.kernel import OPTIONS, _add_chains as kernel

numbers = dict(CHAINS=3, LINKS=3, C=3, H=32, W=32, ERROR=2.0**-35, TILE=1024)
pointers = dict(mixed="*fp32", pixels="*u8", factor="*fp32", operation="*i32")
pointers |= dict(maps="*fp64", tones="*i32", scratch="*u8")
counts = dict.fromkeys(["n", "by_view", "by_image", "by_channel", "by_row", "by_column"], "i32")
source = ASTSource(kernel, pointers | counts | dict.fromkeys(numbers, "constexpr"), numbers)
made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=dict(num_warps=8, **OPTIONS)).asm
print(made["ttir"].count("barrier"), made["ptx"])
"""


def test_it_compiles_for_a_gpu_and_rounds_every_product(tmp_path):
    surroundings = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    surroundings["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run([sys.executable, "-c", COMPILE], env=surroundings, capture_output=True, text=True, check=True)
    assert "mul.f64" in done.stdout or "mul.rn.f64" in done.stdout
    assert "fma" not in done.stdout
    assert done.stdout.startswith("3 "), "threads wait for each other: after the copy, each link, and each chain"


def test_small_images_are_not_for_the_kernel(monkeypatch):
    class OnGpu:
        is_cuda = True

        def __init__(self, *shape):
            self.shape = shape

    monkeypatch.setattr(making, "_no_kernel", [])
    assert making._wants_kernel(OnGpu(2, 4, 3, 20, 20))
    assert not making._wants_kernel(OnGpu(2, 4, 3, 16, 16))
    assert not making._wants_kernel(torch.empty(2, 4, 3, 20, 20))
    making._no_kernel.append("it failed")
    assert not making._wants_kernel(OnGpu(2, 4, 3, 20, 20))
