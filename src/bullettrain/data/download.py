"""`prepare` a dataset: fetch its archives, check them, and put the files in place; resumed when broken off."""

from __future__ import annotations

import gzip
import http.client
import os
import shutil
import tarfile
import tempfile
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from bullettrain.data.base import DataError, prepare_command, unwritable
from bullettrain.data.base import root as find_root
from bullettrain.data.sources import Archive, FileCheck, check, md5_of, source, verify
from bullettrain.extras import extra

Progress = Callable[[str, int, int | None], None]
"""Told the file's name, the bytes that are there, and the bytes there will be (None: the server did not say)."""

TIMEOUT = 30.0  # seconds without a byte before a server counts as out of reach


def prepare(name: str, root: str | Path | None = None, *, progress: Progress | None = None) -> list[FileCheck]:
    """Bring dataset `name` under the root: what is missing or wrong is unpacked or downloaded, the rest left.

    An archive that the user has put where the error message says is unpacked and kept; one that is
    downloaded is checked first and removed after. Returns what `verify` finds then.
    """
    if name == "digits":
        with extra("the digits dataset"):
            import sklearn.datasets  # noqa: F401 (it comes with the package)
        return []
    base = find_root(root)
    wanted = [a for a in source(name).archives if not all(check(base, f).ok for f in a.files)]
    failed: dict[Archive, str] = {}
    try:
        for archive in wanted:
            (base / archive.path).parent.mkdir(parents=True, exist_ok=True)
            if os.path.exists(brought := base / archive.path):
                if md5_of(brought) != archive.md5:
                    raise DataError(
                        f"{brought} is truncated or not the original file (its md5 is not {archive.md5}):"
                        f" delete it and run `{prepare_command(name, base)}` again."
                    )
                _unpack(brought, base, archive)
            elif failed:  # one server out of reach is waited for once, not once a file
                failed[archive] = "not tried"
            elif reason := _fetch(base, archive, progress):
                failed[archive] = reason
    except OSError as error:
        raise unwritable(error, base, " with --data-dir or BULLETTRAIN_DATA") from error
    if failed:
        raise DataError(_by_hand(name, base, failed))
    return verify(name, base)


def _fetch(base: Path, archive: Archive, progress: Progress | None) -> str | None:
    """Download an archive and put its files in place; the reason where it could not be had."""
    name = Path(archive.path).name
    part = base / f"{archive.path}.part"
    reasons = []
    for url in archive.urls:
        for _ in range(2):  # a part of another file shows only in the sum: then once more from the start
            resumed = part.exists()
            reason = _download(url, part, name, progress)
            if reason is None and md5_of(part) != archive.md5:
                part.unlink()
                reason = "what it sent has the wrong md5"
                if resumed:
                    continue
            break
        if reason is None:
            _unpack(part, base, archive)
            part.unlink()
            return None
        reasons.append(f"{urlsplit(url).hostname or url}: {reason}")
    return "; ".join(reasons)


def _download(url: str, part: Path, name: str, progress: Progress | None) -> str | None:
    """Write what is at `url` to `part`, from where it broke off the last time; a reason where that failed."""
    have = part.stat().st_size if part.exists() else 0
    headers = {"User-Agent": "bullettrain", **({"Range": f"bytes={have}-"} if have else {})}
    try:
        response = urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        error.close()
        if have and error.code == 416:  # nothing after what is there: whether it is whole, the md5 says
            return None
        return f"HTTP {error.code}"
    except (OSError, http.client.HTTPException, ValueError) as error:
        return str(getattr(error, "reason", error)) or type(error).__name__
    with response:
        continues = response.headers.get("Content-Range", "").startswith(f"bytes {have}-")
        done = have if continues else 0
        length = response.headers.get("Content-Length")
        total = done + int(length) if length and length.isdigit() else None
        with part.open("ab" if continues else "wb") as out:
            while True:
                if progress is not None:
                    progress(name, done, total)
                try:
                    piece = response.read(1 << 18)
                except (OSError, http.client.HTTPException) as error:
                    return f"broke off after {done} bytes ({error}); the next try goes on from there"
                if not piece:
                    break
                done += out.write(piece)
    if total is not None and done < total:
        return f"broke off after {done} of {total} bytes; the next try goes on from there"
    return None


def _unpack(packed: Path, base: Path, archive: Archive) -> None:
    """Put the archive's files in place, each whole or not at all."""
    with tempfile.TemporaryDirectory(dir=base, prefix=".unpack-") as folder:
        try:
            if archive.path.endswith(".tar.gz"):
                wanted = {file.path for file in archive.files}
                with tarfile.open(packed, "r:gz") as tar:
                    for member in tar:
                        if member.name in wanted and member.isfile():
                            tar.extract(member, folder, filter="data")
            else:
                target = Path(folder, archive.files[0].path)
                target.parent.mkdir(parents=True)
                with gzip.open(packed) as stream, target.open("wb") as out:
                    shutil.copyfileobj(stream, out)
        except (tarfile.TarError, EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise DataError(f"{packed} is damaged and could not be unpacked: delete it and try again.") from error
        for file in archive.files:
            if not Path(folder, file.path).is_file():
                raise DataError(f"{packed} has no {file.path} in it: delete it and try again.")
        for file in archive.files:
            (base / file.path).parent.mkdir(parents=True, exist_ok=True)
            os.replace(Path(folder, file.path), base / file.path)


def _by_hand(name: str, base: Path, failed: Mapping[Archive, str]) -> str:
    """What to do where there is no network: which file, from where, into which folder."""
    files = ", ".join(f"{Path(a.path).name} (from {a.urls[0]})" for a in failed)
    folder = (base / next(iter(failed)).path).parent  # one folder for all files of a dataset
    return (
        f"{name} could not be downloaded ({next(iter(failed.values()))}):"
        f" put {files} into {folder} and run `{prepare_command(name, base)}` again."
    )


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """A progress bar in the terminal, as the `progress` of `prepare`."""
    with extra("a progress bar"):
        import rich.progress as rich
    with rich.Progress(*rich.Progress.get_default_columns(), rich.DownloadColumn()) as bar:
        tasks: dict[str, rich.TaskID] = {}

        def update(name: str, done: int, total: int | None) -> None:
            if name not in tasks:
                tasks[name] = bar.add_task(name, total=total)
            bar.update(tasks[name], completed=done, total=total)

        yield update
