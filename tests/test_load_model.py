"""Every form in which a network can be given, and what a wrong one is told."""

import json
import shutil
import sys
import types

import pytest
import torch
from torch import nn

import bullettrain as bt
from bullettrain.config.settings import ConfigError
from bullettrain.data import load
from bullettrain.evaluation.accuracy import prepare
from bullettrain.loading import LoadedModel, find_source, load_model, read_state
from bullettrain.models import build
from bullettrain.run_folder import RunError

CPU = torch.device("cpu")


def same(a: nn.Module, b: nn.Module, shape=(2, 3, 32, 32)) -> bool:
    x = torch.rand(shape)
    with torch.no_grad():
        return torch.equal(a.eval()(x), b.eval()(x))


def test_a_run_and_its_checkpoints(robust_run):
    run = load_model(str(robust_run))
    assert (run.name, run.weights, run.folder) == ("robust", "last", robust_run)
    assert run.config == find_source(str(robust_run)).config
    averaged = load_model(str(robust_run), weights="averaged")
    assert averaged.digest != run.digest
    file = load_model(str(robust_run / "averaged.safetensors"))
    assert (file.name, file.weights, file.digest) == ("robust", "averaged", averaged.digest)
    assert file.config == run.config
    assert same(run.network, bt.load(robust_run), (2, 1, 8, 8))


def test_a_checkpoint_away_from_its_run(robust_run, tmp_path):
    (tmp_path / "mine.safetensors").write_bytes((robust_run / "last.safetensors").read_bytes())
    found = load_model(str(tmp_path / "mine.safetensors"))
    assert (found.folder, found.config, found.weights) == (None, None, "mine.safetensors")
    assert found.digest == load_model(str(robust_run)).digest


@pytest.mark.parametrize(
    "wrap", ["bare", "state_dict", "model_state_dict", "module.", "_orig_mod.", "_orig_mod.module."]
)
@pytest.mark.parametrize("name", ["preact-resnet-18", "wrn-10-1"])
def test_foreign_state_dicts(tmp_path, wrap, name):
    torch.manual_seed(3)
    network = build(name)
    state = network.state_dict()
    if wrap.endswith("."):
        state = {wrap + key: value for key, value in state.items()}
    elif wrap != "bare":
        state = {wrap: state, "epoch": 3, "optimizer": {"lr": 0.1}}
    torch.save(state, tmp_path / "net.pt")
    found = load_model(str(tmp_path / "net.pt"), network=name)
    assert same(found.network, network)
    assert not found.network.training


def test_robustbench_keeps_the_normalisation_beside_the_weights(tmp_path):
    network = build("wrn-10-1", mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4))
    mu, sigma = torch.tensor([0.5, 0.4, 0.3]), torch.tensor([0.2, 0.3, 0.4])
    state = {**network.state_dict(), "mu": mu.view(1, 3, 1, 1), "sigma": sigma.view(1, 3, 1, 1)}
    torch.save(state, tmp_path / "net.pt")
    assert same(load_model(str(tmp_path / "net.pt"), network="wrn-10-1").network, network)


def test_a_stage_that_the_authors_never_ran_is_left_out(tmp_path):
    network = build("wrn-10-1").eval()
    extra = {f"sub_block1.{key}": value for key, value in network.block1.state_dict().items()}
    torch.save({**network.state_dict(), **extra}, tmp_path / "trades.pt")
    assert same(load_model(str(tmp_path / "trades.pt"), network="wrn-10-1").network, network)


def test_classes_come_from_the_weights(tmp_path):
    torch.save(build("wrn-10-1", num_classes=100).state_dict(), tmp_path / "net.pt")
    found = load_model(str(tmp_path / "net.pt"), network="wrn-10-1", classes=10)
    assert found.network(torch.rand(1, 3, 32, 32)).shape == (1, 100)


def test_mean_and_std_are_put_in_front(tmp_path):
    torch.save(build("wrn-10-1").state_dict(), tmp_path / "net.pt")
    given = {"mean": (0.5, 0.5, 0.5), "std": (0.25, 0.25, 0.25)}
    found = load_model(str(tmp_path / "net.pt"), network="wrn-10-1", **given)
    expected = build("wrn-10-1", **given)
    expected.load_state_dict(build_state(tmp_path / "net.pt"))
    assert same(found.network, expected)


def build_state(path):
    return torch.load(path, weights_only=True)


MODULE = """
import torch
from torch import nn
def make():
    torch.manual_seed(1)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
def number():
    return 3
thing = 7
def broken():
    import no_such_package
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "their_nets.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", str(tmp_path))])
    yield "their_nets"
    sys.modules.pop("their_nets", None)


def test_a_function_of_the_users(module, tmp_path):
    found = load_model(f"{module}:make")
    assert isinstance(found.network, nn.Sequential)
    assert found.weights == "their_nets:make"
    # The same function as the network of a state_dict.
    state = {key: value + 1 for key, value in found.network.state_dict().items()}
    torch.save(state, tmp_path / "w.pt")
    filled = load_model(str(tmp_path / "w.pt"), network=f"{module}:make")
    assert torch.equal(filled.network[1].weight, found.network[1].weight + 1)
    normalised = load_model(f"{module}:make", mean=[0.5], std=[0.5]).network
    assert same(normalised, nn.Sequential(bt.models.Normalize([0.5], [0.5]), found.network), (2, 1, 8, 8))


def test_timm(monkeypatch, tmp_path):
    """Against a stand-in, since timm needs torchvision; the next test takes the real one where it imports."""
    made = []

    def create_model(name, pretrained, **shape):
        made.append((name, pretrained))
        if name == "nothing":
            raise RuntimeError("Unknown model (nothing)")
        network = nn.Sequential(nn.Flatten(), nn.Linear(3 * 64, 10))
        network.pretrained_cfg = {"mean": (0.5, 0.5, 0.5), "std": (0.2, 0.2, 0.2)}
        return network

    monkeypatch.setitem(sys.modules, "timm", types.SimpleNamespace(create_model=create_model))
    found = load_model("timm:some_net")
    assert made == [("some_net", True)]
    assert isinstance(found.network[0], bt.models.Normalize)
    assert found.network(torch.rand(2, 3, 8, 8)).shape == (2, 10)
    torch.save({key: value + 1 for key, value in found.network[1].state_dict().items()}, tmp_path / "w.pt")
    filled = load_model(str(tmp_path / "w.pt"), network="timm:some_net").network
    assert made[-1] == ("some_net", False)
    assert isinstance(filled[0], bt.models.Normalize)
    assert filled[1][1].weight.shape == (10, 192)
    given = load_model("timm:some_net", mean=[0.1, 0.1, 0.1], std=[1.0, 1.0, 1.0]).network  # instead of its own
    assert torch.allclose(given(torch.full((1, 3, 8, 8), 0.1)), given[1][1].bias)
    with pytest.raises(RunError, match=r"timm:nothing: Unknown model"):
        load_model("timm:nothing")
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(RunError, match="pip install timm"):
        load_model("timm:some_net")


def test_timms_own(tmp_path):
    timm = pytest.importorskip("timm", reason="timm is not installed, or lacks torchvision", exc_type=ImportError)
    network = timm.create_model("resnet10t", pretrained=False)
    torch.save(network.state_dict(), tmp_path / "w.pt")
    found = load_model(str(tmp_path / "w.pt"), network="timm:resnet10t")
    x, config = torch.rand(1, 3, 64, 64), network.pretrained_cfg
    normalised = bt.models.Normalize(config["mean"], config["std"])(x)
    assert torch.allclose(found.network(x), network.eval()(normalised), atol=1e-5)


def test_the_digest_changes_with_whatever_the_network_computes():
    def digest(network):
        return LoadedModel("", "", network=network).digest

    torch.manual_seed(0)
    network = build("wrn-10-1", mean=(0.5, 0.5, 0.5), std=(0.2, 0.2, 0.2))
    before = digest(network)
    assert digest(network) == before
    network.bn1.running_mean[0] += 1e-6
    changed = digest(network)
    assert changed != before
    network.normalize.mean[0, 0] = 0.25  # in no checkpoint, but in the network
    assert digest(network) not in (before, changed)
    assert digest(nn.Sequential(nn.Linear(2, 2), nn.ReLU())) != digest(nn.Sequential(nn.Linear(2, 2), nn.Tanh()))


def mistakes(tmp_path, robust_run):
    torch.save(build("wrn-10-1").state_dict(), tmp_path / "net.pt")
    torch.save({"weights": 3}, tmp_path / "no.pt")
    torch.save(build("wrn-10-1"), tmp_path / "whole.pt")
    (tmp_path / "text.pt").write_text("no zip")
    (tmp_path / "broken.pt").write_bytes((tmp_path / "net.pt").read_bytes()[:1000])
    (tmp_path / "empty").mkdir()
    (tmp_path / "both" / "baseline").mkdir(parents=True)
    (tmp_path / "both" / "baseline" / "config.yaml").write_text((robust_run / "config.yaml").read_text())
    here, run = str(tmp_path), str(robust_run)
    return {
        "name": (["digit"], {}, "'digit' is no network; give a run's folder, a checkpoint"),
        "path": (["runs/none"], {}, "no such file or folder"),
        "folder": ([f"{here}/empty"], {}, "is not a run: it is empty"),
        "comparison": ([f"{here}/both"], {}, f"a folder of runs; give one of them: {here}/both/baseline"),
        "weights of a file": (
            [f"{run}/last.safetensors"],
            {"weights": "best"},
            f"--weights was given, but {run}/last.safetensors is a file",
        ),
        "weights": ([run], {"weights": "best"}, "has no 'best' weights; it has last, averaged"),
        "unknown weights": ([run], {"weights": "first"}, "there are last, best, averaged"),
        "network": ([f"{here}/net.pt"], {}, "name it, e.g. --network wrn-34-10"),
        "unknown network": ([f"{here}/net.pt"], {"network": "vgg"}, "no network is called 'vgg'"),
        "another": (
            [f"{here}/net.pt"],
            {"network": "preact-resnet-18"},
            "fit preact-resnet-18: Missing key(s)",
        ),
        "deeper": (
            [f"{here}/net.pt"],
            {"network": "wrn-16-1"},
            'Missing key(s) in state_dict: "block1.layer.1.bn1.weight", "block1.layer.1.bn1.bias"',
        ),
        "wider": ([f"{here}/net.pt"], {"network": "wrn-10-2"}, "size mismatch for "),
        "no weights": ([f"{here}/no.pt"], {"network": "wrn-10-1"}, "holds no state_dict"),
        "a module": (
            [f"{here}/whole.pt"],
            {"network": "wrn-10-1"},
            "it holds more than tensors; save its state_dict()",
        ),
        "text": (
            [f"{here}/text.pt"],
            {},
            "text.pt is not a checkpoint: it is neither safetensors nor a file of torch.save; give a run's folder",
        ),
        "no weights, no network": ([f"{here}/no.pt"], {}, "holds no state_dict; save the network's"),
        "checkpoint": ([f"{run}/checkpoint.pt"], {}, f"holds no state_dict; give {run}, the run that it lies in"),
        "no file": ([f"{here}/broken.pt"], {"network": "wrn-10-1"}, "cannot be read as weights"),
        "not needed": ([run], {"mean": [0.5]}, "--mean was given, but the checkpoint defines its normalisation"),
        "another network": (
            [run],
            {"network": "wrn-10-1"},
            'fit wrn-10-1: Missing key(s) in state_dict: "block1',
        ),
        "mean alone": (["their_nets:make"], {"mean": [0.5]}, "go together"),
        "module": (["no_such.module:f"], {}, "there is no module 'no_such'"),
        "function": (["their_nets:none"], {}, "their_nets has no function 'none'; it has make"),
        "no function": (["their_nets:thing"], {}, "has no function 'thing'"),
        "no module": (["their_nets:number"], {}, "returned int; it has to return a torch.nn.Module"),
        "no name": (["their nets:3"], {}, "is no network"),
    }


def test_what_a_wrong_one_is_told(tmp_path, module, robust_run):
    for name, (words, options, message) in mistakes(tmp_path, robust_run).items():
        with pytest.raises(RunError) as error:
            load_model(*words, **options)
        assert message in str(error.value), name
        assert "\n" not in str(error.value)


def test_an_error_in_the_users_own_code_is_theirs(module):
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        load_model(f"{module}:broken")


def test_a_checkpoint_of_a_run_that_was_tampered_with(robust_run, tmp_path):
    from safetensors.torch import load_file, save_file

    file = tmp_path / "last.safetensors"
    tensors = load_file(robust_run / "last.safetensors")
    tensors["extra.weight"] = tensors.pop("fc2.bias")
    from safetensors import safe_open

    with safe_open(robust_run / "last.safetensors", "pt") as opened:
        about = json.loads(opened.metadata()["bullettrain"])
    for damaged in (True, False):
        save_file(tensors, file, metadata={"bullettrain": json.dumps(about)})
        said = "digest does not match" if damaged else r'Missing key.* "fc2\.bias"\. Unexpected key.* "extra\.weight"'
        with pytest.raises(RunError, match=said):
            load_model(str(file))
        about.pop("digest", None)  # as in the files of older versions


def test_read_state_takes_safetensors(robust_run):
    assert "fc2.bias" in read_state(robust_run / "last.safetensors")[0]


def test_a_file_is_what_it_holds_whatever_it_is_called(robust_run, tmp_path):
    shutil.copy(robust_run / "last.safetensors", tmp_path / "net.pt")
    torch.save(build("wrn-10-1").state_dict(), tmp_path / "net.safetensors")
    assert load_model(str(tmp_path / "net.pt")).weights == "net.pt"
    assert load_model(str(tmp_path / "net.safetensors"), network="wrn-10-1").weights == "net.safetensors"


class Odd(nn.Module):
    def __init__(self, out):
        super().__init__()
        self.out = out

    def forward(self, x):
        return self.out(x) if callable(self.out) else self.out


def test_networks_that_do_not_go_with_the_data():
    digits = load("digits", split="test")
    wrong = {
        "the network has 100 classes, but digits has 10": Odd(lambda x: torch.zeros(len(x), 100)),
        "does not take the images of digits, 1×8×8": nn.Conv2d(3, 4, 3),
        "returned the shape (2, 8, 6, 6)": nn.Conv2d(1, 8, 3),
        "the network returned tuple": Odd((1, 2)),
        "NaN or infinite": Odd(lambda x: torch.full((len(x), 10), float("nan"))),
    }
    for message, network in wrong.items():
        with pytest.raises(ConfigError) as error:
            prepare(network, digits, device=CPU, data="digits")
        assert message in str(error.value)
