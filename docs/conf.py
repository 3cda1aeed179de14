"""Configuration of the documentation: sphinx-build -W docs docs/_build/html."""

import os
import re
from pathlib import Path

from sphinx.application import Sphinx

import bullettrain

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent

project = "BulletTrain"
author = "The BulletTrain developers"
project_copyright = author
version = release = bullettrain.__version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build", "**.ipynb_checkpoints"]

myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]
nb_execution_mode = "force"
nb_execution_timeout = 120
nb_execution_raise_on_error = True
nb_merge_streams = True

autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_class_signature = "mixed"
autodoc_member_order = "bysource"
python_use_unqualified_type_names = True
napoleon_numpy_docstring = False

html_theme = "furo"
html_title = "BulletTrain"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_copy_source = False

LINK = re.compile(r"(!?)\[([^\[\]]*(?:\[[^\]]*\][^\[\]]*)*)\]\(([^()\s]+)\)")
"""A Markdown link: whether it is an image, its text and its target."""
RECORDS = ROOT / "results"
PAGES = {
    RECORDS / "README.md": "records",
    **{page: f"records/{page.parent.name}" for page in sorted(RECORDS.glob("*/README.md"))},
}
"""Files outside this folder that are pages of the site. The page in this folder only has their title."""


def adapt(app: Sphinx, page: str, source: list[str]) -> None:
    """Take pages from elsewhere, and adapt links to the site, which has no source files and no folders of results."""
    file = next((file for file, name in PAGES.items() if name == page), DOCS / page)
    if file in PAGES:
        source[0] = file.read_text(encoding="utf-8")
    if page == "records":
        parts = "\n".join(name for name in PAGES.values() if name != page)
        source[0] += f"\n```{{toctree}}\n:hidden:\n\n{parts}\n```\n"

    def to_page(there: Path) -> str:
        return os.path.relpath(there, (DOCS / page).parent)

    def site_link(link: re.Match[str]) -> str:
        image, text, target = link.groups()
        path, mark, anchor = target.partition("#")
        there = (file.parent / path).resolve()
        if target.startswith("http") or not path or not there.exists():
            return link[0]  # Sphinx warns if the page does not exist
        if there in PAGES:
            return f"[{text}]({to_page(DOCS / (PAGES[there] + '.md'))}{mark}{anchor})"
        if there.is_relative_to(DOCS) or there.suffix in (".png", ".json", ".csv", ".yaml"):  # the others to download
            return f"{image}[{text}]({to_page(there)}{mark}{anchor})"
        name = there.relative_to(ROOT).as_posix()
        if name.endswith(text.strip("`")):
            return f"`{name}`"
        return f"{text} `{name}`" if text in ("record", "records") else f"{text} (`{name}`)"  # records are in brackets

    source[0] = LINK.sub(site_link, source[0])
    source[0] = re.sub(r"^( *)%", r"\1\\%", source[0], flags=re.MULTILINE)  # MyST takes such a line for a comment


def tidy(app: Sphinx, kind: str, name: str, it: object, options: object, lines: list[str]) -> None:
    """Show indented paragraphs of docstrings as code; do not take "0-d: …" of an attribute for its type."""
    for number in range(len(lines) - 1, 1, -1):
        before, between, line = lines[number - 2 : number + 1]
        if before and not between and line.startswith("    ") and not before.startswith((" ", "* ", "- ")):
            lines[number:number] = ["::", ""]
    if kind in ("attribute", "property") and lines:
        lines[0] = re.sub(r"^([^:`]*): ", r"\1 – ", lines[0])


def setup(app: Sphinx) -> None:
    """Connect the functions above."""
    app.connect("source-read", adapt)
    app.connect("autodoc-process-docstring", tidy, priority=400)  # before napoleon
