"""The time of runs that shared a device, measured afterwards, one run at a time."""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path
from typing import Any

import torch

from bullettrain.brief import first_line
from bullettrain.config.sections import Config
from bullettrain.data import DataError
from bullettrain.processes import find_place
from bullettrain.reproduction.records import Record
from bullettrain.reproduction.runs import TaskResult, in_process
from bullettrain.run_folder import SHARES, RunFolder, environment
from bullettrain.training.bench import Timed
from bullettrain.training.setup import load_data
from bullettrain.training.trainer import Trainer

STEPS, REPEATS = 40, 5
"""Mini-batches timed at once, and how often."""
logger = logging.getLogger(__name__)


def is_timed(record: Record, device: torch.device) -> bool:
    """Whether ``record`` has a timing by this code on this kind of device; of uncommitted code that is not known."""
    there, here = record.timing.get("environment", {}), environment(device)
    known = bool(here["commit"]) and not here["commit"].endswith("-dirty")
    return known and all(there.get(key) == here[key] for key in ("device", "torch", "commit"))


def time_run(record: Record, folder: Path, data_dir: Path | None = None, device: str | None = None) -> TaskResult:
    """Put its timing, at the shares that the run had on average, into ``record`` and its file in ``folder``."""
    if record.mined and record.config["method"]["separation"] != "quantile":
        return TaskResult(record.name, problem="its classes are not by the rule, and cannot be imposed; run it alone")
    try:
        record.timing = in_process(_time, record, data_dir, device).result()
    except (DataError, RuntimeError, ValueError) as error:  # ConfigError and a killed process are of these
        return TaskResult(record.name, problem=first_line(error))
    record.write(folder)
    logger.info("%8.2f s an epoch  %s", record.timing["epoch_seconds"], record.name)
    return TaskResult(record.name)


def _time(record: Record, data_dir: Path | None, device: str | None) -> dict[str, Any]:
    """In a process of its own. Weights are as they are drawn: what was learnt does not change how fast it is."""
    # Tuned at once: what a long training comes to is what is timed.
    config = Config.from_dict(record.config).replace_section("training", cudnn_benchmark_after=0.0)
    place, data = find_place(device), load_data(config, data_dir)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(config, RunFolder(Path(folder)), place, data)
        outlier, boundary, robust = (record.shares[name] for name in SHARES)
        timed = Timed(trainer, (outlier, boundary, robust) if record.mined else None, STEPS)
        for _ in range(REPEATS):
            timed.time()
    return {
        **{"epoch_seconds": timed.epoch_seconds, "step_ms": timed.step_ms, "spread_ms": timed.spread_ms},
        **{"steps": STEPS, "repeats": REPEATS, "notes": trainer.recorder.notes},
        "environment": environment(place.device),
    }
