"""What results/README.md says of the judge and of the study of steps is what was recorded."""

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
    with pytest.raises(SystemExit, match="is on record already"):
        rows.add(folder.path, tmp_path / "plane.csv", tmp_path / "steps")
    (folder.path / rows.SECONDS).write_text("114.76\n", encoding="utf-8")
    timed = rows.add(folder.path, tmp_path / "other.csv", tmp_path / "steps", replace=True)
    assert (timed["minutes"], timed["apgd"]) == ("1.91", recorded["apgd"])
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
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert f"{float(timed['minutes']):.2f} minutes on one NVIDIA H200" in readme
    assert f"{float(timed['autoattack']):.1f} % under AutoAttack (one seed, 10,000 images)" in readme


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


@pytest.fixture(scope="module")
def page():
    return " ".join((RESULTS / "README.md").read_text(encoding="utf-8").split())


def test_the_table_and_the_picture_of_steps_are_what_was_recorded():
    check = [sys.executable, str(ROOT / "benchmarks" / "steps_figure.py"), "--check"]
    done = subprocess.run(check, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_lines_of_the_csv_are_the_runs(figure):
    runs = [run for name in figure.OBJECTIVES for result in figure.study(name).values() for run in result.runs]
    assert {figure.folder(run) for run in runs} == {path.name for path in (RESULTS / "steps").iterdir()}
    for run in runs:
        for attack in ("clean", "pgd20", "apgd"):
            found = figure.judged(figure.folder(run), attack)
            assert float(run[attack]) == pytest.approx(100 * found["accuracy"], abs=0.0051)
        assert int(run["apgd_images"]) == figure.judged(figure.folder(run), "apgd")["examples"]
        entries = Store(RESULTS / "steps" / figure.folder(run)).entries
        assert all(entry.environment["commit"].startswith(run["commit"]) for entry in entries)


@pytest.mark.parametrize(
    ("objective", "one", "other", "attack", "text"),
    [
        ("PGD-AT", "2/2/2", "3/3/3", "apgd", "cannot be told from three under APGD (−0.43 ± 0.26;"),
        ("PGD-AT", "3/3/3", "2/2/2", "pgd20", "under PGD-20 they lose 0.52 ± 0.15"),
        ("PGD-AT", "2/2/2", "3/1/1", "apgd", "more robust than 3/1/1 (by 0.67 ± 0.26; three seeds each)"),
        ("PGD-AT", "3/3/0", "10/2/0", "apgd", "is 0.39 ± 0.28 points below 3/3/0"),
        ("PGD-AT", "3/1/1", "3/1/1 by chance", "apgd", "on 3/1/1 under APGD (0.15 ± 0.26, three seeds each;"),
        ("PGD-AT", "3/1/1", "3/1/1 by chance", "pgd20", "under PGD-20 SVar is 0.37 ± 0.15 above"),
        ("PGD-AT", "3/1/1 by oracle", "3/1/1", "apgd", "is 0.43 ± 0.27 above SVar"),
        ("PGD-AT", "2/2/2", "3/1/1 by oracle", "apgd", "0.24 ± 0.27 below two steps for all (one seed against three)"),
        ("PGD-AT", "3/3/3", "3/0/3", "apgd", "(3/0/3) 4.60 ± 0.43 points are lost"),
        ("PGD-AT", "3/3/3", "0/3/3", "apgd", "(0/3/3) 2.63 ± 0.36"),
        ("PGD-AT", "3/3/3", "3/3/0", "apgd", "(3/3/0) 1.81 ± 0.26"),
        ("PGD-AT", "3/3/0", "3/3/3", "clean", "brings 4.15 ± 0.11 points of clean accuracy"),
        ("PGD-AT", "10/2/0", "10/2/2", "clean", "from 10/2/2 to 10/2/0 it is 3.82 ± 0.24"),
        ("PGD-AT", "10/2/2", "10/2/0", "apgd", "for 2.05 ± 0.38"),
        ("PGD-AT", "3/3/0", "3/1/0", "apgd", "(3/1/0 against 3/3/0) 0.39 ± 0.29"),
        ("PGD-AT", "10/10/0", "10/2/0", "apgd", "(10/2/0 against 10/10/0) cost 0.83 ± 0.33"),
        ("PGD-AT", "2/2/2", "2/1/1", "apgd", "(2/1/1 against 2/2/2) costs 1.72 ± 0.29"),
        ("TRADES", "3/3/0", "3/3/3", "clean", "3/3/0 is 2.49 ± 0.11 points cleaner than three steps for all"),
        ("TRADES", "3/3/0", "3/3/3", "apgd", "not less robust (+0.46 ± 0.26 under APGD"),
        ("TRADES", "3/3/0", "3/3/3", "pgd20", "+0.03 ± 0.15 under PGD-20)"),
        ("TRADES", "10/2/0", "10/10/10", "clean", "is 3.30 ± 0.11 points cleaner than ten steps for all"),
        ("TRADES", "10/2/0", "10/10/10", "apgd", "less robust (−0.72 ± 0.26), for 12.7 passes"),
        ("TRADES", "10/2/0", "3/3/3", "clean", "it is 2.33 ± 0.11 cleaner"),
        ("TRADES", "10/2/0", "3/3/3", "apgd", "0.52 ± 0.26 more robust"),
        ("TRADES", "3/3/0", "10/2/0", "apgd", "(−0.06 ± 0.26 under APGD for 3/3/0"),
        ("TRADES", "3/3/0", "10/2/0", "clean", "+0.16 ± 0.11 clean)"),
        ("TRADES", "10/10/10", "3/3/3", "apgd", "more robust than three** by 1.23 ± 0.26"),
        ("TRADES", "3/3/3", "10/10/10", "clean", "0.97 ± 0.11 points less clean"),
        ("TRADES", "10/2/0", "10/2/0 by chance", "apgd", "as good as SVar on 10/2/0 (0.18 ± 0.28 apart under APGD"),
        ("both", "PGD-AT 3/3/3", "TRADES 10/10/10", "clean", "is 2.25 ± 0.11 points cleaner and not less robust"),
        ("both", "PGD-AT 3/3/3", "TRADES 10/10/10", "apgd", "not less robust (+0.48 ± 0.26)"),
    ],
)
def test_differences_in_the_text(figure, page, objective, one, other, attack, text):
    value, error = figure.compared(settings(figure, objective), one, other, attack)
    assert f"{figure.rounded(value)} ± {figure.rounded(error)}" in text
    assert text in page


@pytest.mark.parametrize(
    ("objective", "one", "other", "attack", "text"),
    [
        ("PGD-AT", "2/2/2", "3/3/3", "apgd", "cannot be told from that (−0.43 ± 0.26)"),
        ("PGD-AT", "2/2/2", "3/1/1", "apgd", "3/1/1, for 7.25, loses 0.67 ± 0.26 to two steps for all"),
        (
            "PGD-AT",
            "3/1/1",
            "3/1/1 by chance",
            "apgd",
            "as well as SVar (0.15 ± 0.26; three seeds each)",
        ),
        ("PGD-AT", "3/3/0", "3/3/3", "clean", "3/3/0 is 4.15 ± 0.11 points cleaner than three steps for all"),
        ("PGD-AT", "3/3/3", "3/3/0", "apgd", "1.81 ± 0.26 less robust under APGD (three seeds each"),
        ("PGD-AT", "3/3/3", "3/0/3", "apgd", "(3/0/3) 4.60 ± 0.43 points are lost under APGD (one seed, 4,000 images"),
        ("TRADES", "3/3/0", "3/3/3", "clean", "3/3/0 is 2.49 ± 0.11 points cleaner than three steps for all"),
        ("TRADES", "3/3/0", "3/3/3", "apgd", "not told apart under APGD (+0.46 ± 0.26)"),
        ("TRADES", "10/2/0", "10/10/10", "clean", "3.30 ± 0.11 points cleaner than ten steps for all"),
        ("TRADES", "10/10/10", "10/2/0", "apgd", "0.72 ± 0.26 less robust, for 12.7 instead of 27"),
        ("both", "PGD-AT 3/3/3", "TRADES 3/3/0", "apgd", "is still 1.25 ± 0.26 more robust than 3/3/0"),
        ("both", "TRADES 3/3/0", "PGD-AT 3/3/3", "clean", "and 1.21 ± 0.11 less clean"),
    ],
)
def test_differences_in_the_readme(figure, objective, one, other, attack, text):
    value, error = figure.compared(settings(figure, objective), one, other, attack)
    assert f"{figure.rounded(value)} ± {figure.rounded(error)}" in text
    assert text in " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())


@pytest.mark.parametrize(
    ("page_name", "objective", "one", "other", "attack", "text"),
    [
        ("accuracy", "PGD-AT", "3/3/3", "2/2/2", "apgd", "with two steps 0.43 ± 0.26 less"),
        ("accuracy", "PGD-AT", "2/2/2", "3/1/1", "apgd", "3/1/1 is 0.67 ± 0.26 points below two steps"),
        ("accuracy", "PGD-AT", "3/1/1", "3/1/1 by chance", "apgd", "(3/1/1: 0.15 ± 0.26 apart"),
        ("accuracy", "PGD-AT", "2/2/2", "3/1/1 by oracle", "apgd", "(0.24 ± 0.27 below"),
        ("accuracy", "PGD-AT", "3/3/3", "3/0/3", "apgd", "3/0/3 loses 4.60 ± 0.43 points"),
        ("accuracy", "PGD-AT", "3/3/3", "0/3/3", "apgd", "0/3/3 2.63 ± 0.36"),
        ("accuracy", "PGD-AT", "3/3/3", "3/3/0", "apgd", "1.81 ± 0.26 less robust under APGD than three steps"),
        ("accuracy", "PGD-AT", "3/3/0", "3/3/3", "clean", "3/3/0 is 4.15 ± 0.11 points cleaner"),
        ("accuracy", "PGD-AT", "3/3/3", "10/10/0", "apgd", "(10/10/0 loses 1.38 ± 0.35"),
        ("accuracy", "PGD-AT", "3/1/1", "3/1/1 by chance", "pgd20", "SVar is 0.37 ± 0.15 points above chance"),
        ("accuracy", "TRADES", "3/3/0", "3/3/3", "clean", "3/3/0 is 2.49 ± 0.11 points cleaner"),
        ("accuracy", "TRADES", "3/3/0", "3/3/3", "apgd", "not told apart under APGD (+0.46 ± 0.26"),
        ("accuracy", "TRADES", "10/2/0", "10/10/10", "clean", "10/2/0, is 3.30 ± 0.11 points cleaner"),
        ("accuracy", "TRADES", "10/10/10", "10/2/0", "apgd", "0.72 ± 0.26 less robust under APGD"),
        ("methods", "TRADES", "3/3/0", "3/3/3", "clean", "2.49 ± 0.11 points cleaner than three steps for all"),
        ("methods", "TRADES", "3/3/0", "3/3/3", "apgd", "not told apart under APGD (+0.46 ± 0.26)"),
        ("methods", "TRADES", "10/10/10", "10/2/0", "apgd", "0.72 ± 0.26 points less than TRADES under APGD"),
        ("methods", "TRADES", "10/2/0", "10/10/10", "clean", "3.30 ± 0.11 points cleaner"),
        ("limitations", "TRADES", "10/10/10", "10/2/0", "apgd", "0.72 ± 0.26 points less robust under APGD than ten"),
    ],
)
def test_differences_in_the_documentation(figure, page_name, objective, one, other, attack, text):
    value, error = figure.compared(settings(figure, objective), one, other, attack)
    assert f"{figure.rounded(value)} ± {figure.rounded(error)}" in text
    assert text in " ".join((ROOT / "docs" / f"{page_name}.md").read_text(encoding="utf-8").split())


def test_what_leaving_outliers_alone_costs_without_the_former_engine(figure, page):
    """Its seed 0 had larger steps for robust examples."""
    later = {
        name: [float(run["apgd"]) for run in figure.study()[name].runs if run["seed"] != "0"]
        for name in ("3/3/3", "3/3/0")
    }
    assert [len(values) for values in later.values()] == [2, 2]
    assert statistics.fmean(later["3/3/3"]) - statistics.fmean(later["3/3/0"]) == pytest.approx(2.125)
    assert "it is 2.13 points below three steps for all, not 1.81" in page
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert "(three seeds each; 2.13 without an earlier engine's seed)" in readme


def test_the_spread_of_seeds_in_the_text(figure, page):
    spread = figure.rounded(figure.spread("apgd"))
    assert f"({spread} points under APGD, from 18 degrees of freedom)" in page
    results = [result for objective in figure.OBJECTIVES for result in figure.study(objective).values()]
    assert sum(len(result.runs) - 1 for result in results) == 18


def test_the_judge_agrees_with_the_package(page):
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
