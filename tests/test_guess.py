"""What "did you mean" guesses: what was meant, or nothing."""

import pytest

from bullettrain.config.recipes import RECIPES
from bullettrain.config.sections import Config, flatten
from bullettrain.corruptions import CORRUPTIONS
from bullettrain.errors import guesses, near
from bullettrain.evaluation.specs import PGD
from bullettrain.models import NETWORKS
from bullettrain.precision import Precision
from bullettrain.reproduction.studies import STUDIES
from bullettrain.validation import instead

KEYS = [key.rpartition(".")[2] for key in flatten(Config().to_dict())]
GUESSES = [
    (Precision.__args__, {"fp32": "float32", "FP32": "float32", "bfloat16": "bf16", "tf-32": "tf32", "bf15": ""}),
    (Precision.__args__, dict.fromkeys(("fp16", "float16", "half", "double", "32"), "")),
    (KEYS, {"epoch": "epochs", "n_epochs": "epochs", "batch": "batch_size", "batch-size": "batch_size"}),
    (
        KEYS,
        {
            "learning_rate": "lr",
            "learning-rate": "lr",
            "epsilon": "eps",
            "alpha": "step_size",
            "val": "validation allocation_value",
        },
    ),
    (KEYS, {"gama": "gamma", "momentm": "momentum", "group": "attack_group", "ema": "average"}),
    (KEYS, dict.fromkeys(("schedule", "sched", "arch", "dropout", "nr", "val_size", "x", ""), "")),
    (RECIPES, {"digit": "digits", "digist": "digits", "mnist": "mnist-pgd", "cifar10_trades": "cifar10-trades"}),
    (
        RECIPES,
        {
            "trades": "cifar10-trades cifar10-trades-short",
            "cifar100": "cifar100-augmix cifar100-augmix-short cifar100-augmix-fast",
        },
    ),
    (RECIPES, dict.fromkeys(("cifar10", "imagenet", "mnist-trades", "cifar10-fast", "digits-trades"), "")),
    (PGD.__annotations__, {"step_size": "step", "epsilon": "eps", "stepz": "step", "iters": ""}),
    (
        CORRUPTIONS,
        {"jpeg": "jpeg_compression", "gaussian": "gaussian_noise gaussian_blur", "noise": ""},
    ),
    (NETWORKS, {"resnet18": "preact-resnet-18", "wrn34": "wrn-34-10", "vgg": "", "resnet50": ""}),
    (["out", "device", "data"], {"output": "out", "divice": ""}),
    (STUDIES, {"mart": "table-mart", "table-trade": "table-trades", "table1": "", "table-2": "", "fig3": ""}),
]


@pytest.mark.parametrize(("names", "wanted"), GUESSES)
def test_guesses(names, wanted):
    names = list(dict.fromkeys(names))
    assert {name: " ".join(guesses(name, names)) for name in wanted} == wanted


def test_the_sentence():
    assert instead("digit", ["digits", "letters"]) == "; there are digits, letters; did you mean 'digits'?"
    assert instead("trades", ["a-trades", "b-trades"], "--list shows all") == (
        "; --list shows all; did you mean 'a-trades' or 'b-trades'?"
    )
    assert instead("words", ["digits", "letters"]) == "; there are digits, letters"


def test_paths_mean_what_lies_beside_them(tmp_path):
    (tmp_path / "Digits").mkdir()
    for file in ("cifar.pt", "mine.yaml", ".hidden"):
        (tmp_path / file).touch()
    assert near(tmp_path / "digts") == f"; did you mean {tmp_path / 'Digits'}?"
    assert near(tmp_path / "cifr.pt") == f"; did you mean {tmp_path / 'cifar.pt'}?"
    for name in ("cifr.yaml", "hidden", "other", "mine/x", "cifar.pt"):
        assert near(tmp_path / name) == ""
