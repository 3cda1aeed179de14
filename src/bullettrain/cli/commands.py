"""What each command takes: fields are arguments and options, and the string below a field is its help."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

Count = Annotated[int, typer.Option(min=1)]
MaybeCount = Annotated[int | None, typer.Option(min=1)]
ImageSize = Annotated[int | None, typer.Option(min=1, max=4096)]
Number = Annotated[str | None, typer.Option(metavar="NUMBER")]
Settings = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE")]


@dataclass(frozen=True, kw_only=True)
class _Data:
    """Where data is."""

    data_dir: Path | None = None
    """Where datasets lie. Default: $BULLETTRAIN_DATA, then the user's cache."""


@dataclass(frozen=True, kw_only=True)
class _Dataset(_Data):
    """Which dataset."""

    name: Annotated[str, typer.Argument(show_default=False)]
    """mnist, cifar10, cifar100"""


@dataclass(frozen=True, kw_only=True)
class _Device:
    """Where it runs."""

    device: str | None = None
    """cpu, cuda or cuda:1. Default: a GPU where there is one."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """Which network."""

    model: Annotated[str, typer.Argument(show_default=False)]
    """A run's folder, a checkpoint (.safetensors), a state_dict (.pt) with --network, package.module:function or
    timm:NAME."""
    weights: str | None = None
    """Of a run: last, best or averaged. Default: best where it was chosen, else last."""
    network: str | None = None
    """What the weights are of: wrn-34-10, package.module:function, timm:NAME. Default: what the file says."""
    trust: bool = False
    """Import and call the function that a file or run names as its network."""
    mean: str | None = None
    """Normalisation in front of a foreign network, e.g. 0.49,0.48,0.45."""
    std: str | None = None
    """With --mean."""


@dataclass(frozen=True, kw_only=True)
class _Images:
    """Which images a network takes."""

    image_size: ImageSize = None
    """Pixels a side, where the model does not say. Default: 32."""
    channels: MaybeCount = None
    """Channels of images, where the model does not say. Default: 3."""


@dataclass(frozen=True, kw_only=True)
class Train(_Device, _Data):
    """Train a robust network.

    Without arguments: handwritten digits that come with scikit-learn, on the CPU, in about a minute.

    Examples:

      bullettrain train

      bullettrain train --compare

      bullettrain train cifar10-trades-short --epochs 10 --eps 4/255 --set weight_decay=1e-4

      bullettrain train cifar10-trades-short --minutes 10

      bullettrain train cifar10-trades-short --method fast

      bullettrain train cifar10-trades-short --data folder:my-images --set data.image_size=32

      bullettrain train cifar10-trades-short --show > my.yaml; bullettrain train my.yaml

      bullettrain train runs/digits --resume

      torchrun --nproc-per-node 2 -m bullettrain train cifar10-trades
    """

    recipe: Annotated[str, typer.Argument()] = "digits"
    """What to train: a recipe (--list shows them), a YAML file as --show prints, or a run's folder."""
    data: str | None = None
    """digits, mnist, cifar10, cifar100, folder:PATH or npz:PATH."""
    network: str | None = None
    """small-cnn, preact-resnet-18, wrn-D-W, package.module:function or timm:NAME."""
    epochs: int | None = None
    """Passes over the training images."""
    minutes: Annotated[float | None, typer.Option(min=0.01)] = None
    """Instead of --epochs: as many as the whole command does in this time."""
    batch_size: int | None = None
    """Images in a mini-batch, over all processes together."""
    lr: Number = None
    """Learning rate."""
    eps: Number = None
    """Radius of the attack, e.g. 8/255."""
    settings: Settings = None
    """Change another setting; again for more. --show lists them."""
    out: Path | None = None
    """Folder of the run. Default: runs/RECIPE; to resume a run's folder, that folder."""
    resume: bool = False
    """Go on where the run in --out was stopped."""
    seed: int | None = None
    """Seed of everything random."""
    method: str | None = None
    """Train by a baseline instead: fast, fast-3, n-fgsm, yopo-2-5, gat, …; --list has all."""
    baseline: bool = False
    """The full number of steps for everyone: no BulletTrain."""
    compare: bool = False
    """Train without and with BulletTrain, and put both in one table."""
    cache_dir: Path | None = None
    """Keep compiled code here, so that the next run need not compile it again."""
    compile_: bool = False
    """Compile the network with torch.compile."""
    accumulate: int | None = None
    """Mini-batches to one update of the weights."""
    trust: bool = False
    """Import and call the function that a file or run names as its network."""
    keep_going: bool = False
    """Warn of a collapse, but do not stop."""
    list_: bool = False
    """Show the recipes and stop."""
    show: bool = False
    """Print the settings as YAML and stop."""


@dataclass(frozen=True, kw_only=True)
class Evaluate(Model, _Device, _Data):
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

    attack: Annotated[list[str] | None, typer.Option("--attack", metavar="ATTACK")] = None
    """clean, pgd20, pgd100x10, pgd1000x5, pgd:KEY=VALUE,…, autoattack, apgd, corruptions; again, or with commas, for
    more. Default: clean,pgd20."""
    data: str | None = None
    """cifar10, cifar100, mnist, digits, folder:PATH or npz:PATH. Default: the run's."""
    eps: str | None = None
    """ε of attacks that do not say. Default: the run's, else 0.031 (L2: 0.5)."""
    norm: str | None = None
    """linf or l2, of attacks that do not say. Default: the run's, else linf."""
    images: Annotated[int, typer.Option(min=0)] = 0
    """Evaluate only so many test images, every class alike; 0: all."""
    image_size: ImageSize = None
    """Side to which the images of a folder are resized. Default: the run's, for its data."""
    precision: str = "float32"
    """Of the search of attacks: float32, tf32, bf16, or both (first and last). Float32 decides."""
    curves: bool = False
    """Also accuracy against ε and against steps, and a look for masking."""
    curve_images: Count = 1000
    """Images for --curves."""
    corruptions: Path | None = None
    """Folder of CIFAR-10-C's or -100-C's files."""
    mce_baseline: Path | None = None
    """JSON of accuracies by corruption, for the mean corruption error."""
    batch_size: MaybeCount = None
    """Images at once. Default: 1000 on a GPU, 500 elsewhere."""
    seed: Annotated[int, typer.Option(min=0)] = 0
    """Seed of every attack's noise."""
    compile_: bool = False
    """Compile the network with torch.compile."""
    overwrite: bool = False
    """Evaluate anew: results of these attacks are dropped first."""
    out: Path | None = None
    """Folder of evaluation.json and report.html. Default: the run's."""


@dataclass(frozen=True, kw_only=True)
class Predict(_Device, _Images, Model):
    """Classify images: the likeliest classes, with their probabilities.

    Images are made grey or coloured and resized to what the network was trained on, as `--data folder:PATH` does.

    Examples:

      bullettrain predict runs/digits seven.png

      bullettrain predict runs/cifar10-trades photos/*.jpg --top 1 --json
    """

    images: Annotated[list[Path], typer.Argument(metavar="IMAGE...", show_default=False)]
    """Image files."""
    top: Count = 3
    """Show so many classes of each image, likeliest first."""
    json_: bool = False
    """Print JSON, with the probability of every class."""


@dataclass(frozen=True, kw_only=True)
class Export(_Images, Model):
    """Write a network for deployment: normalisation inside, images in [0, 1] to logits, batches of any size.

    onnx runs in ONNX Runtime, torch-export in `torch.export.load`. hub is a folder with model.safetensors, config.json,
    a model card with the accuracies that `bullettrain evaluate` found, and the fields of RobustBench's model_info;
    `bullettrain.load` reads it.

    Examples:

      bullettrain export runs/digits --format onnx

      bullettrain export runs/cifar10-trades --format hub --weights averaged --out my-model
    """

    format_: str = "onnx"
    """onnx, torch-export, hub."""
    out: Path | None = None
    """File, or folder of hub. Default: model.onnx, model.pt2 or hub, in the run's folder or here."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """Write report.html into a run's folder again, from what the run recorded.

    Example:

      bullettrain report runs/digits
    """

    folder: Annotated[Path, typer.Argument(show_default=False)]
    """Folder of a run, a comparison or an evaluation."""


@dataclass(frozen=True, kw_only=True)
class Bench(_Device, _Data):
    """Time the baseline and BulletTrain side by side, in every engine that runs here.

    Examples:

      bullettrain bench

      bullettrain bench cifar10-trades-short --engines graphs,compile --out results/bench.json
    """

    recipe: Annotated[str, typer.Argument()] = "digits"
    """Network, data and method to time."""
    settings: Settings = None
    """Change a setting of the recipe; again for more."""
    engines: str = ""
    """Which of eager, graphs, compile. Default: those that run here."""
    train_steps: Annotated[int, typer.Option(min=0)] = 200
    """Steps of training first, so that the shares are real."""
    checkpoint: Path | None = None
    """A run, or its weights (.safetensors), to start from instead."""
    shares: str | None = None
    """Impose shares of outlier,boundary,robust, e.g. 0.18,0.28,0.54."""
    steps: Count = 40
    """Mini-batches timed at once."""
    repeats: Count = 5
    """How often they are timed."""
    out: Path | None = None
    """Write the figures there: .json, and the table beside it as .md."""


@dataclass(frozen=True, kw_only=True)
class Reproduce(_Device, _Data):
    """Reproduce a table or a figure of the paper, next to the paper's own figures.

    Finished runs are kept, and shared between tables; the same command again continues where it was stopped.

    Examples:

      bullettrain reproduce

      bullettrain reproduce table-trades --scale smoke

      bullettrain reproduce table-trades --scale short --rows trades,bt-nr2 --seeds 3 --dry-run

      bullettrain reproduce fig-gamma fig-nr --scale short --jobs 3

      bullettrain reproduce --scale medium --dry-run
    """

    names: Annotated[list[str] | None, typer.Argument(metavar="[NAME]...")] = None
    """Tables and figures. Without a name: list them."""
    scale: str | None = None
    """smoke, short, medium, paper: digits in seconds, minutes on a GPU, WRN-34-10 for 30 epochs, or as in the paper.
    Default: smoke. Without a name, medium and paper train WRN-34-10. For speed, these two attack k = 4 mini-batches at
    once; in the paper k is 1, as with --set attack_group=1."""
    out: Path | None = None
    """Folder of runs, records and tables. Default: runs/reproduce/SCALE."""
    rows: Annotated[list[str] | None, typer.Option("--rows", metavar="ROW")] = None
    """Only these rows, separated by commas; * matches anything."""
    seeds: Count = 1
    """Seeds per row; tables then show mean ± std."""
    jobs: Count = 1
    """Number of concurrent runs; disables timing."""
    settings: Settings = None
    """Change a setting of every row; again for more."""
    images: Annotated[int | None, typer.Option(min=0)] = None
    """Test images for the attacks after training; 0: all."""
    precision: str | None = None
    """Precision in which these attacks search: float32, tf32 or bf16. Tables mention it. Default: float32, unless there
    is a result already."""
    train_only: bool = False
    """Skip these attacks; run them later, without this option or by `evaluate`."""
    dry_run: bool = False
    """Show what would run and how long its training takes, and exit."""
    tables: bool = False
    """Train nothing; write tables and pictures of finished runs, with what `evaluate` found."""
    timing: bool = False
    """Train nothing; time the steps of finished runs, one run at a time: for minutes and wall-clock of runs that shared
    the device."""


@dataclass(frozen=True, kw_only=True)
class DataList(_Data):
    """Show the datasets, and which of them are here.

    Example:

      bullettrain data list
    """


@dataclass(frozen=True, kw_only=True)
class DataPrepare(_Dataset):
    """Fetch a dataset from its official source, checked; or unpack a file that you put there.

    Example:

      bullettrain data prepare cifar10
    """


@dataclass(frozen=True, kw_only=True)
class DataVerify(_Dataset):
    """Check a dataset's files against the digests of the originals.

    Example:

      bullettrain data verify cifar10
    """


@dataclass(frozen=True, kw_only=True)
class DataCorrupt(_Device, _Data):
    """Make CIFAR-10-C or CIFAR-100-C: the test images under 19 common corruptions, at 5 severities.

    Examples:

      bullettrain data corrupt --dataset cifar10 --out CIFAR-10-C

      bullettrain data corrupt --dataset cifar100 --out CIFAR-100-C --only fog,snow
    """

    out: Path
    """Folder for the files; existing files are kept."""
    dataset: str = "cifar10"
    """Whose test images: cifar10 or cifar100."""
    only: Annotated[list[str] | None, typer.Option("--only", metavar="NAME")] = None
    """Only this corruption; repeatable, or several separated by commas."""
    seed: int = 0
    """Seed of the random parts."""
    jobs: MaybeCount = None
    """Number of processes. Default: one per core."""
