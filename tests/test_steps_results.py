"""What results/README.md says of the judge and of the study of steps is what was recorded."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bullettrain.evaluation.results import Store, unpack

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results"


@pytest.fixture(scope="module")
def figure():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        import steps_figure

        yield steps_figure
        for name in ("steps_figure", "plane"):
            del sys.modules[name]


@pytest.fixture(scope="module")
def page():
    return " ".join((RESULTS / "README.md").read_text(encoding="utf-8").split())


def test_the_table_and_the_picture_of_steps_are_what_was_recorded():
    check = [sys.executable, str(ROOT / "benchmarks" / "steps_figure.py"), "--check"]
    done = subprocess.run(check, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_lines_of_the_csv_are_the_runs(figure):
    runs = [run for result in figure.study().values() for run in result.runs]
    assert {figure.folder(run) for run in runs} == {path.name for path in (RESULTS / "steps").iterdir()}
    for run in runs:
        for attack in ("clean", "pgd20", "apgd"):
            found = figure.judged(figure.folder(run), attack)
            assert float(run[attack]) == pytest.approx(100 * found["accuracy"], abs=0.0051)
        assert int(run["apgd_images"]) == figure.judged(figure.folder(run), "apgd")["examples"]
        (entry,) = Store(RESULTS / "steps" / figure.folder(run)).entries
        assert entry.environment["commit"] == run["commit"]


@pytest.mark.parametrize(
    ("one", "other", "attack", "text"),
    [
        ("2/2/2", "3/3/3", "apgd", "cannot be told from three under APGD (−0.43 ± 0.25;"),
        ("3/3/3", "2/2/2", "pgd20", "under PGD-20 they lose 0.76 ± 0.11"),
        ("2/2/2", "3/1/1", "apgd", "more robust than 3/1/1 (by 0.76 ± 0.27, two seeds each)"),
        ("3/3/0", "10/2/0", "apgd", "is 0.64 ± 0.30 points below 3/3/0"),
        ("3/1/1", "3/1/1 by chance", "apgd", "on 3/1/1 under APGD (0.04 ± 0.27, two seeds each;"),
        ("3/1/1", "3/1/1 by chance", "pgd20", "under PGD-20 SVar is 0.43 ± 0.12 above"),
        ("3/3/3", "3/0/3", "apgd", "(3/0/3) 4.53 ± 0.43 points are lost"),
        ("3/3/3", "0/3/3", "apgd", "(0/3/3) 2.55 ± 0.36"),
        ("3/3/3", "3/3/0", "apgd", "(3/3/0) 1.49 ± 0.25"),
        ("3/3/0", "3/3/3", "clean", "brings 4.19 ± 0.12 points of clean accuracy"),
        ("10/2/0", "10/2/2", "clean", "from 10/2/2 to 10/2/0 it is 3.82 ± 0.24"),
        ("10/2/2", "10/2/0", "apgd", "for 2.05 ± 0.38"),
        ("3/3/0", "3/1/0", "apgd", "(3/1/0 against 3/3/0) costs 0.64 ± 0.30"),
        ("10/10/0", "10/2/0", "apgd", "(10/2/0 against 10/10/0) 0.83 ± 0.33"),
        ("2/2/2", "2/1/1", "apgd", "(2/1/1 against 2/2/2) costs 1.65 ± 0.30"),
    ],
)
def test_differences_in_the_text(figure, page, one, other, attack, text):
    value, error = figure.compared(figure.study(), one, other, attack)
    assert f"{figure.rounded(value)} ± {figure.rounded(error)}" in text
    assert text in page


@pytest.mark.parametrize(
    ("one", "other", "attack", "text"),
    [
        ("2/2/2", "3/3/3", "apgd", "cannot be told from that (−0.43 ± 0.25, two seeds)"),
        ("2/2/2", "3/1/1", "apgd", "loses 0.76 ± 0.27 to two steps for all"),
        ("3/1/1", "3/1/1 by chance", "apgd", "chance chooses as well as SVar (0.04 ± 0.27; two seeds each)"),
        ("3/3/0", "3/3/3", "clean", "3/3/0 is 4.19 ± 0.12 points cleaner than three steps for all"),
        ("3/3/3", "3/3/0", "apgd", "1.49 ± 0.25 less robust under APGD (two seeds against three"),
        ("3/3/3", "10/2/0", "apgd", "10/2/0 is as clean, loses 2.13 ± 0.37 and takes 12.35 passes (one seed)"),
        ("3/3/3", "3/0/3", "apgd", "(3/0/3) 4.53 ± 0.43 points are lost under APGD (one seed, 4,000 images"),
    ],
)
def test_differences_in_the_readme(figure, one, other, attack, text):
    value, error = figure.compared(figure.study(), one, other, attack)
    assert f"{figure.rounded(value)} ± {figure.rounded(error)}" in text
    assert text in " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())


def test_the_spread_of_seeds_in_the_text(figure, page):
    found = figure.study()
    assert f"({figure.rounded(figure.spread(found, 'apgd'))} points under APGD, from six degrees of freedom)" in page
    assert sum(len(result.runs) - 1 for result in found.values()) == 6


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
