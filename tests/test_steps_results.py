"""What the pages of results/ say of the judge and of the study of steps is what was recorded."""

import itertools
import json
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bullettrain.config import recipe
from bullettrain.config.method import ALLOCATIONS
from bullettrain.evaluation.results import Store, unpack
from bullettrain.run_folder import RunFolder

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results"


@pytest.fixture(scope="module")
def figure():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        import rows  # noqa: F401
        import steps_figure

        yield steps_figure
        for name in ("steps_figure", "rows", "row_names", "plane"):
            del sys.modules[name]


def test_a_finished_run_becomes_a_line(figure, tmp_path):
    """The script that adds a row finds what is on record of one."""
    rows = sys.modules["rows"]
    recorded = next(run for run in figure.study("TRADES")["10/2/0 by chance"].runs)
    words = rows.command("TRADES 10/2/0 chance")
    name = rows.folder_name(" ".join(words))
    assert " ".join(["bullettrain", *words]) == recorded["command"]
    settings = [word for option, word in itertools.pairwise(words) if option == "--set"]
    config = recipe("cifar10-trades-short").with_settings(settings)
    environment = {"device": "NVIDIA H200", "commit": "172bd0d", "command": f"{recorded['command']} --out runs/a"}
    folder = RunFolder(tmp_path / "run")
    folder.create(config, environment)
    for file in ("metrics.jsonl", "evaluation.json"):
        shutil.copy(RESULTS / "steps" / name / file, folder.path / file)
    for file in ("plane.csv", "other.csv"):
        shutil.copy(RESULTS / "plane.csv", tmp_path / file)
    assert rows.add(folder.path, tmp_path / "plane.csv", tmp_path / "steps") == recorded
    (folder.path / rows.SECONDS).write_text("114.76\n", encoding="utf-8")
    timed = rows.add(folder.path, tmp_path / "other.csv", tmp_path / "steps")
    assert (timed["minutes"], timed["apgd"]) == ("1.91", recorded["apgd"])
    assert (tmp_path / "steps" / f"{name}-{timed['commit']}" / rows.SECONDS).exists()  # run again
    with pytest.raises(SystemExit, match="is on record already"):
        rows.add(folder.path, tmp_path / "plane.csv", tmp_path / "steps")
    before, after = ((path / "plane.csv").read_text(encoding="utf-8") for path in (RESULTS, tmp_path))
    assert len(after.splitlines()) == len(before.splitlines()) + 1
    for file in ("metrics.jsonl", "evaluation.json"):
        kept = (tmp_path / "steps" / name / file).read_text(encoding="utf-8")
        assert kept == (RESULTS / "steps" / name / file).read_text(encoding="utf-8")


def settings(figure, objective):
    """The settings of an objective, or of both with its name before each."""
    if objective != "both":
        return figure.study(objective)
    return {f"{name} {steps}": result for name in figure.OBJECTIVES for steps, result in figure.study(name).items()}


def test_the_robust_recipe_is_the_row_on_record(figure):
    """What is said of three steps for all is what `bullettrain train cifar10-robust` trains."""
    words = sys.modules["rows"].command("PGD-AT 3/3/3")
    settings = [word for option, word in itertools.pairwise(words) if option == "--set"]
    row, ours = recipe(words[1]).with_settings(settings), recipe("cifar10-robust")
    assert ours.differences(row) == {}
    timed = next(run for run in figure.study()["3/3/3"].runs if run["minutes"])
    readme = text_of("README")
    assert f"{float(timed['minutes']):.2f} minutes on one NVIDIA H200" in readme
    assert f"{float(timed['autoattack']):.2f} % under AutoAttack (one seed, 10,000 images)" in readme


def test_rows_have_names(figure):
    """A row's command names its folder, whatever its settings."""
    rows, names = sys.modules["rows"], sys.modules["row_names"]
    assert set(names.ALLOCATIONS) == set(ALLOCATIONS)
    for row, name in {
        "PGD-AT 3/1/1": "3-1-1",
        "PGD-AT 0/3/3": "0-3-3",
        "TRADES 3/3/0 shuffled seed=2": "trades-3-3-0-shuffled-seed-2",
        "PGD-AT 3/1/0 gaussian allocation_value=0.3": "3-1-0-gaussian-allocation_value-0.3",
    }.items():
        words = rows.command(row)
        assert rows.folder_name(" ".join(words)) == name
        settings = [word for option, word in itertools.pairwise(words) if option == "--set"]
        recipe(words[1]).with_settings(settings).method.build(10)


def text_of(page):
    """The words of a page, or of all pages of results/, one blank apart."""
    files = sorted(RESULTS.rglob("README.md")) if page == "results" else [ROOT / "docs" / f"{page}.md"]
    files = [ROOT / "README.md"] if page == "README" else files
    return " ".join(word for file in files for word in file.read_text(encoding="utf-8").split())


def test_the_table_and_the_picture_of_steps_are_what_was_recorded():
    check = [sys.executable, str(ROOT / "benchmarks" / "steps_figure.py"), "--check"]
    done = subprocess.run(check, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_lines_of_the_csv_are_the_runs(figure):
    runs = [run for name in figure.OBJECTIVES for result in figure.study(name).values() for run in result.runs]
    assert {figure.folder(run) for run in runs} == {
        path.name for path in (RESULTS / "steps").iterdir() if path.is_dir()
    }
    for run in runs:
        for attack in ("clean", "pgd20", "apgd"):
            found = figure.judged(figure.folder(run), attack)
            assert float(run[attack]) == pytest.approx(100 * found["accuracy"], abs=0.0051)
        assert int(run["apgd_images"]) == figure.judged(figure.folder(run), "apgd")["examples"]
        entries = Store(RESULTS / "steps" / figure.folder(run)).entries
        assert all(entry.environment["commit"].startswith(run["commit"]) for entry in entries)


@pytest.mark.parametrize(
    ("page", "objective", "one", "other", "attack", "text"),
    [
        ("results", "PGD-AT", "3/3/3", "2/2/2", "apgd", "are 0.32 ± 0.22 below three under APGD"),
        ("results", "PGD-AT", "3/3/3", "2/2/2", "pgd20", "and 0.57 ± 0.12 under PGD-20"),
        ("results", "PGD-AT", "2/2/2", "3/1/1", "apgd", "more robust than 3/1/1 (by 0.65 ± 0.24)"),
        ("results", "PGD-AT", "10/2/2", "3/3/3", "apgd", "10/2/2 is where 3/3/3 is (−0.02 ± 0.35, one run)"),
        ("results", "PGD-AT", "3/3/0", "10/2/0", "apgd", "is 0.39 ± 0.36 points below 3/3/0"),
        ("results", "PGD-AT", "3/1/1", "3/1/1 by chance", "apgd", "on 3/1/1 under APGD (0.15 ± 0.26;"),
        ("results", "PGD-AT", "3/1/1", "3/1/1 by chance", "pgd20", "under PGD-20 SVar is 0.37 ± 0.14 above"),
        ("results", "PGD-AT", "3/1/1 by oracle", "3/1/1", "apgd", "is 0.43 ± 0.36 above SVar"),
        ("results", "PGD-AT", "2/2/2", "3/1/1 by oracle", "apgd", "0.23 ± 0.35 below two steps for all (one run)"),
        ("results", "PGD-AT", "3/3/3", "3/0/3", "apgd", "(3/0/3) 4.47 ± 0.48 points are lost"),
        ("results", "PGD-AT", "3/3/3", "0/3/3", "apgd", "(0/3/3) 2.49 ± 0.42"),
        ("results", "PGD-AT", "3/3/3", "3/3/0", "apgd", "(3/3/0) 1.68 ± 0.32"),
        ("results", "PGD-AT", "3/3/0", "3/3/3", "clean", "brings 4.19 ± 0.19 points of clean accuracy"),
        ("results", "PGD-AT", "10/2/0", "10/2/2", "clean", "from 10/2/2 to 10/2/0 it is 3.82 ± 0.24"),
        ("results", "PGD-AT", "10/2/2", "10/2/0", "apgd", "for 2.05 ± 0.48"),
        ("results", "PGD-AT", "3/3/0", "3/1/0", "apgd", "(3/1/0 against 3/3/0) 0.39 ± 0.37"),
        ("results", "PGD-AT", "10/10/0", "10/2/0", "apgd", "(10/2/0 against 10/10/0) cost 0.83 ± 0.45"),
        ("results", "PGD-AT", "2/2/2", "2/1/1", "apgd", "(2/1/1 against 2/2/2) costs 1.70 ± 0.35"),
        (
            "results",
            "TRADES",
            "3/3/0",
            "3/3/3",
            "clean",
            "3/3/0 is 2.49 ± 0.16 points cleaner than three steps for all",
        ),
        ("results", "TRADES", "3/3/0", "3/3/3", "apgd", "not less robust (+0.46 ± 0.31 under APGD"),
        ("results", "TRADES", "3/3/0", "3/3/3", "pgd20", "+0.03 ± 0.18 under PGD-20)"),
        ("results", "TRADES", "10/2/0", "10/10/10", "clean", "is 3.30 ± 0.17 points cleaner than ten steps for all"),
        ("results", "TRADES", "10/2/0", "10/10/10", "apgd", "less robust (−0.72 ± 0.33), for 12.7 passes"),
        ("results", "TRADES", "10/2/0", "3/3/3", "clean", "it is 2.33 ± 0.15 cleaner"),
        ("results", "TRADES", "10/2/0", "3/3/3", "apgd", "not told apart under APGD (+0.52 ± 0.31)"),
        ("results", "TRADES", "3/3/0", "10/2/0", "apgd", "(−0.06 ± 0.26 under APGD for 3/3/0"),
        ("results", "TRADES", "3/3/0", "10/2/0", "clean", "+0.16 ± 0.11 clean)"),
        ("results", "TRADES", "10/10/10", "3/3/3", "apgd", "more robust than three** by 1.23 ± 0.27"),
        ("results", "TRADES", "3/3/3", "10/10/10", "clean", "0.97 ± 0.12 points less clean"),
        ("results", "TRADES", "10/2/0", "10/2/0 by chance", "apgd", "from SVar on 10/2/0 (0.18 ± 0.37 under APGD"),
        ("results", "both", "PGD-AT 3/3/3", "TRADES 10/10/10", "clean", "is 2.21 ± 0.22 points cleaner"),
        ("results", "both", "PGD-AT 3/3/3", "TRADES 10/10/10", "apgd", "not less robust (+0.34 ± 0.40)"),
        ("README", "PGD-AT", "3/3/3", "2/2/2", "apgd", "Two steps are hardly worse: 0.32 ± 0.22 less under APGD"),
        (
            "README",
            "PGD-AT",
            "3/1/1",
            "3/1/1 by chance",
            "apgd",
            "no better than chance on PGD-AT 3/1/1 (0.15 ± 0.26) under APGD",
        ),
        ("README", "PGD-AT", "3/3/0", "3/3/3", "clean", "three steps for all: 4.19 ± 0.19 more clean accuracy"),
        ("README", "PGD-AT", "3/3/3", "3/3/0", "apgd", "more clean accuracy, 1.68 ± 0.32 less under APGD"),
        ("README", "TRADES", "3/3/0", "3/3/3", "clean", "three steps for all: 2.49 ± 0.16 more clean accuracy"),
        ("README", "TRADES", "3/3/0", "3/3/3", "apgd", "under APGD no difference (+0.46 ± 0.31)"),
        ("README", "TRADES", "10/2/0", "10/10/10", "clean", "ten steps for all: 3.30 ± 0.17 more clean accuracy"),
        ("README", "TRADES", "10/10/10", "10/2/0", "apgd", "0.72 ± 0.33 less under APGD, for under half the passes"),
        ("accuracy", "PGD-AT", "3/3/3", "2/2/2", "apgd", "Two steps have 0.32 ± 0.22 less"),
        ("accuracy", "PGD-AT", "3/3/3", "2/2/2", "pgd20", "under PGD-20 they lose 0.57 ± 0.12"),
        ("accuracy", "PGD-AT", "2/2/2", "3/1/1", "apgd", "3/1/1 is 0.65 ± 0.24 points below two steps"),
        ("accuracy", "PGD-AT", "3/1/1", "3/1/1 by chance", "apgd", "between SVar and the random score (0.15 ± 0.26"),
        ("accuracy", "PGD-AT", "3/1/1", "3/1/1 by chance", "pgd20", "SVar is 0.37 ± 0.14 points above chance"),
        ("accuracy", "PGD-AT", "2/2/2", "3/1/1 by oracle", "apgd", "(0.23 ± 0.35 below"),
        ("accuracy", "PGD-AT", "3/3/3", "3/0/3", "apgd", "3/0/3 loses 4.47 ± 0.48 points"),
        ("accuracy", "PGD-AT", "3/3/3", "0/3/3", "apgd", "0/3/3 2.49 ± 0.42"),
        ("accuracy", "PGD-AT", "3/3/3", "3/3/0", "apgd", "1.68 ± 0.32 less robust under APGD than three steps"),
        ("accuracy", "PGD-AT", "3/3/0", "3/3/3", "clean", "3/3/0 is 4.19 ± 0.19 points cleaner"),
        ("accuracy", "PGD-AT", "3/3/3", "10/10/0", "apgd", "(10/10/0 loses 1.24 ± 0.41"),
        ("accuracy", "TRADES", "3/3/0", "3/3/3", "clean", "3/3/0 is 2.49 ± 0.16 points cleaner"),
        ("accuracy", "TRADES", "3/3/0", "3/3/3", "apgd", "no measurable difference under APGD (+0.46 ± 0.31"),
        ("accuracy", "TRADES", "10/2/0", "10/10/10", "clean", "10/2/0, is 3.30 ± 0.17 points cleaner"),
        ("accuracy", "TRADES", "10/10/10", "10/2/0", "apgd", "0.72 ± 0.33 less robust under APGD"),
        ("accuracy", "TRADES", "10/2/0", "3/3/3", "apgd", "+0.52 ± 0.31 under APGD"),
        ("accuracy", "TRADES", "10/2/0 by chance", "10/2/0", "clean", "chance is 0.53 ± 0.16 points cleaner"),
        (
            "limitations",
            "TRADES",
            "10/2/0 by chance",
            "10/2/0",
            "clean",
            "under APGD and is 0.53 ± 0.16 points cleaner (one seed",
        ),
        ("faq", "PGD-AT", "3/1/1", "3/1/1 by chance", "pgd20", "under PGD-20 SVar is 0.37 ± 0.14 points better"),
        ("methods", "TRADES", "3/3/0", "3/3/3", "clean", "2.49 ± 0.16 points cleaner than three steps for all"),
        ("methods", "TRADES", "3/3/0", "3/3/3", "apgd", "no measurable difference under APGD (+0.46 ± 0.31)"),
        ("methods", "TRADES", "10/10/10", "10/2/0", "apgd", "0.72 ± 0.33 points less than TRADES under APGD"),
        ("methods", "TRADES", "10/2/0", "10/10/10", "clean", "3.30 ± 0.17 points cleaner"),
        ("methods", "both", "PGD-AT 3/3/3", "TRADES 10/10/10", "apgd", "not less robust (+0.34 ± 0.40)"),
        ("limitations", "TRADES", "10/10/10", "10/2/0", "apgd", "0.72 ± 0.33 points less robust under APGD than ten"),
    ],
)
def test_differences_in_the_text(figure, page, objective, one, other, attack, text):
    value, error = figure.compared(settings(figure, objective), one, other, attack)
    assert f"{figure.rounded(value)} ± {figure.rounded(error)}" in text
    assert text in text_of(page)


def test_the_error_is_of_runs_and_images(figure):
    """By hand for one comparison: runs by pooled deviations, and images less what runs alone bring about."""
    sides = [figure.outcomes(figure.study("TRADES")[name], "apgd").numpy() for name in ("10/2/0", "10/10/10")]
    (deviation, image), runs = figure.spread("apgd"), 1 / 3 + 1 / 3
    differences = sides[0].mean(axis=0) - sides[1].mean(axis=0)
    images = (differences.var(ddof=1) - image * runs) / 4000
    value, error = figure.compared(figure.study("TRADES"), "10/2/0", "10/10/10", "apgd")
    assert value == pytest.approx(sides[0].mean() - sides[1].mean())
    assert error == pytest.approx((deviation * runs + images) ** 0.5)
    assert error > (deviation * runs) ** 0.5


def test_what_leaving_outliers_alone_costs_without_the_former_engine(figure):
    """Its seed 0 had larger steps for robust examples."""
    found = figure.study()
    whole = statistics.fmean(figure.accuracies(found["3/3/3"], "apgd"))
    runs = dict(
        zip((run["commit"] for run in found["3/3/0"].runs), figure.accuracies(found["3/3/0"], "apgd"), strict=True)
    )
    alone = figure.rounded(whole - runs.pop("7d77b37"))
    said = figure.rounded(whole - statistics.fmean(runs.values()))
    assert f"{said} without one of an earlier engine" in text_of("accuracy")
    for text in (
        f"without it 3/3/0 is {said} points below three steps for all, not 1.68",
        f"it alone is {alone} below",
    ):
        assert text in text_of("results")
    assert f"with nearly all steps large, loses {alone}" in text_of("accuracy")


def test_what_is_said_of_chance_on_small_data():
    """By the record of other scores; its errors are those of means over seeds."""
    record = json.loads((RESULTS / "reproduce" / "scores-and-chance.json").read_text(encoding="utf-8"))
    runs = {
        (run["data"], run["options"]): [100 * one["pgd20"] for one in run["seeds"].values()] for run in record["runs"]
    }
    page = text_of("accuracy")
    for data, budget, text in (
        ("mnist", "--set robust=1 ", "SVar is {} points better with N_R = 1"),
        ("mnist", "", "no measurable difference with N_R = 2 ({} better)"),
        ("mnist", "--set robust=0 ", "N_R = 0 ({} worse)"),
        ("digits", "--set robust=0 ", "chance is {} points better with N_R = 0"),
    ):
        sides = [runs[data, f"{budget}--set score={score}"] for score in ("svar", "random")]
        apart = abs(statistics.fmean(sides[0]) - statistics.fmean(sides[1]))
        error = sum(statistics.variance(side) / len(side) for side in sides) ** 0.5
        assert text.format(f"{apart:.1f} ± {error:.1f}") in page


def test_the_spread_of_runs_in_the_text(figure):
    deviation = figure.rounded(figure.spread("apgd")[0] ** 0.5)
    assert f"({deviation} points under APGD, from 20 degrees of freedom)" in text_of("results")
    results = [result for objective in figure.OBJECTIVES for result in figure.study(objective).values()]
    assert sum(len(result.runs) - 1 for result in results) == 20


def test_the_judge_agrees_with_the_package():
    page = text_of("results")
    plain = json.loads((RESULTS / "judge" / "h200-1000-plain.json").read_text(encoding="utf-8"))
    found = {}
    for size in (1000, 10000):
        (entry,) = Store(RESULTS / "judge" / f"h200-{size}").entries
        found[size] = entry, next(result for result in entry.results if result.name == "autoattack")
    (part, ours), (_, whole) = found[1000], found[10000]
    theirs = unpack(plain["survived"]["square"], 1000)
    assert torch.equal(ours.mask, theirs)
    assert torch.equal(whole.mask[unpack(part.among["chosen"], 10000)], theirs)
    assert f"all {int(theirs.sum())} of them" in page
    shares = " | ".join(f"{100 * share:.2f}" for _, share in whole.rounds)
    assert f"| 10,000 | {shares} | {whole.seconds:.1f} |" in page
    for rounds in (
        ours.rounds,
        [(name, unpack(bits, 1000).double().mean()) for name, bits in plain["survived"].items()],
    ):
        shares = " | ".join(f"{100 * share:.1f}" for _, share in rounds)
        assert f"| 1,000 | {shares} | |" in page
