"""AugMix as an objective and through the training command: views for boundary examples alone, counted and resumed."""

import copy
import dataclasses
import re
import runpy
import signal
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

import bullettrain as bt
from bullettrain import BulletTrain, Category, StepBudget
from bullettrain.augmix import ViewMaker
from bullettrain.cli.train import print_comparison, print_result
from bullettrain.config import Config, ConfigError, recipe
from bullettrain.data import load
from bullettrain.evaluation.accuracy import survive, view_round
from bullettrain.reporting import write_report
from bullettrain.run_folder import RunFolder
from bullettrain.training import run as runs
from bullettrain.training.setup import load_data
from bullettrain.training.steps import Stepper
from bullettrain.training.trainer import Trainer
from conftest import norm_net
from short_runs import CPU, kinds, weights_of


def bytes_batch(m, seed=0, channels=3, size=8, classes=4):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(256, (m, channels, size, size), generator=generator).float() / 255
    return x, torch.randint(classes, (m,), generator=generator)


def forwarded(net):
    """Counts the examples that go through the network."""
    seen = []
    net.register_forward_hook(lambda module, args, out: seen.append(len(args[0])))
    return seen


def jsd(logits):
    """The authors' formula, over several logits (m, K)."""
    p = [z.softmax(1) for z in logits]
    mixture = torch.clamp(sum(p) / len(p), 1e-7, 1).log()
    return sum(F.kl_div(mixture, q, reduction="batchmean") for q in p) / len(p)


# -------------------------------------------------------------------------------------------- one step


def test_a_uniform_budget_is_plain_augmix():
    net = norm_net()
    twin = copy.deepcopy(net)
    x, y = bytes_batch(12)
    draws = ViewMaker().draw(12, generator=torch.Generator().manual_seed(3))
    objective = bt.AugMix(generator=torch.Generator().manual_seed(3))
    out = BulletTrain(objective, budget=StepBudget.uniform(1)).step(net, x, y)
    out.loss.backward()

    twin.train()
    views = ViewMaker()(x, draws)
    z, both = twin(x), twin(views.flatten(0, 1)).view(2, 12, 4)
    loss = F.cross_entropy(z, y) + 12 * jsd([z, *both])
    loss.backward()
    assert torch.equal(out.x_prime, views)
    assert torch.allclose(out.loss, loss, atol=1e-6)
    for mine, theirs in zip(net.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(mine.grad, theirs.grad, atol=1e-5)
    for mine, theirs in zip(net.buffers(), twin.buffers(), strict=True):
        assert torch.equal(mine, theirs), "two training-mode forwards, clean first"
    assert out.work.per_example == 9
    assert out.svar is None


@settings(max_examples=30)
@given(st.integers(1, 14), st.floats(0, 1), st.sampled_from(["mixed", "all right", "all wrong"]), st.integers(0, 9))
def test_mining_makes_views_for_the_boundary_alone(m, F_R, labels, seed):
    net = norm_net()
    x, y = bytes_batch(m, seed)
    net.train()
    right = copy.deepcopy(net)(x).argmax(1)
    y = {"mixed": torch.where(torch.arange(m) % 3 > 0, right, y), "all right": right, "all wrong": (right + 1) % 4}[
        labels
    ]
    train = BulletTrain(bt.AugMix(generator=torch.Generator().manual_seed(seed)), budget=StepBudget(1, 0))
    train.robust_fraction.load_state_dict({"value": F_R * 0.8, "gamma": 0.8, "momentum": 0.9})
    seen = forwarded(net)
    out = train.step(net, x, y)
    boundary = out.category == Category.BOUNDARY
    count = int(boundary.sum())
    assert seen == [m, 2 * count] if count else [m]  # the clean forward once, the views once
    assert out.work.total == 3 * sum(seen) == pytest.approx(m * (3 + 6 * count / m))

    views = ViewMaker()(x, ViewMaker().draw(m, generator=torch.Generator().manual_seed(seed)))
    wanted = torch.where(boundary[None, :, None, None, None], views, x)
    assert torch.equal(out.x_prime, wanted)
    assert torch.equal(out.z_prime[:, ~boundary], out.z.expand(2, -1, -1)[:, ~boundary])
    loss = F.cross_entropy(out.z, y)
    if count:
        loss += 12 * jsd([out.z[boundary], *out.z_prime[:, boundary]]) * count / m
    assert torch.allclose(out.loss, loss, atol=1e-5)
    hits = float((out.z_prime.argmax(-1) == y).double().mean())  # the mean of both views' indicators
    assert float(train.robust_fraction.value) == pytest.approx(0.9 * F_R * 0.8 + 0.1 * 0.8 * hits)
    if labels == "all wrong":
        assert count == 0


def test_draws_and_the_views_made_of_them_are_the_same_start():
    net = norm_net()
    x, y = bytes_batch(10)
    y = copy.deepcopy(net).train()(x).argmax(1)
    objective = bt.AugMix(views=ViewMaker(severity=5, width=2))
    draws = objective.draw(10, x.device)
    outs = [
        BulletTrain(objective, budget=StepBudget(1, 0)).step(copy.deepcopy(net), x, y, start=start)
        for start in (draws, ViewMaker(severity=5, width=2)(x, draws))
    ]
    assert torch.equal(outs[0].loss, outs[1].loss)
    with pytest.raises(ValueError, match=r"give AugMix's views, \(2, 10, 3, 8, 8\), or their draws, \(10, 2, 23\)"):
        BulletTrain(objective, budget=StepBudget(1, 0)).step(net, x, y, start=draws[:9])


def test_without_the_jsd_it_is_cross_entropy_on_one_view():
    net, x, y = norm_net(), *bytes_batch(9)
    twin, seen = copy.deepcopy(net), []
    seen = forwarded(net)
    objective = bt.AugMix(jsd=False, generator=torch.Generator().manual_seed(1))
    train = BulletTrain(objective, budget=StepBudget.uniform(1))
    out = train.step(net, x, y)
    view = ViewMaker()(x, ViewMaker().draw(9, 1, generator=torch.Generator().manual_seed(1)))[0]
    assert torch.equal(out.x_prime, view)
    assert torch.equal(out.loss, F.cross_entropy(twin.train()(view), y))
    assert seen == [9]
    assert out.z is None
    assert out.work.total == 27
    handed = BulletTrain(objective, budget=StepBudget.uniform(1)).step(copy.deepcopy(twin), x, y, start=view)
    assert torch.equal(handed.x_prime, view)
    # With mining it would select by a forward of its own, as PGD-AT does.
    net.train()
    mined = BulletTrain(objective, budget=StepBudget(1, 0)).step(net, x, y)
    assert mined.work.total == 9 + 27
    assert sum(seen[1:]) == 18


def test_images_that_views_cannot_be_made_of():
    train = BulletTrain(bt.AugMix(), budget=StepBudget.uniform(1))
    net = torch.nn.Linear(5, 3)
    with pytest.raises(ValueError, match=r"AugMix makes views of images, \(n, C, H, W\)"):
        train.step(net, torch.rand(4, 5), torch.zeros(4, dtype=torch.int64))


# ------------------------------------------------------------------------------------------------- runs


def small(*changes: str) -> Config:
    cuts = ("epochs=3", "data.train_size=300", "data.test_size=100", "data.validation=60", "training.batch_size=50")
    return recipe("digits-augmix").with_settings([*cuts, "average=0.9", "log_every=2", *changes])


def shown(print_it, *results):
    console = Console(record=True, width=100)
    print_it(console, *results)
    return console.export_text()


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    folder = tmp_path_factory.mktemp("augmix") / "both"
    return folder, *runs.compare(small(), folder, CPU)


def test_a_run_counts_its_work_and_shares(both):
    folder, baseline, mined = both
    assert (baseline.end["work"], mined.end["plain_work"]) == (9, 9)
    F_B = mined.end["boundary"]
    assert 0.05 < F_B < 0.95
    assert mined.end["work"] == pytest.approx(3 + 6 * F_B)
    assert mined.end["theoretical_speedup"] == pytest.approx(3 / (1 + 2 * F_B))
    assert mined.end["work_speedup"] == pytest.approx(9 / (3 + 6 * F_B))
    assert set(mined.accuracy["last"]) == {"clean", "views"}
    epoch = kinds(folder / "bullettrain", "epoch")[-1]
    assert epoch["probe_robust"] is None
    assert 0 <= epoch["validation_robust"] <= 1
    # What is said of the saved weights holds of them.
    test = load_data(small(), None)[2]
    again = survive(
        [view_round(bt.load(folder / "bullettrain", weights="last"), ViewMaker())], test, device=CPU.device
    ).share
    assert again == mined.accuracy["last"]["views"]


def test_what_a_run_says(both):
    folder, baseline, mined = both
    text = shown(print_comparison, baseline, mined)
    assert re.search(r"Clean +AugMix views +training", text)
    assert "in the paper" not in text
    assert "capturing" not in text
    text = shown(print_result, mined)
    assert re.search(r"boundary \d+\.\d %, robust \d+\.\d %\n", text)
    assert re.search(r"trained \d+\.\d s, ", text)
    # As on a GPU.
    plain, own = (
        dataclasses.replace(result, end={**result.end, "seconds": seconds, "capture_seconds": captures})
        for result, seconds, captures in ((baseline, 226.0, 26.0), (mined, 140.0, 104.0))
    )
    assert "trained 2 min 20 s and 1 min 44 s of compiling and capturing, " in shown(print_result, own)
    said = "1.61× wall-clock\nCompiling and capturing, 1 min 44 s and without mining 26.0 s, are not in it: with them"
    assert f"{said} it is 1.03×.\n" in shown(print_comparison, plain, own)
    page = write_report(folder).read_text()
    assert "Images before and after the corruption" in page
    assert "two views each" in page
    assert "on AugMix views" in page
    assert "PGD" not in page
    assert page.count("data:image/png") > 10, "examples of the first view"


def test_the_papers_share_stands_beside_the_runs_own(both, tmp_path):
    _, _, mined = both
    config = tmp_path / "run" / "config.yaml"
    (tmp_path / "run").mkdir()
    for name in ("config.yaml", "metrics.jsonl"):
        (tmp_path / "run" / name).write_bytes((mined.folder / name).read_bytes())
    for name, share in (
        ("cifar10-augmix", 35),
        ("cifar100-augmix", 36),
        ("cifar10-augmix-fast", 35),
        ("cifar100-augmix-fast", 36),
    ):
        config.write_text(re.sub("recipe: .*", f"recipe: {name}", config.read_text()))
        result = runs.read_result(RunFolder(tmp_path / "run"))
        assert f"; in the paper boundary {share} %\n" in shown(print_result, result)
        page = write_report(tmp_path / "run").read_text()
        assert f"two views each; {share}\u202f% in the paper" in page


def test_a_stopped_run_resumes_bit_for_bit(tmp_path, both, monkeypatch):
    calls, original = [0], Stepper.take

    def take(self, *args):
        calls[0] += 1
        if calls[0] == 7:  # in the second epoch
            signal.raise_signal(signal.SIGINT)
        return original(self, *args)

    monkeypatch.setattr(Stepper, "take", take)
    assert runs.train(small(), tmp_path / "cut", CPU).reason.startswith("stopped")
    monkeypatch.undo()
    assert runs.train(small(), tmp_path / "cut", CPU, resume=True).finished
    assert weights_of(tmp_path / "cut") == weights_of(both[0] / "bullettrain")


def test_several_processes_draw_the_views_of_one(tmp_path):
    def start(rank, world):
        trainer = Trainer(small(), RunFolder(tmp_path), CPU, load_data(small(), None))
        trainer.loader.rank, trainer.loader.world = rank, world
        return trainer.initial(torch.zeros(0), 0, 2)

    assert torch.equal(torch.cat([start(0, 2), start(1, 2)]), start(0, 1))


def test_the_jsd_is_a_setting(tmp_path):
    config = small("jsd=false", "robust=1", "outlier=1", "epochs=2")
    result = runs.train(config, tmp_path / "run", CPU)
    assert result.end["work"] == 3
    assert result.end["theoretical_speedup"] == 1
    page = write_report(tmp_path / "run").read_text()
    assert "<li>AugMix − JSD</li>" in page
    assert "nothing was mined" in page


def test_settings_that_cannot_be():
    for changes, message in (
        (["jsd=false"], "add --set robust=1 --set outlier=1"),
        (["severity=11"], "severity is 11"),
        (["depth=0"], "depth is 0"),
        (["method.boundary=2"], "step is both views"),
    ):
        with pytest.raises(ConfigError, match=message):
            recipe("cifar10-augmix").with_settings(changes)
    with pytest.raises(ConfigError, match=r"method.all_ops is true, but trades takes none: --set all_ops=false"):
        recipe("digits").with_settings(["all_ops=true"])


def test_the_benchmark_runs(tmp_path):
    script = runpy.run_path(str(Path(__file__).parent.parent / "benchmarks" / "augmix_views.py"))
    result = script["measure"](3, CPU.device, tmp_path, repeats=2)
    assert result["data"] == "noise"
    assert result["environment"].keys() >= {"device", "torch", "pillow", "commit"}
    assert result["times_faster"]["ours"] > 0


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_slices_of_real_data(tmp_path, real_data, name):
    cuts = ["network.name=wrn-10-1", "data.train_size=400", "data.test_size=100", "epochs=2", "training.threads=1"]
    config = recipe(f"{name}-augmix-short").with_settings(cuts)
    result = runs.train(config, tmp_path / "run", CPU, data_dir=real_data)
    first, last = kinds(tmp_path / "run", "epoch")
    assert last["loss"] < first["loss"]
    assert result.end["work"] == pytest.approx(3 + 6 * result.end["boundary"])


def test_views_of_real_images_are_pillows(real_data):
    """The way from the loader: bytes / 255 and back are the same bytes."""
    import numpy as np
    from PIL import Image

    import pillow_augmix as pillow

    images = load("cifar10", split="test", root=real_data).images[:40]
    x = images.float() / 255
    assert torch.equal((x * 255).round().to(torch.uint8), images)
    maker = ViewMaker(depth=1, width=1)
    draws = maker.draw(40, 1)
    draws[..., 0] = 1 - 1e-9  # the chain alone
    _, _, operation, level = maker.choices(draws)
    made = maker(x, draws)[0]
    for i in range(40):
        image = Image.fromarray(images[i].permute(1, 2, 0).numpy())
        theirs = pillow.operate(image, pillow.NAMES[int(operation[0, 0, i, 0])], float(level[0, 0, i, 0]))
        assert np.abs(made[i].permute(1, 2, 0).numpy() * 255 - np.asarray(theirs)).max() < 1e-3
