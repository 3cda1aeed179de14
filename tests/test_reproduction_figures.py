"""The reproduction's pictures and pages, of made-up records: whether they can be read, and explain what they show."""

import itertools
import re

import numpy as np
import pytest
from matplotlib.text import Text

from bullettrain.reporting.plotting import printed
from bullettrain.reproduction import STUDIES, figures, tables
from bullettrain.reproduction.results import Results
from bullettrain.reproduction.scales import SHORT, SMOKE
from test_reproduction_claims import PAPERS, record


def draw(name, records):
    """The axes of a study's picture, and the boxes of the words in it, in pixels."""
    with printed():
        (picture,) = figures.draw(Results(STUDIES[name], SHORT, {run.name: run for run in records}))
        (axes,) = picture.figure.axes
        picture.figure.draw_without_rendering()
        return axes, [Text.get_window_extent(word) for word in axes.texts]


def readable(axes, boxes):
    """Every word inside the axes, and on no other word."""
    assert boxes
    for one, other in itertools.combinations(boxes, 2):
        assert not one.overlaps(other)
    for box in boxes:
        assert axes.bbox.x0 <= box.x0 <= box.x1 <= axes.bbox.x1
        assert axes.bbox.y0 <= box.y0 <= box.y1 <= axes.bbox.y1


def corrupted(name, by, seed=0, **accuracy):
    """A record of a row of table-augmix with so much left of each corruption, by severity."""
    row = next(row for row in STUDIES["table-augmix"].rows(SHORT) if row.name == name)
    made = record(row, seed=seed, corruptions=float(np.mean([*by.values()])), **accuracy)
    made.figures["corruptions"]["corruptions"] = {key: [v / 100 for v in values] for key, values in by.items()}
    return made


def test_entries_of_a_few_steps_are_not_drawn():
    """As older runs have them: one step at the end of an epoch, where a third of the examples seem to be outliers."""
    run = record(STUDIES["fig-shares"].rows(SHORT)[0], clean=80)
    run.curve = {
        "step": [50.0, 100, 101, 150, 200],
        "epoch": [0.5, 1, 1.01, 1.5, 2],
        "outlier": [0.2, 0.2, 0.9, 0.2, 0.2],
    }
    run.curve |= {"boundary": [0.3, 0.3, 0.1, 0.3, 0.3], "robust": [0.5, 0.5, 0.0, 0.5, 0.5]}
    run.curve |= {f"svar_{name}": [0.1] * 5 for name in ("outlier", "boundary", "robust")}
    assert run.course()["outlier"].tolist() == [0.2] * 4
    assert run.course()["step"].tolist() == [50, 100, 150, 200]


def test_corruptions_are_shown_by_kind_and_by_severity():
    fog, snow = [90.0, 80, 70, 60, 50], [80.0, 60, 40, 20, 0]
    runs = [
        corrupted("augmix-10", {"fog": fog, "snow": snow}, clean=95.0),
        corrupted("augmix-10", {"fog": [v - 20 for v in fog], "snow": snow}, seed=1, clean=93.0),
        corrupted("bt-10", {"snow": snow, "fog": fog}, clean=94.0),
        corrupted("augmix-100", {"fog": fog}),  # alone: nothing to compare
    ]
    with printed():
        (picture,) = figures.draw(Results(STUDIES["table-augmix"], SHORT, {run.name: run for run in runs}))
        left, right = picture.figure.axes
        assert (picture.name, picture.caption.partition(",")[0]) == ("table-augmix-10", "AugMix")
        assert [tick.get_text() for tick in left.get_yticklabels()] == ["snow", "fog"]
        assert [line.get_xdata().tolist() for line in left.lines] == [pytest.approx(x) for x in ([40, 60], [40, 70])]
        assert [line.get_xdata().tolist() for line in right.lines] == [[0, 1, 2, 3, 4, 5]] * 2
        courses = [94, 80, 65, 50, 35, 20], [94, 85, 70, 55, 40, 25]
        assert [line.get_ydata() for line in right.lines] == [pytest.approx(course) for course in courses]
        assert [text.get_text() for text in right.get_legend().get_texts()] == ["AugMix", "AugMix + BT"]
        picture.figure.draw_without_rendering()
        assert not right.get_legend().get_window_extent().overlaps(left.bbox)


def test_every_row_of_corruptions_is_in_the_legend():
    names = ["augmix-100", "no-jsd-100", "bt-100", "bt-views-100"]
    runs = [corrupted(name, {"fog": [50.0 + n] * 5}) for n, name in enumerate(names)]
    with printed():
        (picture,) = figures.draw(Results(STUDIES["table-augmix"], SHORT, {run.name: run for run in runs}))
        left, right = picture.figure.axes
        shown = [text.get_text() for text in right.get_legend().get_texts()]
        assert shown == ["AugMix", "AugMix − JSD", "AugMix + BT", "AugMix + BT, images as views"]
        picture.figure.draw_without_rendering()
        assert not right.get_legend().get_window_extent().overlaps(left.bbox)


@pytest.mark.parametrize(
    ("theirs", "shown"), [({"fog": [50.0] * 5}, ["fog"]), ({"frost": [50.0] * 5}, None), ({}, None)]
)
def test_corruptions_are_shown_that_all_rows_were_evaluated_by(theirs, shown):
    fog, snow = [90.0] * 5, [80.0] * 5
    other = corrupted("bt-10", theirs) if theirs else record(STUDIES["table-augmix"].rows(SHORT)[2], corruptions=50.0)
    runs = [corrupted("augmix-10", {"snow": snow, "fog": fog}), other]
    with printed():
        pictures = figures.draw(Results(STUDIES["table-augmix"], SHORT, {run.name: run for run in runs}))
    ticks = [[tick.get_text() for tick in picture.figure.axes[0].get_yticklabels()] for picture in pictures]
    assert ticks == ([] if shown is None else [shown])


@pytest.mark.parametrize(("study", "symbol"), [("fig-gamma", "γ"), ("fig-nr", "$N_R$")])
def test_points_and_lines_of_a_sweep_say_what_they_are(study, symbol):
    rows = STUDIES[study].rows(SHORT)
    runs = []
    for n, row in enumerate(rows):
        shares = {"boundary": 0.3 - 0.02 * n, "robust": 0.52 + 0.02 * n, "outlier": 0.18} if row.baseline else None
        runs += [record(row, seed=s, shares=shares, clean=80 + n + s / 5, pgd20=51 - n / 3 + s / 5) for s in (0, 1)]
    axes, boxes = draw(study, runs)
    readable(axes, boxes)
    values = [row.name.rpartition("-")[2] for row in rows if row.baseline]
    assert sorted(word.get_text() for word in axes.texts) == sorted(f"{symbol} = {value}" for value in 2 * values)
    legend = axes.get_legend()
    names = [text.get_text() for text in legend.get_texts()]
    assert names == ["TRADES + BT, clean", "TRADES, clean", "TRADES + BT, PGD-20", "TRADES, PGD-20"]
    dotted = [line.get_color() for line in axes.lines if list(line.get_xdata()) == [0, 1]]
    assert [line.get_color() for line in legend.get_lines()] == dotted
    assert len(dotted) == 2


# ---------------------------------------------------------------------------------------------- pages


def measured(name, scale=SHORT, *, rows=None, seeds=1, accuracy=50.0):
    """A study some or all of whose rows have been run, all to the same accuracy but for the seed's part."""
    study = STUDIES[name]
    runs = [
        record(row, scale, seed=seed, shares=PAPERS, **dict.fromkeys(study.attacks, accuracy + seed))
        for row in study.rows(scale)
        for seed in range(seeds)
        if rows is None or row.name in rows
    ]
    return Results(study, scale, {run.name: run for run in runs})


@pytest.mark.parametrize(
    ("results", "colours"),
    [
        (measured("table-trades", SMOKE), []),
        (measured("table-trades", rows=[]), []),
        (measured("table-trades", rows=["trades", "fast"], accuracy=5.0), ["holds"]),
        (measured("table-trades", rows=["trades", "fast"]), ["fails"]),
        (measured("table-trades"), ["holds", "part", "fails"]),
    ],
    ids=["smoke", "nothing", "holds", "fails", "all"],
)
def test_a_legend_is_of_the_colours_that_are_there(results, colours):
    table, _, rest = tables.html(results, []).partition("</table>")
    below = rest.partition("<h2>")[0]
    assert re.findall(r'<span class="pill (\w+)">', below) == colours
    assert [name for name in ("holds", "part", "fails") if f'<td class="{name}' in table] == colours
    assert ("our own baseline row" in below) == bool(colours)
    assert (tables.LEGEND in tables.markdown(results, [])) == results.scale.like_paper


@pytest.mark.parametrize("seeds", [1, 3])
def test_tables_fit_a_window(browser, tmp_path, seeds):
    path = tmp_path / "page.html"
    for name in STUDIES:
        path.write_text(tables.html(measured(name, seeds=seeds), []), encoding="utf-8")
        assert browser.open(path, width=1200) == []
        card = browser.evaluate("(card => [card.scrollWidth, card.clientWidth])(document.querySelector('.card'))")
        assert card[0] <= card[1], name
