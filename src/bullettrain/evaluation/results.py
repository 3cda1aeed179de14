"""Results of evaluations and the file that stores them, `evaluation.json`."""

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

from bullettrain.corruptions.table import AVERAGED
from bullettrain.errors import raised_as
from bullettrain.evaluation.accuracy import Survival
from bullettrain.evaluation.specs import KINDS, AttackSpec, as_dict, threat_in_words
from bullettrain.lock import locked
from bullettrain.run_folder import RunError, RunFolder
from bullettrain.schema import SchemaError, conform
from bullettrain.validation import check_known

FILE = "evaluation.json"
Z95 = 1.959963984540054
"""97.5 % quantile of the standard normal distribution."""
SAVE_SECONDS = 30.0
"""Seconds between two saves of a running attack."""
MAX_UNFINISHED = 16
"""Maximum number of interrupted attacks that are stored; older ones are dropped."""


@dataclass(frozen=True)
class Result:
    """Accuracy of one network under one attack, with its confidence interval."""

    name: str
    attack: dict[str, Any]
    """Kind and settings of the attack."""
    role: str
    """"attack", or "curve": a point of a curve over ε or steps, on some of the images."""
    precision: str
    key: str
    """Digest of everything that the result depends on."""
    examples: int
    correct: int
    accuracy: float
    interval: tuple[float, float]
    """95 % confidence interval (Wilson)."""
    seconds: float
    per_class: list[float | None] = field(default_factory=list)
    survived: str = ""
    """Which examples survived, packed by :func:`pack`."""
    rounds: list[tuple[str, float]] = field(default_factory=list)
    """Accuracy after each round: clean, then restarts or the attacks of AutoAttack."""
    corruptions: dict[str, Any] = field(default_factory=dict)
    """Fields of :class:`CorruptionDetails` that are not None; empty for other attacks."""
    notes: list[str] = field(default_factory=list)

    @property
    def mask(self) -> Tensor:
        """(n,) bool: which examples survived."""
        return unpack(self.survived, self.examples)

    @property
    def threat(self) -> tuple[str, float] | None:
        """Norm and ε; None for clean images and corruptions."""
        return (self.attack["norm"], self.attack["eps"]) if "eps" in self.attack else None

    @property
    def threat_name(self) -> str:
        """Norm and ε as text, e.g. "L∞ 8/255"; empty if there is no threat."""
        return threat_in_words(*self.threat) if self.threat else ""


def new_result(attack: AttackSpec, correct: float, examples: int, seconds: float, **details: Any) -> Result:
    """Return the result of an attack with ``correct`` of ``examples`` right; ``details`` are other fields."""
    identity = (attack.name, as_dict(attack), "attack", "float32", "")
    accuracy, interval = correct / examples, wilson(correct, examples)
    return Result(*identity, examples, round(correct), accuracy, interval, round(seconds, 2), **details)


def class_shares(alive: Tensor, labels: Tensor, classes: int) -> list[float | None]:
    """Return the accuracy of each class, given which images are ``alive`` (n,); None for a class without images."""
    labels = labels.cpu()
    totals, right = (torch.bincount(part, minlength=classes).tolist() for part in (labels, labels[alive]))
    return [count / total if total else None for count, total in zip(right, totals, strict=True)]


@dataclass
class Entry:
    """All results of one network on one dataset."""

    model: str
    weights: str
    digest: str
    """Digest of the network."""
    data: str
    fingerprint: str
    """Digest of the images and labels."""
    examples: int
    classes: list[str]
    environment: dict[str, Any]
    results: list[Result] = field(default_factory=list)
    worst: list[dict[str, Any]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    recipe: str = ""
    among: dict[str, Any] = field(default_factory=dict)
    """If the images are part of a larger set: its `fingerprint`, its `examples`, and which were `chosen`, packed."""

    def find(self, key: str) -> Result | None:
        """Return the result with this key, if there is one."""
        return next((result for result in self.results if result.key == key), None)

    def add(self, result: Result) -> None:
        """Add a result. It replaces one of the same attack, role and precision."""
        same = (result.role, result.attack, result.precision)
        self.results = [r for r in self.results if (r.role, r.attack, r.precision) != same] + [result]


@dataclass(frozen=True)
class CorruptionDetails:
    """Accuracy under common corruptions."""

    accuracy: dict[str, list[float]]
    """By corruption, at severities 1 to 5, including extra corruptions with a file."""
    missing: list[str]
    """Averaged corruptions that have no file."""
    over: int
    """Number of averaged corruptions that have a file, of 15."""
    examples: int = 0
    """Number of images at each severity."""
    kept: str = ""
    """For each image, the number of averaged corruptions and severities at which it is right, packed."""
    fingerprint: str = ""
    """Digest of the labels and of one image of each averaged file and severity."""
    mce: float | None = None
    """Mean corruption error: errors divided by the baseline's. Lower is better; 1 equals the baseline."""

    @property
    def mean(self) -> float:
        """Mean accuracy over averaged corruptions and severities."""
        shares = [share for name in AVERAGED for share in self.accuracy.get(name, ())]
        return math.fsum(shares) / len(shares)


@dataclass
class Unfinished:
    """State of an interrupted attack: a packed :class:`Survival`, and the seconds so far."""

    alive: str
    pending: str
    batches: int
    shares: list[float]
    seconds: float


@dataclass
class Evaluations:
    """Content of `evaluation.json`."""

    format: Literal[1]
    evaluations: list[Entry]
    unfinished: dict[str, Unfinished] | None = None
    """Interrupted attacks, by key."""


def read_evaluations(values: Any) -> Evaluations:
    """Convert parsed JSON into the types above.

    Raises:
        SchemaError: a value has another type, or an attack is unknown.
    """
    content: Evaluations = conform(values, Evaluations)
    for entry in content.evaluations:
        for result in entry.results:
            settings = dict(result.attack)
            kind = check_known(str(settings.pop("attack", None)), KINDS, f"{result.name}: attack is", error=SchemaError)
            attack = conform(settings, KINDS[kind], result.name)
            if missing := vars(attack).keys() - settings.keys():  # a default may not be what was run
                raise SchemaError(f"{result.name}.{min(missing)} is missing")
            if result.corruptions:
                conform(result.corruptions, CorruptionDetails, result.name)
            if result.per_class and len(result.per_class) != len(entry.classes):
                raise SchemaError(f"{result.name} has {len(result.per_class)} classes of {len(entry.classes)}")
            if result.survived:
                result.mask  # noqa: B018 (raises ValueError if its length is wrong)
    return content


class Store:
    """`evaluation.json` in a folder: read once, and written as a whole by :meth:`save`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.entries: list[Entry] = []
        self.unfinished: dict[str, Unfinished] = {}
        """Interrupted attacks, by key."""
        self.forgot = False
        """Whether :meth:`forget` has dropped earlier results."""
        self._saved = time.monotonic()
        if folder.is_file():
            raise RunError(f"--out {folder} is a file; give a folder")
        unread = f"{folder / FILE} is no evaluation that this version can read ({{error}})"
        with raised_as(RunError, f"{unread}; move it away, or choose another --out", ValueError):
            values = RunFolder(folder).read_json(FILE)
            if values is not None:
                content = read_evaluations(values)
                self.entries, self.unfinished = content.evaluations, content.unfinished or {}

    def entry(self, fresh: Entry) -> Entry:
        """Return the stored entry of the same network and images, or add ``fresh``.

        Drops entries that are out of date: same name, but the same number of other images, or, in the folder of a run,
        other weights.
        """

        own = RunFolder(self.folder).exists  # elsewhere, several networks may have one name

        def outdated(kept: Entry) -> bool:
            if (kept.model, kept.weights) != (fresh.model, fresh.weights):
                return False
            images = (kept.data, kept.examples) == (fresh.data, fresh.examples)
            return images if kept.digest == fresh.digest else own

        for kept in self.entries:
            if (kept.digest, kept.fingerprint, kept.weights) == (fresh.digest, fresh.fingerprint, fresh.weights):
                # The run may have been renamed, and older files have no `among`.
                kept.model, kept.environment, kept.among = fresh.model, fresh.environment, fresh.among
                return kept
        self.entries = [*(kept for kept in self.entries if not outdated(kept)), fresh]
        return fresh

    def forget(self, entry: Entry, keys: Set[str]) -> None:
        """Drop the results and interrupted attacks with these keys, without saving."""
        entry.results = [result for result in entry.results if result.key not in keys]
        self.unfinished = {key: state for key, state in self.unfinished.items() if key not in keys}
        self.forgot = True

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the folder. Raises RunError if another evaluation is running there."""
        RunFolder(self.folder).make()
        try:
            with locked(self.folder, RunError(f"{self.folder} is in use: another evaluation is running there")):
                yield
        finally:
            with contextlib.suppress(OSError):
                self.folder.rmdir()  # fails unless it is empty

    def save(self) -> None:
        """Write the file atomically."""
        self._saved = time.monotonic()
        content = asdict(Evaluations(1, self.entries, self.unfinished or None))
        RunFolder(self.folder).write_json(FILE, {key: value for key, value in content.items() if value is not None})

    def begun(self, key: str, n: int) -> tuple[Survival, float] | None:
        """Return the state of an interrupted attack and its seconds so far, if there is one."""
        if (kept := self.unfinished.get(key)) is None:
            return None
        try:
            alive, pending = unpack(kept.alive, n), unpack(kept.pending, n)
        except ValueError:
            return None
        return Survival(alive, pending, kept.batches, list(kept.shares)), kept.seconds

    def keep(self, key: str, state: Survival, seconds: float) -> bool:
        """Store the state of a running attack. Saves the file, and returns True, if the last save is long ago."""
        alive, pending = pack(state.alive), pack(state.pending)
        self.unfinished[key] = Unfinished(alive, pending, state.batches, list(state.shares), round(seconds, 2))
        for stale in list(self.unfinished)[:-MAX_UNFINISHED]:
            del self.unfinished[stale]
        if due := time.monotonic() - self._saved > SAVE_SECONDS:
            self.save()
        return due


def wilson(correct: float, total: int) -> tuple[float, float]:
    """Return the 95 % confidence interval (Wilson's score) of the share ``correct / total``."""
    if total < 1:
        raise ValueError("an interval needs at least one example")
    share, z2 = correct / total, Z95 * Z95
    middle = (share + z2 / (2 * total)) / (1 + z2 / total)
    reach = Z95 / (1 + z2 / total) * math.sqrt(share * (1 - share) / total + z2 / (4 * total * total))
    return max(0.0, middle - reach), min(1.0, middle + reach)


def worst_cases(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Return, for each norm, ε and precision of several attacks, the share of images that survive all of them."""
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
    """Encode (n,) bool as text, one bit each."""
    return base64.b64encode(np.packbits(mask.cpu().numpy()).tobytes()).decode("ascii")


def unpack(text: str, n: int) -> Tensor:
    """Decode (n,) bool from :func:`pack`."""
    return torch.from_numpy(np.unpackbits(_bytes(text, -(-n // 8), n), count=n).astype(bool))


def pack_counts(counts: Tensor) -> str:
    """Encode (n,) numbers from 0 to 255 as text, one byte each."""
    if int(counts.max()) > 255:
        raise ValueError(f"{int(counts.max())} does not fit into a byte")
    return base64.b64encode(counts.cpu().numpy().astype(np.uint8).tobytes()).decode("ascii")


def unpack_counts(text: str, n: int) -> Tensor:
    """Decode (n,) numbers from :func:`pack_counts`."""
    return torch.from_numpy(_bytes(text, n, n).astype(np.int64))


def _bytes(text: str, length: int, n: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    content = np.frombuffer(base64.b64decode(text, validate=True), dtype=np.uint8)
    if len(content) != length:
        raise ValueError(f"{len(content)} bytes for {n} examples")
    return content
