"""Reports: one self-contained ``report.html`` about the folder of a run or a comparison.

    write_report(Path("runs/short"))      # -> runs/short/report.html

Importing this needs nothing beyond the library; writing a report needs the ``app`` extra.
"""

from __future__ import annotations

from bullettrain.reporting.report import write_report, write_reports
from bullettrain.reporting.run import Run

__all__ = ["Run", "write_report", "write_reports"]
