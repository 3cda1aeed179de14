"""The environment of a run: versions, machine, device."""

from __future__ import annotations

import hashlib
import platform
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import torch

import bullettrain


def environment(device: torch.device) -> dict[str, Any]:
    """Return versions, machine, device, commit and command."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} CPU"
    address = uuid.getnode()
    known = not address >> 40 & 1  # without a network card, it is a random number with this bit set
    machine = f"{platform.node()} {address if known else ''}".encode()
    return {
        "bullettrain": bullettrain.__version__,
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "python": platform.python_version(),
        "machine": hashlib.sha256(machine).hexdigest()[:8],  # distinguishes machines without naming them
        "device": name,
        "threads": torch.get_num_threads(),
        "commit": _commit(),
        "command": " ".join(["bullettrain", *sys.argv[1:]]),
    }


def _commit() -> str | None:
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            cwd=Path(__file__).resolve().parent,
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
