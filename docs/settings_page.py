"""Write docs/settings.md from the docstrings of the configuration.

python docs/settings_page.py [--check]
"""

import sys
from pathlib import Path

from bullettrain.config.describe import page

FILE = Path(__file__).resolve().parent / "settings.md"


def main() -> None:
    """Write the page; with --check fail where it is not up to date."""
    if "--check" in sys.argv[1:]:
        if not FILE.is_file() or FILE.read_text(encoding="utf-8") != page():
            sys.exit(f"{FILE.name} is out of date: run python docs/settings_page.py")
    else:
        FILE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
