"""Configuration of the documentation: sphinx-build -W docs docs/_build/html."""

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

LINK = re.compile(r"(?<!!)\[([^\[\]]*(?:\[[^\]]*\][^\[\]]*)*)\]\(([^()\s]+)\)")
"""A Markdown link that is not an image: its text and its target."""
PAGES = {"../results/README.md": "records.md"}
"""Files outside this folder that are pages of the site."""


def adapt(app: Sphinx, page: str, source: list[str]) -> None:
    """Adapt links of the repository to the site, which has no source files and no folders of results."""
    if page == "records":
        text = (ROOT / "results" / "README.md").read_text(encoding="utf-8")
        text = re.sub(r"\]\((?!https?:|#|\.\./)", "](../results/", text)
        source[0] = text.replace("](../docs/", "](")
    here = (DOCS / page).parent

    def site_link(link: re.Match[str]) -> str:
        text, target = link.groups()
        path, mark, anchor = target.partition("#")
        if path in PAGES:
            return f"[{text}]({PAGES[path]}{mark}{anchor})"
        file = (here / path).resolve()
        if target.startswith("http") or not path or file.is_relative_to(DOCS) or not file.exists():
            return link[0]  # Sphinx warns if the page does not exist
        name = file.relative_to(ROOT).as_posix()
        if file.suffix in (".png", ".json", ".csv", ".yaml"):
            return link[0]  # to download
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
