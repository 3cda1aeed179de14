"""A run's folder: configuration, metrics and checkpoints, written so that a kill at any moment loses nothing whole."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import bullettrain
from bullettrain.brief import first_line
from bullettrain.config.method import Threat
from bullettrain.config.sections import Config
from bullettrain.config.settings import ConfigError
from bullettrain.errors import UserError
from bullettrain.extras import extra
from bullettrain.lock import alone
from bullettrain.schema import conform

WEIGHTS = ("last", "best", "averaged")


def preferred(kept: Container[str]) -> str:
    """Which of a run's weights a user would take: the best on its validation set where there are any, else the last."""
    return "best" if "best" in kept else "last"


def weights_in(path: Path) -> list[str]:
    """The weights that lie in a run's folder."""
    return [name for name in WEIGHTS if (path / f"{name}.safetensors").is_file()]


class RunError(UserError):
    """A run folder that cannot be used as asked: one sentence that says why and what to do."""


@dataclass(frozen=True)
class NetworkMetadata:
    """How the network of a weights file is built; see :func:`bullettrain.models.build`."""

    name: str
    num_classes: int
    channels: int
    image_size: int
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None


@dataclass(frozen=True)
class Metadata:
    """What a weights file says about itself, beside its tensors."""

    step: int = 0
    epoch: int = 0
    network: NetworkMetadata | None = None
    """None: the file is not of a run."""
    classes: tuple[str, ...] = ()
    recipe: str = ""
    threat: Threat | None = None


class Checkpoint(NamedTuple):
    """What a run is gone on from, and what users take from it."""

    weights: Mapping[str, Tensor]
    averaged: Mapping[str, Tensor] | None
    about: Metadata
    state: Mapping[str, Any]
    """Everything else that the next step depends on."""


class RunFolder:
    """The files of one run.

    Weights and state are two files that have to be of one step. Each is written beside and renamed; the old
    weights stay as ``previous.safetensors`` until the new state is in place, and the step that each file
    carries says which two belong together.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def finished(self) -> bool:
        """Whether the run here has come to its end."""
        return any(record.get("kind") == "end" and record.get("reason") == "finished" for record in self.records())

    @property
    def exists(self) -> bool:
        """Whether there is a run here."""
        return (self.path / "config.yaml").is_file()

    def foreign(self) -> bool:
        """Whether there is something here that no run left; one killed at its first write leaves a few files."""
        return any(not (p.name.endswith(".new") or p.name == "metrics.jsonl") for p in self.path.iterdir())

    # ------------------------------------------------------------------------------------ configuration

    def create(self, config: Config, environment: Mapping[str, Any]) -> None:
        """Lay out a new run."""
        with extra("a run's folder"):
            import yaml
        self.make()
        values = {**config.to_dict(), "environment": dict(environment)}
        self.write("config.yaml", yaml.safe_dump(values, sort_keys=False, allow_unicode=True).encode())

    def config(self) -> Config:
        """The configuration that the run here was started with."""
        return as_config(self._read_config(), self.path / "config.yaml")

    def environment(self) -> dict[str, str]:
        """Versions, device, commit and command that the run here was started with."""
        values = self._read_config()
        found = values.get("environment") if isinstance(values, Mapping) else None
        return {str(key): str(value) for key, value in found.items()} if isinstance(found, Mapping) else {}

    def _read_config(self) -> Any:
        with extra("a run's folder"):
            import yaml
        path = self.path / "config.yaml"
        try:
            return yaml.safe_load(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise RunError(f"{self.path} is no run: it has no config.yaml") from None
        except (yaml.YAMLError, UnicodeDecodeError, OSError, RecursionError) as error:
            raise RunError(f"{path} cannot be read: {first_line(error)}") from None

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Hold the folder, which is made if need be: a second process that trains in it is refused."""
        metrics = self.path / "metrics.jsonl"  # the one file that is never replaced by a new one
        with self._writing("the run's folder"):
            self.path.mkdir(parents=True, exist_ok=True)
            metrics.touch()
        with alone(metrics, RunError(f"{self.path} is in use: another process is training there")):
            yield

    # -------------------------------------------------------------------------------------------- metrics

    def log(self, record: Mapping[str, Any]) -> None:
        """Append one record to metrics.jsonl."""
        with self._writing("metrics"), (self.path / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(record, allow_nan=True) + "\n")

    def records(self) -> list[dict[str, Any]]:
        """All records so far; a last line that a kill cut short is left out."""
        return self.read_metrics()[0]

    def read_metrics(self) -> tuple[list[dict[str, Any]], int]:
        """The records, and how many lines before the last, which a kill may have cut short, cannot be read."""
        try:
            text = (self.path / "metrics.jsonl").read_text(encoding="utf-8", errors="replace")
        except (FileNotFoundError, NotADirectoryError):
            return [], 0
        found: list[Any] = []
        for line in filter(str.strip, text.split("\n")):
            found.append(None)
            with contextlib.suppress(ValueError):
                found[-1] = json.loads(line)
        broken = sum(not isinstance(record, dict) for record in found[:-1])
        return [record for record in found if isinstance(record, dict)], broken

    def metrics_size(self) -> int:
        """Bytes of metrics so far: the mark to which resuming cuts them back."""
        file = self.path / "metrics.jsonl"
        return file.stat().st_size if file.exists() else 0

    def cut_metrics(self, size: int) -> None:
        """Forget the records after a mark: they are of steps that will be taken again."""
        if self.metrics_size() > size:
            with (self.path / "metrics.jsonl").open("r+b") as file:
                file.truncate(size)

    # ---------------------------------------------------------------------------------------- checkpoints

    def save_weights(self, name: str, weights: Mapping[str, Tensor], about: Metadata) -> None:
        """``name``.safetensors, with ``about`` as JSON beside the tensors."""
        self.write(f"{name}.safetensors", pack_weights(weights, about))

    def save(self, checkpoint: Checkpoint) -> None:
        """A checkpoint: last.safetensors and state.pt, both of ``about.step``.

        The average lies in the state too; its file is for users, and is renewed before the state, so that a kill
        between the two is made good when the steps since the old state are taken again.
        """
        weights, averaged, about, state = checkpoint
        last, previous = self.path / "last.safetensors", self.path / "previous.safetensors"
        with self._writing("a checkpoint"):
            new_weights = self._beside("last.safetensors", pack_weights(weights, about))
            try:
                new_state = self._beside("state.pt", dict(state))
            except BaseException:
                new_weights.unlink(missing_ok=True)
                raise
            if averaged is not None:
                os.replace(
                    self._beside("averaged.safetensors", pack_weights(averaged, about)),
                    self.path / "averaged.safetensors",
                )
            if last.exists():
                os.replace(last, previous)
            os.replace(new_weights, last)
            os.replace(new_state, self.path / "state.pt")
            previous.unlink(missing_ok=True)

    def has_checkpoint(self) -> bool:
        """Whether there is a state to resume from."""
        return (self.path / "state.pt").is_file()

    def load(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Weights and state of the newest whole checkpoint."""
        file = self.path / "state.pt"
        try:
            state = torch.load(file, weights_only=True, map_location="cpu")
            step = state["step"]
        except Exception as error:  # whatever a damaged file makes of the unpickler
            raise RunError(f"{file} is damaged and cannot be resumed from: {first_line(error)}") from None
        problems = []
        for name in ("last", "previous"):
            try:
                weights, about = read_weights(self.path / f"{name}.safetensors")
            except RunError as error:
                problems.append(str(error))
                continue
            if about.step == step:
                return weights, state
            problems.append(f"{name}.safetensors is of step {about.step}, the state of step {step}")
        raise RunError(f"{self.path} cannot be resumed: {'; '.join(problems)}")

    def settle(self, step: int) -> None:
        """Before a resumed run saves: where a kill came between the two files, the state's weights become the last."""
        last, previous = self.path / "last.safetensors", self.path / "previous.safetensors"
        with contextlib.suppress(RunError):
            if read_weights(previous)[1].step == step:
                os.replace(previous, last)

    # ---------------------------------------------------------------------------------------- other files

    def make(self) -> None:
        """Make the folder, where it is not there."""
        with self._writing("a folder"):
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

    def write(self, name: str, content: bytes) -> None:
        """A file of the run, whole or not at all."""
        with self._writing(name):
            os.replace(self._beside(name, content), self.path / name)

    def _beside(self, name: str, content: bytes | dict[str, Any]) -> Path:
        """``content`` on the disk under a name of its own; nothing is left of it if that fails."""
        beside = self.path / f".{name}.new"
        try:
            with beside.open("wb") as file:
                if isinstance(content, bytes):
                    file.write(content)
                else:
                    torch.save(content, file)
                file.flush()
                os.fsync(file.fileno())
        except BaseException:
            beside.unlink(missing_ok=True)
            raise
        return beside

    @contextlib.contextmanager
    def _writing(self, what: str) -> Iterator[None]:
        try:
            yield
        except (OSError, RuntimeError) as error:  # torch.save wraps a full disk in a RuntimeError
            if isinstance(error, RuntimeError) and "write" not in str(error):
                raise
            reason = getattr(error, "strerror", None) or first_line(error)
            kept = "; the checkpoint before it is intact" if self.has_checkpoint() else ""
            raise RunError(f"{what} could not be written to {self.path}: {reason}{kept}") from None


def read_weights(file: Path) -> tuple[dict[str, Tensor], Metadata]:
    """Tensors of a safetensors file, and what is written about them; nothing that it names is imported."""
    with extra("a checkpoint"):
        from safetensors import safe_open
    if not file.is_file():
        raise RunError(f"{file} is missing")
    try:
        with safe_open(str(file), framework="pt") as opened:
            tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118 (no mapping)
            about = json.loads((opened.metadata() or {}).get("bullettrain", "{}"))
            return tensors, conform(about, Metadata)
    except Exception as error:  # safetensors' own error type derives from Exception
        raise RunError(f"{file} is damaged: {first_line(error)}") from None


def try_folder(folder: Path) -> None:
    """Make ``folder`` where it is not there, and try to write into it; OSError where that cannot be done."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass


def environment(device: torch.device) -> dict[str, Any]:
    """Versions, device, commit and command, for the record."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} CPU"
    return {
        "bullettrain": bullettrain.__version__,
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "python": platform.python_version(),
        "device": name,
        "threads": torch.get_num_threads(),
        "commit": _commit(),
        "command": " ".join(["bullettrain", *sys.argv[1:]]),
    }


def _commit() -> str | None:
    here = Path(__file__).resolve().parent
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            cwd=here,
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip() or None if found.returncode == 0 else None


def pack_weights(weights: Mapping[str, Tensor], about: Metadata) -> bytes:
    """A safetensors file: the tensors, and ``about`` as JSON in its metadata."""
    with extra("a checkpoint"):
        from safetensors.torch import save
    tensors = {key: value.detach().cpu().contiguous() for key, value in weights.items()}
    packed: bytes = save(tensors, metadata={"bullettrain": json.dumps(dataclasses.asdict(about))})
    return packed


def as_config(values: Any, path: Path) -> Config:
    """The configuration of which config.yaml, at ``path``, holds ``values``."""
    try:
        return Config.from_dict(values)
    except ConfigError as error:
        raise RunError(f"{path} cannot be read: {first_line(error)}") from None
