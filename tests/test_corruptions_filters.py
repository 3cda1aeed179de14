"""The pieces that corruptions are made of, against scipy, Pillow and scikit-image, for any parameters."""

import numpy as np
import scipy.ndimage as ndi
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from skimage import color

import twins
from bullettrain.corruptions import colour, digital, filters

seeds = st.integers(0, 2**32 - 1)
NUMPY_PADS = {"nearest": "edge", "reflect": "symmetric", "mirror": "reflect"}


def noise(seed, *shape):
    return np.random.default_rng(seed).random(shape)


@given(st.sampled_from(list(NUMPY_PADS)), st.integers(2, 9), st.integers(0, 30))
def test_edges_are_numpys(mode, size, beyond):
    at = filters.edge(torch.arange(-beyond, size + beyond), size, mode)
    assert np.array_equal(at.numpy(), np.pad(np.arange(size), beyond, mode=NUMPY_PADS[mode]))


@settings(max_examples=30)
@given(seeds, st.floats(0.05, 8), st.sampled_from(["nearest", "reflect"]), st.sampled_from([3.0, 4.0]))
def test_gaussian_is_scipys(seed, sigma, mode, truncate):
    x = noise(seed, 2, 32, 32)
    expected = [ndi.gaussian_filter(one, sigma, mode=mode, truncate=truncate) for one in x]
    found = filters.gaussian(torch.from_numpy(x), sigma, mode=mode, truncate=truncate)
    assert np.array_equal(found.numpy(), np.stack(expected))


@settings(max_examples=30)
@given(seeds, st.floats(1, 4))
def test_zoom_is_scipys(seed, factor):
    x = noise(seed, 2, 32, 32)
    expected = np.stack([twins.zoomed(one, factor) for one in x])
    np.testing.assert_allclose(filters.clipped_zoom(torch.from_numpy(x), factor).numpy(), expected, atol=1e-12)


@settings(max_examples=20)
@given(seeds, st.floats(0, 40))
def test_bilinear_is_scipys(seed, reach):
    x, (y_at, x_at) = noise(seed, 1, 32, 32, 1), noise(seed + 1, 2, 20, 20) * (32 + 2 * reach) - reach
    for mode in ("reflect", "mirror", "nearest"):
        expected = ndi.map_coordinates(x[0, ..., 0], [y_at, x_at], order=1, mode=mode)
        found = filters.bilinear(torch.from_numpy(x), torch.from_numpy(y_at)[None], torch.from_numpy(x_at)[None], mode)
        np.testing.assert_allclose(found[0, ..., 0].numpy(), expected, atol=1e-12)


@settings(max_examples=30)
@given(seeds, st.integers(1, 40), st.integers(1, 40))
def test_box_is_pillows(seed, size, to):
    x = np.random.default_rng(seed).integers(0, 256, (2, size, size, 3), dtype=np.uint8)
    expected = [np.asarray(Image.fromarray(one).resize((to, to), Image.Resampling.BOX)) for one in x]
    assert np.array_equal(digital._box(torch.from_numpy(x), to).numpy(), np.stack(expected))


@settings(max_examples=30)
@given(seeds, st.sampled_from([2, 3, 256]))
def test_hsv_is_scikit_images(seed, levels):
    # Few levels: ties between channels, greys, black and white.
    x = np.random.default_rng(seed).integers(0, levels, (8, 8, 3)) / (levels - 1)
    hsv = torch.stack(colour.to_hsv(torch.from_numpy(x)), -1)
    assert np.array_equal(hsv.numpy(), color.rgb2hsv(x))
    assert np.array_equal(colour.from_hsv(*hsv.unbind(-1)).numpy(), color.hsv2rgb(hsv.numpy()))
