"""Perturbations that follow the crop and the flip of their image."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from bullettrain.data import Augment, Loader, StoredPerturbations
from conftest import batch
from test_data_loader import images


@given(crop=st.integers(0, 3), flip=st.booleans(), seed=st.integers(0, 20))
def test_a_perturbation_goes_with_its_pixels(crop, flip, seed):
    """A picture painted onto the image itself comes back as that picture cropped and flipped otherwise."""
    augment, generator = Augment(crop, flip), torch.Generator().manual_seed(seed)
    whole, _ = batch(6, dtype=torch.float64, seed=seed)
    painted = torch.rand(whole.shape, dtype=torch.float64, generator=generator)
    index = torch.randperm(9, generator=generator)[:6]
    stored = StoredPerturbations(9, tuple(whole.shape[1:]), augment, dtype=torch.float64)
    first, second = (augment.draw(6, generator) for _ in range(2))
    x, picture = (augment.apply(t, first) for t in (whole, painted))
    stored.keep(x, x + picture, index, first)
    assert torch.allclose(stored.start(x, index, first) - x, picture, atol=1e-12)  # padding included
    now = augment.apply(whole, second)
    seen = augment.apply(stored_window(whole, augment, first), second)
    expected = augment.apply(painted, second) * seen
    inside = augment.apply(torch.ones_like(whole), second)
    assert torch.allclose((stored.start(now, index, second) - now) * inside, expected, atol=1e-12)
    others = torch.tensor([i for i in range(9) if i not in index.tolist()])
    assert not stored.delta[others].any()
    stored.clear()
    assert torch.equal(stored.start(now, index, second), now)


def test_perturbations_in_bytes_are_of_so_many_units():
    augment, (x, _) = Augment(2), batch(4, dtype=torch.float64)
    stored = StoredPerturbations(4, tuple(x.shape[1:]), augment, dtype=torch.int8, unit=0.1 / 127)
    index, draws = torch.arange(4), augment.draw(4, torch.Generator().manual_seed(0))
    stored.draw(0.1)
    assert set(stored.delta.unique().tolist()) == {-127, 127}
    torch.testing.assert_close((stored.start(x, index, draws) - x).abs(), torch.full_like(x, 0.1))
    moved = x + 0.2 * torch.rand_like(x) - 0.1
    stored.keep(x, moved, index, draws)
    torch.testing.assert_close(stored.start(x, index, draws), moved, rtol=0, atol=0.5 * 0.1 / 127 + 1e-12)


@given(
    st.lists(st.floats(-3, 3), min_size=1, max_size=4),
    st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    st.sampled_from([torch.int8, torch.int16]),
)
def test_perturbations_beyond_the_largest_integer_are_shortened(parts, dtype, stored_in):
    """Rounding in half precision leaves the ball, N-FGSM does by far: nothing wraps around to the other sign."""
    eps, x = 8 / 255, torch.zeros(len(parts), 3, 4, 4, dtype=dtype)
    largest, augment = torch.iinfo(stored_in).max, Augment()
    stored = StoredPerturbations(len(parts), (3, 4, 4), augment, dtype=stored_in, unit=eps / largest)
    index, draws = torch.arange(len(parts)), augment.draw(len(parts), torch.Generator())
    moved = x + eps * torch.tensor(parts, dtype=dtype).view(-1, 1, 1, 1)
    stored.keep(x, moved, index, draws)
    expected = moved.double().clamp(-eps, eps)
    torch.testing.assert_close(stored.start(x.double(), index, draws), expected, rtol=0, atol=eps / 100)


def stored_window(whole, augment, draws):
    """1 where a pixel of the image was seen through the crop of ``draws``."""
    stored = StoredPerturbations(len(whole), tuple(whole.shape[1:]), augment, dtype=torch.float64)
    x = augment.apply(whole, draws)
    stored.keep(x, x + 1, torch.arange(len(whole)), draws)
    side = whole.shape[2] + 2 * augment.crop
    padded = stored.delta.view(len(whole), -1, side, side)
    end = side - augment.crop
    return padded[:, :, augment.crop : end, augment.crop : end]


def test_a_loader_says_how_it_cropped_and_flipped():
    data, augment = images(10), Augment(2, flip=True)
    loader = Loader(data, batch_size=4, augment=augment, seed=3, replays=2)
    plain = Loader(data, batch_size=4, seed=3, replays=2)
    for index, ((x, _), (whole, _)) in enumerate(zip(loader.epoch(1), plain.epoch(1), strict=True)):
        assert torch.equal(augment.apply(whole, loader.draws(1, index)), x)
