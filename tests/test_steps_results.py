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
from bullettrain.evaluation.results import Store, unpack
from bullettrain.run_folder import RunFolder

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results"


@pytest.fixture(scope="module")
def figure():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        import steps_figure

        yield steps_figure
        for name in ("steps_figure", "rows", "plane"):
            del sys.modules[name]


def test_a_finished_run_becomes_a_line(figure, tmp_path):
    """The script that adds a row finds what is on record of one."""
    rows = sys.modules["rows"]
    recorded = next(run for run in figure.study("TRADES")["10/2/0 by chance"].runs)
    name, words = rows.command("TRADES 10/2/0 chance")
    assert " ".join(["bullettrain", *words]) == recorded["command"]
    settings = [word for option, word in itertools.pairwise(words) if option == "--set"]
    config = recipe("cifar10-trades-short").with_settings(settings)
    environment = {"device": "NVIDIA H200", "commit": "172bd0d", "command": f"{recorded['command']} --out runs/a"}
    folder = RunFolder(tmp_path / "run")
    folder.create(config, environment)
    for file in ("metrics.jsonl", "evaluation.json"):
        shutil.copy(RESULTS / "steps" / name / file, folder.path / file)
    shutil.copy(RESULTS / "plane.csv", tmp_path / "plane.csv")
    assert rows.add(folder.path, tmp_path / "plane.csv", tmp_path / "steps") == recorded
    with pytest.raises(SystemExit, match="is on record already"):
        rows.add(folder.path, tmp_path / "plane.csv", tmp_path / "steps")
    before, after = ((path / "plane.csv").read_text(encoding="utf-8") for path in (RESULTS, tmp_path))
    assert len(after.splitlines()) == len(before.splitlines()) + 1
    for file in ("metrics.jsonl", "evaluation.json"):
        kept = (tmp_path / "steps" / name / file).read_text(encoding="utf-8")
        assert kept == (RESULTS / "steps" / name / file).read_text(encoding="utf-8")


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
        (entry,) = Store(RESULTS / "steps" / figure.folder(run)).entries
        assert entry.environment["commit"].startswith(run["commit"])


@pytest.mark.parametrize(
    ("objective", "one", "other", "attack", "text"),
    [
        ("PGD-AT", "2/2/2", "3/3/3", "apgd", "cannot be told from three under APGD (−0.26 ± 0.28;"),
        ("PGD-AT", "3/3/3", "2/2/2", "pgd20", "under PGD-20 they lose 0.66 ± 0.17"),
        ("PGD-AT", "2/2/2", "3/1/1", "apgd", "more robust than 3/1/1 (by 0.77 ± 0.28; three seeds each)"),
        ("PGD-AT", "3/3/0", "10/2/0", "apgd", "is 0.39 ± 0.28 points below 3/3/0"),
        ("PGD-AT", "3/1/1", "3/1/1 by chance", "apgd", "on 3/1/1 under APGD (0.15 ± 0.28, three seeds each;"),
        ("PGD-AT", "3/1/1", "3/1/1 by chance", "pgd20", "under PGD-20 SVar is 0.37 ± 0.17 above"),
        ("PGD-AT", "3/1/1 by oracle", "3/1/1", "apgd", "is 0.43 ± 0.27 above SVar"),
        ("PGD-AT", "2/2/2", "3/1/1 by oracle", "apgd", "0.34 ± 0.28 below two steps for all (one seed against three)"),
        ("PGD-AT", "3/3/3", "3/0/3", "apgd", "(3/0/3) 4.53 ± 0.43 points are lost"),
        ("PGD-AT", "3/3/3", "0/3/3", "apgd", "(0/3/3) 2.55 ± 0.36"),
        ("PGD-AT", "3/3/3", "3/3/0", "apgd", "(3/3/0) 1.73 ± 0.28"),
        ("PGD-AT", "3/3/0", "3/3/3", "clean", "brings 4.21 ± 0.10 points of clean accuracy"),
        ("PGD-AT", "10/2/0", "10/2/2", "clean", "from 10/2/2 to 10/2/0 it is 3.82 ± 0.24"),
        ("PGD-AT", "10/2/2", "10/2/0", "apgd", "for 2.05 ± 0.38"),
        ("PGD-AT", "3/3/0", "3/1/0", "apgd", "(3/1/0 against 3/3/0) 0.39 ± 0.29"),
        ("PGD-AT", "10/10/0", "10/2/0", "apgd", "(10/2/0 against 10/10/0) cost 0.83 ± 0.33"),
        ("PGD-AT", "2/2/2", "2/1/1", "apgd", "(2/1/1 against 2/2/2) costs 1.82 ± 0.29"),
        ("TRADES", "3/3/0", "3/3/3", "clean", "3/3/0 is 2.54 ± 0.22 points cleaner than three steps for all"),
        ("TRADES", "3/3/0", "3/3/3", "apgd", "as robust (+0.15 ± 0.37 under APGD"),
        ("TRADES", "3/3/0", "3/3/3", "pgd20", "+0.00 ± 0.26 under PGD-20)"),
        ("TRADES", "10/2/0", "10/10/10", "clean", "is 3.58 ± 0.23 points cleaner than ten steps for all"),
        ("TRADES", "10/2/0", "10/10/10", "apgd", "as robust (−0.25 ± 0.39), for 12.7 passes"),
        ("TRADES", "3/3/0", "10/2/0", "apgd", "3/3/0 cannot be told from 10/2/0 (−0.13 ± 0.34 under APGD"),
        ("TRADES", "3/3/0", "10/2/0", "clean", "+0.01 ± 0.19 clean)"),
        ("TRADES", "3/3/3", "10/10/10", "apgd", "nor three steps for all from ten (−0.53 ± 0.34;"),
        ("TRADES", "3/3/3", "10/10/10", "clean", "1.05 ± 0.18 points cleaner)"),
        ("TRADES", "10/2/0", "10/2/0 by chance", "apgd", "as good as SVar on 10/2/0 (0.33 ± 0.34 apart under APGD)"),
    ],
)
def test_differences_in_the_text(figure, page, objective, one, other, attack, text):
    value, error = figure.compared(figure.study(objective), one, other, attack)
    assert f"{figure.rounded(value)} ± {figure.rounded(error)}" in text
    assert text in page


@pytest.mark.parametrize(
    ("objective", "one", "other", "attack", "text"),
    [
        ("PGD-AT", "2/2/2", "3/3/3", "apgd", "cannot be told from that (−0.26 ± 0.28, three seeds)"),
        ("PGD-AT", "2/2/2", "3/1/1", "apgd", "3/1/1, for 7.25, loses 0.77 ± 0.28 to two steps for all"),
        (
            "PGD-AT",
            "3/1/1",
            "3/1/1 by chance",
            "apgd",
            "as well as SVar (0.15 ± 0.28; three seeds each)",
        ),
        ("PGD-AT", "3/3/0", "3/3/3", "clean", "3/3/0 is 4.21 ± 0.10 points cleaner than three steps for all"),
        ("PGD-AT", "3/3/3", "3/3/0", "apgd", "1.73 ± 0.28 less robust under APGD (three seeds each"),
        ("PGD-AT", "3/3/3", "3/0/3", "apgd", "(3/0/3) 4.53 ± 0.43 points are lost under APGD (one seed, 4,000 images"),
        ("TRADES", "3/3/0", "3/3/3", "clean", "2.54 ± 0.22 points cleaner than three steps for all"),
        ("TRADES", "3/3/0", "3/3/3", "apgd", "not told apart under APGD (+0.15 ± 0.37)"),
        ("TRADES", "10/2/0", "10/10/10", "clean", "3.58 ± 0.23 points cleaner than ten steps for all"),
        ("TRADES", "10/2/0", "10/10/10", "apgd", "not told apart (−0.25 ± 0.39)"),
    ],
)
def test_differences_in_the_readme(figure, objective, one, other, attack, text):
    value, error = figure.compared(figure.study(objective), one, other, attack)
    assert f"{figure.rounded(value)} ± {figure.rounded(error)}" in text
    assert text in " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())


def test_what_leaving_outliers_alone_costs_without_the_former_engine(figure, page):
    """Its seed 0 had larger steps for robust examples."""
    later = {
        name: [float(run["apgd"]) for run in figure.study()[name].runs if run["commit"] != "7d77b37"]
        for name in ("3/3/3", "3/3/0")
    }
    assert [len(values) for values in later.values()] == [2, 2]
    assert statistics.fmean(later["3/3/3"]) - statistics.fmean(later["3/3/0"]) == pytest.approx(2.125)
    assert "it is 2.13 points below three steps for all, not 1.73" in page
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert "(three seeds each; 2.13 without an earlier engine's seed)" in readme


def test_the_spread_of_seeds_in_the_text(figure, page):
    spread = figure.rounded(figure.spread("apgd"))
    assert f"({spread} points under APGD, from ten degrees of freedom)" in page
    results = [result for objective in figure.OBJECTIVES for result in figure.study(objective).values()]
    assert sum(len(result.runs) - 1 for result in results) == 10


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
