"""Packages that only the application needs are imported where they are used, inside ``with extra(...)``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from bullettrain.errors import UserError

PACKAGES = {"PIL": "Pillow", "cv2": "OpenCV", "sklearn": "scikit-learn", "yaml": "PyYAML"}
"""What to install, where it is not called what is imported."""


class MissingPackageError(UserError, ImportError):
    """A package of an extra is not installed: which one, and how to get it."""


@contextmanager
def extra(what: str, name: str = "app") -> Iterator[None]:
    """An import that fails in here says what needs the package, and which extra brings it."""
    try:
        yield
    except ImportError as error:
        module = (error.name or "a package").partition(".")[0]
        package = PACKAGES.get(module, module)
        raise MissingPackageError(f'{what} needs {package}: pip install "bullettrain[{name}]"') from error
