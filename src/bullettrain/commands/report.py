"""`bullettrain report`: make a run's report again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bullettrain.reporting import write_report
from bullettrain.training.folder import RunError


def report(folder: Annotated[Path, typer.Argument(help="Folder of a run, or of a comparison.")]) -> None:
    """Write report.html into a run's folder again, from what the run recorded.

    Example:

      bullettrain report runs/digits
    """
    try:
        path = write_report(folder)
    except ValueError as error:
        raise RunError(str(error)) from None
    except OSError as error:
        raise RunError(f"report.html could not be written to {folder}: {error.strerror}") from None
    typer.echo(f"report  {path}")
