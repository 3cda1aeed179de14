"""Batches: the same from the same seed, from any start, over any number of processes, resident or not."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bullettrain.augmix import ViewMaker
from bullettrain.data import Augment, DataError, ImageSet, Loader, split_validation, to_unit
from bullettrain.data import loader as loader_module
from bullettrain.data.base import derive_seed
from conftest import no_waiting


def images(n: int, channels: int = 3, size: int = 8, classes: int = 4, seed: int = 0) -> ImageSet:
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (n, channels, size, size), dtype=torch.uint8, generator=generator)
    labels = torch.randint(0, classes, (n,), generator=generator)
    return ImageSet(pixels, labels, tuple(str(c) for c in range(classes)))


def same(a, b) -> bool:
    a, b = list(a), list(b)
    return len(a) == len(b) and all(
        torch.equal(x, v) and torch.equal(y, w) for (x, y), (v, w) in zip(a, b, strict=True)
    )


# --- augmentation ---


def one_by_one(x: torch.Tensor, draws, crop: int) -> torch.Tensor:
    """Crop and flip literally: image by image, pixel by pixel."""
    out = torch.zeros_like(x)
    n, channels, height, width = x.shape
    for i in range(n):
        top, left = (0, 0) if draws.corners is None else (int(v) - crop for v in draws.corners[i])
        flip = draws.flips is not None and bool(draws.flips[i])
        for c in range(channels):
            for row in range(height):
                for column in range(width):
                    from_row, from_column = row + top, (width - 1 - column if flip else column) + left
                    if 0 <= from_row < height and 0 <= from_column < width:
                        out[i, c, row, column] = x[i, c, from_row, from_column]
    return out


@pytest.mark.parametrize("augment", [Augment(), Augment(2), Augment(flip=True), Augment(2, True), Augment(9, True)])
@pytest.mark.parametrize("shape", [(7, 3, 5, 6), (4, 1, 3, 3), (0, 3, 5, 6)])
def test_augmentation_is_what_it_is_one_by_one(augment, shape):
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    draws = augment.draw(len(x), generator)
    result = augment.apply(x, draws)
    assert result.dtype == torch.uint8
    assert torch.equal(result, one_by_one(x, draws, augment.crop))
    by_call = augment(x, torch.Generator().manual_seed(5))
    assert torch.equal(by_call, augment.apply(x, augment.draw(len(x), torch.Generator().manual_seed(5))))


def test_draws_cover_every_offset_and_both_sides():
    draws = Augment(4, True).draw(20_000, torch.Generator().manual_seed(0))
    assert draws.corners is not None
    assert draws.flips is not None
    counts = torch.bincount(draws.corners[:, 0] * 9 + draws.corners[:, 1], minlength=81)
    assert counts.min() > 150  # 247 expected of each
    assert abs(float(draws.flips.float().mean()) - 0.5) < 0.02


def test_a_negative_crop_is_refused():
    with pytest.raises(DataError, match="crop is -1"):
        Augment(crop=-1)


def test_bytes_become_numbers_in_the_unit_interval():
    x = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 16, 16)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        unit = to_unit(x, dtype)
        assert unit.dtype == dtype
        assert float(unit.min()) == 0
        assert float(unit.max()) == 1
    assert torch.equal(to_unit(x, torch.float64), x.double() / 255)
    assert torch.equal((to_unit(x) * 255).round().to(torch.uint8), x)
    wide = to_unit(images(2).images, channels_last=True)
    assert wide.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(wide, to_unit(images(2).images))


# --- the loader ---


def test_every_image_comes_once_an_epoch_in_another_order_each():
    data = images(50, 1, 3)
    loader = Loader(data, batch_size=16, seed=3, device="cpu", augment=None)
    assert len(loader) == 4
    epochs = [list(loader.epoch(e)) for e in range(3)]
    for batches in epochs:
        assert [len(y) for _, y in batches] == [16, 16, 16, 2]
        rows = torch.cat([x for x, _ in batches]).flatten(1).mul(255).round().to(torch.uint8)
        expected = data.images.flatten(1)
        assert sorted(rows.tolist()) == sorted(expected.tolist())
    assert not same(epochs[0], epochs[1])
    assert not same(epochs[0], Loader(data, batch_size=16, seed=4).epoch(0))
    for index, (x, y) in enumerate(epochs[1]):
        rows = loader.order(1)[index * 16 : (index + 1) * 16]
        assert torch.equal(x, to_unit(data.images[rows]))
        assert torch.equal(y, data.labels[rows])


def test_without_shuffling_the_order_is_that_of_the_data():
    data = images(10)
    loader = Loader(data, batch_size=4, seed=0, shuffle=False, drop_last=True)
    assert len(loader) == 2
    assert torch.equal(torch.cat([y for _, y in loader.epoch(5)]), data.labels[:8])
    assert loader.joint_size(1) == 4


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 40),
    batch_size=st.integers(1, 16),
    seed=st.integers(0, 2**63 - 1),
    epoch=st.integers(0, 200),
    world=st.integers(1, 4),
    crop=st.integers(0, 2),
    flip=st.booleans(),
    views=st.sampled_from([0.0, 0.4, 1.0]),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
    data=st.data(),
)
def test_seed_epoch_and_index_alone_decide_a_batch(
    n, batch_size, seed, epoch, world, crop, flip, views, shuffle, drop_last, data
):
    drop_last = drop_last and n >= batch_size
    pictures = images(n, 1, 3)
    options = {"batch_size": batch_size, "seed": seed, "shuffle": shuffle, "drop_last": drop_last}
    options |= {"augment": Augment(crop, flip), "views": ViewMaker() if views else None, "view_share": views}
    joint = Loader(pictures, **options)
    batches = list(joint.epoch(epoch))
    assert len(batches) == len(joint)
    assert [len(y) for _, y in batches] == [joint.joint_size(i) for i in range(len(joint))]
    assert all(x.shape[1:] == (1, 3, 3) for x, _ in batches)

    start = data.draw(st.integers(0, len(joint)))
    assert same(joint.epoch(epoch, start=start), batches[start:])
    assert same(Loader(pictures, **options).epoch(epoch, start), batches[start:])

    resident = data.draw(st.booleans())
    shares = [
        list(Loader(pictures, **options, rank=r, world=world, resident=resident).epoch(epoch, start))
        for r in range(world)
    ]
    pieced = [
        (torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])) for parts in zip(*shares, strict=True)
    ]
    assert same(pieced, batches[start:])
    for parts in zip(*shares, strict=True):
        sizes = [len(y) for _, y in parts]
        assert max(sizes) - min(sizes) <= 1


def test_iterators_of_one_loader_do_not_disturb_each_other():
    loader = Loader(images(20), batch_size=4, seed=0, augment=Augment(2, True))
    alone = list(loader.epoch(0)), list(loader.epoch(1))
    together = list(zip(loader.epoch(0), loader.epoch(1), strict=True))
    assert same([a for a, _ in together], alone[0])
    assert same([b for _, b in together], alone[1])


@pytest.mark.parametrize("resident", [True, False])
def test_global_generators_are_left_alone(resident):
    torch.manual_seed(0)
    np.random.seed(0)
    before, before_numpy = torch.get_rng_state(), np.random.get_state()[1].copy()
    loader = Loader(images(20), batch_size=4, seed=0, augment=Augment(2, True), resident=resident)
    assert len(list(loader.epoch(0))) == 5
    assert torch.equal(torch.get_rng_state(), before)
    assert (np.random.get_state()[1] == before_numpy).all()


@pytest.mark.parametrize("channels_last", [False, True])
def test_views_are_of_the_cropped_and_flipped_images_several_batches_at_once(channels_last, monkeypatch):
    monkeypatch.setattr(Loader, "_at_once", lambda self, pixels: 2)
    made = []

    class Watched(ViewMaker):
        def __call__(self, x, draws):
            made.append(len(draws))
            return super().__call__(x, draws)

    options = {"batch_size": 8, "seed": 0, "augment": Augment(2, True), "channels_last": channels_last}
    plain = list(Loader(images(20), **options).epoch(1))
    viewed = list(Loader(images(20), views=Watched(), **options).epoch(1))
    assert made == [16, 4]
    generator = torch.Generator()
    for index, ((x, y), (view, its)) in enumerate(zip(plain, viewed, strict=True)):
        generator.manual_seed(derive_seed(0, 1, index))
        options["augment"].draw(len(x), generator)  # crops and flips are drawn first, and are those without views
        expected = ViewMaker()(x, ViewMaker().draw(len(x), 1, generator=generator))[0]
        assert torch.equal(y, its)
        assert torch.equal(view, expected)
        assert view.stride() == x.stride()
        assert not torch.equal(view, x)


def test_a_share_of_the_images_are_views_and_the_others_are_themselves():
    options = {"batch_size": 200, "seed": 0, "augment": Augment(2, True)}
    kinds = ({}, {"views": ViewMaker()}, {"views": ViewMaker(), "view_share": 0.3})
    chosen = []
    for epoch in (0, 1):
        plain, viewed, some = (
            torch.cat([x for x, _ in Loader(images(400), **kind, **options).epoch(epoch)]) for kind in kinds
        )
        left = (some == plain).flatten(1).all(dim=1)
        # The draws of a batch begin alike: what is a view is the one that it would be if all were.
        assert torch.equal(some[~left], viewed[~left])
        assert 0.2 < float((~left).float().mean()) < 0.4
        chosen += left.split(200)
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(chosen, 2)), "drawn for each batch anew"
    with pytest.raises(DataError, match=r"view_share is 1\.5"):
        Loader(images(4), batch_size=2, seed=0, views=ViewMaker(), view_share=1.5)


def test_how_many_batches_are_viewed_at_once_depends_on_the_device_and_on_their_size():
    loader = Loader(images(20), batch_size=8, seed=0)
    assert loader._at_once(128 * 3 * 32 * 32) == 1
    loader.device = torch.device("cuda")
    assert [loader._at_once(n * 3 * side * side) for n, side in ((128, 32), (128, 224), (0, 32))] == [10, 1, 1 << 22]


def test_from_the_host_the_batches_are_the_same():
    data = images(20)
    on_host = Loader(data, batch_size=8, seed=0, augment=Augment(2, True), resident=False)
    resident = Loader(data, batch_size=8, seed=0, augment=Augment(2, True))
    assert resident.resident
    assert not on_host.resident
    assert same(on_host.epoch(2), resident.epoch(2))


def test_what_fits_is_a_share_of_the_free_memory(monkeypatch):
    data = images(10)
    cuda = torch.device("cuda")
    for free, fits in ((data.images.nbytes * 5 // 2, True), (data.images.nbytes * 5 // 2 - 5, False)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free, 10 * free))
        assert loader_module._fits(data, cuda) == fits
    assert loader_module._fits(data, torch.device("cpu"))


def test_an_empty_set_has_no_batches():
    empty = images(4).subset(torch.empty(0, dtype=torch.int64))
    for resident in (True, False):
        loader = Loader(empty, batch_size=4, seed=0, resident=resident)
        assert len(loader) == 0
        assert list(loader.epoch(0)) == []


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"batch_size": 0}, "batch_size is 0"),
        ({"rank": 2, "world": 2}, "rank is 2; it has to be at least 0 and below 2"),
        ({"batch_size": 30, "drop_last": True}, "20 images make no full batch of 30"),
    ],
)
def test_wrong_settings_are_refused(options, match):
    with pytest.raises(DataError, match=match):
        Loader(images(20), **{"batch_size": 4, "seed": 0, **options})


def test_a_start_after_the_epoch_is_refused_at_once():
    loader = Loader(images(20), batch_size=4, seed=0)
    assert list(loader.epoch(0, start=5)) == []
    with pytest.raises(DataError, match="start is 6"):
        loader.epoch(0, start=6)


@pytest.mark.parametrize("channels_last", [False, True])
def test_type_and_layout(channels_last):
    loader = Loader(
        images(8), batch_size=4, seed=0, augment=Augment(1), dtype=torch.bfloat16, channels_last=channels_last
    )
    x, y = next(loader.epoch(0))
    assert x.dtype == torch.bfloat16
    assert y.dtype == torch.int64
    layout = torch.channels_last if channels_last else torch.contiguous_format
    assert x.is_contiguous(memory_format=layout)


@pytest.mark.gpu
def test_on_the_gpu_nothing_waits_and_both_modes_agree():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    options = {"batch_size": 128, "seed": 0, "device": "cuda", "augment": Augment(4, True), "channels_last": True}
    data = images(50_000, 3, 32)
    resident, on_host = (Loader(data, **options, resident=r) for r in (True, False))
    with no_waiting():
        batches = [batch for batch, _ in zip(resident.epoch(1), range(20), strict=False)]
    assert batches[0][0].device.type == "cuda"
    assert same(batches, [batch for batch, _ in zip(on_host.epoch(1), range(20), strict=False)])
    halves = [next(Loader(data, **options, rank=r, world=2).epoch(1, start=3)) for r in range(2)]
    assert torch.equal(torch.cat([x for x, _ in halves]), batches[3][0])


# --- the validation split ---


@settings(max_examples=80, deadline=None)
@given(
    labels=st.lists(st.integers(0, 4), min_size=2, max_size=60),
    share=st.floats(0, 1),
    seed=st.integers(0, 2**40),
)
def test_validation_split_is_disjoint_exhaustive_and_in_proportion(labels, share, seed):
    n = len(labels)
    size = min(int(share * n), n - 1)
    # Each image carries its own index, so that the parts can be told apart.
    pixels = torch.arange(n, dtype=torch.uint8).reshape(n, 1, 1, 1)
    data = ImageSet(pixels, torch.tensor(labels), tuple("abcde"))
    train, validation = split_validation(data, size, seed)
    assert len(validation) == size
    ids = [part.images.flatten().tolist() for part in (train, validation)]
    assert sorted(ids[0] + ids[1]) == list(range(n))
    assert ids[0] == sorted(ids[0])
    assert ids[1] == sorted(ids[1])
    for part in (train, validation):
        assert part.labels.tolist() == [labels[i] for i in part.images.flatten().tolist()]
    for c in range(5):
        exact = size * labels.count(c) / n
        assert abs(validation.labels.tolist().count(c) - exact) < 1
    again = split_validation(data, size, seed)
    assert torch.equal(again[1].images, validation.images)


def test_validation_split_depends_on_the_seed_and_may_be_empty():
    data = images(200)
    parts = [split_validation(data, 40, seed)[1] for seed in (0, 1)]
    assert not torch.equal(parts[0].images, parts[1].images)
    train, validation = split_validation(data, 0, 0)
    assert train is data
    assert len(validation) == 0
    assert validation.classes == data.classes
    for size in (-1, 200, 201):
        with pytest.raises(DataError, match="choose 0 to 199"):
            split_validation(data, size, 0)
