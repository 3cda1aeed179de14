"""Write ``report.html``: one self-contained page about a run, a comparison of two runs, or an evaluation."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from bullettrain.evaluation.results import FILE as EVALUATION
from bullettrain.evaluation.results import Entry
from bullettrain.extras import extra
from bullettrain.formatting import number, settings
from bullettrain.reporting import evaluated, examples, figures, headline, tables
from bullettrain.reporting.plotting import drawing
from bullettrain.reporting.run import COMPARISON, Comparison, Contents, Run, read_contents
from bullettrain.run_folder import RunError, RunFolder

NAME = "report.html"
AUTOATTACK = "AutoAttack, the standard measure of robustness; PGD alone overestimates it."


def write_report(folder: Path) -> Path:
    """Write ``report.html`` into the folder of a run, a comparison or an evaluation, and return its path.

    The page makes no requests and runs no scripts. It is replaced atomically.

    Raises:
        RunError: the folder is not one of them.
        MissingPackageError: the ``app`` extra is not installed.
    """
    return write_page(read_contents(folder))


def write_reports(folder: Path) -> list[Path]:
    """Write the report of a run, and that of the comparison it belongs to, if any."""
    both = folder.name in ("bullettrain", "baseline") and (folder.parent / COMPARISON).is_file()
    return [write_report(page) for page in ([folder, folder.parent] if both else [folder])]


def write_page(contents: Contents) -> Path:
    """Write the report of a folder that has been read, and return its path."""
    with drawing():
        values = _run(contents.runs[0], contents.comparison) if contents.runs else _evaluation(contents)
        page = render("bullettrain.reporting", title=headline.title(contents.folder), **values)
    RunFolder(contents.folder).write(NAME, page.encode())
    return contents.folder / NAME


def render(package: str, **values: Any) -> str:
    """Render the template.html of ``package`` with ``values``. A missing value raises an error."""
    with extra("a page"):
        import jinja2
    source = files(package).joinpath("template.html").read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    return environment.from_string(source).render(**values)


def _evaluation(contents: Contents) -> dict[str, Any]:
    """Return the values of the template for a network that is not a run."""
    if not contents.entries:
        raise RunError(f"{contents.folder / EVALUATION} holds no finished attack yet")
    newest = contents.entries[-1]
    facts = [newest.model, newest.data, f"{number(newest.examples, 0)} images"]
    command = shlex.join(["bullettrain", "evaluate", newest.model, "--attack", "autoattack"])
    return {
        "run": None,
        "facts": [*facts, str(newest.environment.get("device") or "")],
        "evaluated": [evaluated.section(entry, None, index) for index, entry in enumerate(contents.entries)],
        "versions": list(settings(newest.environment)),
        "commands": [] if _autoattacked(contents.entries) else [(command, AUTOATTACK)],
    }


def _run(run: Run, comparison: Comparison | None) -> dict[str, Any]:
    """Return the values of the template for a run, and its baseline if there is one."""
    factor = examples.amplification(run.samples) if run.samples else 0
    strips = examples.strips(run.samples, factor, mined=not run.plain) if run.samples else []
    alerts = headline.alerts(run)
    if comparison:
        unfinished = "it did not finish, so the comparison is not meaningful."
        baseline = headline.alerts(comparison.baseline) + [unfinished] * (comparison.baseline.ended != "finished")
        alerts += [f"Baseline: {alert}" for alert in baseline]
    # The paper's figures 3 to 5 need categories.
    mining = [] if run.plain else [figures.shares(run.progress), figures.svar(run.steps)]
    if run.batch and not run.plain:
        mining += [figures.histogram(run.batch), figures.allocation(run.batch)]
    return {
        "run": run,
        "facts": headline.facts(run),
        "reached": headline.reached(run),
        "outcome": headline.outcome(run, comparison),
        "alerts": alerts,
        "headline": headline.headline(run, comparison),
        "small_print": headline.small_print(run),
        "shares": headline.average_batch(run),
        "mean_steps": headline.mean_steps(run),
        "comparison": tables.compared(comparison) if comparison else None,
        "race": figures.race(run, comparison.baseline) if comparison else [],
        "speedups": None if run.plain else headline.speedups(run, comparison),
        "evaluations": tables.evaluations(run),
        "evaluated": [evaluated.section(entry, run.config, index) for index, entry in enumerate(run.entries)],
        "curves": [plate for plate in (figures.loss(run), figures.accuracy(run)) if plate],
        "mining": [plate for plate in mining if plate],
        "attacked": "corrupted" if run.makes_views else "adversarial",
        "factor": factor,
        "strips": strips,
        "columns": len(strips) if all(len(strip["examples"]) <= 4 for strip in strips) else 1,
        "compare": _command(run, "train", "--compare"),
        "commands": _next_commands(run, compared=comparison is not None),
        "epochs": tables.epochs(run),
        "config": tables.configuration(run),
        "versions": list(settings(run.section("environment"))),
    }


def _next_commands(run: Run, *, compared: bool) -> list[tuple[str, str]]:
    """Return the next commands to run, each with its purpose."""
    if run.ended != "finished":
        return [(_command(run, "train", "--resume"), "Resume this run.")]
    commands = []
    if not run.makes_views and not _autoattacked(run.entries):
        commands.append((_command(run, "evaluate", "--attack", "autoattack"), AUTOATTACK))
    if not compared and not run.plain:
        purpose = "Train the same recipe without BulletTrain too, and report both."
        commands.append((_command(run, "train", "--compare"), purpose))
    commands.append((_command(run, "predict", "image.png"), "Classify an image."))
    purpose = "Export a file for deployment; --format hub also writes a model card."
    return [*commands, (_command(run, "export", "--format", "onnx"), purpose)]


def _command(run: Run, name: str, *words: str) -> str:
    """Return a command for the run, with ``--network`` if the network is a user's function."""
    network = str(run.section("network").get("name") or "")
    own = ["--network", network] if ":" in network else []
    return shlex.join(["bullettrain", name, str(run.folder), *own, *words])


def _autoattacked(entries: Sequence[Entry]) -> bool:
    return any(result.attack["attack"] == "autoattack" for entry in entries for result in entry.results)
