"""prepare, verify and available, against files and a server of the test's own."""

import gzip
import hashlib
import io
import os
import pickle
import shutil
import subprocess
import sys
import tarfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from bullettrain.data import SOURCES, DataError, available, load, prepare, progress_bar, verify
from bullettrain.data.pickles import read_pickle
from bullettrain.data.sources import Archive, File, Source, digest
from test_data_readers import write_cifar10, write_cifar100, write_mnist


def md5(data: bytes) -> str:
    return hashlib.md5(data).hexdigest()


class Server:
    """A web server that knows Range, and can be told to break off, to ignore Range, or to lie."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.break_after: int | None = None
        self.ranges = True
        self.asked: list[str | None] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                wanted = self.headers.get("Range")
                outer.asked.append(wanted)
                data = outer.files.get(self.path)
                if data is None:
                    self.send_error(404)
                    return
                start = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted and outer.ranges else 0
                if start and start >= len(data):
                    self.send_error(416)
                    return
                self.send_response(206 if start else 200)
                if start:
                    self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
                self.send_header("Content-Length", str(len(data) - start))
                self.end_headers()
                end, outer.break_after = outer.break_after, None
                self.wfile.write(data[start:end])

            def log_message(self, *args):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}/"
        self.thread = threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()

    def close(self) -> None:
        self.http.shutdown()
        self.http.server_close()
        self.thread.join()


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    server = Server()
    yield server
    server.close()


class Published:
    """Tiny MNIST and CIFAR, packed as the real ones are, and the sources that say so."""

    def __init__(self, folder: Path, url: str) -> None:
        write_mnist(folder)
        write_cifar10(folder)
        write_cifar100(folder)
        self.packed: dict[str, bytes] = {}
        mnist = []
        for file in sorted((folder / "MNIST" / "raw").iterdir()):
            path = f"MNIST/raw/{file.name}"
            self.packed[f"{file.name}.gz"] = data = gzip.compress(file.read_bytes(), mtime=0)
            inside = File(path, md5(file.read_bytes()), "idx")
            mnist.append(Archive(f"{path}.gz", (f"{url}{file.name}.gz",), md5(data), (inside,)))
        self.sources = {
            "mnist": Source("MNIST", tuple(mnist)),
            "cifar10": Source("CIFAR-10", (self.tar(folder, "cifar-10-batches-py", "ten.tar.gz", url),)),
            "cifar100": Source("CIFAR-100", (self.tar(folder, "cifar-100-python", "hundred.tar.gz", url),)),
        }

    def tar(self, folder: Path, name: str, archive: str, url: str) -> Archive:
        buffer, files = io.BytesIO(), []
        with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
            for file in sorted((folder / name).iterdir()):
                kind = "bytes" if "100" in name else "names" if file.suffix else "batch"
                files.append(File(f"{name}/{file.name}", digest(file, kind), kind))
                tar.add(file, f"{name}/{file.name}")
            for stray in (f"{name}/readme.html", "../escaped", "/escaped"):
                tar.addfile(tarfile.TarInfo(stray), io.BytesIO())
        self.packed[archive] = buffer.getvalue()
        return Archive(archive, (url + archive,), md5(buffer.getvalue()), tuple(files))


@pytest.fixture
def published(tmp_path, server, monkeypatch):
    found = Published(tmp_path / "original", server.url)
    monkeypatch.setattr("bullettrain.data.sources.SOURCES", found.sources)
    server.files = {f"/{name}": data for name, data in found.packed.items()}
    return found


def leftovers(folder: Path) -> list[str]:
    return sorted(
        str(p.relative_to(folder)) for p in folder.rglob("*") if p.name.endswith(".part") or ".unpack" in p.name
    )


@pytest.mark.parametrize("name", ["mnist", "cifar10", "cifar100"])
def test_download_check_and_unpack(tmp_path, published, server, name):
    seen = []
    where = tmp_path / "new"
    checks = prepare(name, where, progress=lambda *what: seen.append(what))
    assert len(checks) == len(published.sources[name].files)
    assert all(check.ok for check in checks)
    files = sorted(str(p.relative_to(where)) for p in where.rglob("*") if p.is_file())
    assert files == sorted(file.path for file in published.sources[name].files)
    assert {what[0] for what in seen} == {Path(a.path).name for a in published.sources[name].archives}
    for file in {what[0] for what in seen}:
        assert max(done for other, done, _ in seen if other == file) == len(published.packed[file])
        assert {total for other, _, total in seen if other == file} == {len(published.packed[file])}
    assert len(load(name, split="train", root=where)) > 0
    asked = len(server.asked)
    prepare(name, where)
    assert len(server.asked) == asked  # everything is there: nothing is fetched again


def test_a_download_that_breaks_off_goes_on_from_there(tmp_path, published, server):
    data = published.packed["ten.tar.gz"]
    server.break_after = 1000
    with pytest.raises(DataError, match="broke off after 1000") as caught:
        prepare("cifar10", tmp_path / "new")
    assert "\n" not in str(caught.value)
    part = tmp_path / "new" / "ten.tar.gz.part"
    assert part.read_bytes() == data[:1000]
    assert all(c.ok for c in prepare("cifar10", tmp_path / "new"))
    assert server.asked == [None, "bytes=1000-"]
    assert leftovers(tmp_path / "new") == []


def test_a_whole_part_needs_no_more_bytes(tmp_path, published, server):
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "ten.tar.gz.part").write_bytes(published.packed["ten.tar.gz"])
    assert all(c.ok for c in prepare("cifar10", tmp_path / "new"))
    assert len(server.asked) == 1


@pytest.mark.parametrize("ranges", [True, False])
def test_a_part_of_something_else_is_started_again(tmp_path, published, server, ranges):
    server.ranges = ranges
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "ten.tar.gz.part").write_bytes(b"x" * 500)
    assert all(c.ok for c in prepare("cifar10", tmp_path / "new"))
    assert server.asked == (["bytes=500-", None] if ranges else ["bytes=500-"])
    assert leftovers(tmp_path / "new") == []


def test_what_has_the_wrong_checksum_is_not_unpacked(tmp_path, published, server):
    server.files["/ten.tar.gz"] = b"<html>log in to this network</html>"
    with pytest.raises(DataError, match="the downloaded file has the wrong md5"):
        prepare("cifar10", tmp_path / "new")
    assert [p for p in (tmp_path / "new").rglob("*") if p.is_file()] == []


def test_the_second_address_is_tried(tmp_path, published, monkeypatch):
    (archive,) = published.sources["cifar10"].archives
    file = tmp_path / "ten.tar.gz"
    file.write_bytes(published.packed["ten.tar.gz"])
    gone = archive.urls[0].replace("ten", "gone")
    urls = (gone, (tmp_path / "none").as_uri(), file.as_uri())
    source = Source("x", (Archive(archive.path, urls, archive.md5, archive.files),))
    monkeypatch.setitem(published.sources, "cifar10", source)
    assert all(c.ok for c in prepare("cifar10", tmp_path / "new"))


def test_without_a_network_the_message_says_which_file_goes_where(tmp_path, published, server, monkeypatch):
    server.files.clear()
    where = tmp_path / "new"
    with pytest.raises(DataError) as caught:
        prepare("mnist", where)
    message = str(caught.value)
    assert "\n" not in message
    assert "127.0.0.1: HTTP 404" in message
    for archive in published.sources["mnist"].archives:
        assert f"{Path(archive.path).name} (from {archive.urls[0]})" in message
    command = f"bullettrain data prepare mnist --data-dir {where}"
    assert f"into {where / 'MNIST' / 'raw'} and run `{command}` again." in message
    assert len(server.asked) == 1  # the others were not waited for
    with pytest.raises(DataError, match=rf"put ten.tar.gz \(from .*\) into {where} and run"):
        prepare("cifar10", where)
    monkeypatch.setenv("BULLETTRAIN_DATA", str(where))  # looked for there anyway
    with pytest.raises(DataError, match="run `bullettrain data prepare cifar10` again"):
        prepare("cifar10", where)


@pytest.mark.parametrize("name", ["mnist", "cifar10"])
def test_archives_put_there_by_hand_are_used_and_kept(tmp_path, published, server, name):
    where = tmp_path / "new"
    for archive in published.sources[name].archives:
        (where / archive.path).parent.mkdir(parents=True, exist_ok=True)
        (where / archive.path).write_bytes(published.packed[Path(archive.path).name])
    assert all(c.ok for c in prepare(name, where))
    assert server.asked == []
    assert all((where / archive.path).exists() for archive in published.sources[name].archives)
    assert len(load(name, split="test", root=where)) > 0
    assert not (tmp_path / "escaped").exists()


def test_a_truncated_archive_put_there_by_hand_is_named(tmp_path, published):
    where = tmp_path / "new"
    where.mkdir()
    (where / "ten.tar.gz").write_bytes(published.packed["ten.tar.gz"][:-100])
    again = rf"delete it and run `bullettrain data prepare cifar10 --data-dir {where}` again"
    with pytest.raises(DataError, match=rf"ten.tar.gz is truncated or not the original file .*: {again}"):
        prepare("cifar10", where)


def test_damaged_files_are_replaced_and_the_others_left(tmp_path, published, server):
    where = tmp_path / "new"
    prepare("mnist", where)
    server.asked.clear()
    victim = where / "MNIST" / "raw" / "t10k-labels-idx1-ubyte"
    victim.write_bytes(victim.read_bytes()[:-1])
    assert all(c.ok for c in prepare("mnist", where))
    assert len(server.asked) == 1


@pytest.mark.parametrize("damage", ["no members", "link"])
def test_archives_without_the_files_are_refused(tmp_path, server, damage, monkeypatch):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        link = tarfile.TarInfo("folder/file" if damage == "link" else "folder/other")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/hostname"
        tar.addfile(link)
    server.files["/a.tar.gz"] = buffer.getvalue()
    archive = Archive("a.tar.gz", (server.url + "a.tar.gz",), md5(buffer.getvalue()), (File("folder/file", "0"),))
    monkeypatch.setitem(SOURCES, "x", Source("x", (archive,)))
    with pytest.raises(DataError, match="has no folder/file in it"):
        prepare("x", tmp_path / "new")
    assert not (tmp_path / "new" / "folder").exists()


def test_a_folder_that_cannot_be_written_is_named(tmp_path, published):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match=r"file is a file, not a folder: choose another folder with --data-dir"):
        prepare("cifar10", tmp_path / "file")


def test_verify_tells_missing_wrong_and_unreadable_apart(tmp_path, published):
    where = tmp_path / "original"
    assert all(c.ok for name in published.sources for c in verify(name, where))
    folder = where / "cifar-10-batches-py"
    (folder / "test_batch").unlink()
    shutil.copy(folder / "data_batch_1", folder / "data_batch_2")
    (folder / "data_batch_4").write_bytes(b"text")
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": list("abcdefghij")}, 2))
    checks = {c.path.name: c for c in verify("cifar10", where)}
    states = {name: c.state for name, c in checks.items()}
    assert states == {
        "data_batch_1": "ok",
        "data_batch_2": "wrong",
        "data_batch_3": "ok",
        "data_batch_4": "unreadable",
        "data_batch_5": "ok",
        "test_batch": "missing",
        "batches.meta": "wrong",
    }
    assert "sha256" in checks["data_batch_2"].detail
    assert str(folder / "data_batch_4") in checks["data_batch_4"].detail
    # The digest is of what the batch says, whoever pickled it.
    content = read_pickle(folder / "data_batch_3", "cifar10")
    again = {"data": np.array(content["data"]), "labels": content["labels"], "more": "said"}
    (folder / "data_batch_3").write_bytes(pickle.dumps(again, 4))
    assert {c.path.name: c.ok for c in verify("cifar10", where)}["data_batch_3"]


def test_available_counts_files(tmp_path, published):
    where = tmp_path / "original"
    shutil.rmtree(where / "cifar-100-python")
    (where / "cifar-10-batches-py" / "test_batch").unlink()
    found = {a.name: a for a in available(where)}
    assert {name: a.state for name, a in found.items()} == {
        "digits": "built in",
        "mnist": "here",
        "cifar10": "partly",
        "cifar100": "missing",
    }
    assert found["cifar10"].missing == (where / "cifar-10-batches-py" / "test_batch",)


def test_digits_need_nothing_and_others_are_unknown(tmp_path):
    assert prepare("digits", tmp_path) == verify("digits", tmp_path) == []
    for function in (prepare, verify):
        with pytest.raises(DataError, match="no dataset 'imagenet'; mnist, cifar10, cifar100 can be"):
            function("imagenet", tmp_path)
        with pytest.raises(DataError, match="'npz:x' is your own"):
            function("npz:x", tmp_path)


def test_progress_bar_takes_what_prepare_tells(tmp_path, published, capsys):
    with progress_bar() as progress:
        prepare("cifar10", tmp_path / "new", progress=progress)
    assert "ten.tar.gz" in capsys.readouterr().out
    with pytest.raises(DataError), progress_bar() as progress:
        prepare("nothing", tmp_path, progress=progress)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("name", list(SOURCES))
def test_the_real_files_have_the_right_digests(name):
    if not os.environ.get("BULLETTRAIN_DATA"):
        pytest.skip("BULLETTRAIN_DATA is not set: no real datasets to verify")
    assert [c.detail for c in verify(name) if not c.ok] == []


def test_importing_the_package_needs_torch_and_numpy_only():
    code = "import bullettrain.data, sys; print([m for m in ('sklearn', 'PIL', 'rich', 'scipy') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
