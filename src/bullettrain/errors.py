"""Errors for users, and helpers for their messages."""

from __future__ import annotations

import difflib
import os
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bullettrain.brief import first_line

SYNONYMS = (
    ("float32", "fp32", "f32", "single"),
    ("bf16", "bfloat16"),
    ("lr", "learning_rate"),
    ("eps", "epsilon"),
    ("step_size", "step", "alpha"),
    ("weight_decay", "wd"),
    ("average", "averaged", "ema"),
    ("precision", "amp"),
    ("out", "output"),
)
"""Synonyms."""
MAX_GUESSES = 3
MIN_SIMILARITY = 0.85
"""Minimum similarity of two names, as difflib measures it."""
MAX_SETTINGS_BYTES = 1 << 20


class UserError(ValueError):
    """A mistake of the user. The message is one line that says what to change; the command exits with status 2."""


@contextmanager
def raised_as(kind: type[Exception], message: str | Callable[[Any], str], *errors: type[Exception]) -> Iterator[None]:
    """Raise expected errors of the block as errors of another kind, without the traceback of the first.

    Args:
        kind: error to raise.
        message: its message, in which "{error}" stands for the first line of the first error; or a function of that
            error, for a message that takes work.
        *errors: expected errors.
    """
    try:
        yield
    except errors as error:
        text = message if isinstance(message, str) else message(error)
        raise kind(text.replace("{error}", first_line(error))) from None


def user_path(text: str | Path) -> Path:
    """Return the path with ``~`` and ``~user`` expanded."""
    unknown = f"{text}: there is no user called {str(text).partition(os.sep)[0][1:]!r} here"
    with raised_as(UserError, unknown, RuntimeError):
        return Path(text).expanduser()


def read_settings_text(path: Path) -> str:
    """Return the text of a small file.

    Raises:
        OSError: the file cannot be read, is not a regular file, or is too large.
        UnicodeDecodeError: the file is not text.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise OSError("it is no file but a folder, pipe, socket or device")
    if status.st_size > MAX_SETTINGS_BYTES:
        raise OSError(f"it has {status.st_size:,} bytes, and settings at most {MAX_SETTINGS_BYTES:,}")
    return path.read_text(encoding="utf-8")


def guesses(name: str, names: Sequence[str]) -> list[str]:
    """Return those of ``names``, in lower case, that ``name`` probably stands for.

    The first rule that matches any of them decides: the same letters, a synonym, the same letters in another order,
    nearly the same letters, the beginning of a word. More than ``MAX_GUESSES`` matches count as none.
    """
    wanted, letters = _letters(name.lower()), {candidate: _letters(candidate) for candidate in names}
    synonyms = {_letters(word) for words in SYNONYMS if wanted in map(_letters, words) for word in words}
    matches = [[candidate for candidate in names if letters[candidate] in group] for group in ({wanted}, synonyms)]
    if len(wanted) > 2:
        matches.append([candidate for candidate in names if sorted(letters[candidate]) == sorted(wanted)])
        ratios = {candidate: difflib.SequenceMatcher(None, letters[candidate], wanted).ratio() for candidate in names}
        best = max(ratios.values(), default=0.0)
        matches.append([candidate for candidate in names if ratios[candidate] == best >= MIN_SIMILARITY])
        matches.append([candidate for candidate in names if any(end.startswith(wanted) for end in _ends(candidate))])
    best_matches = next(filter(None, matches), [])
    return best_matches if len(best_matches) <= MAX_GUESSES else []


def near(path: Path) -> str:
    """Return the end of an error message about a missing path: the folders, or files of its kind, that it may mean."""
    try:
        others = (part for part in path.parent.iterdir() if part.name != path.name)
        beside = [part for part in others if part.is_dir() or part.suffix == path.suffix != ""]
    except OSError:
        return ""
    paths = {part.name.lower(): str(part) for part in beside if not part.name.startswith(".")}
    meant = " or ".join(paths[name] for name in guesses(path.name, list(paths)))
    return f"; did you mean {meant}?" if meant else ""


def _letters(name: str) -> str:
    return re.sub(r"[\W_]", "", name)


def _ends(name: str) -> list[str]:
    """Return the letters of a name from the start of each of its words."""
    words = re.split(r"[\W_]+", name)
    return ["".join(words[i:]) for i in range(len(words))]
