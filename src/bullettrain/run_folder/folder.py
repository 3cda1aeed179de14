"""The files of one run, each written whole or not at all."""

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

from bullettrain.brief import first_line
from bullettrain.config import Config, ConfigError
from bullettrain.config.format1 import translate
from bullettrain.errors import read_settings_text
from bullettrain.extras import extra
from bullettrain.lock import alone
from bullettrain.run_folder.weights import Metadata, RunError, Weights, pack_weights
from bullettrain.schema import conform

FORMAT = 2
"""Of the folder; 1 had no number, and kept its state in state.pt."""
CONFIG, METRICS, CHECKPOINT = "config.yaml", "metrics.jsonl", "checkpoint.pt"
DIGEST_BYTES = 32


class Checkpoint(NamedTuple):
    """All that a run goes on from; what users take is exported from it."""

    weights: Mapping[str, Weights]
    """By name: last, averaged, best."""
    state: Mapping[str, Any]
    """Everything else that the next step depends on; only what `torch.load(weights_only=True)` reads."""


class RunFolder:
    """The files of one run.

    The checkpoint is one file, written beside and renamed, that ends with the SHA-256 of all before it. Weights are
    exported after it; where a kill comes between, they are written again when the run is resumed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def exists(self) -> bool:
        """Whether there is a run here."""
        return (self.path / CONFIG).is_file()

    @property
    def finished(self) -> bool:
        """Whether the run here has come to its end."""
        return any(record.get("kind") == "end" and record.get("reason") == "finished" for record in self.records())

    def foreign(self) -> bool:
        """Whether there is something here that no run left; one killed at its first write leaves a few files."""
        return any(not (p.name.endswith(".new") or p.name == METRICS) for p in self.path.iterdir())

    # ------------------------------------------------------------------------------------ configuration

    def create(self, config: Config, environment: Mapping[str, Any]) -> None:
        """Lay out a new run."""
        with extra("a run's folder"):
            import yaml
        self.make()
        values = {"format": FORMAT, **config.to_dict(), "environment": dict(environment)}
        self.write(CONFIG, yaml.safe_dump(values, sort_keys=False, allow_unicode=True).encode())

    def config(self) -> Config:
        """The configuration that the run here was started with."""
        try:
            return Config.from_dict(self.read_config())
        except ConfigError as error:
            raise RunError(f"{self.path / CONFIG} cannot be read: {first_line(error)}") from None

    def environment(self) -> dict[str, str]:
        """Versions, device, commit and command that the run here was started with."""
        found = self.read_config().get("environment")
        return {str(key): str(value) for key, value in found.items()} if isinstance(found, Mapping) else {}

    def read_config(self) -> Mapping[Any, Any]:
        """config.yaml, not checked yet; one of an older format with the names of this one."""
        with extra("a run's folder"):
            import yaml
        path = self.path / CONFIG
        if not self.exists:
            inside = [name for name in ("bullettrain", "baseline") if RunFolder(self.path / name).exists]
            hint = f"; there is one in {self.path / inside[0]}" if inside else ""
            raise RunError(f"{self.path} is not a run: it has no {CONFIG}{hint}")
        try:
            values = yaml.safe_load(read_settings_text(path))
        except (yaml.YAMLError, ValueError, OSError, RecursionError) as error:
            raise RunError(f"{path} cannot be read as YAML: {first_line(error)}") from None
        if not isinstance(values, Mapping):
            raise RunError(f"{path} cannot be read: it holds no settings")
        if (number := values.get("format", 1)) not in range(1, FORMAT + 1):
            raise RunError(
                f"{self.path} has format {number}, and this version reads up to {FORMAT}: update bullettrain"
            )
        return translate(values)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Hold the folder, which is made if need be: a second process that trains in it is refused."""
        metrics = self.path / METRICS  # the one file that is never replaced by a new one
        self.make()
        with self._writing("the run's folder"):
            metrics.touch()
        with alone(metrics, RunError(f"{self.path} is in use: another process is training there")):
            yield

    # -------------------------------------------------------------------------------------------- metrics

    def log(self, record: Mapping[str, Any]) -> None:
        """Append one record to metrics.jsonl."""
        with self._writing("metrics"), (self.path / METRICS).open("a") as file:
            file.write(json.dumps(record, allow_nan=True) + "\n")

    def records(self) -> list[dict[str, Any]]:
        """All records so far; a last line that a kill cut short is left out."""
        return self.read_metrics()[0]

    def read_metrics(self) -> tuple[list[dict[str, Any]], int]:
        """The records, and how many lines before the last, which a kill may have cut short, cannot be read."""
        try:
            text = (self.path / METRICS).read_text(encoding="utf-8", errors="replace")
        except (FileNotFoundError, NotADirectoryError):
            return [], 0
        found: list[Any] = []
        for line in filter(str.strip, text.split("\n")):
            found.append(None)
            with contextlib.suppress(ValueError, RecursionError):
                found[-1] = json.loads(line)
        broken = sum(not isinstance(record, dict) for record in found[:-1])
        return [record for record in found if isinstance(record, dict)], broken

    def metrics_size(self) -> int:
        """Bytes of metrics so far, on the disk: the mark to which resuming cuts them back."""
        with self._writing("metrics"), (self.path / METRICS).open("ab") as file:
            os.fsync(file.fileno())
            return file.tell()

    def cut_metrics(self, size: int) -> None:
        """Forget the records after a mark: they are of steps that will be taken again."""
        with self._writing("metrics"), (self.path / METRICS).open("ab") as file:
            if file.tell() < size:
                raise RunError(f"{self.path / METRICS} is shorter than its checkpoint says: copy it again, too")
            file.truncate(size)

    # ---------------------------------------------------------------------------------------- checkpoints

    def save(self, checkpoint: Checkpoint) -> None:
        """Write a checkpoint, then the weights that are exported from it."""
        weights = {
            name: {"about": dataclasses.asdict(about), "tensors": dict(tensors)}
            for name, (tensors, about) in checkpoint.weights.items()
        }
        packed = io.BytesIO()
        torch.save({"format": FORMAT, "weights": weights, "state": dict(checkpoint.state)}, packed)
        self.write(CHECKPOINT, packed.getbuffer(), hashlib.sha256(packed.getbuffer()).digest())
        self.export(checkpoint)

    def export(self, checkpoint: Checkpoint) -> None:
        """Write the weights of a checkpoint for users; those that have not changed stay as they are."""
        for name, weights in checkpoint.weights.items():
            packed, file = pack_weights(*weights), self.path / f"{name}.safetensors"
            if not (file.is_file() and file.stat().st_size == len(packed) and file.read_bytes() == packed):
                self.write(file.name, packed)

    def has_checkpoint(self) -> bool:
        """Whether there is something to resume from.

        Raises:
            RunError: there is, in the format of an older version.
        """
        found = (self.path / CHECKPOINT).is_file()
        if not found and (self.path / "state.pt").is_file():
            raise RunError(
                f"{self.path} was trained by an older version, in another format: it can be evaluated, not resumed; "
                f"train it anew with another --out"
            )
        return found

    def load(self) -> Checkpoint:
        """The checkpoint, on the CPU.

        Raises:
            RunError: it is damaged.
        """
        file = self.path / CHECKPOINT
        try:
            packed = memoryview(file.read_bytes())
            if hashlib.sha256(packed[:-DIGEST_BYTES]).digest() != packed[-DIGEST_BYTES:]:
                raise ValueError("its digest does not match")
            content = torch.load(io.BytesIO(packed[:-DIGEST_BYTES]), weights_only=True, map_location="cpu")
            weights = {
                name: Weights(part["tensors"], conform(part["about"], Metadata))
                for name, part in content["weights"].items()
            }
            return Checkpoint(weights, content["state"])
        except Exception as error:  # whatever a damaged file makes of the unpickler
            raise RunError(
                f"{file} is damaged and cannot be resumed from: {first_line(error)}; copy it again from where it was "
                "made, or train anew with another --out"
            ) from None

    # ---------------------------------------------------------------------------------------- other files

    def make(self) -> None:
        """Make the folder, where it is not there."""
        with self._writing("the run's folder"):
            self.path.mkdir(parents=True, exist_ok=True)

    def read_json(self, name: str) -> Any:
        """What a JSON file of the run holds; None where it is not there.

        Raises:
            RunError: it is there and cannot be read, or is no JSON.
        """
        try:
            return json.loads((self.path / name).read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError, RecursionError) as error:
            raise RunError(f"{self.path / name} cannot be read: {first_line(error)}") from None

    def write_json(self, name: str, values: Mapping[str, Any]) -> None:
        """A JSON file of the run, whole or not at all; the folder is made if need be."""
        self.make()
        text = json.dumps(values, indent=1, ensure_ascii=False, allow_nan=False)
        self.write(name, f"{text}\n".encode())

    def write(self, name: str, *parts: bytes | memoryview) -> None:
        """A file of the run, whole or not at all."""
        beside = self.path / f".{name}.new"
        with self._writing(name):
            try:
                with beside.open("wb") as file:
                    file.writelines(parts)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(beside, self.path / name)
            except BaseException:
                with contextlib.suppress(OSError):
                    beside.unlink(missing_ok=True)
                raise

    @contextlib.contextmanager
    def _writing(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            kept = "; the checkpoint before it is intact" if (self.path / CHECKPOINT).is_file() else ""
            raise RunError(f"{what} could not be written to {self.path}: {error.strerror}{kept}") from None


def try_folder(folder: Path) -> None:
    """Make ``folder`` where it is not there, and try to write into it; OSError where that cannot be done."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass
