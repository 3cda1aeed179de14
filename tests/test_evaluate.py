"""Evaluating a network: what is kept, what is reused, what is concluded, and what a person sees of it."""

import io
import json
import re
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn

from bullettrain.config import recipe
from bullettrain.data import load, to_unit
from bullettrain.evaluation import evaluate as evaluation
from bullettrain.evaluation.accuracy import EvaluatedModel
from bullettrain.evaluation.evaluate import Plan, evaluate
from bullettrain.evaluation.masking import doubts, masking_signs
from bullettrain.evaluation.progress import EvaluationProgress
from bullettrain.evaluation.results import (
    FILE,
    CorruptionDetails,
    Result,
    Store,
    pack,
    pack_counts,
    unpack,
    unpack_counts,
    worst_cases,
)
from bullettrain.evaluation.specs import PGD, Clean, Corruptions, Defaults, parse_attacks
from bullettrain.loading import LoadedModel, load_model
from bullettrain.processes import StoppedError
from bullettrain.reporting.attack_rows import difference, mean_in_words
from bullettrain.reporting.paper import paper_figure
from bullettrain.reproduction.records import figure_of
from bullettrain.run_folder import RunError
from conftest import assert_same, snapshot

CPU = torch.device("cpu")
AT = Defaults("linf", 0.15)


@pytest.fixture(scope="module")
def digits():
    return load("digits", split="test")


class Eye(EvaluationProgress):
    """Looks on, and stops after so many batches."""

    def __init__(self, stop_after=None, console=None):
        super().__init__(console)
        self.seen, self.batches, self.stop_after = [], 0, stop_after

    def done(self, result, *, kept):
        self.seen.append((result.name, result.role, kept))

    def attacking(self, name, total):
        bar, eye = super().attacking(name, total), self

        class Counting(type(bar)):
            def __call__(self, images):
                eye.batches += 1
                if eye.batches == eye.stop_after:
                    raise StoppedError
                super().__call__(images)

        bar.__class__ = Counting
        return bar


def evaluate_on(model, data, folder, texts, *, eye=None, **plan):
    eye = eye or Eye()
    entry, asked = evaluate(
        model,
        data,
        "digits",
        Plan(parse_attacks(texts, AT), batch_size=100, **plan),
        device=CPU,
        store=Store(folder),
        progress=eye,
    )
    return entry, asked, eye


def test_results_agree_with_the_plain_functions(robust_run, digits, tmp_path):
    from bullettrain.evaluation import clean_accuracy, robust_accuracy

    model = load_model(str(robust_run))
    before = snapshot(model.network)
    entry, asked, _ = evaluate_on(model, digits, tmp_path, ["pgd5x2"], seed=3)
    model.network.requires_grad_(True)  # held for good while it is evaluated, and only that
    assert_same(before, snapshot(model.network))
    clean, attacked = asked
    assert clean.accuracy == clean_accuracy(model.network, digits, device=CPU)
    assert (clean.correct, clean.examples) == (round(clean.accuracy * 359), 359)
    assert clean.interval[0] < clean.accuracy < clean.interval[1]
    attack = PGD(5, 2, 0.075, "ce", "linf", 0.15)
    again = robust_accuracy(model.network, digits, attack, device=CPU, batch_size=100, seed=3)
    assert attacked.accuracy == again
    assert attacked.accuracy < clean.accuracy - 0.05
    assert not (attacked.mask & ~clean.mask).any()
    assert [name for name, _ in attacked.rounds] == ["clean", "restart 1", "restart 2"]
    shares = [share for _, share in attacked.rounds]
    assert shares == sorted(shares, reverse=True)
    assert shares[-1] == attacked.accuracy
    assert len(attacked.per_class) == 10
    assert entry.classes == [str(d) for d in range(10)]


def test_a_terminal_shows_a_bar_that_ends_full(robust_run, digits, tmp_path, monkeypatch):
    from rich.console import Console
    from rich.progress import Progress

    shown, updates, original = [], [], Progress.update

    def update(self, bar, **values):
        if updates[-1:] != [(bar, values)]:  # after a round nothing has moved
            shown.append((values["completed"], values["total"]))
        updates.append((bar, values))
        original(self, bar, **values)

    monkeypatch.setattr(Progress, "update", update)
    console = Console(force_terminal=True, width=80, file=io.StringIO())
    with EvaluationProgress(console) as progress:
        plan = Plan(parse_attacks(["pgd2x2", "pgd3"], AT), batch_size=100, curves=AT, curve_images=40)
        evaluate(
            load_model(str(robust_run)), digits, "digits", plan, device=CPU, store=Store(tmp_path), progress=progress
        )
    assert shown[3] == (359, 359)  # the clean look
    ends = [index for index in range(4, len(shown)) if shown[index][0] == shown[index][1]]
    assert all(done <= total for done, total in shown)
    # PGD twice; of the curves one point is in both, and one more is without bounds.
    assert len(ends) == 2 + len(evaluation.CURVE_STEPS) + len(evaluation.CURVE_EPS)
    text = console.file.getvalue()
    assert "PGD-2×2  L∞ 0.15" in text
    assert "curve of" not in text  # the bar is enough for those


def test_what_is_there_is_not_computed_again(robust_run, digits, tmp_path):
    model = load_model(str(robust_run))
    _, first, _ = evaluate_on(model, digits, tmp_path, ["pgd3"])
    _, second, eye = evaluate_on(model, digits, tmp_path, ["pgd3", "pgd4"])
    assert eye.seen == [("clean", "attack", True), ("pgd3", "attack", True), ("pgd4", "attack", False)]
    assert second[:2] == first
    assert {result.name for result in Store(tmp_path).entries[0].results} == {"clean", "pgd3", "pgd4"}
    _, third, eye = evaluate_on(model, digits, tmp_path, ["pgd3"], overwrite=True)
    assert eye.seen[1] == ("pgd3", "attack", False)
    assert third[1].survived == first[1].survived


CHANGES = ["weights", "images", "seed", "batch_size", "precision", "eps", "labels"]


@pytest.mark.parametrize("change", CHANGES)
def test_nothing_stale_is_reused(robust_run, digits, tmp_path, change):
    model = load_model(str(robust_run))
    images = digits.subset(torch.arange(60))
    evaluate_on(model, images, tmp_path, ["pgd2"])
    texts, plan = ["pgd2"], {}
    if change == "weights":
        model.network.conv1.bias[0] += 1e-3
    elif change == "images":
        images = replace(images, images=images.images.clone())
        images.images[30, 0, 0, 0] += 1
    elif change == "labels":
        images = replace(images, labels=images.labels.roll(1))
    elif change == "eps":
        texts = ["pgd2:eps=0.1"]
    else:
        plan = {"seed": {"seed": 1}, "batch_size": {"batch_size": 30}, "precision": {"precisions": ("bf16",)}}[change]
    arguments = {"batch_size": 100, **plan}
    eye = Eye()
    plan = Plan(parse_attacks(texts, AT), **arguments)
    evaluate(model, images, "digits", plan, device=CPU, store=Store(tmp_path), progress=eye)
    assert ("pgd2", "attack", False) in eye.seen
    kept = [result for result in Store(tmp_path).entries[0].results if result.name == "pgd2"]
    # Of other weights or images nothing is kept; of other circumstances the newest; other attacks stand beside.
    assert len(kept) == (2 if change in ("eps", "precision") else 1)


@pytest.mark.parametrize("stop", [2, 4, 6, 8])
def test_an_interrupted_evaluation_goes_on(robust_run, digits, tmp_path, stop):
    model = load_model(str(robust_run))
    _, whole, counted = evaluate_on(model, digits, tmp_path / "whole", ["pgd3x2", "pgd4"])
    with pytest.raises(StoppedError):
        evaluate_on(model, digits, tmp_path / "cut", ["pgd3x2", "pgd4"], eye=Eye(stop_after=stop))
    (kept,) = json.loads((tmp_path / "cut" / FILE).read_text())["unfinished"].values()
    assert kept["batches"] + 4 * len(kept["shares"]) > 0
    if stop > 4:  # something else in between does not lose what was done
        evaluate_on(model, digits, tmp_path / "cut", ["pgd2"])
    _, rest, eye = evaluate_on(model, digits, tmp_path / "cut", ["pgd3x2", "pgd4"])
    assert [(r.key, r.survived, r.rounds) for r in rest] == [(r.key, r.survived, r.rounds) for r in whole]
    assert eye.batches == counted.batches - stop  # not a batch was made twice
    assert "unfinished" not in json.loads((tmp_path / "cut" / FILE).read_text())


@pytest.mark.parametrize("stop", [17, 45])
def test_an_interrupted_overwrite_goes_on_without_results_from_before(robust_run, digits, tmp_path, stop):
    """In a curve, and in the second precision."""
    model, texts = load_model(str(robust_run)), ["pgd3x2", "pgd4"]
    plan = {"precisions": ("float32", "bf16"), "curves": AT, "curve_images": 50}
    entry, whole, counted = evaluate_on(model, digits, tmp_path, texts, **plan)
    was = {(result.name, result.role, result.precision, result.survived) for result in entry.results}
    evaluate_on(model, digits, tmp_path, ["pgd2"])
    with pytest.raises(StoppedError):
        evaluate_on(model, digits, tmp_path, texts, eye=(cut := Eye(stop_after=stop)), overwrite=True, **plan)
    assert not any(kept for *_, kept in cut.seen)
    (left,) = Store(tmp_path).entries
    assert "pgd2" in {result.name for result in left.results}  # was not asked for
    assert len(left.results) == 1 + len(cut.seen)
    assert {name for case in left.worst for name in case["attacks"]} <= {result.name for result in left.results}
    entry, rest, eye = evaluate_on(model, digits, tmp_path, texts, **plan)
    assert [kept for *_, kept in eye.seen] == [index < len(cut.seen) for index in range(len(eye.seen))]
    assert cut.batches + eye.batches == counted.batches  # not a batch was made twice, and none was left out
    now = {(result.name, result.role, result.precision, result.survived) for result in entry.results}
    assert was == {result for result in now if result[0] != "pgd2" or result[1] == "curve"}
    assert [(r.key, r.survived, r.rounds) for r in rest] == [(r.key, r.survived, r.rounds) for r in whole]


def test_an_unfinished_attack_of_other_weights_is_not_gone_on_with(robust_run, digits, tmp_path):
    model = load_model(str(robust_run))
    with pytest.raises(StoppedError):
        evaluate_on(model, digits, tmp_path, ["pgd3x2"], eye=Eye(stop_after=6))
    model.network.conv1.bias[0] += 1e-3
    _, found, _ = evaluate_on(model, digits, tmp_path, ["pgd3x2"])
    _, fresh, _ = evaluate_on(model, digits, tmp_path / "fresh", ["pgd3x2"])
    assert found[1].survived == fresh[1].survived


def test_parts_of_a_dataset_stand_beside_the_whole(robust_run, digits, tmp_path):
    model = load_model(str(robust_run))
    evaluate_on(model, digits, tmp_path, ["pgd2"])
    evaluate_on(model, digits.subset(torch.arange(50)), tmp_path, ["pgd2"])
    assert [entry.examples for entry in Store(tmp_path).entries] == [359, 50]
    # A run that was renamed is still the same.
    evaluate_on(replace(model, name="renamed"), digits, tmp_path, ["pgd2"])
    assert [(entry.model, entry.examples) for entry in Store(tmp_path).entries] == [("renamed", 359), ("robust", 50)]
    model.network.conv1.bias[0] += 1e-3
    evaluate_on(model, digits, tmp_path, ["pgd2"])  # maybe another run's, of the same name
    three = [("renamed", 359), ("robust", 50), ("robust", 359)]
    assert [(entry.model, entry.examples) for entry in Store(tmp_path).entries] == three
    (tmp_path / "config.yaml").touch()  # in a run's own folder nothing is true any more with other weights
    model.network.conv1.bias[0] += 1e-3
    evaluate_on(model, digits, tmp_path, ["pgd2"])
    assert [(entry.model, entry.examples) for entry in Store(tmp_path).entries] == [("renamed", 359), ("robust", 359)]


def test_two_evaluations_in_one_folder_would_overwrite_each_other(tmp_path):
    with Store(tmp_path / "new").locked():
        assert (tmp_path / "new").is_dir()
        with pytest.raises(RunError, match="another evaluation is running there"), Store(tmp_path / "new").locked():
            pass
    assert not (tmp_path / "new").exists()  # nothing was written


def test_how_far_it_is_is_written_while_it_runs(robust_run, digits, tmp_path, monkeypatch):
    """A kill leaves no time to write, so it is written before."""
    from rich.console import Console

    monkeypatch.setattr("bullettrain.evaluation.results.SAVE_SECONDS", -1.0)
    written, original = [], Store.save

    def save(store):
        written.append(next((state.batches for state in store.unfinished.values()), None))
        original(store)

    monkeypatch.setattr(Store, "save", save)
    eye = Eye(stop_after=8, console=Console(file=io.StringIO(), width=100))
    with pytest.raises(StoppedError):
        evaluate_on(load_model(str(robust_run)), digits, tmp_path, ["pgd3x2"], eye=eye)
    said = eye.console.file.getvalue().splitlines()[-1]  # where there is no bar
    assert re.fullmatch(r"  in restart 1  \d+\.\d\d %  \d+\.\d s, about \d+\.\d s left", said)
    clean, attack = written[: written.index(None)], written[written.index(None) + 1 :]
    assert clean == [1, 2, 3, 4, 0]  # after each batch, and after the round
    assert attack == [1, 2, 3, 3]  # the last again, when it was stopped


def test_a_file_that_is_no_evaluation_is_refused(robust_run, digits, tmp_path):
    evaluate_on(load_model(str(robust_run)), digits, tmp_path / "whole", ["pgd2"])
    half = re.sub(r'"restarts": 1,\s*', "", (tmp_path / "whole" / FILE).read_text())
    for text in ("{", "[]", '{"format": 9}', '{"format": 1, "evaluations": [{}]}', half):
        (tmp_path / FILE).write_text(text)
        with pytest.raises(RunError, match="choose another --out"):
            Store(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="is a file"):
        Store(tmp_path / "file")


def test_the_worst_case_is_over_attacks_on_one_threat():
    def result(name, eps, bits, precision="float32"):
        mask = torch.tensor(bits, dtype=torch.bool)
        attack = {"attack": "pgd", "norm": "linf", "eps": eps}
        share = float(mask.float().mean())
        return Result(
            name, attack, "attack", precision, name, 4, int(mask.sum()), share, (0, 1), 1, survived=pack(mask)
        )

    clean = Result("clean", {"attack": "clean"}, "attack", "float32", "c", 4, 4, 1.0, (0, 1), 1)
    found = worst_cases(
        [clean, result("a", 0.1, [1, 1, 0, 0]), result("b", 0.1, [0, 1, 1, 0]), result("c", 0.2, [0, 0, 0, 0])]
    )
    assert [(case["eps"], case["attacks"], case["correct"]) for case in found] == [(0.1, ["a", "b"], 1)]
    assert found[0]["interval"][0] < 0.25 < found[0]["interval"][1]


# ------------------------------------------------------------------------------------------------ curves, masking


def test_curves_fall_and_show_no_masking_for_an_honest_network(robust_run, digits, tmp_path):
    model = load_model(str(robust_run))
    entry, _, _ = evaluate_on(model, digits, tmp_path, ["clean"], curves=AT, curve_images=150)
    curve = [result for result in entry.results if result.role == "curve"]
    assert {result.examples for result in curve} == {150}
    by_eps = sorted((r.attack["eps"], r.accuracy) for r in curve if r.attack.get("steps") == 20)
    assert len(by_eps) == 9
    assert [accuracy for _, accuracy in by_eps] == sorted((a for _, a in by_eps), reverse=True)
    assert by_eps[-1] == (1.0, 0.0)  # without bounds nothing is left
    assert sorted(r.attack["steps"] for r in curve if r.attack.get("eps") == 0.15) == [1, 2, 5, 10, 20, 50, 100]
    assert entry.warnings == []
    # Another ε: the points of the first curve have no place beside it.
    entry, _, _ = evaluate_on(model, digits, tmp_path, ["clean"], curves=Defaults("linf", 0.1), curve_images=50)
    assert {result.examples for result in entry.results if result.role == "curve"} == {50}


def test_a_point_of_a_curve_is_the_attack_of_that_name(robust_run, digits, tmp_path):
    """Two accuracies under PGD-20 at one ε would make a reader wonder which is right."""
    few = digits.subset(torch.arange(60))
    entry, asked, eye = evaluate_on(load_model(str(robust_run)), few, tmp_path, ["pgd5", "pgd20", "pgd100"], curves=AT)
    at = {r.name: r for r in entry.results if r.role == "curve" and r.attack.get("eps", 0.15) == 0.15}
    for result in asked:  # clean too
        assert (at[result.name].attack, at[result.name].survived) == (result.attack, result.survived)
        assert (result.name, "curve", True) in eye.seen  # and is not computed again


class Masked(nn.Module):
    """A network whose logits have no useful gradient: the image is rounded before it is looked at."""

    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, x):
        return self.network(x + ((x * 4).round() / 4 - x).detach() - (x - x.detach()))


def test_a_network_without_gradients_is_noticed(robust_run, digits, tmp_path):
    model = LoadedModel("masked", "masked", network=Masked(load_model(str(robust_run)).network))
    entry, _, _ = evaluate_on(model, digits, tmp_path, ["clean"], curves=AT, curve_images=150)
    assert any("without bounds leaves" in warning for warning in entry.warnings)
    *signs, note = entry.warnings
    assert all("masked" in sign for sign in signs)
    assert note.startswith("pgd20: all images that were looked at have an input gradient of exactly 0")


class Scaled(nn.Module):
    """A network whose logits are so large that the softmax saturates."""

    def __init__(self, network, scale):
        super().__init__()
        self.network, self.scale = network, scale

    def forward(self, x):
        return self.scale * self.network(x)


NO_GRADIENT = (
    "images that were looked at have an input gradient of exactly 0: PGD cannot attack these, "
    "so its accuracy is too high; use AutoAttack, or logits of a normal scale"
)


@pytest.mark.parametrize("text", ["pgd3", "pgd3:loss=kl", "pgd3:norm=l2,eps=1"])
def test_logits_that_saturate_the_softmax_are_noticed(robust_run, digits, tmp_path, text):
    network = load_model(str(robust_run)).network
    for scale in (1, 1e4):
        model = LoadedModel("scaled", "scaled", network=Scaled(network, scale))
        entry, asked, _ = evaluate_on(model, digits, tmp_path / str(scale), [text], precisions=("float32", "bf16"))
        assert len(entry.warnings) == (0 if scale == 1 else 1)
    assert re.match(rf"{asked[1].name}: at least \d0 % of the {NO_GRADIENT}$", entry.warnings[0])
    assert all(len(result.notes) == (result.name != "clean") for result in asked)


def test_attacks_share_a_warning(robust_run, digits, tmp_path):
    model = LoadedModel("scaled", "scaled", network=Scaled(load_model(str(robust_run)).network, 1e6))
    few = digits.subset(torch.arange(60))
    entry, _, _ = evaluate_on(model, few, tmp_path, ["pgd5", "pgd3"], curves=AT, curve_images=60)
    (warning,) = (text for text in entry.warnings if "input gradient" in text)
    assert warning.startswith("pgd5, pgd3: at least ")
    again, _, _ = evaluate_on(model, few, tmp_path, ["pgd10"])  # a point of the curve
    assert any(text.startswith("pgd5, pgd3, pgd10: at least ") for text in again.warnings)


def test_probabilities_are_noticed(robust_run, digits, tmp_path):
    network = nn.Sequential(load_model(str(robust_run)).network, nn.Softmax(dim=1))
    model = LoadedModel("softmax", "softmax", network=network)
    for precision in ("float32", "bf16"):
        entry, _, _ = evaluate_on(model, digits, tmp_path / precision, ["pgd3"], precisions=(precision,))
        assert entry.warnings == ["pgd3: the network returns probabilities, not logits; leave out its last softmax"]


@pytest.mark.parametrize(
    ("zero", "said"), [(9, []), (10, ["at least 10 % of the"]), (59, ["at least 50 % of the"]), (100, ["all"])]
)
def test_a_tenth_of_the_images_without_gradient_is_too_much(zero, said):
    x, y = torch.rand(100, 1, 2, 2), torch.zeros(100, dtype=torch.int64)
    x[:, 0, 0, 0] = torch.where(torch.arange(100) < zero, 0.9, 0.1)

    def forward(x):
        return torch.where(x[:, 0, 0, :1] > 0.5, x.detach().flatten(1), x.flatten(1))

    model = nn.Module()
    model.forward = forward
    assert doubts(model, x, y, PGD(), 0) == [f"{share} {NO_GRADIENT}" for share in said]


def test_a_look_changes_nothing(robust_run, digits):
    class Random(nn.Module):
        def forward(self, x):
            return x + 0.01 * torch.randn_like(x)

    network = nn.Sequential(Random(), load_model(str(robust_run)).network, nn.BatchNorm1d(10)).train()
    x, y, before, state = to_unit(digits.images[:50]), digits.labels[:50], snapshot(network), torch.get_rng_state()
    for model in (network, EvaluatedModel(network, dtype=torch.bfloat16)):
        assert doubts(model, x, y, PGD(), 0) == []
        assert_same(before, snapshot(network))
        assert torch.equal(torch.get_rng_state(), state)


def pgd_result(steps, eps, alive, *, restarts=1, n=1000, loss="ce"):
    mask = torch.arange(n) < alive
    attack = {"attack": "pgd", "steps": steps, "restarts": restarts, "loss": loss, "norm": "linf", "eps": eps}
    attack["step"] = eps
    share = alive / n
    return Result("pgd", attack, "curve", "float32", "k", n, alive, share, (0, 1), 1, survived=pack(mask))


def test_each_sign_of_masking_has_its_sentence():
    def said(*results):
        return masking_signs(results, dimensions=64)

    assert said(pgd_result(20, 0.1, 500), pgd_result(100, 0.1, 480), pgd_result(20, 0.2, 300)) == []
    (text,) = said(pgd_result(10, 0.1, 400), pgd_result(20, 0.1, 450), pgd_result(100, 0.1, 470))
    assert text.startswith("more steps break less: 40.0 % after 10 steps, but 47.0 % after 100 steps at ε = 0.1")
    (text,) = said(pgd_result(1, 0.1, 300), pgd_result(20, 0.1, 450))
    assert text.startswith("one step breaks more than many: 30.0 % after 1 step, but 45.0 % after 20 steps")
    (text,) = said(pgd_result(20, 0.1, 300), pgd_result(20, 0.2, 350))
    assert text.startswith("a larger ε breaks less: 30.0 % at ε = 0.1, but 35.0 % at ε = 0.2 with 20 steps")
    (text,) = said(pgd_result(20, 1.0, 30))
    assert text.startswith("an attack without bounds leaves 3.0 % after 20 steps, where it should leave 0 %")
    assert said(pgd_result(20, 1.0, 10)) == []  # a few images can be hard to reach
    assert said(pgd_result(1, 1.0, 700)) == []  # one step is not enough to ask that of
    # Fewer steps with more restarts may well be stronger; another loss is another attack.
    assert said(pgd_result(10, 0.1, 400, restarts=10), pgd_result(20, 0.1, 450)) == []
    assert said(pgd_result(10, 0.1, 400, loss="margin"), pgd_result(20, 0.1, 450)) == []
    # A rise within chance is none.
    assert said(pgd_result(10, 0.1, 400), pgd_result(20, 0.1, 404)) == []


def test_an_attack_that_cannot_reach_the_edge_is_noticed(robust_run, digits, tmp_path):
    model = load_model(str(robust_run))
    entry, _, _ = evaluate_on(model, digits, tmp_path, ["pgd5:step=0.02", "pgd3:step=0.05"])
    assert entry.warnings == [
        "pgd5 moves by 5 × 0.02 at most, less than ε = 0.15: it is weaker than it sounds; give it a larger step"
    ]


def test_a_search_without_gradients_that_finds_more_is_noticed():
    rounds = [("clean", 0.8), ("apgd-ce", 0.52), ("apgd-t", 0.5), ("fab-t", 0.5), ("square", 0.45)]
    attack = {"attack": "autoattack", "norm": "linf", "eps": 8 / 255}
    result = Result("autoattack", attack, "attack", "float32", "k", 100, 45, 0.45, (0, 1), 1, rounds=rounds)
    (text,) = masking_signs([result], dimensions=64)
    assert text.startswith("Square, which uses no gradients, breaks 5.0 % more")
    quiet = replace(result, rounds=[*rounds[:4], ("square", 0.495)])
    assert masking_signs([quiet], dimensions=64) == []


# ------------------------------------------------------------------------------------------ precision, corruptions


def test_both_precisions_and_their_difference(robust_run, digits, tmp_path):
    model = load_model(str(robust_run))
    _, asked, _ = evaluate_on(model, digits, tmp_path, ["pgd3"], precisions=("float32", "bf16"))
    assert [(result.name, result.precision) for result in asked] == [
        (name, precision) for precision in ("float32", "bf16") for name in ("clean", "pgd3")
    ]
    text = difference(asked)
    assert text.startswith("bf16 against float32: Clean ")
    assert "points" in text
    assert "of 359 images)" in text
    assert difference(asked[:2]) == ""
    assert difference(asked[2:], asked[:2]) == text  # float32 from before
    coarse = [replace(result, precision="tf32") for result in asked[:2]]
    assert difference([*asked, *coarse]) == f"{text}; tf32 against float32: " + ", ".join(
        f"{name} ±0.00 points (0 of 359 images)" for name in ("Clean", "PGD-3")
    )


@pytest.fixture
def corruptions(monkeypatch, tmp_path):
    calls = []
    folder = tmp_path / "digits-c"
    folder.mkdir()
    (folder / "fog.npy").write_bytes(b"x")

    def corruption_accuracy(model, folder, *, classes, device, batch_size, size, baseline, tick):
        calls.append((folder.name, classes, batch_size, model.training))
        tick(10)
        found, n = {"fog": [0.9, 0.8, 0.7, 0.6, 0.5], "snow": [0.5] * 5}, size or 359
        return CorruptionDetails(found, ["frost"], 14, n, pack_counts(torch.arange(n) % 71), "theirs", 0.25)

    monkeypatch.setattr("bullettrain.evaluation.corruptions.corruption_accuracy", corruption_accuracy)
    return folder, calls


def test_corruptions_say_what_is_missing(robust_run, digits, tmp_path, corruptions):
    folder, calls = corruptions
    model = load_model(str(robust_run))
    plan = {"corruptions": folder, "mce_baseline": {"fog": [0.8]}}
    entry, asked, _ = evaluate_on(model, digits, tmp_path, ["corruptions"], **plan)
    result = asked[-1]
    assert calls == [("digits-c", 10, 100, False)]
    assert (result.accuracy, result.examples) == (pytest.approx(0.6), 359)
    assert result.interval[0] < 0.6 < result.interval[1]
    assert mean_in_words(result) == ("mean over 14 of 15, without frost: 60.00 %; mean corruption error 25.00 %")
    assert entry.worst == []
    figure = figure_of(entry, result)
    assert (figure["over"], figure["corruptions"].keys()) == (14, {"fog", "snow"})
    assert figure["fingerprint"] == "theirs"
    assert unpack_counts(figure["kept"], 359).tolist() == [i % 71 for i in range(359)]
    evaluate_on(model, digits, tmp_path, ["corruptions"], **plan)
    assert len(calls) == 1  # the folder is as it was
    (folder / "snow.npy").write_bytes(b"y")
    evaluate_on(model, digits, tmp_path, ["corruptions"], **plan)
    assert len(calls) == 2
    _, asked, _ = evaluate_on(model, digits, tmp_path, ["corruptions"], **plan, images=40)  # some images are not all
    assert (asked[-1].examples, len(calls)) == (40, 3)


def test_autoattack_that_is_not_installed_is_named_before_anything_runs(robust_run, digits, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyautoattack", None)
    monkeypatch.setitem(sys.modules, "autoattack", None)
    with pytest.raises(ImportError, match=r'AutoAttack needs pyautoattack: .* pip install "\.\[eval\]"'):
        evaluate_on(load_model(str(robust_run)), digits, tmp_path, ["autoattack"])
    assert not (tmp_path / FILE).exists()


# ------------------------------------------------------------------------------------------------- the paper, words


def test_the_papers_figures_stand_beside_the_papers_recipes_only():
    trades = recipe("cifar10-trades")
    assert paper_figure(trades, "pgd20", 0.031, "cifar10") == pytest.approx(0.5635)
    assert paper_figure(trades.baseline(), "pgd20", 0.031, "cifar10") == pytest.approx(0.5661)
    assert paper_figure(trades.with_settings(["method.robust=0"]), "clean", None, "cifar10") == pytest.approx(0.875)
    assert paper_figure(trades.with_settings(["seed=3", "compile=true"]), "clean", None, "cifar10") is not None
    assert paper_figure(recipe("cifar10-mart"), "pgd20", 0.031, "cifar10") == pytest.approx(0.5874)
    assert paper_figure(recipe("mnist-pgd").baseline(), "pgd100x20", 0.3, "mnist") == pytest.approx(0.906)
    assert paper_figure(recipe("cifar100-augmix"), "corruptions", None, "cifar100") == pytest.approx(0.636)
    for other in (
        (trades, "pgd20", 8 / 255, "cifar10"),
        (trades, "autoattack", 0.031, "cifar10"),
        (trades, "pgd20", 0.031, "cifar100"),
        (trades.with_settings(["epochs=10"]), "pgd20", 0.031, "cifar10"),
        (trades.with_settings(["network.name=wrn-28-10"]), "pgd20", 0.031, "cifar10"),
        (trades.with_settings(["method.robust=5"]), "pgd20", 0.031, "cifar10"),
        (recipe("cifar10-trades-short"), "pgd20", 0.031, "cifar10"),
        (None, "pgd20", 0.031, "cifar10"),
    ):
        assert paper_figure(*other) is None


def test_only_what_exists_is_attacked():
    assert [type(a) for a in parse_attacks(["clean", "corruptions", "pgd20"])] == [Clean, Corruptions, PGD]
    assert evaluation.CURVE_STEPS[0] == 1


def test_a_part_of_the_images_says_which_of_them_it_is(robust_run, digits, tmp_path):
    model = load_model(str(robust_run))
    _, whole, _ = evaluate_on(model, digits, tmp_path, ["clean"])
    entry, asked, _ = evaluate_on(model, digits, tmp_path, ["clean"], images=40)
    chosen = unpack(entry.among["chosen"], len(digits))
    assert asked[0].examples == entry.examples == int(chosen.sum()) == 40
    assert asked[0].mask.tolist() == whole[0].mask[chosen].tolist()
    kept = Store(tmp_path).entries
    assert [(e.examples, e.among.get("fingerprint")) for e in kept] == [(len(digits), None), (40, kept[0].fingerprint)]
    every, _, _ = evaluate_on(model, digits, tmp_path / "every", ["clean"], images=len(digits))
    assert not every.among
