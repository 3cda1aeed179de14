"""What a run is set up from: data, loader, network, initial perturbations."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bullettrain.allocation import Allocated, Allocation
from bullettrain.config.sections import Config
from bullettrain.config.settings import ConfigError
from bullettrain.data import Augment, ImageSet, Loader, StoredPerturbations, load, split_validation, to_unit
from bullettrain.data.augment import Draws
from bullettrain.data.base import derive_seed
from bullettrain.data.sets import check_alike, sample
from bullettrain.errors import raised_as
from bullettrain.history import Past
from bullettrain.loading import try_network
from bullettrain.models import build
from bullettrain.models.external import is_external
from bullettrain.objectives import AdversarialObjective, AugMix
from bullettrain.processes import Place
from bullettrain.run_folder import NetworkMetadata
from bullettrain.step import BulletTrain, StepOutput


def load_data(config: Config, root: Path | None) -> tuple[ImageSet, ImageSet, ImageSet]:
    """Return training, validation and test images."""
    data = config.data
    train = load(data.name, split="train", root=root, image_size=data.image_size)
    test = load(data.name, split="test", root=root, image_size=data.image_size)
    check_alike(train, test, data.name)
    train, test = _part(train, data.train_size, "train_size"), _part(test, data.test_size, "test_size")
    if data.validation >= len(train):
        there = f"data.validation is {data.validation}, but there are {len(train)} training images"
        raise ConfigError(f"{there}; lower it, or --set validation=0")
    train, validation = split_validation(train, data.validation, config.training.seed)
    for images, what in ((train, "training"), (test, "test")):
        if not len(images):
            raise ConfigError(f"data.name is {data.name}, which leaves no {what} images; give it more")
    return train, validation, test


def make_loader(config: Config, images: ImageSet, place: Place) -> Loader:
    """Return a loader of the training images. Each process gets its share of a mini-batch."""
    training, data = config.training, config.data
    if training.batch_size < place.world:
        raise ConfigError(f"training.batch_size is {training.batch_size}; {place.world} processes need an image each")
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
    """Return an untrained network, drawn from torch's global generator, and its metadata."""
    name, mean, std = config.network.name, config.network.mean, config.network.std
    _, channels, height, width = images.images.shape
    if height != width and name == "small-cnn":
        raise ConfigError(f"images are {height}×{width}; small-cnn takes squares: set data.image_size, or the network")
    described = NetworkMetadata(name, len(images.classes), channels, height, mean, std)
    with raised_as(ConfigError, "network: {error}", ValueError):
        network = build(**asdict(described))
    if is_external(name):
        with torch.random.fork_rng(devices=[]):
            outputs = try_network(network, to_unit(images.images[:2]), f"the images of {config.data.name}").shape[1]
        if outputs < len(images.classes):
            raise ConfigError(f"network: {name} has {outputs} outputs, but there are {len(images.classes)} classes")
    network.to(place.device)
    if config.training.channels_last:
        network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return network, described


def threads_of(config: Config, device: torch.device) -> int:
    """Return the number of CPU threads to set; 0 for PyTorch's default. small-cnn is too small for more than one."""
    return config.training.threads or int(device.type == "cpu" and config.network.name == "small-cnn")


def set_threads(threads: int) -> None:
    """Set torch's number of CPU threads; 0 leaves it as it is. Raises ConfigError if there are far fewer cores."""
    cores = os.cpu_count() or 1
    if threads > 2 * cores:
        raise ConfigError(f"training.threads is {threads}, but this machine has {cores} cores; at most {2 * cores}")
    if threads:
        torch.set_num_threads(threads)


class WarmedUpBudget:
    """A budget whose attacks start later (``clean_warmup``) or grow (``eps_warmup``). Before, no example gets a step.

    Mini-batches that are attacked together have the radius of the last of them.

    Args:
        budget: the budget after the warm-up.
        eps: final radius of growing attacks; None if they do not grow.
        device: of the examples.
        projects: whether attacks project to a radius, which grows then.
    """

    def __init__(self, budget: Allocation, eps: float | None, device: torch.device, projects: bool = True) -> None:
        self.budget, self.eps, self.projects, self.begun = budget, eps, projects, False
        self.part = torch.ones((), device=device)
        """Current fraction of the radius; a tensor, so that captured graphs read its value."""

    @property
    def uniform_steps(self) -> int | None:
        """The number of steps of every example, or None if the categories differ."""
        steps = self.budget.uniform_steps
        return steps if self.begun or steps is None else 0

    def allocate(self, category: Tensor, score: Tensor | None = None, past: Past | None = None) -> Allocated:
        """Return steps (m,) and, for growing attacks, step sizes and radii, from categories (m,) and scores (m,)."""
        allocated = Allocated.of(self.budget.allocate(category, score, past))
        steps, sizes, radius = allocated.steps, allocated.step_sizes, allocated.eps
        if not self.begun:
            return Allocated(torch.zeros_like(steps))
        if self.eps is None:
            return allocated
        sizes = self.budget.step_sizes(category, steps, self.eps) if sizes is None else sizes
        if self.projects:
            radius = self.part * (torch.full_like(sizes, self.eps) if radius is None else radius)
        return allocated._replace(step_sizes=sizes * self.part, eps=radius)

    def step_sizes(self, category: Tensor, steps: Tensor, eps: float) -> Tensor:
        """Return step sizes (m,) for categories (m,)."""
        return self.budget.step_sizes(category, steps, eps)

    def __getattr__(self, name: str) -> Any:
        if name in ("revise", "selects"):  # optional methods of a budget
            return getattr(self.budget, name)
        raise AttributeError(name)


class InitialPerturbation:
    """Makes the starting points of attacks, or AugMix's draws; a function of seed, epoch and batch index.

    It also sets the current eps with ``method.eps_warmup`` and starts the attacks with ``method.clean_warmup``.

    Args:
        config: of the run.
        engine: gets a :class:`WarmedUpBudget` if there is a warm-up.
        loader: of the training images.
        place: device and processes.
        batches: mini-batches of a whole epoch.
    """

    def __init__(self, config: Config, engine: BulletTrain, loader: Loader, place: Place, batches: int) -> None:
        self.config, self.objective, self.batches = config, engine.objective, batches
        self.loader, self.place, method = loader, place, config.method
        self.warm_up: WarmedUpBudget | None = None
        if method.clean_warmup or method.eps_warmup:
            eps = method.eps if method.eps_warmup else None
            self.warm_up = WarmedUpBudget(engine.budget, eps, place.device, engine.objective.takes_eps)
            engine.budget = self.warm_up
        self.generator = torch.Generator(place.device)
        self.stored: StoredPerturbations | None = None
        """The last perturbation of each image, if its next attack starts from there."""
        if isinstance(engine.objective, AdversarialObjective) and engine.objective.reset_epochs:
            n, *shape = loader.data.images.shape
            augment, unit = loader.augment or Augment(), method.eps / 127
            self.stored = StoredPerturbations(n, shape, augment, device=place.device, dtype=torch.int8, unit=unit)
        self.stretch = 1.0
        """Mini-batches of a whole epoch for each one of the present epoch."""
        self._started: deque[tuple[Tensor, Tensor, Draws]] = deque()

    def __call__(self, x: Tensor, epoch: int, index: int) -> Tensor:
        """Return the starting points for images x (m, …), mini-batch ``index`` of an epoch, and update the warm-up."""
        objective, loader = self.objective, self.loader
        self.generator.manual_seed(derive_seed(self.config.training.seed, epoch, index, "noise"))
        done = epoch * self.batches + index * self.stretch
        objective.progress(min(1.0, done / (self.batches * self.config.training.epochs)))
        if isinstance(objective, AugMix):
            draws = objective.draw(loader.joint_size(index), self.place.device, self.generator)
            assert draws is not None  # the views of a config are made from draws
            return draws[loader.share(index)]
        assert isinstance(objective, AdversarialObjective)
        if self.stored is not None:
            if index == 0 and epoch % objective.reset_epochs == 0 and epoch < self.config.training.epochs:
                self.stored.draw(self.config.method.eps, self.generator)
            which = loader.indices(epoch, index), loader.draws(epoch, index)
            self._started.append((x, *which))
            return objective.norm.clip(self.stored.start(x, *which), objective.bounds)
        part = self.part_of_eps(epoch, index)
        if self.warm_up is not None:
            self.warm_up.begun = part > 0
            self.warm_up.part.fill_(part or 1.0)
        # Processes draw the noise of the joint batch, and take their share of it.
        joint = x.new_empty((loader.joint_size(index), *x.shape[1:])) if self.place.together else torch.empty_like(x)
        noise = objective.noise(joint, self.generator)[loader.share(index)]
        if 0 < part < 1 and objective.start in ("uniform", "clipped", "bernoulli"):
            noise = noise * part
        return objective.start_from(x, noise)

    def keep(self, out: StepOutput) -> None:
        """Store the perturbations of the next mini-batch's step, if later attacks start from them."""
        if self.stored is not None:
            x, indices, draws = self._started.popleft()
            self.stored.keep(x, out.x_prime, indices, draws)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the stored perturbations."""
        return {} if self.stored is None else {"stored": self.stored.delta.to("cpu", copy=True)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from :meth:`state_dict`."""
        if self.stored is not None:
            self.stored.delta.copy_(state["stored"])

    def part_of_eps(self, epoch: int, index: int = 0) -> float:
        """Return the fraction of eps that attacks have at a mini-batch; 0 before they start."""
        method, total = self.config.method, self.batches * self.config.training.epochs
        done = epoch * self.batches + index * self.stretch + 1 - round(method.clean_warmup * total)
        if done <= 0:
            return 0.0
        steps = method.eps_warmup * total
        return min(1.0, done / steps) if steps else 1.0
