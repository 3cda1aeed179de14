"""What a user's mistake is told by: the error, the path that was written, the name that may have been meant."""

from __future__ import annotations

import difflib
import re
import stat
from collections.abc import Sequence
from pathlib import Path

SAME = (
    ("float32", "fp32", "f32", "single"),
    ("bf16", "bfloat16"),
    ("lr", "learning_rate"),
    ("eps", "epsilon"),
    ("step_size", "step", "alpha"),
    ("weight_decay", "wd"),
    ("average", "averaged", "ema"),
    ("precision", "amp"),
)
"""Names that mean the same."""
MOST_GUESSES = 3
CUTOFF = 0.85
"""Share of the letters that two names have in common."""


MAX_SETTINGS_BYTES = 1 << 20


class UserError(ValueError):
    """A mistake in what was asked for: one line that says what to change. The command ends with status 2."""


def user_path(text: str | Path) -> Path:
    """The path that a user wrote, with ``~`` and ``~user`` as the folders that they stand for."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise UserError(f"{text}: there is no user called {Path(text).parts[0][1:]!r} here") from None


def read_settings_text(path: Path) -> str:
    """The text of a small file of settings.

    Raises:
        OSError: it cannot be read, is a pipe or a device, which is not opened, or is larger than settings are.
        UnicodeDecodeError: it is no text.
    """
    about = path.stat()
    if not stat.S_ISREG(about.st_mode):
        raise OSError("it is no file but a folder, pipe, socket or device")
    if about.st_size > MAX_SETTINGS_BYTES:
        raise OSError(f"it has {about.st_size:,} bytes, and settings at most {MAX_SETTINGS_BYTES:,}")
    return path.read_text(encoding="utf-8")


def guesses(name: str, names: Sequence[str]) -> list[str]:
    """Those of ``names``, all in lower case, that ``name`` may stand for; none rather than far-fetched or many.

    The first of these that holds for any: the same letters, the same meaning, the same letters in another order, nearly
    the same letters, the beginning of a word.
    """
    given, letters = _letters(name.lower()), {there: _letters(there) for there in names}
    meant = {_letters(word) for words in SAME if given in map(_letters, words) for word in words}
    ways = [[there for there in names if letters[there] in wanted] for wanted in ({given}, meant)]
    if len(given) > 2:
        ways.append([there for there in names if sorted(letters[there]) == sorted(given)])
        alike = {there: difflib.SequenceMatcher(None, letters[there], given).ratio() for there in names}
        best = max(alike.values(), default=0.0)
        ways.append([there for there in names if alike[there] == best >= CUTOFF])
        ways.append([there for there in names if any(end.startswith(given) for end in _ends(there))])
    found = next(filter(None, ways), [])
    return found if len(found) <= MOST_GUESSES else []


def _letters(name: str) -> str:
    return re.sub(r"[\W_]", "", name)


def _ends(name: str) -> list[str]:
    """The letters of a name from each of its words on."""
    words = re.split(r"[\W_]+", name)
    return ["".join(words[i:]) for i in range(len(words))]
