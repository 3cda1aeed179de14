"""Other people's tools give the same robust accuracy, where they are installed; results/agreement has recorded ones."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch

import bullettrain as bt
from bullettrain.data import ImageSet, load
from bullettrain.evaluation.results import Entry, Result, difference_error
from bullettrain.reproduction.records import figure_of

ROOT = Path(__file__).resolve().parent.parent
POINTS = 0.003


@pytest.fixture(scope="module")
def agreement():
    path = ROOT / "benchmarks" / "agreement.py"
    if not path.is_file():
        pytest.skip("benchmarks/ is not here")
    spec = importlib.util.spec_from_file_location("agreement", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def digits():
    """All 1,797 of them: images that the network has seen will do, since only tools are compared."""
    train, test = (load("digits", split=split) for split in ("train", "test"))
    return ImageSet(torch.cat([train.images, test.images]), torch.cat([train.labels, test.labels]), train.classes)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("norm", "eps"), [("linf", 0.15), ("l2", 0.8)])
@pytest.mark.parametrize("peer", ["torchattacks", "foolbox"])
def test_pgd_agrees(agreement, robust_run, digits, peer, norm, eps):
    pytest.importorskip(peer, reason=f"{peer} is not installed", exc_type=ImportError)
    # From the images themselves: then the noise, of which each tool draws its own, is no excuse.
    settings = {"norm": norm, "eps": eps, "steps": 20, "step": eps / 10, "random": False}
    accuracy = agreement.compare(bt.load(robust_run), digits, **settings, peers=[peer])["accuracy"]
    assert 0.2 < accuracy["bullettrain"] < 0.8  # the attack does something, and not everything
    assert abs(accuracy["bullettrain"] - accuracy[peer]) <= POINTS


def test_recorded_comparisons_agree():
    files = sorted((ROOT / "results" / "agreement").glob("pgd-*.json"))
    if not files:
        pytest.skip("results/ is not here")
    for file in files:
        result = json.loads(file.read_text())
        assert {"bullettrain", "torchattacks", "foolbox"} <= set(result["versions"])
        assert {row["norm"] for row in result["rows"]} == {"linf", "l2"}
        for row in result["rows"]:
            assert row["examples"] >= 1000
            ours = row["accuracy"]["bullettrain"]
            assert all(abs(accuracy - ours) <= POINTS for accuracy in row["accuracy"].values()), file


def test_recorded_strong_attacks_are_those_that_the_page_shows():
    files = sorted((ROOT / "results" / "strong-attacks").glob("*.json"))
    if not files:
        pytest.skip("results/ is not here")
    page = (ROOT / "results" / "README.md").read_text().replace("\n", " ")
    kept = {}
    for file in files:
        (entry,) = json.loads(file.read_text())["evaluations"]
        found = {result["name"]: result for result in entry["results"]}
        assert {"clean", "pgd20", "pgd100x10", "autoattack"} <= found.keys()
        assert all(result["examples"] == 10_000 for result in found.values())
        left = found["autoattack"]["accuracy"]
        assert left <= min(found["pgd20"]["accuracy"], found["pgd100x10"]["accuracy"])
        parts = [share for _, share in found["autoattack"]["rounds"][1:]]
        assert parts[-1] == left
        cells = [found["clean"]["accuracy"], found["pgd20"]["accuracy"], *parts, found["pgd100x10"]["accuracy"]]
        kept[file.stem] = {name: figure_of(Entry(**entry), Result(**result)) for name, result in found.items()}
        assert f"({file.parent.name}/{file.name}) | " + " | ".join(f"{100 * v:.2f}" for v in cells) + " |" in page
    said = []
    for attack in ("pgd20", "pgd100x10", "autoattack"):
        base, mined = kept["baseline-k1"][attack], kept["bullettrain-k1"][attack]
        error, paired = difference_error([mined], [base])
        assert paired
        said.append(f"{100 * (base['accuracy'] - mined['accuracy']):.2f} ± {100 * error:.2f}")
    first, second, third = said
    assert f"{first} points below the baseline under PGD-20, {second} under PGD-100×10 and {third} under" in page
