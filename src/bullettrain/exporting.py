"""A trained network for other programs: ONNX, `torch.export`, and a folder for a model hub."""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import math
import os
import shlex
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import bullettrain
from bullettrain.brief import first_line
from bullettrain.checkpoint_paths import EXPORTED
from bullettrain.errors import UserError
from bullettrain.evaluation.load_model import LoadedModel
from bullettrain.evaluation.results import Result, Store
from bullettrain.evaluation.specs import radius, threat_in_words
from bullettrain.extras import extra
from bullettrain.formatting import attack_name, method_name
from bullettrain.run_folder import NetworkMetadata, RunFolder, RunLog, pack_weights

FORMATS = {"onnx": "model.onnx", "torch-export": "model.pt2", "hub": "hub"}
"""By format: the name of the file or folder, unless another is given."""
HUB_FILES = (EXPORTED, "config.json", "README.md", "model_info.json")
NETWORKS = {"preact-resnet-18": "PreActResNet-18", "small-cnn": "SmallCNN"}


class ExportError(UserError):
    """A network that cannot be exported as asked: one line that says why and what to do."""


def export(subject: LoadedModel, form: str, out: Path) -> list[Path]:
    """Write ``subject`` in one of :data:`FORMATS` to ``out``; return what was written.

    The exported network takes float32 images (m, C, H, W) in [0, 1], for any m, and returns logits (m, K).
    """
    about = _shape(subject)
    facts = {
        "classes": json.dumps(subject.about.classes),
        "threat": json.dumps(None if subject.about.threat is None else vars(subject.about.threat)),
        "bullettrain": bullettrain.__version__,
    }
    if form == "hub":
        return _write_hub(subject, about, out)
    program = _program(subject.network, about)
    with _writing(out) as beside:
        if form == "onnx":
            _to_onnx(program, facts).save(beside, external_data=False)
        else:
            torch.export.save(program, beside, extra_files=facts)
    return [out]


def _shape(subject: LoadedModel) -> NetworkMetadata:
    """What the network is built from and for; its classes are counted."""
    about = subject.about.network
    assert about is not None
    try:
        with torch.no_grad():
            logits = subject.network(torch.zeros(2, about.channels, about.image_size, about.image_size))
    except (RuntimeError, ValueError) as error:
        size = f"{about.channels}×{about.image_size}×{about.image_size}"
        give = f"give --image-size and --channels ({first_line(error)})"
        raise ExportError(f"the network does not take images {size}; {give}") from None
    return replace(about, num_classes=logits.shape[1])


def _program(network: nn.Module, about: NetworkMetadata) -> torch.export.ExportedProgram:
    example = torch.zeros(2, about.channels, about.image_size, about.image_size)
    network = network.cpu().eval().requires_grad_(False)
    try:
        return torch.export.export(network, (example,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    except Exception as error:  # torch.export has many ways to refuse a network
        raise ExportError(f"torch.export cannot trace this network: {first_line(error)}") from None


def _to_onnx(program: torch.export.ExportedProgram, facts: Mapping[str, str]) -> Any:
    with extra("ONNX export", "export"):
        for package in ("onnx", "onnxscript"):  # torch imports them, and says less where they are missing
            importlib.import_module(package)
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it tells of operators of packages that are not there
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter's own use of names that are going
        made = torch.onnx.export(program, input_names=["images"], output_names=["logits"], dynamo=True, verbose=False)
    assert made is not None
    made.model.metadata_props.update(facts)
    return made


@contextlib.contextmanager
def _writing(out: Path) -> Iterator[Path]:
    """A path beside ``out`` that takes its place when all is written, and goes where something fails."""
    beside = out.with_name(f".{out.stem}.new{out.suffix}")  # torch and onnx go by the suffix
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        yield beside
        os.replace(beside, out)
    except OSError as error:
        raise ExportError(f"{out} could not be written: {error.strerror or error}; choose another --out") from None
    finally:
        with contextlib.suppress(OSError):
            beside.unlink()


# ------------------------------------------------------------------------------------------------ model hub


@dataclass(frozen=True)
class Figure:
    """An accuracy for the model card."""

    attack: str
    """As `--attack` takes it."""
    threat: str
    """In words; empty for clean images."""
    accuracy: float
    examples: int

    @property
    def name(self) -> str:
        """In words."""
        return f"{attack_name(self.attack)} ({self.threat})" if self.threat else attack_name(self.attack)


def _figures(subject: LoadedModel) -> list[Figure]:
    """What is known of these weights: by `bullettrain evaluate`, else what training ended with."""
    found: dict[tuple[str, str], Figure] = {}
    if subject.folder is None:
        return []
    own = "" if subject.about.threat is None else threat_in_words(**vars(subject.about.threat))
    for known in RunLog.read(subject.folder).evaluations:
        if known.weights == subject.weights and math.isfinite(known.accuracy * known.examples):
            threat = "" if known.attack in ("clean", "views") else own
            found[known.attack, threat] = Figure(known.attack, threat, known.accuracy, int(known.examples))
    results: list[Result] = []
    for entry in Store(subject.folder).entries:
        if entry.digest == subject.digest:
            results += [result for result in entry.results if result.role == "attack"]
    for result in sorted(results, key=lambda result: result.examples):  # those on more images count
        threat = "" if result.threat is None else threat_in_words(*result.threat)
        found[result.name, threat] = Figure(result.name, threat, result.accuracy, result.examples)
    return list(found.values())


def _write_hub(subject: LoadedModel, about: NetworkMetadata, out: Path) -> list[Path]:
    if out.is_file():
        raise ExportError(f"--out {out} is a file; give a folder")
    if out.is_dir() and any(out.iterdir()) and not (out / EXPORTED).is_file():
        raise ExportError(f"--out {out} holds other files; give a new folder")
    classes = subject.about.classes or tuple(str(index) for index in range(about.num_classes))
    metadata = replace(subject.about, network=about, classes=classes)
    threat = subject.about.threat
    config = {
        "library_name": "bullettrain",
        "bullettrain_version": bullettrain.__version__,
        "architecture": about.name,
        "num_classes": about.num_classes,
        "num_channels": about.channels,
        "image_size": about.image_size,
        "mean": about.mean,
        "std": about.std,
        "id2label": dict(enumerate(classes)),
        "label2id": {name: index for index, name in enumerate(classes)},
        "threat": None if threat is None else vars(threat),
        "recipe": subject.about.recipe,
    }
    figures = _figures(subject)
    contents = {
        EXPORTED: pack_weights(subject.network.state_dict(), metadata),
        "config.json": _json(config),
        "README.md": _card(subject, about, figures).encode(),
        "model_info.json": _json(model_info(subject, about, figures)),
    }
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ExportError(f"{out} could not be made: {error.strerror}; choose another --out") from None
    for name, content in contents.items():
        RunFolder(out).write(name, content)
    return [out / name for name in contents]


def _json(values: Mapping[str, Any]) -> bytes:
    return (json.dumps(values, indent=2, ensure_ascii=False) + "\n").encode()


def model_info(subject: LoadedModel, about: NetworkMetadata, figures: list[Figure]) -> dict[str, Any]:
    """The fields of a file in RobustBench's `model_info`; what a person has to fill in is empty."""
    threat = subject.about.threat
    robust = "corruptions" if threat is None else "autoattack"
    own = "" if threat is None else threat_in_words(**vars(threat))
    found = next((figure for figure in figures if (figure.attack, figure.threat) == (robust, own)), None)
    clean = next((figure for figure in figures if figure.attack == "clean"), None)
    values: dict[str, Any] = {
        "link": "",
        "name": subject.name,
        "authors": "",
        "additional_data": False,
        "number_forward_passes": 1,
        "dataset": subject.config.data.name if subject.config else "",
        "venue": "",
        "architecture": _architecture(about.name),
        "eps": None if threat is None else radius(threat.eps),
        "clean_acc": _percent(clean),
        "reported": _percent(found),
        "corruptions_acc" if threat is None else "autoattack_acc": _percent(found),
    }
    part = [figure for figure in (clean, found) if figure is not None]
    if part:
        values["footnote"] = "; ".join(f"{figure.name} on {figure.examples} test images" for figure in part)
    return values


def _percent(figure: Figure | None) -> str:
    return "" if figure is None else f"{100 * figure.accuracy:.2f}"


def _architecture(name: str) -> str:
    return NETWORKS.get(name, name.replace("wrn-", "WideResNet-") if name.startswith("wrn-") else name)


def _card(subject: LoadedModel, about: NetworkMetadata, figures: list[Figure]) -> str:
    """The model card: what it is, how robust it was found to be, how to use it, and how it was made."""
    with extra("a model card"):
        import yaml
    config, threat = subject.config, subject.about.threat
    data = config.data.name if config else ""
    metrics = [
        {"type": "accuracy", "name": f"Accuracy, {figure.name}", "value": round(100 * figure.accuracy, 2)}
        for figure in figures
    ]
    head: dict[str, Any] = {
        "library_name": "bullettrain",
        "pipeline_tag": "image-classification",
        "tags": ["adversarial-robustness", "image-classification", "bullettrain"],
    }
    if data and metrics:
        task = {"type": "image-classification"}
        result = {"task": task, "dataset": {"name": data, "type": data, "split": "test"}, "metrics": metrics}
        head["model-index"] = [{"name": subject.name, "results": [result]}]
    words = threat_in_words(**vars(threat)) if threat else ""
    trained = f" trained on {data} with {method_name(config.to_dict()['method'])}" if config else ""
    against = f", to withstand any perturbation of at most {words}, for pixels in [0, 1]" if words else ""
    lines = [
        f"---\n{yaml.safe_dump(head, sort_keys=False, allow_unicode=True)}---",
        f"# {subject.name}",
        f"{_architecture(about.name)}{trained}{against}. Made with BulletTrain {bullettrain.__version__}.",
        "## Accuracy",
    ]
    if figures:
        rows = [f"| {f.name} | {100 * f.accuracy:.2f} % | {f.examples:,} |" for f in figures]
        lines.append("\n".join(["| Attack | Accuracy | Test images |", "|---|---:|---:|", *rows]))
    if threat and not any(figure.attack == "autoattack" for figure in figures):
        command = shlex.join(["bullettrain", "evaluate", str(subject.folder or subject.name), "--attack", "autoattack"])
        lines.append(
            "AutoAttack has not been run on these weights. PGD alone overestimates robustness: run "
            f"`{command}`, then export again."
        )
    elif not figures:
        lines.append("These weights have not been evaluated.")
    shape = f"(m, {about.channels}, {about.image_size}, {about.image_size})"
    trust = ", trust=True" if ":" in about.name else ""
    lines += [
        "## Threat model",
        f"{words}: an adversary who knows the network may change the image by at most ε = {radius(threat.eps)} in "
        f"{'every pixel and channel' if threat.norm == 'linf' else 'Euclidean norm'}, pixels in [0, 1]."
        if threat
        else "None: the network was trained without an adversary.",
        "## Use",
        "```python\nimport bullettrain\n\n"
        f'network = bullettrain.load("path/to/this/folder"{trust})\n'
        f"logits = network(images)  # images {shape} in [0, 1]; logits (m, {about.num_classes})\n```",
    ]
    environment = RunFolder(subject.folder).environment() if subject.folder and config else {}
    if environment.get("command"):
        where = [f"{key} {environment[key]}" for key in ("device", "torch", "commit") if environment.get(key)]
        lines += ["## How it was made", f"```sh\n{environment['command']}\n```", f"{', '.join(where)}."]
    return "\n\n".join(lines) + "\n"
