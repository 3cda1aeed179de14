"""``report.html``: one self-contained page about a run, or about a run beside its baseline."""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bullettrain.evaluation.results import FILE as EVALUATION
from bullettrain.formatting import method_name, number, settings, short
from bullettrain.reporting import figures, images, summary
from bullettrain.reporting.evaluation_section import evaluation_section, strongest
from bullettrain.reporting.page import render
from bullettrain.reporting.run import Comparison, Contents, Part, Run, read_contents


def write_report(folder: Path) -> Path:
    """Write ``report.html`` into the folder of a run, a comparison or an evaluation, and return its path.

    The page is complete in itself: no request leaves it and no script runs in it. It replaces an older one at once.

    Raises:
        ValueError: the folder is none of them.
        ImportError: the ``app`` extra is not installed.
    """
    return write_page(read_contents(folder))


def write_page(contents: Contents) -> Path:
    """What :func:`write_report` does with what a folder holds."""
    folder, part = contents.folder, contents.parts[0]
    page = _render_judged(folder, part) if part.run is None else _render(part.run, part, contents.comparison)
    target = folder / "report.html"
    beside = folder / f".report.html.{os.getpid()}"
    try:
        beside.write_text(page, encoding="utf-8")
        os.replace(beside, target)
    finally:
        beside.unlink(missing_ok=True)
    return target


def _render_judged(folder: Path, part: Part) -> str:
    """The page of a network that was trained elsewhere: what it is, and how it was judged."""
    if not part.entries:
        raise ValueError(part.damaged[0] if part.damaged else f"{folder / EVALUATION} holds no finished attack yet")
    newest = part.entries[-1]
    return render(
        "bullettrain.reporting",
        icon=images.data_uri(_icon()),
        trained=False,
        recipe=newest.model,
        facts=[newest.data, f"{number(newest.examples, 0)} images", str(newest.environment.get("device") or "")],
        judged=[evaluation_section(entry, None, index) for index, entry in enumerate(part.entries)],
        versions=list(settings(newest.environment)),
        commands=[] if _has_autoattack(part) else [_evaluate(newest.model, [])],
    )


def _render(run: Run, part: Part, comparison: Comparison | None) -> str:
    judged = [evaluation_section(entry, run.config, index) for index, entry in enumerate(part.entries)]
    attacked = "corrupted" if run.makes_views else "adversarial"
    factor = images.amplification(run.samples) if run.samples else 0
    strips = images.strips(run.samples, factor, mined=not run.plain) if run.samples else []
    return render(
        "bullettrain.reporting",
        icon=images.data_uri(_icon()),
        trained=True,
        judged=judged,
        recipe=str(run.config.get("recipe") or run.folder.resolve().name),
        facts=_facts(run),
        status=_status(run),
        outcome=summary.outcome(run, comparison) + strongest(part.entries, run),
        alerts=[*_alerts(run), *part.damaged, *(_alerts(comparison.baseline, "Baseline: ") if comparison else [])],
        headline=summary.headline(run, comparison),
        shares=summary.shares(run),
        comparison=summary.beside_baseline(comparison) if comparison else None,
        race=figures.race(run, comparison.baseline) if comparison else [],
        speedups=[] if run.plain else summary.speedups(run, comparison),
        evaluations=summary.evaluations(run),
        curves=_present(figures.loss(run), figures.accuracy(run, attacked)),
        mining=_mining(run),
        plain=run.plain,
        remembers=run.section("method").get("selection") == "last",
        budget=run.budget,
        attacked=attacked,
        factor=factor,
        strips=strips,
        columns=len(strips) if all(len(strip.examples) <= 4 for strip in strips) else 1,
        at=run.threat,
        compare=_compare(run) if comparison is None and not run.plain else "",
        commands=_next(run, part, comparison),
        epochs=summary.epochs(run),
        config=_config(run),
        versions=list(settings(run.section("environment"))),
    )


def _next(run: Run, part: Part, comparison: Comparison | None) -> list[tuple[str, str]]:
    """What to do now: commands, and what each is for."""
    folder, code = str(run.folder), _code(run)
    if run.ended != "finished":
        return [(shlex.join(["bullettrain", "train", folder, *code, "--resume"]), "Go on with this run.")]
    commands = [] if run.makes_views or _has_autoattack(part) else [_evaluate(folder, code)]
    if comparison is None and not run.plain:
        commands.append((_compare(run), "The same recipe without BulletTrain too, and both in one report."))
    image, onnx = ["predict", folder, *code, "image.png"], ["export", folder, *code, "--format", "onnx"]
    return [
        *commands,
        (shlex.join(["bullettrain", *image]), "Classify an image."),
        (shlex.join(["bullettrain", *onnx]), "A file for deployment; --format hub writes a model card too."),
    ]


def _evaluate(model: str, code: list[str]) -> tuple[str, str]:
    command = shlex.join(["bullettrain", "evaluate", model, *code, "--attack", "autoattack"])
    return command, "AutoAttack, the figure by which robust networks are compared; PGD alone overestimates."


def _compare(run: Run) -> str:
    return shlex.join(["bullettrain", "train", str(run.folder), *_code(run), "--compare"])


def _code(run: Run) -> list[str]:
    """The option by which a function of the user's is named again; a file alone does not have it called."""
    name = str(run.section("network").get("name") or "")
    return ["--network", name] if ":" in name else []


def _has_autoattack(part: Part) -> bool:
    return any(result.attack["attack"] == "autoattack" for entry in part.entries for result in entry.results)


def _mining(run: Run) -> list[figures.Plate]:
    """The paper's figs. 3 to 5; none of them means anything where every example gets the same steps."""
    if run.plain:
        return []
    batch = [figures.histogram(run.batch), figures.allocation(run.batch)] if run.batch else []
    return _present(figures.shares(run), figures.svar(run), *batch)


def _present(*plates: figures.Plate | None) -> list[figures.Plate]:
    return [plate for plate in plates if plate is not None]


def _facts(run: Run) -> list[str]:
    """The run in a few words: method, network, data, device."""
    method = method_name(run.section("method"))
    facts = [f"{method} with BulletTrain" if method and not run.plain else method]
    for section in ("network", "data"):
        words = [value for value in run.section(section).values() if isinstance(value, str)]
        facts.append(str(run.section(section).get("name") or (words[0] if words else "")))
    facts.insert(1, run.threat)
    facts.append(str(run.section("environment").get("device") or ""))
    return [fact for fact in facts if fact]


def _config(run: Run) -> list[tuple[str, list[tuple[str, str]]]]:
    """The configuration by section; what stands outside any section comes first, as ``run``."""
    sections = {name: value for name, value in run.config.items() if isinstance(value, Mapping)}
    loose = {name: value for name, value in run.config.items() if name not in sections}
    named = {**({"run": loose} if loose else {}), **sections}
    return [(str(name), list(settings(section))) for name, section in named.items() if name != "environment"]


def _status(run: Run) -> dict[str, str]:
    """Whether the run came to its end, and how far it got where it did not."""
    if run.ended == "finished":
        return {"kind": "done", "word": "finished", "text": ""}
    if run.ended is not None:
        return {"kind": "open", "word": "ended early", "text": f"It ended at {_reached(run)}: {run.ended}."}
    text = f"The log has no end: the run goes on or was killed. It got as far as {_reached(run)}."
    return {"kind": "open", "word": "not finished", "text": text}


def _reached(run: Run) -> str:
    """How far the log goes: ``epoch 12 of 30, step 4 680``."""
    table = run.progress
    if not len(table["step"]):
        return "its start: nothing is logged yet"
    done = max([*run.epochs["epoch"][-1:], *table["epoch"][-1:]])
    planned = run.section("training").get("epochs", run.section("schedule").get("epochs"))
    of = f" of {planned}" if isinstance(planned, int | float) else ""
    return f"epoch {short(round(float(done), 1))}{of}, step {number(float(table['step'][-1]), 0)}"


def _alerts(run: Run, prefix: str = "") -> list[str]:
    """What a reader must not miss: the run's own warnings and notes, losses that were no numbers, unreadable files."""
    grouped: dict[str, list[float]] = {}
    for step, message in run.warnings:
        grouped.setdefault(message, []).append(step)
    alerts = []
    for message, at in grouped.items():
        where = f"Step {number(at[0], 0)}: " if math.isfinite(at[0]) else ""
        alerts.append(f"{where}{message}" + (f" ({len(at)} times)" if len(at) > 1 else ""))
    lost = np.flatnonzero(~np.isfinite(run.progress["loss"]))
    if len(lost):
        first, entries = number(float(run.progress["step"][lost[0]]), 0), len(run.progress["loss"])
        alerts.append(
            f"The loss was not a finite number in {len(lost)} of {entries} log entries, first at step {first}."
        )
    if prefix and run.ended != "finished":
        alerts.append("it did not come to its end, so the comparison says little.")
    return [prefix + alert for alert in (*alerts, *run.notes)]


def _icon() -> NDArray[np.uint8]:
    """The page's icon: the three categories as bars, in the page's colours."""
    pixels = np.full((3, 16, 16), 255, dtype=np.uint8)
    for index, colour in enumerate(((194, 39, 111), (210, 133, 0), (47, 111, 208))):
        pixels[:, 10 - 4 * index :, 1 + 5 * index : 5 + 5 * index] = np.array(colour, dtype=np.uint8)[:, None, None]
    return pixels
