"""What docs/reproduction_short.md says of the three starts of the MNIST study is what was recorded."""

import json
from pathlib import Path

import pytest

from bullettrain.reproduction import SCALES, STUDIES
from bullettrain.reproduction.records import read_records
from bullettrain.reproduction.results import Results

ROOT = Path(__file__).resolve().parent.parent
RECORDS = ROOT / "results" / "reproduce"
ROWS = ("baseline", "b0-o7-r7", "b7-o0-r7", "b7-o7-r0")
"""Seven steps for all, and none for one category with seven for the others."""


def results_of(study, scale, folder):
    return Results(STUDIES[study], SCALES[scale], read_records(RECORDS / folder / "records"))


def recorded(study, scale, folder):
    """Return robust accuracy in percent and the number of test images, by row."""
    results = results_of(study, scale, folder)
    values = {row: results.value(row, STUDIES[study].attacks[-1]) for row in ROWS}
    return {row: (value.mean, value.figures[0]["examples"]) for row, value in values.items() if value is not None}


@pytest.mark.parametrize(
    ("start", "judged", "found"),
    [
        ("ε grows in two epochs", "ten epochs; PGD-100×20, 10,000 images", recorded("fig-oracle", "short", "short")),
        (
            "300 clean updates",
            "ten epochs; PGD-100×5, 2,000 images",
            recorded("fig-oracle-clean", "short", "short"),
        ),
        (
            "attacks stop at success",
            "five epochs; PGD-100×5, 2,000 images",
            recorded("fig-oracle-stop", "short", "short"),
        ),
        ("the same", "ten epochs; PGD-100×5, 2,000 images", recorded("fig-oracle-stop", "paper", "mnist-stop")),
    ],
    ids=["grows", "clean", "stop", "stop, ten epochs"],
)
def test_the_page_has_the_figures_of_each_start(start, judged, found):
    cells = [f"{found[row][0]:.1f}" if row in found else "not run" for row in ROWS]
    page = (ROOT / "docs" / "reproduction_short.md").read_text(encoding="utf-8")
    assert f"| {start} | {' | '.join(cells)} | {judged} |" in page
    assert all(f"{images:,.0f} images" in judged for _, images in found.values())


def test_the_page_says_how_far_rows_are_from_seven_steps_for_all():
    page = " ".join((ROOT / "docs" / "reproduction_short.md").read_text(encoding="utf-8").split())
    five, ten = (
        results_of("fig-oracle-stop", scale, folder) for scale, folder in (("short", "short"), ("paper", "mnist-stop"))
    )

    def below(results, row):
        gap = results.value(row, "pgd100x5").above(results.value("baseline", "pgd100x5"))
        return -gap.value, gap.error

    said = "it is {:.1f} ± {:.1f} points below in five epochs".format(*below(five, "b7-o0-r7"))
    assert said in page
    said = ["{:.2f} ± {:.2f}".format(*below(results, "b7-o7-r0")) for results in (five, ten)]
    assert f"from the third start it is {said[0]} points below in five epochs and {said[1]} in ten" in page
    assert all(five.runs.values())

    def best(part):
        return max((row for row in five.rows if part in row), key=lambda row: -below(five, row)[0])

    assert best("-o0-") == "b1-o0-r7"
    gap, error = below(five, "b1-o0-r7")
    assert f"the best of 16 rows, N_B = 1 with N_R = 7, is {-gap:.2f} ± {error:.2f} above" in page
    assert best("-r0") == "b3-o0-r0"
    assert "N_B = 3 with N_O = 0, is {:.2f} ± {:.2f} below".format(*below(five, "b3-o0-r0")) in page
    without = {row: five.value(row, "pgd100x5").mean for row in five.rows if row.startswith("b0-")}
    assert [row for row, reached in without.items() if reached >= 40] == ["b0-o3-r7"]
    assert f"where N_O = 3 with N_R = 7 reaches {without['b0-o3-r7']:.1f} %" in page
    one = {row: five.value(row, "pgd100x5").mean for row in five.rows if row.startswith("b1-")}
    assert {row for row, reached in one.items() if reached == 0} == {row for row in one if row[-1] in "01"}
    assert f"three or seven for robust examples at {one['b1-o0-r3']:.2f} and {one['b1-o0-r7']:.2f} %" in page


def test_the_page_says_when_robust_examples_appear_without_steps_at_the_boundary():
    page = " ".join((ROOT / "docs" / "reproduction_short.md").read_text(encoding="utf-8").split())
    (run,) = results_of("fig-oracle-stop", "paper", "mnist-stop").runs["b0-o7-r7"]
    course = run.course()
    first = course["robust"][course["epoch"] <= 5].max()
    assert f"is {100 * first:.0f} % at most in the first five of the ten epochs" in page
    assert f"and {100 * course['robust'][-1]:.0f} % at the end, although no boundary example" in page


def test_the_page_says_why_claims_hold_from_the_clean_start():
    page = " ".join((ROOT / "docs" / "reproduction_short.md").read_text(encoding="utf-8").split())
    results = results_of("fig-oracle-clean", "short", "short")
    courses = {row: results.runs[row][0].course() for row in ROWS}
    learnt = {row: course["epoch"][course["robust_accuracy"] > 0.2] for row, course in courses.items()}
    assert 7 < min(learnt["baseline"][learnt["baseline"] > 1]) < 8.5
    assert all(min(learnt[row][learnt[row] > 0.7]) < 2 for row in ("b7-o0-r7", "b7-o7-r0"))
    assert "stays there until the eighth epoch" in page
    begun = {row: course["epoch"] > 0.64 for row, course in courses.items()}
    assert max(courses["b7-o0-r7"]["outlier"][begun["b7-o0-r7"]]) < 0.3
    early = begun["b7-o7-r0"] & (courses["b7-o7-r0"]["epoch"] < 1.2)
    assert max(courses["b7-o7-r0"]["robust"][early]) < 0.3
    assert round(float(max(courses["b0-o7-r7"]["robust"])), 2) == 0.1
    assert "hardly any example becomes robust (at most 10 %" in page
    former = json.loads((RECORDS / "mnist-clean-start.json").read_text(encoding="utf-8"))
    figures = [f"{100 * row['pgd']:.1f}" for row in former["rows"]]
    said = "had {} % with seven steps for all, {} with N_B = 0, {} with N_O = 0 and {} with N_R = 0 (PGD-100×10, 1,000"
    assert said.format(*figures) in page
