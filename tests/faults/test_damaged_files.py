"""Damaged files, by a seeded mutator over every reader: it reads them or refuses them, with no other error.

10,000 mutations here, 200,000 by ``pytest -m slow tests/faults``. A failure names the seed: with it,
``mutate(good, others, random.Random(seed))`` makes the file again.
"""

import random
import shutil
from pathlib import Path

import pytest
from command import finished_run
from mutations import complaint, limits, mutate
from readers import DATA, RUN, Reader

from bullettrain.data import DataError
from bullettrain.errors import UserError

READERS = [*DATA, *RUN]
SHARES = sum(reader.share for reader in READERS)


def check(reader: Reader, folder: Path, seeds: range) -> None:
    file = folder / reader.file
    good = file.read_bytes()
    others = [good, *(other.read_bytes()[:10_000] for other in sorted(folder.rglob("*.*")) if other.is_file())]
    reader.read(folder)
    with limits():
        for seed in seeds:
            file.write_bytes(mutate(good, others, random.Random(seed)))
            wrong = complaint(lambda: reader.read(folder), DataError if reader in DATA else UserError)
            assert not wrong, f"{reader.name}, seed {seed}: {wrong}"
    file.write_bytes(good)


def prepare(reader: Reader, folder: Path) -> Path:
    if reader.write is None:
        shutil.copytree(finished_run(), folder, dirs_exist_ok=True)
    else:
        reader.write(folder)
    return folder


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.name)
def test_damaged_files_are_read_or_refused(reader, tmp_path):
    check(reader, prepare(reader, tmp_path), range(10_000 * reader.share // SHARES))


@pytest.mark.slow
@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.name)
def test_many_damaged_files_are_read_or_refused(reader, tmp_path):
    check(reader, prepare(reader, tmp_path), range(200_000 * reader.share // SHARES))
