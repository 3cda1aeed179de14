"""The runner that captures: what it does around a capture, which needs no GPU to be seen."""

import gc
from contextlib import nullcontext
from typing import NamedTuple
from unittest.mock import PropertyMock

import pytest
import torch

from bullettrain.engine.cuda_graphs import CudaGraphRunner
from emulated import EmulatedRunner


class Graph:
    def __init__(self, function):
        self.replay = function


class Pretended(EmulatedRunner):
    """Replays are calls; what cuDNN is told while they are made, and how long replays take, stand in lists."""

    def __init__(self, *args, seconds=(0.3,), **settings):
        super().__init__(*args, **settings)
        self.told, self.seconds_left, self.clock = [], list(seconds), 0.0

    def _capture(self, function):
        self.told.append(torch.backends.cudnn.benchmark)

        def replay():
            function()
            self.clock += self.seconds_left.pop(0) if len(self.seconds_left) > 1 else self.seconds_left[0]

        return Graph(replay)

    def _now(self):
        return self.clock


@pytest.fixture(autouse=True)
def _guessing(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)


# -------------------------------------------------------------------------------------- arguments and results


class Pair(NamedTuple):
    total: torch.Tensor
    nothing: None


def test_arguments_are_copied_where_they_are_new_and_used_where_they_lie_if_they_are_the_runners_own():
    seen = []

    def produce(x, n):
        seen.append(x.data_ptr())
        return x[:n] * 2, None

    def change(x):
        x.add_(1)
        return Pair(x.sum(), None)

    run = EmulatedRunner(list)
    for value in (1.0, 2.0, 3.0):
        given = torch.full((4,), value)
        doubled, nothing = run(produce, given, 3)
        assert nothing is None
        assert doubled.tolist() == [2 * value] * 3
        result = run(change, doubled)  # in place, since it is the runner's own
        assert isinstance(result, Pair)
        assert result.total.item() == 3 * (2 * value + 1)
        assert doubled.tolist() == [2 * value + 1] * 3
        assert given.tolist() == [value] * 4  # the caller's is left alone
    assert len(set(seen)) == 1
    assert len(run.graphs) == 2
    run(produce, torch.ones(4), 2)  # another size is another graph
    assert len(run.graphs) == 3
    run.forget()
    assert not run.graphs


def test_what_is_loaded_may_be_changed_in_place_and_lies_where_it_lay():
    def change(x):
        x.mul_(2)

    run, places = EmulatedRunner(list), set()
    for value in (1.0, 5.0):
        x, nothing = run.load(torch.full((3,), value), None)
        run(change, x)
        assert nothing is None
        assert x.tolist() == [2 * value] * 3
        places.add(x.data_ptr())
    assert len(places) == 1


def test_state_is_what_it_would_be_after_one_call_each_time():
    total = torch.zeros(())

    def add(x):
        total.add_(x.sum())

    run = EmulatedRunner(lambda: [total])
    for _ in range(4):
        run(add, torch.ones(3))
    assert total.item() == 12


def test_draws_are_those_of_the_phase_by_itself():
    def draw(x):
        return x + torch.rand(3)

    run = EmulatedRunner(list)
    torch.manual_seed(5)
    found = [run(draw, torch.zeros(3)).clone() for _ in range(4)]
    torch.manual_seed(5)
    for values in found:
        assert torch.equal(values, torch.rand(3))


# ------------------------------------------------------------------------------------------- what goes wrong


def test_an_error_of_the_phase_itself_is_the_users_and_changes_nothing():
    state = torch.zeros(2)

    def wrong(x):
        state.add_(1)
        raise ValueError("look at your labels")

    said = []
    run = EmulatedRunner(lambda: [state], said.append)
    with pytest.raises(ValueError, match="look at your labels"):
        run(wrong, torch.ones(2))
    assert not said
    assert run.reason is None
    assert not state.any()


def test_a_capture_that_fails_leaves_cudnn_as_it_was_and_the_result_right():
    def reads(x):
        return x * (2 if x.sum().item() > 0 else 3)

    said = []
    run = EmulatedRunner(list, said.append)
    assert run(reads, torch.ones(2)).tolist() == [2, 2]
    assert run(reads, -torch.ones(2)).tolist() == [-3, -3]
    assert torch.backends.cudnn.benchmark is False
    assert len(said) == 1
    assert said[0].startswith("CUDA graphs are off, steps run one by one: RuntimeError: aten._local_scalar_dense")


def test_a_replay_that_differs_is_given_up_with_the_right_result():
    calls, weights = [0], torch.zeros(50, dtype=torch.float64)

    def counts(x):
        calls[0] += 1
        weights.add_(calls[0])
        return x * calls[0]

    said = []
    run = EmulatedRunner(lambda: [weights], said.append)
    result = run(counts, torch.ones(3, dtype=torch.float64))
    assert "a replay of counts differs from eager" in said[0]
    assert (result == weights[0]).all()  # both of one and the same call
    before = calls[0]
    run(counts, torch.ones(3, dtype=torch.float64))
    assert calls[0] == before + 1
    assert len(said) == 1


def test_a_few_signs_that_rounding_turns_are_no_difference():
    chance = [torch.Generator().manual_seed(0)]
    state = torch.zeros(10000)

    def almost(x):
        noise = torch.rand(10000, generator=chance[0])  # of its own: not put back before the replay
        state.add_(torch.where(noise < 1e-4, -1.0, 1.0))

    run = Pretended(lambda: [state])
    for _ in range(5):
        run(almost, torch.ones(1))
    assert run.reason is None


# ------------------------------------------------------------------------------------------- cuDNN's choices


@pytest.mark.parametrize("before", [False, True])
def test_cudnn_is_tuned_for_what_is_captured_alone(monkeypatch, before):
    """Judging between epochs meets ever new sizes: tuned, each took most of a second."""
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", before)
    calls, run = [], Pretended(list)

    def phase():
        calls.append(torch.backends.cudnn.benchmark)

    for _ in range(3):
        run(phase)
    assert run.told == [True]
    assert calls == [True] * 3 + [before] * 2  # two warm-ups and the first replay; then replays
    assert torch.backends.cudnn.benchmark is before


@pytest.mark.parametrize("tf32", [False, True, "newer switches"])
def test_a_size_is_tuned_when_it_has_run_for_long_enough(monkeypatch, tf32):
    """Trying convolutions takes seconds a size: worth it for one that stays, and a training has dozens that do not."""
    allowed = PropertyMock(return_value=tf32) if tf32 != "newer switches" else PropertyMock(side_effect=RuntimeError)
    monkeypatch.setattr(type(torch.backends.cudnn), "allow_tf32", allowed)
    run = Pretended(list, cudnn_benchmark_after=1.0)

    def often():
        pass

    def seldom():
        pass

    for use in range(8):
        run(often)
        if use < 3:
            run(seldom)
    # 0.3 s each: after three runs the fourth would make it more than a second.
    assert run.told == ([False, False, True] if tf32 is True else [False, False])
    assert set(run._untuned) == {("seldom",)}
    assert run._tried == {("often",)}
    assert torch.backends.cudnn.benchmark is False
    assert [call.args for call in allowed.call_args_list if call.args] == ([(False,), (True,)] if tf32 is True else [])


def test_what_is_slower_when_tuned_goes_back():
    run = Pretended(list, cudnn_benchmark_after=1.0, seconds=[0.6, 0.7, 0.6])

    def phase():
        pass

    for _ in range(6):
        run(phase)
    assert run.told == [False, True, False]
    assert not run._untuned


def test_what_cannot_be_tuned_is_captured_by_guess_again():
    """Out of memory for a minute, say: that is no reason to run all else one by one."""
    said = []
    run = Pretended(list, said.append, cudnn_benchmark_after=1.0)

    def phase():
        if torch.backends.cudnn.benchmark:
            raise RuntimeError("out of memory")

    for _ in range(6):
        run(phase)
    assert run.told == [False, False]
    assert run.reason is None
    assert not said
    assert torch.backends.cudnn.benchmark is False


def test_no_garbage_is_collected_during_a_capture(monkeypatch):
    collected, seen = [], []

    class Former:  # a graph that is let go of, in a circle
        def __init__(self):
            self.itself = self

        def __del__(self):
            collected.append(True)

    def phase():
        Former()
        circles = [[] for _ in range(10_000)]  # enough to have the collector run, were it on
        for circle in circles:
            circle.append(circle)
        seen.append((gc.isenabled(), list(collected)))

    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, **options: nullcontext())
    runner = CudaGraphRunner.__new__(CudaGraphRunner)
    runner.pool = None
    runner._capture(phase)
    assert seen == [(False, [])]
    assert gc.isenabled()
    gc.collect()
    assert collected == [True]
