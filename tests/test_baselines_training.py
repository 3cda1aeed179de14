"""Baselines from the command line: `--method` as settings, replays, resuming, and FAST's collapse."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

import bullettrain as bt
from bullettrain import baselines
from bullettrain.config import Config, recipe
from bullettrain.config.format1 import translate
from bullettrain.config.methods import METHODS, method_name, one_line, with_method
from bullettrain.config.settings import ConfigError
from bullettrain.data import Augment, DataError, ImageSet, Loader
from bullettrain.engine import captured
from bullettrain.engine.cuda_graphs import materialize
from bullettrain.processes import Place
from bullettrain.reporting import write_report
from bullettrain.run_folder import RunFolder
from bullettrain.training import run as runs
from bullettrain.training import trainer as trainer_module
from bullettrain.training.collapse import CollapseError
from bullettrain.training.optimizer import make_optimizer
from bullettrain.training.setup import load_data
from bullettrain.training.steps import Stepper
from bullettrain.training.trainer import Trainer
from emulated import EmulatedRunner
from short_runs import CPU, died, kinds, weights_of

TIMES = ("seconds", "examples_per_second", "evaluation_seconds")
NAMES = ["fast", "fast-3", "n-fgsm", "yopo-2-5", "grad-align", "free-4", "gat", "nuat", "fgsm-pgi"]


def small(method: str, *settings: str) -> Config:
    """The digits recipe by a baseline, cut down to a second."""
    cuts = ("epochs=2", "data.train_size=300", "data.test_size=100", "data.validation=60", "training.batch_size=50")
    rest = ("training.probe=20", "evaluation.steps=5", "average=0.9", "log_every=2")
    return with_method(recipe("digits"), method).with_settings([*cuts, *rest, *settings])


# --------------------------------------------------------------------------------------------- settings


def test_what_each_method_sets():
    trades, pgd = recipe("cifar10-trades"), recipe("cifar10-pgd")
    fast = with_method(trades, "fast").method
    assert (fast.objective, fast.beta, fast.eps) == ("trades", 6.0, 0.031)
    assert fast.budget().uniform_steps == 1
    assert fast.budget().boundary_step(0.031) == pytest.approx(1.25 * 0.031)
    several = with_method(recipe("cifar10-mart"), "fast-4").method
    assert (several.objective, several.budget().uniform_steps) == ("mart", 4)
    assert several.budget().boundary_step(0.031) == pytest.approx(1.7 * 0.031 / 4)
    yopo = with_method(trades, "yopo-2-5").method
    assert (yopo.budget().uniform_steps, yopo.first_layer, yopo.objective) == (2, 5, "trades")
    assert yopo.budget().boundary_step(0.031) == 0.007
    assert with_method(trades, "yopo") == with_method(trades, "yopo-2-5")
    noisy = with_method(trades, "n-fgsm").method
    assert (noisy.objective, noisy.beta, noisy.start_radius, noisy.project) == ("pgd-at", None, 2.0, False)
    assert noisy.budget().boundary_step(0.031) == pytest.approx(0.031)
    aligned = with_method(pgd, "grad-align").method
    assert (aligned.objective, aligned.beta, aligned.build_objective().beta) == ("grad-align", None, 0.2)
    assert (aligned.start, aligned.budget().boundary_step(0.031)) == (None, pytest.approx(0.031))
    free = with_method(trades, "free")
    assert (free.training.replays, free.training.epochs, free.schedule.milestones) == (8, 10, (10,))
    assert free == with_method(trades, "free-8")
    assert with_method(recipe("mnist-pgd"), "fast").method.separation == "quantile"
    assert with_method(with_method(trades, "yopo"), "fast") == with_method(trades, "fast")  # nothing is left over


def test_methods_are_the_engines_of_the_library():
    made = {
        "fast": baselines.fast(bt.TRADES(eps=0.15)),
        "n-fgsm": baselines.n_fgsm(bt.PGDAT(eps=0.15)),
        "yopo-2-5": baselines.yopo(bt.TRADES(eps=0.15)),
        "grad-align": baselines.one_step(baselines.GradAlign(eps=0.15)),
        "free-8": baselines.one_step(baselines.Free(eps=0.15)),
        "gat": baselines.one_step(baselines.GAT(eps=0.15)),
        "nuat": baselines.one_step(baselines.NuAT(eps=0.15)),
        "fgsm-pgi": baselines.one_step(baselines.FGSMPGI(eps=0.15)),
    }
    for name, engine in made.items():
        ours = with_method(recipe("digits"), name).method.build()
        assert type(ours.objective) is type(engine.objective)
        mine, theirs = ours.objective.attack, engine.objective.attack
        assert (mine.start, mine.radius, mine.project) == (theirs.start, theirs.radius, theirs.project)
        assert getattr(mine.ascent, "updates", None) == getattr(theirs.ascent, "updates", None)
        assert ours.budget.boundary_step(0.15) == engine.budget.boundary_step(0.15)
        assert ours.budget.uniform_steps == engine.budget.uniform_steps


@pytest.mark.parametrize("name", NAMES)
def test_a_baselines_config_survives_yaml_and_settings(name):
    config = with_method(recipe("cifar10-trades-short"), name)
    assert Config.from_dict(yaml.safe_load(yaml.safe_dump(config.to_dict()))) == config
    words = runs.resume_command(config, Path("out")).split()
    changed = [words[i + 1] for i, word in enumerate(words) if word == "--set"]
    assert recipe("cifar10-trades-short").with_settings(changed) == config


def test_every_method_has_a_line_and_a_card():
    cards = (Path(__file__).parent.parent / "docs" / "baselines.md").read_text()
    for name in METHODS:
        assert 20 < len(one_line(name)) < 100
        assert f"--method {name}" in cards
    written = [card for card in cards.split("\n## ") if "`--method" in card.splitlines()[0]]
    assert len(written) == len(METHODS) + 1  # multi-step FAST has one of its own
    for card in written:
        assert [
            word
            for word in ("**Settings.**", "**Cost.**", "**What it reached.**", "**When not to use it.**")
            if word not in card
        ] == []


NEW = '''"""Halved: PGD-AT with one step, and half of its loss."""

from bullettrain.objectives import PGDAT


class Halved(PGDAT):
    """PGD-AT with half of its loss."""

    options = ("generator",)

    def loss(self, z, z_prime, y, touched=None, weight=None):
        return super().loss(z, z_prime, y, touched, weight) / 2
'''


def test_a_new_baseline_is_a_file_and_a_line(tmp_path):
    package = tmp_path / "src" / "bullettrain"
    shutil.copytree(Path(bt.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    (package / "baselines" / "halved.py").write_text(NEW)
    table = package / "config" / "method.py"
    line = '    "halved": importlib.import_module("bullettrain.baselines.halved").Halved,\n'
    text = table.read_text().replace('    "gat": GAT,\n', f'{line}    "gat": GAT,\n')
    table.write_text(text.replace("import dataclasses\n", "import dataclasses\nimport importlib\n", 1))

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "bullettrain", *words]
        environment = {**os.environ, "PYTHONPATH": str(tmp_path / "src"), "COLUMNS": "100"}
        return subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)

    listed = " ".join(run("train", "--list").stdout.split())
    assert "--method halved Halved: PGD-AT with one step, and half of its loss." in listed
    small = [word for cut in ("epochs=1", "data.train_size=300", "data.test_size=100") for word in ("--set", cut)]
    done = run("train", "digits", "--method", "halved", "--out", "run", *small)
    assert done.returncode == 0, done.stderr
    assert "Halved" in (tmp_path / "run" / "report.html").read_text()
    refused = run("train", "digits", "--method", "halved", "--set", "start=zero")
    assert "method.start is zero, but halved takes none: --set start=null" in " ".join(refused.stderr.split())


def test_settings_of_earlier_versions_become_objectives():
    old = with_method(recipe("digits"), "grad-align").to_dict()
    method = {**old["method"], "objective": "pgd-at", "beta": None, "align": 0.3, "carry": False}
    assert translate({**old, "method": method})["method"] == {**old["method"], "beta": 0.3}
    carried = translate({**old, "method": {**method, "align": 0.0, "carry": True}})["method"]
    assert carried == {**old["method"], "objective": "free"}
    plain = {**method, "align": 0.0}
    assert translate({**old, "method": plain})["method"] == {**old["method"], "objective": "pgd-at"}


def test_names_in_reports():
    named = {name: method_name(with_method(recipe("digits"), name).to_dict()["method"]) for name in NAMES}
    assert list(named.values()) == [
        "FAST on TRADES",
        "multi-step FAST, N = 3, on TRADES",
        "N-FGSM",
        "YOPO-2-5 on TRADES",
        "GradAlign",
        "Free",
        "GAT",
        "NuAT",
        "FGSM-PGI",
    ]


@pytest.mark.parametrize(
    ("method", "settings", "message"),
    [
        ("grad-algin", [], "did you mean 'grad-align'"),
        ("xyz", [], "there is no method 'xyz'; there are fast, fast-3, .*, grad-align, gat, nuat, fgsm-pgi, free-8$"),
        ("yopo-2", [], "there is no method 'yopo-2'"),
        ("fast-0", [], "there is no method 'fast-0'; there are fast, fast-3"),
        ("free-0", [], "there is no method 'free-0'; there are fast, fast-3"),
        ("yopo-2-0", [], "there is no method 'yopo-2-0'; there are fast, fast-3"),
        ("free", ["accumulate=2"], "accumulate has to be 1"),
        ("free", ["boundary=3"], "one step for all examples"),
        ("free", ["start=uniform"], "method.start is uniform, but free takes none: --set start=null"),
        ("free", ["beta=2"], "method.beta is 2.0, but free takes none: --set beta=null"),
        ("grad-align", ["clean_warmup=0.1"], "method.clean_warmup is 0.1, but grad-align takes none"),
        ("grad-align", ["robust=0", "outlier=0"], "method: .*same"),
        ("grad-align", ["start=uniform"], "but grad-align takes none"),
        ("gat", ["start=uniform"], "method.start is uniform, but gat takes none"),
        ("nuat", ["robust=0", "outlier=0"], "method: NuAT .* the same number of steps for all"),
        ("fgsm-pgi", ["robust=0", "outlier=0"], "method: FGSMPGI .* the same number of steps for all"),
        ("fgsm-pgi", ["norm=l2", "eps=0.5"], "method: FGSM-PGI keeps perturbations of L∞"),
        ("fast", ["start=somewhere"], "uniform, normal, clipped, zero"),
        ("fast", ["start_radius=0"], "method.start_radius is 0"),
        ("fast", ["replays=0"], "training.replays is 0"),
        ("yopo", ["first_layer=-1"], "method.first_layer is -1"),
    ],
)
def test_mistakes_are_one_line(method, settings, message):
    with pytest.raises(ConfigError, match=message) as caught:
        with_method(recipe("digits"), method).with_settings(settings)
    assert "\n" not in str(caught.value)


def test_augmix_has_no_attack_to_change():
    with pytest.raises(ConfigError, match="AugMix, which has no attack"):
        with_method(recipe("digits-augmix"), "fast")
    with pytest.raises(ConfigError, match="start is uniform, but augmix takes none: --set start=null"):
        recipe("digits-augmix").with_settings(["start=uniform"])


def test_the_command_shows_what_a_method_sets(monkeypatch, capsys):
    from bullettrain.cli import main

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["bullettrain", "train", *words])
        with pytest.raises(SystemExit) as stop:
            main()
        return stop.value.code, capsys.readouterr()

    code, shown = run("digits", "--method", "free-4", "--set", "beta=null", "--show")
    assert code == 0
    config = yaml.safe_load(shown.out)
    assert (config["training"]["replays"], config["training"]["epochs"], config["method"]["objective"]) == (
        4,
        10,
        "free",
    )
    for other in ("--compare", "--baseline"):
        code, said = run("digits", "--method", "fast", other)
        assert code == 2
        assert f"--method and {other} do not go together; give one of them" in said.err
        assert said.err.count("\n") == 1


# ---------------------------------------------------------------------------------------------- replays


def images(n: int) -> ImageSet:
    pixels = torch.randint(0, 256, (n, 1, 5, 5), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return ImageSet(pixels, torch.arange(n) % 3, ("a", "b", "c"))


@settings(max_examples=40)
@given(st.integers(1, 23), st.integers(1, 8), st.integers(1, 4), st.integers(1, 3), st.data())
def test_a_replayed_loader_gives_each_batch_so_often_from_any_start(n, size, replays, world, data):
    rank = data.draw(st.integers(0, world - 1))
    options = {"batch_size": size, "seed": 3, "augment": Augment(2, True), "rank": rank, "world": world}
    once, again = Loader(images(n), **options), Loader(images(n), replays=replays, **options)
    assert len(again) == replays * len(once)
    wanted = [batch for batch in once.epoch(1) for _ in range(replays)]
    start = data.draw(st.integers(0, len(again)))
    got = list(again.epoch(1, start))
    assert len(got) == len(again) - start
    for (x, y), (u, v) in zip(got, wanted[start:], strict=True):
        assert torch.equal(x, u)
        assert torch.equal(y, v)
    for index in range(len(again)):
        assert again.joint_size(index) == once.joint_size(index // replays)
        assert again.share(index) == once.share(index // replays)


def test_a_batch_comes_at_least_once():
    with pytest.raises(DataError, match="replays is 0; it has to be at least 1"):
        Loader(images(4), batch_size=2, seed=0, replays=0)


# ------------------------------------------------------------------------------------------------- runs

PASSES = {"fast": 9, "fast-3": 13, "n-fgsm": 5, "grad-align": 11, "free-4": 3, "gat": 9, "nuat": 9, "fgsm-pgi": 8}


@pytest.mark.parametrize("name", NAMES)
def test_each_runs_to_its_report(tmp_path, name):
    result = runs.train(small(name), tmp_path / "run", CPU)
    assert result.finished
    write_report(tmp_path / "run")
    replays = 4 if name == "free-4" else 1
    assert kinds(tmp_path / "run", "epoch")[-1]["step"] == 2 * 5 * replays
    work = result.end["work"]
    if name == "yopo-2-5":  # the first layer of this network is 8 % of it
        assert 11 + 2 * 9 * 0.07 < work < 11 + 2 * 9 * 0.09
    else:
        assert work == PASSES[name]
    assert method_name(small(name).to_dict()["method"]) in (tmp_path / "run" / "report.html").read_text()


def test_chance_is_the_places_own(tmp_path):
    """Noise depends on seed, epoch and batch: two runs of one config end in the same weights."""
    for folder in ("a", "b"):
        torch.manual_seed(ord(folder))
        runs.train(small("grad-align", "epochs=1"), tmp_path / folder, CPU)
    first, second = ((tmp_path / folder / "last.safetensors").read_bytes() for folder in ("a", "b"))
    assert first == second


def doomed(folder, at, name="free-4"):
    original, calls = bt.BulletTrain.updates, [0]

    def updates(*args, **kwargs):
        calls[0] += 1
        if calls[0] == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    bt.BulletTrain.updates = updates
    runs.train(small(name, "save_minutes=0"), folder, CPU)


@pytest.mark.parametrize("name", ["gat", "fgsm-pgi"])
def test_what_an_objective_or_its_starts_remember_is_in_the_checkpoint(tmp_path, name):
    """Whose turn it is, λ, and perturbations of an epoch ago: killed in the second epoch, it ends bit for bit."""
    assert runs.train(small(name, "save_minutes=0"), tmp_path / "whole", CPU).finished
    assert died(doomed, tmp_path / "run", 8, name)
    state = RunFolder(tmp_path / "run").load().state
    if name == "gat":
        assert state["engine"]["objective"]["weights"] == [10.0, 1.0 - state["position"]["step"] % 2]
    else:
        assert state["initial"]["stored"].abs().max() == 127  # eps
    assert runs.train(small(name, "save_minutes=0"), tmp_path / "run", CPU, resume=True).finished
    assert weights_of(tmp_path / "run") == weights_of(tmp_path / "whole")


def test_fgsm_pgi_starts_where_the_last_attack_of_the_image_ended(tmp_path):
    """Through crop and flip: but for what the crop hides and rounding to int8, x + start is x' of an epoch ago."""
    config = small("fgsm-pgi", "data.crop=1", "data.flip=true", "training.batch_size=240")
    trainer = Trainer(config, RunFolder(tmp_path / "run"), CPU, load_data(config, None))
    (x, y) = next(iter(trainer.loader.epoch(0)))
    first = trainer.batch(x, y, 0, 0)
    up, down = (((x + way).clamp(0, 1) - first.start).abs() < 1e-4 for way in (0.15, -0.15))
    assert (up | down).all()
    assert up.any()
    assert down.any()
    out = trainer.take([first])
    assert trainer.metrics.passes == 8 * len(y)
    (x2, y2) = next(iter(trainer.loader.epoch(1)))
    second = trainer.batch(x2, y2, 1, 0)
    augment, shown = trainer.loader.augment, []
    for epoch, moved in ((0, out.x_prime - x), (1, second.start - x2)):
        pixels = augment.pixels(x, trainer.loader.draws(epoch, 0))
        padded = torch.full((240, 100), torch.nan)
        padded[trainer.loader.indices(epoch, 0)] = padded.clone().scatter(1, pixels, moved.flatten(1))
        shown.append(padded)
    both = shown[0].isfinite() & shown[1].isfinite()
    assert both.float().mean() > 0.4
    torch.testing.assert_close(shown[0][both], shown[1][both], rtol=0, atol=1e-3)
    assert not shown[1][~shown[0].isfinite() & shown[1].isfinite()].any()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of Free that nothing interrupted."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    assert runs.train(small("free-4", "save_minutes=0"), folder, CPU).finished
    return folder


@pytest.mark.parametrize("at", [3, 16, 24])
def test_free_killed_within_its_replays_ends_bit_for_bit(tmp_path, whole, at):
    """With a checkpoint after every step: δ, the batch and the replay it was at are all in it."""
    assert died(doomed, tmp_path / "run", at)
    state = RunFolder(tmp_path / "run").load().state
    assert state["engine"]["objective"]["delta"].abs().max() > 0
    assert state["position"]["index"] % 4
    assert runs.train(small("free-4", "save_minutes=0"), tmp_path / "run", CPU, resume=True).finished
    assert weights_of(tmp_path / "run") == weights_of(whole)


@pytest.mark.parametrize("name", ["free-4", "fgsm-pgi"])
def test_what_carries_perturbations_is_for_one_process(tmp_path, name):
    config = small(name)
    two = Place(torch.device("cpu"), rank=0, world=2)
    with pytest.raises(ConfigError, match="for one process"):
        Trainer(config, RunFolder(tmp_path / "run"), two, load_data(config, None))


@pytest.mark.parametrize(
    ("name", "settings", "lines"),
    [
        *(
            (name, ("engine=graphs",), ["CUDA graphs are off, steps run one by one: there is no CUDA"])
            for name in NAMES
        ),
        ("yopo-2-5", ("attack_group=2",), []),
        ("grad-align", ("attack_group=2",), ["mini-batches are attacked one by one: its attack and its update"]),
        ("free-4", ("attack_group=2",), ["mini-batches are attacked one by one: its attack and its update"]),
        ("fast", ("attack_group=2",), []),
    ],
)
def test_what_cannot_be_had_is_said_in_a_line(tmp_path, name, settings, lines):
    config = small(name, *settings)
    said = []
    trainer = Trainer(config, RunFolder(tmp_path / "run"), CPU, load_data(config, None))
    Stepper(trainer.engine, trainer.network, None, trainer.metrics, config, CPU, on_message=said.append)
    assert len(said) == len(lines)
    assert all(mine.startswith(line) for mine, line in zip(said, lines, strict=True))


# ------------------------------------------------------------------------------------ captured steps


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("free-4", ("epochs=8",)),
        ("fast-3", ("network.name=wrn-10-1",)),
        ("gat", ("network.name=wrn-10-1",)),
        ("fgsm-pgi", ("network.name=wrn-10-1",)),
    ],
)
def test_a_step_that_is_recorded_and_replayed_trains_what_the_plain_one_trains(tmp_path, monkeypatch, name, settings):
    """As a CUDA graph would hold it; also the last batch, which is shorter, and a run that was stopped."""
    config, made = small(name, "optimizer.name=sgd", *settings), []

    class Emulating(Stepper):
        """As on a GPU, with graphs that are emulated."""

        def __init__(self, *args, **more):
            super().__init__(*args, **more)
            self.optimizer = make_optimizer(self.network, self.config.optimizer, capturable=True)
            if (tmp_path / "plain" / "last.safetensors").exists():
                self.captured = self.fast.capture = True
                materialize(self.optimizer)
                made.append(self)

        def warm_up(self, batches):
            pass

    monkeypatch.setattr(trainer_module, "Stepper", Emulating)
    monkeypatch.setattr(captured, "_on_gpu", lambda x: True)
    monkeypatch.setattr(captured, "CudaGraphRunner", EmulatedRunner)
    runs.train(config, tmp_path / "plain", CPU)
    calls, original = [0], Emulating.take

    def take(self, *args):
        calls[0] += 1
        if calls[0] == 7:  # in the second epoch, or between replays
            signal.raise_signal(signal.SIGINT)
        return original(self, *args)

    monkeypatch.setattr(Emulating, "take", take)
    assert runs.train(config, tmp_path / "whole", CPU).signal == signal.SIGINT
    assert runs.train(config, tmp_path / "whole", CPU, resume=True).finished
    assert all(stepper.fast.reason is None and stepper.fast.runner.graphs for stepper in made)
    same_operations = name == "free-4"  # elsewhere a sign that rounds otherwise moves a pixel
    if same_operations:
        assert weights_of(tmp_path / "whole") == weights_of(tmp_path / "plain")
    for kind, times in (("step", ("examples_per_second",)), ("epoch", TIMES), ("end", ("seconds", "capture_seconds"))):
        mine, theirs = ([without(record, times) for record in kinds(tmp_path / n, kind)] for n in ("whole", "plain"))
        if same_operations:
            assert mine == theirs
        elif kind == "epoch":
            assert [r["loss"] for r in mine] == pytest.approx([r["loss"] for r in theirs], rel=0.02)
    assert made[-1].engine.steps_taken == kinds(tmp_path / "plain", "epoch")[-1]["step"]


def without(record, names):
    return {key: value for key, value in record.items() if key not in (*names, "time")}


# --------------------------------------------------------------------------------------------- collapse


def test_fast_collapses_and_the_run_says_so(tmp_path):
    """Large eps, one step: the network learns to be safe from that step alone."""
    config = with_method(recipe("digits"), "fast")
    config = config.with_settings(["objective=mart", "eps=0.4", "data.validation=0", "average=0"])
    with pytest.raises(CollapseError, match="catastrophic overfitting"):
        runs.train(config, tmp_path / "run", CPU)
    last = kinds(tmp_path / "run", "epoch")[-1]
    assert last["robust_accuracy"] > 0.45  # of its own attack
    assert last["probe_robust"] < 0.1  # of PGD-10
    assert kinds(tmp_path / "run", "end")[0]["reason"].startswith("collapsed: catastrophic overfitting")
    assert len(kinds(tmp_path / "run", "warning")) == 1
