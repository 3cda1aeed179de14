"""The README says what the project does: its commands are there to be run, its figures are recorded."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def test_the_speed_table_is_what_was_recorded():
    check = [sys.executable, str(ROOT / "benchmarks" / "speed_table.py"), "--check"]
    done = subprocess.run(check, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_table_of_baselines_is_what_was_recorded():
    check = [sys.executable, str(ROOT / "benchmarks" / "baselines_table.py"), "--check"]
    done = subprocess.run(check, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_two_commands_do_their_own_set_up():
    section = README.split("## Two commands", 1)[1].split("\n## ", 1)[0]
    train, test = re.findall(r"```sh\n(.*?)```", section, re.S)
    assert train.strip().endswith("bullettrain train")
    assert "pytest" in test
    assert all("-c constraints.txt -e" in command and "venv" in command for command in (train, test))


def test_the_picture_and_the_tables_of_methods_are_what_was_recorded():
    check = [sys.executable, str(ROOT / "benchmarks" / "plane.py"), "--check"]
    done = subprocess.run(check, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def plane():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        import plane

        yield plane
        for name in ("plane", "row_names"):
            del sys.modules[name]


def test_runs_that_differ_in_the_seed_are_one_result(plane, tmp_path):
    def run(**cells):
        return ",".join(str(cells.get(name, "")) for name in plane.COLUMNS)

    three = [
        run(method="A", command="train", allocation="uniform", steps="3/3/3", eps=8 / 255, weights="last", seed=seed,
            clean=82, pgd20=51, apgd=accuracy + 1, apgd_images=4000, autoattack=accuracy, autoattack_images=10000,
            minutes=2, passes=9)
        for seed, accuracy in ((0, 48), (1, 49), (2, 50))
    ]  # fmt: skip
    other = run(method="A", eps=0.031, weights="averaged", seed=0, clean=90, autoattack=60, autoattack_images=1000)
    sweep = run(
        method="B", command="train", eps=0.031, weights="last", seed=0, clean=80, pgd20=39.55, apgd=47, apgd_images=1000
    )
    file = tmp_path / "plane.csv"
    file.write_text("\n".join([",".join(plane.COLUMNS), other, *three, sweep]) + "\n")
    results = plane.read(file)
    table = plane.table(results, ["A"]).splitlines()[2:]
    assert table == ["| A | 9.0 | 82.00 ± 0.00 | 51.00 ± 0.00 | 50.00 ± 0.58 |"]
    for picture, figures in (("plane", ("A", 2, 49, 0.58)), ("seeds", ("A", 9, 50, 0.58))):
        points = plane.points(results, picture)
        assert [tuple(p[name] for name in ("name", "cost", "accuracy", "error")) for p in points] == [figures]
    every = plane.long_table(results)
    assert every.splitlines()[2].startswith("| A | – | – | 90.0 |")  # AutoAttack 60 %
    assert "| 39.6 | 47.0 | – | 1 seed, 1,000 images, last weights |" in every
    assert "weights" not in plane.long_table(results[1:])
    assert [result.group for result in results] == ["reported", "8/255", "0.031"]
    assert {result.group for result in plane.read()} == {"8/255", "0.031", "reported"}
    with pytest.raises(SystemExit, match="no method 'B' with three seeds"):
        plane.table(results, ["B"])


def test_the_readme_is_short_and_its_table_too():
    assert len(README.split()) <= 1200
    table = README.split("<!-- plane:")[1].split("<!-- /plane -->")[0]
    rows = [line for line in table.splitlines() if line.startswith("|")][2:]
    assert 1 <= len(rows) <= 6
    assert all(row.count("±") == 3 for row in rows)
    about = README.split("<!-- plane:")[0]
    assert "three seeds each" in about
    assert "4,000 images" in about


def test_claims_on_few_images_say_so_in_the_same_line():
    section = README.split("## Which should I use?", 1)[1].split("\n## ", 1)[0]
    for item in section.splitlines():
        if item.startswith("| ") and "AutoAttack" in item:
            assert re.search(r"images", item), item
            assert re.search(r"seed", item), item


def test_the_example_runs():
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "own_loop.py"), "--epochs", "1"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 3
    assert "TRADES + BulletTrain" in done.stdout


def test_the_table_of_both_engines_is_what_was_recorded():
    """docs/engine_notes.md: the present engine beside the one before it."""
    page = (ROOT / "docs" / "engine_notes.md").read_text(encoding="utf-8")
    lines = page.split("<!-- one engine -->\n")[1].split("<!-- /one engine -->")[0].splitlines()[2:]
    files = sorted((ROOT / "results" / "bench" / "one-engine").glob("*-d202aa7.json"))
    assert len(files) == len(lines)
    widest = [0.0, 0.0]
    for file, line in zip(files, lines, strict=True):
        both = [file, file.with_name(file.name.replace("d202aa7", "f70dca3"))]
        now, before = ({row["method"]: row for row in json.loads(f.read_text(encoding="utf-8"))["rows"]} for f in both)
        mined = now["bullettrain"]
        parts = " / ".join(f"{mined[name]:.1f}" for name in ("select_ms", "attack_ms", "update_ms"))
        cells = [f"{now[m]['step_ms']:.2f} / {before[m]['step_ms']:.2f}" for m in ("baseline", "bullettrain")]
        memory = f"{mined['memory_gib']:.1f} / {before['bullettrain']['memory_gib']:.1f}"
        assert line.endswith(f"| {cells[0]} | {cells[1]} | {parts} | {memory} |")
        assert all(abs(now[m]["step_ms"] / before[m]["step_ms"] - 1) < 0.02 for m in now)
        spreads = ([row["spread_ms"] / row["step_ms"] for row in rows.values()] for rows in (now, before))
        widest = [max(pair) for pair in zip(widest, map(max, spreads), strict=True)]
    for text in (f"present engine differ by up to {100 * widest[0]:.0f} %", f"by up to {100 * widest[1]:.0f} %."):
        assert text in " ".join(page.split())


def test_speed_ups_in_the_text_are_those_of_the_present_engine():
    pages = {
        name: " ".join((ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8").split())
        for name in ("speed", "engine_notes", "methods")
    }
    gains = {}
    for name in ("preact-resnet-18-k1", "preact-resnet-18-k8", "wrn-34-10-k4"):
        file = ROOT / "results" / "bench" / "one-engine" / f"{name}-d202aa7.json"
        (row,) = (r for r in json.loads(file.read_text(encoding="utf-8"))["rows"] if r["method"] == "bullettrain")
        gains[name] = row["wall_clock_speedup"], row["work_speedup"]
    (one, work), (eight, most), (large, saved) = gains.values()
    assert f"{one:.1f} times faster than the plain method one mini-batch at a time" in pages["speed"]
    assert f"{eight:.1f} in groups of eight" in pages["speed"]
    assert f"{large:.2f} times faster, for {saved:.2f} times less work" in pages["speed"]
    part = f"only {one / work:.2f} (k = 1) to {eight / most:.2f} (k = 8) of the saved work becomes saved time"
    assert part in pages["engine_notes"]
    words = (
        f"{one:.1f} times faster at k = 1 on PreActResNet-18, {eight:.1f} in groups of eight, {large:.2f} on WRN-34-10"
    )
    assert words in pages["methods"]
    assert f"mini-batches are {large:.2f} times faster" in README
