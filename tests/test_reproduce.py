"""`bullettrain reproduce` at the smallest scale: every study runs, goes on after a kill, and reuses what is there."""

import json
import os
import re
import shutil
import signal
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bullettrain.cli.app import app
from bullettrain.config.settings import ConfigError
from bullettrain.evaluation.results import unpack
from bullettrain.reproduction import STUDIES, figures, tables
from bullettrain.reproduction import runs as runs_module
from bullettrain.reproduction.records import better, read_records, run_name
from bullettrain.reproduction.runs import TaskResult, run_all
from bullettrain.reproduction.scales import MEDIUM, SMOKE
from bullettrain.reproduction.tasks import Task
from bullettrain.run_folder import RunFolder
from short_runs import died

FAST = ("--set", "epochs=1", "--set", "data.train_size=150", "--set", "log_every=1", "--images", "50")


def invoke(*words, columns=100, fails=None):
    runner = CliRunner(env={"COLUMNS": str(columns), "NO_COLOR": "1", "TERM": "dumb"})
    result = runner.invoke(app, ["reproduce", *(str(word) for word in words)], prog_name="bullettrain")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == (fails or 0), result.output
    return re.sub(r"\x1b\[[0-9;]*m", "", result.output)


def test_every_study_runs_and_leaves_its_table_and_pictures(tmp_path):
    """All of them in one command: runs that they share are made once. Other starts of the MNIST study have its rows."""
    studies = {name: study for name, study in STUDIES.items() if not name.startswith("fig-oracle-")}
    text = invoke(*studies, "fig-nr", "--out", tmp_path, *FAST, columns=80)
    shown, *written = text.split("written")
    # Runs of one epoch are warned of, and warnings do not wrap.
    warned = "no better than chance", "not robust"
    assert max(len(line) for line in shown.splitlines() if not any(words in line for words in warned)) <= 80
    assert "paper" not in shown, "figures that mean nothing stand beside no others"
    wanted = sum(len(study.rows(SMOKE)) for study in studies.values())
    made = int(re.match(r"(\d+) runs: \1 to train or evaluate", text)[1])
    assert made < 0.75 * wanted
    assert "bt-nr2 = mnist-oracle" not in text
    assert re.search(r"bt-nr2 = gamma-0.8 = nr-2 = svar ", text)
    assert text.count("Accuracy and speed-up over N_R") == 1
    for name, study in studies.items():
        table = (tmp_path / f"{name}.md").read_text()
        page = (tmp_path / f"{name}.html").read_text()
        for row in study.rows(SMOKE):
            assert row.title in table or name in tables.GRIDS  # a point of a grid there
            assert row.title in page
        assert not any(claim in table for claim in study.claims(SMOKE))  # figures that mean nothing prove nothing
        assert "src=http" not in page
        pictures = [file for file in tmp_path.glob(f"{name}*.png") if file.name.startswith(name)]
        assert bool(pictures) == (name in figures.DRAWN), name
        for picture in pictures:
            assert picture.read_bytes().startswith(b"\x89PNG")
            svg = picture.with_suffix(".svg").read_text()
            assert "<svg" in svg
            assert "fa1" not in re.findall(r"#(fa1.7e)", svg)  # no stand-in colour is left
    assert len(written) == sum((tmp_path / name).suffix in (".md", ".html", ".png") for name in os.listdir(tmp_path))
    records = read_records(tmp_path / "records")
    assert len(records) == len(list((tmp_path / "runs").glob("[!.]*"))) == made
    for record in records.values():
        assert record.finished
        assert record.seconds > 0
        assert record.work > 0
        assert record.environment["device"]
        assert "commit" in record.environment
        assert record.figures["clean"]["examples"] == 359
    augmix = next(record for record in records.values() if record.config["recipe"] == "digits-augmix")
    found = augmix.figures["corruptions"]
    assert 0 < found["accuracy"] < 1
    shares = [share for row in found["corruptions"].values() for share in row]
    assert len(shares) == 3 * 5
    assert sum(shares) / 15 == pytest.approx(found["accuracy"])
    assert (tmp_path / "table-augmix-10.png").exists()
    ranked = [record.measures for record in records.values() if "ranked" in record.measures]
    assert len(ranked) == 5
    # Again: everything is from before, and the files are the same.
    before = (tmp_path / "uncertainty.md").read_bytes()
    assert "0 to train or evaluate, 6 from before" in invoke("uncertainty", "--out", tmp_path, *FAST)
    assert before == ((tmp_path / "uncertainty.md").read_bytes())
    again = invoke("fig-gamma", "fig-nr", "--out", tmp_path, *FAST, "--dry-run")
    assert "fig-gamma, fig-nr, scale smoke" in again
    assert again.count("done") == 6
    with pytest.raises(ConfigError, match="--rows nr-0 goes with one name; there are 2"):
        invoke("fig-gamma", "fig-nr", "--rows", "nr-0", "--out", tmp_path)


# ------------------------------------------------------------------------------------------- going on


def killed_in_second_epoch(out):
    """In a process of its own: a kill right after the first epoch's checkpoint."""
    save = RunFolder.save

    def die(self, *arguments):
        save(self, *arguments)
        os.kill(os.getpid(), signal.SIGKILL)

    RunFolder.save = die
    invoke("table-trades", "--rows", "bt-nr2", "--out", out, "--set", "data.train_size=150")


def test_a_killed_row_goes_on_and_ends_as_if_it_had_not_been(tmp_path):
    options = ("table-trades", "--rows", "bt-nr2", "--set", "data.train_size=150")
    assert died(killed_in_second_epoch, tmp_path / "a")
    assert not list((tmp_path / "a").glob("records/*"))
    assert "epoch 1 of 2" in invoke(*options, "--out", tmp_path / "a", "--dry-run")
    invoke(*options, "--out", tmp_path / "a")
    invoke(*options, "--out", tmp_path / "b")
    (gone_on,), (whole,) = (read_records(tmp_path / name / "records").values() for name in "ab")
    assert gone_on.figures == whole.figures
    assert gone_on.curve == whole.curve
    assert gone_on.epochs == 2


def test_a_name_is_printed_as_it_is(tmp_path):
    out = tmp_path / "[/b]exp[a]:car:"
    text = invoke("table-trades", "--rows", "trades", "--out", out, *FAST)
    assert f"written  {out}/table-trades.md\n" in text


def test_a_record_that_lacks_a_figure_is_evaluated_not_trained_again(tmp_path, monkeypatch):
    invoke("table-trades", "--rows", "trades", "--out", tmp_path, *FAST)
    monkeypatch.setattr("bullettrain.training.trainer.Trainer.run", lambda self: pytest.fail("trained again"))
    text = invoke("strong-attacks", "--rows", "trades", "--out", tmp_path, *FAST)
    assert "1 run: 1 to train or evaluate" in text
    (record,) = read_records(tmp_path / "records").values()
    assert {"clean", "pgd10", "pgd10x2", "pgd20x2", "pgd10x2-margin"} <= set(record.figures)
    assert record.figures["pgd20x2"]["examples"] == 50
    # Which images: those of training's own attack, and those of `evaluate`, here a part of them.
    for figure in record.figures.values():
        kept = unpack(figure["survived"], int(figure["examples"]))
        assert float(kept.double().mean()) == pytest.approx(figure["accuracy"], abs=1e-12)
    prints = {figure["examples"]: figure["fingerprint"] for figure in record.figures.values()}
    assert len(set(prints.values())) == len(prints) == 2


def test_training_and_evaluating_apart(tmp_path, monkeypatch):
    """Trained in one go, then evaluated by `evaluate`, whose figures the tables take up; the rest as usual."""
    options = ("table-trades", "--rows", "trades,bt-nr2", "--out", tmp_path, *FAST)
    with monkeypatch.context() as patched:
        patched.setattr(runs_module, "evaluate", lambda *arguments, **options: pytest.fail("evaluated"))
        invoke(*options, "--train-only")
        assert "0 to train or evaluate, 2 from before" in invoke(*options, "--train-only")
    records = read_records(tmp_path / "records")
    assert [set(record.figures) for record in records.values()] == [{"clean", "pgd10"}] * 2
    assert all(record.finished for record in records.values())

    name, exact = next((name, record.figures) for name, record in records.items() if "r2-o0" in name)
    attacks = "clean,pgd10,pgd:steps=10,restarts=2,loss=margin"
    words = ["evaluate", str(tmp_path / "runs" / name), "--attack", attacks, "--precision", "bf16", "--device", "cpu"]
    assert CliRunner().invoke(app, words).exit_code == 0
    invoke(*options, "--tables")
    figures = read_records(tmp_path / "records")[name].figures
    assert {"clean": figures["clean"], "pgd10": figures["pgd10"]} == exact  # float32 stays where there is both
    assert figures["pgd10x2-margin"]["precision"] == "bf16"
    assert "PGD-10×2 margin searched in bf16 (TRADES λ=1/6 + BT, N_R=2)." in (tmp_path / "table-trades.md").read_text()

    monkeypatch.setattr("bullettrain.training.trainer.Trainer.run", lambda self: pytest.fail("trained again"))
    assert "1 to train or evaluate, 1 from before" in invoke(*options, "--precision", "bf16")
    for record in read_records(tmp_path / "records").values():
        assert record.figures["pgd10x2-margin"]["precision"] == "bf16"
    assert "0 to train or evaluate, 2 from before" in invoke(*options)  # what is there will do
    assert "2 runs: 2 to train or evaluate" in invoke(*options, "--precision", "float32")
    for record in read_records(tmp_path / "records").values():
        assert "precision" not in record.figures["pgd10x2-margin"]


def test_a_record_is_left_alone_while_its_training_is_made_again(tmp_path):
    options = ("table-trades", "--rows", "bt-nr2", "--out", tmp_path, *FAST)
    invoke(*options)
    ((name, before),) = read_records(tmp_path / "records").items()
    course = tmp_path / "runs" / name / "metrics.jsonl"  # as of a run that was stopped on its way
    lines = [line for line in course.read_text().splitlines() if json.loads(line)["kind"] not in ("end", "evaluation")]
    course.write_text("\n".join(lines) + "\n")
    (tmp_path / "runs" / name / "evaluation.json").unlink()
    invoke(*options, "--tables")
    assert read_records(tmp_path / "records")[name] == before


def test_a_record_without_its_run_is_never_trained_over(tmp_path, monkeypatch):
    options = ("table-trades", "--rows", "trades", "--out", tmp_path, *FAST)
    invoke(*options)
    shutil.rmtree(tmp_path / "runs")
    ((_, before),) = read_records(tmp_path / "records").items()
    monkeypatch.setattr("bullettrain.training.trainer.Trainer.run", lambda self: pytest.fail("trained again"))
    assert "0 to train or evaluate, 1 from before" in invoke(*options)
    more = ("strong-attacks", *options[1:])
    assert re.search(r"trades +on record *\n", invoke(*more, "--dry-run"))
    text = invoke(*more)
    assert "0 to train or evaluate, 1 from before" in text
    assert "trades: the record lacks pgd10x2, pgd20x2, and its weights are not here" in text
    assert f"{before.name}.json away" in text
    assert list(read_records(tmp_path / "records").values()) == [before]


def test_of_two_figures_the_better_is_kept():
    exact, half, few = {"examples": 9, "accuracy": 0.5}, {"examples": 9, "precision": "bf16"}, {"examples": 3}
    assert better({"a": exact, "b": few}, {"a": half, "c": few}) == {"a": exact, "b": few, "c": few}
    assert better({"a": few}, {"a": half}) == {"a": half}
    assert better({"a": half}, {"a": dict(half, accuracy=1)})["a"]["accuracy"] == 1
    assert better({"a": dict(exact, kept="")}, {"a": exact}) == {"a": dict(exact, kept="")}


def test_a_stop_leaves_a_table_and_the_command_to_go_on(tmp_path, monkeypatch):
    done = []

    def stop(task, console):
        done.append(task.name)
        return TaskResult(task.name, signal=signal.SIGTERM)

    monkeypatch.setattr("bullettrain.reproduction.runs.perform", stop)
    text = invoke("table-mart", "--out", tmp_path, fails=128 + signal.SIGTERM)
    assert len(done) == 1  # the others are not begun
    assert "resume with" in text
    assert "Not run yet: MART; " in (tmp_path / "table-mart.md").read_text()


def test_a_second_ctrl_c_says_how_to_go_on_too(tmp_path, monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("bullettrain.reproduction.runs.run_all", interrupted)
    monkeypatch.setattr("sys.argv", ["bullettrain", "reproduce", "table-mart"])
    text = invoke("table-mart", "--out", tmp_path, fails=130)
    assert text.endswith("interrupted; resume with:\n  bullettrain reproduce table-mart\n")


def test_ctrl_c_while_tables_are_written_says_it_too(tmp_path, monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("bullettrain.cli.reproduce._write", interrupted)
    assert "resume with" in invoke("table-mart", "--tables", "--out", tmp_path, fails=130)


def test_a_row_that_fails_does_not_stop_the_others(tmp_path, monkeypatch):
    train = runs_module.train

    def fail(config, *arguments, **options):
        if config.method.robust == 0:
            raise RuntimeError("CUDA out of memory.\nand more")
        return train(config, *arguments, **options)

    monkeypatch.setattr(runs_module, "train", fail)
    text = invoke("table-trades", "--rows", "bt-nr*", "--out", tmp_path, *FAST, fails=1)
    assert re.search(r"failed .*-b10-r0-o0-.*: CUDA out of memory\.\n", text)
    (record,) = read_records(tmp_path / "records").values()
    assert record.config["method"]["robust"] == 2


def test_a_folder_that_cannot_be_read_fails_alone(tmp_path):
    """It was begun by a version with other settings, for one."""
    rows = {row.name: row for row in STUDIES["table-trades"].rows(SMOKE)}
    folder = tmp_path / "runs" / run_name(rows["bt-nr0"].config(SMOKE, FAST[1:6:2]))
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("method:\n  jsd_over: batch\n")
    text = invoke("table-trades", "--rows", "bt-nr*", "--out", tmp_path, *FAST, fails=1)
    assert re.search(r"failed .*-b10-r0-o0-.*: .*config.yaml cannot be read.*no setting 'method.jsd_over'", text)
    (record,) = read_records(tmp_path / "records").values()
    assert record.config["method"]["robust"] == 2
    # Nor does one that was finished keep a table from being made.
    (tmp_path / "table-trades.md").unlink()
    (tmp_path / "runs" / record.name / "config.yaml").write_text("method:\n  jsd_over: batch\n")
    text = invoke("table-trades", "--rows", "bt-nr2", "--tables", "--out", tmp_path, *FAST, fails=1)
    assert re.search(r"failed .*-b10-r2-o0-.*cannot be read", text)
    assert "TRADES λ=1/6 + BT, N_R=2" in (tmp_path / "table-trades.md").read_text()


def test_a_network_that_cannot_be_evaluated_fails_alone(tmp_path, monkeypatch):
    def refuse(subject, *arguments, **options):
        if subject.config.method.robust == 0:
            raise ConfigError("the network returns NaN or infinite logits; look at its weights")
        return evaluate(subject, *arguments, **options)

    evaluate = runs_module.evaluate
    monkeypatch.setattr(runs_module, "evaluate", refuse)
    text = invoke("table-trades", "--rows", "bt-nr*", "--out", tmp_path, *FAST, fails=1)
    assert re.search(r"failed .*-b10-r0-o0-.*: the network returns NaN", text)
    table = (tmp_path / "table-trades.md").read_text()
    row = next(line for line in table.splitlines() if "| TRADES λ=1/6 + BT, N_R=0 |" in line)
    assert re.match(r"\| [^|]+ \| \d+\.\d\d", row)  # what training told of it is kept


def test_autoattack_is_looked_for_before_anything_is_trained(tmp_path, monkeypatch):
    def absent():
        raise ImportError("AutoAttack needs pyautoattack")

    monkeypatch.setattr("bullettrain.evaluation.autoattack.installed", absent)
    with pytest.raises(ImportError, match="needs pyautoattack"):
        invoke("table-trades", "--scale", "short", "--rows", "trades", "--out", tmp_path)
    assert not list(tmp_path.iterdir())


def test_several_at_once_with_seeds(tmp_path):
    options = ("--rows", "trades", "--seeds", 2, "--out", tmp_path, *FAST)
    text = invoke("table-trades", *options, "--jobs", 2)
    assert len(re.findall(r"^[12]/2  done ", text, re.M)) == 2
    first, second = read_records(tmp_path / "records").values()
    assert (first.seed, second.seed) == (0, 1)
    assert first.jobs == second.jobs == 2
    assert first.figures != second.figures
    row = next(line for line in (tmp_path / "table-trades.md").read_text().splitlines() if "| TRADES λ=1/6 |" in line)
    clean, wall = (row.split("|")[index].strip() for index in (2, -3))
    assert re.fullmatch(r"\d+\.\d\d ± \d+\.\d\d", clean)
    assert wall == "–"  # shared seconds are no time
    before = (tmp_path / "table-trades.md").read_text()
    text = invoke("table-trades", "--tables", "--out", tmp_path, *FAST)  # nothing is trained, and all seeds are shown
    assert "to train or evaluate" not in text
    assert (tmp_path / "table-trades.md").read_text() == before


def test_a_mistake_in_a_process_is_handed_to_the_first(tmp_path):
    config = STUDIES["table-trades"].rows(SMOKE)[0].config(SMOKE, ["data.train_size=5000"])
    with pytest.raises(ConfigError, match="train_size is 5000"):
        run_all([Task(config, tmp_path, ("clean",))], jobs=2, console=None)


# ------------------------------------------------------------------------------------ what is asked for


def test_settings_that_only_other_rows_refuse_leave_a_table(tmp_path):
    invoke("table-augmix", "--rows", "no-jsd-10", "--set", "jsd=false", "--out", tmp_path, *FAST)
    table = (tmp_path / "table-augmix.md").read_text()
    assert "AugMix − JSD, CIFAR-10" in table
    assert "AugMix + BT" not in table
    with pytest.raises(ConfigError, match="robust=1"):  # asked for, it is told at once
        invoke("table-augmix", "--set", "jsd=false", "--out", tmp_path / "all", *FAST)
    assert not (tmp_path / "all").exists()


def test_wrong_names_say_what_there_is(tmp_path):
    with pytest.raises(
        ConfigError, match=r"nothing to reproduce called 'table-trade'.*table-trades, table-mart.*uncertainty"
    ):
        invoke("table-trade")
    with pytest.raises(ConfigError, match=r"no row 'bt'.*there are trades-1, trades, fast"):
        invoke("table-trades", "--rows", "trades,bt")
    with pytest.raises(ConfigError, match=r"--scale is 'tiny'; there are smoke, short, medium, paper"):
        invoke("table-trades", "--scale", "tiny")
    with pytest.raises(ConfigError, match=r"no setting 'gama'; .*did you mean 'gamma'"):
        invoke("table-trades", "--set", "gama=1", "--out", tmp_path)
    with pytest.raises(ConfigError, match=r"--precision is 'bfloat16'; there are float32, tf32, bf16; did you mean"):
        invoke("table-trades", "--precision", "bfloat16", "--out", tmp_path)
    with pytest.raises(ConfigError, match=r"--train-only and --tables do not go together"):
        invoke("table-trades", "--train-only", "--tables", "--out", tmp_path)
    with pytest.raises(ConfigError, match=r"--rows names no row"):
        invoke("table-trades", "--rows", ",", "--out", tmp_path)
    (tmp_path / "file").touch()
    for how in ((), ("--tables",), ("--timing",)):
        for out in ("file", "file/out"):
            with pytest.raises(ConfigError, match=rf"--out cannot be written \(.*/{out}: .*\); choose another --out"):
                invoke("table-trades", "--rows", "trades", "--out", tmp_path / out, *how)
    corrupt = rf"bullettrain data corrupt --dataset cifar10 --out {tmp_path}/CIFAR-10-C --data-dir {tmp_path}`"
    with pytest.raises(ConfigError, match=rf"CIFAR-10-C is missing.*{corrupt}"):
        invoke("table-augmix", "--scale", "short", "--data-dir", tmp_path, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_list(tmp_path):
    text = invoke()
    assert all(name in text for name in STUDIES)
    assert "--scale short" in text


def test_a_dry_run_trains_nothing_and_says_where_its_times_come_from(tmp_path):
    words = ("table-trades", "--scale", "short", "--rows", "trades-1,bt-nr2", "--dry-run", "--out", tmp_path)
    text = invoke(*words, "--jobs", 4)
    assert re.search(r"bt-nr2 +new +2.min 10.s +NVIDIA H200", text)  # as it is on record
    assert re.search(r"trades-1 +new +not measured", text)
    assert "preact-resnet-18, 30 epochs\n" in text
    assert f"runs and records in {tmp_path}\n" in text
    assert "of training, one run after another, besides 1 that was not measured" in text
    assert invoke(*words, "--jobs", 4, "--train-only") == text
    large = invoke("--scale", "medium", "--dry-run", "--out", tmp_path)  # without a name
    assert re.findall(r"^([\w-]+) +new ", large, re.M) == [row.name for row in STUDIES["large-network"].rows(MEDIUM)]
    assert "wrn-34-10, 30 epochs, 4 mini-batches attacked at once" in large
    assert not list(tmp_path.iterdir())


def test_a_damaged_record_is_named(tmp_path, monkeypatch):
    from bullettrain.run_folder import RunError

    (tmp_path / "records").mkdir()
    (tmp_path / "records" / "x.json").write_text(json.dumps({"format": 99}))
    monkeypatch.setattr("bullettrain.training.trainer.Trainer.run", lambda self: pytest.fail("trained first"))
    with pytest.raises(RunError, match=r"x\.json is no record that this version can read \(format 99\)"):
        invoke("table-trades", "--rows", "trades", "--out", tmp_path, *FAST)


def test_the_page_says_what_is_recorded():
    import subprocess
    import sys

    root = Path(__file__).resolve().parent.parent
    check = [sys.executable, str(root / "benchmarks" / "reproduction_page.py"), "--check"]
    done = subprocess.run(check, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
