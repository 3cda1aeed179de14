"""What a report shows of a run, a comparison or an evaluation: cards, tables, figures and sentences, as text."""

from __future__ import annotations

import base64
import io
import math
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bullettrain.config.sections import Config
from bullettrain.config.settings import ConfigError
from bullettrain.evaluation.results import Entry
from bullettrain.extras import extra
from bullettrain.formatting import (
    DASH,
    MOMENT,
    attack_name,
    captures,
    duration,
    error_in_words,
    in_all,
    listed,
    method_name,
    number,
    percent,
    plural,
    points,
    settings,
    short,
    times,
    too_close,
)
from bullettrain.mining import Category
from bullettrain.reporting import figures
from bullettrain.reporting.attack_rows import AttackRow, difference, mean_in_words, rows
from bullettrain.reporting.figures import Plate
from bullettrain.reporting.paper import paper_boundary
from bullettrain.reporting.plotting import last
from bullettrain.reporting.run import Comparison, Part, Run
from bullettrain.run_folder import SHARES, Samples, preferred

NAN = math.nan
MOST_EPOCHS = 400
"""The longest table of epochs that is written out."""
PER_CATEGORY = 8
"""Example images."""
LARGEST = 64
"""Pixels a side: larger images are shrunk, to keep the page small."""
AMPLIFIED = (20, 10, 5, 2, 1)


@dataclass(frozen=True)
class Card:
    """A figure of the headline: its value, what it is, a line of small print, and what it was computed from."""

    value: str
    name: str
    note: str
    formula: str = ""


@dataclass(frozen=True)
class Share:
    """One category's part of the average batch."""

    name: str
    percent: str
    width: str
    note: str


@dataclass(frozen=True)
class Grid:
    """A table as text."""

    head: list[str]
    rows: list[list[str]]
    note: str = ""


def table(columns: Mapping[str, Callable[[Any], str]], lines: Iterable[Any], note: str = "") -> Grid:
    """A grid of columns by heading; those in which no line has anything are left out."""
    cells = [[text(line) for text in columns.values()] for line in lines]
    used = [i for i in range(len(columns)) if any(row[i] != DASH for row in cells)]
    return Grid([list(columns)[i] for i in used], [[row[i] for i in used] for row in cells], note)


def present(*plates: Plate | None) -> list[Plate]:
    """Those figures that there is something to draw in."""
    return [plate for plate in plates if plate is not None]


# --------------------------------------------------------------------------------------- what it is about


def title(folder: Path) -> str:
    """What the page is called: the folder that `--out` named; a part of a comparison with that folder's name."""
    path = folder.resolve()
    return f"{path.parent.name}/{path.name}" if path.name in ("bullettrain", "baseline") else path.name


def facts(run: Run) -> list[str]:
    """The run in a few words: recipe, method, threat, network, data, device."""
    recipe, method = str(run.config.get("recipe") or ""), method_name(run.section("method"))
    found = [f"recipe {recipe}" if recipe not in ("", title(run.folder)) else ""]
    found += [f"{method} with BulletTrain" if method and not run.plain else method, run.threat.replace(" ", ", ε = ")]
    for section in ("network", "data"):
        words = [value for value in run.section(section).values() if isinstance(value, str)]
        found.append(str(run.section(section).get("name") or (words[0] if words else "")))
    return [fact for fact in (*found, str(run.section("environment").get("device") or "")) if fact]


def status(run: Run) -> dict[str, str]:
    """Whether the run came to its end, and how far it got where it did not."""
    if run.ended == "finished":
        return {"kind": "done", "word": "finished", "text": ""}
    if run.ended is not None:
        return {"kind": "open", "word": "ended early", "text": f"It ended at {_reached(run)}: {run.ended}."}
    text = f"The log has no end: the run goes on or was killed. It got as far as {_reached(run)}."
    return {"kind": "open", "word": "not finished", "text": text}


def _reached(run: Run) -> str:
    """How far the log goes: ``epoch 12 of 30, step 4 680``."""
    log = run.progress
    if not len(log["step"]):
        return "its start: nothing is logged yet"
    done = max([*run.epochs["epoch"][-1:], *log["epoch"][-1:]])
    planned = run.section("training").get("epochs", run.section("schedule").get("epochs"))
    of = f" of {planned}" if isinstance(planned, int | float) else ""
    return f"epoch {short(round(float(done), 1))}{of}, step {number(float(log['step'][-1]), 0)}"


def alerts(run: Run, prefix: str = "") -> list[str]:
    """What a reader must not miss: the run's own warnings and notes, losses that were no numbers, unreadable files."""
    grouped: dict[str, list[float]] = {}
    for step, message in run.warnings:
        grouped.setdefault(message, []).append(step)
    found = []
    for message, at in grouped.items():
        where = f"Step {number(at[0], 0)}: " if math.isfinite(at[0]) else ""
        found.append(f"{where}{message}" + (f" ({len(at)} times)" if len(at) > 1 else ""))
    lost = np.flatnonzero(~np.isfinite(run.progress["loss"]))
    if len(lost):
        entries, first = len(run.progress["loss"]), number(float(run.progress["step"][lost[0]]), 0)
        where = f"{len(lost)} of {entries} log entries, first at step {first}"
        found.append(f"The loss was not a finite number in {where}.")
    if prefix and run.ended != "finished":
        found.append("it did not come to its end, so the comparison says little.")
    return [prefix + alert for alert in (*found, *run.notes)]


# -------------------------------------------------------------------------------------------- its figures


def outcome(run: Run, comparison: Comparison | None, entries: Sequence[Entry]) -> str:
    """The outcome in one or two sentences; empty where nothing was evaluated."""
    if comparison is not None:
        mine, plain = _pair(comparison)
        text = f"Trained in {duration(mine.get('seconds', NAN))} with BulletTrain"
        text += f" and in {duration(plain.get('seconds', NAN))} without"
        clock = comparison.speedup.get("wall_clock", NAN)
        text += f": {times(clock)} by the clock." if math.isfinite(clock) else "."
        parts = []
        for attack in comparison.attacks:
            gap, error = _gap(comparison, attack), comparison.errors.get(attack, NAN)
            if math.isfinite(gap):
                parts.append(f"{points(gap, error=error)} {_against(run, attack)}{too_close(gap, error)}")
        text += f" Accuracy changed by {listed(parts)}." if parts else ""
    else:
        reached = {e.attack: e.accuracy for e in run.evaluations if e.weights == chosen_weights(run, None)}
        says = listed([f"{percent(accuracy)} {_against(run, attack)}" for attack, accuracy in reached.items()])
        text = f"{says}, after {duration(run.seconds)} of training." if says else ""
    return text + _strongest(run, entries)


def _strongest(run: Run, entries: Sequence[Entry]) -> str:
    """A sentence where an attack left less of some weights than that which training ended with.

    Of the same threat, and on no fewer images.
    """
    method = run.section("method")
    own = {evaluation.weights: evaluation for evaluation in run.evaluations if evaluation.attack != "clean"}
    found = [
        (result.accuracy, attack_name(result.name), entry.weights)
        for entry in entries
        if (before := own.get(entry.weights)) is not None
        for result in entry.results
        if result.role == "attack"
        and result.threat == (method.get("norm"), method.get("eps"))
        and result.examples >= before.examples
        and result.accuracy < before.accuracy
    ]
    left, name, weights = min(found, default=(NAN, "", ""))
    return f" {name} ({run.threat}) leaves {percent(left)} ({weights} weights)." if found else ""


def _pair(comparison: Comparison) -> tuple[dict[str, float], dict[str, float]]:
    """The comparison's figures: BulletTrain's, the baseline's."""
    return comparison.rows.get("bullettrain", {}), comparison.rows.get("baseline", {})


def _gap(comparison: Comparison, attack: str) -> float:
    mine, plain = _pair(comparison)
    return mine.get(attack, NAN) - plain.get(attack, NAN)


def _against(run: Run, attack: str) -> str:
    return {"clean": "on clean images", "views": "on AugMix views"}.get(attack, f"against {run.attack_name(attack)}")


def chosen_weights(run: Run, comparison: Comparison | None) -> str:
    """The weights that the headline speaks of: the comparison's, else the best where they were kept, else the last."""
    own = preferred({evaluation.weights for evaluation in run.evaluations})
    return own if comparison is None else comparison.weights.get("bullettrain", own)


def headline(run: Run, comparison: Comparison | None) -> list[Card]:
    """Accuracy, time and throughput, each beside the baseline's where there is one."""
    weights = chosen_weights(run, comparison)
    robust = "views" if run.makes_views else "pgd20"
    attacks = dict.fromkeys(["clean", robust, *(e.attack for e in run.evaluations if e.weights == weights)])
    plain = _pair(comparison)[1] if comparison else {}
    cards = [_accuracy_card(run, weights, attack, plain.get(attack, NAN)) for attack in attacks]
    epochs = len(run.epochs["epoch"])
    beside = math.isfinite(plain.get("seconds", NAN))
    note = f"baseline {duration(plain['seconds'])}" if beside else f"{epochs} {plural('epoch', epochs)}"
    note += captures(run.capture_seconds, "; compiling and capturing: {} more")
    cards.append(Card(duration(run.seconds), "Training time" if run.ended else "Training time so far", note))
    rates = run.epochs["examples_per_second"]
    if np.isfinite(rates).any():
        cards.append(Card(number(float(np.nanmedian(rates)), 0), "Examples a second", "median over epochs"))
    return [card for card in cards if card is not None]


def _accuracy_card(run: Run, weights: str, attack: str, baseline: float) -> Card | None:
    """Test accuracy, or the latest on the validation set where the test set has not been used yet."""
    tested = run.accuracy(weights, attack)
    if math.isfinite(tested):
        beside = f"; baseline {percent(baseline)}, {points(tested - baseline)}" if math.isfinite(baseline) else ""
        return Card(percent(tested), f"{run.attack_name(attack)} accuracy", f"test set, {weights} weights{beside}")
    column = "validation_clean" if attack == "clean" else "validation_robust"
    latest = last(run.epochs[column])
    if attack not in ("clean", "pgd20", "views") or not math.isfinite(latest):
        return None
    name = run.attack_name("pgd10" if attack == "pgd20" else attack)
    return Card(percent(latest), f"{name} accuracy", "validation set, latest epoch")


def speedups(run: Run, comparison: Comparison | None) -> list[Card]:
    """The three speed-ups, each with what it means; never one for another."""
    measured = comparison.speedup if comparison else {}
    theoretical = measured.get("theoretical", run.totals["theoretical_speedup"])
    work, clock = measured.get("work", run.totals["work_speedup"]), measured.get("wall_clock", NAN)
    formula = "The paper’s formula, from the measured shares: steps of the plain algorithm against those taken, "
    formula += "plus one on either side for the update."
    if run.makes_views:
        formula = "The paper’s formula, from the measured share: an image and two views of it, against two views of "
        formula += "boundary examples alone."
    passes = "Every pass counted: forward, backward to the input and backward to the weights are one each."
    if run.ended is None:
        formula, passes = (f"{text} Known when the run ends." for text in (formula, passes))
    taken = run.average("work")
    counted = f"{number(taken, 1)} passes an example" if math.isfinite(taken) else ""
    if counted and math.isfinite(run.totals["plain_work"]):
        counted += f", {number(run.totals['plain_work'], 1)} without mining"
    cards = [
        Card(times(theoretical), "Theoretical", formula, _formula(run) if math.isfinite(theoretical) else ""),
        Card(times(work), "Work", passes, counted),
    ]
    if comparison is not None and math.isfinite(clock):
        wall = "Seconds of this training against seconds of the same recipe without mining, on the same device."
        wall += " Below 1×, mining cost more time than it saved." if clock < 1 else ""
        cards.append(Card(times(clock), "Wall-clock", f"{wall} {in_all(*_pair(comparison))}".strip()))
    return cards


def _formula(run: Run) -> str:
    """The paper's formula with this run's own numbers."""
    share = {name: run.average(name) for name in SHARES}
    if len(run.budget) != len(SHARES) or not all(math.isfinite(value) for value in share.values()):
        return ""
    if run.makes_views:
        return f"3 / (1 + 2·{share['boundary']:.3f})"
    terms = [f"{share[name]:.3f}·{run.budget[name]}" for name in ("boundary", "robust", "outlier") if run.budget[name]]
    return f"({max(run.budget.values())} + 1) / ({' + '.join([*terms, '1'])})"


def shares(run: Run) -> list[Share]:
    """Average shares of the three categories; empty where nothing was mined."""
    found = {name: run.average(name) for name in SHARES}
    if run.plain or not all(math.isfinite(value) and value >= 0 for value in found.values()):
        return []
    notes = {name: f"{count} {plural('step', count)} each" for name, count in run.budget.items()}
    if run.makes_views:
        more = "more " if run.seen_as == "as views" else ""
        notes = {name: f"two {more}views each" if count else f"no {more}views" for name, count in run.budget.items()}
    paper = paper_boundary(str(run.config.get("recipe")))
    if paper is not None:
        notes["boundary"] = f"{notes.get('boundary', '')}; {percent(paper, 0)} in the paper"
    return [Share(name, percent(value, 0), f"{100 * value:.2f}", notes.get(name, "")) for name, value in found.items()]


def evaluations(run: Run) -> Grid:
    """All test accuracies: a row for each set of weights, a column for each attack."""
    attacks = list(dict.fromkeys(evaluation.attack for evaluation in run.evaluations))
    weights = list(dict.fromkeys(evaluation.weights for evaluation in run.evaluations))
    lines = [[name, *(percent(run.accuracy(name, attack), 2) for attack in attacks)] for name in weights]
    sizes = {evaluation.examples for evaluation in run.evaluations if math.isfinite(evaluation.examples)}
    note = f", on {number(sizes.pop(), 0)} test examples" if len(sizes) == 1 else ""
    for precision in sorted({e.precision for e in run.evaluations} - {"float32"}):
        note += f"; attacks searched in {precision}, evaluated in float32"
    return Grid(["Weights", *map(run.attack_name, attacks)], lines, note)


def beside_baseline(comparison: Comparison) -> Grid:
    """Baseline, BulletTrain and the difference, in a row for each figure."""
    mine, plain = _pair(comparison)
    lines = []
    for attack in comparison.attacks:
        pair = [percent(row.get(attack, NAN), 2) for row in (plain, mine)]
        change = points(_gap(comparison, attack), 2, comparison.errors.get(attack, NAN))
        lines.append([f"{comparison.bullettrain.attack_name(attack)} accuracy", *pair, change])
    ratio = {key: times(comparison.speedup.get(key, NAN)) for key in ("wall_clock", "work")}
    lines.append(["Training time", *(duration(row.get("seconds", NAN)) for row in (plain, mine)), ratio["wall_clock"]])
    captured = [row.get("capture_seconds", 0.0) for row in (plain, mine)]
    if sum(captured) > MOMENT:
        lines.append(["Compiling and capturing", *map(duration, captured), DASH])
    lines.append(["Passes an example", *(number(row.get("work", NAN), 1) for row in (plain, mine)), ratio["work"]])
    kept = comparison.weights.get("bullettrain")
    note = f" Test accuracy of the {kept} weights." if kept else ""
    note += f" {error_in_words(comparison.paired)}." if comparison.errors else ""
    return Grid(["", "Baseline", "BulletTrain", "Change"], lines, note)


def epochs(run: Run) -> Grid:
    """The table of epochs, without the columns in which nothing was logged."""
    at = f" ({run.threat})" if run.threat else ""
    count = len(run.epochs["epoch"])
    first = max(0, count - MOST_EPOCHS)

    def column(name: str, words: Callable[[float], str]) -> Callable[[int], str]:
        return lambda i: words(float(run.epochs[name][i]))

    def whole(value: float) -> str:
        return number(value, 0)

    columns = {
        "Epoch": column("epoch", whole),
        "Time": column("seconds", duration),
        "Examples/s": column("examples_per_second", whole),
        "Loss": column("loss", lambda value: number(value, 3)),
        "LR": column("lr", short),
        f"{run.seen_as.capitalize()}, training": column("clean_accuracy", percent),
        "Corrupted, training" if run.makes_views else f"Attacked{at}, training": column("robust_accuracy", percent),
        "Clean, validation": column("validation_clean", percent),
        "Corrupted, validation" if run.makes_views else f"PGD-10{at}, validation": column("validation_robust", percent),
        f"PGD-10{at}, a few training images": column("probe_robust", percent),
        **{n.capitalize(): column(n, lambda value: percent(value, 0)) for n in SHARES if not run.plain},
        "Passes": column("work", lambda value: number(value, 1)),
    }
    return table(columns, range(first, count), f"The first {first} are in metrics.jsonl." if first else "")


def configuration(run: Run) -> list[tuple[str, list[tuple[str, str]]]]:
    """The configuration by section; what stands outside any section comes first, as ``run``."""
    sections = {name: value for name, value in run.config.items() if isinstance(value, Mapping)}
    loose = {name: value for name, value in run.config.items() if name not in sections}
    named = {**({"run": loose} if loose else {}), **sections}
    return [(str(name), list(settings(section))) for name, section in named.items() if name != "environment"]


# ---------------------------------------------------------------------------------------- how it was evaluated


@dataclass(frozen=True)
class EvaluationSection:
    """One network on one dataset, ready to be shown."""

    title: str
    note: str
    warnings: list[str]
    table: Grid
    plates: list[Plate]
    corruptions: Grid | None


def evaluation_section(entry: Entry, config: Mapping[str, Any] | None, index: int) -> EvaluationSection:
    """``entry`` as tables and figures; ``index`` keeps the names of figures apart."""
    attacks = [result for result in entry.results if result.role == "attack"]
    corrupted = [result for result in attacks if result.corruptions]
    name, device = f"evaluated{index}", str(entry.environment.get("device") or "")
    corruptions = None
    if corrupted:
        found = corrupted[0].corruptions["accuracy"].items()
        lines = [[n.replace("_", " "), *(f"{100 * v:.1f}" for v in (sum(vs) / len(vs), *vs))] for n, vs in found]
        heads = ["Corruption", "Mean", *(f"Severity {s}" for s in range(1, 6))]
        corruptions = Grid(heads, lines, f"In percent; {mean_in_words(corrupted[0])}.")
    note = difference(attacks)
    curves = (figures.eps_curve(entry, name), figures.steps_curve(entry, name))
    return EvaluationSection(
        f"{entry.weights} weights on {entry.data}" if entry.recipe else f"{entry.model} on {entry.data}",
        f"{number(entry.examples, 0)} test images" + (f", {device}" if device else ""),
        entry.warnings,
        _attack_table(rows(entry, attacks, _known_config(config)), f"{note}." if note else ""),
        present(*curves, figures.classes(entry, attacks, name)),
        corruptions,
    )


def _known_config(values: Mapping[str, Any] | None) -> Config | None:
    try:
        return None if values is None else Config.from_dict(values)
    except ConfigError:
        return None  # a run of another version: the paper's figures are left out


def _attack_table(found: Sequence[AttackRow], note: str) -> Grid:
    """A row for each attack, with what AutoAttack's parts leave, and the worst case where it is below all of them."""
    attacks = [row for row in found if row.kind == "attack"]
    parts: dict[int, list[str]] = {}
    for row in found:
        if row.kind == "attack":
            kept = parts.setdefault(id(row), [])
        elif row.kind == "part":
            kept.append(f"{row.name} {percent(row.accuracy)}")
    total = sum(row.seconds or 0.0 for row in attacks)
    lowest = {row.threat: min(r.accuracy for r in attacks if r.threat == row.threat) for row in attacks}
    worst = [row for row in found if row.kind == "worst" and row.accuracy < lowest.get(row.threat, 1.0)]

    def name(row: AttackRow) -> str:
        if row.kind == "worst":
            return "all of these, the worst of each image"
        return row.name + (f" ({', '.join(parts[id(row)])})" if parts[id(row)] else "")

    def interval(row: AttackRow) -> str:
        return f"{100 * row.interval[0]:.2f} – {100 * row.interval[1]:.2f}" if row.interval else DASH

    several = {row.precision for row in found} != {"float32"}
    columns: dict[str, Callable[[AttackRow], str]] = {
        "Attack": name,
        "Threat": lambda row: row.threat or "none",
        "Accuracy": lambda row: percent(row.accuracy, 2),
        "95 % interval": interval,
        "Precision": lambda row: row.precision if several else DASH,
        "Paper": lambda row: percent(row.paper, 2) if row.paper is not None else DASH,
        "Time": lambda row: duration(total if row.seconds is None else row.seconds),
    }
    return table(columns, [*attacks, *worst], note)


# ------------------------------------------------------------------------------------------ example images


@dataclass(frozen=True)
class Example:
    """One example: clean, attacked and what changed, as data URIs, and the names of its label and predictions."""

    images: list[str]
    names: list[str]
    right_before: bool
    right_after: bool


@dataclass(frozen=True)
class Strip:
    """The examples of one category, or of none in particular; ``untouched``: the attack changed none of them."""

    category: str
    examples: list[Example]
    untouched: bool


def amplification(samples: Samples) -> int:
    """The largest factor at which nearly every difference still fits between black and white around grey."""
    change = np.abs(samples.adversarial.astype(np.int16) - samples.clean.astype(np.int16))
    largest = float(np.quantile(change, 0.995)) if change.size else 0.0
    return next((factor for factor in AMPLIFIED if factor * largest <= 127), 1) if largest else 10


def strips(samples: Samples, factor: int, *, mined: bool) -> list[Strip]:
    """One strip for each category that has examples; where nothing was ``mined``, one without a name for all."""
    groups = {category.name.lower(): samples.category == category for category in Category}
    found = []
    for name, members in groups.items() if mined else [("", np.ones(len(samples.label), dtype=bool))]:
        chosen = np.flatnonzero(members)[:PER_CATEGORY]
        if len(chosen):
            untouched = bool((samples.clean[chosen] == samples.adversarial[chosen]).all())
            found.append(Strip(name, [_example(samples, int(index), factor) for index in chosen], untouched))
    return found


def _example(samples: Samples, index: int, factor: int) -> Example:
    clean, adversarial = samples.clean[index], samples.adversarial[index]
    change = adversarial.astype(np.int32) - clean.astype(np.int32)
    grey = np.clip(128 + factor * change, 0, 255).astype(np.uint8)
    columns = (samples.label, samples.clean_prediction, samples.adversarial_prediction)
    label, before, after = (int(column[index]) for column in columns)
    names = [samples.classes[k] if 0 <= k < len(samples.classes) else f"class {k}" for k in (label, before, after)]
    return Example([data_uri(image) for image in (clean, adversarial, grey)], names, before == label, after == label)


def data_uri(image: NDArray[np.uint8]) -> str:
    """A (C, H, W) image as a PNG data URI; neither one nor three channels: the first is shown."""
    with extra("a report"):
        from PIL import Image
    pixels = image.transpose(1, 2, 0) if len(image) == 3 else image[0]
    picture = Image.fromarray(np.ascontiguousarray(pixels))
    if max(picture.size) > LARGEST:
        picture.thumbnail((LARGEST, LARGEST))
    buffer = io.BytesIO()
    picture.save(buffer, format="PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")


def icon() -> str:
    """The page's icon: the three categories as bars, in the page's colours."""
    pixels = np.full((3, 16, 16), 255, dtype=np.uint8)
    for index, colour in enumerate(((194, 39, 111), (210, 133, 0), (47, 111, 208))):
        pixels[:, 10 - 4 * index :, 1 + 5 * index : 5 + 5 * index] = np.array(colour, dtype=np.uint8)[:, None, None]
    return data_uri(pixels)


# ---------------------------------------------------------------------------------------------- what next


def next_commands(run: Run, part: Part, comparison: Comparison | None) -> list[tuple[str, str]]:
    """What to do now: commands, and what each is for."""
    folder = str(run.folder)
    if run.ended != "finished":
        return [(_command(run, "train", folder, "--resume"), "Go on with this run.")]
    commands = [] if run.makes_views else evaluate_command(folder, part, _code(run))
    if comparison is None and not run.plain:
        commands.append((compare_command(run), "The same recipe without BulletTrain too, and both in one report."))
    return [
        *commands,
        (_command(run, "predict", folder, "image.png"), "Classify an image."),
        (
            _command(run, "export", folder, "--format", "onnx"),
            "A file for deployment; --format hub writes a model card too.",
        ),
    ]


def evaluate_command(model: str, part: Part, code: Sequence[str] = ()) -> list[tuple[str, str]]:
    """The command that runs AutoAttack; none where that has been done."""
    if any(result.attack["attack"] == "autoattack" for entry in part.entries for result in entry.results):
        return []
    command = shlex.join(["bullettrain", "evaluate", model, *code, "--attack", "autoattack"])
    return [(command, "AutoAttack, the figure by which robust networks are compared; PGD alone overestimates.")]


def compare_command(run: Run) -> str:
    """The command that trains the baseline too."""
    return _command(run, "train", str(run.folder), "--compare")


def _command(run: Run, name: str, folder: str, *words: str) -> str:
    return shlex.join(["bullettrain", name, folder, *_code(run), *words])


def _code(run: Run) -> list[str]:
    """The option by which a function of the user's is named again; a file alone does not have it called."""
    name = str(run.section("network").get("name") or "")
    return ["--network", name] if ":" in name else []
