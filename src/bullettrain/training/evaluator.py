"""Evaluation during and after training, with the settings of the run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from bullettrain.config import Config
from bullettrain.data import ImageSet
from bullettrain.data.sets import fingerprint, sample
from bullettrain.evaluation.accuracy import (
    EvaluatedModel,
    Round,
    Survival,
    clean_round,
    pgd_rounds,
    survive,
    view_round,
)
from bullettrain.evaluation.results import pack
from bullettrain.evaluation.specs import PGD, threat_of
from bullettrain.formatting import attack_name
from bullettrain.precision import arithmetic
from bullettrain.progress import EvaluationBar


class Evaluator:
    """Evaluates the network of a run as its config says.

    Args:
        config: of the run.
        device: of the networks.
        bar: shows a progress bar with the name of an evaluation and the number of images.
    """

    def __init__(
        self, config: Config, device: torch.device, bar: Callable[[str, int], AbstractContextManager[EvaluationBar]]
    ) -> None:
        self.config, self.device, self.bar = config, device, bar
        self.makes_views, self.norm = config.method.objective == "augmix", threat_of(config).norm

    def validation(self, model: nn.Module, images: ImageSet) -> tuple[float | None, float | None]:
        """Return clean and robust accuracy; None if there are no validation images."""
        if not len(images):
            return None, None
        return self._clean(model, images, "validation").share, self._quick(model, images, "validation")

    def probe(self, model: nn.Module, images: ImageSet) -> float | None:
        """Return the accuracy under PGD-10 on some training images, to detect catastrophic overfitting."""
        size = self.config.training.probe
        if not size or self.makes_views:
            return None
        return self._quick(model, probe_images(images, size), "probe for collapse")

    def _quick(self, model: nn.Module, images: ImageSet, what: str) -> float:
        """Return the accuracy under PGD with ten steps of eps/5, or on AugMix views."""
        return self._corrupted(model, images, self._pgd(10, 1, self.config.method.eps / 5), what).share

    def records(
        self, networks: Iterable[tuple[str, nn.Module]], images: ImageSet, epoch: int
    ) -> Iterator[dict[str, Any]]:
        """Evaluate networks, given with the names of their weights, and yield the records of their accuracy."""
        about = {"examples": len(images), "fingerprint": fingerprint((images,), most=len(images)), "epoch": epoch}
        search = self.config.evaluation.search
        for name, model in networks:
            for attack, survival in self.final(model, images, name).items():
                figures = {"accuracy": survival.share, **about, "survived": pack(survival.alive)}
                if search != "float32" and attack.startswith("pgd"):
                    figures["precision"] = search
                yield {"kind": "evaluation", "weights": name, "attack": attack, **figures}

    def final(self, model: nn.Module, images: ImageSet, name: str) -> dict[str, Survival]:
        """Evaluate a network on clean images and under the config's PGD attack, or on AugMix views."""
        evaluation, method = self.config.evaluation, self.config.method
        if evaluation.search != "float32":
            dtype = torch.bfloat16 if evaluation.search == "bf16" else torch.float32
            model = EvaluatedModel(model, dtype=dtype).eval()
        step = threat_of(self.config).step_size(evaluation.steps, self.norm, method.eps)
        pgd = self._pgd(evaluation.steps, evaluation.restarts, step)
        with arithmetic(evaluation.search):
            attack, what = "views" if self.makes_views else pgd.name, f"test of {name} weights"
            corrupted = self._corrupted(model, images, pgd, what)
            return {"clean": self._clean(model, images, what), attack: corrupted}

    def _pgd(self, steps: int, restarts: int, step_size: float) -> PGD:
        return PGD(steps, restarts, step_size, "ce", self.norm, self.config.method.eps)

    def _clean(self, model: nn.Module, images: ImageSet, what: str) -> Survival:
        return self._survive([clean_round(model)], images, f"{what}: clean")

    def _corrupted(self, model: nn.Module, images: ImageSet, attack: PGD, what: str) -> Survival:
        if self.makes_views:
            return self._survive([view_round(model, self.config.method.view_maker())], images, f"{what}: views")
        return self._survive(
            [clean_round(model), *pgd_rounds(model, attack)], images, f"{what}: {attack_name(attack.name)}"
        )

    def _survive(self, rounds: Sequence[Round], images: ImageSet, what: str) -> Survival:
        size, seed = self.config.evaluation.batch_size, self.config.training.seed
        with self.bar(what, len(images) * len(rounds)) as bar:  # an upper bound: images that are lost are skipped
            return survive(rounds, images, device=self.device, batch_size=size, seed=seed, tick=bar)


def probe_images(images: ImageSet, size: int) -> ImageSet:
    """Return at most ``size`` of the images, stratified by class."""
    return images.subset(sample(images.labels, min(size, len(images))))
