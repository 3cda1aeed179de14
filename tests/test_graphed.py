"""The runner that captures: what it does around a capture, which needs no GPU to be seen."""

import pytest
import torch

from bullettrain.engine import graphed
from bullettrain.engine.graphed import Graphs


class Replayed:
    def __init__(self, function):
        self.replay = function


@pytest.fixture
def pretended(monkeypatch):
    """A runner whose captures are calls; what cuDNN is told while they are made."""
    told = []

    def capture(self, function, warm_ups):
        told.append(torch.backends.cudnn.benchmark)
        function()
        return Replayed(function)

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(graphed, "_free_generator", lambda: None)
    monkeypatch.setattr(Graphs, "_capture", capture)
    return told


@pytest.mark.parametrize("before", [False, True])
def test_cudnn_is_tuned_for_what_is_captured_alone(pretended, monkeypatch, before):
    """Judging between epochs meets ever new sizes: tuned, each took most of a second."""
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", before)
    calls, graphs = [], Graphs(list)
    for _ in range(3):
        graphs("piece", lambda: calls.append(torch.backends.cudnn.benchmark))
    assert pretended == [True]
    assert calls == [True, before, before, before]
    assert torch.backends.cudnn.benchmark is before


def test_a_capture_that_fails_leaves_cudnn_as_it_was(pretended, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    said, calls = [], []
    graphs = Graphs(list, said.append)

    def piece():
        calls.append(torch.backends.cudnn.benchmark)
        if len(calls) == 1:
            raise RuntimeError("not while a graph is captured")

    graphs("piece", piece)
    assert calls == [True, False]
    assert torch.backends.cudnn.benchmark is False
    assert said == ["CUDA graphs are off, steps run one by one: RuntimeError: not while a graph is captured"]
