"""The runner that captures: what it does around a capture, which needs no GPU to be seen."""

from unittest.mock import PropertyMock

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


@pytest.fixture
def timed(pretended, monkeypatch):
    """Replays that take the seconds which stand in a list, the last of them for ever."""
    seconds = [0.3]

    def replay(graph):
        graph.replay()
        return seconds.pop(0) if len(seconds) > 1 else seconds[0]

    monkeypatch.setattr(graphed, "_timed", replay)
    return seconds


@pytest.fixture
def choices(pretended, timed, monkeypatch):
    """Whether cuDNN is told to try, for each capture."""
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    return pretended


@pytest.mark.parametrize("tf32", [False, True, "newer switches"])
def test_a_size_is_tuned_when_it_has_run_for_long_enough(choices, monkeypatch, tf32):
    """Trying convolutions takes seconds a size: worth it for one that stays, and a training has dozens that do not."""
    allowed = PropertyMock(return_value=tf32) if tf32 != "newer switches" else PropertyMock(side_effect=RuntimeError)
    monkeypatch.setattr(type(torch.backends.cudnn), "allow_tf32", allowed)
    graphs, runs = Graphs(list, tune_after=1.0), []
    for use in range(8):
        graphs("often", lambda: runs.append("often"))
        if use < 3:
            graphs("seldom", lambda: runs.append("seldom"))
    # 0.3 s each: after three runs the fourth would make it more than a second.
    assert choices == ([False, False, True] if tf32 is True else [False, False])
    # One call of the piece in each capture, one replay each time that it is asked for.
    assert runs.count("often") == (2 if tf32 is True else 1) + 8
    assert runs.count("seldom") == 1 + 3
    assert set(graphs.untuned) == {"seldom"}
    assert graphs.tried == {"often"}
    assert torch.backends.cudnn.benchmark is False
    assert [call.args for call in allowed.call_args_list if call.args] == ([(False,), (True,)] if tf32 is True else [])


def test_what_is_slower_when_tuned_goes_back(choices, timed):
    timed[:] = [0.6, 0.7, 0.6]
    graphs, runs = Graphs(list, tune_after=1.0), []
    for use in range(6):
        graphs("piece", lambda: runs.append(None))
        assert len(runs) == len(choices) + use + 1  # each capture calls it, and each use runs it once
    assert choices == [False, True, False]
    assert not graphs.untuned


def test_what_cannot_be_tuned_is_captured_by_guess_again(choices):
    """Out of memory for a minute, say: that is no reason to run all else one by one."""
    said, runs = [], []
    graphs = Graphs(list, said.append, tune_after=1.0)

    def piece():
        if torch.backends.cudnn.benchmark:
            raise RuntimeError("out of memory")
        runs.append(None)

    for use in range(6):
        graphs("piece", piece)
        assert len(runs) == choices.count(False) + use + 1
    assert choices == [False, True, False]
    assert graphs.reason is None
    assert not said
    assert torch.backends.cudnn.benchmark is False


def test_new_buffers_are_waited_for_anew(choices, monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    graphs = Graphs(list, tune_after=1.0)
    for _ in range(2):
        for _ in range(6):
            graphs("piece", lambda: None)
        graphs.reset()
    assert choices == [False, True] * 2
    assert not graphs.tried
    assert not graphs.untuned
