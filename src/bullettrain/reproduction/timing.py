"""How long a finished run's training takes with the device to itself: its steps timed anew, a process a run."""

from __future__ import annotations

import logging
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

from bullettrain.brief import first_line
from bullettrain.data import DataError
from bullettrain.reproduction.jobs import SPAWN
from bullettrain.reproduction.records import Record
from bullettrain.reproduction.tasks import TaskResult
from bullettrain.training.bench import Timed
from bullettrain.training.config import Config
from bullettrain.training.folder import RunFolder, environment
from bullettrain.training.loop import Trainer
from bullettrain.training.setup import find_place, load_data

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
        with ProcessPoolExecutor(1, SPAWN) as pool:
            record.timing = pool.submit(_time, record, data_dir, device).result()
    except (DataError, RuntimeError, ValueError) as error:  # ConfigError and a killed process are of these
        return TaskResult(record.name, problem=first_line(error))
    record.write(folder)
    logger.info("%8.2f s an epoch  %s", record.timing["epoch_seconds"], record.name)
    return TaskResult(record.name)


def _time(record: Record, data_dir: Path | None, device: str | None) -> dict[str, Any]:
    """In a process of its own. Weights are as they are drawn: what was learnt does not change how fast it is."""
    # Tuned at once: what a long training comes to is what is timed.
    config = Config.from_dict(record.config).replace_section("training", tune_after=0.0)
    place, data = find_place(device), load_data(config, data_dir)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(config, RunFolder(Path(folder)), place, data)
        shares = (record.shares["outlier"], record.shares["boundary"], record.shares["robust"])
        timed = Timed(trainer, shares if record.mined else None, STEPS)
        for _ in range(REPEATS):
            timed.time()
    return {
        **{"epoch_seconds": timed.epoch_seconds, "step_ms": timed.step_ms, "spread_ms": timed.spread_ms},
        **{"steps": STEPS, "repeats": REPEATS, "notes": trainer.notes, "environment": environment(place.device)},
    }
