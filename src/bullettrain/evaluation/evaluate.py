"""Evaluate a network under a list of attacks. Every result is saved as soon as it is known."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from bullettrain.config.settings import ConfigError
from bullettrain.data import ImageSet, to_unit
from bullettrain.data.sets import fingerprint, sample
from bullettrain.evaluation import accuracy, autoattack, corruptions, fast_autoattack
from bullettrain.evaluation.autoattack import Notes, PackageEnsemble
from bullettrain.evaluation.fast_autoattack import FastEnsemble
from bullettrain.evaluation.masking import LOOKED_AT, doubts, masking_signs, too_short, unbounded
from bullettrain.evaluation.progress import EvaluationProgress
from bullettrain.evaluation.results import Entry, Result, Store, class_shares, new_result, pack, worst_cases
from bullettrain.evaluation.specs import PGD, AttackSpec, AutoAttack, Clean, Corruptions, Defaults, as_dict
from bullettrain.loading import LoadedModel
from bullettrain.precision import Precision, arithmetic
from bullettrain.run_folder import environment

CURVE_STEPS = (1, 2, 5, 10, 20, 50, 100)
CURVE_EPS = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0)
"""Factors of the ε that the network is evaluated at."""


@dataclass(frozen=True)
class Plan:
    """What to evaluate, and how."""

    attacks: Sequence[AttackSpec]
    precisions: Sequence[Precision] = ("float32",)
    batch_size: int = 500
    seed: int = 0
    compiled: bool = False
    curves: Defaults | None = None
    """If given, also compute accuracy against ε and against steps, around this ε."""
    curve_images: int = 1000
    corruptions: Path | None = None
    """Folder with the files of common corruptions."""
    mce_baseline: Mapping[str, Sequence[float]] | None = None
    overwrite: bool = False
    """Drop earlier results of these attacks first."""
    images: int = 0
    """Number of images, stratified by class; with corruptions, at each severity. 0: all."""

    def __post_init__(self) -> None:
        if any(isinstance(attack, Corruptions) for attack in self.attacks) and not self.folder.is_dir():
            raise ConfigError(f"--corruptions {self.folder} is no folder; `bullettrain data corrupt` makes one")

    @property
    def folder(self) -> Path:
        """The folder of corruptions; raises ConfigError if it is not given."""
        if self.corruptions is None:
            raise ConfigError("--attack corruptions needs the folder that holds them: --corruptions DIR")
        return self.corruptions


def evaluate(
    model: LoadedModel,
    images: ImageSet,
    data: str,
    plan: Plan,
    *,
    device: torch.device,
    store: Store,
    progress: EvaluationProgress,
) -> tuple[Entry, list[Result]]:
    """Evaluate ``model`` on ``images``. Each result is saved in ``store`` before the next attack starts.

    Returns:
        All results of the network on this dataset, and those that ``plan`` asks for, in order.
    """
    for attack in plan.attacks:
        for precision in plan.precisions:
            if isinstance(attack, AutoAttack):
                _version(attack, precision)  # raises now, not after an hour of other attacks
    images, among = _choose(images, plan.images)
    network = accuracy.prepare(model.network, images, device=device, data=data)
    jobs = _jobs(plan, images)
    network_data = (model.name, model.weights, model.digest, data, jobs[0].fingerprint)
    recipe = model.config.recipe if model.config else ""
    fresh = Entry(*network_data, len(images), list(images.classes), environment(device), recipe=recipe, among=among)
    entry = store.entry(fresh)
    runners = [AttackRunner(network, precision, entry, plan, device, store, progress) for precision in plan.precisions]
    if plan.overwrite:  # drop everything at once: an interrupted evaluation resumes from its own results
        store.forget(entry, {runner.key(job) for runner in runners for job in jobs})
        conclude(entry, images)
        store.save()
    asked: list[Result] = []
    for runner in runners:
        with arithmetic(runner.precision):
            asked += runner.run(jobs)
    conclude(entry, images)
    store.save()
    return entry, asked


def conclude(entry: Entry, images: ImageSet) -> None:
    """Update what follows from all results together: worst cases and warnings."""
    warnings = []
    entry.worst = worst_cases([result for result in entry.results if result.role == "attack"])
    for precision in dict.fromkeys(result.precision for result in entry.results):
        results = [result for result in entry.results if result.precision == precision]
        warnings += masking_signs(results, dimensions=images.images[0].numel()) + too_short(results)
        noted = [result for result in results if result.notes]
        names: dict[str, list[str]] = {}
        # A point of a curve speaks for all points, if no attack does.
        for result in [result for result in noted if result.role == "attack"] or noted[:1]:
            for note in result.notes:
                names.setdefault(note, []).append(result.name)
        warnings += [f"{', '.join(dict.fromkeys(attacks))}: {note}" for note, attacks in names.items()]
    entry.warnings = list(dict.fromkeys(warnings))


@dataclass(frozen=True)
class _Job:
    """One attack on all images, or one point of a curve on some of them."""

    attack: AttackSpec
    role: Literal["attack", "curve"]
    images: ImageSet
    rows: Tensor
    """Indices of ``images`` among all."""
    fingerprint: str
    """Changes with any image and any label."""


def _jobs(plan: Plan, images: ImageSet) -> list[_Job]:
    """Return clean accuracy first, since every attack starts from it; then the attacks, then points of curves."""
    whole = (images, torch.arange(len(images)), fingerprint((images,), most=len(images)))
    attacks = [Clean(), *(attack for attack in plan.attacks if not isinstance(attack, Clean))]
    jobs = [_Job(attack, "attack", *whole) for attack in attacks]
    if plan.curves is not None:
        rows = sample(images.labels, min(plan.curve_images, len(images))).cpu()
        some = images.subset(rows)
        part = (some, rows, fingerprint((some,), most=len(some)))
        jobs += [_Job(point, "curve", *part) for point in curve_points(plan.curves, images.images[0].numel())]
    return jobs


@dataclass
class AttackRunner:
    """Runs attacks on one network in one precision."""

    network: nn.Module
    precision: Precision
    entry: Entry
    plan: Plan
    device: torch.device
    store: Store
    progress: EvaluationProgress

    @cached_property
    def model(self) -> accuracy.EvaluatedModel:
        """The network as attacks see it."""
        dtype = torch.bfloat16 if self.precision == "bf16" else torch.float32
        return accuracy.EvaluatedModel(self.network, dtype=dtype, compiled=self.plan.compiled).eval()

    def run(self, jobs: Sequence[_Job]) -> list[Result]:
        """Return the results of the attacks among ``jobs``, stored ones where nothing has changed."""
        results: list[Result] = []
        for job in jobs:
            key = self.key(job)
            stored = self.entry.find(key)
            if stored is not None:
                result = stored
            elif isinstance(job.attack, Corruptions):
                result = self._corruptions(job.attack)
            else:
                result = self._attack(job, key, results[0].mask[job.rows] if results else None)
            result = dataclasses.replace(result, role=job.role, precision=self.precision, key=key)
            self.entry.add(result)
            self.store.unfinished.pop(key, None)
            self.store.save()
            self.progress.done(result, kept=stored is not None)
            results.append(result)
        if self.plan.curves is not None:  # drop points of earlier curves: another ε, or other images
            keys, curve = {result.key for result in results}, ("curve", self.precision)
            self.entry.results = [r for r in self.entry.results if r.key in keys or (r.role, r.precision) != curve]
        return [result for result in results if result.role == "attack"]

    def key(self, job: _Job) -> str:
        """Return a digest of everything that the result depends on."""
        attack, plan = job.attack, self.plan
        parts: dict[str, Any] = {"network": self.entry.digest, "images": job.fingerprint, "attack": as_dict(attack)}
        parts |= {"precision": self.precision, "seed": plan.seed, "batch_size": plan.batch_size}
        parts["device"] = self.device.type
        if isinstance(attack, AutoAttack):
            parts["package"] = _version(attack, self.precision)
        if isinstance(attack, Corruptions):
            parts |= {"images": str(corruptions.list_files(plan.folder)), "baseline": plan.mce_baseline}
            parts |= {"size": plan.images} if plan.images else {}
        if self.precision != "float32":
            parts["judged"] = "float32"
        text = json.dumps(parts, sort_keys=True, default=str)
        return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()

    def _attack(self, job: _Job, key: str, clean: Tensor | None) -> Result:
        """Run an attack, from where it was interrupted; ``clean`` (n,) bool: images that are classified correctly."""
        attack, images, size = job.attack, job.images, self.plan.batch_size
        notes = Notes()
        rounds = [accuracy.clean_round(self.model), *self._rounds(job, notes, lambda passes: bar.partly(passes))]
        if isinstance(attack, PGD) and clean is not None and clean.any():
            few = clean.nonzero()[: min(LOOKED_AT, size), 0]
            x, y = self._images(images, few), images.labels[few].to(self.device)
            notes += doubts(self.model, x, y, attack, self.plan.seed)
        state, before = self.store.begun(key, len(images)) or (accuracy.Survival.fresh(len(images)), 0.0)
        if clean is not None and not state.shares:
            state.alive = clean.clone()
            state.end_round()
        began = time.monotonic()
        first = 0.0, 0  # seconds and passes of the first batch, which may compile or capture

        def tick(passes: int) -> None:
            nonlocal first
            seconds, number = time.monotonic() - began, len(state.shares)
            saved, ended = self.store.keep(key, state, before + seconds), state.batches == 0
            bar.left(left := state.left(rounds, size))
            bar(passes)
            if left and bar.done and (saved or (ended and isinstance(attack, AutoAttack))):
                name = f"after {rounds[number - 1].name}" if ended else f"in {rounds[number].name}"
                passed, done = (seconds - first[0], bar.done - first[1]) if bar.done > first[1] else (seconds, bar.done)
                self.progress.part(name, state.share, seconds, passed * left / done)
            first = first if first[1] else (seconds, bar.done)

        how: dict[str, Any] = {"device": self.device, "batch_size": size, "seed": self.plan.seed}
        try:
            with self.progress.attacking(attack.name, state.left(rounds, size)) as bar:
                accuracy.survive(
                    rounds, images, channels_last=accuracy.channels_last(self.device), state=state, tick=tick, **how
                )
        except BaseException:  # also on Ctrl-C
            if key in self.store.unfinished:
                self.store.save()
            raise
        return new_result(
            attack,
            int(state.alive.sum()),
            len(images),
            before + time.monotonic() - began,
            per_class=class_shares(state.alive, images.labels, len(images.classes)),
            survived=pack(state.alive),
            rounds=list(zip([part.name for part in rounds], state.shares, strict=True)),
            notes=list(notes),
        )

    def _rounds(self, job: _Job, notes: Notes, tick: Callable[[int], None]) -> list[accuracy.Round]:
        """Return the rounds of an attack after the clean one."""
        if isinstance(job.attack, PGD):
            return accuracy.pgd_rounds(self.model, job.attack)
        if not isinstance(job.attack, AutoAttack):
            return []
        few = self._images(job.images, slice(2))
        kind = FastEnsemble if _is_fast(job.attack, self.precision) else PackageEnsemble
        return kind(self.model, job.attack, few, len(job.images.classes), self.plan.seed, notes, tick).rounds()

    def _images(self, images: ImageSet, rows: Tensor | slice) -> Tensor:
        """Return these images as attacks get them, (m, C, H, W) on the device."""
        return to_unit(images.images[rows].to(self.device), channels_last=accuracy.channels_last(self.device))

    def _corruptions(self, attack: Corruptions) -> Result:
        """Return the mean accuracy over the common corruptions in the plan's folder."""
        folder, began = self.plan.folder, time.monotonic()
        with self.progress.attacking(attack.name, corruptions.count_images(folder, self.plan.images)) as bar:
            details = corruptions.corruption_accuracy(
                self.model,
                folder,
                classes=len(self.entry.classes),
                device=self.device,
                batch_size=self.plan.batch_size,
                size=self.plan.images,
                baseline=self.plan.mce_baseline,
                tick=bar,
            )
        # Of the uncorrupted images: corrupted copies of one image are not independent.
        correct, seconds = details.mean * details.examples, time.monotonic() - began
        known = {name: value for name, value in vars(details).items() if value is not None}
        return new_result(attack, correct, details.examples, seconds, corruptions=known)


def curve_points(at: Defaults, dimensions: int) -> list[AttackSpec]:
    """Return clean accuracy, then PGD-20 over ε and PGD at ε over steps, sorted by ε, then by steps.

    Step sizes are those of `--attack pgd20` and the like, so that a stored result of the same name is reused.
    """
    norm, eps = at.norm, at.radius(at.norm)
    largest = unbounded(norm, dimensions)
    points = {(20, factor * eps) for factor in CURVE_EPS if factor * eps < largest} | {(20, largest)}
    points |= {(steps, eps) for steps in CURVE_STEPS}
    ordered = sorted(points, key=lambda point: (point[1], point[0]))
    return [Clean(), *(PGD(steps, 1, at.step_size(steps, norm, r), "ce", norm, r) for steps, r in ordered)]


def _choose(images: ImageSet, size: int) -> tuple[ImageSet, dict[str, Any]]:
    """Return ``size`` images, stratified by class, and which ones they are; all of them if ``size`` is 0."""
    if not 0 < size < len(images):
        return images, {}
    rows = sample(images.labels, size)
    chosen = torch.zeros(len(images), dtype=torch.bool).index_fill(0, rows.cpu(), True)
    whole = fingerprint((images,), most=len(images))
    return images.subset(rows), {"fingerprint": whole, "examples": len(images), "chosen": pack(chosen)}


def _is_fast(attack: AutoAttack, precision: Precision) -> bool:
    """Return whether the search in bf16 runs AutoAttack, not the package."""
    return attack.norm == "linf" and precision == "bf16"


def _version(attack: AutoAttack, precision: Precision) -> str:
    """Return the version of what runs AutoAttack. Raises ImportError if that is a package that is not installed."""
    return fast_autoattack.VERSION if _is_fast(attack, precision) else autoattack.installed()
