"""Pages that are complete in themselves: no request leaves them, and no script runs in them."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

from bullettrain.extras import extra


def render(package: str, **values: Any) -> str:
    """The template.html of ``package`` with ``values``, of which none may be missing."""
    with extra("a page"):
        import jinja2
    source = files(package).joinpath("template.html").read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    return environment.from_string(source).render(**values)
