"""Files and folders that a user names, which may be anything: what they are, and what to give instead."""

from __future__ import annotations

from pathlib import Path

from bullettrain.run_folder import WEIGHTS, RunError, RunFolder, preferred, weights_in
from bullettrain.validation import instead

SAFETENSORS, SAVED = "safetensors", "a file of torch.save"
GIVE = "a run's folder or one of its .safetensors files"
LONGEST_HEADER = 100_000_000
"""Of a safetensors file, by its specification."""
SHOWN = 4


def rather(file: Path, otherwise: str = f"give {GIVE}") -> str:
    """What to do in the place of giving ``file``: give the run that it lies in, if it lies in one."""
    return f"give {file.parent}, the run that it lies in" if RunFolder(file.parent).exists else otherwise


def check_kind(file: Path, give: str = GIVE) -> str:
    """Which of the two a file is, by how it begins; RunError, with what to ``give``, where it is neither."""
    if not file.is_file():
        raise RunError(f"{file} is missing; {rather(file, f'give {give}')}")
    with file.open("rb") as opened:
        start = opened.read(9)
    if start[8:] == b"{" and int.from_bytes(start[:8], "little") <= LONGEST_HEADER:
        return SAFETENSORS
    if start.startswith((b"PK\x03\x04", b"\x80")):  # a zip archive, or a pickle as before torch 1.6
        return SAVED
    what = f"neither {SAFETENSORS} nor {SAVED}" if start else "empty"
    raise RunError(f"{file} is no checkpoint: it is {what}; {rather(file, f'give {give}')}")


def check_run(path: Path) -> RunFolder:
    """The run in a folder: RunError, with the runs that lie in it, where it is none."""
    folder = RunFolder(path)
    if folder.exists:
        return folder
    inside = sorted(path.iterdir())
    runs = [str(part) for part in inside if RunFolder(part).exists]
    if runs:
        more = " …" if len(runs) > SHOWN else ""
        raise RunError(f"{path} is no run but a folder of runs; give one of them: {', '.join(runs[:SHOWN])}{more}")
    raise RunError(f"{path} is no run: it {'has no config.yaml' if inside else 'is empty'}; give {GIVE}")


def choose_weights(path: Path, weights: str | None) -> str:
    """Which weights of a folder: those that are asked for, or that a user would take; RunError where there are none."""
    there = weights_in(path)
    if not there:
        check_run(path)
    evaluated = {str(r.get("weights")) for r in RunFolder(path).records() if r.get("kind") == "evaluation"}
    chosen = weights or preferred({*there, *evaluated})  # those that the run had, though their file may be gone
    if chosen not in WEIGHTS:
        raise RunError(f"there are no weights {chosen!r}{instead(chosen, WEIGHTS)}")
    if chosen not in there:
        mend = f"; 'bullettrain train {path} --resume' writes them again" if chosen in evaluated else ""
        raise RunError(f"{path} has no {chosen!r} weights; it has {', '.join(there) or 'none yet'}{mend}")
    return chosen
