"""Download the archives of a dataset, check them, and unpack them. Interrupted downloads resume."""

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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from bullettrain.data.base import DataError, prepare_command, writing
from bullettrain.data.base import root as find_root
from bullettrain.data.sources import Archive, FileCheck, check, md5_of, source, verify
from bullettrain.errors import raised_as
from bullettrain.extras import extra

Progress = Callable[[str, int, int | None], None]
"""Called with the name of the file, the bytes downloaded, and the bytes in all (None if unknown)."""

TIMEOUT = 30.0  # seconds without data before a server counts as unreachable


def prepare(name: str, root: str | Path | None = None, *, progress: Progress | None = None) -> list[FileCheck]:
    """Download and unpack the files of dataset ``name`` that are missing or wrong.

    An archive that is already there is unpacked and kept. A downloaded archive is checked, unpacked and removed.

    Args:
        name: of the dataset.
        root: folder of the datasets. Default: `bullettrain.data.root`.
        progress: called as the download advances.

    Returns:
        The result of `verify`.

    Raises:
        DataError: a download failed, an archive is damaged, or the folder cannot be written.
    """
    if name == "digits":
        with extra("the digits dataset"):
            import sklearn.datasets  # noqa: F401 (the images are part of the package)
        return []
    base = find_root(root)
    incomplete = [a for a in source(name).archives if not all(check(base, f).ok for f in a.files)]
    failed: dict[Archive, str] = {}
    again = f"run `{prepare_command(name, base)}` again"
    with writing(base, " with --data-dir or BULLETTRAIN_DATA"):
        for archive in incomplete:
            path = base / archive.path
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists():
                if md5_of(path) != archive.md5:
                    wrong = f"truncated or not the original file (its md5 is not {archive.md5})"
                    raise DataError(f"{path} is {wrong}: delete it and {again}.")
                _unpack(path, base, archive)
            elif failed:  # wait only once for a server that does not answer
                failed[archive] = "not tried"
            elif reason := _fetch(base, archive, progress):
                failed[archive] = reason
    if failed:
        files = ", ".join(f"{Path(a.path).name} (from {a.urls[0]})" for a in failed)
        folder = (base / incomplete[0].path).parent  # all archives of a dataset go into one folder
        reason = next(iter(failed.values()))
        raise DataError(f"{name} could not be downloaded ({reason}): put {files} into {folder} and {again}.")
    return verify(name, base)


def _fetch(base: Path, archive: Archive, progress: Progress | None) -> str | None:
    """Download and unpack an archive. Return None, or the reason why it failed."""
    name = Path(archive.path).name
    part = base / f"{archive.path}.part"
    reasons = []
    for url in archive.urls:
        for _ in range(2):  # if a resumed download has the wrong md5, once more from the start
            resumed = part.exists()
            reason = _download(url, part, name, progress)
            if reason is None and md5_of(part) != archive.md5:
                part.unlink()
                reason = "the downloaded file has the wrong md5"
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
    """Download ``url`` to the file ``part``, and resume if it exists. Return None, or the reason why it failed."""
    have = part.stat().st_size if part.exists() else 0
    headers = {"User-Agent": "bullettrain", **({"Range": f"bytes={have}-"} if have else {})}
    try:
        response = urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        error.close()
        if have and error.code == 416:  # nothing left to download; the md5 is checked later
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
                    return f"broke off after {done} bytes ({error}); the next try resumes there"
                if not piece:
                    break
                done += out.write(piece)
    if total is not None and done < total:
        return f"broke off after {done} of {total} bytes; the next try resumes there"
    return None


def _unpack(packed: Path, base: Path, archive: Archive) -> None:
    """Unpack the files of an archive into a temporary folder, and then move them into place."""
    with tempfile.TemporaryDirectory(dir=base, prefix=".unpack-") as folder:
        damaged = f"{packed} is damaged and could not be unpacked: delete it and try again."
        with raised_as(DataError, damaged, tarfile.TarError, EOFError, gzip.BadGzipFile, zlib.error):
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
        for file in archive.files:
            if not Path(folder, file.path).is_file():
                raise DataError(f"{packed} has no {file.path} in it: delete it and try again.")
        for file in archive.files:
            (base / file.path).parent.mkdir(parents=True, exist_ok=True)
            os.replace(Path(folder, file.path), base / file.path)


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """Show a progress bar in the terminal; yields the ``progress`` argument of `prepare`."""
    with extra("a progress bar"):
        import rich.progress as rich
    bar = rich.Progress(*rich.Progress.get_default_columns(), rich.DownloadColumn())
    tasks: dict[str, rich.TaskID] = {}

    def update(name: str, done: int, total: int | None) -> None:
        if name not in tasks:
            bar.start()
            tasks[name] = bar.add_task(name, total=total)
        bar.update(tasks[name], completed=done, total=total)

    try:
        yield update
    finally:
        if tasks:  # an empty bar is a blank line
            bar.stop()
