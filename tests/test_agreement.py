"""Other people's tools give the same robust accuracy, where they are installed; results/agreement has recorded ones."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch

import bullettrain as bt
from bullettrain.data import ImageSet, load
from bullettrain.evaluation.comparison import difference
from bullettrain.evaluation.results import Entry, Result
from bullettrain.reproduction.records import figure_of

ROOT = Path(__file__).resolve().parent.parent
POINTS = 0.003


@pytest.fixture(scope="module")
def results():
    """The folder of what is recorded."""
    if not (ROOT / "results").is_dir():
        pytest.skip("results/ is not here")
    return ROOT / "results"


@pytest.fixture(scope="module")
def page(results):
    """What is said of strong attacks."""
    return (results / "strong-attacks" / "README.md").read_text().replace("\n", " ")


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


def test_recorded_comparisons_agree(results):
    files = sorted((results / "agreement").glob("pgd-*.json"))
    assert files
    for file in files:
        result = json.loads(file.read_text())
        assert {"bullettrain", "torchattacks", "foolbox"} <= set(result["versions"])
        assert {row["norm"] for row in result["rows"]} == {"linf", "l2"}
        for row in result["rows"]:
            assert row["examples"] >= 1000
            ours = row["accuracy"]["bullettrain"]
            assert all(abs(accuracy - ours) <= POINTS for accuracy in row["accuracy"].values()), file


def attacks_of(file):
    """What each attack left of a network, by its name; in float32 where there are two."""
    (entry,) = json.loads(file.read_text())["evaluations"]
    exact_last = sorted(entry["results"], key=lambda result: result["precision"] == "float32")
    return {result["name"]: (result, figure_of(Entry(**entry), Result(**result))) for result in exact_last}


def test_recorded_strong_attacks_are_those_that_the_page_shows(results, page):
    folder = results / "strong-attacks"
    files = sorted(folder.rglob("*.json"))
    assert files
    for file in files:
        found = {name: result for name, (result, _) in attacks_of(file).items()}
        assert {"clean", "pgd20", "autoattack"} <= found.keys()
        assert all(result["examples"] == 10_000 for result in found.values())
        left = found["autoattack"]["accuracy"]
        assert left <= min(result["accuracy"] for result in found.values())
        parts = [share for _, share in found["autoattack"]["rounds"][1:]]
        assert len(parts) == 4
        assert parts[-1] == left
        cells = [found["clean"]["accuracy"], found["pgd20"]["accuracy"], *parts]
        last = f"{100 * found['pgd100x10']['accuracy']:.2f}" if "pgd100x10" in found else "–"
        where = file.relative_to(folder).as_posix()
        assert f"({where}) | " + " | ".join(f"{100 * v:.2f}" for v in cells) + f" | {last} |" in page


def gap(folder, attack):
    """How much less BulletTrain keeps than its baseline, over the same images."""
    base, mined = (attacks_of(folder / f"{name}-k1.json")[attack][1] for name in ("baseline", "bullettrain"))
    apart = difference([base], [mined])
    assert apart.paired
    return f"{100 * apart.value:.2f} ± {100 * apart.error:.2f}"


def test_recorded_gaps_are_those_that_the_page_shows(results, page):
    folder = results / "strong-attacks"
    pgd20, autoattack = (gap(folder, attack) for attack in ("pgd20", "autoattack"))
    assert f"{pgd20} points below the baseline under PGD-20 and {autoattack} under AutoAttack" in page
    pgd20, pgd100, autoattack = (gap(folder / "earlier", attack) for attack in ("pgd20", "pgd100x10", "autoattack"))
    assert f"{pgd20} points below under PGD-20, {pgd100} under PGD-100×10 and {autoattack} under AutoAttack" in page
