"""What may have been meant by a name that is not there."""

from __future__ import annotations

import re
from collections.abc import Sequence

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
MOST = 3


def guesses(name: str, names: Sequence[str]) -> list[str]:
    """Those of ``names``, all in lower case, that ``name`` may stand for; none rather than far-fetched or many.

    The first of these that holds for any: the same letters, the same meaning, a slip of the finger (for every eight
    letters one), the beginning of a word.
    """
    given = _letters(name.lower())
    meant = {_letters(word) for words in SAME if given in map(_letters, words) for word in words}
    ways = [[there for there in names if _letters(there) in wanted] for wanted in ({given}, meant)]
    if len(given) > 2:
        slips = {there: _slips(given, _letters(there)) for there in names}
        least = min(slips.values(), default=0)
        ways.append([there for there in names if slips[there] == least <= max(1, len(given) // 8)])
        ways.append([there for there in names if any(end.startswith(given) for end in _ends(there))])
    found = next(filter(None, ways), [])
    return found if len(found) <= MOST else []


def _letters(name: str) -> str:
    return re.sub(r"[\W_]", "", name)


def _ends(name: str) -> list[str]:
    """The letters of a name from each of its words on."""
    words = re.split(r"[\W_]+", name)
    return ["".join(words[i:]) for i in range(len(words))]


def _slips(given: str, meant: str) -> int:
    """Letters left out, added, changed, or swapped with the next one, on the way from one word to the other."""
    before, row = [0], list(range(len(meant) + 1))
    for i, letter in enumerate(given):
        last, before, row = before, row, [i + 1]
        for j, other in enumerate(meant):
            row.append(min(before[j + 1] + 1, row[j] + 1, before[j] + (letter != other)))
            if i and j and given[i - 1 : i + 1] == other + meant[j - 1]:
                row[j + 1] = min(row[j + 1], last[j - 1] + 1)
    return row[-1]
