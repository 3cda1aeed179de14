"""The report: what it says, that it is complete in itself, and that a real browser shows it."""

import errno
import json
import math
import os
import re
import shutil
import subprocess
import sys
from dataclasses import asdict
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

from bullettrain.cli.app import app
from bullettrain.evaluation.results import Entry, new_result
from bullettrain.evaluation.specs import Defaults, parse_attack
from bullettrain.formatting import duration, number, percent, points, setting, times
from bullettrain.reporting import Run, write_report, write_reports
from bullettrain.reporting.plotting import MAX_CURVE_POINTS, thin
from bullettrain.run_folder import RunError, RunFolder
from bullettrain.run_folder import log as log_module
from made_runs import make_comparison, make_run, read_log, write_config, write_log, write_samples

MINING = ["shares", "svar", "histogram", "allocation"]
CURVES = ["loss", "accuracy"]


# ------------------------------------------------------------------------------------------ a real browser


ORPHANS = """
[...document.querySelectorAll('.grid')].filter(grid => {
    const last = grid.lastElementChild.getBoundingClientRect(), all = grid.getBoundingClientRect();
    return Math.abs(last.right - all.right) > 1;
}).map(grid => grid.parentElement.id)
"""


def test_the_browser_would_notice(browser, tmp_path):
    page = tmp_path / "bad.html"
    page.write_text('<img src="http://127.0.0.1:9/x.png"><script>console.error("no"); nowhere()</script>')
    problems = " ".join(browser.open(page))
    assert "request: http://127.0.0.1:9/x.png" in problems
    assert "consoleAPICalled" in problems
    assert "exceptionThrown" in problems


@pytest.mark.parametrize("width", [1200, 390])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("kind", ["run", "comparison"])
def test_a_browser_shows_it(browser, pages, kind, width, dark):
    assert browser.open(pages[kind], width=width, dark=dark) == []
    browser.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
    plots = browser.evaluate(
        "[...document.querySelectorAll('svg.plot')].map(svg => { const box = svg.getBoundingClientRect();"
        " return [svg.closest('figure').id, box.width, box.height, svg.querySelectorAll('path, use').length] })"
    )
    race = ["race-clock", "race-epoch"] if kind == "comparison" else []
    assert [name for name, *_ in plots] == [*race, *CURVES, *MINING]
    assert all(wide > 250 and high > 150 and marks > 5 for _, wide, high, marks in plots)
    images = browser.evaluate("[...document.images].map(image => [image.naturalWidth, image.width])")
    assert len(images) == 72
    assert all(natural == 32 and shown > 60 for natural, shown in images)
    assert browser.evaluate("document.documentElement.scrollWidth") <= width, "no sideways scrolling"
    assert browser.evaluate(ORPHANS) == [], "a row of cards that is not filled"
    assert browser.evaluate(
        "[...document.querySelectorAll('td, th')].filter(each => !each.innerText.trim()).length"
    ) == (1 if kind == "comparison" else 0), "an empty cell, but for the corner of the comparison"
    style = "getComputedStyle(document.querySelector({}))"
    background = browser.evaluate(style.format("'body'") + ".backgroundColor")
    robust = browser.evaluate(style.format("""'#shares [style*="fill: var(--robust)"]'""") + ".fill")
    assert background == ("rgb(16, 19, 23)" if dark else "rgb(244, 245, 247)")
    assert robust == ("rgb(110, 163, 245)" if dark else "rgb(47, 111, 208)"), "figures follow light and dark"


@pytest.mark.parametrize("width", [1200, 1000, 800, 600, 390])
def test_headline_cards_fill_their_rows_whatever_their_number(browser, pages, width):
    assert browser.open(pages["run"], width=width) == []
    for count in (6, 5, 4, 3, 2):
        browser.evaluate(
            "{ const cards = document.querySelector('.cards');"
            f" while (cards.children.length < {count}) cards.append(cards.lastElementChild.cloneNode(true));"
            f" while (cards.children.length > {count}) cards.lastElementChild.remove() }}"
        )
        assert browser.evaluate(ORPHANS) == [], count
        assert browser.evaluate("document.documentElement.scrollWidth") <= width


# ------------------------------------------------------------------------------------------ what it says


class Page(HTMLParser):
    """The elements of a page and the text that a reader sees."""

    def __init__(self, path):
        super().__init__()
        self.source = Path(path).read_text(encoding="utf-8")
        self.elements, self._text, self._open = [], [], []
        self.feed(self.source)
        self.text = re.sub(r"\s+", " ", " ".join(self._text).replace("\u202f", " "))
        self.ids = [attributes["id"] for _, attributes in self.elements if "id" in attributes]

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        self._open.append(tag)

    def handle_endtag(self, tag):
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data):
        if "style" not in self._open:
            self._text.append(data)

    @property
    def figures(self):
        return [attributes["id"] for tag, attributes in self.elements if tag == "figure" and "id" in attributes]


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    root = tmp_path_factory.mktemp("pages")
    return {
        "run": write_report(make_run(root / "run")),
        "comparison": write_report(make_comparison(root / "comparison")),
        "baseline": write_report(make_run(root / "baseline", plain=True, samples=False)),
    }


def report(folder):
    return Page(write_report(folder))


@pytest.mark.parametrize("kind", ["run", "comparison", "baseline"])
def test_complete_in_itself(pages, kind):
    page = Page(pages[kind])
    assert "://" not in page.source
    assert not {"script", "iframe", "object", "embed"} & {tag for tag, _ in page.elements}
    links = [attributes["href"] for tag, attributes in page.elements if tag == "a"]
    assert links == (["bullettrain/report.html", "baseline/report.html"] if kind == "comparison" else [])
    for tag, attributes in page.elements:
        for name in ("src", "href", "xlink:href", "srcset", "action"):
            if (tag, name) != ("a", "href"):
                assert attributes.get(name, "#").startswith(("#", "data:image/png;base64,"))
        assert not [name for name in attributes if name.startswith("on")]
    assert len(page.source) < 1_500_000
    assert len(page.ids) == len(set(page.ids)), "ids clash"
    used = re.findall(r'(?:url\(|href=")#([^")]+)', page.source)
    assert used
    assert set(used) <= set(page.ids)
    assert set(re.findall(r"var\(--([\w-]+)\)", page.source)) <= set(re.findall(r"--([\w-]+):", page.source))
    plots = re.findall(r"<svg.*?</svg>", page.source, flags=re.DOTALL)
    assert plots
    assert not re.search(r"#[0-9a-f]{6}", "".join(plots)), "a colour that does not follow light and dark"
    assert all('role="img" aria-label="' in plot for plot in plots)


def test_headline_and_figures(pages):
    page = Page(pages["run"])
    assert page.figures == [*CURVES, *MINING]
    for words in (
        "81.0 % on clean images and 51.5 % against PGD-20 (L∞ 8/255), after 2 min 38 s of training",
        "finished",
    ):
        assert words in page.text
    for words in (
        "Theoretical 2.04×",
        "Work 1.79×",
        "Two speed-ups Both count work. The time saved was not measured",
        "not measured: that takes a run of the baseline on the same device",
        "14.5 passes an example, 27.0 without",
    ):
        assert words in page.text
    assert "<h1>run</h1>" in page.source, "a report is called by its folder, as --out names it"
    assert "recipe trades-short TRADES with BulletTrain L∞, ε = 8/255 preact-resnet18 cifar10" in page.text
    for words in ("24 % outlier 0 steps each", "33 % boundary 10 steps each", "43 % robust 2 steps each"):
        assert words in page.text
    assert "last 81.46 % 51.21 % best 81.02 % 51.48 % averaged 81.71 % 51.63 %" in page.text
    assert "10 times amplified" in page.text
    assert "8/255 = 0.0313725" in page.text
    assert "$ bullettrain train trades-short --seed 0" in page.text
    assert ">probe for collapse</text>" in page.source
    assert re.search(r">boundary \d\d %</text>", page.source), "a figure's words are text, beside what they name"
    assert page.source.count("data:image/png") == 73, "eight examples of each class, three images each, and the icon"


def test_a_baseline_says_why_nothing_was_mined(pages):
    page = Page(pages["baseline"])
    assert page.figures == CURVES
    assert "Every example got 10 steps, so nothing was mined" in page.text
    assert "Images before and after the attack" not in page.text
    assert "Theoretical" not in page.text


@pytest.mark.parametrize(("objective", "got"), [("trades", "10 steps"), ("augmix", "views")])
def test_examples_of_a_baseline_have_no_category(tmp_path, objective, got):
    make_run(tmp_path, epochs=1, plain=True)
    config = yaml.safe_load((tmp_path / "config.yaml").read_text())
    config["method"]["objective"] = objective
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    page = report(tmp_path)
    assert f"Every example got {got}, so nothing was mined" in page.text
    assert not [attributes for _, attributes in page.elements if "chip" in attributes.get("class", "")]
    assert page.source.count("data:image/png") == 25, "eight examples, three images each, and the icon"


def test_comparison(pages):
    page = Page(pages["comparison"])
    assert page.figures == ["race-clock", "race-epoch", *CURVES, *MINING]
    for words in (
        "Trained in 2 min 38 s with BulletTrain and in 3 min 32 s without: 1.34× by the clock",
        "Accuracy changed by +2.2 points on clean images and −0.6 points against PGD-20 (L∞ 8/255)",
        "Clean accuracy 79.31 % 81.46 % +2.15 points",
        "Training time 3 min 32 s 2 min 38 s 1.34×",
        "Passes an example 27.0 14.5 1.79×",
        "Wall-clock 1.34×",
        "Clean accuracy 81.5 % test set, last weights; baseline 79.3 %, +2.2 points",
        "Test accuracy of the last weights.",
    ):
        assert words in page.text
    assert "capturing" not in page.text


@pytest.mark.parametrize(("seconds", "device", "doubt"), [(20.0, "H200", "less than a minute"), (90.0, "CPU", "a CPU")])
def test_a_comparison_begins_with_counted_work_where_the_clock_says_little(tmp_path, seconds, device, doubt):
    make_comparison(tmp_path)
    content = json.loads((tmp_path / "comparison.json").read_text())
    for row in content["rows"]:
        row["seconds"] = seconds
    (tmp_path / "comparison.json").write_text(json.dumps(content))
    config = tmp_path / "baseline" / "config.yaml"
    config.write_text(config.read_text().replace("NVIDIA H200", device))
    head = report(tmp_path).text.partition("Accuracy changed")[0]
    assert "14.5 passes an example with BulletTrain and 27.0 without: 1.79× less work. Trained in " in head
    assert doubt in head


def evaluated(folder, attack, accuracy, weights="best", examples=1000):
    """An evaluation of the run in ``folder`` by one attack at the threat it was trained at."""
    settings = {"norm": "linf", "eps": 8 / 255}
    made = new_result(parse_attack(attack, Defaults(**settings)), accuracy * examples, examples, 60.0)
    entry = Entry(
        "run", weights, "digest", "cifar10", "images", examples, ["a", "b"], {}, [made], recipe="trades-short"
    )
    RunFolder(folder).write_json("evaluation.json", {"format": 1, "evaluations": [asdict(entry)]})


def test_robustness_is_what_autoattack_leaves(tmp_path):
    folder = make_comparison(tmp_path)
    evaluated(folder / "bullettrain", "autoattack", 0.462, "last")
    own, comparison = write_reports(folder / "bullettrain")
    assert "46.2 %" in Page(own).text.partition("Clean accuracy")[0]
    page = Page(comparison)
    first = page.text.partition("AutoAttack (L∞ 8/255) accuracy")[2]
    assert first.startswith(" 46.2 % 1 000 test images, last weights Clean accuracy 81.5 %")
    assert "AutoAttack (L∞ 8/255) leaves 46.2 % of 1 000 test images (last weights)." in page.text
    assert "--attack autoattack" not in page.text.partition("Next commands")[2]
    evaluated(folder / "baseline", "autoattack", 0.483, "last")
    assert "last weights; baseline 48.3 %, −2.1 points Clean accuracy" in report(folder).text
    evaluated(folder / "bullettrain", "pgd50", 0.5, "last", examples=1000)  # on fewer images than training ended with
    assert "PGD-50 (L∞ 8/255) accuracy 50.0 %" not in report(folder).text


def test_attacks_are_sorted_by_threat(tmp_path):
    folder = make_run(tmp_path / "run")
    parsed = [
        parse_attack(name, Defaults("linf", eps))
        for name, eps in (("pgd20", 0.1), ("clean", 0.1), ("pgd50", 0.05), ("pgd10", 0.1))
    ]
    results = [new_result(attack, 50, 100, 1.0) for attack in parsed]
    entry = Entry("run", "best", "digest", "cifar10", "images", 100, ["a", "b"], {}, results)
    RunFolder(folder).write_json("evaluation.json", {"format": 1, "evaluations": [asdict(entry)]})
    table = report(folder).text.partition("Evaluated after training")[2]
    names = [table.index(name) for name in ("Clean none", "PGD-50 L∞ 0.05", "PGD-20 L∞ 0.1", "PGD-10 L∞ 0.1")]
    assert names == sorted(names)


def test_a_headline_from_few_images_has_its_interval(tmp_path):
    folder = make_run(tmp_path / "run", epochs=2)
    assert "95\u202f% interval" not in Path(write_report(folder)).read_text(encoding="utf-8")
    records = [record | ({"examples": 12, "accuracy": 1.0} if record.get("kind") == "evaluation" else {})
               for record in read_log(folder)]  # fmt: skip
    write_log(folder, records)
    page = Path(write_report(folder)).read_text(encoding="utf-8").replace("\xa0", " ").replace("\u202f", " ")
    low = 100 / (1 + 1.96**2 / 12)  # Wilson's score if all are correct
    assert f"100.0 % (95 % interval {low:.0f} to 100) on clean images" in page
    assert page.count(f"test set, best weights; 95 % interval {low:.0f} to 100") == 2


def test_attack_norm_and_radius_are_explained(pages, tmp_path):
    words = "PGD-20 (L∞ 8/255): 20 gradient steps that change every value of every pixel by at most ε = 8/255"
    assert words in Page(pages["run"]).text
    folder = make_run(tmp_path / "run")
    config = yaml.safe_load((folder / "config.yaml").read_text())
    config["method"] |= {"norm": "l2", "eps": 0.5}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    assert "that change an image, in Euclidean length, by at most ε = 0.5" in report(folder).text


def test_a_comparison_says_which_run_the_rest_of_the_page_is_of(pages):
    text = Page(pages["comparison"]).text
    said = text.index("Everything below this section is of the run with BulletTrain alone")
    assert text.index("Compared with the baseline") < said < text.index("Three speed-ups")


@pytest.mark.parametrize("paired", [True, False])
def test_a_comparison_says_how_sure_it_is(tmp_path, paired):
    errors = {"clean": {"error": 0.0031, "paired": paired}, "pgd20": {"error": 0.0032, "paired": paired}}
    page = report(make_comparison(tmp_path, errors))
    kind = "over the same test images, paired" if paired else "over the test images, unpaired"
    for words in (
        "by +2.2 ± 0.3 points on clean images and −0.6 ± 0.3 points against PGD-20 (L∞ 8/255) (too close to tell).",
        f"± is one standard error ({kind})",
        "PGD-20 (L∞ 8/255) accuracy 51.84 % 51.21 % −0.63 ± 0.32 points",
    ):
        assert words in page.text


def test_compiling_and_capturing_are_not_kept_quiet(tmp_path):
    make_comparison(tmp_path)
    file = tmp_path / "comparison.json"
    content = json.loads(file.read_text())
    taken = {"baseline": 26.0, "bullettrain": 104.0}
    for row in content["rows"]:
        row["capture_seconds"] = taken[row["name"]]
    file.write_text(json.dumps(content))
    log = read_log(tmp_path / "bullettrain")
    log[-1]["capture_seconds"] = 104.0
    write_log(tmp_path / "bullettrain", log)
    page = report(tmp_path)
    for words in (
        "baseline 3 min 32 s; compiling and capturing: 1 min 44 s more",
        "Compiling and capturing, 1 min 44 s and without mining 26.0 s, are not in it: with them it is 0.91×.",
        "Compiling and capturing 26.0 s 1 min 44 s",
    ):
        assert words in page.text
    assert "epochs; compiling and capturing: 1 min 44 s more" in report(tmp_path / "bullettrain").text


@pytest.mark.parametrize("kind", ["run", "comparison", "baseline"])
def test_norm_and_eps_stand_beside_every_robust_figure(pages, kind):
    text = Page(pages[kind]).text.partition("Next commands")[0]
    assert "L∞ 8/255" in text.partition("Clean accuracy")[0]
    assert re.findall(r"PGD-20(?! \(L∞ 8/255\))", text) == []
    assert re.findall(r"PGD-10(?! \(L∞ 8/255\))", text) == []


def test_the_last_section_says_what_next(tmp_path, pages):
    text = Page(pages["run"]).text
    folder = pages["run"].parent
    commands = re.findall(r"\$ (bullettrain .*?) (?=[A-Z])", text.partition("Next commands")[2])
    assert commands == [
        f"bullettrain evaluate {folder} --attack autoattack",
        f"bullettrain train {folder} --compare",
        f"bullettrain predict {folder} image.png",
        f"bullettrain export {folder} --format onnx",
    ]
    assert "--compare" not in Page(pages["comparison"]).text.partition("Next commands")[2]
    make_run(tmp_path, epochs=1, end=False, samples=False)
    assert f"$ bullettrain train {tmp_path} --resume" in report(tmp_path).text
    config = tmp_path / "config.yaml"
    config.write_text(re.sub(r"name: preact\S*", "name: my.nets:make", config.read_text()))
    assert f"$ bullettrain train {tmp_path} --network my.nets:make --resume" in report(tmp_path).text


def test_text_of_the_run_is_text(tmp_path):
    nasty = '<script>alert("1")</script>&<img src=x onerror=y>'
    make_run(tmp_path, epochs=1, recipe=nasty, samples=False)
    write_log(tmp_path, [*read_log(tmp_path), {"kind": "warning", "step": 7, "message": nasty}])
    page = report(tmp_path)
    assert "script" not in {tag for tag, _ in page.elements}
    assert "img" not in {tag for tag, _ in page.elements}
    assert page.text.count('<script>alert("1")</script>') == 4  # facts, warning, configuration, command


def test_unfinished(tmp_path):
    make_run(tmp_path, epochs=4, end=False, samples=False)
    write_config(tmp_path, "trades-short", 30, {"boundary": 10, "robust": 2, "outlier": 0})
    page = report(tmp_path)
    assert "not finished" in page.text
    assert "as far as epoch 4 of 30, step 1 560" in page.text
    assert "Training time so far 21." in page.text
    assert page.figures == [*CURVES, *MINING]


def test_ended_early_and_warnings(tmp_path):
    make_run(tmp_path, epochs=2, end=False, samples=False)
    warnings = [{"kind": "warning", "step": step, "message": "robust accuracy collapsed"} for step in (500, 530)]
    write_log(tmp_path, [*read_log(tmp_path), *warnings, {"kind": "end", "reason": "time limit reached"}])
    page = report(tmp_path)
    assert "It ended at epoch 2 of 2, step 780: time limit reached." in page.text
    assert "Step 500: robust accuracy collapsed (2 times)" in page.text


def test_resumed_run(tmp_path):
    make_run(tmp_path, epochs=2, samples=False)
    again = [{"kind": "step", "step": 400, "epoch": 1.03, "loss": 9.0}]
    write_log(tmp_path, [*read_log(tmp_path), *again])
    run = Run.read(tmp_path)
    assert run.ended is None, "it went on after that end"
    assert run.steps["step"][-2:].tolist() == [390, 400], "what was logged beyond the checkpoint is gone"
    assert (np.diff(run.steps["step"]) > 0).all()


def test_a_log_cut_off_or_damaged(tmp_path):
    make_run(tmp_path, epochs=1, samples=False)
    log = tmp_path / "metrics.jsonl"
    whole = log.read_text()
    log.write_text(whole + '{"kind": "somethin-new", "x": 1}\n{"kind": "step", "step": 39')
    assert "could not be read" not in report(tmp_path).text
    log.write_bytes(b'{"kind": "st\xc3\n[1, 2]\n' + whole.encode())
    assert "could not be read and were left out: 2." in report(tmp_path).text
    odd = [
        {"kind": "step"},
        {"kind": "step", "step": "x", "epoch": None},
        {"kind": "batch", "svar": [1.0]},
        {"kind": "end"},
    ]
    write_log(tmp_path, odd)
    assert "there are no curves" in report(tmp_path).text


def test_losses_that_are_no_numbers(tmp_path):
    make_run(tmp_path, epochs=2, samples=False)
    records = read_log(tmp_path)
    for record, loss in zip(records[3:6], (math.nan, math.inf, None), strict=True):
        record["loss"] = loss
    write_log(tmp_path, records)
    page = report(tmp_path)
    assert "not a finite number in 3 of 26 log entries, first at step 120" in page.text
    assert "loss" in page.figures


@pytest.mark.parametrize("missing", ["metrics.jsonl", "samples.safetensors"])
def test_missing_files(tmp_path, missing):
    make_run(tmp_path, epochs=1)
    (tmp_path / missing).unlink()
    page = report(tmp_path)
    assert ("nothing is logged yet" in page.text) == (missing == "metrics.jsonl")
    assert ("Images before and after the attack" in page.text) == (missing == "metrics.jsonl")


def reported(folder):
    """What `bullettrain report` says: its lines, or its error."""
    done = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["report", str(folder)])
    return done.exception if isinstance(done.exception, RunError) else done.output.splitlines()


def test_the_command_says_what_of_a_run_is_damaged(robust_run, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(robust_run, run)
    assert reported(run) == [f"report  {run}/report.html"]
    log, config = run / "metrics.jsonl", run / "config.yaml"
    log.write_text("{broken\n" + log.read_text())
    config.write_text(config.read_text().replace("objective:", "objektive:"))
    first, second, last = reported(run)
    assert first == "warning Lines of metrics.jsonl that could not be read and were left out: 1."
    assert second.startswith(f"warning {config} cannot be read: ")
    assert last == f"report  {run}/report.html"


def test_the_command_asks_for_the_folder_of_a_report(tmp_path):
    page = write_report(make_run(tmp_path / "run"))
    assert str(reported(page)) == f"{page} is no folder; give {tmp_path / 'run'}, the run that it lies in"


def test_the_command_reads_each_file_once(robust_run, tmp_path, monkeypatch):
    """It may be a log of hours."""
    for name in ("baseline", "bullettrain"):
        shutil.copytree(robust_run, tmp_path / name)
        (tmp_path / name / "evaluation.json").write_text('{"format": 1, "evaluations": []}')
    rows = [{"name": name, "clean": 0.5, "pgd5": 0.4, "seconds": 1.0} for name in ("baseline", "bullettrain")]
    (tmp_path / "comparison.json").write_text(json.dumps({"rows": rows}))
    read, text, samples = [], Path.read_text, log_module._read_samples
    monkeypatch.setattr(Path, "read_text", lambda path, *a, **k: (read.append(path), text(path, *a, **k))[1])
    monkeypatch.setattr(log_module, "_read_samples", lambda path, notes: (read.append(path), samples(path, notes))[1])
    assert reported(tmp_path) == [f"report  {tmp_path}/report.html"]
    names = ("config.yaml", "metrics.jsonl", "evaluation.json", "samples.safetensors")
    files = [tmp_path / part / name for part in ("baseline", "bullettrain") for name in names]
    assert sorted(path for path in read if tmp_path in path.parents) == sorted([*files, tmp_path / "comparison.json"])


@pytest.mark.parametrize("content", [None, "", "{broken\n{broken", '{"a": 1}\n'])
def test_the_command_refuses_a_run_that_recorded_nothing(robust_run, tmp_path, content):
    for name in ("both/baseline", "both/bullettrain"):
        shutil.copytree(robust_run, tmp_path / name)
        (tmp_path / name / "metrics.jsonl").unlink()
        if content is not None:
            (tmp_path / name / "metrics.jsonl").write_text(content)
    run = tmp_path / "both" / "bullettrain"
    (run / "report.html").unlink(missing_ok=True)
    what = "is missing" if content is None else "holds no record that can be read"
    error = reported(run)
    assert isinstance(error, RunError)
    assert str(error) == f"{run} has nothing to show: {run}/metrics.jsonl {what}"
    assert not (run / "report.html").exists()
    (tmp_path / "both" / "comparison.json").write_text('{"rows": []}')
    assert "baseline/metrics.jsonl" in str(reported(tmp_path / "both"))


def test_samples(tmp_path):
    make_run(tmp_path, epochs=1, samples=False)
    rng = np.random.default_rng(0)
    write_samples(tmp_path, rng, channels=1, size=28)
    assert report(tmp_path).source.count("data:image/png") == 73
    write_samples(tmp_path, rng, size=160)
    assert len(report(tmp_path).source) < 1_500_000, "large images are shrunk"
    (tmp_path / "samples.safetensors").write_bytes(b"not a file of tensors")
    assert "samples.safetensors could not be read" in report(tmp_path).text


def test_what_is_not_amplified_is_not_called_so(tmp_path):
    folder = make_run(tmp_path / "run", epochs=1)
    path = folder / "samples.safetensors"
    tensors = load_file(path)
    save_file({**tensors, "adversarial": 255 - tensors["clean"]}, path)
    page = report(folder)
    assert "and the difference around grey." in page.text
    assert "amplified" not in page.source.replace(str(folder), "")
    assert "×1<" not in page.source


def test_augmix_is_not_an_attack(tmp_path):
    make_run(tmp_path, epochs=1)
    config = yaml.safe_load((tmp_path / "config.yaml").read_text())
    config["method"].update(objective="augmix", boundary=1, robust=0)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    page = report(tmp_path)
    assert "AugMix with BulletTrain" in page.text
    assert "Images before and after the corruption" in page.text
    assert "3 / (1 + 2·0.330)" in page.text
    assert "Clean, training" in page.text
    assert "no views" in page.text

    config.setdefault("data", {})["views"] = True
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    page = report(tmp_path)
    assert "As views, training" in page.text
    assert "Clean, training" not in page.text
    assert "no more views" in page.text

    config["data"]["views"] = 0.5
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    page = report(tmp_path)
    assert "Partly as views, training" in page.text
    assert "no views" in page.text


@pytest.mark.parametrize(
    ("settings", "has_batch", "sentence"),
    [
        ({"allocation": "history", "robust": 1}, False, "An example got 3.8 attack steps on average, at most 10."),
        ({"allocation": "history", "robust": 0}, False, None),  # work also depends on examples without steps
        ({"allocation": "history", "robust": 0, "objective": "pgd-at"}, False, "An example got 3.8 attack steps"),
        ({"allocation": "gaussian"}, True, "attack steps in the last logged batch, at most 10."),
        ({"shuffled": True}, True, "attack steps in the last logged batch, at most 10."),
        ({}, True, None),
    ],
    ids=str,
)
def test_the_mean_steps_of_an_allocation_that_is_not_by_category(tmp_path, settings, has_batch, sentence):
    make_run(tmp_path, epochs=1, samples=False)  # 14.5 passes, 27 without BulletTrain
    config = yaml.safe_load((tmp_path / "config.yaml").read_text())
    config["method"].update(settings)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    write_log(tmp_path, [record for record in read_log(tmp_path) if has_batch or record["kind"] != "batch"])
    text = report(tmp_path).text
    assert ("An example got" in text) == (sentence is not None)
    assert (sentence or "") in text


def test_a_long_run_stays_small(tmp_path):
    make_run(tmp_path, epochs=300, per_epoch=40)
    page = report(tmp_path)
    assert len(page.source) < 1_500_000
    x, y = np.arange(12345.0), np.where(np.arange(12345) % 50 < 25, np.nan, 2.0)
    thinned = thin(x, y)
    assert len(thinned[0]) == len(thinned[1]) == MAX_CURVE_POINTS <= 400
    assert set(thinned[1][np.isfinite(thinned[1])]) == {2.0}


# ------------------------------------------------------------------------------------------ manners


def test_not_a_run(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere is missing; give the folder of a run, a comparison or .*$"):
        write_report(tmp_path / "nowhere")
    (tmp_path / "config.yaml").write_text("- a\n- list\n")
    with pytest.raises(ValueError, match=r"config\.yaml cannot be read: it holds no settings"):
        write_report(tmp_path)
    (tmp_path / "config.yaml").write_text("a: 3\n")
    with pytest.raises(ValueError, match="no section 'method'"):
        write_report(tmp_path)
    (tmp_path / "config.yaml").write_text("a: [")
    with pytest.raises(ValueError, match="cannot be read"):
        write_report(tmp_path)
    (tmp_path / "comparison.json").write_text('{"rows": 3}')
    with pytest.raises(ValueError, match="not a comparison"):
        write_report(tmp_path)
    make_run(tmp_path / "outer" / "baseline", epochs=1)
    with pytest.raises(ValueError, match=r"give one of them: .*baseline"):
        write_report(tmp_path / "outer")
    assert not list(tmp_path.rglob("*report.html*"))


def test_replaced_at_once_or_not_at_all(tmp_path, monkeypatch):
    make_run(tmp_path, epochs=1, samples=False)
    target = write_report(tmp_path)
    assert target == tmp_path / "report.html"
    before, files = target.read_text(), sorted(tmp_path.iterdir())
    assert write_report(tmp_path).read_text() == before, "the same run gives the same page"
    write_log(tmp_path, [])

    def full(source, destination):
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(RunError, match=r"report.html could not be written to .*: no space left"):
        write_report(tmp_path)
    assert target.read_text() == before
    assert sorted(tmp_path.iterdir()) == files


@pytest.mark.parametrize("package", ["jinja2", "matplotlib", "yaml", "safetensors", "PIL"])
def test_a_missing_extra_is_named(tmp_path, monkeypatch, package):
    make_run(tmp_path, epochs=1)
    monkeypatch.setitem(sys.modules, package, None)
    name = {"yaml": "PyYAML", "PIL": "Pillow"}.get(package, package)
    with pytest.raises(ImportError, match=rf'needs {name}: .* pip install "\.\[app\]"'):
        write_report(tmp_path)


def test_importing_needs_no_extra():
    block = "import sys; sys.modules.update(dict.fromkeys(['jinja2', 'matplotlib', 'yaml', 'safetensors', 'PIL']))"
    subprocess.run([sys.executable, "-c", f"{block}; import bullettrain.reporting"], check=True, timeout=60)


def test_matplotlib_is_left_as_it_was(tmp_path):
    import matplotlib

    with matplotlib.rc_context({"font.size": 31.0, "text.usetex": True}):
        before = dict(matplotlib.rcParams)
        make_run(tmp_path, epochs=1, samples=False)
        page = report(tmp_path)
        assert dict(matplotlib.rcParams) == before
    assert "31" not in "".join(re.findall(r"font: [^;]*", page.source)), "a user's style is not the page's"


def test_numbers_as_words():
    assert [duration(s) for s in (0.04, 12.34, 59.99, 312, 4980, math.nan)] == [
        *("0.0\u202fs", "12.3\u202fs", "1\u202fmin 0\u202fs", "5\u202fmin 12\u202fs", "1\u202fh 23\u202fmin", "–")
    ]
    assert [duration(hours * 3600) for hours in (47.99, 47.999, 48, 1318.1)] == [
        *("47\u202fh 59\u202fmin", "2\u202fd 0\u202fh", "2\u202fd 0\u202fh", "54\u202fd 22\u202fh")
    ]
    assert [percent(0.815), percent(math.nan), times(1.854), times(math.inf)] == ["81.5\u202f%", "–", "1.85×", "–"]
    assert [points(0.0215), points(-0.006), points(0.0), points(math.nan)] == [
        *("+2.2 points", "−0.6 points", "±0.0 points", "–")
    ]
    assert number(-12345.678, 1) == "−12\u202f345.7"
    assert [setting("eps", 8 / 255), setting("x", None), setting("x", [1, 0.5]), setting("x", True)] == [
        *("8/255 = 0.0313725", "–", "1, 0.5", "yes")
    ]
