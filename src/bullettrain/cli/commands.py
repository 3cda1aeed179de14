"""The arguments and options of each command. The docstring below a field is its help text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

Count = Annotated[int, typer.Option(min=1)]
MaybeCount = Annotated[int | None, typer.Option(min=1)]
ImageSize = Annotated[int | None, typer.Option(min=1, max=4096)]
Number = Annotated[str | None, typer.Option(metavar="NUMBER")]
Numbers = Annotated[str | None, typer.Option(metavar="NUMBERS")]
Settings = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE")]


@dataclass(frozen=True, kw_only=True)
class _Data:
    """The folder of datasets."""

    data_dir: Path | None = None
    """Folder of the datasets. Default: $BULLETTRAIN_DATA, else the user's cache folder."""


@dataclass(frozen=True, kw_only=True)
class _Dataset(_Data):
    """A dataset that can be downloaded."""

    name: Annotated[str, typer.Argument(show_default=False)]
    """Name of the dataset: mnist, cifar10, cifar100."""


@dataclass(frozen=True, kw_only=True)
class _Device:
    """The device."""

    device: str | None = None
    """Device: cpu, cuda or cuda:1. Default: cuda if available, else cpu."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """A trained network."""

    model: Annotated[str, typer.Argument(show_default=False)]
    """Folder of a run, checkpoint (.safetensors), state_dict (.pt) with --network, package.module:function, or
    timm:NAME."""
    weights: str | None = None
    """Which weights of a run to load: last, best or averaged. Default: best if training selected them, else last."""
    network: str | None = None
    """Architecture of the checkpoint: wrn-34-10, package.module:function or timm:NAME. Default: as the file says."""
    trust: bool = False
    """Import and call the function that the checkpoint names as its network."""
    mean: Numbers = None
    """Mean of each channel, e.g. 0.49,0.48,0.45, to normalise inputs of a network that was not trained here."""
    std: Numbers = None
    """Standard deviation of each channel, with --mean."""


@dataclass(frozen=True, kw_only=True)
class _Images:
    """The input shape of a network."""

    image_size: ImageSize = None
    """Height and width of the input, if the model does not record it. Default: 32."""
    channels: MaybeCount = None
    """Input channels, if the model does not record them. Default: 3."""


@dataclass(frozen=True, kw_only=True)
class Train(_Device, _Data):
    """Train a robust network.

    Without arguments, train a small CNN on scikit-learn's handwritten digits, in about a minute on a CPU.

    Examples:

      bullettrain train
      bullettrain train --compare
      bullettrain train cifar10-trades-short --eps 4/255 --set weight_decay=1e-4
      bullettrain train cifar10-trades-short --minutes 10
      bullettrain train cifar10-trades-short --method fast
      bullettrain train own-images --data folder:my-images --batch-size 64
      bullettrain train cifar10-trades-short --show > my.yaml
      bullettrain train my.yaml
      bullettrain train runs/digits --resume
      torchrun --nproc-per-node 2 -m bullettrain train cifar10-trades
    """

    recipe: Annotated[str | None, typer.Argument(show_default="digits")] = None
    """Recipe to train (see --list), YAML file of settings (see --show), or folder of a run."""
    data: str | None = None
    """Dataset: digits, mnist, cifar10, cifar100, folder:PATH or npz:PATH."""
    network: str | None = None
    """Network: small-cnn, preact-resnet-18, wrn-D-W, package.module:function or timm:NAME."""
    epochs: int | None = None
    """Number of epochs."""
    minutes: Annotated[float | None, typer.Option(min=0.01)] = None
    """Set the number of epochs so that the whole command takes about this many minutes."""
    batch_size: int | None = None
    """Batch size, summed over all processes."""
    lr: Number = None
    """Peak learning rate."""
    eps: Number = None
    """Radius of the perturbations to train against, e.g. 8/255."""
    settings: Settings = None
    """Change any other setting (see --show). Repeat it for several."""
    out: Path | None = None
    """Folder to write the run to. Default: runs/RECIPE, or the run to resume."""
    resume: bool = False
    """Resume an interrupted run from its last checkpoint."""
    seed: int | None = None
    """Random seed."""
    method: str | None = None
    """Train with another method instead: fast, fast-3, n-fgsm, yopo-2-5, gat, … (see --list)."""
    baseline: bool = False
    """Train without BulletTrain: every example gets the full number of attack steps."""
    compare: bool = False
    """Train without and with BulletTrain, and compare both in one table."""
    cache_dir: Path | None = None
    """Folder to cache compiled code in, so that later runs start faster."""
    compile_: bool = False
    """Compile the network with torch.compile."""
    accumulate: int | None = None
    """Accumulate gradients over this many batches before each optimizer step."""
    trust: bool = False
    """Import and call the function that a YAML file or run names as its network."""
    keep_going: bool = False
    """Continue after a collapse, with a warning, instead of stopping."""
    list_: bool = False
    """List recipes and methods, and exit."""
    show: bool = False
    """Print all settings of the recipe as YAML, and exit."""


@dataclass(frozen=True, kw_only=True)
class Evaluate(Model, _Device, _Data):
    """Measure the accuracy of any network under PGD, AutoAttack and common corruptions.

    pgd20 has 20 steps at the run's ε; for other networks ε 0.031, step size 0.003, as in the paper. pgd:… takes steps,
    restarts, step, loss (ce, kl or margin), norm (linf or l2) and eps. autoattack:… and apgd:… (the first two attacks
    of AutoAttack) take norm and eps. Results are saved to evaluation.json after each attack; if interrupted, the same
    command resumes.

    Examples:

      bullettrain evaluate runs/digits --attack pgd20,pgd100x10 --curves
      bullettrain evaluate runs/digits --attack autoattack --weights averaged
      bullettrain evaluate my.pt --network wrn-34-10 --data cifar10
      bullettrain evaluate my.package:network --data cifar10 --attack pgd:steps=50
      bullettrain evaluate runs/cifar10-pgd-short --attack apgd --precision bf16
    """

    attack: Annotated[list[str] | None, typer.Option("--attack", metavar="ATTACK")] = None
    """Attacks, separated by commas: pgd20, pgd100x10, pgd1000x5, pgd:KEY=VALUE,…, autoattack, apgd, corruptions, or
    clean for none. Clean accuracy is always shown as well. Default: pgd20."""
    data: str | None = None
    """Test set: cifar10, cifar100, mnist, digits, folder:PATH or npz:PATH. Default: that of the run."""
    eps: Number = None
    """Radius of attacks that do not set eps. Default: that of the run, else 0.031 (L2: 0.5)."""
    norm: str | None = None
    """Norm of attacks that do not set it: linf or l2. Default: that of the run, else linf."""
    images: Annotated[int, typer.Option(min=0)] = 0
    """Number of test images, balanced over the classes; 0 for all."""
    image_size: ImageSize = None
    """Resize the images of a folder to this height and width. Default: as in training, for the data of the run."""
    precision: str = "float32"
    """Precision of the attacks: float32, tf32, bf16, or both (float32 and bf16). Accuracy is always counted in
    float32."""
    curves: bool = False
    """Also measure accuracy over ε and over steps, and check for gradient masking."""
    curve_images: Count = 1000
    """Number of test images for --curves."""
    corruptions: Path | None = None
    """Folder of the CIFAR-10-C or CIFAR-100-C files."""
    mce_baseline: Path | None = None
    """JSON file of a baseline's accuracy by corruption, for the mean corruption error."""
    batch_size: MaybeCount = None
    """Batch size. Default: 1000 on a GPU, else 500."""
    seed: Annotated[int, typer.Option(min=0)] = 0
    """Random seed of the attacks."""
    compile_: bool = False
    """Compile the network with torch.compile."""
    overwrite: bool = False
    """Discard earlier results of these attacks and run them again."""
    out: Path | None = None
    """Folder for evaluation.json and report.html. Default: that of the run."""


@dataclass(frozen=True, kw_only=True)
class Predict(_Device, _Images, Model):
    """Classify image files, and print the most likely classes with their probabilities.

    Images are converted to the channels and the size that the network was trained on.

    Examples:

      bullettrain predict runs/digits seven.png
      bullettrain predict runs/cifar10-trades photos --top 1 --json
    """

    images: Annotated[list[Path], typer.Argument(metavar="IMAGE...", show_default=False)]
    """Image files, or folders of them, also of class folders."""
    top: Count = 3
    """Number of classes to show for each image."""
    json_: bool = False
    """Print JSON, with the probability of every class."""


@dataclass(frozen=True, kw_only=True)
class Export(_Images, Model):
    """Export a network as ONNX, as a torch.export program, or as a folder for a model hub.

    The exported network maps images in [0, 1] to logits, for any batch size; it includes the normalisation. hub writes
    a folder with model.safetensors, config.json, a model card with the measured accuracies, and RobustBench's
    model_info; `bullettrain.load` reads it.

    Examples:

      bullettrain export runs/digits --format onnx
      bullettrain export runs/cifar10-trades --format hub --weights averaged
    """

    format_: str = "onnx"
    """Format: onnx, torch-export, hub. onnx needs the extra export."""
    out: Path | None = None
    """File to write, or folder for hub. Default: model.onnx, model.pt2 or hub, in the run's folder or here."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """Write the report.html of a run again, from its records.

    Example:

      bullettrain report runs/digits
    """

    folder: Annotated[Path, typer.Argument(show_default=False)]
    """Folder of a run, a comparison or an evaluation."""


@dataclass(frozen=True, kw_only=True)
class Bench(_Device, _Data):
    """Time training steps without and with BulletTrain, in every engine that is available.

    Examples:

      bullettrain bench
      bullettrain bench cifar10-trades-short --engines graphs --out bench.json
    """

    recipe: Annotated[str, typer.Argument()] = "digits"
    """Recipe whose network, data and method are timed."""
    settings: Settings = None
    """Change a setting of the recipe. Repeat it for several."""
    engines: str = ""
    """Engines, separated by commas: eager, graphs, compile. Default: those available here."""
    train_steps: Annotated[int, typer.Option(min=0)] = 200
    """Training steps before timing, so that the shares of the categories are realistic."""
    checkpoint: Path | None = None
    """Start from this run or checkpoint (.safetensors) instead of training first."""
    shares: Numbers = None
    """Fix the shares of outlier,boundary,robust examples, e.g. 0.18,0.28,0.54."""
    steps: Count = 40
    """Batches in each timing."""
    repeats: Count = 5
    """Number of timings."""
    out: Path | None = None
    """JSON file to write the results to; a Markdown table is written beside it."""


@dataclass(frozen=True, kw_only=True)
class Reproduce(_Device, _Data):
    """Reproduce a table or a figure of the paper, and compare it with the published numbers.

    Tables share finished runs. If interrupted, the same command resumes.

    Examples:

      bullettrain reproduce
      bullettrain reproduce table-trades --scale smoke
      bullettrain reproduce table-trades --rows trades,bt-nr2 --dry-run
      bullettrain reproduce fig-gamma fig-nr --scale short --jobs 3
      bullettrain reproduce --scale medium --dry-run
    """

    names: Annotated[list[str] | None, typer.Argument(metavar="[NAME]...")] = None
    """Tables and figures to reproduce. Without a name, list them."""
    scale: str | None = None
    """Size of the runs: smoke, short, medium, paper. smoke takes seconds on a CPU, short takes minutes on a GPU, medium
    trains WRN-34-10 for 30 epochs, and paper trains as the paper does, except that medium and paper attack 4 batches at
    once (--set attack_group=1 for 1). Without a name, medium and paper run large-network. Default: smoke."""
    out: Path | None = None
    """Folder for runs, records and tables. Default: runs/reproduce/SCALE."""
    rows: Annotated[list[str] | None, typer.Option("--rows", metavar="ROW")] = None
    """Only these rows, separated by commas; * matches any text."""
    seeds: Count = 1
    """Number of seeds for each row; with several, tables show mean ± standard deviation."""
    jobs: Count = 1
    """Number of concurrent runs; disables timing."""
    settings: Settings = None
    """Change a setting of every row. Repeat it for several."""
    images: Annotated[int | None, typer.Option(min=0)] = None
    """Number of test images for the attacks that run after training; 0 for all."""
    precision: str | None = None
    """Precision of the attacks that run after training: float32, tf32 or bf16. Default: keep existing results, and use
    float32 for new ones."""
    train_only: bool = False
    """Train, but leave out the attacks that run after training."""
    dry_run: bool = False
    """Show what would run and how long its training takes, and exit."""
    tables: bool = False
    """Do not train; write the tables and figures of finished runs, with the results of `bullettrain evaluate`."""
    timing: bool = False
    """Do not train; time the steps of finished runs one run at a time, for runs that shared the device."""


@dataclass(frozen=True, kw_only=True)
class DataList(_Data):
    """List the datasets, and whether they are available.

    Example:

      bullettrain data list
    """


@dataclass(frozen=True, kw_only=True)
class DataPrepare(_Dataset):
    """Download a dataset from its official source and verify it, or unpack a file that you downloaded.

    Example:

      bullettrain data prepare cifar10
    """


@dataclass(frozen=True, kw_only=True)
class DataVerify(_Dataset):
    """Verify the files of a dataset by their checksums.

    Example:

      bullettrain data verify cifar10
    """


@dataclass(frozen=True, kw_only=True)
class DataCorrupt(_Device, _Data):
    """Create CIFAR-10-C or CIFAR-100-C: the test images under 19 corruptions at 5 severities.

    Examples:

      bullettrain data corrupt --dataset cifar10 --out CIFAR-10-C
      bullettrain data corrupt --dataset cifar100 --out CIFAR-100-C --only fog,snow
    """

    out: Path
    """Folder to write to; files that exist are kept."""
    dataset: str = "cifar10"
    """Dataset whose test images are corrupted: cifar10 or cifar100."""
    only: Annotated[list[str] | None, typer.Option("--only", metavar="NAME")] = None
    """Only these corruptions, separated by commas."""
    seed: int = 0
    """Random seed."""
    jobs: MaybeCount = None
    """Number of processes. Default: one per CPU core."""
