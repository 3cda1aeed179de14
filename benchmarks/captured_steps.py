"""Time captured steps of PreActResNet-18 in a loop of one's own, on random images: alone or as a process of torchrun.

python benchmarks/captured_steps.py trades
torchrun --nproc-per-node 1 benchmarks/captured_steps.py trades grad-align

For compilation from an empty cache set TORCHINDUCTOR_CACHE_DIR and TRITON_CACHE_DIR to an empty folder. Needs a GPU.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

import bullettrain as bt
from bullettrain import baselines
from bullettrain.models import build

EPS = 8 / 255
CASES: dict[str, Callable[[], bt.BulletTrain]] = {
    "trades": lambda: bt.BulletTrain(bt.TRADES(beta=6.0, eps=EPS), budget=bt.StepBudget.uniform(10)),
    "trades-bullettrain": lambda: bt.BulletTrain(bt.TRADES(beta=6.0, eps=EPS), budget=bt.StepBudget(10, 2)),
    "pgd-at-3": lambda: bt.BulletTrain(bt.PGDAT(eps=EPS), budget=bt.StepBudget.uniform(3)),
    "yopo-2-5": lambda: baselines.yopo(bt.TRADES(beta=6.0, eps=EPS)),
    "grad-align": lambda: baselines.one_step(baselines.GradAlign(eps=EPS)),
}
WARM_UP, STEPS, REPEATS = 20, 24, 5


def timed(train: bt.BulletTrain) -> tuple[list[float], float]:
    """Return milliseconds per step, one figure a repeat, and the seconds of compiling and capturing."""
    torch.manual_seed(0)
    model = build("preact-resnet-18").cuda().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    fast = bt.Captured(train, model, dtype=torch.bfloat16, compile=True, cudnn_benchmark_after=0.0, on_message=print)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, fused=True)
    images = [torch.rand(128, 3, 32, 32, device="cuda").to(memory_format=torch.channels_last) for _ in range(8)]
    labels = [torch.randint(10, (128,), device="cuda") for _ in range(8)]

    def milliseconds(steps: int) -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        for i in range(steps):
            fast.step(images[i % 8], labels[i % 8])
            optimizer.step()
        torch.cuda.synchronize()
        return 1000 * (time.perf_counter() - began) / steps

    milliseconds(WARM_UP)
    return [milliseconds(STEPS) for _ in range(REPEATS)], fast.seconds


def main() -> None:
    """Time the cases that are named, or all."""
    together = "WORLD_SIZE" in os.environ
    if together:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl")
    for name in sys.argv[1:] or CASES:
        repeats, seconds = timed(CASES[name]())
        spread = f"{min(repeats):.2f} to {max(repeats):.2f}"
        print(f"{name}: {statistics.median(repeats):.2f} ms per step ({spread}), compile and capture {seconds:.1f} s")
    if together:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
