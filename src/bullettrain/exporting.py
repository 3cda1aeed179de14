"""Export a trained network: ONNX, `torch.export`, or a folder for a model hub."""

from __future__ import annotations

import importlib
import io
import json
import logging
import math
import shlex
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

import bullettrain
from bullettrain.config import Config
from bullettrain.config.method import MethodConfig
from bullettrain.config.methods import method_name
from bullettrain.config.recipes import RECIPES
from bullettrain.config.settings import as_setting
from bullettrain.errors import UserError, raised_as
from bullettrain.evaluation.results import Store
from bullettrain.evaluation.specs import radius, threat_in_words, threat_of
from bullettrain.extras import extra
from bullettrain.formatting import attack_name
from bullettrain.loading import EXPORTED, LoadedModel, with_shape
from bullettrain.run_folder import NetworkMetadata, RunFolder, RunLog, pack_weights

FORMATS = {"onnx": "model.onnx", "torch-export": "model.pt2", "hub": "hub"}
"""Default name of the file or folder, by format."""
NETWORKS = {"preact-resnet-18": "PreActResNet-18", "small-cnn": "SmallCNN"}


class ExportError(UserError):
    """The network cannot be exported: why, and what to do, in one line."""


def export(model: LoadedModel, form: str, out: Path) -> list[Path]:
    """Write ``model`` in one of :data:`FORMATS` to ``out``, and return the paths of the files.

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
    """Return the network traced by torch.export, or as ONNX, with the classes and the threat as metadata."""
    about, shape = model.about, _shape(model)
    facts = {
        "classes": json.dumps(about.classes),
        "threat": json.dumps(None if about.threat is None else vars(about.threat)),
        "bullettrain": bullettrain.__version__,
    }
    example = torch.zeros(2, shape.channels, shape.image_size, shape.image_size)
    network = model.network.cpu().eval().requires_grad_(False)
    with raised_as(ExportError, "torch.export cannot trace this network: {error}", Exception):  # of many types
        program = torch.export.export(network, (example,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    if form == "torch-export":
        torch.export.save(program, file := io.BytesIO(), extra_files=facts)
        return file.getvalue()
    with extra("ONNX export", "export"):
        for package in ("onnx", "onnxscript"):  # torch's own error names neither package nor extra
            importlib.import_module(package)
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it reports operators of optional packages
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecations within the exporter
        onnx = torch.onnx.export(program, input_names=["images"], output_names=["logits"], dynamo=True, verbose=False)
    assert onnx is not None
    onnx.model.metadata_props.update(facts)
    content: bytes = onnx.model_proto.SerializeToString()
    return content


def _shape(model: LoadedModel) -> NetworkMetadata:
    assert model.about.network is not None
    return model.about.network


# ------------------------------------------------------------------------------------------------ model hub


class Figure(NamedTuple):
    """An accuracy on the test set."""

    attack: str
    """Attack as `--attack` takes it."""
    threat: str
    """Norm and ε, e.g. "L∞ 8/255"; empty for clean images."""
    accuracy: float
    examples: int
    notes: Sequence[str] = ()

    @property
    def name(self) -> str:
        """Attack with its threat: PGD-20 (L∞ 8/255)."""
        return attack_name(self.attack) + (f" ({self.threat})" if self.threat else "")

    @property
    def percent(self) -> str:
        """Accuracy in percent, with two digits."""
        return f"{100 * self.accuracy:.2f}"


Figures = dict[tuple[str, str], Figure]
"""By attack and threat."""


def hub_files(model: LoadedModel) -> dict[str, bytes]:
    """Return the files of a folder for a model hub, by name. They contain no local paths."""
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
    """Return the accuracies of these weights by training; those by `bullettrain evaluate` replace them."""
    if model.folder is None:
        return {}
    figures = [
        Figure(e.attack, "" if e.attack in ("clean", "views") else _threat(model), e.accuracy, int(e.examples))
        for e in RunLog.read(model.folder).evaluations
        if e.weights == model.weights and math.isfinite(e.accuracy * e.examples)
    ]
    entries = [entry for entry in Store(model.folder).entries if entry.digest == model.digest]
    usual = threat_of(model.config) if model.config else None
    results = [result for entry in entries for result in entry.results if result.role == "attack"]
    results = [result for result in results if usual is None or usual.is_usual(result.attack)]
    figures += [
        Figure(r.name, r.threat_name, r.accuracy, r.examples, r.notes)
        for r in sorted(results, key=lambda result: result.examples)  # the one on most images replaces others
    ]
    return {(figure.attack, figure.threat): figure for figure in figures}


def _warnings(model: LoadedModel) -> list[str]:
    """Return the warnings of training."""
    texts = [text for _, text in RunLog.read(model.folder).warnings] if model.folder else []
    return list(dict.fromkeys(texts))


def _threat(model: LoadedModel) -> str:
    return "" if model.about.threat is None else threat_in_words(**vars(model.about.threat))


def _data(config: Config | None) -> str:
    """Return the name of the dataset, without the path of a user's own."""
    return Path(config.data.name.partition(":")[2] or config.data.name).name if config else ""


def _json(values: Mapping[str, Any]) -> bytes:
    return (json.dumps(values, indent=2, ensure_ascii=False) + "\n").encode()


def _model_info(model: LoadedModel, figures: Figures) -> dict[str, Any]:
    """Return the fields of a file in RobustBench's `model_info`; those to be filled in by hand are empty."""
    threat = model.about.threat
    robust = "corruptions" if threat is None else "autoattack"
    clean, attacked = figures.get(("clean", "")), figures.get((robust, _threat(model)))
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
        "reported": attacked.percent if attacked else "",
        f"{robust}_acc": attacked.percent if attacked else "",
    }
    if part := [f"{figure.name} on {figure.examples} test images" for figure in (clean, attacked) if figure]:
        values["footnote"] = "; ".join(part)
    return values


def _architecture(name: str) -> str:
    return NETWORKS.get(name, name.replace("wrn-", "WideResNet-") if name.startswith("wrn-") else name)


def _card(model: LoadedModel, figures: Figures) -> str:
    """Return the model card: what the network is, how robust it is, how to use it, and how it was trained."""
    with extra("a model card"):
        import yaml
    config, shape, threat = model.config, _shape(model), _threat(model)
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
        task = {"task": {"type": "image-classification"}, "dataset": {"name": data, "type": data, "split": "test"}}
        head["model-index"] = [{"name": model.name, "results": [{**task, "metrics": metrics}]}]
    trained = f" trained on {data} with {method_name(config.to_dict()['method'])}" if config else ""
    against = f", to withstand any perturbation of at most {threat}, for pixels in [0, 1]" if threat else ""
    images = f"(m, {shape.channels}, {shape.image_size}, {shape.image_size})"
    trust = ", trust=True" if ":" in shape.name else ""
    parts = [
        f"---\n{yaml.safe_dump(head, sort_keys=False, allow_unicode=True)}---",
        f"# {model.name}",
        f"{_architecture(shape.name)}{trained}{against}. Made with BulletTrain {bullettrain.__version__}.",
        *(f"**Warning:** {text}." for text in _warnings(model)),
        "## Accuracy",
        *_accuracy(figures, attackable=bool(threat)),
        "## Threat model",
        _threat_model(model),
        "## Use",
        "```python\nimport bullettrain\n\n"
        f'network = bullettrain.load("path/to/this/folder"{trust})\n'
        f"logits = network(images)  # images {images} in [0, 1]; logits (m, {shape.num_classes})\n```",
    ]
    if config and model.folder:
        environment = RunFolder(model.folder).environment()
        where = ", ".join(f"{key} {environment[key]}" for key in ("device", "torch", "commit") if environment.get(key))
        parts += ["## How it was made", _allocation(config.method), f"```sh\n{_command(config)}\n```", f"{where}."]
    return "\n\n".join(parts) + "\n"


def _accuracy(figures: Figures, *, attackable: bool) -> list[str]:
    """Return the table of accuracies, with the notes of attacks and what has not been evaluated."""
    parts = []
    if figures:
        rows = [f"| {figure.name} | {figure.percent} % | {figure.examples:,} |" for figure in figures.values()]
        parts.append("\n".join(["| Attack | Accuracy | Test images |", "|---|---:|---:|", *rows]))
    parts += [f"{figure.name}: {note}." for figure in figures.values() for note in figure.notes]
    if attackable and not any(attack == "autoattack" for attack, _ in figures):
        warning = "AutoAttack has not been run on these weights. PGD alone overestimates robustness"
        parts.append(f"{warning}: run `bullettrain evaluate RUN --attack autoattack` on the run, then export again.")
    elif not figures:
        parts.append("These weights have not been evaluated.")
    return parts


def _threat_model(model: LoadedModel) -> str:
    threat = model.about.threat
    if threat is None:
        return "None: the network was trained without an adversary."
    where = "every pixel and channel" if threat.norm == "linf" else "Euclidean norm"
    change = f"change the image by at most ε = {radius(threat.eps)} in {where}, pixels in [0, 1]"
    return f"{_threat(model)}: an adversary who knows the network may {change}."


def _allocation(method: MethodConfig) -> str:
    """Describe the attack steps of each category of examples."""
    steps = "Steps, each two AugMix views" if method.objective == "augmix" else "Attack steps"
    shuffled = ", shuffled among the examples of a batch" if method.shuffled else ""
    if method.allocation != "categories":
        return f"{steps}: up to {method.boundary} for each example, by allocation={method.allocation}{shuffled}."
    if method.budget().uniform_steps is not None:
        return f"{steps}: {method.boundary} for every example."
    boundary, robust = f"N_B = {method.boundary} for boundary examples", f"N_R = {method.robust} for robust ones"
    return f"{steps}: {boundary}, {robust}, N_O = {method.outlier} for outliers; γ = {method.gamma:g}{shuffled}."


def _command(config: Config) -> str:
    """Return a command that trains with the same settings, without local paths."""
    base = config.recipe if config.recipe in RECIPES else Config().recipe
    changed = {key: value for key, (value, _) in config.differences(RECIPES[base]()).items()}
    if ":" in config.data.name:
        changed["data.name"] = f"{config.data.name.partition(':')[0]}:{_data(config)}"
    settings = [word for key, value in changed.items() for word in ("--set", f"{key}={as_setting(value)}")]
    return shlex.join(["bullettrain", "train", base, *settings])
