"""Write docs/settings.md from the docstrings of the configuration.

python docs/settings_page.py [--check]
"""

import sys
from pathlib import Path

from bullettrain.config.describe import page

FILE = Path(__file__).resolve().parent / "settings.md"


def write(file: Path, text: str, script: str) -> None:
    """Write a page; with --check fail where it is not up to date. ``script`` is the one that writes it."""
    if "--check" not in sys.argv[1:]:
        file.write_text(text, encoding="utf-8")
    elif not file.is_file() or file.read_text(encoding="utf-8") != text:
        sys.exit(f"{file.name} is out of date: run python docs/{script}")


if __name__ == "__main__":
    write(FILE, page(), "settings_page.py")
