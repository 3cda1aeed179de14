"""Judge a network: every attack that is asked for, kept as it is done, and what follows from them together."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bullettrain.config.settings import ConfigError
from bullettrain.corruptions.files import LABELS
from bullettrain.corruptions.table import SEVERITIES
from bullettrain.data import ImageSet, to_unit
from bullettrain.data.sets import fingerprint, sample
from bullettrain.evaluation import autoattack
from bullettrain.evaluation.evaluated_model import EvaluatedModel, channels_last, ready
from bullettrain.evaluation.fast_autoattack import VERSION, fast_rounds
from bullettrain.evaluation.load_model import LoadedModel
from bullettrain.evaluation.masking import masking_signs, too_short, unbounded
from bullettrain.evaluation.progress import EvaluationProgress
from bullettrain.evaluation.results import Entry, Result, Store, key_of, pack, pack_counts, result_of, worst_cases
from bullettrain.evaluation.rounds import pgd_rounds
from bullettrain.evaluation.specs import APGD, PGD, Attack, AutoAttack, Clean, Corruptions, Defaults, as_dict
from bullettrain.evaluation.statistics import wilson
from bullettrain.evaluation.survival import Round, Survival, clean_round, survive
from bullettrain.precision import Precision, arithmetic
from bullettrain.progress import EvaluationBar
from bullettrain.run_folder import environment

CURVE_STEPS = (1, 2, 5, 10, 20, 50, 100)
CURVE_EPS = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0)
"""Of the ε that the network is judged at."""
SAVE_SECONDS = 30.0
"""Time between two writings of how far an attack has come; a stop that is asked for writes at once."""


@dataclass(frozen=True)
class Plan:
    """What is to be done."""

    attacks: Sequence[Attack]
    precisions: Sequence[Precision] = ("float32",)
    batch_size: int = 500
    seed: int = 0
    compiled: bool = False
    curves: Defaults | None = None
    """Draw accuracy against ε and against steps, around this ε."""
    curve_size: int = 1000
    corruptions: Path | None = None
    mce_baseline: Mapping[str, Sequence[float]] | None = None
    overwrite: bool = False
    """Drop what there is of all this first."""
    size: int = 0
    """So many images under each corruption at each severity; 0: all."""


def evaluate(
    subject: LoadedModel,
    images: ImageSet,
    data: str,
    plan: Plan,
    *,
    device: torch.device,
    store: Store,
    watch: EvaluationProgress,
) -> tuple[Entry, list[Result]]:
    """Judge ``subject`` on ``images``; each result is in ``store`` before the next attack begins.

    Returns:
        Everything known of the network on this dataset, and the results that were asked for, in order.
    """
    if any(isinstance(a, AutoAttack) and not _is_fast(a, p) for a in plan.attacks for p in plan.precisions):
        autoattack.installed()  # say so before an hour of other attacks
    digest = subject.digest
    images, among = _part(images, plan.size)
    network = ready(subject.network, images, device=device, data=data)
    entry = store.entry(
        Entry(
            subject.name,
            subject.weights,
            digest,
            data,
            _fingerprint(images),
            len(images),
            list(images.classes),
            environment(device),
            recipe=subject.config.recipe if subject.config else "",
            among=among,
        )
    )
    judges = []
    for precision in plan.precisions:
        model = EvaluatedModel(network, half=precision == "bf16", compiled=plan.compiled)
        model.eval()
        judges.append(Evaluator(model, images, entry, plan, precision, device, store, watch))
    if plan.overwrite:  # all at once, so that a stopped evaluation can go on with what it has found itself
        store.forget(entry, {key for judge in judges for key in judge.every_key()})
        conclude(entry, images)
        store.save()
    asked: list[Result] = []
    for judge in judges:
        with arithmetic(judge.precision):
            asked += judge.attacks()
            if plan.curves is not None:
                judge.curves(plan.curves)
    conclude(entry, images)
    store.save()
    return entry, asked


def _part(images: ImageSet, size: int) -> tuple[ImageSet, dict[str, Any]]:
    """``size`` of the images, every class alike, and which of them these are; 0, or as many as there are: all."""
    if not 0 < size < len(images):
        return images, {}
    rows = sample(images.labels, size)
    chosen = torch.zeros(len(images), dtype=torch.bool)
    chosen[rows] = True
    among = {"fingerprint": _fingerprint(images), "examples": len(images), "chosen": pack(chosen)}
    return images.subset(rows), among


def conclude(entry: Entry, images: ImageSet) -> None:
    """What the results say together: the worst case over attacks on the same threat, and what to mistrust."""
    entry.warnings = []
    entry.worst = worst_cases([result for result in entry.results if result.role == "attack"])
    for precision in dict.fromkeys(result.precision for result in entry.results):
        results = [result for result in entry.results if result.precision == precision]
        entry.warnings += masking_signs(results, dimensions=images.images[0].numel()) + too_short(results)
        for result in results:
            entry.warnings += [f"{result.name}: {note}" for note in result.notes]
    entry.warnings = list(dict.fromkeys(entry.warnings))


class Evaluator:
    """One network in one precision."""

    def __init__(
        self,
        model: EvaluatedModel,
        images: ImageSet,
        entry: Entry,
        plan: Plan,
        precision: Precision,
        device: torch.device,
        store: Store,
        watch: EvaluationProgress,
    ) -> None:
        self.model, self.images, self.entry, self.plan = model, images, entry, plan
        self.precision, self.device, self.store, self.watch = precision, device, store, watch
        self.clean: Tensor | None = None
        self.bar: EvaluationBar | None = None

    def every_key(self) -> Iterator[str]:
        """Of everything that is judged here."""
        images = _fingerprint(self.images)
        for attack in (Clean(), *self.plan.attacks):
            yield self._corruptions_key() if isinstance(attack, Corruptions) else self._key(attack, images)
        if self.plan.curves is not None:
            part = _fingerprint(self.images.subset(self._rows()))
            for point in self._points(self.plan.curves):
                yield self._key(point, part)

    def attacks(self) -> list[Result]:
        """All that are asked for; clean accuracy always, since every attack begins with it."""
        rest = [attack for attack in self.plan.attacks if not isinstance(attack, Clean)]
        results = [self.judge(Clean(), self.images, "attack", None)]
        self.clean = results[0].mask
        for attack in rest:
            if isinstance(attack, Corruptions):
                results.append(self.corruptions())
            else:
                results.append(self.judge(attack, self.images, "attack", self.clean))
        return results

    def curves(self, at: Defaults) -> None:
        """Accuracy against ε with 20 steps and against steps at ε, on a part of the images.

        Step sizes are those of `--attack pgd20` and the like: what is there already is taken, and agrees.
        """
        assert self.clean is not None
        rows = self._rows()
        part, clean = self.images.subset(rows), self.clean[rows]
        drawn = [self.judge(attack, part, "curve", clean) for attack in self._points(at)]
        # Points of other curves, around another ε or on other images, have no place beside these.
        others = [r for r in self.entry.results if r.role != "curve" or r.precision != self.precision]
        self.entry.results = others + drawn

    def _rows(self) -> Tensor:
        """Places of the images that curves are of."""
        if self.plan.curve_size < len(self.images):
            return sample(self.images.labels, self.plan.curve_size).cpu()
        return torch.arange(len(self.images))

    def _points(self, at: Defaults) -> list[Clean | PGD]:
        """What both curves are of, by ε, then by steps."""
        norm, eps = at.norm, at.radius(at.norm)
        most = unbounded(norm, self.images.images[0].numel())
        points = {(20, factor * eps) for factor in CURVE_EPS if factor * eps < most} | {(20, most)}
        points |= {(steps, eps) for steps in CURVE_STEPS}
        attacks = [
            PGD(steps, 1, at.step_size(steps, norm, radius), "ce", norm, radius)
            for steps, radius in sorted(points, key=lambda point: (point[1], point[0]))
        ]
        return [Clean(), *attacks]

    def judge(self, attack: Clean | PGD | AutoAttack, images: ImageSet, role: str, clean: Tensor | None) -> Result:
        """One attack on ``images``, of which ``clean`` (n,) are classified correctly; from before where it can be."""
        rounds, notes = self._rounds(attack)
        key = self._key(attack, _fingerprint(images))
        kept = self.entry.find(key)
        if kept is not None:
            result = dataclasses.replace(kept, role=role)
        else:
            begun = self.store.begun(key, len(images))
            first = Survival.fresh(len(images)) if clean is None else Survival.after_clean(clean)
            state, before = begun or (first, 0.0)
            seconds = self._run(attack, rounds, images, key, state, before)
            result = result_of(
                attack,
                state,
                images.labels,
                len(images.classes),
                role=role,
                precision=self.precision,
                key=key,
                seconds=seconds,
                rounds=[part.name for part in rounds],
                notes=[] if notes is None else notes.texts,
            )
        self.entry.add(result)
        self.store.unfinished.pop(key, None)
        self.store.save()
        self.watch.done(result, kept=kept is not None)
        return result

    def _rounds(self, attack: Clean | PGD | AutoAttack) -> tuple[list[Round], autoattack.Notes | None]:
        """A clean look, which is there mostly, and the rounds of the attack."""
        first = [clean_round(self.model)]
        if isinstance(attack, Clean):
            return first, None
        if isinstance(attack, PGD):
            rounds = pgd_rounds(
                self.model,
                eps=attack.eps,
                steps=attack.steps,
                step_size=attack.step,
                restarts=attack.restarts,
                norm=attack.norm,
                loss=attack.loss,
                device=self.device,
            )
            return first + rounds, None
        classes = len(self.images.classes)
        names = autoattack.attack_names(classes, only_apgd=isinstance(attack, APGD))
        if _is_fast(attack, self.precision):
            notes = autoattack.Notes()
            images = to_unit(self.images.images[:2].to(self.device), channels_last=channels_last(self.device))
            rounds = fast_rounds(
                self.model,
                names,
                eps=attack.eps,
                classes=classes,
                seed=self.plan.seed,
                images=images,
                warn=notes.warning,
                tick=self._partly,
            )
            return first + rounds, notes
        rounds, notes = autoattack.autoattack_rounds(
            self.model,
            names,
            eps=attack.eps,
            norm=attack.norm,
            classes=classes,
            seed=self.plan.seed,
            device=self.device,
        )
        return first + rounds, notes

    def _partly(self, passes: int) -> None:
        if self.bar is not None:
            self.bar.partly(passes)

    def _key(self, attack: Attack, images: str, **more: Any) -> str:
        if isinstance(attack, AutoAttack):
            more["package"] = VERSION if _is_fast(attack, self.precision) else autoattack.installed()
        if self.precision != "float32":
            more["judged"] = "float32"
        return key_of(
            network=self.entry.digest,
            images=images,
            attack=as_dict(attack),
            precision=self.precision,
            seed=self.plan.seed,
            batch_size=self.plan.batch_size,
            device=self.device.type,
            **more,
        )

    def _run(
        self, attack: Attack, rounds: Sequence[Round], images: ImageSet, key: str, state: Survival, before: float
    ) -> float:
        """Take ``state`` through the rounds that are left; seconds in all, those ``before`` a stop too."""
        began = written = time.monotonic()

        def keep(now: Survival) -> None:
            nonlocal written
            self.store.keep(key, now, before + time.monotonic() - began)
            if time.monotonic() - written > SAVE_SECONDS:
                self.store.save()
                written = time.monotonic()
            left = now.left(rounds, self.plan.batch_size)
            bar.left(left)
            if isinstance(attack, AutoAttack) and now.batches == 0 and left and bar.done:
                seconds = time.monotonic() - began
                self.watch.part(rounds[len(now.shares) - 1].name, now.share, seconds, seconds * left / bar.done)

        total = state.left(rounds, self.plan.batch_size)
        try:
            with self.watch.attacking(attack.name, total) as bar:
                self.bar = bar
                survive(
                    rounds,
                    images,
                    device=self.device,
                    batch_size=self.plan.batch_size,
                    seed=self.plan.seed,
                    channels_last=channels_last(self.device),
                    state=state,
                    tick=bar,
                    saved=keep,
                )
        except BaseException:
            if key in self.store.unfinished:
                self.store.save()  # also on Ctrl-C: what is done is done
            raise
        return before + time.monotonic() - began

    def _folder(self) -> Path:
        if self.plan.corruptions is None:
            raise ConfigError("corruptions needs the folder that holds them: --corruptions DIR")
        return self.plan.corruptions

    def _files(self) -> list[tuple[str, int, int]]:
        """Name, size and time of the files of corruptions."""
        found = [(file.name, file.stat()) for file in self._folder().glob("*.npy")]
        return sorted((name, about.st_size, about.st_mtime_ns) for name, about in found)

    def _corruptions_key(self) -> str:
        some = {"size": self.plan.size} if self.plan.size else {}
        return self._key(Corruptions(), str(self._files()), baseline=self.plan.mce_baseline, **some)

    def corruptions(self) -> Result:
        """Mean accuracy over common corruptions, from a folder of them."""
        from bullettrain.evaluation.corruptions import CorruptionResult, corruption_accuracy, mean_corruption_error

        attack, folder, files, key = Corruptions(), self._folder(), self._files(), self._corruptions_key()
        kept = self.entry.find(key)
        if kept is not None:
            self.watch.done(kept, kept=True)
            return kept
        baseline = self.plan.mce_baseline
        if baseline is not None:  # a baseline that does not go with the files is said before they are judged
            there: dict[str, tuple[float, ...]] = {name.removesuffix(".npy"): (0.0,) * 5 for name, *_ in files}
            mean_corruption_error(CorruptionResult(there, (), 1), baseline)
        began = time.monotonic()
        total = sum(size for _, size, _ in files) // self.images.images[0].numel()
        if self.plan.size:
            total = min(total, self.plan.size * SEVERITIES * sum(name != LABELS for name, *_ in files))
        with self.watch.attacking("corruptions", total) as bar:
            found = corruption_accuracy(
                self.model,
                folder,
                classes=len(self.images.classes),
                device=self.device,
                batch_size=self.plan.batch_size,
                size=self.plan.size,
                tick=bar,
            )
        if not found.over:
            raise ConfigError(f"{folder} holds none of the 15 corruptions that are averaged, only extra ones")
        about: dict[str, Any] = {
            "accuracy": {name: list(values) for name, values in found.accuracy.items()},
            "missing": list(found.missing),
            "over": found.over,
        }
        if found.kept is not None:
            about |= {"kept": pack_counts(found.kept), "fingerprint": found.fingerprint}
        if baseline is not None:
            about["mce"] = mean_corruption_error(found, baseline)
        result = Result(
            attack.name,
            as_dict(attack),
            "attack",
            self.precision,
            key,
            found.examples,
            round(found.mean * found.examples),
            found.mean,
            # Of the images that were corrupted: their corrupted copies are no independent draws.
            wilson(found.mean * found.examples, found.examples),
            round(time.monotonic() - began, 2),
            corruptions=about,
        )
        self.entry.add(result)
        self.store.save()
        self.watch.done(result, kept=False)
        return result


def _is_fast(attack: Attack, precision: Precision) -> bool:
    """Whether the frozen copy in bf16 searches, not the package."""
    return isinstance(attack, AutoAttack) and attack.norm == "linf" and precision == "bf16"


def _fingerprint(images: ImageSet) -> str:
    """Changes with any image and any label."""
    return fingerprint((images,), most=len(images))
