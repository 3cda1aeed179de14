"""Packages that only the application needs are imported where they are used, inside ``with extra(...)``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

PACKAGES = {"PIL": "Pillow", "cv2": "OpenCV", "sklearn": "scikit-learn", "yaml": "PyYAML"}
"""What to install, where it is not called what is imported."""


@contextmanager
def extra(what: str, name: str = "app") -> Iterator[None]:
    """An import that fails in here says what needs the package, and which extra brings it."""
    try:
        yield
    except ImportError as error:
        module = (error.name or "a package").partition(".")[0]
        message = f'{what} needs {PACKAGES.get(module, module)}: pip install "bullettrain[{name}]"'
        raise ImportError(message, name=error.name) from error
