"""Evaluate a network: every attack that is asked for, kept as it is done, and what follows from them together."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bullettrain.config.settings import ConfigError
from bullettrain.data import ImageSet, to_unit
from bullettrain.data.sets import fingerprint, sample
from bullettrain.evaluation import autoattack, corruptions
from bullettrain.evaluation.accuracy import (
    EvaluatedModel,
    Round,
    Survival,
    channels_last,
    clean_round,
    pgd_rounds,
    prepare,
    survive,
)
from bullettrain.evaluation.masking import masking_signs, too_short, unbounded
from bullettrain.evaluation.progress import EvaluationProgress
from bullettrain.evaluation.results import Entry, Result, Store, class_shares, new_result, pack, worst_cases
from bullettrain.evaluation.specs import APGD, PGD, Attack, AutoAttack, Clean, Corruptions, Defaults, as_dict
from bullettrain.loading import LoadedModel
from bullettrain.precision import Precision, arithmetic
from bullettrain.run_folder import environment

CURVE_STEPS = (1, 2, 5, 10, 20, 50, 100)
CURVE_EPS = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0)
"""Of the ε that the network is evaluated at."""


@dataclass(frozen=True)
class Plan:
    """What is to be evaluated, and how."""

    attacks: Sequence[Attack]
    precisions: Sequence[Precision] = ("float32",)
    batch_size: int = 500
    seed: int = 0
    compiled: bool = False
    curves: Defaults | None = None
    """Draw accuracy against ε and against steps, around this ε."""
    curve_images: int = 1000
    corruptions: Path | None = None
    mce_baseline: Mapping[str, Sequence[float]] | None = None
    overwrite: bool = False
    """Drop what there is of all this first."""
    images: int = 0
    """So many images, every class alike, also under each corruption at each severity; 0: all."""

    def __post_init__(self) -> None:
        if any(isinstance(attack, Corruptions) for attack in self.attacks) and not self.folder.is_dir():
            raise ConfigError(f"--corruptions {self.folder} is no folder; `bullettrain data corrupt` makes one")

    @property
    def folder(self) -> Path:
        """Of the files of corruptions."""
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
    """Evaluate ``model`` on ``images``; each result is in ``store`` before the next attack begins.

    Returns:
        Everything known of the network on this dataset, and the results that were asked for, in order.
    """
    if any(isinstance(a, AutoAttack) and not _is_fast(a, p) for a in plan.attacks for p in plan.precisions):
        autoattack.installed()  # say so before an hour of other attacks
    images, among = _choose(images, plan.images)
    network = prepare(model.network, images, device=device, data=data)
    whole = _Part("attack", images, torch.arange(len(images)))
    about = (model.name, model.weights, model.digest, data, whole.fingerprint, len(images), list(images.classes))
    recipe = model.config.recipe if model.config else ""
    entry = store.entry(Entry(*about, environment(device), recipe=recipe, among=among))
    runners = [AttackRunner(network, p, whole, entry, plan, device, store, progress) for p in plan.precisions]
    if plan.overwrite:  # all at once, so that a stopped evaluation can go on with what it has found itself
        store.forget(entry, {runner.key(*job) for runner in runners for job in runner.jobs})
        conclude(entry, images)
        store.save()
    asked: list[Result] = []
    for runner in runners:
        with arithmetic(runner.precision):
            asked += runner.run()
    conclude(entry, images)
    store.save()
    return entry, asked


def conclude(entry: Entry, images: ImageSet) -> None:
    """What the results say together: the worst case over attacks on the same threat, and what to mistrust."""
    warnings = []
    entry.worst = worst_cases([result for result in entry.results if result.role == "attack"])
    for precision in dict.fromkeys(result.precision for result in entry.results):
        results = [result for result in entry.results if result.precision == precision]
        warnings += masking_signs(results, dimensions=images.images[0].numel()) + too_short(results)
        warnings += [f"{result.name}: {note}" for result in results for note in result.notes]
    entry.warnings = list(dict.fromkeys(warnings))


@dataclass(frozen=True)
class _Part:
    """Images that attacks are run on: all that are evaluated, or those of the curves."""

    role: str
    images: ImageSet
    rows: Tensor
    """Their places among all."""

    @cached_property
    def fingerprint(self) -> str:
        """Changes with any image and any label."""
        return fingerprint((self.images,), most=len(self.images))


@dataclass
class AttackRunner:
    """One network in one precision."""

    network: nn.Module
    precision: Precision
    whole: _Part
    entry: Entry
    plan: Plan
    device: torch.device
    store: Store
    progress: EvaluationProgress

    @cached_property
    def model(self) -> EvaluatedModel:
        """What attacks search with."""
        dtype = torch.bfloat16 if self.precision == "bf16" else torch.float32
        return EvaluatedModel(self.network, dtype=dtype, compiled=self.plan.compiled).eval()

    @cached_property
    def jobs(self) -> list[tuple[Attack, _Part]]:
        """Clean accuracy first, since every attack begins with it; what is asked for; the points of the curves."""
        attacks = [Clean(), *(attack for attack in self.plan.attacks if not isinstance(attack, Clean))]
        jobs: list[tuple[Attack, _Part]] = [(attack, self.whole) for attack in attacks]
        if self.plan.curves is not None:
            images = self.whole.images
            rows = sample(images.labels, min(self.plan.curve_images, len(images))).cpu()
            part = _Part("curve", images.subset(rows), rows)
            jobs += [(point, part) for point in curve_points(self.plan.curves, images.images[0].numel())]
        return jobs

    def run(self) -> list[Result]:
        """Everything, each result from before where it can be; those that were asked for."""
        results: list[Result] = []
        for attack, part in self.jobs:
            results.append(self._result(attack, part, results[0].mask[part.rows] if results else None))
        if self.plan.curves is not None:
            # Points of other curves, around another ε or on other images, have no place beside these.
            drawn, curve = {result.key for result in results}, ("curve", self.precision)
            kept = [r for r in self.entry.results if r.key in drawn or (r.role, r.precision) != curve]
            self.entry.results = kept
        return [result for result in results if result.role == "attack"]

    def key(self, attack: Attack, part: _Part) -> str:
        """A short text that changes with whatever the result of an attack depends on."""
        parts: dict[str, Any] = {"network": self.entry.digest, "images": part.fingerprint, "attack": as_dict(attack)}
        parts |= {"precision": self.precision, "seed": self.plan.seed, "batch_size": self.plan.batch_size}
        parts["device"] = self.device.type
        if isinstance(attack, AutoAttack):
            fast = _is_fast(attack, self.precision)
            parts["package"] = autoattack.FAST_VERSION if fast else autoattack.installed()
        if isinstance(attack, Corruptions):
            parts |= {"images": str(corruptions.list_files(self.plan.folder)), "baseline": self.plan.mce_baseline}
            parts |= {"size": self.plan.images} if self.plan.images else {}
        if self.precision != "float32":
            parts["judged"] = "float32"
        text = json.dumps(parts, sort_keys=True, default=str)
        return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()

    def _result(self, attack: Attack, part: _Part, clean: Tensor | None) -> Result:
        """One attack on images of which ``clean`` (n,) are classified correctly; from before where it can be."""
        key = self.key(attack, part)
        kept = self.entry.find(key)
        if kept is not None:
            found = kept
        elif isinstance(attack, Corruptions):
            found = self._corruptions(attack)
        else:
            found = self._attack(attack, part, key, clean)
        result = dataclasses.replace(found, role=part.role, precision=self.precision, key=key)
        self.entry.add(result)
        self.store.unfinished.pop(key, None)
        self.store.save()
        self.progress.done(result, kept=kept is not None)
        return result

    def _attack(self, attack: Attack, part: _Part, key: str, clean: Tensor | None) -> Result:
        """Put the images through the rounds of an attack, from where a stop has left it."""
        images, size = part.images, self.plan.batch_size
        notes = autoattack.Notes()
        rounds = [clean_round(self.model), *self._rounds(attack, notes, lambda passes: bar.partly(passes))]
        state, before = self.store.begun(key, len(images)) or (Survival.fresh(len(images)), 0.0)
        if clean is not None and not state.shares:
            state.alive = clean.clone()
            state.end_round()
        began = time.monotonic()

        def tick(passes: int) -> None:
            seconds, number = time.monotonic() - began, len(state.shares)
            due, ended = self.store.keep(key, state, before + seconds), state.batches == 0
            bar.left(left := state.left(rounds, size))
            if left and bar.done and (due or (ended and isinstance(attack, AutoAttack))):
                name = f"after {rounds[number - 1].name}" if ended else f"in {rounds[number].name}"
                self.progress.part(name, state.share, seconds, seconds * left / bar.done)
            bar(passes)

        try:
            with self.progress.attacking(attack.name, state.left(rounds, size)) as bar:
                survive(
                    rounds,
                    images,
                    device=self.device,
                    batch_size=size,
                    seed=self.plan.seed,
                    channels_last=channels_last(self.device),
                    state=state,
                    tick=tick,
                )
        except BaseException:
            if key in self.store.unfinished:
                self.store.save()  # also on Ctrl-C: what is done is done
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

    def _rounds(self, attack: Attack, notes: autoattack.Notes, partly: Callable[[int], None]) -> list[Round]:
        """The rounds of an attack, which will remark in ``notes``, and say within a batch how far they are."""
        if isinstance(attack, PGD):
            return pgd_rounds(self.model, attack)
        if not isinstance(attack, AutoAttack):
            return []
        classes = len(self.whole.images.classes)
        names = autoattack.attack_names(classes, only_apgd=isinstance(attack, APGD))
        if "apgd-t" not in names:
            notes.warning(f"apgd-t is left out: its loss compares four classes, and there are {classes}")
        some = to_unit(self.whole.images.images[:2].to(self.device), channels_last=channels_last(self.device))
        how: dict[str, Any] = {"classes": classes, "seed": self.plan.seed, "notes": notes, "images": some}
        if _is_fast(attack, self.precision):
            return autoattack.fast_rounds(self.model, attack, names, tick=partly, **how)
        return autoattack.autoattack_rounds(self.model, attack, names, **how)

    def _corruptions(self, attack: Corruptions) -> Result:
        """Mean accuracy over common corruptions, from a folder of them."""
        folder, began = self.plan.folder, time.monotonic()
        total = corruptions.count_images(folder, self.plan.images)
        with self.progress.attacking(attack.name, total) as bar:
            found = corruptions.corruption_accuracy(
                self.model,
                folder,
                classes=len(self.whole.images.classes),
                device=self.device,
                batch_size=self.plan.batch_size,
                size=self.plan.images,
                baseline=self.plan.mce_baseline,
                tick=bar,
            )
        return new_result(
            attack,
            found.mean * found.examples,  # of the images that were corrupted: their copies are no independent draws
            found.examples,
            time.monotonic() - began,
            corruptions={name: value for name, value in vars(found).items() if value is not None},
        )


def curve_points(at: Defaults, dimensions: int) -> list[Attack]:
    """Accuracy against ε with 20 steps and against steps at ε, by ε, then by steps; the first is without an attack.

    Step sizes are those of `--attack pgd20` and the like: what is there already is taken, and agrees.
    """
    norm, eps = at.norm, at.radius(at.norm)
    most = unbounded(norm, dimensions)
    points = {(20, factor * eps) for factor in CURVE_EPS if factor * eps < most} | {(20, most)}
    points |= {(steps, eps) for steps in CURVE_STEPS}
    ordered = sorted(points, key=lambda point: (point[1], point[0]))
    return [Clean(), *(PGD(steps, 1, at.step_size(steps, norm, r), "ce", norm, r) for steps, r in ordered)]


def _choose(images: ImageSet, size: int) -> tuple[ImageSet, dict[str, Any]]:
    """``size`` of the images, every class alike, and which of them these are; 0, or as many as there are: all."""
    if not 0 < size < len(images):
        return images, {}
    rows = sample(images.labels, size)
    chosen = torch.zeros(len(images), dtype=torch.bool)
    chosen[rows] = True
    about = fingerprint((images,), most=len(images))
    return images.subset(rows), {"fingerprint": about, "examples": len(images), "chosen": pack(chosen)}


def _is_fast(attack: Attack, precision: Precision) -> bool:
    """Whether the frozen copy in bf16 searches, not the package."""
    return isinstance(attack, AutoAttack) and attack.norm == "linf" and precision == "bf16"
