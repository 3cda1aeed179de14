"""What a run stands on: its data, its network, its mini-batches and where their attacks start."""

from __future__ import annotations

import copy
import os
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bullettrain.allocation import Allocated, Allocation
from bullettrain.baselines.fgsm_pgi import FGSMPGI, RESET_EPOCHS
from bullettrain.config.sections import Config
from bullettrain.config.settings import ConfigError
from bullettrain.data import Augment, ImageSet, Loader, StoredPerturbations, load, split_validation, to_unit
from bullettrain.data.augment import Draws
from bullettrain.data.base import derive_seed
from bullettrain.data.sets import check_alike, sample
from bullettrain.history import Past
from bullettrain.models import build
from bullettrain.models.external import is_external
from bullettrain.objectives import AdversarialObjective, AugMix
from bullettrain.processes import Place
from bullettrain.run_folder import NetworkMetadata
from bullettrain.step import BulletTrain, StepOutput
from bullettrain.validation import check_logits_shape


def load_data(config: Config, root: Path | None) -> tuple[ImageSet, ImageSet, ImageSet]:
    """Training, validation and test images."""
    data = config.data
    train = load(data.name, split="train", root=root, image_size=data.image_size)
    test = load(data.name, split="test", root=root, image_size=data.image_size)
    check_alike(train, test, data.name)
    train, test = _part(train, data.train_size, "train_size"), _part(test, data.test_size, "test_size")
    if data.validation >= len(train):
        raise ConfigError(
            f"data.validation is {data.validation}, but there are {len(train)} training images; set it lower, or to 0"
        )
    train, validation = split_validation(train, data.validation, config.training.seed)
    for images, what in ((train, "training"), (test, "test")):
        if not len(images):
            raise ConfigError(f"data.name is {data.name}, which leaves no {what} images; give it more")
    return train, validation, test


def make_loader(config: Config, images: ImageSet, place: Place) -> Loader:
    """The training images in mini-batches, of which every process has its share."""
    training, data = config.training, config.data
    if training.batch_size < place.world:
        raise ConfigError(
            f"training.batch_size is {training.batch_size} for {place.world} processes; each needs an image"
        )
    return Loader(
        images,
        batch_size=training.batch_size,
        seed=training.seed,
        device=place.device,
        augment=Augment(data.crop, data.flip) if data.crop or data.flip else None,
        views=config.method.view_maker() if data.views else None,
        view_share=float(data.views or 0),
        rank=place.rank,
        world=place.world,
        channels_last=training.channels_last,
        replays=training.replays,
    )


def _part(images: ImageSet, size: int, name: str) -> ImageSet:
    if not size:
        return images
    if size > len(images):
        raise ConfigError(f"data.{name} is {size}, but there are {len(images)} images; give 0 for all")
    return images.subset(sample(images.labels, size))


def make_network(config: Config, images: ImageSet, place: Place) -> tuple[nn.Module, NetworkMetadata]:
    """A fresh network for a dataset, from torch's global generator, and how it is built."""
    name, mean, std = config.network.name, config.network.mean, config.network.std
    _, channels, height, width = images.images.shape
    if height != width and name == "small-cnn":
        raise ConfigError(
            f"images are {height}×{width}; small-cnn takes squares: set data.image_size or another network"
        )
    described = NetworkMetadata(name, len(images.classes), channels, height, mean, std)
    try:
        network = build(**asdict(described))
    except ValueError as error:
        raise ConfigError(f"network: {error}") from None
    if is_external(name):
        check_fits(network, name, images)
    network.to(place.device)
    if config.training.channels_last:
        network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return network, described


def check_fits(network: nn.Module, name: str, images: ImageSet) -> None:
    """ConfigError where a network of the user's, called ``name``, is not for these images and classes."""
    look = copy.deepcopy(network).eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            logits = look(to_unit(images.images[:2]))
        check_logits_shape(logits, 2)
    except (RuntimeError, TypeError, ValueError) as error:
        shape = tuple(images.images.shape[1:])
        raise ConfigError(f"network: {name} cannot take images {shape}: {str(error).splitlines()[0]}") from None
    if logits.shape[1] < len(images.classes):
        raise ConfigError(f"network: {name} tells {logits.shape[1]} classes apart, but there are {len(images.classes)}")


def set_threads(threads: int) -> None:
    """Have torch use so many CPU threads, 0: its own choice; ConfigError where there are far fewer cores."""
    cores = os.cpu_count() or 1
    if threads > 2 * cores:
        raise ConfigError(f"training.threads is {threads}, but this machine has {cores} cores; at most {2 * cores}")
    if threads:
        torch.set_num_threads(threads)


class WarmedUpBudget:
    """A budget whose attacks begin later, or grow: until they begin nobody gets a step.

    Mini-batches that are attacked together have the radius of the last of them.

    Args:
        budget: what it comes to.
        eps: radius of the attacks, when they have grown; None: they do not grow.
        device: of the examples.
    """

    def __init__(self, budget: Allocation, eps: float | None, device: torch.device) -> None:
        self.budget, self.eps, self.begun = budget, eps, False
        self.part = torch.ones((), device=device)
        """How much of their radius the attacks have by now; a tensor, so that a captured graph sees it."""

    @property
    def uniform_steps(self) -> int | None:
        """The number of steps that everybody gets, or None where the classes are to differ."""
        same = self.budget.uniform_steps
        return same if self.begun or same is None else 0

    def allocate(self, category: Tensor, score: Tensor | None = None, past: Past | None = None) -> Allocated:
        """Steps (m,) and, where attacks grow, their sizes and radii, for categories (m,) and their scores (m,)."""
        given = self.budget.allocate(category, score, past)
        given = given if isinstance(given, Allocated) else Allocated(given)
        steps, sizes, radius = given.steps, given.step_sizes, given.eps
        if not self.begun:
            return Allocated(torch.zeros_like(steps))
        if self.eps is None:
            return given
        sizes = self.budget.step_sizes(category, steps, self.eps) if sizes is None else sizes
        radius = torch.full_like(sizes, self.eps) if radius is None else radius
        return given._replace(step_sizes=sizes * self.part, eps=radius * self.part)

    def step_sizes(self, category: Tensor, steps: Tensor, eps: float) -> Tensor:
        """Step sizes (m,), floating, for categories (m,)."""
        return self.budget.step_sizes(category, steps, eps)

    def __getattr__(self, name: str) -> Any:
        if name in ("revise", "selects"):  # what some budgets have, and others not
            return getattr(self.budget, name)
        raise AttributeError(name)


class InitialPerturbation:
    """Starting points of attacks, or the draws that decide views.

    With ``method.eps_warmup`` also how large eps is by then, and with ``clean_warmup`` whether there are attacks yet.

    Args:
        batches: mini-batches an epoch.
    """

    def __init__(self, config: Config, engine: BulletTrain, loader: Loader, place: Place, batches: int) -> None:
        self.config, self.objective, self.batches = config, engine.objective, batches
        self.loader, self.place = loader, place
        method, self.growing = config.method, None
        if method.clean_warmup or method.eps_warmup:
            self.growing = WarmedUpBudget(engine.budget, method.eps if method.eps_warmup else None, place.device)
            engine.budget = self.growing
        self.chance = torch.Generator(place.device)
        self.stored: StoredPerturbations | None = None
        """The last perturbation of each image, where attacks start from it (FGSM-PGI)."""
        if isinstance(engine.objective, FGSMPGI):
            n, *shape = loader.data.images.shape
            augment, unit = loader.augment or Augment(), method.eps / 127
            self.stored = StoredPerturbations(n, shape, augment, device=place.device, dtype=torch.int8, unit=unit)
        self._started: deque[tuple[Tensor, Tensor, Draws]] = deque()

    def __call__(self, x: Tensor, epoch: int, index: int) -> Tensor:
        """Of images x (m, …), mini-batch ``index`` of an epoch. The budget has the eps of that moment after it."""
        objective, loader = self.objective, self.loader
        self.chance.manual_seed(derive_seed(self.config.training.seed, epoch, index, "noise"))
        objective.progress(min(1.0, (epoch * self.batches + index) / (self.batches * self.config.training.epochs)))
        if isinstance(objective, AugMix):
            draws = objective.draw(loader.joint_size(index), self.place.device, self.chance)
            assert draws is not None  # a config's views are made of draws
            return draws[loader.share(index)]
        assert isinstance(objective, AdversarialObjective)
        if self.stored is not None:
            return self._stored_start(self.stored, x, epoch, index)
        part = self.part_of_eps(epoch, index)
        if self.growing is not None:
            self.growing.begun = part > 0
            self.growing.part.fill_(part or 1.0)
        whole = torch.empty_like(x)
        if self.place.together:
            whole = x.new_empty((loader.joint_size(index), *x.shape[1:]))
        noise = objective.noise(whole, self.chance)
        if part and objective.start in ("uniform", "clipped", "bernoulli"):
            noise = noise * part if part < 1 else noise
        return objective.start_from(x, noise[loader.share(index)] if self.place.together else noise)

    def _stored_start(self, stored: StoredPerturbations, x: Tensor, epoch: int, index: int) -> Tensor:
        assert isinstance(self.objective, AdversarialObjective)
        if index == 0 and epoch % RESET_EPOCHS == 0 and epoch < self.config.training.epochs:
            stored.draw(self.config.method.eps, self.chance)
        about = self.loader.indices(epoch, index), self.loader.draws(epoch, index)
        self._started.append((x, *about))
        return self.objective.norm.clip(stored.start(x, *about), self.objective.bounds)

    def keep(self, out: StepOutput) -> None:
        """Look at what the step of the next mini-batch has come to, as far as later ones start from it."""
        if self.stored is not None:
            x, which, draws = self._started.popleft()
            self.stored.keep(x, out.x_prime, which, draws)

    def state_dict(self) -> dict[str, Tensor]:
        """What later mini-batches start from."""
        return {} if self.stored is None else {"stored": self.stored.delta.to("cpu", copy=True)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from :meth:`state_dict`."""
        if self.stored is not None:
            self.stored.delta.copy_(state["stored"])

    def part_of_eps(self, epoch: int, index: int = 0) -> float:
        """How much of its eps the attack has at a mini-batch; 0: there is none yet."""
        method, whole = self.config.method, self.batches * self.config.training.epochs
        done = epoch * self.batches + index + 1 - round(method.clean_warmup * whole)
        if done <= 0:
            return 0.0
        steps = method.eps_warmup * whole
        return min(1.0, done / steps) if steps else 1.0
