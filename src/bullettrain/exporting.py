"""A trained network for other programs: ONNX, `torch.export`, and a folder for a model hub."""

from __future__ import annotations

import importlib
import io
import json
import logging
import math
import shlex
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

import bullettrain
from bullettrain.brief import first_line
from bullettrain.config import Config
from bullettrain.config.method import MethodConfig
from bullettrain.config.recipes import RECIPES
from bullettrain.config.settings import as_setting
from bullettrain.errors import UserError
from bullettrain.evaluation.results import Store
from bullettrain.evaluation.specs import radius, threat_in_words
from bullettrain.extras import extra
from bullettrain.formatting import attack_name, method_name
from bullettrain.loading import EXPORTED, LoadedModel, with_shape
from bullettrain.run_folder import NetworkMetadata, RunFolder, RunLog, pack_weights

FORMATS = {"onnx": "model.onnx", "torch-export": "model.pt2", "hub": "hub"}
"""By format: the name of the file or folder, unless another is given."""
NETWORKS = {"preact-resnet-18": "PreActResNet-18", "small-cnn": "SmallCNN"}


class ExportError(UserError):
    """A network that cannot be exported as asked: one line that says why and what to do."""


def export(model: LoadedModel, form: str, out: Path) -> list[Path]:
    """Write ``model`` in one of :data:`FORMATS` to ``out``; return what was written.

    The exported network takes float32 images (m, C, H, W) in [0, 1], for any m, and returns logits (m, K).
    """
    model = with_shape(model)
    if form == "hub":
        if out.is_file():
            raise ExportError(f"--out {out} is a file; give a folder")
        if out.is_dir() and any(out.iterdir()) and not (out / EXPORTED).is_file():
            raise ExportError(f"--out {out} holds other files; give a new folder")
        folder, contents = RunFolder(out), hub_files(model)
    else:
        folder, contents = RunFolder(out.parent), {out.name: _program(model, form)}
    folder.make()
    for name, content in contents.items():
        folder.write(name, content)
    return [folder.path / name for name in contents]


def _program(model: LoadedModel, form: str) -> bytes:
    """The network traced by torch.export, as its own file or as ONNX, with the classes and the threat in it."""
    about, shape = model.about, _shape(model)
    facts = {
        "classes": json.dumps(about.classes),
        "threat": json.dumps(None if about.threat is None else vars(about.threat)),
        "bullettrain": bullettrain.__version__,
    }
    example = torch.zeros(2, shape.channels, shape.image_size, shape.image_size)
    network = model.network.cpu().eval().requires_grad_(False)
    try:
        program = torch.export.export(network, (example,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    except Exception as error:  # torch.export has many ways to refuse a network
        raise ExportError(f"torch.export cannot trace this network: {first_line(error)}") from None
    if form == "torch-export":
        torch.export.save(program, file := io.BytesIO(), extra_files=facts)
        return file.getvalue()
    with extra("ONNX export", "export"):
        for package in ("onnx", "onnxscript"):  # torch imports them, and says less where they are missing
            importlib.import_module(package)
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it tells of operators of packages that are not there
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter's own use of names that are going
        made = torch.onnx.export(program, input_names=["images"], output_names=["logits"], dynamo=True, verbose=False)
    assert made is not None
    made.model.metadata_props.update(facts)
    packed: bytes = made.model_proto.SerializeToString()
    return packed


def _shape(model: LoadedModel) -> NetworkMetadata:
    assert model.about.network is not None
    return model.about.network


# ------------------------------------------------------------------------------------------------ model hub


class Figure(NamedTuple):
    """An accuracy for the model card."""

    name: str
    """Of the attack, with its norm and ε."""
    accuracy: float
    examples: int

    @property
    def percent(self) -> str:
        """The accuracy."""
        return f"{100 * self.accuracy:.2f}"


Figures = dict[tuple[str, str], Figure]
"""By attack, as `--attack` takes it, and threat in words, "" for clean images."""


def hub_files(model: LoadedModel) -> dict[str, bytes]:
    """The files of a folder for a model hub, by name; no path of this machine is in them."""
    about = replace(model.about, recipe=Path(model.about.recipe).name)
    figures, shape = _figures(model), _shape(model)
    config = {
        "library_name": "bullettrain",
        "bullettrain_version": bullettrain.__version__,
        "architecture": shape.name,
        "num_classes": shape.num_classes,
        "num_channels": shape.channels,
        "image_size": shape.image_size,
        "mean": shape.mean,
        "std": shape.std,
        "id2label": dict(enumerate(about.classes)),
        "label2id": {name: index for index, name in enumerate(about.classes)},
        "threat": None if about.threat is None else vars(about.threat),
        "recipe": about.recipe,
    }
    return {
        EXPORTED: pack_weights(model.network.state_dict(), about),
        "config.json": _json(config),
        "README.md": _card(model, figures).encode(),
        "model_info.json": _json(_model_info(model, figures)),
    }


def _figures(model: LoadedModel) -> Figures:
    """What is known of these weights: by `bullettrain evaluate`, else what training ended with."""
    found: Figures = {}

    def add(attack: str, threat: str, accuracy: float, examples: float) -> None:
        name = f"{attack_name(attack)} ({threat})" if threat else attack_name(attack)
        found[attack, threat] = Figure(name, accuracy, int(examples))

    if model.folder is None:
        return found
    for known in RunLog.read(model.folder).evaluations:
        if known.weights == model.weights and math.isfinite(known.accuracy * known.examples):
            threat = "" if known.attack in ("clean", "views") else _threat(model)
            add(known.attack, threat, known.accuracy, known.examples)
    entries = [entry for entry in Store(model.folder).entries if entry.digest == model.digest]
    results = [result for entry in entries for result in entry.results if result.role == "attack"]
    for result in sorted(results, key=lambda result: result.examples):  # those on more images count
        add(result.name, threat_in_words(*result.threat) if result.threat else "", result.accuracy, result.examples)
    return found


def _threat(model: LoadedModel) -> str:
    return "" if model.about.threat is None else threat_in_words(**vars(model.about.threat))


def _data(config: Config | None) -> str:
    """The dataset: of the user's own, its name and not where it lies."""
    return Path(config.data.name.partition(":")[2] or config.data.name).name if config else ""


def _json(values: Mapping[str, Any]) -> bytes:
    return (json.dumps(values, indent=2, ensure_ascii=False) + "\n").encode()


def _model_info(model: LoadedModel, figures: Figures) -> dict[str, Any]:
    """The fields of a file in RobustBench's `model_info`; what a person has to fill in is empty."""
    threat = model.about.threat
    robust = "corruptions" if threat is None else "autoattack"
    clean, found = figures.get(("clean", "")), figures.get((robust, _threat(model)))
    values: dict[str, Any] = {
        "link": "",
        "name": model.name,
        "authors": "",
        "additional_data": False,
        "number_forward_passes": 1,
        "dataset": _data(model.config),
        "venue": "",
        "architecture": _architecture(_shape(model).name),
        "eps": None if threat is None else radius(threat.eps),
        "clean_acc": clean.percent if clean else "",
        "reported": found.percent if found else "",
        f"{robust}_acc": found.percent if found else "",
    }
    if part := [f"{figure.name} on {figure.examples} test images" for figure in (clean, found) if figure]:
        values["footnote"] = "; ".join(part)
    return values


def _architecture(name: str) -> str:
    return NETWORKS.get(name, name.replace("wrn-", "WideResNet-") if name.startswith("wrn-") else name)


def _card(model: LoadedModel, figures: Figures) -> str:
    """The model card: what it is, how robust it was found to be, how to use it, and how it was made."""
    with extra("a model card"):
        import yaml
    config, threat, shape, words = model.config, model.about.threat, _shape(model), _threat(model)
    data = _data(config)
    head: dict[str, Any] = {
        "library_name": "bullettrain",
        "pipeline_tag": "image-classification",
        "tags": ["adversarial-robustness", "image-classification", "bullettrain"],
    }
    if data and figures:
        metrics = [
            {"type": "accuracy", "name": f"Accuracy, {figure.name}", "value": float(figure.percent)}
            for figure in figures.values()
        ]
        of = {"task": {"type": "image-classification"}, "dataset": {"name": data, "type": data, "split": "test"}}
        head["model-index"] = [{"name": model.name, "results": [{**of, "metrics": metrics}]}]
    trained = f" trained on {data} with {method_name(config.to_dict()['method'])}" if config else ""
    against = f", to withstand any perturbation of at most {words}, for pixels in [0, 1]" if threat else ""
    lines = [
        f"---\n{yaml.safe_dump(head, sort_keys=False, allow_unicode=True)}---",
        f"# {model.name}",
        f"{_architecture(shape.name)}{trained}{against}. Made with BulletTrain {bullettrain.__version__}.",
        "## Accuracy",
    ]
    if figures:
        rows = [f"| {figure.name} | {figure.percent} % | {figure.examples:,} |" for figure in figures.values()]
        lines.append("\n".join(["| Attack | Accuracy | Test images |", "|---|---:|---:|", *rows]))
    if threat and not any(attack == "autoattack" for attack, _ in figures):
        warning = "AutoAttack has not been run on these weights. PGD alone overestimates robustness"
        lines.append(f"{warning}: run `bullettrain evaluate RUN --attack autoattack` on the run, then export again.")
    elif not figures:
        lines.append("These weights have not been evaluated.")
    who = "None: the network was trained without an adversary."
    if threat:
        where = "every pixel and channel" if threat.norm == "linf" else "Euclidean norm"
        change = f"change the image by at most ε = {radius(threat.eps)} in {where}, pixels in [0, 1]"
        who = f"{words}: an adversary who knows the network may {change}."
    size = f"(m, {shape.channels}, {shape.image_size}, {shape.image_size})"
    lines += [
        f"## Threat model\n\n{who}",
        "## Use",
        "```python\nimport bullettrain\n\n"
        f'network = bullettrain.load("path/to/this/folder"{", trust=True" if ":" in shape.name else ""})\n'
        f"logits = network(images)  # images {size} in [0, 1]; logits (m, {shape.num_classes})\n```",
    ]
    if config and model.folder:
        environment = RunFolder(model.folder).environment()
        where = ", ".join(f"{key} {environment[key]}" for key in ("device", "torch", "commit") if environment.get(key))
        lines += ["## How it was made", _allocation(config.method), f"```sh\n{_command(config)}\n```", f"{where}."]
    return "\n\n".join(lines) + "\n"


def _allocation(method: MethodConfig) -> str:
    """How many steps of the attack each kind of examples was given."""
    steps = "Steps, each two AugMix views" if method.objective == "augmix" else "Attack steps"
    if method.allocation != "categories":
        dealt = ", dealt out by chance" if method.shuffled else ""
        return f"{steps}: up to {method.boundary} for each example, by allocation={method.allocation}{dealt}."
    if method.budget().uniform_steps is not None:
        return f"{steps}: {method.boundary} for every example."
    boundary, robust = f"N_B = {method.boundary} for boundary examples", f"N_R = {method.robust} for robust ones"
    return f"{steps}: {boundary}, {robust}, N_O = {method.outlier} for outliers; γ = {method.gamma:g}."


def _command(config: Config) -> str:
    """A command that trains with the same settings, wherever the run and its data lay."""
    base = config.recipe if config.recipe in RECIPES else Config().recipe
    changed = {key: mine for key, (mine, _) in config.differences(RECIPES[base]()).items()}
    if ":" in config.data.name:
        changed["data.name"] = f"{config.data.name.partition(':')[0]}:{_data(config)}"
    settings = [word for key, value in changed.items() for word in ("--set", f"{key}={as_setting(value)}")]
    return shlex.join(["bullettrain", "train", base, *settings])
