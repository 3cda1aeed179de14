"""What results/README.md says of the judge and of the study of steps is what was recorded."""

import csv
import importlib.util
import json
from pathlib import Path

import pytest
import torch

from bullettrain.evaluation.comparison import difference
from bullettrain.evaluation.results import Store, unpack

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results"
COLUMNS = (
    "method,objective,allocation,score,steps,eps,k,batch_size,seed,epochs,weights,clean,pgd20,apgd,apgd_images,"
    "autoattack,autoattack_images,passes,minutes,minutes_compile,device,commit,command"
)


@pytest.fixture(scope="module")
def figure():
    spec = importlib.util.spec_from_file_location("steps_figure", ROOT / "benchmarks" / "steps_figure.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def page():
    return " ".join((RESULTS / "README.md").read_text(encoding="utf-8").replace("−", "-").split())


def said(found):
    sign = "-" if found.value < 0 else "+"
    return sign + size(found)


def size(found):
    """Halves are rounded up, as in the page."""
    return f"{abs(100 * found.value) + 1e-9:.2f} ± {100 * found.error:.2f}"


def test_rows_of_the_csv_are_the_runs(figure, page):
    with (RESULTS / "plane-steps.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert ",".join(rows[0]) == COLUMNS
    assert len(rows) == len(list((RESULTS / "steps").iterdir()))
    for row in rows:
        name = figure.folder(row)
        for attack in ("clean", "pgd20", "apgd"):
            assert float(row[attack]) == pytest.approx(100 * figure.judged(name, attack)["accuracy"], abs=0.0051)
        assert int(row["apgd_images"]) == figure.judged(name, "apgd")["examples"]
        by = {"": "all alike", "svar": "SVar", "random": "chance"}[row["score"]]
        line = f"| {row['steps']} | {by} | {row['passes']} | {row['clean']} | {row['pgd20']} | {row['apgd']} |"
        if name != figure.FIRST:
            line += f" {said(figure.compared(name, 'apgd'))} | {said(figure.compared(name, 'clean'))} |"
        assert line in page


@pytest.mark.parametrize(
    ("one", "other", "text"),
    [
        ("3-1-0", "3-3-0", "(3/1/0 against 3/3/0) it is 0.73 ± 0.34"),
        ("2-1-1", "2-2-2", "(2/1/1 against 2/2/2) costs 1.65 ± 0.33"),
        ("3-1-1", "3-1-1-chance", "cannot be told apart (0.23 ± 0.33)"),
    ],
)
def test_differences_in_the_text(figure, page, one, other, text):
    apart = difference([figure.judged(one, "apgd")], [figure.judged(other, "apgd")])
    assert apart.paired
    assert size(apart) in text
    assert text in page


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
