"""Images to corrupt, and what published files say; of torch and numpy alone."""

import numpy as np
import torch

# Of the files of CIFAR-10-C as they were published.
MD5 = {
    "defocus_blur": "7d1322666342a0702b1957e92f6254bc",
    "zoom_blur": "6ea8e63f1c5cdee1517533840641641b",
    "brightness": "0a81ef75e0b523c3383219c330a85d48",
    "contrast": "3c8262171c51307f916c30a3308235a8",
    "pixelate": "0f14f7e2db14288304e1de10df16832f",
    "gaussian_blur": "c33370155bc9b055fb4a89113d3c559d",
    "saturate": "1cfae0964219c5102abbb883e538cc56",
}
OVERLAYS = [torch.arange(a * b * 3).remainder(251).to(torch.uint8).view(a, b, 3) for a, b in ((40, 50), (60, 45))]


def pictures(n, seed=0):
    """Photograph-like images, uint8 (n, 32, 32, 3): smooth parts, even parts, edges, and pixels at both ends."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (n, 4, 4, 3))
    images = np.kron(coarse, np.ones((1, 8, 8, 1)))
    images[:, :16] += np.linspace(-60, 60, 32)[None, None, :, None]
    images[:, 8:24, 20:] += rng.normal(0, 20, (n, 16, 12, 3))
    return torch.from_numpy(np.clip(images, 0, 255).astype(np.uint8))
