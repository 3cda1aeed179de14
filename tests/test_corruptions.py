"""The corruptions against scipy, scikit-image, OpenCV and Pillow, the released files' md5, and their own statistics."""

import hashlib
import io
import math

import numpy as np
import pytest
import scipy.stats
import torch

import twins
from bullettrain.corruptions import AVERAGED, CORRUPTIONS, SEVERITIES, corrupt, read_overlays
from bullettrain.corruptions.chance import Chance
from bullettrain.corruptions.overlays import FILES
from bullettrain.data import DataError, load
from pictures import MD5, OVERLAYS, pictures

CPU = torch.device("cpu")
FIXED = ("defocus_blur", "zoom_blur", "brightness", "contrast", "pixelate", "gaussian_blur", "saturate")
RANDOM = tuple(name for name, entry in CORRUPTIONS.items() if entry.random)


def grey(n, level=128):
    return torch.full((n, 32, 32, 3), level, dtype=torch.uint8)


def made(images, name, severity, **options):
    return corrupt(images, name, severity, overlays=OVERLAYS, **options)


def chance(name, severity, n, seed=0):
    return Chance(seed, name, severity, first=0, n=n, device=CPU)


# --- chance ---


def splitmix64(state, n):
    """The published generator, one number after the other."""
    mask, out = (1 << 64) - 1, []
    for _ in range(n):
        state = (state + 0x9E3779B97F4A7C15) & mask
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        out.append(z ^ (z >> 31))
    return out


def test_chance_is_splitmix64(monkeypatch):
    # The first outputs for the seed 1234567, as published with other implementations.
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert splitmix64(1234567, 4) == published
    monkeypatch.setattr("bullettrain.corruptions.chance.derive_seed", lambda *parts: 1234567)
    found = Chance(0, "fog", 1, first=0, n=1, device=CPU)
    bits = torch.cat([found.bits(3), found.bits(1)], dim=1)[0].tolist()
    assert [b % (1 << 64) for b in bits] == published


def test_chance_depends_on_its_four_keys_alone():
    def numbers(seed=1, name="snow", severity=2, first=0, n=6):
        return Chance(seed, name, severity, first=first, n=n, device=CPU).uniform(5)

    whole = numbers()
    assert torch.equal(numbers(first=2, n=3), whole[2:5])
    assert len({float(v) for v in whole.flatten()}) == 30
    others = [numbers(seed=2), numbers(name="fog"), numbers(severity=3), numbers(first=6)]
    for i, other in enumerate(others):
        assert not torch.isin(other, whole).any(), i


def test_chance_has_the_distributions_it_says():
    draws = chance("fog", 1, 40)
    uniform = draws.uniform(1000).flatten().numpy()
    assert scipy.stats.kstest(uniform, "uniform").pvalue > 0.01
    assert uniform.min() >= 0
    assert uniform.max() < 1
    wide = draws.uniform(1000, low=-3, high=5).flatten().numpy()
    assert scipy.stats.kstest(wide, "uniform", args=(-3, 8)).pvalue > 0.01
    normal = draws.normal(1000, mean=2, std=3)
    assert scipy.stats.kstest(normal.flatten().numpy(), "norm", args=(2, 3)).pvalue > 0.01
    # Neither from image to image nor from number to number.
    deviation = (normal - 2) / 3
    assert abs(float((deviation[1:] * deviation[:-1]).mean())) < 0.02
    assert abs(float((deviation[:, 1:] * deviation[:, :-1]).mean())) < 0.02
    counts = torch.bincount(draws.below(5, 1000).flatten(), minlength=5)
    assert len(counts) == 5
    assert scipy.stats.chisquare(counts.numpy()).pvalue > 0.01
    limits = torch.arange(1, 41)
    assert (draws.below(limits) < limits).all()


# --- the table ---


def test_fifteen_are_averaged_and_four_are_extra():
    assert len(AVERAGED) == 15
    extra = {"speckle_noise", "gaussian_blur", "saturate", "spatter"}
    assert set(CORRUPTIONS) - set(AVERAGED) == extra
    assert all(len(entry.levels) == SEVERITIES for entry in CORRUPTIONS.values())


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_an_image_depends_on_its_index_and_not_on_the_batch(name):
    images = pictures(12)
    for severity in (1, 3, 5):
        whole = made(images, name, severity, seed=5)
        assert whole.dtype == torch.uint8
        assert whole.shape == images.shape
        assert torch.equal(made(images[3:8], name, severity, seed=5, first=3), whole[3:8])
        assert torch.equal(made(images[11:], name, severity, seed=5, first=11), whole[11:])
    assert torch.equal(images, pictures(12)), "the clean images are left as they are"


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_seeds_matter_to_the_random_ones_alone(name):
    images = pictures(4)
    same = torch.equal(made(images, name, 3, seed=0), made(images, name, 3, seed=1))
    assert same == (not CORRUPTIONS[name].random)
    again = made(images[:1].expand(4, -1, -1, -1), name, 3)
    assert (again == again[:1]).all() == (not CORRUPTIONS[name].random)


DIGESTS = {
    "gaussian_noise": "f9c91d10cd53a73c",
    "shot_noise": "a4a4ab0480321f6c",
    "impulse_noise": "a444bd5c5363b202",
    "glass_blur": "04af4fae0ec63594",
    "motion_blur": "0ad33c8119412c9d",
    "snow": "4773d923702ac05e",
    "frost": "f39ad01ecd78c55d",
    "fog": "58680232731e15e1",
    "elastic_transform": "990c08a742267c92",
    "speckle_noise": "7ce1e20f5ef77a79",
    "spatter": "83dd4e2e095df946",
}


@pytest.mark.parametrize("name", RANDOM)
def test_a_seed_gives_these_very_images(name):
    severities = (4, 5) if name == "spatter" else range(1, 6)  # the others go through OpenCV
    found = hashlib.sha256()
    for severity in severities:
        found.update(made(pictures(8), name, severity, seed=7).numpy().tobytes())
    assert found.hexdigest()[:16] == DIGESTS[name]


def test_bad_arguments_are_refused():
    images = pictures(1)
    with pytest.raises(ValueError, match="no corruption 'rain'; there are gaussian_noise"):
        corrupt(images, "rain", 1)
    for severity in (0, 6, 1.5):
        with pytest.raises((ValueError, TypeError), match="severity is"):
            corrupt(images, "fog", severity)
    for wrong in (images.float(), images.permute(0, 3, 1, 2), images[0]):
        with pytest.raises(ValueError, match=r"give uint8 \(n, 32, 32, 3\)"):
            corrupt(wrong, "fog", 1)
    with pytest.raises(ValueError, match="frost needs its overlays"):
        corrupt(images, "frost", 1)


# --- deterministic ones ---


def check_fixed(images, name):
    for severity, level in enumerate(CORRUPTIONS[name].levels, 1):
        expected = np.stack([getattr(twins, name)(image, level) for image in images.numpy()])
        assert np.array_equal(corrupt(images, name, severity).numpy(), expected), severity


@pytest.mark.parametrize("name", FIXED)
def test_deterministic_ones_equal_the_libraries(name):
    check_fixed(pictures(12), name)
    ends = torch.cat([grey(1, 0), grey(1, 255), grey(1, 254), grey(1, 1)])
    check_fixed(ends, name)


@pytest.mark.parametrize("name", FIXED)
def test_deterministic_ones_equal_the_libraries_on_photographs(name, real_data):
    images = load("cifar10", split="test", root=real_data).images.permute(0, 2, 3, 1).contiguous()
    check_fixed(images[: 20 if name == "zoom_blur" else 60], name)


QUICK = ("gaussian_blur",)
WHOLE = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in FIXED]


@pytest.mark.parametrize("name", WHOLE)
def test_md5_of_the_released_file(name, real_data):
    images = load("cifar10", split="test", root=real_data).images.permute(0, 2, 3, 1).contiguous()
    pieces = [corrupt(batch, name, s) for s in range(1, 6) for batch in images.split(100)]
    file = io.BytesIO()
    np.save(file, torch.cat(pieces).numpy())
    assert hashlib.md5(file.getvalue(), usedforsecurity=False).hexdigest() == MD5[name]


def test_jpeg_is_pillows():
    from PIL import Image

    images = pictures(3)
    for severity, quality in enumerate((80, 65, 58, 50, 40), 1):
        file = io.BytesIO()
        Image.fromarray(images[1].numpy()).save(file, "JPEG", quality=quality)
        assert np.array_equal(corrupt(images, "jpeg_compression", severity)[1].numpy(), np.asarray(Image.open(file)))


# --- random ones, with the same chance in both ---

LEVELS = [
    pytest.param(name, severity, id=f"{name}-{severity}")
    for name in ("glass_blur", "motion_blur", "snow", "fog", "elastic_transform", "spatter")
    for severity in range(1, 6)
]


def twin_draws(name, severity, n):
    """What the batched version draws, image by image."""
    draws = chance(name, severity, n)
    if name == "glass_blur":
        passes = [draws.below(2, 2, 30, 30).numpy() for _ in range(2)]
        return [([p[i] for p in passes],) for i in range(n)]
    if name == "motion_blur":
        return [(angle,) for angle in draws.uniform(low=-45, high=45).tolist()]
    if name == "snow":
        noise, angles = draws.normal(32, 32).numpy(), draws.uniform(low=-135, high=-45).tolist()
        return list(zip(noise, angles, strict=True))
    if name == "elastic_transform":
        jitter = 32 * CORRUPTIONS[name].levels[severity - 1][2]
        moves = draws.uniform(3, 2, low=-jitter, high=jitter).numpy()
        field = draws.uniform(32, 32, 2, low=-1, high=1).numpy()
        return [(m, f[..., 0], f[..., 1]) for m, f in zip(moves, field, strict=True)]
    if name == "spatter":
        return [(noise,) for noise in draws.normal(32, 32).numpy()]
    streams = [Chance(0, name, severity, first=i, n=1, device=CPU) for i in range(n)]
    return [(lambda k, s=s: s.uniform(k, k, low=-1, high=1)[0].numpy(),) for s in streams]


@pytest.mark.parametrize(("name", "severity"), LEVELS)
def test_random_ones_equal_the_libraries(name, severity):
    images = pictures(4, seed=severity)
    level = CORRUPTIONS[name].levels[severity - 1]
    draws = twin_draws(name, severity, len(images))
    expected = np.stack(
        [getattr(twins, name)(image, level, *d) for image, d in zip(images.numpy(), draws, strict=True)]
    )
    found = corrupt(images, name, severity).numpy()
    if name in ("glass_blur", "motion_blur"):
        assert np.array_equal(found, expected)
        return
    # In float32 there, or in another order: a level where the value is next to a whole one.
    apart = np.abs(found.astype(int) - expected)
    assert apart.max() <= 1
    assert (apart > 0).mean() < 0.01


def test_frost_is_a_piece_of_an_overlay_in_rgb(real_data):
    overlays = read_overlays(real_data / "frost")
    images = pictures(40)
    draws = chance("frost", 2, 40)
    which = draws.below(5)
    heights, widths = (torch.tensor([o.shape[i] - 32 for o in overlays])[which] for i in (0, 1))
    tops, lefts = draws.below(heights).tolist(), draws.below(widths).tolist()
    assert set(which.tolist()) == {0, 1, 2, 3, 4}
    found = corrupt(images, "frost", 2, overlays=overlays).numpy()
    for i, image in enumerate(images.numpy()):
        expected = twins.frost(image, (1, 0.3), real_data / "frost" / FILES[which[i]], tops[i], lefts[i])
        assert np.array_equal(found[i], expected), i


def test_lacking_overlays_are_named(tmp_path):
    from PIL import Image

    with pytest.raises(DataError, match=r"its overlays are not in .*put frost1\.png, .*, frost5\.jpg there") as found:
        read_overlays(tmp_path)
    assert "imagecorruptions" in str(found.value)
    for name in FILES[:-1]:
        Image.new("RGB", (200, 200)).save(tmp_path / name)
    with pytest.raises(DataError, match=r"its overlay frost5\.jpg is not in"):
        read_overlays(tmp_path)
    (tmp_path / FILES[-1]).write_text("nothing")
    with pytest.raises(DataError, match=r"frost5\.jpg is .*not an image"):
        read_overlays(tmp_path)
    Image.new("RGB", (200, 100)).save(tmp_path / FILES[-1])
    with pytest.raises(DataError, match=r"frost5\.jpg is too small"):
        read_overlays(tmp_path)


# --- statistics ---


@pytest.mark.parametrize("severity", range(1, 6))
def test_noise_has_the_mean_and_variance_it_should(severity):
    # Truncation takes half a level off the mean, and adds 1/12 to the variance; few photons make it coarser.
    images = grey(100)
    for name, std in (
        ("gaussian_noise", 255 * CORRUPTIONS["gaussian_noise"].levels[severity - 1]),
        ("speckle_noise", 128 * CORRUPTIONS["speckle_noise"].levels[severity - 1]),
        ("shot_noise", math.sqrt(255 * 128 / CORRUPTIONS["shot_noise"].levels[severity - 1])),
    ):
        change = corrupt(images, name, severity).double() - 128
        assert float(change.mean()) == pytest.approx(-0.5, abs=0.25), name
        assert float(change.var()) == pytest.approx(std**2 + 1 / 12, rel=0.03 if name == "shot_noise" else 0.01), name
    share = CORRUPTIONS["impulse_noise"].levels[severity - 1]
    found = corrupt(images, "impulse_noise", severity)
    for level in (0, 255):
        error = math.sqrt(share / 2 / found.numel())
        assert float((found == level).double().mean()) == pytest.approx(share / 2, abs=4 * error)
    assert set(found.unique().tolist()) == {0, 128, 255}
    assert (found != 128).any(-1).double().mean() > 2.5 * share, "channels are hit one by one"


@pytest.mark.parametrize("severity", range(1, 6))
def test_shot_noise_is_poissons(severity):
    photons = CORRUPTIONS["shot_noise"].levels[severity - 1]
    images = torch.arange(256, dtype=torch.uint8).repeat(12).view(1, 32, 32, 3)
    u = chance("shot_noise", severity, 1).uniform(32, 32, 3).numpy()
    counts = scipy.stats.poisson.ppf(u, images.numpy() / 255 * photons)
    expected = twins.finish(counts / photons)
    assert np.array_equal(corrupt(images, "shot_noise", severity).numpy(), expected)


def spectrum(images):
    """Mean power at each spatial frequency, (32, 32), of the first channel, faded out to the edges."""
    window = np.hanning(32)[:, None] * np.hanning(32)
    x = images[..., 0].double().numpy() - 128
    return (np.abs(np.fft.fft2(x * window)) ** 2).mean(0)


def bands(power):
    """Mean power in four rings, from coarse to fine."""
    f = np.abs(np.fft.fftfreq(32))
    radius = np.hypot(f[:, None], f)
    return np.array([power[(radius > a) & (radius <= a + 0.12)].mean() for a in (0.02, 0.14, 0.26, 0.38)])


@pytest.mark.parametrize("name", ["gaussian_blur", "defocus_blur", "motion_blur"])
def test_blurs_let_through_the_frequencies_they_should(name):
    rng = np.random.default_rng(0)
    images = torch.from_numpy(rng.normal(128, 40, (200, 32, 32, 3)).clip(0, 255).astype(np.uint8))
    clean = spectrum(images)
    f = 2 * np.pi * np.fft.fftfreq(32)
    for severity, level in enumerate(CORRUPTIONS[name].levels, 1):
        if name == "gaussian_blur":
            taps = np.exp(-(np.arange(-5, 6) ** 2) / (2 * level**2))
            one = (taps * np.exp(1j * f[:, None] * np.arange(-5, 6))).sum(1) / taps.sum()
            response = np.abs(one[:, None] * one) ** 2
        elif name == "defocus_blur":
            kernel = np.zeros((32, 32, 3), np.uint8)
            kernel[16, 16] = 255
            spread = np.fft.fft2(corrupt(torch.from_numpy(kernel)[None], name, severity)[0, ..., 0].numpy() / 255.0)
            response = np.abs(spread) ** 2
        else:
            radius, sigma = level
            i = np.arange(2 * radius + 1)
            weights = np.exp(-(i**2) / (2 * sigma**2))
            angles = np.radians(chance(name, severity, 200).uniform(low=-45, high=45).numpy())
            dy, dx = (np.ceil(i * d(angles)[:, None] - 0.5) for d in (np.sin, np.cos))
            phase = f[:, None, None, None] * dy + f[:, None, None] * dx
            response = (np.abs((weights * np.exp(1j * phase)).sum(-1) / weights.sum()) ** 2).mean(-1)
        found = bands(spectrum(corrupt(images, name, severity))) / bands(clean)
        expected = bands(clean * response) / bands(clean)
        assert found == pytest.approx(expected, rel=0.08, abs=0.004), severity


def test_glass_takes_each_of_four_neighbours_as_often():
    # Numbered pixels, and a gaussian too narrow to reach a neighbour: where each came from can be read.
    number = torch.arange(1024)
    image = torch.stack([number // 32, number % 32, number * 0], -1).to(torch.uint8).view(1, 32, 32, 3)
    found = corrupt(image.expand(200, -1, -1, -1).contiguous(), "glass_blur", 1)
    moved = (image.short() - found.short())[..., :2]
    inner, rim = moved[:, 2:, 2:], torch.cat([moved[:, :2].flatten(), moved[:, :, :2].flatten()])
    assert not rim.any()
    counts = torch.bincount((2 * inner[..., 0] + inner[..., 1]).long().flatten(), minlength=4)
    assert len(counts) == 4
    assert scipy.stats.chisquare(counts.numpy()).pvalue > 0.01


@pytest.mark.parametrize("name", ["snow", "fog", "spatter", "elastic_transform"])
def test_more_severe_changes_more(name):
    images = pictures(60)
    change = [float((made(images, name, s).double() - images).square().mean()) for s in range(1, 6)]
    assert min(change) > 0
    if name in ("snow", "fog"):
        assert change[4] > 1.5 * change[0]
