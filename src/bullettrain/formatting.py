"""Format numbers for people: 81.5 %, 12.3 s, 1.85×. NaN and infinity become a dash."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

CHANCE_ERRORS = 2.0
"""Number of standard errors within which a difference is too close to tell."""
DASH = "–"
THIN = "\u202f"  # narrow no-break space
ATTACKS = {
    "clean": "Clean",
    "autoattack": "AutoAttack",
    "apgd": "APGD",
    "corruptions": "Corruptions",
    "views": "AugMix views",
}


def percent(fraction: float, digits: int = 1) -> str:
    """Format 0.815 as ``81.5 %``."""
    return f"{100 * fraction:.{digits}f}{THIN}%" if math.isfinite(fraction) else DASH


def points(difference: float, digits: int = 1, error: float = math.nan) -> str:
    """Format a difference of two fractions in percentage points, with its sign, and ± ``error`` if finite."""
    if not math.isfinite(difference):
        return DASH
    shown = f"{abs(100 * difference) + 1e-9:.{digits}f}"  # 2.15 is slightly less in binary, but rounds up
    sign = "±" if float(shown) == 0 else "+" if difference > 0 else "−"
    if not math.isfinite(error):
        return f"{sign}{shown} points"
    return f"{sign.strip('±')}{shown} ± {100 * error:.{digits}f} points"


def too_close(difference: float, error: float) -> str:
    """Return a remark if a difference is within two standard errors, else ""."""
    return " (too close to tell)" if abs(difference) <= CHANCE_ERRORS * error else ""


def error_in_words(paired: bool) -> str:
    """Explain the ± of a difference."""
    kind = "over the same test images, paired" if paired else "over the test images, unpaired"
    return (
        f"± is one standard error ({kind}); within two it is too close to tell. "
        "How much another seed would change is not in it"
    )


MIN_CAPTURE_SECONDS = 0.1
"""Seconds of compiling and capturing that are not mentioned."""


def duration(seconds: float) -> str:
    """Format seconds as 12.3 s, 5 min 12 s, 1 h 23 min or, from two days on, 2 d 3 h."""
    if not math.isfinite(seconds):
        return DASH
    if seconds < 59.95:
        return f"{seconds:.1f}{THIN}s"
    if seconds < 3599.5:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes}{THIN}min {rest}{THIN}s"
    if seconds < 48 * 3600 - 30:
        hours, rest = divmod(round(seconds / 60), 60)
        return f"{hours}{THIN}h {rest}{THIN}min"
    days, rest = divmod(round(seconds / 3600), 24)
    return f"{days}{THIN}d {rest}{THIN}h"


def captures(seconds: float, text: str) -> str:
    """Return ``text`` with the time of compiling and capturing for {}, or "" if there was hardly any."""
    return text.format(duration(seconds)) if seconds > MIN_CAPTURE_SECONDS else ""


def in_all(own: Mapping[str, float], plain: Mapping[str, float]) -> str:
    """Return a sentence on the speed-up with compiling and capturing, or "" if there was hardly any."""
    captured = [row.get("capture_seconds", 0.0) for row in (own, plain)]
    total = [row.get("seconds", math.nan) + more for row, more in zip((own, plain), captured, strict=True)]
    if not sum(captured) > MIN_CAPTURE_SECONDS or not all(map(math.isfinite, total)):
        return ""
    both = f"Compiling and capturing, {duration(captured[0])} and without mining {duration(captured[1])}, are not in it"
    return f"{both}: with them it is {times(total[1] / total[0])}."


def times(ratio: float | None) -> str:
    """Format a ratio as 1.85×."""
    return f"{ratio:.2f}×" if ratio is not None and math.isfinite(ratio) else DASH


def number(value: float, digits: int = 2) -> str:
    """Format a number with a fixed number of decimals."""
    return f"{value:,.{digits}f}".replace(",", THIN).replace("-", "−") if math.isfinite(value) else DASH


def short(value: float) -> str:
    """Format a number with up to four significant digits: 0.1, 0.000625, 1e−06."""
    return f"{value:.4g}".replace("-", "−") if math.isfinite(value) else DASH


def attack_name(attack: str) -> str:
    """Format ``pgd20`` as PGD-20, ``pgd100x20-kl`` as PGD-100×20 KL. Unknown names stay as they are."""
    if match := re.fullmatch(r"pgd(\d+)(?:x(\d+))?(?:-(\w+))?", attack):
        loss = {None: "", "kl": " KL"}.get(match[3], f" {match[3]}")
        return f"PGD-{match[1]}" + (f"×{match[2]}" if match[2] else "") + loss
    return ATTACKS.get(attack, attack)


def plain(text: str) -> str:
    """Replace narrow spaces by ordinary ones, for a terminal."""
    return text.replace(THIN, " ")


def plural(word: str, count: int) -> str:
    """Return ``step`` or ``steps``."""
    return word if count == 1 else f"{word}s"


def listed(parts: list[str]) -> str:
    """Join parts as ``a, b and c``."""
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1] if parts else ""


def setting(key: str, value: Any) -> str:
    """Format a value of the configuration."""
    if value is None:
        return DASH
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        shown = f"{value:.6g}"
        of_255 = value * 255
        if key == "eps" and of_255 >= 1 and abs(of_255 - round(of_255)) < 1e-6:
            return f"{round(of_255)}/255 = {shown}"
        return shown
    if isinstance(value, list | tuple):
        return ", ".join(setting(key, item) for item in value) if value else "none"
    return str(value)


def settings(section: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield (dotted name, text) for each value of a section."""
    for key, value in section.items():
        name = f"{prefix}.{key}" if prefix else str(key)
        if isinstance(value, Mapping) and value:
            yield from settings(value, name)
        else:
            yield name, setting(str(key), value)
