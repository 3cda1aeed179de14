from pathlib import Path

import pytest
from command import TINY, command


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory) -> Path:
    """A finished run of a second, evaluated; not to be changed."""
    folder = tmp_path_factory.mktemp("faults") / "run"
    assert command("train", "digits", "--out", str(folder), *TINY).status == 0
    assert command("evaluate", str(folder), "--attack", "clean,pgd:steps=1", "--device", "cpu").status == 0
    return folder
