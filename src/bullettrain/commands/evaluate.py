"""`bullettrain evaluate`: how robust a network is, under attacks that others accept."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from bullettrain.commands import options
from bullettrain.terminal import terminal

if TYPE_CHECKING:
    from bullettrain.config.sections import Config
    from bullettrain.data import ImageSet
    from bullettrain.evaluation.specs import Defaults, NormName
    from bullettrain.precision import Precision

PRECISIONS: dict[str, tuple[Precision, ...]] = {
    "float32": ("float32",),
    "tf32": ("tf32",),
    "bf16": ("bf16",),
    "both": ("float32", "bf16"),
}


def evaluate(
    model: options.Model,
    attack: Annotated[
        list[str] | None,
        typer.Option(
            "--attack",
            metavar="ATTACK",
            help="clean, pgd20, pgd100x10, pgd1000x5, pgd:KEY=VALUE,…, autoattack, apgd, corruptions; again, or with "
            "commas, for more. Default: clean,pgd20.",
        ),
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="cifar10, cifar100, mnist, digits, folder:PATH or npz:PATH. Default: the run's.")
    ] = None,
    eps: Annotated[
        str | None, typer.Option(help="ε of attacks that do not say. Default: the run's, else 0.031 (L2: 0.5).")
    ] = None,
    norm: Annotated[
        str | None, typer.Option(help="linf or l2, of attacks that do not say. Default: the run's, else linf.")
    ] = None,
    weights: options.Weights = None,
    network: options.Network = None,
    trust: options.Trust = False,
    mean: options.Mean = None,
    std: options.Std = None,
    number: Annotated[
        int, typer.Option("--images", min=0, help="Evaluate only so many test images, every class alike; 0: all.")
    ] = 0,
    image_size: Annotated[
        int | None,
        typer.Option(min=1, help="Side to which the images of a folder are resized. Default: the run's, for its data."),
    ] = None,
    precision: Annotated[
        str,
        typer.Option(help="Of the search of attacks: float32, tf32, bf16, or both (first and last). Float32 decides."),
    ] = "float32",
    curves: Annotated[
        bool, typer.Option("--curves", help="Also accuracy against ε and against steps, and a look for masking.")
    ] = False,
    curve_images: Annotated[int, typer.Option(min=1, help="Images for --curves.")] = 1000,
    corruptions: Annotated[Path | None, typer.Option(help="Folder of CIFAR-10-C's or -100-C's files.")] = None,
    mce_baseline: Annotated[
        Path | None, typer.Option(help="JSON of accuracies by corruption, for the mean corruption error.")
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Images at once. Default: 1000 on a GPU, 500 elsewhere.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of every attack's noise.")] = 0,
    compile_network: Annotated[bool, typer.Option("--compile", help="Compile the network with torch.compile.")] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Evaluate anew: results of these attacks are dropped first.")
    ] = False,
    data_dir: Annotated[
        Path | None, typer.Option(help="Where datasets lie. Default: $BULLETTRAIN_DATA, then the user's cache.")
    ] = None,
    device: options.Device = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of evaluation.json and report.html. Default: the run's.")
    ] = None,
) -> None:
    """Evaluate a network, trained here or not, under the attacks that the field accepts.

    Results are kept in evaluation.json as they come; the same command again goes on where it was stopped. pgd20 is
    the paper's: ε 0.031, step 0.003, uniform start. pgd:… takes steps, restarts, step, loss (ce, kl, margin), norm
    (linf, l2) and eps; autoattack:… and apgd:… (its first two attacks) take norm and eps. With --precision bf16 a
    frozen copy of the network searches for AutoAttack in L∞, on a GPU captured in CUDA graphs; float32 decides.

    Examples:

      bullettrain evaluate runs/digits --attack clean,pgd20,pgd100x10 --curves

      bullettrain evaluate runs/cifar10-trades --attack pgd20 --attack autoattack --weights averaged

      bullettrain evaluate trades.pt --network wrn-34-10 --data cifar10 --attack autoattack:eps=8/255

      bullettrain evaluate runs/cifar10-pgd-short --attack apgd:eps=8/255 --precision bf16 --compile

      bullettrain evaluate my.package:make_network --data cifar10 --attack pgd:steps=50,norm=l2,eps=0.5
    """
    import torch

    from bullettrain.commands.evaluate_terminal import show
    from bullettrain.config.settings import ConfigError
    from bullettrain.evaluation import evaluate as evaluation
    from bullettrain.evaluation.progress import EvaluationProgress
    from bullettrain.evaluation.results import FILE, Store
    from bullettrain.evaluation.specs import parse_attacks
    from bullettrain.loading import find_source, load_model
    from bullettrain.processes import StoppedError, StopRequest, find_place
    from bullettrain.reporting import write_reports
    from bullettrain.run_folder import RunError, RunFolder
    from bullettrain.validation import instead

    console = terminal()
    source = find_source(model, weights)
    config = source.config
    defaults = _defaults(config, eps, norm)
    attacks = parse_attacks(attack or ["clean", "pgd20"], defaults)
    if (corruptions or mce_baseline) and "corruptions" not in {attack.name for attack in attacks}:
        raise ConfigError("--corruptions and --mce-baseline go with --attack corruptions")
    if precision not in PRECISIONS:
        raise ConfigError(f"--precision is {precision!r}{instead(precision, PRECISIONS)}")
    place = find_place(device)
    if place.together:
        raise ConfigError("evaluate runs in one process; start it without torchrun")
    plan = evaluation.Plan(
        attacks,
        PRECISIONS[precision],
        batch_size or (1000 if place.device.type == "cuda" else 500),
        seed,
        compile_network,
        defaults if curves else None,
        curve_images,
        corruptions,
        _baseline(mce_baseline),
        overwrite,
        number,
    )
    if config is not None and config.training.threads:
        torch.set_num_threads(config.training.threads)  # as it was trained: a small network waits for its threads
    data = data or (config.data.name if config else None)
    if data is None:
        raise ConfigError("say which images to evaluate it on, e.g. --data cifar10")
    images = _images(data, config, data_dir, number, image_size)
    loaded = load_model(
        model,
        weights=weights,
        network=network,
        trust=trust,
        mean=options.numbers(mean),
        std=options.numbers(std),
        channels=images.images.shape[1],
        image_size=images.images.shape[2],
        classes=len(images.classes),
    )
    folder = out or source.folder or Path("runs") / f"evaluate-{_folder_name(model)}"
    if RunFolder(folder).exists and (source.folder is None or not folder.samefile(source.folder)):
        raise ConfigError(f"--out {folder} is a run, but not the one that is evaluated; choose another --out")
    store = Store(folder)
    console.print(f"{source}: {number or len(images)} images of {data} on {place.device}", soft_wrap=True)
    with StopRequest() as stop:
        try:
            with store.alone(), EvaluationProgress(console, stop) as progress:
                entry, asked = evaluation.evaluate(
                    loaded, images, data, plan, device=place.device, store=store, progress=progress
                )
        except (StoppedError, KeyboardInterrupt):  # a second Ctrl-C ends it at once, with what was saved before
            words = [word for word in sys.argv[1:] if not (store.forgot and word == "--overwrite")]
            how = "this goes on, where --overwrite would start over" if store.forgot else "the same command goes on"
            console.print(f"interrupted; {how}:\n  {shlex.join(['bullettrain', *words])}", soft_wrap=True)
            sys.exit(128 + (stop.signal or 2))
    show(console, entry, asked, config, curves=curves)
    console.print(f"written  {folder / FILE}", soft_wrap=True)
    try:
        for page in write_reports(folder):
            console.print(f"report   {page}", soft_wrap=True)
    except (OSError, ValueError) as error:  # a folder whose run is damaged; the results are there all the same
        raise RunError(f"report.html could not be written to {folder}: {error}") from None


def _defaults(config: Config | None, eps: str | None, norm: str | None) -> Defaults:
    """Settings of attacks that do not give them: options first, then the run's, then the paper's."""
    from bullettrain.config.settings import ConfigError, number
    from bullettrain.evaluation.specs import Defaults, check_eps, threat_of

    own = threat_of(config) if config else Defaults()
    if norm not in (None, "linf", "l2"):
        raise ConfigError(f"--norm is {norm!r}; there are linf, l2")
    asked = Defaults(cast("NormName", norm or own.norm))
    if eps is not None:
        asked = Defaults(asked.norm, check_eps(number(eps), asked.norm, "--"))
    return own if asked.norm == own.norm and asked.eps in (None, own.eps) else asked


def _baseline(path: Path | None) -> dict[str, list[float]] | None:
    from bullettrain.config.settings import ConfigError
    from bullettrain.errors import read_settings_text
    from bullettrain.schema import conform

    try:
        return conform(json.loads(read_settings_text(path)), dict[str, list[float]]) if path else None
    except (OSError, ValueError, RecursionError) as error:
        form = "give JSON of the form {corruption: [accuracy, …]}"
        raise ConfigError(f"--mce-baseline {path} cannot be read ({error}); {form}") from None


def _images(name: str, config: Config | None, data_dir: Path | None, number: int, image_size: int | None) -> ImageSet:
    from bullettrain.config.settings import ConfigError
    from bullettrain.data import load

    if image_size is None and config is not None and name == config.data.name:
        image_size = config.data.image_size
    images = load(name, split="test", root=data_dir, image_size=image_size)
    if number > len(images):
        raise ConfigError(f"--images is {number}, but {name} has {len(images)} test images; give 0 for all")
    return images


def _folder_name(model: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", Path(model).name if Path(model).exists() else model).strip("-")
