"""Time two AugMix views of a batch on this device against Pillow, image by image on one core.

python benchmarks/augmix_views.py [--images 512] [--device cuda] [--threads 1] [--data-dir DIR] [--out FILE.json]

Needs the dev extra. CIFAR-10 where it lies in the data folder, else noise of the same shape; the JSON says which.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import PIL
import torch
from PIL import Image
from torch import Tensor

from bullettrain.augmix import ViewMaker, views
from bullettrain.data import load
from bullettrain.data.base import DataError
from bullettrain.processes import find_place
from bullettrain.run_folder import environment

# The one literal version, which the tests compare with.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
import pillow_augmix  # type: ignore[import-not-found]


def find_images(n: int, data_dir: Path | None) -> tuple[Tensor, str]:
    """Bytes (n, 3, 32, 32), and what they are."""
    try:
        return load("cifar10", split="test", root=data_dir).images[:n], "cifar10"
    except DataError:
        return torch.randint(256, (n, 3, 32, 32), dtype=torch.uint8), "noise"


def milliseconds(work: Callable[[], object], device: torch.device, repeats: int, warm_up: int = 1) -> dict[str, float]:
    """Median, least and most of ``repeats`` timings."""
    taken = []
    for turn in range(warm_up + repeats):
        _wait(device)
        began = time.perf_counter()
        work()
        _wait(device)
        if turn >= warm_up:
            taken.append(1000 * (time.perf_counter() - began))
    return {"median": statistics.median(taken), "least": min(taken), "most": max(taken)}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def captured(work: Callable[[], Tensor]) -> Callable[[], None]:
    """The same work as a CUDA graph; on a side stream first, as captures want it."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def measure(n: int, device: torch.device, data_dir: Path | None, repeats: int) -> dict[str, Any]:
    """All figures."""
    images, what = find_images(n, data_dir)
    pictures = [Image.fromarray(image.permute(1, 2, 0).numpy()) for image in images]
    rng = np.random.default_rng(0)

    def by_pillow() -> None:
        for picture in pictures:
            for _ in range(2):
                pillow_augmix.view(picture, rng)

    maker, x = ViewMaker(), images.to(device).float() / 255
    fixed = maker.draw(n, device=device)
    rows = {"ours": milliseconds(lambda: maker(x, maker.draw(n, device=device)), device, repeats, warm_up=3)}
    if device.type == "cuda":
        rows["ours, captured"] = milliseconds(captured(lambda: maker(x, fixed)), device, repeats, warm_up=3)
        with patch.object(views, "_wants_kernel", lambda images: False):
            several = captured(lambda: maker(x, fixed))
        rows["tensor operations, captured"] = milliseconds(several, device, repeats, warm_up=3)
    rows["pillow"] = milliseconds(by_pillow, torch.device("cpu"), 5)
    here = {key: value for key, value in environment(device).items() if key != "command"}
    return {
        "images": n,
        "views": 2,
        "data": what,
        "environment": {**here, "pillow": PIL.__version__},
        "milliseconds": rows,
        "times_faster": {
            name: rows["pillow"]["median"] / row["median"] for name, row in rows.items() if name != "pillow"
        },
    }


def main() -> None:
    """Measure, print, and write where asked to."""
    parser = argparse.ArgumentParser(description="Time AugMix views against Pillow on one core")
    parser.add_argument("--images", type=int, default=512)
    parser.add_argument("--device", help="cpu or cuda; default: a GPU where there is one")
    parser.add_argument("--threads", type=int, default=1, help="of torch on a CPU; Pillow has one")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    result = measure(options.images, find_place(options.device).device, options.data_dir, options.repeats)
    text = json.dumps(result, indent=2)
    print(text)
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
