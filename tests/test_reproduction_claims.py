"""Which runs a row is, what its figures are, and whether the paper's claims hold: from made-up records, in no time."""

import csv
import dataclasses
import math
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import spearmanr

from bullettrain.cli.reproduce import estimate_training
from bullettrain.evaluation.results import pack
from bullettrain.evaluation.scores import rank_correlation
from bullettrain.processes import Place
from bullettrain.reporting.paper import OWN_CLAIMS, paper_figure
from bullettrain.reproduction import STUDIES, Check, tables
from bullettrain.reproduction.records import Record, run_name
from bullettrain.reproduction.results import Results, Verdict, chance_errors
from bullettrain.reproduction.rows import panel_rows
from bullettrain.reproduction.scales import PAPER, SCALES, SHORT, SMOKE
from bullettrain.reproduction.studies import LARGE
from bullettrain.reproduction.tasks import Task, merged

CPU = Place(torch.device("cpu"))
TRADES = STUDIES["table-trades"]
ROWS = {row.name: row for row in TRADES.rows(SHORT)}


def record(row, scale=SHORT, *, seed=0, jobs=1, seconds=100.0, shares=None, device="H200", warnings=(), **accuracy):
    config = row.config(scale).replace_section("training", seed=seed)
    shares = shares or ({"boundary": 1.0, "robust": 0.0, "outlier": 0.0} if row.baseline is None else PAPERS)
    method = config.method
    budget = method.budget()
    steps = sum(shares[name] * getattr(budget, name) for name in shares)
    uniform = budget.uniform_steps is not None
    touched = 1.0 if uniform else sum(shares[name] for name in shares if getattr(budget, name))
    cost = method.build_objective().cost
    work = float(cost.work(steps=budget.boundary if uniform else steps, touched=touched, selects=not uniform).total)
    figures = {name: {"accuracy": value / 100, "examples": 10000} for name, value in accuracy.items()}
    assert method.budget()
    return Record(
        run_name(config),
        config.to_dict(),
        {"device": device},
        "finished",
        seconds,
        30,
        1.5e6,
        work,
        shares,
        figures,
        jobs,
        warnings=list(warnings),
    )


PAPERS = {"boundary": 0.28, "robust": 0.54, "outlier": 0.18}


def results(*records, study=TRADES, settings=()):
    return Results(study, SHORT, {one.name: one for one in records}, settings=settings)


def cell(found, row, metric, kind="ours"):
    column = next(one for one in tables.columns(found) if (one.metric, one.kind) == (metric, kind))
    return tables.cell(found, row, column)


# ---------------------------------------------------------------------------------------- which run


@pytest.mark.parametrize("scale", SCALES.values(), ids=list(SCALES))
def test_rows_of_several_studies_are_the_same_run(scale):
    def name(study, row):
        return run_name(next(r for r in STUDIES[study].rows(scale) if r.name == row).config(scale))

    mined = name("table-trades", "bt-nr2")
    for study, row in (("fig-nr", "nr-2"), ("fig-gamma", "gamma-0.8"), ("uncertainty", "svar"), ("plane", "bt-nr2")):
        assert name(study, row) == mined
    assert name("strong-attacks", "trades") == name("table-fast", "trades") != mined
    top = max(scale.grid)
    assert name("fig-shares", "mnist-oracle") == name("fig-oracle", f"b{top}-o0-r{top}")


@pytest.mark.parametrize("scale", SCALES.values(), ids=list(SCALES))
def test_rows_have_names_of_their_own_and_claims_speak_of_rows(scale):
    for study in STUDIES.values():
        rows = {row.name: row for row in study.rows(scale)}
        assert len(rows) == len(study.rows(scale))
        for row in rows.values():
            assert row.baseline is None or row.baseline in rows or study.name.startswith("fig-"), row
        for check in (check for checks in study.claims(scale).values() for check in checks):
            assert set(check.rows) | ({check.against} if check.against else set()) <= set(rows)


def test_identity_is_what_is_learnt():
    config = ROWS["bt-nr2"].config(SHORT)
    same = ["seed=3", "training.compile=true", "threads=2", "engine=eager", "log_every=7"]
    same += ["evaluation.search=bf16", "evaluation.batch_size=2000"]
    assert config.with_settings(same).identity() == config.identity()
    for other in ("gamma=0.7", "attack_group=4", "epochs=29", "evaluation.steps=10", "score=margin"):
        assert config.with_settings([other]).identity() != config.identity()
    # Of settings that other versions have and that are left alone, nothing is seen: records stay valid.
    plain = ["robust=10", "outlier=10"]  # nothing is mined: one run is the baseline at every γ
    assert config.with_settings([*plain, "gamma=0.65"]).identity() == config.with_settings(plain).identity()
    assert config.identity() == "63b879ad"


def test_the_oracle_grid_is_the_papers():
    assert len(STUDIES["fig-oracle"].rows(PAPER)) == 1 + 3 * 64 - 2 - 3 * 7
    assert [row.name for row in panel_rows(SMOKE, "N_O")] == ["b0-o0-r0", "b0-o0-r2", "b2-o0-r0", "b2-o0-r2"]
    study = STUDIES["fig-oracle"]
    assert study.rows(SHORT)[1].config(SHORT).method.separation == "oracle"
    assert study.rows(SHORT)[0].config(SHORT).method.budget().uniform_steps == 7


@pytest.mark.parametrize("study", ["fig-oracle-clean", "fig-oracle-stop"])
def test_the_other_starts_of_the_oracle_grid_have_its_rows(study):
    first, other = STUDIES["fig-oracle"].rows(SHORT), STUDIES[study].rows(SHORT)
    assert [row.name for row in other] == [row.name for row in first]
    for row, same in zip(other, first, strict=True):
        config, plain = row.config(SHORT), same.config(SHORT)
        assert config.method.eps_warmup == 0 < plain.method.eps_warmup
        for key in ("eps", "scale", "separation", "boundary", "robust", "outlier"):
            assert getattr(config.method, key) == getattr(plain.method, key)
        assert config.method.stop_at_success == (study == "fig-oracle-stop")
    claims = [tuple(STUDIES[name].claims(SHORT)) for name in ("fig-oracle", study)]
    assert claims[0] == claims[1]


def test_the_papers_figures_are_those_that_evaluate_shows():
    seen = 0
    for name in ("table-trades", "table-mart", "strong-attacks"):
        for row in STUDIES[name].rows(PAPER):
            if row.method is not None:
                continue
            config = row.config(PAPER)
            for attack in ("clean", "pgd20", "pgd100x10", "pgd1000x5"):
                known = paper_figure(config, attack, None if attack == "clean" else 0.031, "cifar10")
                if known is not None and attack in row.paper:
                    seen += 1
                    assert row.paper[attack] == pytest.approx(100 * known), (name, row.name, attack)
    assert seen >= 14


def test_same_runs_are_merged_and_all_that_is_wanted_is_wanted(tmp_path):
    config = ROWS["trades"].config(SMOKE)
    tasks = [Task(config, tmp_path, ("clean",), 50, label="a"), Task(config, tmp_path, ("clean", "pgd5"), label="b")]
    (one,) = merged(tasks)
    assert (one.attacks, one.images, one.label) == (("clean", "pgd5"), 0, "a = b")


# ------------------------------------------------------------------------------------------- figures


def test_speedups_are_against_the_row_s_own_baseline():
    found = results(record(ROWS["trades"]), record(ROWS["bt-nr2"], seconds=50.0), record(ROWS["bt-nr0"], jobs=3))
    assert found.value("bt-nr2", "theoretical").mean == pytest.approx(11 / (1 + 2.8 + 1.08))
    assert found.value("bt-nr2", "work").mean == pytest.approx(1.90, abs=0.005)  # counted by hand: 27 / 14.24
    assert found.value("bt-nr2", "wall").mean == pytest.approx(2.0)
    assert found.value("bt-nr0", "wall") is None  # it shared the device
    assert found.value("trades", "wall").mean == 1
    elsewhere = results(record(ROWS["trades"], device="A100"), record(ROWS["bt-nr2"]))
    assert elsewhere.value("bt-nr2", "wall") is None
    fewer = STUDIES["table-fast"]
    row = next(row for row in fewer.rows(SHORT) if row.name == "bt-nb3")
    mined = results(record(ROWS["trades"]), record(row), study=fewer)
    assert mined.value("bt-nb3", "theoretical").mean == pytest.approx(11 / (1 + 0.28 * 3 + 1.08))  # N is 10, not 3


def test_augmix_costs_three_forwards_or_one():
    study = STUDIES["table-augmix"]
    rows = {row.name: row for row in study.rows(SHORT)}
    whole = {"boundary": 1.0, "robust": 0.0, "outlier": 0.0}
    third = {"boundary": 0.35, "robust": 0.5, "outlier": 0.15}
    runs = [record(rows["augmix-10"], shares=whole), record(rows["no-jsd-10"], shares=whole)]
    found = results(*runs, record(rows["bt-10"], shares=third), study=study)
    assert found.value("no-jsd-10", "theoretical").mean == 3
    assert found.value("bt-10", "theoretical").mean == pytest.approx(3 / 1.7)


def test_seeds_give_mean_and_std():
    runs = [record(ROWS["trades"], seed=seed, clean=value) for seed, value in enumerate((80.0, 81.0, 82.0))]
    found = results(*runs)
    assert cell(found, ROWS["trades"], "clean").text == "81.00 ± 1.00"
    assert cell(results(runs[0]), ROWS["trades"], "clean").text == "80.00"
    other = dataclasses.replace(ROWS["trades"], settings=("attack_group=4",))
    assert results(*runs, record(other, clean=10)).value("trades", "clean").values == (80.0, 81.0, 82.0)
    grouped = results(*runs, record(other, clean=10), settings=["attack_group=4"])
    assert grouped.value("trades", "clean").values == (10.0,)


def test_missing_rows_are_shown_as_such():
    found = results(record(ROWS["trades"], clean=80, pgd20=50))
    *table, _, missing = tables.table(found)
    lines = {line.split("|")[1].strip(): line for line in table}
    assert "TRADES λ=1/6 + BT, N_R=2" not in lines
    assert missing.startswith("Not run yet: ")
    assert "; TRADES λ=1/6 + BT, N_R=2." in missing
    assert "| 80.00 | 84.92 (−4.92) | 50.00 | 56.61 (−6.61) |" in lines["TRADES λ=1/6"]
    assert {found.verdict(checks)[0] for checks in found.claims.values()} == {Verdict.OPEN}
    unfinished = dataclasses.replace(record(ROWS["trades"], clean=80), reason="unfinished")
    assert results(unfinished).value("trades", "clean") is None


def test_the_small_print_is_shown():
    runs = [record(ROWS[name], clean=80, pgd20=50, autoattack=47) for name in ("trades", "bt-nr2")]
    assert results(*runs).notes() == []
    runs[1].figures["autoattack"]["examples"] = 1000
    assert results(*runs).notes() == ["AutoAttack on 1000 of 10000 test images (TRADES λ=1/6 + BT, N_R=2)."]
    runs[0].figures["autoattack"]["examples"] = 1000
    assert results(*runs).notes() == ["AutoAttack on 1000 of 10000 test images."]
    runs[0].figures["pgd20"]["precision"] = "bf16"
    assert results(*runs).notes()[0] == "PGD-20 searched in bf16 (TRADES λ=1/6)."
    more = record(ROWS["bt-nr0"], clean=80, pgd20=50, autoattack=47)
    assert (
        "AutoAttack on 1000 of 10000 test images (all rows but TRADES λ=1/6 + BT, N_R=0)."
        in results(*runs, more).notes()
    )
    alone = record(ROWS["bt-nr2"], clean=80, pgd20=50, jobs=2)
    assert results(alone).notes() == [
        "No seconds: the device was shared (`--timing` times such runs) (TRADES λ=1/6 + BT, N_R=2).",
    ]
    study = STUDIES["table-augmix"]
    one = record(study.rows(SHORT)[0], clean=90, corruptions=80)
    one.figures["corruptions"]["over"] = 2
    assert results(one, study=study).notes() == ["Corruptions: the mean of 2, not of 15 (AugMix, CIFAR-10)."]
    one.note = "made by hand"
    assert any("made by hand" in note for note in results(one, study=study).notes())


def test_a_collapse_is_shown():
    text = "catastrophic overfitting: 94 % of the training attacks fail, but PGD-10 breaks all"
    found = results(record(ROWS["trades"], clean=90, pgd20=0.1, warnings=[text]))
    assert found.status(ROWS["trades"]) == "catastrophic overfitting"
    assert any("catastrophic overfitting" in line for line in tables.table(found))


# -------------------------------------------------------------------------------------------- claims


def judged(base, mined, claim=0, **options):
    found = results(
        record(ROWS["trades"], clean=80, pgd20=base), record(ROWS["bt-nr2"], clean=81, pgd20=mined, **options)
    )
    return found, found.verdict(list(found.claims.values())[claim])[0]


@pytest.mark.parametrize(
    ("mined", "verdict"),
    [
        (51.2, Verdict.HOLDS),
        (51.1, Verdict.CHANCE),  # a gain, but 10,000 images cannot tell it from the loss that is claimed
        (49.74, Verdict.CHANCE),  # the paper's own loss
        (48.4, Verdict.CHANCE),
        (48.2, Verdict.FAILS),
        (30.0, Verdict.FAILS),
    ],
)
def test_robust_accuracy_is_judged_against_our_own_baseline(mined, verdict):
    found, said = judged(50.0, mined)
    assert said is verdict
    shown = cell(found, ROWS["bt-nr2"], "pgd20", "gain")
    assert shown.verdict is verdict
    assert shown.text.endswith("(−0.26)")
    assert f'<td class="{tables.CLASSES[verdict]}">{shown.text}</td>' in tables.html(found, [])


@given(st.floats(5, 90), st.floats(-5, 5), st.floats(0, 5))
def test_more_accuracy_never_makes_a_verdict_worse(base, gain, more):
    order = [Verdict.FAILS, Verdict.CHANCE, Verdict.HOLDS]
    assert order.index(judged(base, base + gain)[1]) <= order.index(judged(base, base + gain + more)[1])


def test_where_outcomes_are_on_record_images_are_paired():
    """A point that is lost and nowhere won is no chance, though it could be among other images."""
    runs = [record(ROWS["trades"], pgd20=50.0), record(ROWS["bt-nr2"], pgd20=49.0)]
    (check,) = next(iter(TRADES.claims(SHORT).values()))  # at least −0.26
    unpaired = results(*runs).check(check)
    assert (unpaired.verdict, unpaired.paired) == (Verdict.CHANCE, False)
    assert unpaired.error == pytest.approx(0.707, abs=0.001)
    said = tables.in_words(results(*runs), unpaired)
    assert said.endswith("−1.00 ± 0.71 points (unpaired; asked: at least −0.26)")
    for run, kept in zip(runs, (5000, 4900), strict=True):
        run.figures["pgd20"] |= {"fingerprint": "a", "survived": pack(torch.arange(10000) < kept)}
    paired = results(*runs).check(check)
    assert (paired.verdict, paired.paired) == (Verdict.FAILS, True)
    assert paired.error == pytest.approx(100 * math.sqrt(100 - 100**2 / 10000) / 10000)
    said = tables.in_words(results(*runs), paired)
    assert said.endswith("−1.00 ± 0.10 points (paired; asked: at least −0.26)")


def test_seeds_that_differ_much_leave_more_to_chance():
    """The same difference, two points in the mean, is none where seeds lie as far apart."""
    (check,) = next(iter(TRADES.claims(SHORT).values()))  # at least −0.26
    for spread, verdict in ((0.1, Verdict.FAILS), (2.0, Verdict.CHANCE)):
        runs = [
            record(ROWS[row], seed=seed, pgd20=mean + spread * away)
            for row, mean in (("trades", 50.0), ("bt-nr2", 48.0))
            for seed, away in enumerate((-1, 0, 1))
        ]
        said = results(*runs).check(check)
        assert said.verdict is verdict
        of_seeds = math.sqrt(2) * spread / math.sqrt(3)
        assert said.error == pytest.approx(math.hypot(of_seeds, 0.707), abs=0.002)  # the images are the same ones


@pytest.mark.parametrize(("asked", "verdict"), [(2.25, Verdict.HOLDS), (2.37, Verdict.CHANCE), (2.38, Verdict.FAILS)])
def test_a_counted_speedup_is_not_short_by_chance(asked, verdict):
    """It is 2.254 here; a twentieth less is too close to tell, and more than seeds would make it differ is not."""
    found = results(record(ROWS["trades"]), record(ROWS["bt-nr2"]))
    assert found.check(Check(("bt-nr2",), "theoretical", "≥", asked)).verdict is verdict


def test_parts_of_a_claim():
    found = results(record(ROWS["trades"], pgd20=50), record(ROWS["bt-nr2"], pgd20=52))
    good, bad = Check(("bt-nr2",), "pgd20", "≥", 0, "trades"), Check(("bt-nr2",), "pgd20", "≥", 20, "trades")
    close = Check(("bt-nr2",), "pgd20", "≥", 2, "trades")
    unknown = Check(("bt-nr0",), "pgd20", "≥", 0, "trades")

    def verdict(*checks):
        return found.verdict(checks)[0]

    assert verdict(good, good) is Verdict.HOLDS
    assert verdict(good, bad) is verdict(good, unknown) is verdict(good, close) is Verdict.PART
    assert verdict(bad, unknown) is verdict(bad, close) is Verdict.FAILS
    assert verdict(close, close) is Verdict.CHANCE
    assert verdict(unknown) is Verdict.OPEN
    # Of several rows, those that are missing may be better than the best that is there.
    some = ("bt-nr2", "bt-nr0")
    assert found.check(Check(some, "pgd20", "≤", 99)).verdict is Verdict.OPEN
    assert found.check(Check(some, "pgd20", "≤", 40)).verdict is Verdict.FAILS
    assert found.check(Check(some, "pgd20", "≥", 60)).verdict is Verdict.OPEN
    assert found.check(Check(some, "pgd20", "≥", 40)).verdict is Verdict.HOLDS
    # What is too close to tell is shown, whatever further rows may make of it.
    assert found.check(Check(some, "pgd20", "≤", 52)).verdict is Verdict.CHANCE
    assert found.check(Check(some, "pgd20", "≥", 52)).found == pytest.approx(52)
    assert "best of 1 run of 2" in tables.in_words(found, found.check(Check(some, "pgd20", "≤", 40)))
    assert found.check(Check(("trades", "bt-nr2"), "pgd20", "≤", 40)).verdict is Verdict.FAILS
    assert found.check(Check(("bt-nr2",), "pgd20", "≈", 4.0, "trades")).verdict is Verdict.HOLDS
    assert found.check(Check(("bt-nr2",), "pgd20", "≈", 1.0, "trades")).verdict is Verdict.CHANCE


def test_the_best_of_several_rows_is_lucky_too():
    """The same gain of 1.8 points, 2.5 standard errors, holds for one row, and not as the best of eight."""
    rows = STUDIES["fig-oracle"].rows(SHORT)
    base, *others = rows[:9]
    runs = [record(base, pgd100x20=50.0), *(record(row, pgd100x20=51.8) for row in others)]
    found = Results(STUDIES["fig-oracle"], SHORT, {run.name: run for run in runs})
    names = tuple(row.name for row in others)
    for rows, verdict in ((names[:1], Verdict.HOLDS), (names, Verdict.CHANCE)):
        assert found.check(Check(rows, "pgd100x20", "≥", 0.0, "baseline")).verdict is verdict
    assert chance_errors(1) == 2
    lucky = 1 - (1 - math.erfc(chance_errors(16) / math.sqrt(2)) / 2) ** 16
    assert lucky == pytest.approx(math.erfc(2 / math.sqrt(2)) / 2)


@pytest.mark.parametrize(("relation", "offset"), [("≥", 0.0), ("≥", 0.2), ("≤", 0.0), ("≤", -0.2)])
def test_less_is_never_called_more(relation, offset):
    """Half a point of slack forgives a small gain, not a loss where a gain was claimed."""
    less = -1 if relation == "≥" else 1
    found = results(record(ROWS["trades"], pgd20=50), record(ROWS["bt-nr2"], pgd20=50 + 0.2 * less))
    check = Check(("bt-nr2",), "pgd20", relation, offset, "trades")
    assert found.check(check).verdict is Verdict.CHANCE
    unknown = Check(("bt-nr0",), "pgd20", "≥", 0, "trades")
    assert found.verdict((check, unknown))[0] is Verdict.OPEN
    # Lost image by image, and nowhere won, 0.2 points are no chance.
    for runs, kept in ((found.runs["trades"], 5000), (found.runs["bt-nr2"], 5000 + 20 * less)):
        runs[0].figures["pgd20"] |= {"fingerprint": "a", "survived": pack(torch.arange(10000) < kept)}
    assert found.check(check).verdict is Verdict.FAILS


def test_a_few_images_prove_nothing_either_way():
    check = Check(("bt-nr2",), "pgd20", "≥", -0.26, "trades")
    for mined, examples, verdict in ((52, 10000, Verdict.HOLDS), (52, 1000, Verdict.CHANCE), (60, 1000, Verdict.HOLDS)):
        runs = [record(ROWS["trades"], pgd20=50), record(ROWS["bt-nr2"], pgd20=mined)]
        for run in runs:
            run.figures["pgd20"]["examples"] = examples
        assert results(*runs).check(check).verdict is verdict


def test_what_is_measured_of_a_claim_is_shown_whatever_becomes_of_the_claim():
    study = STUDIES["table-fast"]
    rows = {row.name: row for row in study.rows(SHORT)}
    runs = [
        record(rows[name], clean=80, pgd20=value) for name, value in (("trades", 48), ("fast-5", 50), ("bt-nb6", 49.8))
    ]
    found = Results(study, SHORT, {run.name: run for run in runs})
    text = "\n".join(tables.below(found, []))
    assert "· **not measured yet**: … and is above that of multi-step FAST" in text
    assert "≈ TRADES + BT, N_B=6, PGD-20: −0.20 ± 0.71 points against TRADES + FAST, N=5 (unpaired" in text
    # A mark stands beside the figure that it is about: TRADES, unlike FAST, is surpassed.
    assert cell(found, rows["bt-nb6"], "pgd20", "gain").verdict is Verdict.HOLDS
    assert cell(found, rows["bt-nb6"], "pgd20").verdict is Verdict.CHANCE


def test_what_misses_by_no_more_than_the_tolerance_is_too_close_to_tell():
    for boundary, verdict in ((0.347, Verdict.HOLDS), (0.357, Verdict.CHANCE), (0.362, Verdict.FAILS)):
        study = STUDIES["table-augmix"]
        row = {row.name: row for row in study.rows(SHORT)}["bt-10"]
        found = results(
            record(row, shares={"boundary": boundary, "robust": 0.5, "outlier": 0.5 - boundary}), study=study
        )
        checks = [check for checks in found.claims.values() for check in checks if check.metric == "boundary"][:1]
        (one,) = found.verdict(checks)[1]
        assert one.verdict is verdict


def test_claims_that_are_not_the_papers_say_so():
    claims = {text for study in STUDIES.values() for text in study.claims(SHORT)}
    assert claims >= OWN_CLAIMS
    text = "\n".join(tables.below(results(study=STUDIES["table-mart"]), []))
    assert "Under AutoAttack, BulletTrain with N_R = 2 is more robust than MART (not in the paper)" in text
    assert text.count("(not in the paper)") == 1


def test_changes_of_shares_are_told_in_words():
    (row, _), study = STUDIES["fig-shares"].rows(SHORT), STUDIES["fig-shares"]
    curve = {"step": [50, 100], "outlier": [0.8, 0.2], "boundary": [0.2, 0.3], "robust": [0.0, 0.5]}
    curve |= {f"svar_{name}": [0.1, 0.1] for name in PAPERS}
    one = dataclasses.replace(record(row), curve=curve)
    found = Results(study, SHORT, {one.name: one})
    said = [tables.in_words(found, found.check(Check((row.name,), metric, "≥", 0.0))) for metric in study.columns]
    assert said == [
        f"{row.title}: robust examples grew by 50.0 points",
        f"{row.title}: outliers fell by 60.0 points",
        f"{row.title}: boundary examples are 10.0 points more than the smallest category",
    ]


def test_the_oracle_study_is_shown_as_grids():
    rows = {row.name: row for row in STUDIES["fig-oracle"].rows(SHORT)}
    warned = "catastrophic overfitting: 98 % of the training attacks fail, but PGD-10 breaks all"
    runs = [
        record(rows["baseline"], clean=99.0, pgd100x20=90.0),
        record(rows["b0-o3-r7"], clean=98.0, pgd100x20=73.7),
        record(rows["b7-o3-r0"], clean=98.5, pgd100x20=9.0, warnings=[warned]),
    ]
    lines = tables.table(Results(STUDIES["fig-oracle"], SHORT, {run.name: run for run in runs}))
    assert "| PGD-AT, seven steps for all | 99.00 | 90.00 | 90.60 (−0.60) |  |" in lines
    assert "| N_O = 3 | – | – | – | 73.70 |" in lines
    assert "| N_B = 7 | – | – | 9.00† | – |" in lines
    about = next(line for line in lines if "†" in line)
    assert "Clean accuracy is 98.00 to 99.00 %." in about
    assert about.endswith("– means not run yet: 35 of 38 rows.")


def test_a_class_of_examples_has_its_share_beside_the_papers():
    row = ROWS["bt-nr2"]
    run = record(row, clean=80)
    run.shares = {"boundary": 0.3, "robust": 0.5, "outlier": 0.2}
    found = results(run)
    assert cell(found, row, "shares").text == "30.0 / 50.0 / 20.0"
    assert cell(found, row, "shares", "paper").text == "28.0 / 54.0 / 18.0 (+2.0 / −4.0 / +2.0)"
    assert cell(found, ROWS["trades"], "shares").text == cell(found, ROWS["trades"], "shares", "paper").text == "–"


def test_a_mark_is_of_what_is_measured():
    """Clean accuracy of N_R = 0 is claimed against TRADES, which was run, and against λ = 1, which was not."""
    found = results(record(ROWS["trades"], clean=80), record(ROWS["bt-nr0"], clean=84))
    assert found.cell("bt-nr0", "clean") is Verdict.HOLDS


def test_seconds_are_compared_where_only_the_method_differs():
    def wall(**training):
        mined = record(ROWS["bt-nr2"], seconds=50, pgd20=50)
        mined.config["training"] |= training
        return results(record(ROWS["trades"], seconds=100, pgd20=50), mined).value("bt-nr2", "wall")

    assert wall().mean == pytest.approx(2)
    assert wall(seed=0, log_every=7).mean == pytest.approx(2)
    assert wall(compile=True) is wall(engine="eager") is None


def test_seconds_that_were_timed_apart_are_compared_with_such_alone():
    def paced(name, seconds, commit="c", device="H200"):
        one = record(ROWS[name], jobs=4, pgd20=50)
        one.timing = {"epoch_seconds": seconds, "environment": {"device": device, "torch": "2", "commit": commit}}
        return one

    found = results(paced("trades", 6.0), paced("bt-nr2", 4.0))
    assert found.value("bt-nr2", "wall").mean == pytest.approx(1.5)
    assert found.value("bt-nr2", "minutes").mean == pytest.approx(4 * found.runs["bt-nr2"][0].epochs / 60)
    assert results(record(ROWS["trades"], pgd20=50), paced("bt-nr2", 4.0)).value("bt-nr2", "wall") is None
    assert results(paced("trades", 6.0), paced("bt-nr2", 4.0, commit="d")).value("bt-nr2", "wall") is None
    assert results(paced("trades", 6.0), paced("bt-nr2", 4.0, device="A100")).value("bt-nr2", "wall") is None


def test_the_classes_over_training():
    row = STUDIES["fig-shares"].rows(SHORT)[0]
    curve = {"step": [50, 100], "outlier": [0.8, 0.2], "boundary": [0.2, 0.3], "robust": [0.0, 0.5]}
    curve |= {"svar_outlier": [-0.1, -0.1], "svar_boundary": [0.1, 0.2], "svar_robust": [None, 0.1]}
    one = dataclasses.replace(record(row), curve=curve)
    assert one.value("robust_rise") == pytest.approx(50)
    assert one.value("outlier_fall") == pytest.approx(60)
    assert one.value("boundary_least") == pytest.approx(-10)
    assert one.value("svar_order") == 0  # the first entry has no robust example, the second is out of order
    assert record(row).value("robust_rise") is None


# ------------------------------------------------------------------------------------ the paper's scale

ORDER = {
    "medium": "trades bt-nr2 fast-3 random bt-nb5 pgd-at pgd-at-3 pgd-at-bt",
    "paper": "bt-nr2 bt-nb5 trades fast-3 random mart mart-bt bt-nr0 fast",
}


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parent.parent / "benchmarks"))
    import paper_scale

    yield paper_scale
    del sys.modules["paper_scale"]


def large(scale: str, row: str, **figures: float) -> Record:
    """A record of the large network, trained alone in 40 seconds an epoch."""
    rows = {row.name: row for row in STUDIES[LARGE].rows(SCALES[scale])}
    made = record(rows[row], SCALES[scale], **figures)
    made.environment |= {"commit": "abc", "device": "H200"}
    return dataclasses.replace(made, jobs=1, seconds=40.0 * made.epochs)


@pytest.mark.parametrize("scale", ORDER)
def test_the_large_network_is_trained_in_order(scale):
    rows = STUDIES[LARGE].rows(SCALES[scale])
    assert [row.name for row in rows] == ORDER[scale].split()
    assert [row.images for row in rows] == [None, None] + [2000] * (len(rows) - 2)
    assert {row.config(SCALES[scale]).network.name for row in rows} == {"wrn-34-10"}
    epochs = {row.name: row.config(SCALES[scale]).training.epochs for row in rows}
    assert set(epochs.values()) == ({30} if scale == "medium" else {76, 90})


def test_records_of_the_large_network_are_runs_of_every_study():
    mined = large("paper", "bt-nr2", clean=85.5, pgd20=55.9)
    mined = dataclasses.replace(mined, seconds=mined.seconds * 22 / 40)
    mined.averaged.update(clean={"accuracy": 0.86, "examples": 10000}, pgd20={"accuracy": 0.565, "examples": 10000})
    mined.figures["apgd"] = {"accuracy": 0.528, "examples": 2000}
    records = {one.name: one for one in (mined, large("paper", "trades", clean=84.5, pgd20=56.0))}
    shown, table = (Results(STUDIES[name], PAPER, records) for name in (LARGE, "table-trades"))
    assert shown.value("bt-nr2", "pgd20").mean == table.value("bt-nr2", "pgd20").mean == pytest.approx(55.9)
    assert table.value("bt-nr2", "wall").mean == pytest.approx(40 / 22)
    assert "averaged weights: Clean 86.00, PGD-20 56.50" in "\n".join(tables.table(shown))
    assert "APGD on 2000 of 10000 test images" in " ".join(shown.notes())
    assert shown.status(shown.rows["mart"]) == "not run yet"


def test_records_of_the_large_network_become_lines_of_the_table(tmp_path, script):
    folders = {scale: tmp_path / "reproduce" / scale / "records" for scale in ORDER}
    made = large("medium", "trades", clean=83.5, pgd20=55, apgd=52)
    made.averaged["clean"] = {"accuracy": 0.84, "examples": 10000}
    made.write(folders["medium"])
    large("medium", "bt-nr2", clean=84).write(folders["medium"])
    large("paper", "trades", clean=84.5).write(folders["paper"])
    lines = list(csv.DictReader(script.table(tmp_path).splitlines()))
    found = [(line["scale"], line["row"], line["weights"]) for line in lines]
    medium = [("medium", "trades", "last"), ("medium", "trades", "averaged"), ("medium", "bt-nr2", "last")]
    assert found == [*medium, ("paper", "trades", "last")]
    assert (lines[0]["clean"], lines[0]["apgd"], lines[0]["seconds_per_epoch"]) == ("83.50", "52.00", "40.00")
    assert (lines[1]["clean"], lines[1]["pgd20"]) == ("84.00", "")
    with pytest.raises(SystemExit, match="is no row of the study"):
        script.lines_of(record(ROWS["trades"]))


def test_the_table_of_the_large_network_is_that_of_the_records(script):
    assert (script.RESULTS / "paper_scale.csv").read_text() == script.table()


# ---------------------------------------------------------------------------------- measures, times


def test_what_is_left_is_by_the_time_of_the_same_run(tmp_path):
    task = Task(ROWS["trades"].config(SHORT), tmp_path, ("clean",))
    there, here = record(ROWS["trades"], seconds=300.0), record(ROWS["trades"], seed=1, seconds=60.0, device="CPU")
    known = {run.name: run for run in (there, here, record(ROWS["bt-nr2"], seconds=10.0))}
    assert estimate_training(task, known, "H200") == (pytest.approx(300.0), "H200")
    assert estimate_training(task, known, "CPU") == (pytest.approx(60.0), "CPU")
    assert estimate_training(task, known, "A100")[1] in ("H200", "CPU")
    there.jobs = 2  # it shared the device
    assert estimate_training(task, {there.name: there}, "H200") is None


@given(st.lists(st.tuples(st.integers(-3, 3), st.integers(0, 2)), min_size=3, max_size=40))
def test_rank_correlation_is_scipys(pairs):
    a, b = (torch.tensor(column, dtype=torch.float64) for column in zip(*pairs, strict=True))
    ours = rank_correlation(a, b)
    if len(set(a.tolist())) == 1 or len(set(b.tolist())) == 1:
        assert math.isnan(ours)
    else:
        assert ours == pytest.approx(spearmanr(a.numpy(), b.numpy()).statistic, abs=1e-9)
