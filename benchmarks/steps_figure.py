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

import torch
from plane import ROOT, Result, description, folder, read
from row_names import CHOSEN_BY as CONTROLS
from row_names import options_of
from torch import Tensor

from bullettrain.evaluation.comparison import joint_error
from bullettrain.evaluation.results import Store, unpack
from bullettrain.reporting.plotting import COLOURS, printed
from bullettrain.run_folder import RunFolder

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

RESULTS = ROOT / "results"
PAGE, PICTURE = RESULTS / "README.md", RESULTS / "fig-steps.png"
OBJECTIVES = ("PGD-AT", "TRADES")
REFERENCE = "3/3/3"
"""What the other settings of the same objective are compared with."""
IMAGES = "4000"
LIMITS = {"apgd": (-6.3, 2.1), "clean": (-1.7, 6.4)}
"""Points that the panels show."""
HEAD = ["steps", "chosen by", "runs", "passes", "clean %", "PGD-20 %", "APGD %", "APGD, points", "clean, points"]
CHOSEN_BY = {"": "all alike", "svar": "SVar", "chance": "chance", "oracle": "oracle"}
COLOUR_OF = {"": "soft", "svar": "accent", "chance": "boundary", "oracle": "robust"}
MARK = re.compile(r"(<!-- steps: (.*?) -->\n).*?(<!-- /steps -->)", re.DOTALL)


def study(objective: str = "PGD-AT") -> dict[str, Result]:
    """The settings of an objective by name, such as "3/1/1 by chance", the most robust first."""
    results = [result for result in read() if all(run["apgd_images"] == IMAGES for run in result.runs)]
    results = [result for result in results if result.setting["objective"] == objective]
    results = [result for result in results if set(options_of(result.runs[0]["command"])) <= set(CONTROLS)]
    results.sort(key=lambda result: -(result.mean("apgd") or 0.0))
    controls = {"chance": " by chance", "oracle": " by oracle"}
    return {r.setting["steps"] + controls.get(r.setting["score"], ""): r for r in results}


@functools.cache
def judged(name: str, attack: str) -> dict[str, Any]:
    """Which images survive in a folder: of APGD as evaluated afterwards, of the rest as the run itself said."""
    if attack == "apgd":
        entries = Store(RESULTS / "steps" / name).entries
        entry, result = next((e, result) for e in entries for result in e.results if result.name == attack)
        about = {"fingerprint": entry.fingerprint, "among": entry.among}
        return {"accuracy": result.accuracy, "examples": result.examples, "survived": result.survived, **about}
    records = RunFolder(RESULTS / "steps" / name).records()
    return next(r for r in records if r.get("weights") == "averaged" and r.get("attack") == attack)


def outcomes(result: Result, attack: str) -> Tensor:
    """In percent, (runs, images): 100 where an image survives."""
    figures = [judged(folder(run), attack) for run in result.runs]
    assert len({(figure["fingerprint"], str(figure.get("among"))) for figure in figures}) == 1
    return 100 * torch.stack([unpack(figure["survived"], figure["examples"]).double() for figure in figures])


def accuracies(result: Result, attack: str) -> list[float]:
    """In percent, by run."""
    return [100 * judged(folder(run), attack)["accuracy"] for run in result.runs]


@functools.cache
def spread(attack: str) -> tuple[float, float]:
    """Variance from run to run, of the accuracy and of one image, one for all settings: three runs tell little."""
    several = [result for name in OBJECTIVES for result in study(name).values() if len(result.runs) > 1]
    free = sum(len(result.runs) - 1 for result in several)
    whole = sum(statistics.variance(accuracies(result, attack)) * (len(result.runs) - 1) for result in several)
    images = sum(float(outcomes(result, attack).var(dim=0).mean()) * (len(result.runs) - 1) for result in several)
    return whole / free, images / free


def compared(found: dict[str, Result], one: str, other: str, attack: str) -> tuple[float, float]:
    """Points by which one is above the other, and the standard error over runs and images.

    Both settings meet the same images. What they have to do with one setting rather than the other is the variance of
    the mean differences over images, less what runs alone bring about.
    """
    sides = [outcomes(found[name], attack) for name in (one, other)]
    differences = sides[0].mean(dim=0) - sides[1].mean(dim=0)
    runs = sum(1 / len(side) for side in sides)
    of_accuracy, of_image = spread(attack)
    by_image = (float(differences.var()) - of_image * runs) / len(differences)
    return float(differences.mean()), joint_error(of_accuracy * runs, by_image)


def rounded(value: float, sign: str = "", digits: int = 2) -> str:
    """Halves away from zero, which 4,000 images have many of."""
    return f"{value + math.copysign(1e-9, value):{sign}.{digits}f}".replace("-", "−")


def table(found: dict[str, Result]) -> str:
    """A line for each setting."""
    lines = [HEAD, ["---"] * len(HEAD)]
    for name, result in found.items():
        means = [rounded(statistics.fmean(accuracies(result, attack))) for attack in ("clean", "pgd20", "apgd")]
        apart = [compared(found, name, REFERENCE, attack) for attack in ("apgd", "clean")] if name != REFERENCE else []
        points = [f"{rounded(value, '+')} ± {rounded(error)}" for value, error in apart] or ["", ""]
        passes = f"{result.mean('passes'):.2f}"
        chosen_by = CHOSEN_BY[result.setting["score"]]
        lines.append([result.setting["steps"], chosen_by, str(len(result.runs)), passes, *means, *points])
    return "".join("| " + " | ".join(cells) + " |\n" for cells in lines)


def drawn() -> Figure:
    """Differences from three steps for all, under APGD and clean: a row of panels for each objective."""
    studies = [study(objective) for objective in OBJECTIVES]
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.2, 11.3), layout="constrained")
    heights = [len(found) + 0.6 for found in studies]
    axes = list(figure.subplots(len(studies), 2, sharex="col", height_ratios=heights).flat)
    for row, (objective, found) in enumerate(zip(OBJECTIVES, studies, strict=True)):
        left, right = axes[2 * row : 2 * row + 2]
        places = range(len(found))[::-1]
        for place, name in zip(places, found, strict=True):
            for panel, attack in ((left, "apgd"), (right, "clean")):
                _mark(panel, found, name, attack, place)
        left.set_yticks(list(places), [_label(result) for result in found.values()])
        right.set_yticks(list(places), [])
        left.set_title(objective, loc="left", fontsize=11.5, fontweight="bold", color=COLOURS["ink"])
        for panel, attack in ((left, "apgd"), (right, "clean")):
            panel.set(xlim=LIMITS[attack], ylim=(-0.6, len(found) - 0.3))
            panel.axvline(0, color=COLOURS["soft"], linewidth=0.9, zorder=0)
            panel.grid(visible=False, axis="y")
            panel.grid(visible=True, axis="x")
    axes[-2].set_xlabel("points under APGD, L∞ 8/255")
    axes[-1].set_xlabel("points of clean accuracy")
    figure.suptitle(
        "$N_B$ / $N_R$ / $N_O$ steps against three for all\n"
        "bars: two standard errors over runs and images; filled: three runs or more, hollow: one",
        fontsize=10.5,
    )
    return figure


def _mark(axes: Axes, found: dict[str, Result], name: str, attack: str, place: int) -> None:
    """One difference with its error bar; an arrow at the edge where it is out of sight."""
    result = found[name]
    value, error = compared(found, name, REFERENCE, attack) if name != REFERENCE else (0.0, 0.0)
    low, high = LIMITS[attack]
    shown = min(max(value, low + 0.25), high - 0.25)
    marker = "o" if shown == value else "<" if value < shown else ">"
    colour = COLOURS[COLOUR_OF[result.setting["score"]]]
    look: dict[str, Any] = {"color": colour, "markersize": 7, "capsize": 4, "elinewidth": 1.8, "mew": 1.8}
    look |= {"markerfacecolor": colour if len(result.runs) > 1 else "white"}
    axes.errorbar(shown, place, xerr=2 * error if marker == "o" else None, fmt=marker, **look)
    text = f"{rounded(statistics.fmean(accuracies(result, attack)), digits=1)} %"
    beside = {"<": ((11, -3.5), "left"), ">": ((-11, -3.5), "right")}
    offset, side = beside.get(marker, ((0, 7), "center"))
    where: dict[str, Any] = {"xytext": offset, "textcoords": "offset points", "ha": side}
    axes.annotate(text, (shown, place), fontsize=9.5, color=COLOURS["ink"], **where)


def _label(result: Result) -> str:
    """The steps, who chooses, and the passes."""
    who = {"": "for all"}.get(result.setting["score"], f"by {CHOSEN_BY[result.setting['score']]}")
    return f"{result.setting['steps'].replace('/', ' / ')}  {who}\n{result.mean('passes'):.1f} passes"


def main() -> None:
    """Write the table and the picture, or check them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only say whether they are up to date")
    check = parser.parse_args().check
    old = PAGE.read_text(encoding="utf-8")
    tables = {objective: table(study(objective)) for objective in OBJECTIVES}
    new = MARK.sub(lambda mark: mark[1] + tables[mark[2]] + mark[3], old)
    about = description(list(tables.values()))
    if not check:
        PAGE.write_text(new, encoding="utf-8")
        with printed():
            drawn().savefig(PICTURE, dpi=130, facecolor="white", metadata={"Software": None, "Description": about})
    elif old != new or about.encode() not in PICTURE.read_bytes():
        sys.exit(f"results/{PAGE.name} or {PICTURE.name} is not what was recorded; run this without --check")


if __name__ == "__main__":
    main()
