"""What a run stands on: its data and its network."""

from __future__ import annotations

import copy
import os
from dataclasses import asdict
from pathlib import Path

import torch
from torch import nn

from bullettrain.config.sections import Config, NetworkConfig
from bullettrain.config.settings import ConfigError
from bullettrain.data import Augment, ImageSet, Loader, load, split_validation, to_unit
from bullettrain.data.sets import check_alike, sample
from bullettrain.models import build
from bullettrain.processes import Place
from bullettrain.run_folder import NetworkMetadata
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


def describe_network(config: NetworkConfig, images: ImageSet) -> NetworkMetadata:
    """How the network for a dataset is built; the small CNN wants squares."""
    _, channels, height, width = images.images.shape
    if height != width and config.name == "small-cnn":
        raise ConfigError(
            f"images are {height}×{width}; small-cnn takes squares: set data.image_size or another network"
        )
    return NetworkMetadata(config.name, len(images.classes), channels, height, config.mean, config.std)


def make_network(described: NetworkMetadata) -> nn.Module:
    """A fresh network, from torch's global generator."""
    try:
        return build(**asdict(described))
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


def set_threads(threads: int) -> None:
    """Have torch use so many CPU threads; ConfigError where there are far fewer cores."""
    cores = os.cpu_count() or 1
    if threads > 2 * cores:
        raise ConfigError(f"training.threads is {threads}, but this machine has {cores} cores; at most {2 * cores}")
    torch.set_num_threads(threads)
