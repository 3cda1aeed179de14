"""Which examples' views AugMix needs, and whether batch-norm statistics are what BulletTrain loses by: small, on a CPU.

python benchmarks/augmix_classes.py augmix 0 --data-dir DATA --out results/augmix/which-views.json

WRN-10-1 on 8,000 images of CIFAR-10 at 16×16, 20 epochs; some four minutes on a core. Judged on 2,000 test images,
clean and under noise, blur and contrast, as it is and with statistics of batch norms taken anew from all examples:
clean, as views, and both.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from bullettrain.augmix import ViewMaker
from bullettrain.config import recipe
from bullettrain.config.sections import Config
from bullettrain.data import ImageSet
from bullettrain.evaluation.accuracy import clean_accuracy
from bullettrain.evaluation.corruptions import spot_corruptions
from bullettrain.processes import Place
from bullettrain.run_folder import RunFolder, environment
from bullettrain.training.optimizer import statistics_anew
from bullettrain.training.setup import load_data, make_loader
from bullettrain.training.trainer import Trainer

CPU = Place(torch.device("cpu"))
METHODS = {
    "augmix": ["baseline"],
    "augmix, images as views": ["baseline", "data.views=true"],
    "bullettrain": [],
    "bullettrain, images as views": ["data.views=true"],
    "bullettrain, views of outliers too": ["method.outlier=1", "method.ordered=false"],
    "bullettrain, views of robust examples too": ["method.robust=1"],
    "bullettrain, selected in eval mode": ["selection=eval"],
    "bullettrain, selected in eval mode, four at once": ["selection=eval", "attack_group=4"],
    "bullettrain, selected by last logits": ["selection=last"],
    "bullettrain, selected by last logits, images as views": ["selection=last", "data.views=true"],
    "bullettrain, half of the images as views": ["data.views=0.5"],
    "bullettrain, selected by last logits, half of the images as views": ["selection=last", "data.views=0.5"],
    "bullettrain, half of the images as views, beta 18": ["data.views=0.5", "method.beta=18"],
    "bullettrain, half of the images as views, beta 24": ["data.views=0.5", "method.beta=24"],
    "bullettrain, half of the images as views, gamma 0.5": ["data.views=0.5", "gamma=0.5"],
    "bullettrain, half of the images as views, gamma 0.35": ["data.views=0.5", "gamma=0.35"],
    "bullettrain, by chance": ["score=random"],
}
CUTS = ["network.name=wrn-10-1", "data.train_size=8000", "data.test_size=2000", "epochs=20", "threads=1"]
REST = ["probe=0", "precision=float32", "channels_last=false"]


def main() -> None:
    """Train and judge one, and add it to the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("method", choices=METHODS)
    parser.add_argument("seed", type=int)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--average", type=float, default=0.0, help="decay of a weight average, to be judged as well")
    options = parser.parse_args()
    settings = [setting for setting in METHODS[options.method] if setting != "baseline"]
    settings += [f"seed={options.seed}", f"average={options.average}"]
    config = recipe("cifar10-augmix-short").with_settings([*CUTS, *REST, *settings])
    config = config.baseline() if "baseline" in METHODS[options.method] else config
    data = tuple(halved(part) for part in load_data(config, options.data_dir))
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(config, RunFolder(Path(folder)), CPU, (data[0], data[1], data[2]))
        assert trainer.run() == "finished"
    end = trainer.run_sums.averages(selects=trainer.selects, has_clean=True)
    row: dict[str, Any] = {"method": options.method, "seed": options.seed, "work": end["work"]}
    row |= {name: end[name] for name in ("outlier", "boundary", "robust")}
    row["as it is"] = judged(trainer.network, data[2])
    if trainer.average is not None:
        row |= {"average": options.average, "averaged": judged(trainer.average.module, data[2])}
    for of in (("clean",), ("views",), ("clean", "views")):
        row[f"statistics of {' and '.join(of)}"] = judged(anew(trainer.network, config, data[0], of), data[2])
    content = json.loads(options.out.read_text()) if options.out.exists() else {"environment": None, "rows": []}
    content["environment"] = environment(CPU.device)
    content["rows"].append(row)
    RunFolder(options.out.parent).write(options.out.name, (json.dumps(content, indent=1) + "\n").encode())
    print(json.dumps(row))


def halved(images: ImageSet) -> ImageSet:
    """At half the resolution."""
    if not len(images):
        return images
    small = F.avg_pool2d(images.images.float(), 2).round().to(torch.uint8)
    return ImageSet(small, images.labels, images.classes)


def judged(network: nn.Module, test: ImageSet) -> dict[str, float]:
    """Percent, clean and in the mean of three corruptions at five severities."""
    network.eval()
    corrupted = spot_corruptions(network, test, device=CPU.device)["accuracy"]
    return {"clean": 100 * clean_accuracy(network, test, device=CPU.device), "corruptions": 100 * corrupted}


@torch.no_grad()
def anew(network: nn.Module, config: Config, train: ImageSet, of: tuple[str, ...]) -> nn.Module:
    """A copy whose batch norms have the mean statistics of 32 mini-batches, cropped and flipped as in training."""
    network, maker, chance = copy.deepcopy(network).train(), ViewMaker(), torch.Generator().manual_seed(0)
    images = [x for x, _ in itertools.islice(make_loader(config, train, CPU).epoch(0), 32)]
    with statistics_anew(network, images[0]):
        for x in images:
            if "clean" in of:
                network(x)
            if "views" in of:
                network(maker(x, maker.draw(len(x), 2, generator=chance, device=x.device)).flatten(0, 1))
    return network


if __name__ == "__main__":
    main()
