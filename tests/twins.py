"""The corruptions once more, literally: one image at a time, with scipy, scikit-image, OpenCV and Pillow.

What chance does is handed in, so that a twin and the batched version can be compared image by image.
"""

import math

import cv2
import numpy as np
import scipy.ndimage as ndi
from PIL import Image
from skimage import color, filters

SIDE = 32


def finish(x):
    return (np.clip(x, 0, 1) * 255).astype(np.uint8)


def brightness(image, c):
    hsv = color.rgb2hsv(image / 255.0)
    hsv[..., 2] = np.clip(hsv[..., 2] + c, 0, 1)
    return finish(color.hsv2rgb(hsv))


def saturate(image, c):
    hsv = color.rgb2hsv(image / 255.0)
    hsv[..., 1] = np.clip(hsv[..., 1] * c[0] + c[1], 0, 1)
    return finish(color.hsv2rgb(hsv))


def contrast(image, c):
    x = image / 255.0
    mean = x.mean(axis=(0, 1))
    return finish((x - mean) * c + mean)


def pixelate(image, c):
    small = Image.fromarray(image).resize((int(SIDE * c),) * 2, Image.Resampling.BOX)
    return np.asarray(small.resize((SIDE, SIDE), Image.Resampling.BOX))


def gaussian_blur(image, c):
    return finish(filters.gaussian(image / 255.0, sigma=c, channel_axis=-1))


def defocus_blur(image, c):
    at = np.arange(-8, 9)
    disk = (at[:, None] ** 2 + at**2 <= c[0] ** 2).astype(np.float32)
    kernel = cv2.GaussianBlur(disk / disk.sum(), ksize=(3, 3), sigmaX=c[1])
    x = image / 255.0
    return finish(np.stack([cv2.filter2D(x[..., i], -1, kernel) for i in range(3)], axis=-1))


def zoomed(x, factor):
    crop = math.ceil(SIDE / factor)
    top = (SIDE - crop) // 2
    inside = x[top : top + crop, top : top + crop]
    big = ndi.zoom(inside, (factor, factor) + (1,) * (x.ndim - 2), order=1)
    trim = (big.shape[0] - SIDE) // 2
    return big[trim : trim + SIDE, trim : trim + SIDE]


def zoom_blur(image, c):
    x = (image / 255.0).astype(np.float32)
    factors = np.arange(1, c, 0.01)
    total = np.zeros_like(x)
    for factor in factors:
        total += zoomed(x, factor)
    return finish((x + total) / (len(factors) + 1))


def glass_blur(image, c, draws):
    """draws: for each pass, (up, left) of the inner pixels, each 0 or 1."""
    sigma, _, passes = c
    x = (filters.gaussian(image / 255.0, sigma=sigma, channel_axis=-1) * 255).astype(np.uint8)
    for up, left in draws[:passes]:
        for h in range(31, 1, -1):
            for w in range(31, 1, -1):
                x[h, w] = x[h - up[h - 2, w - 2], w - left[h - 2, w - 2]]
    return finish(filters.gaussian(x / 255.0, sigma=sigma, channel_axis=-1))


def smeared(levels, radius, sigma, degrees):
    taps = range(2 * radius + 1)
    weights = [math.exp(-(i**2) / (2 * sigma**2)) for i in taps]
    angle = math.radians(degrees)
    dy = [math.ceil(i * math.sin(angle) - 0.5) for i in taps]
    dx = [math.ceil(i * math.cos(angle) - 0.5) for i in taps]
    out = np.empty(levels.shape)
    for y in range(SIDE):
        for x in range(SIDE):
            parts = [
                w * levels[min(max(y + a, 0), SIDE - 1), min(max(x + b, 0), SIDE - 1)].astype(float)
                for w, a, b in zip(weights, dy, dx, strict=True)
            ]
            out[y, x] = np.floor(sum(parts) / sum(weights) + 1e-3)
    return out


def motion_blur(image, c, degrees):
    return smeared(image, *c, degrees).astype(np.uint8)


def snow(image, c, noise, degrees):
    """noise: standard normal (32, 32)."""
    layer = zoomed(noise * c[1] + c[0], c[2])
    layer[layer < c[3]] = 0
    layer = smeared(finish(layer), c[4], c[5], degrees)[..., None] / 255.0
    x = image.astype(np.float32) / 255
    grey = cv2.cvtColor(x, cv2.COLOR_RGB2GRAY)[..., None]
    x = c[6] * x + (1 - c[6]) * np.maximum(x, grey * 1.5 + 0.5)
    return finish(x + layer + np.rot90(layer, 2))


def frost(image, c, file, top, left):
    overlay = cv2.resize(cv2.imread(str(file)), (0, 0), fx=0.2, fy=0.2)
    piece = cv2.cvtColor(overlay[top : top + SIDE, left : left + SIDE], cv2.COLOR_BGR2RGB)
    return np.clip(c[0] * image + c[1] * piece, 0, 255).astype(np.uint8)


def plasma(decay, uniform):
    """uniform(k): the next k×k numbers in [-1, 1): for the centres, then the tops, then the sides of the squares."""
    field, step, wobble = np.zeros((SIDE, SIDE)), SIDE, 100.0
    while step > 1:
        half, cells = step // 2, SIDE // step
        for dy, dx, around in (
            (half, half, ((-half, -half), (-half, half), (half, -half), (half, half))),
            (0, half, ((-half, 0), (half, 0), (0, -half), (0, half))),
            (half, 0, ((-half, 0), (half, 0), (0, -half), (0, half))),
        ):
            noise = uniform(cells)
            for i in range(cells):
                for j in range(cells):
                    y, x = i * step + dy, j * step + dx
                    mean = sum(field[(y + a) % SIDE, (x + b) % SIDE] for a, b in around) / 4
                    field[y, x] = mean + wobble * wobble * noise[i, j]
        step, wobble = half, wobble / decay
    return (field - field.min()) / (field.max() - field.min())


def fog(image, c, uniform):
    x = image / 255.0
    highest = x.max()
    return finish((x + c[0] * plasma(c[1], uniform)[..., None]) * highest / (highest + c[0]))


def elastic_transform(image, c, moves, dx, dy):
    """moves: (3, 2) in pixels; dx, dy: (32, 32) in [-1, 1)."""
    alpha, sigma, _ = (SIDE * part for part in c)
    corners = np.float32([[26, 26], [26, 6], [6, 6]])
    matrix = cv2.getAffineTransform(corners, corners + moves.astype(np.float32))
    x = cv2.warpAffine(image.astype(np.float32) / 255, matrix, (SIDE, SIDE), borderMode=cv2.BORDER_REFLECT_101)
    if alpha:
        dx, dy = (filters.gaussian(d, sigma, mode="reflect", truncate=3) * alpha for d in (dx, dy))
    else:
        dx = dy = np.zeros((SIDE, SIDE))
    y_at, x_at = np.mgrid[:SIDE, :SIDE] + np.stack([dy, dx])
    channels = [ndi.map_coordinates(x[..., i], [y_at, x_at], order=1, mode="reflect") for i in range(3)]
    return finish(np.stack(channels, axis=-1))


def spatter(image, c, noise):
    """noise: standard normal (32, 32)."""
    x = image / 255.0
    liquid = filters.gaussian(noise * c[1] + c[0], sigma=c[2])
    liquid[liquid < c[3]] = 0
    if c[5]:
        mask = filters.gaussian((liquid > c[3]).astype(float), sigma=c[4])[..., None]
        mask[mask < 0.8] = 0
        return finish(x * (1 - mask) + mask * np.array([63, 42, 20]) / 255)
    liquid = (liquid * 255).astype(np.uint8)
    distance = cv2.distanceTransform(255 - cv2.Canny(liquid, 50, 150), cv2.DIST_L2, 5)
    _, distance = cv2.threshold(distance, 20, 20, cv2.THRESH_TRUNC)
    distance = cv2.equalizeHist(cv2.blur(distance, (3, 3)).astype(np.uint8))
    distance = cv2.filter2D(distance, cv2.CV_8U, np.array([[-2, -1, 0], [-1, 1, 1], [0, 1, 2]]))
    light = liquid * cv2.blur(distance, (3, 3)).astype(np.float32)
    light = light / light.max() * c[4] if light.any() else light
    return finish(x + light[..., None] * np.array([175, 238, 238]) / 255)
