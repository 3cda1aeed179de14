"""The files of a run. Each is written completely or not at all."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bullettrain.config import Config, ConfigError
from bullettrain.config.format1 import translate
from bullettrain.errors import raised_as, read_settings_text
from bullettrain.extras import extra
from bullettrain.lock import locked
from bullettrain.run_folder.weights import Metadata, RunError, Weights, pack_weights
from bullettrain.schema import conform

FORMAT = 2
"""Version of the folder's format. Format 1 had no number, and its checkpoint was state.pt."""
CONFIG, METRICS, CHECKPOINT = "config.yaml", "metrics.jsonl", "checkpoint.pt"
DIGEST_BYTES = 32


class Checkpoint(NamedTuple):
    """State from which a run is resumed."""

    weights: Mapping[str, Weights]
    """By name: last, averaged, best."""
    state: Mapping[str, Any]
    """Everything else that the next step depends on, as `torch.load(weights_only=True)` can read it."""


class RunFolder:
    """The files of a run.

    The checkpoint is written to a temporary file and renamed; it ends with the SHA-256 of its content. Weights are
    exported after it; if the process is killed in between, they are written when the run is resumed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def exists(self) -> bool:
        """Whether the folder holds a run."""
        return (self.path / CONFIG).is_file()

    @property
    def finished(self) -> bool:
        """Whether the run is finished."""
        return any(record.get("kind") == "end" and record.get("reason") == "finished" for record in self.records())

    def foreign(self) -> bool:
        """Return whether the folder holds other files than a run that was killed at its first write leaves."""
        return any(not (p.name.endswith(".new") or p.name == METRICS) for p in self.path.iterdir())

    # ------------------------------------------------------------------------------------ configuration

    def create(self, config: Config, environment: Mapping[str, Any]) -> None:
        """Create the folder of a new run."""
        with extra("a run's folder"):
            import yaml
        self.make()
        values = {"format": FORMAT, **config.to_dict(), "environment": dict(environment)}
        self.write(CONFIG, yaml.safe_dump(values, sort_keys=False, allow_unicode=True).encode())

    def config(self) -> Config:
        """Return the config of the run."""
        with raised_as(RunError, f"{self.path / CONFIG} cannot be read: {{error}}", ConfigError):
            return Config.from_dict(self.read_config())

    def environment(self) -> dict[str, str]:
        """Return versions, device, commit and command of the run's start."""
        values = self.read_config().get("environment")
        return {str(key): str(value) for key, value in values.items()} if isinstance(values, Mapping) else {}

    def read_config(self) -> Mapping[Any, Any]:
        """Read config.yaml without validation. Names of an older format are translated."""
        with extra("a run's folder"):
            import yaml
        path = self.path / CONFIG
        if not self.exists:
            raise RunError(f"{self.path} is not a run: it has no {CONFIG}")
        unread = f"{path} cannot be read as YAML: {{error}}"
        with raised_as(RunError, unread, yaml.YAMLError, ValueError, OSError, RecursionError):
            values = yaml.safe_load(read_settings_text(path))
        if not isinstance(values, Mapping):
            raise RunError(f"{path} cannot be read: it holds no settings")
        if (number := values.get("format", 1)) not in range(1, FORMAT + 1):
            raise RunError(f"{self.path} has format {number}; this version reads up to {FORMAT}: update bullettrain")
        return translate(values)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the folder, which is created if it does not exist. Raises RunError if another process trains in it."""
        metrics = self.path / METRICS  # the only file that is never replaced
        self.make()
        with self._writing("the run's folder"):
            metrics.touch()
        with locked(metrics, RunError(f"{self.path} is in use: another process is training there")):
            yield

    # -------------------------------------------------------------------------------------------- metrics

    def log(self, record: Mapping[str, Any]) -> None:
        """Append one record to metrics.jsonl."""
        with self._writing("metrics"), (self.path / METRICS).open("a") as file:
            file.write(json.dumps(record, allow_nan=True) + "\n")

    def records(self) -> list[dict[str, Any]]:
        """Return all complete records."""
        return self.read_metrics()[0]

    def read_metrics(self) -> tuple[list[dict[str, Any]], int]:
        """Return the records and the number of unreadable lines, not counting an incomplete last line."""
        try:
            text = (self.path / METRICS).read_text(encoding="utf-8", errors="replace")
        except (FileNotFoundError, NotADirectoryError):
            return [], 0
        values: list[Any] = []
        for line in filter(str.strip, text.split("\n")):
            values.append(None)
            with contextlib.suppress(ValueError, RecursionError):
                values[-1] = json.loads(line)
        broken = sum(not isinstance(value, dict) for value in values[:-1])
        return [value for value in values if isinstance(value, dict)], broken

    def metrics_size(self) -> int:
        """Flush metrics.jsonl to the disk and return its size, for :meth:`cut_metrics`."""
        with self._writing("metrics"), (self.path / METRICS).open("ab") as file:
            os.fsync(file.fileno())
            return file.tell()

    def cut_metrics(self, size: int) -> None:
        """Truncate metrics.jsonl: a resumed run repeats the steps after its checkpoint."""
        with self._writing("metrics"), (self.path / METRICS).open("ab") as file:
            if file.tell() < size:
                raise RunError(f"{self.path / METRICS} is shorter than its checkpoint says: copy it again, too")
            file.truncate(size)

    # ---------------------------------------------------------------------------------------- checkpoints

    def save(self, checkpoint: Checkpoint) -> None:
        """Write a checkpoint and export its weights."""
        weights = {
            name: {"about": dataclasses.asdict(about), "tensors": dict(tensors)}
            for name, (tensors, about) in checkpoint.weights.items()
        }
        packed = io.BytesIO()
        torch.save({"format": FORMAT, "weights": weights, "state": dict(checkpoint.state)}, packed)
        self.write(CHECKPOINT, packed.getbuffer(), hashlib.sha256(packed.getbuffer()).digest())
        self.export(checkpoint)

    def export(self, checkpoint: Checkpoint) -> None:
        """Write the weights of a checkpoint as safetensors files, unless these are up to date."""
        for name, weights in checkpoint.weights.items():
            packed, file = pack_weights(*weights), self.path / f"{name}.safetensors"
            if not file.is_file() or file.read_bytes() != packed:
                self.write(file.name, packed)

    def has_checkpoint(self) -> bool:
        """Return whether there is a checkpoint.

        Raises:
            RunError: it has the format of an older version.
        """
        exists = (self.path / CHECKPOINT).is_file()
        if not exists and (self.path / "state.pt").is_file():
            old = f"{self.path} was trained by an older version, in another format"
            raise RunError(f"{old}: it can be evaluated, not resumed; train it anew with another --out")
        return exists

    def load(self) -> Checkpoint:
        """Load the checkpoint on the CPU.

        Raises:
            RunError: the checkpoint is damaged.
        """
        file = self.path / CHECKPOINT
        mend = "copy it again from where it was made, or train anew with another --out"
        # An unpickler can raise anything.
        with raised_as(RunError, f"{file} is damaged and cannot be resumed from: {{error}}; {mend}", Exception):
            packed = memoryview(file.read_bytes())
            if hashlib.sha256(packed[:-DIGEST_BYTES]).digest() != packed[-DIGEST_BYTES:]:
                raise ValueError("its digest does not match")
            content = torch.load(io.BytesIO(packed[:-DIGEST_BYTES]), weights_only=True, map_location="cpu")
            weights = {
                name: Weights(part["tensors"], conform(part["about"], Metadata))
                for name, part in content["weights"].items()
            }
            return Checkpoint(weights, content["state"])

    # ---------------------------------------------------------------------------------------- other files

    def make(self) -> None:
        """Create the folder if it does not exist."""
        with self._writing("the run's folder"):
            self.path.mkdir(parents=True, exist_ok=True)

    def read_json(self, name: str) -> Any:
        """Return the content of a JSON file, or None if it does not exist.

        Raises:
            RunError: the file cannot be read, or is not JSON.
        """
        unread = f"{self.path / name} cannot be read: {{error}}"
        with (
            raised_as(RunError, unread, OSError, ValueError, RecursionError),
            contextlib.suppress(FileNotFoundError, NotADirectoryError),
        ):
            return json.loads((self.path / name).read_text(encoding="utf-8"))
        return None

    def write_json(self, name: str, values: Mapping[str, Any]) -> None:
        """Write a JSON file atomically. The folder is created if it does not exist."""
        self.make()
        text = json.dumps(values, indent=1, ensure_ascii=False, allow_nan=False)
        self.write(name, f"{text}\n".encode())

    def write(self, name: str, *parts: bytes | memoryview) -> None:
        """Write a file atomically: to a temporary file that is then renamed."""
        temporary = self.path / f".{name}.new"
        with self._writing(name):
            try:
                with temporary.open("wb") as file:
                    file.writelines(parts)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(temporary, self.path / name)
            except BaseException:
                with contextlib.suppress(OSError):
                    temporary.unlink(missing_ok=True)
                raise

    def _writing(self, what: str) -> contextlib.AbstractContextManager[None]:
        def unwritten(error: OSError) -> str:
            kept = "; the checkpoint before it is intact" if (self.path / CHECKPOINT).is_file() else ""
            return f"{what} could not be written to {self.path}: {error.strerror}{kept}"

        return raised_as(RunError, unwritten, OSError)


def try_folder(folder: Path) -> None:
    """Create ``folder`` if it does not exist, and try to write into it. Raises OSError if that fails."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass
