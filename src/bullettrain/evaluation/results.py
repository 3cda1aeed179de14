"""Results as they are kept: one file, `evaluation.json`, that an interrupted evaluation goes on from."""

from __future__ import annotations

import base64
import contextlib
import math
import time
from collections.abc import Iterator, Sequence, Set
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from bullettrain.brief import first_line
from bullettrain.corruptions.table import AVERAGED
from bullettrain.evaluation.accuracy import Survival
from bullettrain.evaluation.specs import KINDS, Attack, as_dict
from bullettrain.lock import alone
from bullettrain.run_folder import RunError, RunFolder
from bullettrain.schema import SchemaError, conform

FILE = "evaluation.json"
Z95 = 1.959963984540054
"""97.5 % of a standard normal lie below."""
SAVE_SECONDS = 30.0
"""Time between two writings of how far an attack has come; a stop that is asked for writes at once."""
MOST_UNFINISHED = 16
"""Stopped attacks that are remembered; those of weights that are no more would pile up."""


@dataclass(frozen=True)
class Result:
    """One accuracy, what it is of, and how sure it is."""

    name: str
    attack: dict[str, Any]
    """All that determines the attack."""
    role: str
    """"attack", or "curve": a point of a curve over ε or steps, on a part of the images."""
    precision: str
    key: str
    """Changes with whatever the result depends on."""
    examples: int
    correct: int
    accuracy: float
    interval: tuple[float, float]
    """95 %, Wilson."""
    seconds: float
    per_class: list[float | None] = field(default_factory=list)
    survived: str = ""
    """Which examples, a bit each."""
    rounds: list[tuple[str, float]] = field(default_factory=list)
    """Accuracy after each round: clean, then restarts or the attacks of AutoAttack."""
    corruptions: dict[str, Any] = field(default_factory=dict)
    """Of `CorruptionDetails`, what is known; empty for other attacks."""
    notes: list[str] = field(default_factory=list)

    @property
    def mask(self) -> Tensor:
        """(n,) bool: which examples survived."""
        return unpack(self.survived, self.examples)

    @property
    def threat(self) -> tuple[str, float] | None:
        """Norm and ε, of an adversarial attack."""
        return (self.attack["norm"], self.attack["eps"]) if "eps" in self.attack else None


def new_result(attack: Attack, correct: float, examples: int, seconds: float, **details: Any) -> Result:
    """The result of an attack that leaves ``correct`` of ``examples``; ``details``: the other fields of `Result`."""
    how = (attack.name, as_dict(attack), "attack", "float32", "")
    share, interval = correct / examples, wilson(correct, examples)
    return Result(*how, examples, round(correct), share, interval, round(seconds, 2), **details)


def class_shares(alive: Tensor, labels: Tensor, classes: int) -> list[float | None]:
    """Share of each class's images that are ``alive`` (n,), of ``labels`` (n,); None for a class without images."""
    counts, kept = (torch.bincount(found.cpu(), minlength=classes) for found in (labels, labels.cpu()[alive]))
    return [int(k) / int(n) if n else None for k, n in zip(kept, counts, strict=True)]


@dataclass
class Entry:
    """All results of one network on one dataset."""

    model: str
    weights: str
    digest: str
    """Of the network."""
    data: str
    fingerprint: str
    """Of the images and labels."""
    examples: int
    classes: list[str]
    environment: dict[str, Any]
    results: list[Result] = field(default_factory=list)
    worst: list[dict[str, Any]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    recipe: str = ""
    among: dict[str, Any] = field(default_factory=dict)
    """Where the images are a part of a larger set: its `fingerprint`, `examples`, and a bit each whether `chosen`."""

    def find(self, key: str) -> Result | None:
        """The result with that key, if it is there."""
        return next((result for result in self.results if result.key == key), None)

    def add(self, result: Result) -> None:
        """Keep a result; one of the same attack with other circumstances goes."""
        same = (result.role, result.attack, result.precision)
        self.results = [r for r in self.results if (r.role, r.attack, r.precision) != same] + [result]


@dataclass(frozen=True)
class CorruptionDetails:
    """Accuracy under common corruptions."""

    accuracy: dict[str, list[float]]
    """By corruption, at severities 1 to 5; the extra ones too where their files are there."""
    missing: list[str]
    """Of the 15 that are averaged, those without a file."""
    over: int
    """Over how many of the 15 the mean is."""
    examples: int = 0
    """Images at each severity."""
    kept: str = ""
    """In how many of the averaged corruptions and severities each image is right, a byte each."""
    fingerprint: str = ""
    """Changes with the labels, and with some of the images of each averaged file."""
    mce: float | None = None
    """Mean corruption error: errors divided by the baseline's; 1 says as good as it, less is better."""

    @property
    def mean(self) -> float:
        """Mean accuracy over the averaged corruptions and their severities."""
        shares = [share for name in AVERAGED for share in self.accuracy.get(name, ())]
        return math.fsum(shares) / len(shares)


@dataclass
class Unfinished:
    """How far a stopped attack had come: a `Survival`, and the seconds so far."""

    alive: str
    pending: str
    batches: int
    shares: list[float]
    seconds: float


@dataclass
class Evaluations:
    """What `evaluation.json` holds."""

    format: Literal[1]
    evaluations: list[Entry]
    unfinished: dict[str, Unfinished] | None = None
    """By key."""


def read_evaluations(values: Any) -> Evaluations:
    """``values``, as JSON has them, checked against the types above.

    Raises:
        SchemaError: they are of another type, or an attack is none that there is.
    """
    content: Evaluations = conform(values, Evaluations)
    for entry in content.evaluations:
        for result in entry.results:
            settings = dict(result.attack)
            if (kind := KINDS.get(str(settings.pop("attack", None)))) is None:
                raise SchemaError(f"{result.name} is no attack; there are {', '.join(KINDS)}")
            conform(settings, kind, result.name)
            if result.corruptions:
                conform(result.corruptions, CorruptionDetails, result.name)
            if result.per_class and len(result.per_class) != len(entry.classes):
                raise SchemaError(f"{result.name} has {len(result.per_class)} classes of {len(entry.classes)}")
            if result.survived:
                result.mask  # noqa: B018 (a bit for every example, or a ValueError)
    return content


class Store:
    """`evaluation.json` in a folder, read once and renewed whole after every change."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.entries: list[Entry] = []
        self.unfinished: dict[str, Unfinished] = {}
        """How far attacks have come that were stopped, by key."""
        self.forgot = False
        """Whether results from before were dropped."""
        self._saved = time.monotonic()
        if folder.is_file():
            raise RunError(f"--out {folder} is a file; give a folder")
        try:
            values = RunFolder(folder).read_json(FILE)
            if values is not None:
                content = read_evaluations(values)
                self.entries, self.unfinished = content.evaluations, content.unfinished or {}
        except ValueError as error:
            raise RunError(
                f"{folder / FILE} is no evaluation that this version can read ({first_line(error)}); "
                "move it away, or choose another --out"
            ) from None

    def entry(self, fresh: Entry) -> Entry:
        """The entry of that network on those images: the kept one where nothing has changed since.

        Entries of the same name with other weights, or of as many images that are others, are no longer true.
        """

        def outdated(kept: Entry) -> bool:
            same = (kept.model, kept.weights) == (fresh.model, fresh.weights)
            images = (kept.data, kept.examples) == (fresh.data, fresh.examples)
            return same and (kept.digest != fresh.digest or images)

        for kept in self.entries:
            if (kept.digest, kept.fingerprint, kept.weights) == (fresh.digest, fresh.fingerprint, fresh.weights):
                # A run may have been renamed; of older entries it is not known what they are a part of.
                kept.model, kept.environment, kept.among = fresh.model, fresh.environment, fresh.among
                return kept
        self.entries = [*(kept for kept in self.entries if not outdated(kept)), fresh]
        return fresh

    def forget(self, entry: Entry, keys: Set[str]) -> None:
        """Drop results with these keys, and how far attacks have come; :meth:`save` writes it."""
        entry.results = [result for result in entry.results if result.key not in keys]
        self.unfinished = {key: state for key, state in self.unfinished.items() if key not in keys}
        self.forgot = True

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Hold the folder: a second evaluation that would write the same file is refused."""
        RunFolder(self.folder).make()
        try:
            with alone(self.folder, RunError(f"{self.folder} is in use: another evaluation is running there")):
                yield
        finally:
            with contextlib.suppress(OSError):
                self.folder.rmdir()  # only where nothing was written

    def save(self) -> None:
        """Write everything, whole or not at all."""
        self._saved = time.monotonic()
        content = asdict(Evaluations(1, self.entries, self.unfinished or None))
        RunFolder(self.folder).write_json(FILE, {key: value for key, value in content.items() if value is not None})

    def begun(self, key: str, n: int) -> tuple[Survival, float] | None:
        """How far an interrupted attack had come, and in how many seconds."""
        if (kept := self.unfinished.get(key)) is None:
            return None
        try:
            alive, pending = unpack(kept.alive, n), unpack(kept.pending, n)
        except ValueError:
            return None
        return Survival(alive, pending, kept.batches, list(kept.shares)), kept.seconds

    def keep(self, key: str, state: Survival, seconds: float) -> bool:
        """Note how far an attack has come, and write it where that is due; whether it was written."""
        alive, pending = pack(state.alive), pack(state.pending)
        self.unfinished[key] = Unfinished(alive, pending, state.batches, list(state.shares), round(seconds, 2))
        for stale in list(self.unfinished)[:-MOST_UNFINISHED]:
            del self.unfinished[stale]
        if due := time.monotonic() - self._saved > SAVE_SECONDS:
            self.save()
        return due


def wilson(correct: float, total: int) -> tuple[float, float]:
    """95 % confidence interval (Wilson's score) of a share of ``correct`` in ``total``; sound near 0 and 1 too."""
    if total < 1:
        raise ValueError("an interval needs at least one example")
    share, z2 = correct / total, Z95 * Z95
    middle = (share + z2 / (2 * total)) / (1 + z2 / total)
    reach = Z95 / (1 + z2 / total) * math.sqrt(share * (1 - share) / total + z2 / (4 * total * total))
    return max(0.0, middle - reach), min(1.0, middle + reach)


def worst_cases(results: Sequence[Result]) -> list[dict[str, Any]]:
    """For each norm, ε and precision that several attacks share: the share of images that survive all of them."""
    threats: dict[tuple[str, str, float], list[Result]] = {}
    for result in results:
        if result.threat is not None and result.survived:
            threats.setdefault((result.precision, *result.threat), []).append(result)
    cases = []
    for (precision, norm, eps), attacks in threats.items():
        if len(attacks) > 1:
            alive = torch.stack([result.mask for result in attacks]).all(dim=0)
            correct, examples = int(alive.sum()), len(alive)
            case: dict[str, Any] = {"precision": precision, "norm": norm, "eps": eps}
            case |= {"attacks": [result.name for result in attacks], "examples": examples, "correct": correct}
            cases.append(case | {"accuracy": correct / examples, "interval": wilson(correct, examples)})
    return cases


def pack(mask: Tensor) -> str:
    """(n,) bool as text, a bit each."""
    return base64.b64encode(np.packbits(mask.cpu().numpy()).tobytes()).decode("ascii")


def unpack(text: str, n: int) -> Tensor:
    """(n,) bool from :func:`pack`."""
    return torch.from_numpy(np.unpackbits(_bytes(text, -(-n // 8), n), count=n).astype(bool))


def pack_counts(counts: Tensor) -> str:
    """(n,) numbers from 0 to 255 as text, a byte each."""
    if int(counts.max()) > 255:
        raise ValueError(f"{int(counts.max())} does not fit into a byte")
    return base64.b64encode(counts.cpu().numpy().astype(np.uint8).tobytes()).decode("ascii")


def unpack_counts(text: str, n: int) -> Tensor:
    """(n,) numbers from :func:`pack_counts`."""
    return torch.from_numpy(_bytes(text, n, n).astype(np.int64))


def _bytes(text: str, length: int, n: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    found = np.frombuffer(base64.b64decode(text, validate=True), dtype=np.uint8)
    if len(found) != length:
        raise ValueError(f"{len(found)} bytes for {n} examples")
    return found
