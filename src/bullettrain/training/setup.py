"""What a run stands on: device, processes, data, network."""

from __future__ import annotations

import copy
import gc
import hashlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bullettrain.checks import check_logits_shape
from bullettrain.data import Augment, ImageSet, Loader, load, split_validation, to_unit
from bullettrain.data.sets import sample
from bullettrain.models import build
from bullettrain.training.config import Config, NetworkConfig
from bullettrain.training.settings import ConfigError


@dataclass(frozen=True)
class Place:
    """Where this process runs: its device, its rank, and how many there are."""

    device: torch.device
    rank: int = 0
    world: int = 1

    @property
    def first(self) -> bool:
        """Whether this process writes files and talks."""
        return self.rank == 0

    @property
    def together(self) -> bool:
        """Whether there are others."""
        return self.world > 1

    def wait(self) -> None:
        """Until all processes are here."""
        if self.together:
            dist.barrier()

    def equalize(self, tensors: Iterable[Tensor]) -> None:
        """Give every process the values of the first."""
        if self.together:
            for tensor in tensors:
                dist.broadcast(tensor, 0)

    def largest(self, number: int) -> int:
        """Of the numbers that the processes have."""
        if not self.together:
            return number
        shared = torch.tensor([number], device=self.device)
        dist.all_reduce(shared, op=dist.ReduceOp.MAX)
        return int(shared)


def find_place(device: str | None) -> Place:
    """The device that is asked for, or the best there is; under torchrun also the group of processes."""
    world = _process_number("WORLD_SIZE", "1")
    name = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"there is no device {name!r}; write cpu, cuda or cuda:1") from None
    if found.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device cuda was asked for, but this machine has no CUDA device; use --device cpu")
    try:
        float(torch.ones(1, device=found))
    except (RuntimeError, NotImplementedError, AssertionError):
        raise ConfigError(f"device {name} cannot be used here; write cpu, cuda or cuda:1") from None
    if found.type == "cuda" and found.index is not None:
        torch.cuda.set_device(found)  # captures are of the current device
    if world == 1:
        return Place(found)
    if "RANK" not in os.environ or "LOCAL_RANK" not in os.environ:
        raise ConfigError("WORLD_SIZE is set, but RANK is not; start several processes with torchrun")
    _process_number("RANK", "0")
    if found.type == "cuda" and found.index is None:
        found = torch.device("cuda", _process_number("LOCAL_RANK", "0"))
        torch.cuda.set_device(found)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if found.type == "cuda" else "gloo", timeout=timedelta(hours=1))
    return Place(found, dist.get_rank(), world)


def _process_number(variable: str, usual: str) -> int:
    """What torchrun says of this process in the environment."""
    text = os.environ.get(variable, usual)
    if not text.isdecimal():
        raise ConfigError(f"{variable} is {text!r}; it has to be a whole number, as torchrun sets it, or not set")
    return int(text)


def leave_group() -> None:
    """Leave the other processes, if there are any, once all of them are done.

    What still holds the group (a wrapped network, in a cycle of references) is collected first: gloo's threads must
    end before the interpreter does, or it aborts now and then.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return
    dist.barrier()
    gc.collect()
    dist.destroy_process_group()
    gc.collect()


def load_data(config: Config, root: Path | None) -> tuple[ImageSet, ImageSet, ImageSet]:
    """Training, validation and test images."""
    data = config.data
    train = load(data.name, split="train", root=root, image_size=data.image_size)
    test = load(data.name, split="test", root=root, image_size=data.image_size)
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


def fingerprint(data: tuple[ImageSet, ...], *, most: int = 500) -> str:
    """Changes with the data: sizes, shapes, classes, labels, and about ``most`` images of each set."""
    digest = hashlib.blake2b(digest_size=16)
    for images in data:
        digest.update(repr((tuple(images.images.shape), images.classes)).encode())
        digest.update(images.labels.cpu().numpy().tobytes())
        digest.update(images.images[:: max(1, len(images) // most)].cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def _part(images: ImageSet, size: int, name: str) -> ImageSet:
    if not size:
        return images
    if size > len(images):
        raise ConfigError(f"data.{name} is {size}, but there are {len(images)} images; give 0 for all")
    return images.subset(sample(images.labels, size))


@dataclass(frozen=True)
class Shape:
    """What a network is built for."""

    num_classes: int
    channels: int
    image_size: int

    @classmethod
    def of(cls, images: ImageSet, network: str) -> Shape:
        """The shape of a dataset; the small CNN wants squares."""
        _, channels, height, width = images.images.shape
        if height != width and network == "small-cnn":
            raise ConfigError(
                f"images are {height}×{width}; small-cnn takes squares: set data.image_size or another network"
            )
        return cls(len(images.classes), channels, height)


def make_network(config: NetworkConfig, shape: Shape) -> nn.Module:
    """A fresh network, from torch's global generator."""
    try:
        return build(
            config.name,
            num_classes=shape.num_classes,
            channels=shape.channels,
            image_size=shape.image_size,
            mean=config.mean,
            std=config.std,
        )
    except ValueError as error:
        raise ConfigError(f"network: {error}") from None


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
