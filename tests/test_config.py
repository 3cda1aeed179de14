import itertools
import math
import re
from pathlib import Path

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

from bullettrain import models
from bullettrain.config import RECIPES, Config, ConfigError, recipe
from bullettrain.config.methods import with_method
from bullettrain.config.recipes import one_line
from bullettrain.config.settings import as_setting, number
from bullettrain.data import ImageSet
from bullettrain.evaluation.specs import threat_of
from bullettrain.processes import Place
from bullettrain.run_folder import RunFolder
from bullettrain.training.optimizer import make_optimizer, rate
from bullettrain.training.setup import make_loader

SOME = ImageSet(torch.zeros(4, 3, 8, 8, dtype=torch.uint8), torch.zeros(4, dtype=torch.int64), ("a", "b"))
WANTED = {
    "digits",
    "digits-augmix",
    "own-images",
    "mnist-pgd",
    "cifar10-trades",
    "cifar10-mart",
    "cifar10-pgd",
    "cifar10-trades-short",
    "cifar10-pgd-short",
    "cifar10-mart-short",
    "cifar10-robust",
    "cifar10-augmix",
    "cifar100-augmix",
    "cifar10-augmix-short",
    "cifar100-augmix-short",
    "cifar10-augmix-fast",
    "cifar100-augmix-fast",
}


def test_the_recipes_are_there():
    assert set(RECIPES) == WANTED
    assert all(20 < len(one_line(name)) < 120 for name in RECIPES)


def test_steps_that_do_not_cross_the_ball_are_said():
    """At the paper's eps its step of 0.007 is for ten of them."""
    short = recipe("cifar10-trades-short")
    found = short.with_settings(["boundary=4"]).method.shortfall()
    assert found == (
        "the attack moves an example by 4 × 0.007 = 0.028 at most, less than eps 0.031; for steps of 2.25·eps/4 give "
        "--set method.scale=2.25 or --set method.step_size=0.0174375"
    )
    advice = re.findall(r"--set (\S+)", found)
    enough = [short.with_settings(["boundary=4", other]) for other in (*advice, "scale=1.7", "eps=8/255")]
    enough += [chosen for name in WANTED for chosen in (recipe(name), recipe(name).baseline())]
    enough += [with_method(short, name) for name in ("fast", "fast-3", "n-fgsm", "yopo-2-5", "grad-align", "free-8")]
    assert [config.method.shortfall() for config in enough] == [None] * len(enough)


@pytest.mark.parametrize("name", sorted(WANTED))
def test_recipes_survive_yaml(name):
    config = recipe(name)
    assert config.recipe == name
    assert Config.from_dict(yaml.safe_load(yaml.safe_dump(config.to_dict()))) == config


def test_the_short_recipes_differ_in_their_objective_alone():
    """What is measured of PGD-AT was trained by the TRADES recipe with another objective."""
    trades, pgd = recipe("cifar10-trades-short"), recipe("cifar10-pgd-short")
    changed = trades.replace_section("method", objective="pgd-at", beta=None)
    assert {**changed.to_dict(), "recipe": "cifar10-pgd-short"} == pgd.to_dict()


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("cifar10-augmix-fast", "cifar10-batch-512/bullettrain"),
        ("cifar10-augmix-fast", "cifar10-batch-512/bullettrain-again"),
        ("cifar10-augmix-fast", "cifar10-batch-512/bullettrain-alone"),
        ("cifar100-augmix-fast", "cifar100-batch-500/bullettrain-gamma-0.4"),
    ],
)
def test_the_fast_recipes_are_those_that_were_measured(name, folder):
    record = Path(__file__).parents[1] / "results" / "augmix" / folder / "config.yaml"
    measured = RunFolder(record.parent).config()
    differ = {"recipe", "schedule.final", "training.compile"}  # the second is a cosine's alone
    assert recipe(name).differences(measured).keys() <= differ
    assert measured.training.compile


def test_images_as_views_are_all_or_a_share():
    short = recipe("cifar10-augmix-short")
    given = {text: short.with_settings([f"data.views={text}"]).data.views for text in ("true", "no", "1", "0.5", "1/4")}
    assert given == {"true": True, "no": False, "1": True, "0.5": 0.5, "1/4": 0.25}
    for views, share in ((True, 1), (False, None), (None, None), (0.25, 0.25)):  # as an old config.yaml may have it
        loader = make_loader(short.replace_section("data", views=views), SOME, Place(torch.device("cpu")))
        assert (loader.view_share if loader.views else None) == share
    for wrong, message in (("1.5", "at most 1"), ("half", "is no number")):
        with pytest.raises(ConfigError, match=message):
            short.with_settings([f"data.views={wrong}"])


def test_the_papers_settings():
    trades = recipe("cifar10-trades")
    assert (trades.network.name, trades.training.epochs, trades.training.batch_size) == ("wrn-34-10", 76, 128)
    assert (trades.optimizer.lr, trades.optimizer.momentum, trades.optimizer.weight_decay) == (0.1, 0.9, 2e-4)
    assert (trades.data.crop, trades.data.flip, trades.data.validation) == (4, True, 0)
    assert (trades.method.eps, trades.method.beta, trades.method.gamma) == (0.031, 6.0, 0.8)
    assert (trades.method.boundary, trades.method.robust, trades.method.outlier) == (10, 2, 0)
    assert trades.method.budget().boundary_step(0.031) == 0.007
    assert (trades.evaluation.steps, trades.evaluation.step_size) == (20, 0.003)
    mart = recipe("cifar10-mart")
    assert (mart.training.epochs, mart.optimizer.weight_decay, mart.schedule.milestones) == (90, 7e-4, (75, 90))
    augmix = recipe("cifar100-augmix")
    assert (augmix.network.name, augmix.training.epochs, augmix.optimizer.nesterov) == ("wrn-40-2", 100, True)
    assert (augmix.schedule.name, augmix.schedule.final, augmix.network.mean) == ("cosine", 1e-6, (0.5, 0.5, 0.5))
    assert (augmix.method.severity, augmix.method.width, augmix.method.depth) == (3, 3, -1)
    assert (augmix.method.boundary, augmix.method.robust, augmix.method.outlier, augmix.method.jsd) == (1, 0, 0, True)
    assert (augmix.method.gamma, recipe("cifar10-augmix").method.gamma) == (0.5, 0.65)
    assert recipe("cifar100-augmix-short").differences(augmix).keys() == {"training.epochs"}
    mnist = recipe("mnist-pgd")
    assert (mnist.method.eps, mnist.method.boundary, mnist.method.scale) == (0.3, 7, 1.7)
    assert (mnist.evaluation.steps, mnist.evaluation.restarts) == (100, 20)
    assert mnist.method.eps_warmup == 0.2  # else its baseline never learns
    short = recipe("cifar10-trades-short")
    assert (short.network.name, short.training.epochs, short.schedule.name) == ("preact-resnet-18", 30, "one-cycle")
    assert (short.optimizer.weight_decay, short.optimizer.decay_norms) == (5e-4, False)


@pytest.mark.parametrize(
    ("name", "own"),
    [("cifar10-trades", "eval"), ("cifar10-mart", "train"), ("cifar10-pgd", "eval"), ("cifar10-augmix", "train")],
)
def test_which_clean_logits_select(name, own):
    assert recipe(name).method.build_objective().selection == own
    for mode in ("eval", "train"):
        assert recipe(name).with_settings([f"selection={mode}"]).method.build_objective().selection == mode


def test_a_baseline_gives_everyone_the_full_steps():
    plain = recipe("cifar10-trades").baseline()
    assert plain.method.budget().uniform_steps == 10
    changed = recipe("cifar10-trades").differences(plain)
    assert set(changed) == {"method.robust", "method.outlier"}


def test_settings():
    config = recipe("digits").with_settings(
        [
            "eps=8/255",
            "training.epochs=7",
            "flip=true",
            "network.mean=0.5,0.25",
            "beta=null",
            "milestones=[3, 5]",
            "objective=mart",
            "data.name=folder:a/b=c",
            "image_size=16",
        ]
    )
    assert config.method.eps == pytest.approx(8 / 255)
    assert (config.training.epochs, config.data.flip, config.network.mean) == (7, True, (0.5, 0.25))
    assert (config.method.beta, config.schedule.milestones, config.method.objective) == (None, (3, 5), "mart")
    assert (config.data.name, config.data.image_size) == ("folder:a/b=c", 16)


def test_settings_that_only_make_sense_together():
    config = recipe("digits").with_settings(["method.boundary=1", "method.robust=0"])
    assert config.method.budget().boundary == 1


def test_a_new_objective_without_beta_drops_that_of_the_recipe():
    digits = recipe("digits")
    said, plain = digits.with_settings(["objective=pgd-at", "beta=null"]), digits.with_settings(["objective=pgd-at"])
    assert (plain, plain.identity(), plain.method.beta) == (said, said.identity(), None)
    assert digits.with_settings(["objective=mart"]).method.beta == digits.method.beta == 6


def test_the_step_of_the_evaluation_goes_with_its_eps():
    """20 steps of 0.003 would not cross a ball of 16/255."""
    short = recipe("cifar10-trades-short")
    assert short.with_settings(["epochs=3", "eps=0.031"]).evaluation.step_size == 0.003
    larger = short.with_settings(["eps=16/255"])
    assert threat_of(larger).step_size(20, "linf", 16 / 255) == pytest.approx(1.6 / 255)
    assert short.with_settings(["eps=16/255", "evaluation.step_size=0.01"]).evaluation.step_size == 0.01
    other = short.with_settings(["norm=l2", "eps=0.5"])
    assert threat_of(other).step_size(20, "l2", 0.5) == 0.05


@pytest.mark.parametrize("name", sorted(WANTED))
def test_every_setting_can_be_set_as_it_is_shown(name):
    config = recipe(name)
    shown = [
        f"{section}.{key}={as_setting(value)}"
        for section, values in config.to_dict().items()
        if isinstance(values, dict)
        for key, value in values.items()
    ]
    assert config.with_settings(shown) == config


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("epoch=3", "did you mean 'epochs'"),
        ("training.epoch=3", "no setting 'training.epoch'; `.* --show` lists them; did you mean 'epochs'"),
        ("method.epochs=3", "did you mean 'epochs'"),  # of another section
        ("training.foo=3", "no setting 'training.foo'; `bullettrain train --show` lists them$"),
        ("methd.eps=3", "no section 'methd'; there are data, network, .*, evaluation; did you mean 'method'"),
        ("nonsense.eps=3", "no section 'nonsense'; there are data, network, .*, evaluation$"),
        ("network=wrn-34-10", "'network' is a section; name a setting of it, e.g. network.name$"),
        ("precision=fp32", "there are auto, float32, bf16; did you mean 'float32'"),
        ("momentum=0.5", "could be method.momentum or optimizer.momentum; say which"),
        ("epochs", "write key=value"),
        ("epochs=2.5", "whole number"),
        ("epochs=many", "whole number"),
        ("epochs=0", "at least 1"),
        ("epochs=inf", "whole number"),
        ("epochs=nan", "whole number"),
        ("lr=-1", "optimizer.lr is -1"),
        ("lr=nan", "optimizer.lr is nan"),
        ("eps=8", "did you mean 8/255"),
        ("clip=-1", "optimizer.clip is -1"),
        ("threads=-1", "training.threads is -1"),
        ("milestones=5,-1", "schedule.milestones is -1; it has to be at least 1"),
        ("data.crop=1000000", "data.crop is 1000000; it has to be at least 0 and at most 1024"),
        ("training.batch_size=10000000000", "at most 1e.06"),
        ("boundary=100000000", "at most 10000"),
        ("probe=-5", "training.probe is -5"),
        ("evaluation.steps=-1", "evaluation.steps is -1"),
        ("evaluation.batch_size=0", "evaluation.batch_size is 0"),
        ("seed=12345678901234567890123", "training.seed is"),
        ("eps=1/0", "no number"),
        ("eps=-1", "eps is -1"),
        ("flip=perhaps", "true or false"),
        ("objective=trade", "did you mean 'trades'"),
        ("norm=l1", "linf, l2"),
        ("norm=l2", r"norm is l2, and eps 0.15 is of linf; set both, e.g. --set eps=0.5$"),
        ("method.robust=20", "robust=20, outlier=0 are out of order; .* For a study, say --set ordered=false$"),
        ("gamma=2", "gamma is 2"),
        ("average=1", "training.average is 1"),
        ("data.validation=-1", "data.validation is -1"),
        ("objective=pgd-at beta=6", "beta is 6.0, but pgd-at takes none: --set beta=null$"),
    ],
)
def test_bad_settings(setting, message):
    with pytest.raises(ConfigError, match=message) as caught:
        recipe("digits").with_settings(setting.split())
    assert "\n" not in str(caught.value)


def test_nesterov_wants_momentum():
    with pytest.raises(ConfigError, match="without momentum"):
        recipe("digits").with_settings(["nesterov=true", "optimizer.momentum=0"])


def test_a_long_seed_keeps_its_digits():
    assert recipe("digits").with_settings(["seed=9007199254740993"]).training.seed == 9007199254740993


def test_a_misspelt_recipe():
    with pytest.raises(ConfigError, match="did you mean 'cifar10-trades-short'"):
        recipe("cifar10-trade-shrt")
    with pytest.raises(ConfigError, match=r"no recipe 'imagenet'; `bullettrain train --list` shows all$"):
        recipe("imagenet")


def test_unknown_keys_in_a_file():
    with pytest.raises(ConfigError, match=r"no setting 'training.epoch'.*did you mean 'epochs'"):
        Config.from_dict({"training": {"epoch": 3}})
    with pytest.raises(ConfigError, match="did you mean 'method'"):
        Config.from_dict({"methods": {}})


@given(st.integers(0, 300), st.integers(1, 300))
def test_fractions_are_numbers(a, b):
    assert number(f"{a}/{b}") == pytest.approx(a / b)
    assert number(str(a / b)) == a / b


# ------------------------------------------------------------------------------------- optimiser and rate


def test_step_schedule_counts_epochs_from_one():
    schedule = recipe("cifar10-trades").schedule
    rates = [rate(schedule, 0.1, epoch * 390, 390, 76) for epoch in range(76)]
    assert rates[:74] == [0.1] * 74
    assert rates[74:] == pytest.approx([0.01, 0.01])  # epochs 75 and 76


def test_one_cycle_rises_over_three_tenths_and_falls_to_zero():
    schedule = recipe("cifar10-trades-short").schedule
    rates = [rate(schedule, 0.1, step, 100, 30) for step in range(3000)]
    assert max(rates) == pytest.approx(0.1)
    assert rates.index(max(rates)) == pytest.approx(900, abs=1)
    assert rates[0] == pytest.approx(0.1 / 900)
    assert 0 < rates[-1] < 1e-3
    rises = [b > a for a, b in itertools.pairwise(rates)]
    assert rises == sorted(rises, reverse=True)


def test_cosine_ends_at_its_final_rate():
    schedule = recipe("cifar10-augmix").schedule
    assert rate(schedule, 0.1, 0, 390, 100) == pytest.approx(0.1)
    assert rate(schedule, 0.1, 390 * 50, 390, 100) == pytest.approx(0.05, abs=1e-4)
    assert rate(schedule, 0.1, 390 * 100, 390, 100) == pytest.approx(1e-6)
    # The same curve as PyTorch's own.
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50, eta_min=1e-6)
    for step in range(50):
        assert optimizer.param_groups[0]["lr"] == pytest.approx(rate(schedule, 0.1, step, 5, 10), rel=1e-9)
        optimizer.step()
        scheduler.step()


def test_norms_and_biases_decay_only_where_the_recipe_says_so():
    net = models.build("wrn-10-1")
    short, paper = (recipe(name).optimizer for name in ("cifar10-trades-short", "cifar10-trades"))
    decayed, free = make_optimizer(net, short).param_groups
    assert (decayed["weight_decay"], free["weight_decay"]) == (5e-4, 0.0)
    assert all(p.ndim > 1 for p in decayed["params"])
    assert len(decayed["params"]) + len(free["params"]) == len(list(net.parameters()))
    (everything,) = make_optimizer(net, paper).param_groups
    assert everything["weight_decay"] == 2e-4
    assert math.prod(p.numel() > 0 for p in everything["params"]) == 1


@pytest.mark.parametrize(("name", "kind"), [("sgd", "SGD"), ("adam", "Adam"), ("adamw", "AdamW")])
def test_optimisers(name, kind):
    config = recipe("digits").with_settings([f"optimizer.name={name}", "weight_decay=0.01"]).optimizer
    optimizer = make_optimizer(models.build("wrn-10-1"), config)
    assert type(optimizer).__name__ == kind
    assert {group["weight_decay"] for group in optimizer.param_groups} == {0.01}


def test_a_setting_by_its_former_name_is_told_the_present_one():
    for name in ("bucket=4", "training.bucket=4"):
        with pytest.raises(ConfigError, match="bucket' is called size_multiple now"):
            recipe("digits").with_settings([name])


def test_a_batch_that_is_larger_than_the_training_set_is_noted():
    config = recipe("own-images")
    assert config.doubts(128) == config.doubts() == []
    assert config.doubts(80) == [
        "80 training images do not fill a batch of 128, so an epoch is one step; "
        "give smaller ones, e.g. --batch-size 8 --lr 0.025 --epochs 60"
    ]
    assert config.with_settings(["epochs=90"]).doubts(96)[0].endswith("--batch-size 9 --lr 0.027 --epochs 90")
    assert config.doubts(3)[0].endswith("--batch-size 1 --lr 0.0088 --epochs 200")


def test_a_large_network_on_a_cpu_is_noted():
    (note,) = recipe("own-images").doubts(on_cpu=True)
    assert note.endswith("--network small-cnn --set image_size=32")
    (note,) = recipe("cifar10-trades").doubts(on_cpu=True)
    assert note.endswith("--network small-cnn")
    assert recipe("digits").doubts(on_cpu=True) == recipe("own-images").doubts() == []


@pytest.mark.parametrize("name", RECIPES)
def test_the_list_says_which_recipes_train_with_bullettrain(name):
    assert ("BulletTrain" in one_line(name)) == (recipe(name) != recipe(name).baseline())
