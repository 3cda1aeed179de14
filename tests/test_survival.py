"""Which images survive: rounds, restarts, resuming, and how sure the shares are."""

import copy
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from bullettrain.attacks import pgd
from bullettrain.data import ImageSet, to_unit
from bullettrain.evaluation import clean_accuracy, robust_accuracy
from bullettrain.evaluation.accuracy import Round, Survival, clean_round, correct, pgd_rounds, survive
from bullettrain.evaluation.comparison import Difference, difference, paired_error, share_error
from bullettrain.evaluation.masking import rises
from bullettrain.evaluation.results import class_shares, pack, pack_counts, unpack, unpack_counts, wilson
from bullettrain.evaluation.specs import PGD
from conftest import assert_same, norm_net, snapshot

CPU = torch.device("cpu")


def images(n=40, net=None):
    """Random images; with a network, labelled by what it says of them, save every fifth."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(256, (n, 3, 6, 6), dtype=torch.uint8, generator=generator)
    y = torch.randint(4, (n,), generator=generator)
    if net is not None:
        y = net.eval()(to_unit(x)).argmax(dim=1)
        y[::5] = (y[::5] + 1) % 4
    return ImageSet(x, y, tuple("abcd"))


class Sine(nn.Module):
    def forward(self, x):
        return (8 * x).sin()


def shaky_net():
    """Many small basins: whether an image is lost depends on where the attack starts."""
    return nn.Sequential(nn.Flatten(), nn.Linear(108, 24), Sine(), nn.BatchNorm1d(24), nn.Linear(24, 4))


def test_later_rounds_see_only_survivors_in_full_batches():
    seen = []

    def breaks(numbers):
        def survives(x, y, seed):
            seen.append((len(x), seed))
            return ~torch.isin(x[:, 0, 0, 0].mul(255).round().long(), torch.tensor(numbers))

        return survives

    data = images(10)
    data.images[:, 0, 0, 0] = torch.arange(10)
    state = survive(
        [Round("one", breaks([0, 1, 2, 3, 8])), Round("two", breaks([0, 4])), Round("three", breaks([]))],
        data,
        device=CPU,
        batch_size=4,
    )
    assert state.alive.nonzero()[:, 0].tolist() == [5, 6, 7, 9]
    assert state.shares == [0.5, 0.4, 0.4]
    assert [size for size, _ in seen] == [4, 4, 2, 4, 1, 4]
    assert len({seed for _, seed in seen}) == 6  # no two batches share their noise


def test_what_is_no_number_is_no_right_answer():
    """argmax takes NaN for the largest, so that a broken network would be right wherever that is the label."""

    class Broken(torch.nn.Module):
        def forward(self, x):
            return x.new_full((len(x), 3), float("nan")).index_fill(0, torch.tensor([0]), 1.0)

    x, y = torch.rand(4, 1, 2, 2), torch.zeros(4, dtype=torch.int64)
    assert correct(Broken().eval(), x, y).tolist() == [True, False, False, False]


def test_nothing_left_needs_no_more_rounds():
    def never(x, y, seed):
        raise AssertionError("an image that is lost was attacked")

    rounds = [Round("all", lambda x, y, seed: torch.zeros(len(x), dtype=torch.bool)), Round("more", never)]
    state = survive(rounds, images(5), device=CPU)
    assert state.shares == [0.0, 0.0]


@pytest.mark.parametrize("stop", range(1, 9))
def test_a_stop_after_any_batch_changes_nothing(stop):
    net = shaky_net()
    data = images(17, net)
    rounds = [clean_round(net), *pgd_rounds(net, PGD(2, 2, 0.01, "ce", "linf", 0.02))]
    arguments = {"device": CPU, "batch_size": 3, "seed": 5}
    whole = survive(rounds, data, **arguments)
    assert 0 < whole.share < whole.shares[0]
    ticks, state = [], Survival.fresh(17)

    def tick(count):
        ticks.append(count)
        if len(ticks) == stop:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        survive(rounds, data, tick=tick, state=state, **arguments)
    again = survive(rounds, data, state=copy.deepcopy(state), **arguments)
    assert torch.equal(again.alive, whole.alive)
    assert again.shares == whole.shares


def test_accuracies_are_means_of_what_survives_and_change_nothing():
    net = shaky_net()
    data = images(30, net)
    net.train()
    before = snapshot(net)
    clean = clean_accuracy(net, data, device=CPU, batch_size=7)
    robust = robust_accuracy(net, data, PGD(3, 3, 0.004, "ce", "linf", 0.01), device=CPU, batch_size=7)
    assert_same(before, snapshot(net))
    net.eval()
    right = net(to_unit(data.images)).argmax(dim=1) == data.labels
    assert clean == int(right.sum()) / 30 == 24 / 30
    assert 0 < robust < clean


@pytest.mark.parametrize("loss", ["ce", "kl", "margin"])
@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_the_worst_of_the_restarts_counts(norm, loss):
    """Against the attack written out: every restart on every image, then the worst."""
    from bullettrain.data.base import derive_seed

    net = shaky_net()
    data = images(25, net)
    eps = 0.01 if norm == "linf" else 0.05
    settings = {"eps": eps, "steps": 2, "step_size": eps / 2, "norm": norm, "loss": loss}
    x, y = to_unit(data.images), data.labels
    alive = net(x).argmax(dim=1) == y
    for restart in range(3):
        rows = alive.nonzero()[:, 0]
        x_adv = pgd(
            net,
            x[rows],
            y[rows],
            target=net(x[rows]).softmax(dim=1).detach() if loss == "kl" else None,
            generator=torch.Generator().manual_seed(derive_seed(9, restart + 1, 0)),
            **settings,
        )
        alive[rows] &= net(x_adv).argmax(dim=1) == y[rows]
    found = robust_accuracy(net, data, PGD(2, 3, eps / 2, loss, norm, eps), device=CPU, seed=9)
    assert found == int(alive.sum()) / 25
    assert 0 < found < 20 / 25


def test_more_restarts_never_raise_the_accuracy():
    net = shaky_net()
    data = images(40, net)
    with pytest.warns(
        UserWarning, match=r"pgd1(x\d)? moves by 1 × 0.001 at most, less than ε = 0.06: .* a larger step"
    ) as told:
        accuracies = [robust_accuracy(net, data, PGD(1, n, 0.001, eps=0.06), batch_size=9) for n in (1, 2, 4, 8)]
    assert {warning.filename for warning in told} == {__file__}
    assert accuracies == sorted(accuracies, reverse=True)
    assert accuracies[0] > accuracies[-1]


def test_what_is_left_is_exact_if_every_batch_loses_the_same_share():
    data, done, left, state = images(24, shaky_net()), [0], [], Survival.fresh(24)
    rounds = [
        Round("one", lambda x, y, seed: torch.arange(len(x)) % 2 == 0),
        Round("two", lambda x, y, seed: torch.ones(len(x), dtype=torch.bool), passes=10),
    ]
    assert state.left(rounds, 6) == 24 + 24 * 10  # nothing is known yet

    def tick(count):
        done[0] += count
        left.append(done[0] + state.left(rounds, 6))

    survive(rounds, data, device=CPU, batch_size=6, tick=tick, state=state)
    assert set(left) == {24 + 12 * 10}
    assert state.left(rounds, 6) == 0


@given(st.integers(1, 500).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_equals_scipys(counts):
    from scipy.stats import binomtest

    correct, total = counts
    expected = binomtest(correct, total).proportion_ci(0.95, method="wilson")
    assert wilson(correct, total) == pytest.approx((expected.low, expected.high), abs=1e-12)


def test_wilson_needs_examples():
    with pytest.raises(ValueError, match="at least one"):
        wilson(0, 0)


def test_a_rise_is_told_from_chance():
    before = torch.zeros(1000, dtype=torch.bool)
    before[:500] = True
    after = before.clone()
    assert not rises(before, after)
    after[500:510] = True  # ten more, none less: 1 %, and beyond chance
    assert rises(before, after)
    assert not rises(after, before)
    noisy = before.clone()
    noisy[480:500], noisy[500:525] = False, True  # 25 gained, 20 lost
    assert not rises(before, noisy)
    few = before.clone()
    few[500:504] = True
    assert not rises(before, few)


@given(st.lists(st.booleans(), min_size=1, max_size=70))
def test_masks_survive_being_written(bits):
    mask = torch.tensor(bits)
    assert torch.equal(unpack(pack(mask), len(bits)), mask)
    with pytest.raises(ValueError, match="bytes"):
        unpack(pack(mask), len(bits) + 8)


def test_accuracy_in_each_class():
    labels = torch.tensor([0, 0, 0, 1, 3, 3])
    alive = torch.tensor([True, False, True, False, True, True])
    assert class_shares(alive, labels, 4) == [pytest.approx(2 / 3), 0.0, None, 1.0]


def test_a_network_in_half_precision_gives_float32_logits_and_close_ones():
    from bullettrain.evaluation.accuracy import EvaluatedModel

    net = norm_net().eval()
    x = to_unit(images(8).images)
    exact, half = EvaluatedModel(net, dtype=torch.float32)(x), EvaluatedModel(net, dtype=torch.bfloat16)(x)
    assert exact.dtype == half.dtype == torch.float32
    assert torch.equal(exact, net(x))
    assert not torch.equal(exact, half)
    assert torch.allclose(exact, half, atol=0.05)


@pytest.mark.parametrize("compiled", [False, True])
def test_whatever_the_precision_float32_gives_the_verdict(monkeypatch, compiled):
    from bullettrain.evaluation.accuracy import EvaluatedModel, float32_logits

    net = nn.Sequential(nn.Flatten(), nn.Linear(1, 2, bias=False)).eval().requires_grad_(False)
    net[1].weight.copy_(torch.tensor([[1.0], [1.001]]))  # the same in bf16, where the first of equals counts
    monkeypatch.setattr(torch, "compile", lambda network: network)
    evaluated, x = EvaluatedModel(net, dtype=torch.bfloat16, compiled=compiled), torch.ones(3, 1, 1, 1)
    assert evaluated(x).argmax(dim=1).tolist() == [0, 0, 0]
    assert correct(evaluated, x, torch.ones(3, dtype=torch.int64)).all()
    assert torch.equal(evaluated.exact(x), net(x))
    with torch.autocast("cpu", torch.bfloat16):
        assert float32_logits(evaluated, x).argmax(dim=1).tolist() == [1, 1, 1]
    net.add_module("float32_logits", nn.Identity())  # a user's network may have parts called anything
    assert torch.equal(float32_logits(net, x), net(x))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # the compiler looks at it
@pytest.mark.parametrize("last", [False, True])
def test_two_programs_are_compiled_however_images_lie_and_gradients_are_asked_for(monkeypatch, last):
    """AutoAttack looks at networks with gradients on that nobody takes, and its images lie row by row."""
    from torch._dynamo.testing import CompileCounter

    from bullettrain.evaluation.accuracy import EvaluatedModel

    torch._dynamo.reset()  # what other tests have compiled counts towards its limit
    counter, compile = CompileCounter(), torch.compile
    monkeypatch.setattr(torch, "compile", lambda network: compile(network, backend=counter))
    monkeypatch.setattr("bullettrain.evaluation.accuracy.channels_last", lambda device: last)
    net = norm_net().eval().requires_grad_(False)
    plain, evaluated = EvaluatedModel(net, dtype=torch.float32), EvaluatedModel(net, dtype=torch.float32, compiled=True)
    for n in (5, 8, 1, 3):
        rows = to_unit(images(n).images)
        for x in (rows, rows.contiguous(memory_format=torch.channels_last)) if last else (rows,):
            assert torch.allclose(evaluated(x), plain(x))
            assert not evaluated(x).requires_grad
            with torch.no_grad():
                evaluated(x)
            leaf = x.clone().requires_grad_()
            for at in (leaf, 1 * leaf):
                gradients = [torch.autograd.grad(network(at).exp().sum(), at)[0] for network in (evaluated, plain)]
                assert torch.allclose(*gradients)
                assert gradients[0].abs().sum() > 0
    assert counter.frame_count == 2
    torch._dynamo.reset()


def test_float32_is_float32_while_a_network_is_judged():
    from bullettrain.precision import arithmetic

    def switches():
        convolutions, products = torch.backends.cudnn.conv.fp32_precision, torch.backends.cuda.matmul.allow_tf32
        return torch.backends.cudnn.allow_tf32, convolutions == "tf32", products, torch.get_float32_matmul_precision()

    before = switches()
    with arithmetic("float32"):
        assert switches() == (False, False, False, "highest")
        with arithmetic("tf32"):
            assert switches() == (True, True, True, "high")
        assert switches() == (False, False, False, "highest")
    assert switches() == before


def test_float32_is_float32_where_the_newer_switches_are_set():
    """Torch then refuses to read the older ones."""
    from bullettrain.precision import arithmetic

    both = torch.backends.cudnn.conv, torch.backends.cuda.matmul
    before = [switch.fp32_precision for switch in both]
    try:
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        torch.backends.cudnn.conv.fp32_precision = "ieee"
        with arithmetic("float32"):
            assert [switch.fp32_precision for switch in both] == ["ieee", "ieee"]
        assert [switch.fp32_precision for switch in both] == ["ieee", "tf32"]
        with arithmetic("tf32"):
            assert [switch.fp32_precision for switch in both] == ["tf32", "tf32"]
        assert [switch.fp32_precision for switch in both] == ["ieee", "tf32"]
    finally:
        for switch, value in zip(both, before, strict=True):
            switch.fp32_precision = value


def test_a_network_is_evaluated_where_it_is():
    class Nothing(nn.Module):
        def forward(self, x):
            return x.flatten(1)[:, :4]

    net, data, devices = shaky_net(), images(12), []
    net.register_forward_hook(lambda module, args, out: devices.append(args[0].device.type))
    assert clean_accuracy(net, data) == clean_accuracy(net, data, device=CPU)
    assert robust_accuracy(net, data, PGD()) == robust_accuracy(net, data, PGD(20, 1, 0.003, "ce", "linf", 0.031))
    assert set(devices) == {"cpu"}
    assert clean_accuracy(Nothing(), data) == clean_accuracy(Nothing(), data, device=CPU)  # no parameters
    with pytest.raises((NotImplementedError, RuntimeError), match="meta"):
        clean_accuracy(nn.Sequential(nn.Flatten(), nn.Linear(108, 4)).to("meta"), data)


def test_what_is_no_image_set_says_how_to_make_one():
    from torch.utils.data import TensorDataset

    data = TensorDataset(torch.rand(12, 3, 6, 6), torch.randint(4, (12,)))
    how = r"data is TensorDataset; give bullettrain\.data\.ImageSet\(images uint8 \(n, C, H, W\), labels int64 \(n,\), "
    for call in (clean_accuracy, lambda *arguments: robust_accuracy(*arguments, PGD())):
        with pytest.raises(TypeError, match=how):
            call(shaky_net(), data)


def test_a_network_without_batch_norm_too():
    net = nn.Sequential(nn.Flatten(), nn.Linear(108, 4))
    assert 0 <= robust_accuracy(net, images(12), PGD(2, 1, 0.1, "ce", "linf", 0.1), device=CPU) <= 1


# ------------------------------------------------------------------------------------------------ two networks


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=60))
def test_a_difference_is_as_sure_as_the_images_that_differ_make_it(pairs):
    mine, other = (torch.tensor(side) for side in zip(*pairs, strict=True))
    n, b, c = len(pairs), sum(a and not o for a, o in pairs), sum(o and not a for a, o in pairs)
    assert paired_error(mine, other) == pytest.approx(math.sqrt(((b + c) - (b - c) ** 2 / n) / n**2), abs=1e-12)
    apart = np.array([float(a) - float(o) for a, o in pairs])
    assert paired_error(mine, other) == pytest.approx(apart.std() / math.sqrt(n), abs=1e-12)


def figure(mask, images="a", **more):
    mask = torch.tensor(mask, dtype=torch.bool)
    return {"accuracy": float(mask.double().mean()), "examples": len(mask), "fingerprint": images} | (
        {"survived": pack(mask)} | more
    )


def test_only_outcomes_on_the_same_images_are_paired():
    mine, other = figure([1, 1, 1, 0, 0, 1, 1, 1, 0]), figure([1, 1, 0, 0, 0, 1, 1, 1, 1])
    expected = math.sqrt(2) / 9  # b = c = 1
    paired = Difference(pytest.approx(0, abs=1e-12), pytest.approx(expected), True)
    assert difference([mine], [other]) == paired
    assert difference([mine], [{**other, "precision": "bf16"}]) == paired  # which images they are does not change
    apart = math.sqrt(2) * share_error(6 / 9, 9)
    without = {key: value for key, value in other.items() if key not in ("survived", "fingerprint")}
    for unlike in (without, {**other, "fingerprint": "b"}, {**other, "survived": ""}):
        assert difference([mine], [unlike]) == Difference(0, pytest.approx(apart), False)
    # Several seeds: how often each image survives. A second network with the same outcomes changes nothing.
    assert difference([mine, mine], [other]) == paired
    both = difference([mine, other], [other])
    assert (both.error, both.paired) == (pytest.approx(expected / 2), True)
    assert difference([mine], []) == Difference(pytest.approx(6 / 9), pytest.approx(share_error(6 / 9, 9)), False)


@given(st.integers(1, 30).flatmap(lambda n: st.tuples(*[st.lists(st.booleans(), min_size=n, max_size=n)] * 4)))
def test_a_part_of_the_images_is_compared_on_the_images_that_both_were_evaluated_on(drawn):
    mine, other, first, second = (torch.tensor(mask) for mask in drawn)
    n = len(mine)

    def part(mask, chosen):
        found = figure(mask[chosen].tolist() or [False], images=str(chosen))
        return {**found, "among": {"fingerprint": "a", "examples": n, "chosen": pack(chosen)}}

    if first.any():
        among_all = difference([part(mine, first)], [figure(other.tolist())])
        alone = difference([figure(mine[first].tolist())], [figure(other[first].tolist())])
        assert among_all == alone
    if first.any() and second.any():
        common = first & second
        found = difference([part(mine, first)], [part(other, second)])
        assert found.paired == (2 * int(common.sum()) >= min(int(first.sum()), int(second.sum())))
        if found.paired:
            assert found == difference([figure(mine[common].tolist())], [figure(other[common].tolist())])


def test_corruptions_are_paired_by_what_each_image_keeps():
    def kept(*counts, names=("fog", "snow"), images="a"):
        mean = sum(counts) / (5 * len(names) * len(counts))
        about = {"accuracy": mean, "examples": len(counts), "fingerprint": images, "over": len(names)}
        return {**about, "corruptions": dict.fromkeys(names), "kept": pack_counts(torch.tensor(counts))}

    mine, other = kept(10, 8, 3, 0), kept(10, 6, 4, 0, names=("snow", "fog"))
    apart = np.array([0.0, 0.2, -0.1, 0.0])
    assert difference([mine], [other]) == Difference(pytest.approx(0.025), pytest.approx(apart.std() / 2), True)
    for unlike in (kept(10, 6, 4, 0, names=("fog", "frost")), kept(10, 6, 4, 0, images="b")):
        assert not difference([mine], [unlike]).paired
    before = {key: value for key, value in other.items() if key != "kept"}
    assert not difference([mine], [before]).paired
    assert unpack_counts(pack_counts(torch.tensor([0, 75, 255])), 3).tolist() == [0, 75, 255]
    with pytest.raises(ValueError, match="3 bytes for 4 examples"):
        unpack_counts(pack_counts(torch.tensor([1, 2, 3])), 4)
    with pytest.raises(ValueError, match="256 does not fit"):
        pack_counts(torch.tensor([256]))


def test_no_figures_have_no_error():
    assert difference([], []) == Difference(0, 0, False)


def test_even_batches_are_of_nearly_one_size_and_go_on_where_they_stopped():
    data, seen = images(23, shaky_net()), []

    def survives(x, y, seed):
        seen.append(len(x))
        return (torch.arange(len(x)) + seed) % 3 > 0

    rounds = [Round("one", survives, passes=2, even=True), Round("two", survives, passes=5, even=True)]
    states, ticks, whole = [], [], Survival.fresh(23)

    def tick(count):
        ticks.append(count)
        states.append(copy.deepcopy(whole))

    survive(rounds, data, device=CPU, batch_size=10, tick=tick, state=whole)
    assert seen[:3] == [8, 8, 7]
    assert sum(ticks) == 2 * sum(seen[:3]) + 5 * sum(seen[3:])
    assert [state.left(rounds, 10) for state in states][-1] == 0
    for state in states:
        again = survive(rounds, data, device=CPU, batch_size=10, state=state)
        assert torch.equal(again.alive, whole.alive)
        assert again.shares == whole.shares
