"""What a user's mistake is told by."""

from __future__ import annotations

from pathlib import Path


class UserError(ValueError):
    """A mistake in what was asked for: one line that says what to change. The command ends with status 2."""


def user_path(text: str | Path) -> Path:
    """The path that a user wrote, with ``~`` and ``~user`` as the folders that they stand for."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise UserError(f"{text}: there is no user called {Path(text).parts[0][1:]!r} here") from None
