"""Settings of earlier versions, under their old names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

RENAMED = {
    "method.clean": "method.clean_warmup",
    "method.ramp": "method.eps_warmup",
    "training.joint": "training.paired_forward",
    "training.bucket": "training.size_multiple",
    "training.tune_after": "training.cudnn_benchmark_after",
}
FORMER = {new: old for old, new in RENAMED.items()}
GONE = {"training": ("fresh", "refresh_steps"), "method": ("carry", "align")}
"""Removed settings. A configuration that left them at 0 is still valid."""


def without_gone(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration without removed settings that were 0."""
    return {
        name: {key: value for key, value in section.items() if value or key not in GONE.get(name, ())}
        if isinstance(section, Mapping)
        else section
        for name, section in values.items()
    }


def translate(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return an older configuration with the present names. Unknown settings are kept."""
    translated = {
        name: {RENAMED.get(f"{name}.{key}", f"{name}.{key}").partition(".")[2]: value for key, value in section.items()}
        if isinstance(section, Mapping)
        else section
        for name, section in without_gone(values).items()
    }
    method = translated.get("method")
    if isinstance(method, dict) and method.pop("carry", False):
        method["objective"] = "free"
    if isinstance(method, dict) and (weight := method.pop("align", 0)):
        method |= {"objective": "grad-align", "beta": weight}
    training = translated.get("training")
    if isinstance(training, dict) and training.get("engine") == "plain":
        training["engine"] = "eager"
    return translated
