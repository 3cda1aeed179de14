"""``report.html``: one self-contained page about a run, a run beside its baseline, or an evaluation."""

from __future__ import annotations

import os
from importlib.resources import files
from pathlib import Path
from typing import Any

from bullettrain.evaluation.results import FILE as EVALUATION
from bullettrain.extras import extra
from bullettrain.formatting import number, settings
from bullettrain.reporting import content, figures
from bullettrain.reporting.run import Comparison, Contents, Part, Run, read_contents
from bullettrain.run_folder import RunError

NAME = "report.html"


def write_report(folder: Path) -> Path:
    """Write ``report.html`` into the folder of a run, a comparison or an evaluation, and return its path.

    The page is complete in itself: no request leaves it and no script runs in it. It replaces an older one at once.

    Raises:
        RunError: the folder is none of them.
        MissingPackageError: the ``app`` extra is not installed.
    """
    return write_page(read_contents(folder))


def write_page(contents: Contents) -> Path:
    """What :func:`write_report` does with what a folder holds."""
    part = contents.parts[0]
    about = _evaluation(part, contents.folder) if part.run is None else _run(part.run, part, contents)
    page = render("bullettrain.reporting", icon=content.icon(), title=content.title(contents.folder), **about)
    target, beside = contents.folder / NAME, contents.folder / f".{NAME}.{os.getpid()}"
    try:
        beside.write_text(page, encoding="utf-8")
        os.replace(beside, target)
    finally:
        beside.unlink(missing_ok=True)
    return target


def render(package: str, **values: Any) -> str:
    """The template.html of ``package`` with ``values``, of which none may be missing."""
    with extra("a page"):
        import jinja2
    source = files(package).joinpath("template.html").read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    return environment.from_string(source).render(**values)


def _evaluation(part: Part, folder: Path) -> dict[str, Any]:
    """What there is to show of a network that was trained elsewhere: what it is, and how it was evaluated."""
    if not part.entries:
        raise RunError(part.damaged[0] if part.damaged else f"{folder / EVALUATION} holds no finished attack yet")
    newest = part.entries[-1]
    facts = [newest.model, newest.data, f"{number(newest.examples, 0)} images"]
    return {
        "run": None,
        "facts": [*facts, str(newest.environment.get("device") or "")],
        "evaluated": [content.evaluation_section(entry, None, index) for index, entry in enumerate(part.entries)],
        "versions": list(settings(newest.environment)),
        "commands": content.evaluate_command(newest.model, part),
    }


def _run(run: Run, part: Part, contents: Contents) -> dict[str, Any]:
    """All that there is to show of a run, and of its baseline where there is one."""
    comparison: Comparison | None = contents.comparison
    factor = content.amplification(run.samples) if run.samples else 0
    strips = content.strips(run.samples, factor, mined=not run.plain) if run.samples else []
    baseline = content.alerts(comparison.baseline, "Baseline: ") if comparison else []
    mining = [figures.shares(run), figures.svar(run)]
    mining += [figures.histogram(run.batch), figures.allocation(run.batch)] if run.batch else []
    return {
        "run": run,
        "facts": content.facts(run),
        "status": content.status(run),
        "outcome": content.outcome(run, comparison, part.entries),
        "alerts": [*content.alerts(run), *part.damaged, *baseline],
        "headline": content.headline(run, comparison),
        "shares": content.shares(run),
        "comparison": content.beside_baseline(comparison) if comparison else None,
        "race": content.present(*figures.race(run, comparison.baseline)) if comparison else [],
        "speedups": [] if run.plain else content.speedups(run, comparison),
        "evaluations": content.evaluations(run),
        "evaluated": [content.evaluation_section(entry, run.config, index) for index, entry in enumerate(part.entries)],
        "curves": content.present(figures.loss(run), figures.accuracy(run)),
        # Of the paper's figs. 3 to 5 none means anything where every example gets the same steps.
        "mining": [] if run.plain else content.present(*mining),
        "attacked": "corrupted" if run.makes_views else "adversarial",
        "factor": factor,
        "strips": strips,
        "columns": len(strips) if all(len(strip.examples) <= 4 for strip in strips) else 1,
        "compare": content.compare_command(run) if comparison is None and not run.plain else "",
        "commands": content.next_commands(run, part, comparison),
        "epochs": content.epochs(run),
        "config": content.configuration(run),
        "versions": list(settings(run.section("environment"))),
    }
