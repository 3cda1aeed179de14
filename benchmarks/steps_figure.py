"""Draw whose attack steps matter, from results/plane-steps.csv and the survivors in results/steps: fig-steps.

python benchmarks/steps_figure.py [--out results/fig-steps.png]
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bullettrain.evaluation.comparison import Difference, difference
from bullettrain.evaluation.results import Store
from bullettrain.reporting.plotting import COLOURS, panels, printed
from bullettrain.run_folder import RunFolder

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RESULTS = Path(__file__).resolve().parent.parent / "results"
FIRST = "3-3-3"
"""What the others are compared with."""
LIMITS = {"apgd": (-3.1, 1.4), "clean": (-1.4, 6.9)}
"""Points that the panels show."""


def main() -> None:
    """The figure, and its numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS / "fig-steps.png")
    out = parser.parse_args().out
    with printed():
        drawn(rows()).savefig(out, dpi=200, facecolor="white", metadata={"Software": None})
    for row in rows():
        apart = {attack: compared(folder(row), attack) for attack in ("apgd", "clean")}
        said = "  ".join(f"{attack} {100 * d.value:+.2f} ± {100 * d.error:.2f}" for attack, d in apart.items())
        print(f"{folder(row):14} passes {row['passes']:>5}  apgd {row['apgd']}  clean {row['clean']}  {said}")
    print(out)


def rows() -> list[dict[str, str]]:
    """The runs, as recorded."""
    with (RESULTS / "plane-steps.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def folder(row: dict[str, str]) -> str:
    """Where a run's survivors are."""
    return row["steps"].replace("/", "-") + ("-chance" if row["score"] == "random" else "")


def compared(name: str, attack: str) -> Difference:
    """Accuracy of a run less that of three steps for all, over the same images."""
    return difference([judged(name, attack)], [judged(FIRST, attack)])


def judged(name: str, attack: str) -> dict[str, Any]:
    """Which images survive: of APGD as evaluated afterwards, of the rest as the run itself said."""
    if attack == "apgd":
        (entry,) = Store(RESULTS / "steps" / name).entries
        result = next(result for result in entry.results if result.name == attack)
        about = {"fingerprint": entry.fingerprint, "among": entry.among}
        return {"accuracy": result.accuracy, "examples": result.examples, "survived": result.survived, **about}
    records = RunFolder(RESULTS / "steps" / name).records()
    return next(r for r in records if r.get("weights") == "averaged" and r.get("attack") == attack)


def drawn(runs: list[dict[str, str]]) -> Figure:
    """Differences from three steps for all: under APGD, and clean."""
    figure, (left, right) = panels(columns=2, width=2.3, height=1.7)
    places = range(len(runs))[::-1]
    for place, row in zip(places, runs, strict=True):
        colour = {"": "soft", "svar": "accent", "random": "boundary"}[row["score"]]
        for axes, attack in ((left, "apgd"), (right, "clean")):
            apart = compared(folder(row), attack)
            value, error = 100 * apart.value, 200 * apart.error if folder(row) != FIRST else 0.0
            look: dict[str, Any] = {"color": COLOURS[colour], "markersize": 7, "capsize": 4, "elinewidth": 1.8}
            low, high = LIMITS[attack]
            shown = min(max(value, low + 0.25), high - 0.25)  # far off: an arrow at the edge
            inside = shown == value
            axes.errorbar(shown, place, xerr=error if inside else None, fmt="o" if inside else "<", **look)
            axes.annotate(
                f"{float(row[attack]):.1f} %",
                (shown, place),
                xytext=(0, 7),
                textcoords="offset points",
                ha="center",
                fontsize=9.5,
                color=COLOURS["ink"],
            )
    left.set_yticks(list(places), [label(row) for row in runs])
    right.set_yticks(list(places), [])
    left.set(xlabel="points under APGD, L∞ 8/255", xlim=LIMITS["apgd"])
    right.set(xlabel="points of clean accuracy", xlim=LIMITS["clean"])
    for axes in (left, right):
        axes.set_ylim(-0.6, len(runs) - 0.3)
        axes.axvline(0, color=COLOURS["soft"], linewidth=0.9, zorder=0)
        axes.grid(visible=False, axis="y")
        axes.grid(visible=True, axis="x")
    title = "$N_B$ / $N_R$ / $N_O$ steps against three for all; bars: two paired standard errors over images, one seed"
    figure.suptitle(title, fontsize=10.5)
    return figure


def label(row: dict[str, str]) -> str:
    """Steps of boundary, robust and outlier examples, and passes."""
    who = {"": "for all", "svar": "by SVar", "random": "by chance"}[row["score"]]
    return f"{row['steps'].replace('/', ' / ')}  {who}\n{row['passes']} passes"


if __name__ == "__main__":
    main()
