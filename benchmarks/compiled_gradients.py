"""What compiling an update does to gradients, as a part of what rounding explains: above 1 it would not be compiled.

python benchmarks/compiled_gradients.py wrn-40-2 preact-resnet-18 --data-dir DATA --out results.json

Each network as it is drawn and after some steps of ordinary training on CIFAR-10, in bf16 and in float32.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

from bullettrain.attacks.state import dynamic, training
from bullettrain.data import load, to_unit
from bullettrain.engine.paired_forward import PairedForward
from bullettrain.models import build
from bullettrain.processes import find_place
from bullettrain.run_folder import environment


def main() -> None:
    """Print a line a case; write them all as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="+")
    parser.add_argument("--images", type=int, default=128, help="of the batch that is looked at")
    parser.add_argument("--steps", type=int, default=20, help="of training, of batches of 64")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--device")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()

    device = find_place(options.device).device
    data = load("cifar10", split="train", root=options.data_dir)
    rows = []
    for name in options.networks:
        torch.manual_seed(0)
        network = build(name).to(device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        for steps in (0, options.steps):
            optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
            for index in range(steps):
                part = slice(64 * index, 64 * index + 64)
                loss = cross_entropy(network(to_unit(data.images[part].to(device))), data.labels[part].to(device))
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            x = to_unit(data.images[-options.images :].to(device), channels_last=True)
            for half in (True, False):
                began = time.perf_counter()
                torch._dynamo.reset()
                with training(network):
                    joint = PairedForward(network, torch.bfloat16 if half else None)
                    joint.compile(options={"split_reductions": False})
                    harm = joint.gradient_error(dynamic(x))
                seconds = time.perf_counter() - began
                precision = "bf16" if half else "float32"
                rows.append({"network": name, "steps": steps, "precision": precision, "harm": harm, "seconds": seconds})
                print(f"{name:20} {steps:3} steps  {precision:8} {harm:.2f}   {seconds:.0f} s", flush=True)
    if options.out is not None:
        about = {"environment": environment(device), "images": options.images, "rows": rows}
        options.out.write_text(json.dumps(about, indent=2) + "\n")


if __name__ == "__main__":
    main()
