"""Make the table and the picture of whose attack steps matter, from results/plane.csv and results/steps.

python benchmarks/steps_figure.py            # write them
python benchmarks/steps_figure.py --check    # only say whether they are up to date

The study's runs are those that APGD judged on 4,000 images; their survivors, image by image, are in results/steps.
"""

from __future__ import annotations

import argparse
import functools
import math
import re
import statistics
import sys
from typing import TYPE_CHECKING, Any

from plane import ROOT, Result, description, read

from bullettrain.evaluation.comparison import difference
from bullettrain.evaluation.results import Store
from bullettrain.reporting.plotting import COLOURS, panels, printed
from bullettrain.run_folder import RunFolder

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RESULTS = ROOT / "results"
PAGE, PICTURE = RESULTS / "README.md", RESULTS / "fig-steps.png"
FIRST = "3/3/3"
"""What the others are compared with."""
IMAGES = "4000"
LIMITS = {"apgd": (-5.9, 1.2), "clean": (-1.2, 6.2)}
"""Points that the panels show."""
HEAD = ["steps", "chosen by", "seeds", "passes", "clean %", "PGD-20 %", "APGD %", "APGD, points", "clean, points"]
MARK = re.compile(r"(<!-- steps -->\n).*?(<!-- /steps -->)", re.DOTALL)


def study() -> dict[str, Result]:
    """The settings by name, such as "3/1/1 by chance", the most robust first."""
    found = [result for result in read() if all(run["apgd_images"] == IMAGES for run in result.runs)]
    found.sort(key=lambda result: -(result.mean("apgd") or 0.0))
    return {result.setting["steps"] + (" by chance" if by(result) == "chance" else ""): result for result in found}


def by(result: Result) -> str:
    """Who decides which examples get which steps."""
    return {"": "all alike", "svar": "SVar", "chance": "chance"}[result.setting["score"]]


def folder(run: dict[str, str]) -> str:
    """Where a run's survivors are: 3-1-1, 3-1-1-chance, 3-1-1-seed-1 and so on."""
    chance = "-chance" if run["score"] == "chance" else ""
    return run["steps"].replace("/", "-") + chance + (f"-seed-{run['seed']}" if run["seed"] != "0" else "")


@functools.cache
def judged(name: str, attack: str) -> dict[str, Any]:
    """Which images survive in a folder: of APGD as evaluated afterwards, of the rest as the run itself said."""
    if attack == "apgd":
        (entry,) = Store(RESULTS / "steps" / name).entries
        result = next(result for result in entry.results if result.name == attack)
        about = {"fingerprint": entry.fingerprint, "among": entry.among}
        return {"accuracy": result.accuracy, "examples": result.examples, "survived": result.survived, **about}
    records = RunFolder(RESULTS / "steps" / name).records()
    return next(r for r in records if r.get("weights") == "averaged" and r.get("attack") == attack)


def accuracies(result: Result, attack: str) -> list[float]:
    """In percent, by seed."""
    return [100 * judged(folder(run), attack)["accuracy"] for run in result.runs]


def spread(found: dict[str, Result], attack: str) -> float:
    """Standard deviation from seed to seed, one for all settings: two or three seeds alone tell too little."""
    seeds = [accuracies(result, attack) for result in found.values() if len(result.runs) > 1]
    return math.sqrt(sum(statistics.variance(s) * (len(s) - 1) for s in seeds) / sum(len(s) - 1 for s in seeds))


def compared(found: dict[str, Result], one: str, other: str, attack: str) -> tuple[float, float]:
    """Points by which one is above the other, and the standard error: of seeds, or over images where one has one."""
    sides = [found[one], found[other]]
    images = difference(*([judged(folder(run), attack) for run in side.runs] for side in sides))
    assert images.paired
    error = 100 * images.error
    if all(len(side.runs) > 1 for side in sides):
        error = spread(found, attack) * math.sqrt(sum(1 / len(side.runs) for side in sides))
    return 100 * images.value, error


def rounded(value: float, sign: str = "") -> str:
    """Halves away from zero, which 4,000 images have many of."""
    return f"{value + math.copysign(1e-9, value):{sign}.2f}".replace("-", "−")


def table(found: dict[str, Result]) -> str:
    """A line for each setting."""
    lines = [HEAD, ["---"] * len(HEAD)]
    for name, result in found.items():
        means = [rounded(statistics.fmean(accuracies(result, attack))) for attack in ("clean", "pgd20", "apgd")]
        apart = [compared(found, name, FIRST, attack) for attack in ("apgd", "clean")] if name != FIRST else []
        points = [f"{rounded(value, '+')} ± {rounded(error)}" for value, error in apart] or ["", ""]
        passes = f"{result.mean('passes'):.2f}"
        lines.append([result.setting["steps"], by(result), str(len(result.runs)), passes, *means, *points])
    return "".join("| " + " | ".join(cells) + " |\n" for cells in lines)


def drawn(found: dict[str, Result]) -> Figure:
    """Differences from three steps for all: under APGD, and clean."""
    figure, both = panels(columns=2, width=2.3, height=2.3)
    places = range(len(found))[::-1]
    for place, (name, result) in zip(places, found.items(), strict=True):
        colour = COLOURS[{"all alike": "soft", "SVar": "accent", "chance": "boundary"}[by(result)]]
        for axes, attack in zip(both, LIMITS, strict=True):
            value, error = compared(found, name, FIRST, attack) if name != FIRST else (0.0, 0.0)
            low, high = LIMITS[attack]
            shown = min(max(value, low + 0.25), high - 0.25)  # far off: an arrow at the edge
            look: dict[str, Any] = {"color": colour, "markersize": 7, "capsize": 4, "elinewidth": 1.8, "mew": 1.8}
            look |= {"markerfacecolor": colour if len(result.runs) > 1 else "white"}
            far = shown != value
            axes.errorbar(shown, place, xerr=None if far else 2 * error, fmt="<" if far else "o", **look)
            text = f"{statistics.fmean(accuracies(result, attack)):.1f} %"
            where: dict[str, Any] = {"xytext": (0, 7), "textcoords": "offset points", "ha": "center"}
            axes.annotate(text, (shown, place), fontsize=9.5, color=COLOURS["ink"], **where)
    labels = []
    for result in found.values():
        who = {"all alike": "for all", "SVar": "by SVar", "chance": "by chance"}[by(result)]
        labels.append(f"{result.setting['steps'].replace('/', ' / ')}  {who}\n{result.mean('passes'):.1f} passes")
    both[0].set_yticks(list(places), labels)
    both[1].set_yticks(list(places), [])
    both[0].set_xlabel("points under APGD, L∞ 8/255")
    both[1].set_xlabel("points of clean accuracy")
    for axes, attack in zip(both, LIMITS, strict=True):
        axes.set(xlim=LIMITS[attack], ylim=(-0.6, len(found) - 0.3))
        axes.axvline(0, color=COLOURS["soft"], linewidth=0.9, zorder=0)
        axes.grid(visible=False, axis="y")
        axes.grid(visible=True, axis="x")
    figure.suptitle(
        "$N_B$ / $N_R$ / $N_O$ steps against three for all; bars: two standard errors\n"
        "filled: two or three seeds, error of the seeds; hollow: one seed, paired error over images",
        fontsize=10.5,
    )
    return figure


def main() -> None:
    """Write the table and the picture, or check them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only say whether they are up to date")
    check = parser.parse_args().check
    found = study()
    lines, old = table(found), PAGE.read_text(encoding="utf-8")
    new = MARK.sub(lambda mark: mark[1] + lines + mark[2], old)
    about = description(lines)
    if not check:
        PAGE.write_text(new, encoding="utf-8")
        with printed():
            drawn(found).savefig(PICTURE, dpi=200, facecolor="white", metadata={"Software": None, "Description": about})
    elif old != new or about.encode() not in PICTURE.read_bytes():
        sys.exit(f"results/{PAGE.name} or {PICTURE.name} is not what was recorded; run this without --check")


if __name__ == "__main__":
    main()
