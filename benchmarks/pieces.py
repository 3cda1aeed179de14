"""Where the time of a captured step goes: each piece's milliseconds, and the kernels in it.

python benchmarks/pieces.py cifar10-trades-short bullettrain attack_group=4 --data-dir DATA

At the paper's shares, imposed. Needs a CUDA device.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections import Counter
from collections.abc import Hashable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from bullettrain.engine.corruption import AttackPieces
from bullettrain.engine.group import GroupEngine
from bullettrain.training import recipe
from bullettrain.training.bench import _maker, _units, impose
from bullettrain.training.setup import Place, load_data
from bullettrain.training.steppers import StaticStepper

KINDS = {
    "convolution": ("cudnn", "xmma", "cutlass", "implicit", "conv"),
    "sums": ("triton_red", "triton_per"),
    "pointwise": ("triton_poi",),
    "optimiser and copies": ("multi_tensor", "foreach"),
}


def main() -> None:
    """Print a line a piece."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe")
    parser.add_argument("method", choices=["baseline", "bullettrain"])
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--kernels", type=int, default=0, help="list this many of each piece's kernels")
    options = parser.parse_args()

    config = recipe(options.recipe).with_settings(options.settings)
    place = Place(torch.device("cuda"))
    data = load_data(config, options.data_dir)
    with tempfile.TemporaryDirectory() as folder:
        trainer = _maker(config, place, data, Path(folder))("compile", options.method)
        impose(trainer.engine, (0.18, 0.28, 0.54))
        units = _units(trainer)
        for _ in range(6):
            trainer._take(next(units))
        torch.cuda.synchronize()
        assert isinstance(trainer.stepper, StaticStepper)
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {options.recipe} {options.method}", end=" ")
        print(f"{' '.join(options.settings)}: {trainer.stepper.capture_seconds:.1f} s of compilation and captures")
        graphs = trainer.stepper.graphs
        assert graphs is not None
        for key in graphs.graphs:
            show(trainer.stepper, key, options.kernels)


def show(stepper: StaticStepper, key: Hashable, kernels: int) -> None:
    """One piece: the median of 20 replays, then the kernels of three more."""
    assert stepper.graphs is not None
    assert isinstance(stepper.engine, GroupEngine)
    graph, memory, corruption = stepper.graphs.graphs[key], stepper.engine.memory, stepper.engine.corruption
    assert memory is not None

    def back() -> None:
        memory.at.zero_()  # an update moves on to the next mini-batch, an attack to the next turn
        if isinstance(corruption, AttackPieces):
            corruption.turn.zero_()

    times = []
    for _ in range(23):
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        back()
        before.record()
        graph.replay()
        after.record()
        torch.cuda.synchronize()
        times.append(before.elapsed_time(after))
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(3):
            back()
            graph.replay()
        torch.cuda.synchronize()
    events = [event for event in seen.key_averages() if event.self_device_time_total > 0]
    micros, counts = Counter[str](), Counter[str]()
    for event in events:
        kind = next((kind for kind, names in KINDS.items() if any(n in event.key.lower() for n in names)), "other")
        micros[kind] += event.self_device_time_total / 3
        counts[kind] += event.count / 3
    parts = ", ".join(f"{kind} {micros[kind]:.0f} us in {counts[kind]:.0f}" for kind in micros)
    print(f"{statistics.median(times[3:]):8.3f} ms  {key}  {sum(counts.values()):.0f} kernels: {parts}")
    for event in sorted(events, key=lambda event: -event.self_device_time_total)[:kernels]:
        print(f"    {event.self_device_time_total / 3:8.1f} us {event.count / 3:5.0f} x {event.key[:100]}")


if __name__ == "__main__":
    main()
