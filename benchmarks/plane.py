"""Make the pictures and tables of methods in the README and the documentation from results/plane.csv.

python benchmarks/plane.py            # write them
python benchmarks/plane.py --check    # only say whether they are up to date

Every line of the file is one run. Runs that differ in nothing but the seed, or in nothing at all, are one result: their
mean and, from three seeds on, its standard error, by one standard deviation from run to run for all such results.

The README shows methods with three seeds, which are judged by APGD at the same ε: accuracy over passes. The mark above
its table names those that the table has. The documentation shows accuracy under AutoAttack over minutes, by the one
result of each method that was timed and has met AutoAttack, then one whose command is on record, then that of most
seeds, then of most test images. Minutes are those of the training steps: most lines know no others. Its tables have all
results, by ε; those without a command, which others reported, have one of their own:

    <!-- plane: PGD-AT, 3 steps | TRADES, 10 steps -->
    <!-- plane: 8/255 -->
    <!-- plane: 0.031 -->
    <!-- plane: reported -->

The pictures need matplotlib (the extra ``docs``); they keep a description of what they show, which
``--check`` compares.
"""

import argparse
import csv
import hashlib
import itertools
import json
import math
import re
import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from row_names import folder_name

ROOT = Path(__file__).resolve().parent.parent
CSV = ROOT / "results" / "plane.csv"
STEPS = ROOT / "results" / "steps"
"""What is kept of the runs that benchmarks/rows.py added."""
PAGES = (ROOT / "README.md", ROOT / "docs" / "index.md", ROOT / "docs" / "accuracy.md")
IMAGES = ROOT / "docs" / "images"
AXES = {
    "seeds": ("passes", "apgd", "passes an example (logarithmic)", "accuracy under APGD, L∞ 8/255, %"),
    "plane": ("minutes", "autoattack", "training steps, minutes (logarithmic)", "accuracy under AutoAttack, %"),
}
"""The pictures: cost, accuracy, and what the axes are called."""

COLUMNS = [
    "method",
    "objective",
    "allocation",
    "score",
    "steps",
    "eps",
    "k",
    "batch_size",
    "seed",
    "epochs",
    "weights",
    "clean",
    "pgd20",
    "apgd",
    "apgd_images",
    "autoattack",
    "autoattack_images",
    "passes",
    "minutes",
    "minutes_compile",
    "device",
    "commit",
    "command",
]
SAME_SETTING = ("method", "objective", "allocation", "score", "steps", "eps", "k", "batch_size", "epochs", "weights")
"""Columns in which the runs of one result agree."""
MOST_POINTS_BELOW = 8.0
"""A method so many points below the best is drawn at the lower edge, so that the others can be told apart."""

HEAD = ["method", "passes", "clean %", "PGD-20 %", "APGD %"]
LONG_HEAD = ["method", "passes", "minutes", "clean %", "PGD-20 %", "APGD %", "AutoAttack %", "measured on"]
MARK = re.compile(r"(<!-- plane: (.*?) -->\n).*?\n?(<!-- /plane -->)", re.DOTALL)


@dataclass(frozen=True)
class Result:
    """The runs of one setting: the mean of every figure that all of them have, and its standard error."""

    setting: dict[str, str]
    runs: list[dict[str, str]]
    deviation: dict[str, float] = field(default_factory=dict)
    """Standard deviation of an accuracy from run to run, pooled over all results with three seeds."""

    def mean(self, figure: str) -> float | None:
        """The mean over the runs that have the figure; None where none has."""
        values = self.values(figure)
        return statistics.fmean(values) if values else None

    def error(self, figure: str) -> float | None:
        """Standard error of the mean over runs; None for fewer than three."""
        values = self.values(figure)
        return self.deviation[figure] / math.sqrt(len(values)) if len(values) > 2 and figure in self.deviation else None

    def images(self, attack: str = "autoattack") -> int:
        """Test images that the attack was run on, at least; 0 where it was not run."""
        return min((int(run[f"{attack}_images"] or 0) for run in self.runs if run[attack]), default=0)

    def seeds(self, attack: str = "autoattack") -> int:
        """Different seeds of the runs under the attack, or of all runs where none was."""
        attacked = [run for run in self.runs if run[attack]]
        return len({run["seed"] for run in attacked or self.runs})

    def rank(self) -> tuple[bool, bool, int, int, float, bool]:
        """Larger for the result that a method is shown by."""
        drawn, averaged = bool(self.images() and self.values("minutes")), self.setting["weights"] == "averaged"
        return drawn, self.group != "reported", self.seeds(), self.images(), float(self.setting["eps"] or 0), averaged

    @property
    def group(self) -> str:
        """The table of the documentation that has the result."""
        return eps(self.setting["eps"]) if all(run["command"] for run in self.runs) else "reported"

    def values(self, figure: str) -> list[float]:
        """The figure of each run that has it."""
        if figure == "minutes":
            return [step_minutes(run) for run in self.runs if run["minutes"]]
        return [float(run[figure]) for run in self.runs if run[figure]]


def folder(run: dict[str, str]) -> str:
    """Name of the folder in results/steps; that of a row which was run again ends with the commit."""
    name = folder_name(run["command"])
    again = f"{name}-{run['commit']}"
    return again if (STEPS / again).exists() else name


def step_minutes(run: dict[str, str]) -> float:
    """Return the minutes of a run's training steps. Those of the whole command are in lines with a compile time."""
    if not run["minutes_compile"]:
        return float(run["minutes"])
    records = (STEPS / folder(run) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return float(json.loads(records[-1])["seconds"]) / 60


def read(file: Path = CSV) -> list[Result]:
    """One result for every setting in the file."""
    with file.open(encoding="utf-8", newline="") as lines:
        reader = csv.DictReader(lines)
        if reader.fieldnames != COLUMNS:
            sys.exit(f"{file.name}: its columns have to be {','.join(COLUMNS)}")
        runs = list(reader)
    found: dict[tuple[str, ...], list[dict[str, str]]] = {}
    for run in runs:
        found.setdefault(tuple(run[name] for name in SAME_SETTING), []).append(run)
    results = [Result(dict(zip(SAME_SETTING, key, strict=True)), some) for key, some in found.items()]
    several = [result for result in results if max(map(result.seeds, ("apgd", "autoattack"))) > 2]
    for figure in ("clean", "pgd20", "apgd", "autoattack"):
        values = [result.values(figure) for result in several if len(result.values(figure)) > 2]
        free = sum(len(some) - 1 for some in values)
        whole = sum(statistics.variance(some) * (len(some) - 1) for some in values)
        for result in several:
            result.deviation[figure] = math.sqrt(whole / free) if free else 0.0
    return results


def shown(results: list[Result]) -> dict[str, Result]:
    """The result that each method is shown by."""
    best: dict[str, Result] = {}
    for result in results:
        method = result.setting["method"]
        if method not in best or result.rank() > best[method].rank():
            best[method] = result
    return best


def said(result: Result, figure: str, digits: int = 1) -> str:
    """A figure as the tables write it: with its error, and a digit more, where there are enough seeds."""
    mean, error = result.mean(figure), result.error(figure)
    if mean is None:
        return "–"
    mean += 1e-9  # halves upwards
    return f"{mean:.{digits}f}" if error is None else f"{mean:.{digits + 1}f} ± {error:.{digits + 1}f}"


def measured_on(result: Result, *attacks: str) -> str:
    """Seeds and test images of the attacks, where they were run, in words."""
    parts: dict[str, list[str]] = {}
    for attack in (name for name in attacks if result.images(name)):
        seeds = result.seeds(attack)
        where = f"{seeds} seed{'s' if seeds > 1 else ''}, {result.images(attack):,} images"
        parts.setdefault(where, []).append({"apgd": "APGD", "autoattack": "AutoAttack"}[attack])
    if len(parts) > 1:
        return "; ".join(f"{' and '.join(names)}: {where}" for where, names in parts.items())
    return next(iter(parts), f"{result.seeds()} seed{'s' if result.seeds() > 1 else ''}")


def several_seeds(results: list[Result]) -> dict[str, Result]:
    """The results under APGD with three seeds or more, by method."""
    return {
        result.setting["method"]: result for result in results if result.seeds("apgd") > 2 and result.images("apgd")
    }


def table(results: list[Result], names: list[str]) -> str:
    """The named methods, each with three seeds."""
    found = several_seeds(results)
    if missing := [name for name in names if name not in found]:
        sys.exit(f"{CSV.name} has no method {missing[0]!r} with three seeds; it has: {', '.join(found)}")
    figures = ("clean", "pgd20", "apgd")
    lines = [[name, f"{found[name].mean('passes'):.1f}", *(said(found[name], f) for f in figures)] for name in names]
    return laid_out(HEAD, lines)


def long_table(results: list[Result]) -> str:
    """Results in a table, the most robust first: by APGD or AutoAttack, then, without these, by PGD-20.

    Weights are named if not all results have the same.
    """

    def rank(result: Result) -> tuple[float, float]:
        strong = [value for figure in ("apgd", "autoattack") if (value := result.mean(figure)) is not None]
        return (strong or [-1.0])[0], result.mean("pgd20") or 0.0

    lines = []
    several = len({result.setting["weights"] for result in results}) > 1
    for result in sorted(results, key=rank, reverse=True):
        figures = [said(result, figure) for figure in ("clean", "pgd20", "apgd", "autoattack")]
        passes, minutes = result.mean("passes"), result.mean("minutes")
        cost = ["–" if passes is None else f"{passes:.1f}", "–" if minutes is None else f"{minutes:.2f}"]
        where = measured_on(result, "apgd", "autoattack")
        where += f", {result.setting['weights']} weights" if several else ""
        lines.append([result.setting["method"], *cost, *figures, where])
    return laid_out(LONG_HEAD, lines)


def laid_out(head: list[str], lines: list[list[str]]) -> str:
    """A table in Markdown, numbers to the right."""
    rule = ["---:" if name.endswith("%") or name in ("passes", "minutes") else "---" for name in head]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, rule, *lines))


def eps(value: str) -> str:
    """ε as people write it."""
    if not value:
        return "–"
    whole = float(value) * 255
    return f"{whole:.0f}/255" if abs(whole - round(whole)) < 1e-3 else value


def points(results: list[Result], picture: str) -> list[dict[str, Any]]:
    """What a picture shows: recorded methods with known cost and accuracy, no controls; the most robust first."""
    cost_name, attack, *_ = AXES[picture]
    choice = several_seeds(results) if picture == "seeds" else shown(results)
    choice = {
        name: result
        for name, result in choice.items()
        if result.setting["score"] not in ("chance", "oracle") and result.group != "reported"
    }
    found = []
    for name, result in sorted(choice.items(), key=lambda item: -(item[1].mean(attack) or 0.0)):
        cost, accuracy, clean = (result.mean(figure) for figure in (cost_name, attack, "clean"))
        if cost is None or accuracy is None or clean is None:
            continue
        images, error = result.images(attack), result.error(attack)
        if error is None:  # of the test images, since there is one run
            error = 100 * math.sqrt(accuracy / 100 * (1 - accuracy / 100) / max(images, 1))
        about = {"name": name, "kind": kind(result), "solid": result.seeds(attack) > 2 or images >= 10_000}
        figures = {"cost": round(cost, 2), "accuracy": round(accuracy, 2), "error": round(error, 2)}
        found.append(about | figures | {"clean": round(clean, 1)})
    return found


def kind(result: Result) -> str:
    """What the picture's legend calls it."""
    if result.setting["allocation"] != "uniform":
        return "steps by example: BulletTrain (BT)"
    return "one step for all" if result.setting["steps"].startswith("1/") else "several steps for all"


def description(found: Any) -> str:
    """What a picture says of itself: a digest of what it shows."""
    return "sha256 of the points: " + hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()


MARKERS = {"several steps for all": "s", "steps by example: BulletTrain (BT)": "o", "one step for all": "^"}
INK = {
    "light": {"back": "#ffffff", "ink": "#1f2937", "soft": "#6b7280", "grid": "#e5e7eb"},
    "dark": {"back": "#161b22", "ink": "#e6edf3", "soft": "#9aa4af", "grid": "#2d333b"},
}
RAMPS = {"light": ["#7c2d12", "#ea580c", "#0891b2", "#1e3a8a"], "dark": ["#f97316", "#fbbf24", "#22d3ee", "#93a8ff"]}


def draw(found: list[dict[str, Any]], picture: str, theme: str, file: Path) -> None:
    """Accuracy over cost, coloured by clean accuracy."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot as plt
    from matplotlib.colors import LinearSegmentedColormap, Normalize
    from matplotlib.lines import Line2D

    ink, best = INK[theme], max(point["accuracy"] for point in found)
    near = [point for point in found if point["accuracy"] > best - MOST_POINTS_BELOW]
    far = [point for point in found if point not in near]
    cleans = [point["clean"] for point in near]
    colours = LinearSegmentedColormap.from_list("clean", RAMPS[theme])
    scale = Normalize(math.floor(min(cleans)), math.ceil(max(cleans)))
    look: dict[Any, Any] = {
        "svg.fonttype": "path",
        "svg.hashsalt": "plane",
        "font.family": "DejaVu Sans",
        "font.size": 10,
    }
    look |= {f"{part}.color": ink["ink"] for part in ("text", "xtick", "ytick")}
    look |= {"axes.labelcolor": ink["ink"], "axes.edgecolor": ink["soft"]}
    with mpl.rc_context(look):
        figure, axes = plt.subplots(figsize=(9.2, 5.6), layout="constrained")
        figure.set_facecolor(ink["back"])
        axes.set_facecolor(ink["back"])
        floor = min(point["accuracy"] - point["error"] for point in near) - (1.6 if far else 0.8)
        labels = []
        for point in found:
            colour = colours(scale(point["clean"]))
            height = floor + 0.25 if point in far else point["accuracy"]
            face = ink["back"] if point in near and not point["solid"] else colour
            marker = "v" if point in far else MARKERS[point["kind"]]
            if point in near:
                ends = [height - point["error"], height + point["error"]]
                axes.plot([point["cost"]] * 2, ends, color=colour, linewidth=3, alpha=0.3, zorder=2)
            axes.plot(
                point["cost"], height, color=colour, marker=marker, markersize=9, markerfacecolor=face,
                markeredgewidth=2, zorder=3,
            )  # fmt: skip
            name = point["name"].replace("BulletTrain", "BT")
            text = f"{name}: {point['accuracy']:.1f} %" if point in far else name
            labels.append(axes.text(point["cost"], height, text, fontsize=9.5, color=ink["ink"], zorder=4))
        axes.set_xscale("log")
        ticks = [0.5, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128, 256, 512]
        low, high = min(point["cost"] for point in found) / 1.25, max(point["cost"] for point in found) * 1.35
        axes.set_xlim(low, high)
        axes.set_xticks([tick for tick in ticks if low <= tick <= high])
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.minorticks_off()
        axes.set_ylim(floor, max(point["accuracy"] + point["error"] for point in near) + 0.6)
        axes.set_xlabel(AXES[picture][2])
        axes.set_ylabel(AXES[picture][3])
        axes.grid(color=ink["grid"], linewidth=0.8)
        axes.set_axisbelow(True)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        bar = figure.colorbar(mpl.cm.ScalarMappable(scale, colours), ax=axes, pad=0.015, aspect=32)
        bar.set_label("clean accuracy, %")
        bar.outline.set_visible(False)
        legend(axes, found, far, ink, Line2D)
        place(axes, labels, ink["soft"])
        file.parent.mkdir(exist_ok=True)
        figure.savefig(file, format="svg", metadata={"Date": None, "Description": description(found)})
        plt.close(figure)


def place(axes: Any, labels: list[Any], colour: str) -> None:
    """Move each label, which starts at its point, near it to where it covers least, and tie it to the point."""
    figure = axes.figure
    figure.draw_without_rendering()  # computes the layout
    figure.set_layout_engine("none")
    scale, to_data = figure.dpi / 72, axes.transData.inverted()
    # Marks and bars, as boxes (left, bottom, right, top) in pixels.
    taken = []
    for line in axes.lines:
        xy, reach = axes.transData.transform(line.get_xydata()), scale * (7 if line.get_marker() != "None" else 2.5)
        taken.append((*(xy.min(axis=0) - reach), *(xy.max(axis=0) + reach)))
    frame = axes.bbox.extents

    def cost(box: tuple[float, ...], point: tuple[float, float], away: float) -> float:
        covered = sum(overlap(box, other) for other in taken)
        outside = (box[2] - box[0]) * (box[3] - box[1]) - overlap(box, frame)
        middle = ((box[0] + box[2]) / 2, (box[1] + box[3]) / 2)
        way = [[p + part / 12 * (m - p) for p, m in zip(point, middle, strict=True)] for part in range(5, 12)]
        crossed = sum(x0 < x < x1 and y0 < y < y1 for x, y in way for x0, y0, x1, y1 in taken)
        return float(covered + 9 * outside + 40 * crossed + 4 * away)

    for label in labels:
        extent, point = label.get_window_extent(), axes.transData.transform(label.get_position())
        width, height = extent.width + 6 * scale, extent.height + 4 * scale
        spots = []
        for away, right, up in itertools.product((8, 16, 28, 44, 64), (1, -1, 0.5, -0.5, 0), (0, 1, -1)):
            x = point[0] + right * (width / 2 + (away * scale if abs(right) == 1 else 0))
            y = point[1] + up * (height / 2 + away * scale)
            box = (x - width / 2, y - height / 2, x + width / 2, y + height / 2)
            spots.append((cost(box, tuple(point), away + 2 * abs(up) + (right < 0)), box, away))
        _, box, away = min(spots)
        taken.append(box)
        middle = to_data.transform(((box[0] + box[2]) / 2, (box[1] + box[3]) / 2))
        if away > 8:
            near = [min(max(p, low), high) for p, low, high in zip(point, box[:2], box[2:], strict=True)]
            (x0, y0), (x1, y1) = label.get_position(), to_data.transform(near)
            axes.plot([x0, x1], [y0, y1], color=colour, linewidth=0.7, zorder=2.5)
        label.set(position=middle, ha="center", va="center")


def overlap(one: Any, other: Any) -> float:
    """Area that two boxes (left, bottom, right, top) share."""
    width = min(one[2], other[2]) - max(one[0], other[0])
    height = min(one[3], other[3]) - max(one[1], other[1])
    return float(max(width, 0) * max(height, 0))


def legend(axes: Any, found: list[dict[str, Any]], far: list[dict[str, Any]], ink: dict[str, str], line: Any) -> None:
    """What markers mean, above the picture."""
    look: dict[str, Any] = {"linestyle": "none", "color": ink["soft"], "markersize": 8, "markeredgewidth": 2}
    kinds = {point["kind"] for point in found}
    handles = [line([], [], marker=marker, label=name, **look) for name, marker in MARKERS.items() if name in kinds]
    if not all(point["solid"] for point in found):
        look |= {"markerfacecolor": ink["back"]}
        handles.append(line([], [], marker="o", label="one seed, fewer than 10,000 test images", **look))
        del look["markerfacecolor"]
    if far:
        handles.append(line([], [], marker="v", label="far below", **look))
    axes.legend(handles=handles, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, frameon=False,
                fontsize=9, handletextpad=0.2, columnspacing=1.2)  # fmt: skip


def renewed(text: str, results: list[Result]) -> str:
    """A page with its tables of methods as the file has them."""

    def fill(mark: re.Match[str]) -> str:
        names = [name.strip() for name in mark[2].split("|")]
        group = [result for result in results if result.group == mark[2]]
        lines = long_table(group) if group else table(results, names)
        return f"{mark[1]}{lines}\n{mark[3]}"

    return MARK.sub(fill, text)


def main() -> None:
    """Write the pages and the picture, or check them."""
    parser = argparse.ArgumentParser(description="Make the picture and the tables of methods from results/plane.csv")
    parser.add_argument("--check", action="store_true", help="only say whether they are up to date")
    check = parser.parse_args().check
    results = read()
    for page in PAGES:
        old = page.read_text(encoding="utf-8")
        new = renewed(old, results)
        if not check:
            page.write_text(new, encoding="utf-8")
        elif old != new:
            sys.exit(f"{page.name} is not what {CSV.name} says; run benchmarks/plane.py without --check")
    for picture, theme in itertools.product(AXES, INK):
        found, file = points(results, picture), IMAGES / f"{picture}-{theme}.svg"
        if not check:
            draw(found, picture, theme, file)
        elif description(found) not in file.read_text(encoding="utf-8"):
            sys.exit(f"{file.name} does not show what {CSV.name} says; run benchmarks/plane.py without --check")


if __name__ == "__main__":
    main()
