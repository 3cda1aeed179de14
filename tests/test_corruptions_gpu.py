"""On a CUDA device: corruptions are those of the CPU. Run with `pytest -m gpu tests/test_corruptions_gpu.py`."""

import hashlib

import pytest
import torch

from bullettrain.corruptions import CORRUPTIONS, corrupt, make
from bullettrain.data import ImageSet, load
from pictures import MD5, OVERLAYS, pictures

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
]
PACKAGES = {"spatter": "cv2", "jpeg_compression": "PIL"}


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_a_gpu_makes_the_same_images(name):
    if name in PACKAGES:
        pytest.importorskip(PACKAGES[name])
    images = pictures(200)
    for severity in range(1, 6):
        found = corrupt(images.cuda(), name, severity, overlays=OVERLAYS)
        assert found.is_cuda
        differ = found.cpu() != corrupt(images, name, severity, overlays=OVERLAYS)
        if CORRUPTIONS[name].random:  # sines and logarithms may differ in their last bit
            assert differ.double().mean() < 1e-5
        else:
            assert not differ.any()


def test_processes_beside_a_gpu_make_the_same_files(tmp_path):
    pytest.importorskip("PIL")
    data = ImageSet(pictures(7).permute(0, 3, 1, 2).contiguous(), torch.arange(7), tuple("0123456"))
    names = ("jpeg_compression", "contrast", "zoom_blur", "impulse_noise", "pixelate")
    make(data, tmp_path / "cpu", names)
    assert make(data, tmp_path / "cuda", names, device="cuda", jobs=2) == names
    for path in (tmp_path / "cpu").iterdir():
        assert path.read_bytes() == (tmp_path / "cuda" / path.name).read_bytes(), path.name


def test_md5_of_released_files(tmp_path, real_data):
    make(load("cifar10", split="test", root=real_data), tmp_path, tuple(MD5), device="cuda")
    for name, md5 in MD5.items():
        content = (tmp_path / f"{name}.npy").read_bytes()
        assert hashlib.md5(content, usedforsecurity=False).hexdigest() == md5, name
