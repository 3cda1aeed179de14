"""Files of corrupted images: made whole, in any number of processes, kept when there; and the command around it."""

import fcntl
import hashlib
import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from bullettrain.corruptions import CORRUPTIONS, corrupt, make
from bullettrain.corruptions.overlays import FILES
from bullettrain.data import DataError, ImageSet, load
from pictures import OVERLAYS, pictures
from test_data_readers import python2_batch, write_cifar10, write_cifar100

N = 7


def small_set(n=N):
    images = pictures(n).permute(0, 3, 1, 2).contiguous()
    return ImageSet(images, torch.arange(n) % 10, tuple("0123456789"))


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_file_holds_the_severities_in_turn(tmp_path):
    data = small_set()
    assert make(data, tmp_path / "new" / "c", ["fog", "frost", "contrast"], overlays=OVERLAYS, seed=3) == (
        "fog",
        "frost",
        "contrast",
    )
    assert sorted(files(tmp_path / "new/c")) == ["contrast.npy", "fog.npy", "frost.npy", "labels.npy", "seeds.json"]
    labels = np.load(tmp_path / "new/c/labels.npy")
    assert labels.dtype == np.uint8
    assert labels.tolist() == list(range(N)) * 5
    for name in ("fog", "frost", "contrast"):
        found = np.load(tmp_path / "new/c" / f"{name}.npy")
        expected = [corrupt(pictures(N), name, s, seed=3, overlays=OVERLAYS).numpy() for s in range(1, 6)]
        assert found.dtype == np.uint8
        assert np.array_equal(found, np.concatenate(expected))
        np.save(tmp_path / "saved.npy", found)
        assert (tmp_path / "saved.npy").read_bytes() == (tmp_path / "new/c" / f"{name}.npy").read_bytes()


def test_labels_are_the_released_ones(tmp_path, real_data):
    make(load("cifar10", split="test", root=real_data), tmp_path, [])
    found = hashlib.md5((tmp_path / "labels.npy").read_bytes(), usedforsecurity=False).hexdigest()
    assert found == "c439b113295ed5254878798ffe28fd54"


def test_batches_do_not_change_a_byte(tmp_path, monkeypatch):
    data, names = small_set(), ["gaussian_noise", "frost", "jpeg_compression", "spatter", "zoom_blur"]
    make(data, tmp_path / "one", names, overlays=OVERLAYS)
    monkeypatch.setitem(make.__globals__["BATCH_SIZE"], "cpu", 3)
    make(data, tmp_path / "two", names, overlays=OVERLAYS)
    assert files(tmp_path / "one") == files(tmp_path / "two")


def test_files_that_are_there_are_kept(tmp_path):
    data = small_set()
    make(data, tmp_path, ["fog", "contrast"])
    before = {name: (tmp_path / name).stat().st_mtime_ns for name in files(tmp_path)}
    told = []
    made = make(data, tmp_path, ["contrast", "fog", "snow", "fog"], progress=lambda *told_of: told.append(told_of))
    assert made == ("snow",)
    assert {name for name, *_ in told} == {"snow"}
    assert told[-1] == ("snow", 5 * N, 5 * N)
    assert [done for _, done, _ in told] == sorted({done for _, done, _ in told})
    for name in ("fog.npy", "contrast.npy", "labels.npy"):
        assert (tmp_path / name).stat().st_mtime_ns == before[name]
    assert json.loads((tmp_path / "seeds.json").read_text()) == {"fog": 0, "snow": 0}


def test_what_is_broken_off_leaves_nothing_and_goes_on(tmp_path, monkeypatch):
    monkeypatch.setitem(make.__globals__["BATCH_SIZE"], "cpu", 3)
    data = small_set()

    def stop(name, done, total):
        if name == "fog" and done > total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make(data, tmp_path, ["snow", "fog"], progress=stop)
    assert sorted(files(tmp_path)) == ["labels.npy", "seeds.json", "snow.npy"]
    assert make(data, tmp_path, ["snow", "fog"]) == ("fog",)
    make(data, tmp_path / "whole", ["snow", "fog"])
    assert (tmp_path / "fog.npy").read_bytes() == (tmp_path / "whole/fog.npy").read_bytes()


def test_another_seed_other_images_and_foreign_files_are_refused(tmp_path):
    data = small_set()
    make(data, tmp_path, ["fog", "contrast"])
    with pytest.raises(DataError, match=r"fog\.npy has seed 0, not 1: delete it"):
        make(data, tmp_path, ["fog"], seed=1)
    assert make(data, tmp_path, ["contrast"], seed=1) == ()  # chance has no part in it
    other = ImageSet(data.images, (data.labels + 1) % 10, data.classes)
    with pytest.raises(DataError, match=r"labels\.npy has the labels of other images"):
        make(other, tmp_path, ["snow"])
    np.save(tmp_path / "snow.npy", np.zeros((10, 32, 32, 3), np.uint8))
    with pytest.raises(DataError, match=rf"snow\.npy has 10 images, but there are {5 * N} labels"):
        make(data, tmp_path, ["snow"])
    (tmp_path / "seeds.json").write_text("[")
    with pytest.raises(DataError, match=r"seeds\.json is damaged"):
        make(data, tmp_path, ["fog"])
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="file is a file, not a folder: choose another folder"):
        make(data, tmp_path / "file", ["fog"])


def test_unknown_names_and_other_images_are_refused(tmp_path):
    with pytest.raises(ValueError, match="no corruption 'rain'; there are gaussian_noise"):
        make(small_set(), tmp_path, ["fog", "rain"])
    grey = ImageSet(torch.zeros(2, 1, 28, 28, dtype=torch.uint8), torch.arange(2), ("0", "1"))
    with pytest.raises(DataError, match="images are 28×28×1: corruptions need 32×32×3"):
        make(grey, tmp_path, ["fog"])
    assert files(tmp_path) == {}


def test_released_files_without_a_seed_are_kept(tmp_path):
    data = small_set()
    np.save(tmp_path / "fog.npy", np.zeros((5 * N, 32, 32, 3), np.uint8))
    assert make(data, tmp_path, ["fog"], seed=9) == ()
    assert not np.load(tmp_path / "fog.npy").any()


def test_two_at_once_in_a_folder_are_refused(tmp_path):
    handle = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        with pytest.raises(DataError, match="is in use"):
            make(small_set(), tmp_path, ["fog"])
    finally:
        os.close(handle)
    assert files(tmp_path) == {}


@pytest.mark.parametrize(
    ("name", "module", "package"), [("spatter", "cv2", "OpenCV"), ("jpeg_compression", "PIL", "Pillow")]
)
def test_a_package_that_lacks_is_said_before_anything_is_made(tmp_path, monkeypatch, name, module, package):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=rf'{name} needs {package}: .* pip install "\.\[corruptions\]"'):
        make(small_set(), tmp_path, ["fog", name])
    assert list(files(tmp_path)) == ["labels.npy"]


# --- the command ---

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "60"}


def test_corruptions_are_imported_without_the_extra(tmp_path):
    check = "import sys, bullettrain.corruptions, bullettrain.evaluation.corruptions\n"
    check += "print([m for m in ('cv2', 'PIL', 'scipy', 'skimage', 'rich', 'torchvision') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, cwd=tmp_path, env=ENVIRONMENT)
    assert done.stdout.strip() == "[]", done.stderr


def invoke(monkeypatch, capsys, *words):
    """The command in this process: what it printed, what it complained of, its exit status."""
    from bullettrain.cli import main

    monkeypatch.setattr(sys, "argv", ["bullettrain", "data", "corrupt", *map(str, words)])
    try:
        main()
        code = 0
    except SystemExit as stop:
        code = stop.code
    captured = capsys.readouterr()
    return captured.out, captured.err, code


def test_processes_make_what_one_makes(tmp_path, monkeypatch, capsys):
    write_cifar100(tmp_path, n=3)
    (tmp_path / "frost").mkdir()
    for i, name in enumerate(FILES):
        Image.new("RGB", (300, 200), (90, 120, 30 * i)).save(tmp_path / "frost" / name)
    words = ["--dataset", "cifar100", "--data-dir", str(tmp_path), "--seed", "4", "--device", "cpu"]
    done = subprocess.run(
        [sys.executable, "-m", "bullettrain", "data", "corrupt", *words, "--out", "two", "--jobs", "2"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=ENVIRONMENT,
    )
    assert done.stderr == ""
    assert done.returncode == 0
    assert done.stdout.splitlines() == [
        "3 test images of cifar100 on cpu, 19 corruptions at 5 severities: two",
        *(f"{name}.npy" for name in CORRUPTIONS),
        "19 made: two",
    ]
    expected = {f"{name}.npy" for name in CORRUPTIONS} | {"labels.npy", "seeds.json"}
    assert set(files(tmp_path / "two")) == expected
    assert np.load(tmp_path / "two/labels.npy").tolist() == [90, 91, 92] * 5
    _, _, code = invoke(monkeypatch, capsys, *words, "--out", tmp_path / "one", "--jobs", "1")
    assert code == 0
    assert files(tmp_path / "one") == files(tmp_path / "two")
    some = ["--out", tmp_path / "two", "--only", "fog", "--only", "snow,frost"]
    out, _, code = invoke(monkeypatch, capsys, *words, *some)
    assert code == 0
    assert "0 made, 3 were there" in out


def test_help_shows_an_example(monkeypatch, capsys):
    out, _, code = invoke(monkeypatch, capsys, "--help")
    assert code == 0
    assert "bullettrain data corrupt --dataset cifar10 --out CIFAR-10-C" in " ".join(out.split())


def test_without_overlays_frost_is_missed_and_the_rest_is_made(tmp_path, monkeypatch, capsys):
    write_cifar10(tmp_path, n=2)
    words = ["--data-dir", tmp_path, "--out", tmp_path / "out", "--jobs", "1", "--only", "frost,fog", "--device", "cpu"]
    out, err, code = invoke(monkeypatch, capsys, *words)
    assert code == 2
    assert err.startswith("bullettrain: frost is not made: its overlays are not in ")
    assert str(tmp_path / "frost") in err
    assert err.count("\n") == 1
    assert "1 made" in out
    assert set(files(tmp_path / "out")) == {"fog.npy", "labels.npy", "seeds.json"}
    out, again, code = invoke(monkeypatch, capsys, *words, "--only", "frost")
    assert (again, code) == (err, 2)
    # A file of it that is there needs no overlays.
    np.save(tmp_path / "out/frost.npy", np.zeros((10, 32, 32, 3), np.uint8))
    out, err, code = invoke(monkeypatch, capsys, *words)
    assert (err, code) == ("", 0)
    assert "0 made, 2 were there" in out


def test_frost_alone_without_overlays_makes_nothing(tmp_path, monkeypatch, capsys):
    write_cifar10(tmp_path, n=2)
    out, err, code = invoke(monkeypatch, capsys, "--data-dir", tmp_path, "--out", tmp_path / "out", "--only", "frost")
    assert code == 2
    assert "frost is not made" in err
    assert out == ""
    assert not (tmp_path / "out").exists()


MISTAKES = {
    "name": (["--only", "frog"], "spatter; did you mean 'fog'?"),
    "dataset": (["--dataset", "mnist"], "--dataset is 'mnist'; there are cifar10, cifar100"),
    "data": (["--data-dir", "nowhere"], "bullettrain data prepare cifar10"),
    "device": (["--device", "tpu9"], "no device 'tpu9'"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_and_status_two(tmp_path, mistake, monkeypatch, capsys):
    words, message = MISTAKES[mistake]
    monkeypatch.chdir(tmp_path)
    out, err, code = invoke(monkeypatch, capsys, "--out", "out", *words)
    assert code == 2
    assert message in err
    assert err.startswith("bullettrain: ")
    assert err.count("\n") == 1
    assert out == ""
    assert not (tmp_path / "out").exists()


def test_ctrl_c_and_kill_leave_only_whole_files(tmp_path):
    write_cifar10(tmp_path)
    pixels = np.random.default_rng(0).integers(0, 256, (1500, 3072), dtype=np.uint8)
    (tmp_path / "cifar-10-batches-py/test_batch").write_bytes(python2_batch(pixels, [i % 10 for i in range(1500)]))
    words = [sys.executable, "-m", "bullettrain", "data", "corrupt", "--data-dir", str(tmp_path), "--out", "out"]
    words += ["--jobs", "2", "--only", "defocus_blur,zoom_blur", "--device", "cpu"]
    first, second = (tmp_path / "out" / f"{name}.npy" for name in ("defocus_blur", "zoom_blur"))
    for number in (signal.SIGINT, signal.SIGKILL):
        with subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=ENVIRONMENT
        ) as process:
            for _ in process.stdout:
                if first.exists():  # when it has just been made, and, the second time, at once
                    process.send_signal(number)
                    break
            # The end of what they print is the end of the workers too, whoever was told to end.
            _, complaint = process.communicate(timeout=100)
        assert process.returncode == (130 if number == signal.SIGINT else -number)
        assert "Traceback" not in complaint
        assert not second.exists()
        left = {path.name for path in (tmp_path / "out").iterdir()} - {first.name, "labels.npy"}
        assert left <= (set() if number == signal.SIGINT else {f".{second.name}.new"})
