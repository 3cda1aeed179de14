"""AugMix once more, literally: one image at a time, with Pillow and NumPy's generator, as its authors describe it."""

import numpy as np
from PIL import Image, ImageEnhance, ImageOps

NAMES = (
    "autocontrast",
    "equalize",
    "posterize",
    "rotate",
    "solarize",
    "shear_x",
    "shear_y",
    "translate_x",
    "translate_y",
    "colour",
    "contrast",
    "brightness",
    "sharpness",
)
ENHANCERS = {
    "colour": ImageEnhance.Color,
    "contrast": ImageEnhance.Contrast,
    "brightness": ImageEnhance.Brightness,
    "sharpness": ImageEnhance.Sharpness,
}


def operate(picture, name, level):
    """One operation at a level from -10 to 10; the sign is the direction of the geometric ones."""
    strength, sign = abs(level), -1 if level < 0 else 1
    width, height = picture.size

    def affine(*matrix):
        return picture.transform(picture.size, Image.Transform.AFFINE, matrix, resample=Image.Resampling.BILINEAR)

    if name == "autocontrast":
        return ImageOps.autocontrast(picture)
    if name == "equalize":
        return ImageOps.equalize(picture)
    if name == "posterize":
        return ImageOps.posterize(picture, 4 - int(strength * 4 / 10))
    if name == "solarize":
        return ImageOps.solarize(picture, 256 - int(strength * 256 / 10))
    if name == "rotate":
        return picture.rotate(sign * int(strength * 30 / 10), resample=Image.Resampling.BILINEAR)
    if name == "shear_x":
        return affine(1, sign * strength * 0.3 / 10, 0, 0, 1, 0)
    if name == "shear_y":
        return affine(1, 0, 0, sign * strength * 0.3 / 10, 1, 0)
    if name == "translate_x":
        return affine(1, 0, sign * int(strength * (width / 3) / 10), 0, 1, 0)
    if name == "translate_y":
        return affine(1, 0, 0, 0, 1, sign * int(strength * (height / 3) / 10))
    return ENHANCERS[name](picture).enhance(strength * 1.8 / 10 + 0.1)


def view(picture, rng, severity=3, width=3, depth=-1, all_ops=False):
    """One view, floats in [0, 1] of shape (H, W, C) or (H, W), and the mixing weights that it drew."""
    names = NAMES if all_ops else NAMES[:9]
    weights = np.float32(rng.dirichlet([1] * width))
    share = np.float32(rng.beta(1, 1))
    mixed = np.zeros(np.shape(picture), dtype=np.float32)
    for weight in weights:
        chain = picture.copy()
        for _ in range(depth if depth > 0 else rng.integers(1, 4)):
            level = rng.uniform(0.1, severity) * (-1 if rng.uniform() > 0.5 else 1)
            chain = operate(chain, rng.choice(names), level)
        mixed += weight * (np.asarray(chain, dtype=np.float32) / 255)
    return (1 - share) * (np.asarray(picture, dtype=np.float32) / 255) + share * mixed, weights, share
