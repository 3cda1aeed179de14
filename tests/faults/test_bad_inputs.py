"""The catalogue of bad inputs: each ends with status 2 and one line that says what to change, in one process.

``catalogue.yaml`` has, by group, the words after ``bullettrain`` and a fragment of the line.
"""

import os
import shlex
import signal
from pathlib import Path

import pytest
import yaml
from command import command, finished_run
from layout import LONG, lay_out
from mutations import SECONDS, TooLongError, limits

CATALOGUE = yaml.safe_load(Path(__file__).with_name("catalogue.yaml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def here(tmp_path_factory) -> Path:
    run = finished_run()
    folder, before = tmp_path_factory.mktemp("bad"), Path.cwd()
    os.chdir(folder)
    lay_out(run)
    os.chdir(before)
    return folder


def files() -> set[str]:
    return {os.path.join(folder, name) for folder, _, names in os.walk(".") for name in names}


def wrong(words: str, said: str) -> str:
    """What is not as the catalogue has it; empty where all is."""
    before = files()
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        ended = command(*shlex.split(words.replace("{long}", LONG)))
    except TooLongError:
        return f"over {SECONDS} s"
    except Exception as error:
        return f"a traceback: {type(error).__name__}: {error}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    err = " ".join(ended.err.replace("│", " ").split())
    if ended.status != 2:
        return f"status {ended.status}: {err or ended.out}"
    if said not in err and said not in " ".join(ended.out.split()):
        return f"it said: {err}"
    if ended.err.startswith("bullettrain: ") and ended.err.count("\n") != 1:
        return f"not one line: {ended.err}"
    return f"it left {left}" if (left := files() - before) else ""


def test_the_catalogue_is_large():
    assert sum(map(len, CATALOGUE.values())) >= 300


@pytest.mark.parametrize("group", CATALOGUE)
def test_bad_inputs_end_with_status_two_and_a_line(group, here, monkeypatch):
    monkeypatch.chdir(here)
    monkeypatch.delenv("BULLETTRAIN_DATA", raising=False)
    for name, value in {"XDG_CACHE_HOME": str(here / "cache"), "COLUMNS": "200", "NO_COLOR": "1"}.items():
        monkeypatch.setenv(name, value)
    failures = []
    with limits():
        for words, said in CATALOGUE[group].items():
            if found := wrong(words, said):
                failures.append(f"{words}: {found}")
    assert not failures, "\n".join(failures)
    assert not Path("executed").exists()
