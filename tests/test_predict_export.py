"""A trained network in use: `bullettrain predict`, `bullettrain export`, and what `bullettrain.load` says of it."""

import json
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from PIL import Image
from torch import nn
from typer.testing import CliRunner

import bullettrain as bt
from bullettrain.cli.app import app
from bullettrain.data import DataError, load, to_unit
from bullettrain.models import build
from bullettrain.run_folder import RunFolder, pack_weights, read_weights
from conftest import few_queries


def invoke(*words, columns=100):
    runner = CliRunner(env={"COLUMNS": str(columns), "NO_COLOR": "1", "TERM": "dumb"})
    result = runner.invoke(app, [str(word) for word in words], prog_name="bullettrain")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.output


@pytest.fixture
def here(robust_run, tmp_path, monkeypatch):
    """A copy of a run and three images of it, in the folder where we are."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(robust_run, "run")
    for index, image in enumerate(load("digits", split="test").images[:3, 0]):
        Image.fromarray(image.numpy()).save(f"{index}.png")
    return Path("run")


FILES = ("0.png", "1.png", "2.png")


def expected(model="run"):
    with torch.no_grad():
        return bt.load(model)(to_unit(load("digits", split="test").images[:3])).softmax(dim=1)


# --------------------------------------------------------------------------------------------------- load


def test_a_loaded_network_says_what_it_is_for(robust_run, tmp_path):
    network = bt.load(robust_run)
    assert network.classes == tuple("0123456789")
    assert (network.image_size, network.channels) == (8, 1)
    assert (network.threat.norm, network.threat.eps) == ("linf", 0.15)
    shutil.copy(robust_run / "last.safetensors", tmp_path)
    assert bt.load(tmp_path / "last.safetensors").threat == network.threat  # away from its run


def test_the_threat_of_a_file_that_does_not_say_it_is_that_of_its_run(here):
    tensors, about = read_weights(here / "last.safetensors")
    values = {key: value for key, value in vars(about).items() if key != "threat"}
    (here / "last.safetensors").write_bytes(pack_weights(tensors, type(about)(**values)))
    assert bt.load(here).threat.eps == 0.15
    (here / "config.yaml").unlink()
    assert bt.load(here / "last.safetensors").threat is None


def test_augmix_has_no_threat():
    from bullettrain.config import recipe

    assert recipe("digits-augmix").method.threat is None


# ------------------------------------------------------------------------------------------------- predict


def test_predict_prints_classes_and_probabilities(here):
    lines = invoke("predict", "run", *FILES).splitlines()
    assert lines[0] == "run, last weights, trained to withstand L∞ 0.15"
    assert lines[1].split() == ["image", "class", "probability", "next"]
    for line, file, shares in zip(lines[2:], FILES, expected(), strict=True):
        (first, second, third), (a, b, c) = shares.topk(3).indices.tolist(), (100 * shares.topk(3).values).tolist()
        assert line.split("  ")[0] == file
        assert re.fullmatch(rf"{file} +{first} +{a:.1f} % +{second} {b:.1f} %, {third} {c:.1f} % *", line)
    assert "next" not in invoke("predict", "run", *FILES, "--top", 1)


def test_predict_as_json(here):
    found = json.loads(invoke("predict", "run", *FILES, "--json"))
    assert [entry["image"] for entry in found] == list(FILES)
    for entry, shares in zip(found, expected(), strict=True):
        assert (entry["class"], entry["probability"]) == (str(int(shares.argmax())), pytest.approx(float(shares.max())))
        assert entry["probabilities"] == pytest.approx({str(i): float(share) for i, share in enumerate(shares)})


def test_predict_takes_images_of_any_size_and_colour(here):
    Image.open("0.png").convert("RGB").resize((64, 32)).save("large.jpg")
    Image.open("0.png").convert("P").save("palette.gif")
    assert len(json.loads(invoke("predict", "run", "large.jpg", "palette.gif", "--json"))) == 2


def test_predict_takes_a_folder_of_images(here):
    Path("photos").mkdir()
    for file in FILES:
        Path(file).rename(Path("photos", file))
    predicted = json.loads(invoke("predict", here, "photos", "--json"))
    assert [values["image"] for values in predicted] == [f"photos/{file}" for file in FILES]


def test_predict_takes_a_folder_of_class_folders(here):
    placed = [Path("photos", "cat", FILES[0]), Path("photos", "dog", "young", FILES[1]), Path("photos", FILES[2])]
    placed[1].parent.mkdir(parents=True)
    placed[0].parent.mkdir()
    for file, place in zip(FILES, placed, strict=True):
        Path(file).rename(place)
    for hidden in (".hidden", "cat/.thumbs"):
        Path("photos", hidden).mkdir()
        Path("photos", hidden, "list.txt").touch()
    predicted = json.loads(invoke("predict", here, "photos", "--json"))
    assert [values["image"] for values in predicted] == sorted(map(str, placed))
    Path("photos", "loop").symlink_to("..")
    with pytest.raises(DataError, match=r"photos/loop is a folder, not an image: give image files\.$"):
        invoke("predict", here, "photos")


def test_predict_with_weights_of_others(here):
    torch.save(build("wrn-10-1", num_classes=4).state_dict(), "net.pt")
    (entry,) = json.loads(invoke("predict", "net.pt", "0.png", "--network", "wrn-10-1", "--json"))
    assert set(entry["probabilities"]) == set("0123")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run", "none.png"], "none.png is missing: give image files"),
        (["run", "run"], "not an image that Pillow can read"),
        (["run", "/dev/zero"], "/dev/zero is a pipe, socket or device"),
        (["run", "run/config.yaml"], "config.yaml is truncated or not an image"),
        (["nothing", "0.png"], "'nothing' is no network"),
    ],
)
def test_what_cannot_be_predicted(here, words, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        invoke("predict", *words)


# -------------------------------------------------------------------------------------------------- export


def test_onnx_runs_elsewhere_and_agrees(here):
    pytest.importorskip("onnxscript", reason="ONNX export needs onnxscript: pip install '.[export]'")
    runtime = pytest.importorskip("onnxruntime", reason="onnxruntime, which runs the exported file, is not installed")
    import onnx

    assert invoke("export", "run") == "written  run/model.onnx\n"
    session, network = runtime.InferenceSession("run/model.onnx"), bt.load("run")
    for m in (1, 2, 7):
        x = torch.rand(m, 1, 8, 8)
        (logits,) = session.run(None, {"images": x.numpy()})
        torch.testing.assert_close(torch.from_numpy(logits), network(x).detach(), rtol=1e-5, atol=1e-5)
    facts = {entry.key: entry.value for entry in onnx.load("run/model.onnx").metadata_props}
    assert json.loads(facts["classes"]) == list("0123456789")
    assert json.loads(facts["threat"]) == {"norm": "linf", "eps": 0.15}


def test_onnx_that_is_not_there_names_the_extra(here, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(ImportError, match=r'ONNX export needs onnx: .* pip install "\.\[export\]"'):
        invoke("export", "run")
    assert not Path("run/model.onnx").exists()


def test_torch_export_agrees_and_keeps_the_classes(here):
    assert invoke("export", "run", "--format", "torch-export", "--out", "new/net.pt2") == "written  new/net.pt2\n"
    kept = {"classes": "", "threat": ""}
    program, network = torch.export.load("new/net.pt2", extra_files=kept).module(), bt.load("run")
    for m in (1, 5):
        x = torch.rand(m, 1, 8, 8)
        torch.testing.assert_close(program(x), network(x))
    assert json.loads(kept["classes"]) == list("0123456789")


def test_a_hub_folder_is_loaded_evaluated_and_described(here, monkeypatch):
    few_queries(monkeypatch)
    invoke("evaluate", "run", "--attack", "autoattack", "--images", 24)
    said = invoke("export", "run", "--format", "hub")
    names = ("model.safetensors", "config.json", "README.md", "model_info.json")
    assert said == "".join(f"written  run/hub/{name}\n" for name in names)
    torch.testing.assert_close(expected("run/hub"), expected("run"))
    assert bt.load("run/hub").threat == bt.load("run").threat
    assert "hub, trained to withstand L∞ 0.15" in invoke("predict", "run/hub", "0.png")
    config = json.loads(Path("run/hub/config.json").read_text())
    assert (config["architecture"], config["id2label"]["3"], config["threat"]["eps"]) == ("small-cnn", "3", 0.15)
    _, head, card = Path("run/hub/README.md").read_text().split("---\n", 2)
    (result,) = yaml.safe_load(head)["model-index"][0]["results"]
    metrics = {metric["name"]: metric["value"] for metric in result["metrics"]}
    entry = json.loads(Path("run/evaluation.json").read_text())["evaluations"][0]
    found = {result["name"]: result for result in entry["results"]}["autoattack"]
    assert metrics["Accuracy, AutoAttack (L∞ 0.15)"] == round(100 * found["accuracy"], 2)
    assert f"| AutoAttack (L∞ 0.15) | {100 * found['accuracy']:.2f} % | 24 |" in card
    assert "at most L∞ 0.15" in card
    method = RunFolder(here).config().method
    assert f"N_B = {method.boundary} for boundary examples, N_R = {method.robust} for robust ones" in card
    assert f"N_O = {method.outlier} for outliers; γ = {method.gamma:g}" in card
    assert "bullettrain train digits --set " in card
    info = json.loads(Path("run/hub/model_info.json").read_text())
    assert (info["eps"], info["autoattack_acc"]) == ("0.15", f"{100 * found['accuracy']:.2f}")
    assert "AutoAttack (L∞ 0.15) on 24 test images" in info["footnote"]


def test_a_card_keeps_the_notes_of_autoattack(here, monkeypatch):
    few_queries(monkeypatch)
    invoke("evaluate", "run", "--attack", "autoattack", "--images", 24)
    content = json.loads(Path("run/evaluation.json").read_text())
    for result in content["evaluations"][0]["results"]:
        if result["name"] == "autoattack":
            result["notes"] = ["apgd-t is left out: its loss compares four classes, and there are 3"]
    Path("run/evaluation.json").write_text(json.dumps(content))
    invoke("export", "run", "--format", "hub")
    note = "AutoAttack (L∞ 0.15): apgd-t is left out: its loss compares four classes, and there are 3."
    assert note in Path("run/hub/README.md").read_text()


def test_no_path_of_this_machine_is_in_a_hub_folder(here):
    values = yaml.safe_load((here / "config.yaml").read_text())
    values["recipe"], values["data"]["name"] = "/home/me/mine.yaml", "folder:/home/me/pictures"
    values["method"] |= {"robust": values["method"]["boundary"], "outlier": values["method"]["boundary"]}
    values["environment"]["command"] = "bullettrain train /home/me/mine.yaml --out /home/me/run"
    (here / "config.yaml").write_text(yaml.safe_dump(values))
    tensors, about = read_weights(here / "last.safetensors")
    (here / "last.safetensors").write_bytes(pack_weights(tensors, replace(about, recipe="/home/me/mine.yaml")))
    invoke("export", "run", "--format", "hub")
    assert not any(b"/home/me" in file.read_bytes() for file in Path("run/hub").iterdir())
    card = Path("run/hub/README.md").read_text()
    assert f"Attack steps: {values['method']['boundary']} for every example." in card
    assert "--set data.name=folder:pictures" in card


def test_a_card_passes_on_the_warnings_of_training(here):
    for _ in range(2):
        RunFolder(here).log({"kind": "warning", "step": 3, "message": "no better than chance: so & so"})
    invoke("export", "run", "--format", "hub")
    assert Path("run/hub/README.md").read_text().count("**Warning:** no better than chance: so & so.") == 1


def test_a_card_says_that_autoattack_was_not_run(here):
    invoke("export", "run", "--format", "hub")
    card = Path("run/hub/README.md").read_text()
    assert "AutoAttack has not been run on these weights" in card
    assert "`bullettrain evaluate RUN --attack autoattack`" in card
    assert "| PGD-5 (L∞ 0.15) |" in card
    assert json.loads(Path("run/hub/model_info.json").read_text())["autoattack_acc"] == ""


def test_weights_of_others_are_exported_too(here):
    network = build("wrn-10-1", num_classes=4, mean=(0.5, 0.5, 0.5), std=(0.2, 0.2, 0.2)).eval()
    torch.save(network.state_dict(), "net.pt")
    words = ["net.pt", "--network", "wrn-10-1", "--mean", "0.5,0.5,0.5", "--std", "0.2,0.2,0.2", "--format", "hub"]
    invoke("export", *words)
    x = torch.rand(2, 3, 32, 32)
    torch.testing.assert_close(bt.load("hub")(x), network(x))
    assert "These weights have not been evaluated" in Path("hub/README.md").read_text()


class Odd(nn.Module):
    def forward(self, x):
        return torch.stack([image.mean().expand(3) * (2 if float(image.mean()) > 0.5 else 1) for image in x])


def odd():
    return Odd()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run", "--format", "onx"], "--format is 'onx'; there are onnx, torch-export, hub; did you mean 'onnx'?"),
        (["run", "--format", "hub", "--out", "."], "--out . holds other files; give a new folder"),
        (["run", "--format", "hub", "--out", "0.png"], "--out 0.png is a file; give a folder"),
        (["run", "--format", "torch-export", "--out", "0.png/x.pt2"], "could not be written to 0.png"),
        (["net.pt", "--network", "wrn-10-1", "--channels", "1"], "net.pt does not fit wrn-10-1"),
        (["test_predict_export:odd", "--format", "torch-export"], "torch.export cannot trace this network"),
    ],
)
def test_what_cannot_be_exported(here, words, said):
    torch.save(build("wrn-10-1").state_dict(), "net.pt")
    before = sorted(Path().iterdir())
    with pytest.raises(ValueError, match=re.escape(said)) as refused:
        invoke("export", *words)
    assert "\n" not in str(refused.value)
    assert sorted(Path().iterdir()) == before
