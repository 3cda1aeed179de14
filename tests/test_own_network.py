"""A network of the user's own through the training command: trained, stopped, judged, loaded."""

import sys

import pytest
import torch

import bullettrain as bt
from bullettrain.config.settings import ConfigError
from bullettrain.loading import load_model
from bullettrain.models import build
from bullettrain.run_folder import RunError
from bullettrain.training import run as runs
from short_runs import CPU, interrupt_at_the_third_group, small

SOURCE = """
from torch import nn

def make():
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10))

def number():
    return 7

def sized(num_classes):
    return make()
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    (tmp_path / "my_networks.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield "my_networks:make"
    sys.modules.pop("my_networks", None)


def test_it_is_trained_resumed_evaluated_and_loaded(tmp_path, monkeypatch, mine):
    config = small(f"network.name={mine}", "network.mean=[0.5]", "network.std=[0.25]", "attack_group=2")
    with monkeypatch.context() as patched:
        interrupt_at_the_third_group(patched)
        assert not runs.train(config, tmp_path / "run", CPU).finished
    assert runs.train(config, tmp_path / "run", CPU, resume=True).finished
    assert runs.train(config, tmp_path / "whole", CPU).finished
    one, other = ((tmp_path / name / "last.safetensors").read_bytes() for name in ("run", "whole"))
    assert one == other
    subject = load_model(str(tmp_path / "run"), weights="last", network=mine)
    network = bt.load(tmp_path / "run", weights="last", trust=True)
    x = torch.rand(3, 1, 8, 8)
    assert torch.equal(subject.network(x), network(x))
    assert [type(part).__name__ for part in network] == ["Normalize", "Sequential"]


def test_a_network_whose_module_is_gone_or_has_moved(tmp_path, mine):
    assert runs.train(small(f"network.name={mine}", "epochs=1"), tmp_path / "run", CPU).finished
    (tmp_path / "my_networks.py").rename(tmp_path / "moved.py")
    sys.modules.pop("my_networks")
    with pytest.raises(RunError, match="cannot be loaded: my_networks:make: there is no module 'my_networks'"):
        bt.load(tmp_path / "run", trust=True)
    assert len(bt.load(tmp_path / "run", network="moved:make")) == 5
    sys.modules.pop("moved")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("my_networks:number", "returned int; it has to return a torch.nn.Module"),
        ("my_networks:other", "has no function 'other'; it has make, number, sized"),
        ("my_networks:sized", r"my_networks:sized takes \(num_classes.*\); it is called with \(\)"),
        ("no_such_module:make", "there is no module 'no_such_module'"),
        ("a b:c", "is no network; give package.module:function or timm:NAME"),
    ],
)
def test_what_is_no_network_is_said_before_anything_is_trained(tmp_path, mine, name, said):
    with pytest.raises(ValueError, match=said):
        build(name)
    with pytest.raises(ConfigError, match=f"network: .*{said}"):
        runs.train(small(f"network.name={name}"), tmp_path / "run", CPU)
    assert not (tmp_path / "run").exists()


def test_a_network_for_other_images_is_refused(tmp_path, mine):
    (tmp_path / "my_networks.py").write_text(SOURCE.replace("10))", "5))"))
    with pytest.raises(ConfigError, match="network: my_networks:make has 5 outputs, but there are 10 classes"):
        runs.train(small(f"network.name={mine}"), tmp_path / "run", CPU)
    (tmp_path / "my_networks.py").write_text(SOURCE.replace("Conv2d(1", "Conv2d(3"))
    sys.modules.pop("my_networks")
    with pytest.raises(ConfigError, match=r"the network does not take the images of digits, 1×8×8: .*channels"):
        runs.train(small(f"network.name={mine}"), tmp_path / "run", CPU)
    assert not (tmp_path / "run").exists()
