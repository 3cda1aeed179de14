"""Figures of merit: accuracy while training and at the end, and the two speed-ups that one run can tell."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from bullettrain.allocation import StepBudget
from bullettrain.config.sections import Config
from bullettrain.cost import theoretical_speedup
from bullettrain.data import ImageSet
from bullettrain.data.sets import fingerprint, sample
from bullettrain.evaluation.accuracy import clean_round, pgd_rounds, view_round
from bullettrain.evaluation.evaluated_model import EvaluatedModel
from bullettrain.evaluation.results import pack
from bullettrain.evaluation.specs import PGD, threat_of
from bullettrain.evaluation.survival import Round, Survival, survive
from bullettrain.objectives import Objective
from bullettrain.precision import arithmetic
from bullettrain.training.display import Display


class Judge:
    """Accuracy of a network, with the run's settings and a progress bar."""

    def __init__(self, config: Config, device: torch.device, display: Display) -> None:
        self.config, self.device, self.display = config, device, display

    def validation(self, model: nn.Module, images: ImageSet) -> tuple[float | None, float | None]:
        """Clean and robust accuracy; None where no images are held out."""
        if not len(images):
            return None, None
        return self._clean(model, images, "clean accuracy").share, self.robust(model, images)

    def robust(self, model: nn.Module, images: ImageSet) -> float:
        """The quick look while training: ten steps of eps/5, or AugMix views."""
        if self.config.method.objective == "augmix":
            return self._views(model, images, "AugMix views").share
        eps, norm = self.config.method.eps, threat_of(self.config).norm
        return self._pgd(model, images, PGD(10, 1, eps / 5, "ce", norm, eps), "PGD-10").share

    def probe(self, model: nn.Module, images: ImageSet) -> float | None:
        """The same on part of the training images, to tell whether the attack there has become too weak."""
        size = self.config.training.probe
        if not size or self.config.method.objective == "augmix":
            return None
        return self.robust(model, probe_images(images, size))

    def records(
        self, networks: Iterable[tuple[str, nn.Module]], images: ImageSet, epoch: int
    ) -> Iterator[dict[str, Any]]:
        """What the run says of its networks at the end, each with the name of its weights, and of which images."""
        about = {"examples": len(images), "fingerprint": fingerprint((images,), most=len(images)), "epoch": epoch}
        search = self.config.evaluation.search
        for name, model in networks:
            for attack, left in self.final(model, images, name).items():
                figures = {"accuracy": left.share, **about, "survived": pack(left.alive)}
                if search != "float32" and attack.startswith("pgd"):
                    figures["precision"] = search
                yield {"kind": "evaluation", "weights": name, "attack": attack, **figures}

    def final(self, model: nn.Module, images: ImageSet, name: str) -> dict[str, Survival]:
        """What is left clean, and by the attack that the config evaluates with; AugMix: on views of its kind."""
        search = self.config.evaluation.search
        dtype = torch.bfloat16 if search == "bf16" else torch.float32
        judged = EvaluatedModel(model, dtype=dtype).eval() if search != "float32" else model
        with arithmetic(search):
            return self._final(judged, images, name)

    def _final(self, model: nn.Module, images: ImageSet, name: str) -> dict[str, Survival]:
        evaluation, own = self.config.evaluation, threat_of(self.config)
        if self.config.method.objective == "augmix":
            views = self._views(model, images, f"{name}: AugMix views")
            return {"clean": self._clean(model, images, f"{name}: clean"), "views": views}
        step = own.step_size(evaluation.steps, own.norm, self.config.method.eps)
        attack = PGD(evaluation.steps, evaluation.restarts, step, "ce", own.norm, self.config.method.eps)
        robust = self._pgd(model, images, attack, f"{name}: {attack.name}")
        return {"clean": self._clean(model, images, f"{name}: clean"), attack.name: robust}

    def _clean(self, model: nn.Module, images: ImageSet, what: str) -> Survival:
        return self._survive([clean_round(model)], images, what)

    def _views(self, model: nn.Module, images: ImageSet, what: str) -> Survival:
        return self._survive([view_round(model, self.config.method.view_maker())], images, what)

    def _pgd(self, model: nn.Module, images: ImageSet, attack: PGD, what: str) -> Survival:
        return self._survive([clean_round(model), *pgd_rounds(model, attack)], images, what)

    def _survive(self, rounds: Sequence[Round], images: ImageSet, what: str) -> Survival:
        with self.display.evaluating(what, len(images) * len(rounds)) as bar:  # at most: the lost are left alone
            return survive(
                rounds,
                images,
                device=self.device,
                batch_size=self.config.evaluation.batch_size,
                seed=self.config.training.seed,
                tick=bar,
            )


def probe_images(images: ImageSet, size: int) -> ImageSet:
    """At most ``size`` of the images, every class in proportion."""
    return images.subset(sample(images.labels, min(size, len(images))))


def speedups(objective: Objective, budget: StepBudget, figures: Mapping[str, float | None]) -> dict[str, float | None]:
    """Theoretical and counted, from a run's own shares and passes; wall-clock needs a second run beside it."""
    plain = objective.cost.work(steps=budget.boundary, touched=1, selects=False).total
    outlier, boundary, robust = (figures[name] or 0.0 for name in ("outlier", "boundary", "robust"))
    theoretical = theoretical_speedup(
        budget, boundary=boundary, robust=robust, outlier=outlier, views=objective.num_views
    )
    work = figures["work"]
    return {
        "plain_work": plain,
        "theoretical_speedup": theoretical,
        "work_speedup": plain / work if work and math.isfinite(work) else None,
    }
