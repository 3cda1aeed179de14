"""Where the time of a captured step goes: each phase's milliseconds, and the kernels in it.

python benchmarks/pieces.py cifar10-trades-short bullettrain attack_group=4 --data-dir DATA

At the paper's shares, imposed. Needs a CUDA device.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from bullettrain.config import recipe
from bullettrain.engine.cuda_graphs import CudaGraphRunner
from bullettrain.processes import Place
from bullettrain.training.bench import make_trainer
from bullettrain.training.setup import load_data
from bullettrain.training.timing import impose, units

KINDS = {
    "convolution": ("cudnn", "xmma", "cutlass", "implicit", "conv"),
    "sums": ("triton_red", "triton_per"),
    "pointwise": ("triton_poi",),
    "optimiser and copies": ("multi_tensor", "foreach"),
}


def main() -> None:
    """Print a line a graph."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe")
    parser.add_argument("method", choices=["baseline", "bullettrain"])
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--kernels", type=int, default=0, help="list this many of each graph's kernels")
    options = parser.parse_args()

    config = recipe(options.recipe).with_settings(options.settings)
    place = Place(torch.device("cuda"))
    data = load_data(config, options.data_dir)
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(config, place, data, Path(folder), "compile", options.method)
        impose(trainer.engine, (0.18, 0.28, 0.54))
        batches = units(trainer)
        for _ in range(6):
            trainer.take(next(batches))
        torch.cuda.synchronize()
        runner = trainer.stepper.fast.runner
        assert isinstance(runner, CudaGraphRunner)
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {options.recipe} {options.method}", end=" ")
        print(f"{' '.join(options.settings)}: {trainer.stepper.capture_seconds:.1f} s of compilation and captures")
        for key, graph in runner.graphs.items():
            report(key, graph, options.kernels)


def report(key: Any, graph: torch.cuda.CUDAGraph, kernels: int) -> None:
    """Time a graph and say what it is made of."""
    times = []
    for _ in range(20):
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        before.record()
        graph.replay()
        after.record()
        torch.cuda.synchronize()
        times.append(before.elapsed_time(after))
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        graph.replay()
        torch.cuda.synchronize()
    spent: Counter[str] = Counter()
    names: Counter[str] = Counter()
    for event in profiled.key_averages():
        kind = next((kind for kind, words in KINDS.items() if any(word in event.key for word in words)), "other")
        spent[kind] += event.device_time_total / 1000
        names[event.key] += event.device_time_total / 1000
    sizes = [part for part in key[1:] if isinstance(part, tuple)]
    parts = ", ".join(f"{kind} {ms:.2f}" for kind, ms in spent.most_common())
    print(f"{key[0]:12s} {sizes[-1] if sizes else ''!s:24s} {statistics.median(times):7.3f} ms: {parts}")
    for name, ms in names.most_common(kernels):
        print(f"    {ms:7.3f} ms  {name[:100]}")


if __name__ == "__main__":
    main()
