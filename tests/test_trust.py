"""Code that a file names: no command imports or calls it unless the user says so on the command line."""

import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import bullettrain as bt
from bullettrain.cli.app import app
from bullettrain.config.sections import Config
from bullettrain.evaluation.results import FILE, Store, read_evaluations
from bullettrain.run_folder import RunError, RunFolder, read_weights
from bullettrain.schema import SchemaError, conform

MODULE = """
from pathlib import Path
from bullettrain.models import SmallCNN

Path("imported").touch()

def make():
    Path("called").touch()
    return SmallCNN(num_classes=10, channels=1, image_size=8)
"""
TINY = ("epochs=1", "data.train_size=150", "data.test_size=50", "data.validation=0", "probe=0", "evaluation.steps=2")
TINY = tuple(word for setting in TINY for word in ("--set", setting))
BENCH = ("--train-steps", "0", "--steps", "1", "--repeats", "1")
ROW = ("table-trades", "--rows", "bt-nr2", "--out", "rep", "--set", "epochs=1", "--set", "data.train_size=150")


def rewrite(file: Path, **changes) -> None:
    """A weights file with other metadata about its network."""
    with safe_open(file, "pt") as opened:
        about = json.loads(opened.metadata()["bullettrain"])
    about["network"] |= changes
    about.pop("digest", None)  # it would tell that something was changed; who means harm leaves it out
    save_file(load_file(file), file, metadata={"bullettrain": json.dumps(about)})


def tamper(run: Path, name: str = "evil:make") -> None:
    """A run whose files all name a function."""
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["network"]["name"] = name
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    for file in run.glob("*.safetensors"):
        if file.name != "samples.safetensors":
            rewrite(file, name=name)


def invoke(*words, code=0):
    result = CliRunner(env={"COLUMNS": "300", "NO_COLOR": "1", "TERM": "dumb"}).invoke(app, [str(w) for w in words])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        return str(result.exception)
    assert result.exit_code == code, result.output
    return result.output


@pytest.fixture
def evil(robust_run, tmp_path, monkeypatch):
    """A run, and a checkpoint away from it, that name a function of a module in the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    Path("evil.py").write_text(MODULE)
    Image.new("L", (8, 8)).save("image.png")
    shutil.copytree(robust_run, "run")
    tamper(Path("run"))
    shutil.copy("run/last.safetensors", "w.safetensors")
    shutil.copytree("run", "unfinished")
    log = Path("unfinished/metrics.jsonl")
    log.write_text("".join(line for line in log.read_text().splitlines(True) if '"end"' not in line))
    Path("evil.yaml").write_text("recipe: digits\nnetwork: {name: 'evil:make'}\n")
    yield Path("run")
    sys.modules.pop("evil", None)


def ran() -> bool:
    return Path("imported").exists() or Path("called").exists() or "evil" in sys.modules


NAMED = r"names the function 'evil:make', which .* was not imported; .* add --network evil:make or --trust"
COMMANDS = {
    "evaluate run": (["evaluate", "run", "--attack", "clean"], NAMED),
    "evaluate file": (["evaluate", "w.safetensors", "--data", "digits", "--attack", "clean"], NAMED),
    "predict run": (["predict", "run", "image.png"], NAMED),
    "predict file": (["predict", "w.safetensors", "image.png"], NAMED),
    "export run": (["export", "run", "--format", "hub", "--out", "new"], NAMED),
    "export file": (["export", "w.safetensors", "--format", "torch-export", "--out", "new.pt2"], NAMED),
    "train over a run": (["train", "--out", "unfinished"], "network.name is evil:make there and small-cnn here"),
    "train file": (["train", "evil.yaml", "--out", "new", *TINY], NAMED),
    "train run": (["train", "run", "--out", "new", *TINY], NAMED),
    "train run --resume": (["train", "unfinished", "--resume"], NAMED),
    "train --resume": (["train", "--out", "unfinished", "--resume"], "network.name is evil:make there and small-cnn"),
    "bench run": (["bench", *BENCH, "--checkpoint", "run"], "eager bullettrain: "),
    "bench file": (["bench", *BENCH, "--checkpoint", "w.safetensors"], "eager bullettrain: "),
    "report": (["report", "run"], "report  run/report.html"),
}


def test_every_command_is_tried():
    words = {name.partition(" ")[0] for name in COMMANDS} | {"reproduce"}
    assert words == {command.name or command.callback.__name__ for command in app.registered_commands}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_runs_no_code_that_a_file_names(evil, name):
    words, said = COMMANDS[name]
    assert re.search(said, invoke(*words))
    assert not ran()


@pytest.mark.parametrize("name", ["os:abort", "timm:resnet18", "evil:\x1b[31mmake"])
def test_load_runs_no_code_that_a_file_names(evil, name):
    rewrite(Path("w.safetensors"), name=name)
    with pytest.raises(RunError, match="was not imported") as refused:
        bt.load("w.safetensors")
    assert repr(name) in str(refused.value)
    assert "\x1b" not in repr(str(refused.value)).replace("\\\\x1b", "") or name.startswith("evil")
    assert not ran()


@pytest.mark.parametrize("how", [["--trust"], ["--network", "evil:make"]], ids=" ".join)
@pytest.mark.parametrize("name", [name for name, (_, said) in COMMANDS.items() if said is NAMED])
def test_it_is_run_where_the_user_says_so(evil, name, how):
    assert re.search("Clean|probability|written  new|report  (new|unfinished)/", invoke(*COMMANDS[name][0], *how))
    assert ran()


def test_the_users_network_is_taken_instead_of_what_the_file_names(evil):
    assert "Clean" in invoke("evaluate", "run", "--attack", "clean", "--network", "small-cnn")
    assert isinstance(bt.load("w.safetensors", network="small-cnn"), bt.models.SmallCNN)
    assert not ran()


def test_the_printed_resume_command_names_the_function(evil, monkeypatch):
    from bullettrain.training.trainer import Trainer

    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "take", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        said = invoke("train", *TINY, "--set", "network.name=evil:make", "--out", "mine", code=130)
    command = said.splitlines()[-1].split()
    assert "network.name=evil:make" in command
    assert "report  mine/report.html" in invoke(*command[1:])


@pytest.mark.parametrize("how", [["--trust"], ["--network", "evil:make"], ["--set", "network.name=evil:make"]])
def test_the_command_that_goes_on_with_a_file_names_the_function(evil, monkeypatch, how):
    from bullettrain.training.trainer import Trainer

    Path("own.yaml").write_text("network: {name: 'evil:make'}\noptimizer: {lr: 0.01}\n")
    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "take", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        said = invoke("train", "own.yaml", *TINY, "--out", "mine", *how, code=130)
    command = said.splitlines()[-1].split()
    assert command[:5] == ["bullettrain", "train", "own.yaml", "--network", "evil:make"]
    assert "report  mine/report.html" in invoke(*command[1:])


@pytest.mark.parametrize("where", ["folder", "weights", "record", "folder, unfinished"])
def test_reproduce_runs_no_code_that_a_file_names(evil, where):
    invoke("reproduce", *ROW, "--train-only")
    (run,) = Path("rep/runs").glob("digits*")
    (record,) = Path("rep/records").glob("*.json")
    if where == "record":
        content = json.loads(record.read_text())
        content["config"]["network"]["name"] = "evil:make"
        record.write_text(json.dumps(content))
        assert "is of the network 'evil:make', not of 'small-cnn'" in invoke("reproduce", *ROW, "--timing", code=1)
    elif where == "weights":
        rewrite(run / "last.safetensors", name="evil:make")
        assert "written" in invoke("reproduce", *ROW, "--images", "50")
    else:
        tamper(run)
        if "unfinished" in where:
            record.unlink()
            (run / "metrics.jsonl").write_text("")
        assert "is of the network 'evil:make', not of 'small-cnn'" in invoke("reproduce", *ROW, code=1)
    assert not ran()


def test_reproduce_runs_what_the_command_line_names(evil):
    words = ["reproduce", *ROW, "--set", "network.name=evil:make", "--images", "50"]
    assert "written" in invoke(*words, "--train-only")
    assert ran()
    assert "written" in invoke(*words)  # judged by the same name


# ------------------------------------------------------------------------------------------------- schemas


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"name": 3}, "network.name is 3; it has to be text"),
        ({"num_classes": "ten"}, "network.num_classes is 'ten'; it has to be a whole number"),
        ({"num_classes": True}, "network.num_classes is True"),
        ({"mean": [0.5, "x"]}, r"network.mean\[1\] is 'x'; it has to be a number"),
        ({"pickle": "x"}, "there is no setting 'network.pickle'"),
    ],
)
def test_metadata_of_other_types_is_refused(evil, changes, said):
    rewrite(Path("w.safetensors"), **{"name": "small-cnn", **changes})
    with pytest.raises(RunError, match=f"w.safetensors is damaged: {said}"):
        read_weights(Path("w.safetensors"))


@pytest.mark.parametrize(
    "changes", [{"num_classes": 10**15}, {"image_size": 10**8}, {"name": "wrn-100-9999"}, {"name": "wrn-1000000-1"}]
)
def test_sizes_that_are_not_those_of_the_tensors_allocate_nothing(evil, changes):
    rewrite(Path("w.safetensors"), **{"name": "small-cnn", **changes})
    with pytest.raises(RunError, match=r"w.safetensors does not fit|no network is called"):
        bt.load("w.safetensors")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("- a list", "it has to be a section of keys"),
        ("training: 3", "training is 3; it has to be a section of keys"),
        ("training: {epochs: many}", "training.epochs is 'many'; it has to be a whole number"),
        ("training: {epochs: [3]}", r"training.epochs is \[3\]; it has to be a whole number"),
        ("training: {compile: 3}", "training.compile is 3; it has to be true or false"),
        ("method: {objective: mine}", "method.objective is 'mine'"),
        ("network: {mean: 0.5}", "network.mean is 0.5; it has to be a list, each a number or null"),
        ("data: {crop: .inf}", "data.crop is inf; it has to be a whole number"),
        ("recipe: [1]", r"recipe is \[1\]; it has to be text"),
    ],
)
def test_configs_of_other_types_are_refused(text, said):
    with pytest.raises(ValueError, match=said):
        Config.from_dict(yaml.safe_load(text))


def test_a_config_as_a_person_writes_it():
    text = "{method: {eps: 8/255}, optimizer: {lr: 1e-3}, schedule: {milestones: [3, 4]}, network: {mean: [1, 2, 3]}}"
    config = Config.from_dict(yaml.safe_load(text))
    assert (config.method.eps, config.optimizer.lr, config.schedule.milestones) == (8 / 255, 1e-3, (3, 4))
    assert config.network.mean == (1.0, 2.0, 3.0)


@pytest.fixture(scope="module")
def evaluations(robust_run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("judged")
    invoke("evaluate", robust_run, "--attack", "clean,pgd2", "--images", "40", "--out", folder / "out")
    return json.loads((folder / "out" / FILE).read_text())


WRONG = st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=3), st.just([]), st.just({}), st.floats())


@given(st.data())
def test_evaluations_are_read_or_refused(evaluations, data):
    """Any value in any place: a ValueError, or something that can be shown."""
    content = json.loads(json.dumps(evaluations))
    at, places = content, []
    while isinstance(at, dict | list) and at:
        key = data.draw(st.sampled_from(sorted(at) if isinstance(at, dict) else range(len(at))))
        places.append((at, key))
        at = at[key]
    place, key = data.draw(st.sampled_from(places))
    place[key] = data.draw(WRONG)
    try:
        read = read_evaluations(content)
    except ValueError as error:
        assert "\n" not in str(error)
    else:
        for entry in read.evaluations:
            assert all(result.mask.shape == (result.examples,) for result in entry.results if result.survived)
            assert all(result.threat is None or len(result.threat) == 2 for result in entry.results)


def test_values_that_are_too_large_too_deep_or_many_times_themselves(tmp_path):
    for value in (10**400, -(10**400), float("nan"), float("inf")):
        with pytest.raises(SchemaError, match=r"x is .*; it has to be a number"):
            conform(value, float, "x")
    bomb = []
    for _ in range(60):
        bomb = [bomb, bomb]
    with pytest.raises(SchemaError, match=r"x is .*; it has to be a number") as refused:
        conform(bomb, float, "x")
    assert len(str(refused.value)) < 200
    deep = "[" * 2_000
    (tmp_path / FILE).write_text(deep)
    with pytest.raises(RunError, match="no evaluation that this version can read"):
        Store(tmp_path)
    (tmp_path / "config.yaml").write_text(deep)
    with pytest.raises(RunError, match=r"config\.yaml cannot be read"):
        RunFolder(tmp_path).config()


def test_a_tensor_is_no_value_of_a_file():
    with pytest.raises(SchemaError, match="it has to be a number"):
        conform(torch.zeros(1), float, "x")
