"""The training command, end to end on small data: what a run leaves and what it learns."""

import io
import json
import math
import signal

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from rich.console import Console

import bullettrain as bt
from bullettrain.config import Config, recipe
from bullettrain.config.settings import ConfigError
from bullettrain.data import load
from bullettrain.evaluation.results import unpack
from bullettrain.reporting.run import Run
from bullettrain.reporting.tables import evaluations
from bullettrain.reproduction.records import record_of, run_name
from bullettrain.run_folder import RunError, RunFolder, read_weights
from bullettrain.training import run as runs
from bullettrain.training.display import STOPPING
from bullettrain.training.setup import load_data
from bullettrain.training.trainer import Trainer
from short_runs import CPU, interrupt_at_the_third_group, kinds, small

FILES = {"config.yaml", "metrics.jsonl", "last.safetensors", "averaged.safetensors", "checkpoint.pt"}


# --------------------------------------------------------------------------------------- what it leaves


def test_a_run_leaves_its_folder(whole):
    assert {path.name for path in whole.iterdir()} >= FILES | {"best.safetensors"}
    assert not [path for path in whole.iterdir() if path.name.startswith((".", "previous"))]
    saved = yaml.safe_load((whole / "config.yaml").read_text())
    environment = saved.pop("environment")
    assert Config.from_dict(saved) == small()
    assert environment["torch"] == torch.__version__
    assert {"commit", "device", "numpy", "python", "bullettrain", "command"} <= set(environment)


def test_records_tell_the_run(whole):
    epochs, steps, end = kinds(whole, "epoch"), kinds(whole, "step"), kinds(whole, "end")[0]
    assert [record["epoch"] for record in epochs] == [1, 2, 3]
    batches = math.ceil((300 - 60) / 50)
    assert steps[-1]["step"] == epochs[-1]["step"] == 3 * batches
    for record in [*steps, *epochs]:
        assert record["outlier"] + record["boundary"] + record["robust"] == pytest.approx(1)
        assert 0 <= record["robust_accuracy"] <= record["clean_accuracy"] + 0.1
    # The run's averages are those of its steps, counted once.
    assert end["examples"] == 3 * 240
    assert end["work"] == pytest.approx(sum(e["work"] for e in epochs) / 3)
    assert end["plain_work"] == 1 + 2 * 3 + 6
    assert end["work_speedup"] == pytest.approx(end["plain_work"] / end["work"])
    budget = bt.StepBudget(3, 1)
    share = {key: end[key] for key in ("outlier", "boundary", "robust")}
    assert end["theoretical_speedup"] == pytest.approx(bt.theoretical_speedup(budget, **share))
    batch = kinds(whole, "batch")[-1]
    assert len(batch["svar"]) == len(batch["steps"]) == len(batch["category"]) == 50
    figures = {(e["weights"], e["attack"]) for e in kinds(whole, "evaluation")}
    assert figures == {(w, a) for w in ("last", "best", "averaged") for a in ("clean", "pgd5")}


@pytest.mark.parametrize("settings", [(), ("attack_group=2",), ("attack_group=3", "training.batch_size=100")])
def test_entries_are_of_many_steps_and_the_batch_that_is_shown_is_whole(tmp_path, settings):
    """An epoch ends with a rest: 40 examples after 50 and 50, or after 100 and 100."""
    config = small("epochs=2", "log_every=4", "validation=0", "data.train_size=240", *settings)
    runs.train(config, tmp_path / "run", CPU)
    size = config.training.batch_size
    batches = math.ceil(240 / size)
    assert [record["step"] for record in kinds(tmp_path / "run", "step")] == [batches, 2 * batches]  # no 4, then 1
    whole = config.training.attack_group < batches  # else the one unit of the epoch ends with the rest
    shown = [(record["step"], len(record["svar"])) for record in kinds(tmp_path / "run", "batch")]
    last = (batches - 1) // config.training.attack_group * config.training.attack_group if whole else batches
    assert shown == [(end, size if whole else 240 % size) for end in (last, batches + last)]


def test_processes_agree_on_a_stop_at_every_epochs_end_at_least(tmp_path, monkeypatch):
    """They ask each other only where something is read anyway, also where epochs are shorter than `log_every`."""
    asked, original = [], Trainer._should_stop
    monkeypatch.setattr(Trainer, "_should_stop", lambda self, *a: asked.append(a[1]) or original(self, *a))
    runs.train(small("epochs=2", "log_every=1000"), tmp_path / "run", CPU)
    assert asked == 2 * [False, False, False, False, True]


def test_load_gives_the_network_back(whole):
    test = load("digits", split="test")
    x = test.images.float() / 255
    networks = {name: bt.load(whole, weights=name) for name in ("last", "best", "averaged")}
    assert torch.equal(networks["last"](x), bt.load(whole / "last.safetensors")(x))
    assert torch.equal(networks["best"](x), bt.load(whole)(x))  # it has a validation set
    assert not networks["last"].training
    best = max(kinds(whole, "epoch"), key=lambda r: (r["validation_robust"], r["validation_clean"], -r["epoch"]))
    assert read_weights(whole / "best.safetensors")[1].epoch == best["epoch"]
    with pytest.raises(RunError, match="last, best, averaged"):
        bt.load(whole, weights="first")
    with pytest.raises(RunError, match="no such file or folder"):
        bt.load(whole / "nothing.safetensors")


def test_comparison(tmp_path):
    baseline, mined = runs.compare(small(), tmp_path / "both", CPU)
    figures = json.loads((tmp_path / "both" / "comparison.json").read_text())
    assert [row["name"] for row in figures["rows"]] == ["baseline", "bullettrain"]
    assert figures["rows"][0]["work"] == 13
    assert figures["speedup"]["work"] == pytest.approx(13 / mined.end["work"])
    assert figures["speedup"]["wall_clock"] == pytest.approx(baseline.end["seconds"] / mined.end["seconds"])
    for attack, about in figures["errors"].items():  # from the images on which the two differ
        plain, own = (unpack(r.evaluations[r.chosen][attack]["survived"], 100) for r in (baseline, mined))
        b, c = int((own & ~plain).sum()), int((plain & ~own).sum())
        assert own.double().mean() == pytest.approx(mined.accuracy[mined.chosen][attack], abs=1e-12)
        assert about == {"error": pytest.approx((b + c - (b - c) ** 2 / 100) ** 0.5 / 100), "paired": True}
    for record in baseline.evaluations[baseline.chosen].values():  # as of a run before outcomes were kept
        del record["survived"]
    shares = [result.accuracy[result.chosen]["clean"] for result in (baseline, mined)]
    unpaired = sum(share * (1 - share) / 100 for share in shares) ** 0.5
    assert runs.comparison(baseline, mined)["errors"]["clean"] == {"error": pytest.approx(unpaired), "paired": False}
    with pytest.raises(RunError, match="finished comparison"):
        runs.compare(small(), tmp_path / "both", CPU)


# --------------------------------------------------------------------------------------- what it learns


def test_the_digits_recipe_is_robust_where_plain_training_is_not(tmp_path):
    shorter = ("epochs=20", "training.probe=0", "data.validation=0")
    robust = runs.train(recipe("digits").with_settings(shorter), tmp_path / "robust", CPU)
    plain_steps = ("method.boundary=0", "method.robust=0", "method.outlier=0")
    plain = runs.train(recipe("digits").with_settings([*shorter, *plain_steps]), tmp_path / "plain", CPU)
    assert plain.accuracy["last"]["clean"] > 0.9
    assert plain.accuracy["last"]["pgd20"] < 0.45
    assert robust.accuracy["last"]["clean"] > 0.9
    assert robust.accuracy["last"]["pgd20"] > 0.55


@pytest.mark.parametrize("name", ["mnist", "cifar10"])
@pytest.mark.parametrize("objective", ["trades", "mart", "pgd-at"])
def test_slices_of_real_data(tmp_path, real_data, name, objective):
    settings = [f"data.name={name}", "data.train_size=1000", "data.test_size=200", "data.validation=100", "epochs=2"]
    if name == "cifar10":
        settings += ["data.crop=4", "data.flip=true", "eps=8/255"]
    beta = "null" if objective == "pgd-at" else "6"
    config = recipe("digits").with_settings([*settings, f"objective={objective}", f"beta={beta}", "probe=50"])
    result = runs.train(config, tmp_path / "run", CPU, data_dir=real_data)
    assert result.finished
    first, last = kinds(tmp_path / "run", "epoch")
    assert last["loss"] < first["loss"]
    assert result.accuracy["last"]["clean"] > 0.12


def test_ones_own_images(tmp_path, caplog):
    caplog.set_level("INFO", "bullettrain")
    rng = np.random.default_rng(0)
    for i in range(60):
        folder = tmp_path / "images" / ("dark" if i % 2 else "light")
        folder.mkdir(parents=True, exist_ok=True)
        level = 60 if i % 2 else 190
        Image.fromarray(rng.integers(level - 40, level + 40, (12, 12, 3), dtype=np.uint8)).save(folder / f"{i}.png")
    images, labels = rng.random((60, 12, 12)), np.arange(60) % 3
    images[labels == 1] *= 0.3
    np.savez(tmp_path / "arrays.npz", x=images.astype(np.float32), y=labels)
    for name in (f"folder:{tmp_path}/images", f"npz:{tmp_path}/arrays.npz"):
        settings = (f"data.name={name}", "data.train_size=0", "data.test_size=0", "data.validation=0", "epochs=2")
        result = runs.train(small(*settings), tmp_path / name[:3], CPU)
        assert result.finished
        assert f"{name}: 48 training, 0 validation and 12 test images" in caplog.text
        assert bt.load(result.folder)(torch.rand(2, 3 if "folder" in name else 1, 12, 12)).shape[0] == 2


def test_the_recipe_for_ones_own_images_takes_any_size(tmp_path):
    rng = np.random.default_rng(0)
    for i in range(40):
        folder = tmp_path / "images" / ("dark" if i % 2 else "light")
        folder.mkdir(parents=True, exist_ok=True)
        image = rng.integers(0, 120 if i % 2 else 255, (10 + i % 5, 12 + i % 3, 3), dtype=np.uint8)
        Image.fromarray(image).save(folder / f"{i}.png")
    cuts = ["network.name=small-cnn", "image_size=16", "epochs=1", "boundary=2", "probe=0", "evaluation.steps=2"]
    config = recipe("own-images").with_settings([f"data.name=folder:{tmp_path}/images", *cuts])
    result = runs.train(config, tmp_path / "run", CPU)
    assert result.finished
    network = bt.load(result.folder)
    assert (network.image_size, set(network.classes)) == (16, {"dark", "light"})


def test_an_image_set_is_shown_in_a_line():
    assert repr(load("digits", split="train")) == "ImageSet(1438 images of 1×8×8, 10 classes, on cpu)"


@pytest.mark.parametrize("shown", ["nowhere", "in lines", "live"])
def test_a_request_to_stop_is_answered_at_once(tmp_path, capfd, monkeypatch, shown):
    interrupt_at_the_third_group(monkeypatch)
    screen = io.StringIO()
    console = None if shown == "nowhere" else Console(file=screen, force_terminal=shown == "live", width=80)
    assert runs.train(small("engine=eager"), tmp_path / "run", CPU, console=console).signal == signal.SIGINT
    assert capfd.readouterr().err == f"{STOPPING}\n" * (shown == "in lines")
    assert (STOPPING in screen.getvalue()) == (shown == "live")  # in the bar


# --------------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    "settings",
    [
        ("precision=bf16", "channels_last=true"),
        ("optimizer.clip=0.5", "optimizer.name=sgd", "nesterov=true", "weight_decay=5e-4", "decay_norms=false"),
        ("norm=l2", "eps=0.5"),
        ("separation=oracle", "average=0"),
        ("score=margin", "training.compile=true"),
        ("network.name=preact-resnet-18", "data.train_size=100", "data.validation=0", "epochs=1", "training.probe=0"),
    ],
)
def test_settings_run(tmp_path, settings):
    torch.compiler.reset()
    result = runs.train(small("epochs=2", *settings), tmp_path / "run", CPU)
    assert result.finished


def test_eps_may_grow(tmp_path):
    config = small("objective=pgd-at", "beta=null", "eps_warmup=0.5", "epochs=2")
    trainer = Trainer(config, RunFolder(tmp_path), CPU, load_data(config, None))
    objective, seen = trainer.engine.objective, []
    original = objective.corrupt

    def corrupt(net, attack, rows, fast):
        if attack.eps is not None and rows is not None and begun[-1:] != [attack.labels.data_ptr()]:
            begun.append(attack.labels.data_ptr())
            far = (attack.x_prime - attack.clean).abs().max().item()
            seen.append((attack.eps.max().item(), far, attack.size.max().item()))
        return original(net, attack, rows, fast)

    begun, objective.corrupt = [], corrupt
    trainer.evaluator.probe = lambda *args: 0.9 * trainer.at.epoch  # a strong attack, while the own is still weak
    trainer.figures = lambda counts, figures=trainer.figures: {**figures(counts), "robust_accuracy": 0.9}
    assert trainer.run() == "finished"
    assert not kinds(tmp_path, "warning")
    steps, full = 2 * trainer.batches, config.method.eps
    seen = seen[-steps:]  # the warm-up's is the first
    assert [eps for eps, _, _ in seen] == pytest.approx([full * min(1, 2 * (i + 1) / steps) for i in range(steps)])
    for eps, farthest, size in seen:
        assert farthest <= eps * (1 + 1e-6)
        assert min(abs(size / eps - 2.25 / 3), abs(size / eps - 1.7)) < 1e-6  # three steps, or a robust example's one
    with pytest.raises(ConfigError, match=r"give method.scale, not step_size"):
        small("eps_warmup=0.5", "method.step_size=0.1")


@pytest.mark.parametrize("robust", [1, 3], ids=["mined", "uniform"])
def test_the_attack_may_begin_later(tmp_path, robust):
    """A quarter of the updates on images as they are, then half of them while eps grows."""
    budget = ("boundary=3", f"robust={robust}", f"outlier={0 if robust < 3 else 3}")
    config = small("objective=pgd-at", "beta=null", *budget, "clean_warmup=0.25", "eps_warmup=0.5", "epochs=4")
    trainer = Trainer(config, RunFolder(tmp_path), CPU, load_data(config, None))
    engine, seen = trainer.engine, []
    original = engine.updates

    def updates(*args):
        for out in original(*args):
            eps = config.method.eps * float(engine.budget.part)
            seen.append((eps, int(out.steps.max()), bool((out.category != 1).any())))
            assert float((out.x_prime - args[1][0].x).abs().max()) <= eps + 1e-6
            yield out

    engine.updates = updates
    assert trainer.run() == "finished"
    steps, full = 4 * trainer.batches, config.method.eps
    assert len(seen) == steps
    for index, (eps, most, selected) in enumerate(seen):
        assert (most == 0) == (index < steps // 4)
        assert eps == pytest.approx(full * (min(1, (index + 1 - steps // 4) / (steps / 2)) if most else 1))
        assert selected == (robust < 3)  # classes are looked for all the same
    (end,) = kinds(tmp_path, "end")
    assert end["theoretical_speedup"] is None  # the shares are not those of attacked examples alone


def test_the_last_figures_can_be_searched_for_in_half_precision(whole, tmp_path):
    result = runs.train(small("evaluation.search=bf16"), tmp_path, CPU)
    assert result.finished
    exact, half = kinds(whole, "evaluation"), kinds(tmp_path, "evaluation")
    assert [(r["weights"], r["attack"]) for r in half] == [(r["weights"], r["attack"]) for r in exact]
    for one, other in zip(exact, half, strict=True):
        clean = one["attack"] == "clean"
        assert other.get("precision") == (None if clean else "bf16")  # float32 says what a clean image is
        assert other["accuracy"] == pytest.approx(one["accuracy"], abs=0 if clean else 0.03)
    found = record_of(tmp_path).figures
    assert "precision" not in found["clean"]
    assert found["pgd5"]["precision"] == "bf16"
    assert "attacks searched in bf16, evaluated in float32" in evaluations(Run.read(tmp_path)).note
    assert run_name(small("evaluation.search=bf16")) == run_name(small())  # what is learnt is the same
