"""Turn a dataclass into a typer command. An unknown option gets a suggestion."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import inspect
import typing
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.models import OptionInfo

from bullettrain.brief import meanings
from bullettrain.errors import guesses

METAVARS = {int: "N", float: "NUMBER", str: "NAME", Path: "PATH"}
"""What help shows for the value of an option. Typer's own names leave little room for the text."""
RENAMED = {"--size": "--images", "--curve-size": "--curve-images", "--again": "--overwrite", "--pace": "--timing"}
"""Options of earlier versions, and their present names."""


def add_command(app: typer.Typer, name: str, options: type, target: str) -> None:
    """Add a command to ``app``.

    Args:
        app: the typer application or sub-application.
        name: name of the command.
        options: dataclass of its arguments and options. ``batch_size`` becomes `--batch-size`, a bool becomes a flag,
            and a trailing underscore is dropped. Fields of base classes are listed last.
        target: "module:function" of this package, called with an instance of ``options``. It is imported when the
            command runs, so that help does not wait for torch.
    """

    def run(**values: Any) -> None:
        module, _, function = target.partition(":")
        getattr(importlib.import_module(f"bullettrain.cli.{module}"), function)(options(**values))

    parameters: list[inspect.Parameter] = []
    fields, hints = inspect.signature(options).parameters, typing.get_type_hints(options, include_extras=True)
    for base in filter(dataclasses.is_dataclass, options.__mro__):
        for key, text in meanings(base).items():
            annotated = typing.get_origin(hints[key]) is Annotated
            kind, info = typing.get_args(hints[key]) if annotated else (hints[key], typer.Option())
            info = copy.copy(info)
            info.help = text
            if isinstance(info, OptionInfo):
                if info.default is ...:  # otherwise it is the option's name
                    info.param_decls = (f"--{key.rstrip('_').replace('_', '-')}",)
                if info.metavar is None:
                    info.metavar = METAVARS.get((typing.get_args(kind) or (kind,))[0])
            parameter = fields[key].replace(annotation=Annotated[kind, info])
            parameters.insert(len(parameters) if isinstance(info, OptionInfo) else 0, parameter)
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    # The terminal wraps paragraphs. Indented lines are code and keep their line breaks.
    paragraphs = (inspect.getdoc(options) or "").split("\n\n")
    unwrapped = [part if part.startswith(" ") else part.replace("\n", " ") for part in paragraphs]
    app.command(name, cls=Command, help="\n\n".join(unwrapped))(run)


def _without_values(params: list[Any]) -> list[Any]:
    """Let help show no value for flags, the ones that typer adds included."""
    for parameter in params:
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
    return params


class Group(TyperGroup):
    """A group of commands."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the options."""
        return _without_values(super().get_params(ctx))


class Command(TyperCommand):
    """A command that suggests options or settings for an unknown option."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the arguments and options."""
        return _without_values(super().get_params(ctx))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the command line."""
        words = list(args)
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            if type(error).__name__ == "NoSuchOption":  # from click, or from the copy of click inside typer
                option = error.option_name  # type: ignore[attr-defined]
                error.possibilities = None  # type: ignore[attr-defined]
                if suggestion := self._suggest(option, words):
                    error.message = f"No such option: {option}; did you mean {suggestion}?"  # type: ignore[attr-defined]
            raise

    def _suggest(self, option: str, words: list[str]) -> str:
        """Return what to write instead of an unknown option, or "" if nothing is similar."""
        options = [name for parameter in self.params for name in parameter.opts if name.startswith("--")]
        if RENAMED.get(option) in options:
            return RENAMED[option]
        settings = _settings() if "--set" in options else {}
        name = option.lstrip("-").replace("-", "_")
        if name not in settings and (similar := guesses(option, options)):
            return " or ".join(similar)
        similar = [name] if name in settings else guesses(name, list(settings))
        if len(similar) != 1:
            return ""
        at = next(index for index, word in enumerate(words) if word.partition("=")[0] == option)
        value = words[at].partition("=")[2] or next((word for word in words[at + 1 :][:1] if word[:1] != "-"), "VALUE")
        return " or ".join(f"--set {path}={value}" for path in settings[similar[0]])


def _settings() -> dict[str, list[str]]:
    """Map each setting to what `--set` takes; the section is needed if several sections have a setting of the name."""
    from bullettrain.config.sections import Config, flatten

    paths: dict[str, list[str]] = {}
    for path in flatten(Config().to_dict()):
        paths.setdefault(path.rpartition(".")[2], []).append(path)
    return {name: [name] if len(found) == 1 else found for name, found in paths.items()}
