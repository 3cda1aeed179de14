"""Optional packages are imported where they are used, inside ``with extra(...)``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from bullettrain.errors import UserError

PACKAGES = {"PIL": "Pillow", "cv2": "OpenCV", "sklearn": "scikit-learn", "yaml": "PyYAML"}
"""Packages whose name differs from that of their module."""


class MissingPackageError(UserError, ImportError):
    """An optional package is not installed."""


@contextmanager
def extra(what: str, name: str = "app") -> Iterator[None]:
    """Turn an ImportError into a MissingPackageError.

    Args:
        what: what needs the package.
        name: extra of bullettrain that installs it.
    """
    try:
        yield
    except ImportError as error:
        module = (error.name or "a package").partition(".")[0]
        package = PACKAGES.get(module, module)
        install = f'pip install ".[{name}]"'  # the package is not on PyPI
        raise MissingPackageError(f"{what} needs {package}: in your clone of bullettrain, {install}") from error
