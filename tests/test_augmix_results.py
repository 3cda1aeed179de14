"""What results/ and the documentation say of AugMix in large batches is what was recorded of its trainings."""

import json
import statistics
from pathlib import Path

import pytest

from bullettrain.evaluation.comparison import difference
from bullettrain.evaluation.results import Store
from bullettrain.reproduction.records import figure_of
from bullettrain.run_folder import RunFolder

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results"
PAGE = RESULTS / "augmix" / "README.md"
HEAD = "| data, batch | 100 epochs |"
TEN, HUNDRED = RESULTS / "augmix" / "cifar10-batch-512", RESULTS / "augmix" / "cifar100-batch-500"
TEN_PLAIN = [TEN / "augmix", TEN / "augmix-again"]
TEN_MINED = [TEN / f"bullettrain{name}" for name in ("", "-bucket-16", "-again", "-alone")]
HUNDRED_PLAIN = [HUNDRED / "augmix", RESULTS / "augmix" / "cifar100-batch-512" / "augmix"]
HUNDRED_MINED = [HUNDRED / f"bullettrain{name}" for name in ("", "-gamma-0.4", "-gamma-0.3")]

pytestmark = pytest.mark.skipif(not RESULTS.is_dir(), reason="results/ is not here")


def kept(run, weights="last"):
    """The figure of a run's weights under corruptions."""
    entry = next(entry for entry in Store(run).entries if entry.weights == weights)
    return figure_of(entry, next(result for result in entry.results if result.corruptions))


def by_corruption(run):
    """Accuracies of a run's last weights, by corruption and severity."""
    entry = next(entry for entry in Store(run).entries if entry.weights == "last")
    return next(result for result in entry.results if result.corruptions).corruptions["accuracy"]


def apart(run, plain, weights="last"):
    """How far a run is above another, as the table writes it."""
    found = difference([kept(run, weights)], [kept(plain, weights)])
    assert found.paired
    return f"{100 * found.value:.2f} ± {100 * found.error:.2f}".replace("-", "−")


def rows():
    """The table's rows: where the run lies, and what is said of it."""
    lines = PAGE.read_text().split(HEAD)[1].split("\n\n")[0].splitlines()[2:]
    for line in lines:
        _, name, *said = (cell.strip() for cell in line.strip("|").split("|"))
        yield PAGE.parent / name.split("](")[1].rstrip(")"), name.startswith("[AugMix"), said


def test_the_table_has_what_was_recorded():
    plain = None
    for run, is_plain, said in rows():
        clean, views, corruptions, below, averaged, averaged_below, boundary, passes, seconds, captures = said
        records = RunFolder(run).records()
        end, epochs = records[-1], [record["seconds"] for record in records if record["kind"] == "epoch"]
        judged = {r["attack"]: r["accuracy"] for r in records if r["kind"] == "evaluation" and r["weights"] == "last"}
        assert [clean, views] == [f"{100 * judged[attack]:.2f}" for attack in ("clean", "views")], run
        assert corruptions == f"{100 * kept(run)['accuracy']:.2f}", run
        assert [passes, captures] == [f"{end['work']:.1f}", f"{end['capture_seconds']:.0f}"], run
        assert len(epochs) == end["epochs"] == 100
        if seconds[-1].isdigit() and "–" not in seconds:  # else of some of the epochs, which the text names
            assert seconds == f"{statistics.median(epochs):.3f}", run
        if is_plain:
            plain = run
            assert [below, averaged_below, boundary] == ["", "", "–"]
        else:
            assert below == apart(run, plain), run
            assert boundary == f"{100 * end['boundary']:.1f}", run
        if averaged != "–":
            assert averaged == f"{100 * kept(run, 'averaged')['accuracy']:.2f}", run
            assert is_plain or averaged_below == apart(run, plain, "averaged"), run


def mean_gap(mined, plain):
    """Points that the mean of some trainings is below that of others, and its standard error, of one variance."""
    sides = [[100 * kept(run)["accuracy"] for run in runs] for runs in (plain, mined)]
    squares = sum(statistics.variance(side) * (len(side) - 1) for side in sides)
    variance = squares / sum(len(side) - 1 for side in sides)
    error = (variance * sum(1 / len(side) for side in sides)) ** 0.5
    return statistics.mean(sides[0]) - statistics.mean(sides[1]), error


@pytest.mark.parametrize(
    ("mined", "plain", "most"), [(TEN_MINED, TEN_PLAIN, 0.3), (HUNDRED_MINED, HUNDRED_PLAIN, 0.5)], ids=["10", "100"]
)
def test_means_of_trainings_are_near_augmix_and_all_pages_say_how_near(mined, plain, most):
    gap, error = mean_gap(mined, plain)
    assert gap <= most
    for page in ("docs/accuracy.md", "docs/reproduction_short.md", "results/augmix/README.md"):
        assert f"{gap:.2f} ± {error:.2f}" in " ".join((ROOT / page).read_text().split()), page


def test_whole_runs_and_side_by_side_are_as_the_pages_say():
    ends = [RunFolder(run).records()[-1] for run in (TEN / "augmix", TEN / "bullettrain-alone")]
    plain, mined = (end["seconds"] + end["capture_seconds"] for end in ends)
    bench = json.loads((RESULTS / "bench" / "h200-wrn-40-2-augmix-last-k4-batch-500.json").read_text())
    beside = max(row["wall_clock_speedup"] for row in bench["rows"] if row["method"] == "bullettrain")
    assert beside >= 1.7
    for page in ("docs/accuracy.md", "docs/engine_notes.md", "docs/reproduction_short.md", "docs/methods.md"):
        text = " ".join((ROOT / page).read_text().split())
        assert f"about {plain / mined:.1f}" in text, page
        assert f"{beside:.2f} times" in text, page
    assert f"({plain / mined:.2f} times; this training is" in (ROOT / "docs" / "engine_notes.md").read_text()
    assert f"about {plain / mined:.1f} times faster than AugMix" in (ROOT / "README.md").read_text()


def test_what_large_batches_lose():
    """Against AugMix in batches of 128, and on glass blur."""
    mined = statistics.mean(100 * kept(run)["accuracy"] for run in TEN_MINED)
    small = 100 * kept(RESULTS / "augmix" / "cifar10-long" / "augmix")["accuracy"]
    blur = [100 * statistics.mean(by_corruption(run)["glass_blur"]) for run in (*TEN_PLAIN, *TEN_MINED)]
    losses = [statistics.mean(blur[:2]) - one for one in blur[2:]]
    accuracy = " ".join((ROOT / "docs" / "accuracy.md").read_text().split())
    for text in (" ".join((ROOT / "README.md").read_text().split()), accuracy):
        assert f"{small - mined:.1f} less than AugMix in batches of 128" in text
    assert f"each loses {min(losses):.1f} to {max(losses):.1f} points on glass blur" in accuracy


@pytest.mark.parametrize(
    ("mined", "plain", "text"),
    [
        ("cifar10-short/bullettrain-gamma-0.65", "cifar10-short/augmix", "**{} points,"),
        ("cifar10-long/bullettrain", "cifar10-long/augmix", "{} after 100 epochs**"),
        ("cifar10-long/bullettrain-k4-gamma-0.65", "cifar10-long/augmix", "({} in groups of four"),
        ("cifar10-long/bullettrain-views", "cifar10-long/augmix", "{} above AugMix"),
        ("cifar100-short/bullettrain-gamma-0.5-views", "cifar100-short/augmix", "{} below AugMix"),
    ],
)
def test_unpaired_differences_in_the_text(mined, plain, text):
    found = difference(*([kept(RESULTS / "augmix" / run)] for run in (mined, plain)))
    assert not found.paired
    said = text.format(f"{abs(100 * found.value):.1f} ± {100 * found.error:.1f}")
    assert said in " ".join(PAGE.read_text().split())
