"""Checks of the files and folders that a user names, with hints on what to give instead."""

from __future__ import annotations

import os
from pathlib import Path

from bullettrain.errors import near
from bullettrain.run_folder import WEIGHTS, RunError, RunFolder, preferred, weights_in
from bullettrain.validation import check_known

SAFETENSORS, SAVED = "safetensors", "a file of torch.save"
EXPECTED = "a run's folder or one of its .safetensors files"
MAX_HEADER_BYTES = 100_000_000
"""Maximum size of a safetensors header, by its specification."""
MAX_RUNS_LISTED = 4


def rather(file: Path, otherwise: str = f"give {EXPECTED}") -> str:
    """Return a hint on what to give instead of ``file``: the run that it lies in, if there is one."""
    return f"give {file.parent}, the run that it lies in" if RunFolder(file.parent).exists else otherwise


def check_kind(file: Path, give: str = EXPECTED) -> str:
    """Return whether a file is SAFETENSORS or SAVED, by its first bytes. Raises RunError if it is neither."""
    if not file.is_file():
        raise RunError(f"{file} is missing; {rather(file, f'give {give}')}")
    with file.open("rb") as opened:
        start = opened.read(9)
    if start[8:] == b"{" and int.from_bytes(start[:8], "little") <= MAX_HEADER_BYTES:
        return SAFETENSORS
    if start.startswith((b"PK\x03\x04", b"\x80")):  # a zip archive, or a pickle of torch before 1.6
        return SAVED
    what = f"neither {SAFETENSORS} nor {SAVED}" if start else "empty"
    raise RunError(f"{file} is not a checkpoint: it is {what}; {rather(file, f'give {give}')}")


def check_run(path: Path, give: str = EXPECTED) -> RunFolder:
    """Return the run in a folder. Raises RunError, which lists runs in subfolders, if it is none."""
    folder = RunFolder(path)
    if folder.exists:
        return folder
    if not path.is_dir():
        wrong = "no folder" if os.path.lexists(path) else "missing"
        raise RunError(f"{path} is {wrong}; give {give}{near(path)}")
    content = sorted(path.iterdir())
    runs = [str(part) for part in content if RunFolder(part).exists]
    if runs:
        more = " …" if len(runs) > MAX_RUNS_LISTED else ""
        raise RunError(
            f"{path} is not a run but a folder of runs; give one of them: {', '.join(runs[:MAX_RUNS_LISTED])}{more}"
        )
    raise RunError(f"{path} is not a run: it {'has no config.yaml' if content else 'is empty'}; give {give}")


def choose_weights(path: Path, weights: str | None) -> str:
    """Return which weights of a folder to use: ``weights`` or the preferred ones. Raises RunError if it lacks them."""
    available = weights_in(path)
    if not available:
        check_run(path)
    evaluated = {str(r.get("weights")) for r in RunFolder(path).records() if r.get("kind") == "evaluation"}
    chosen = weights or preferred({*available, *evaluated})  # also if the file has been deleted
    check_known(chosen, WEIGHTS, "there are no weights", error=RunError)
    if chosen not in available:
        hint = f"; 'bullettrain train {path} --resume' writes them again" if chosen in evaluated else ""
        raise RunError(f"{path} has no {chosen!r} weights; it has {', '.join(available) or 'none yet'}{hint}")
    return chosen
