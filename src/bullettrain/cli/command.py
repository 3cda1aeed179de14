"""A dataclass as a command of typer: its docstrings are the help, and an unknown option gets a guess."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import inspect
import typing
from typing import Annotated, Any

import typer
from typer.core import TyperCommand
from typer.models import OptionInfo

from bullettrain.brief import meanings
from bullettrain.errors import guesses

FORMER = {"--size": "--images", "--curve-size": "--curve-images", "--again": "--overwrite", "--pace": "--timing"}
"""Options that are called otherwise now."""


def add_command(app: typer.Typer, name: str, takes: type, does: str) -> None:
    """Add a command to ``app``.

    Args:
        app: the program, or a part of it.
        name: of the command.
        takes: a dataclass. Its fields are options (``batch_size`` is `--batch-size`, a bool is a flag, an underscore at
            the end is left out), or arguments where their type says so; own ones are shown before inherited ones.
        does: "module:function" of this package, called with an instance of it. It is imported when the command runs:
            help does not wait for torch.
    """

    def run(**values: Any) -> None:
        module, _, function = does.partition(":")
        getattr(importlib.import_module(f"bullettrain.cli.{module}"), function)(takes(**values))

    parameters: list[inspect.Parameter] = []
    made, hints = inspect.signature(takes).parameters, typing.get_type_hints(takes, include_extras=True)
    for base in filter(dataclasses.is_dataclass, takes.__mro__):
        for key, text in meanings(base).items():
            annotated = typing.get_origin(hints[key]) is Annotated
            kind, info = typing.get_args(hints[key]) if annotated else (hints[key], typer.Option())
            info = copy.copy(info)
            info.help = text
            if isinstance(info, OptionInfo) and info.default is ...:  # else that is its name
                info.param_decls = (f"--{key.rstrip('_').replace('_', '-')}",)
            parameter = made[key].replace(annotation=Annotated[kind, info])
            parameters.insert(len(parameters) if isinstance(info, OptionInfo) else 0, parameter)
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    # Each paragraph on one line, for the terminal to break; lines of code, which are indented, as they are.
    paragraphs = (inspect.getdoc(takes) or "").split("\n\n")
    flowing = [part if part.startswith(" ") else " ".join(part.split("\n")) for part in paragraphs]
    app.command(name, cls=Command, help="\n\n".join(flowing))(run)


class Command(TyperCommand):
    """A command that says what an unknown option may stand for."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the command line."""
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            if type(error).__name__ == "NoSuchOption":  # of click, or of the copy of it that typer brings
                option = error.option_name  # type: ignore[attr-defined]
                error.possibilities = None  # type: ignore[attr-defined]
                if meant := self._meant(option, given):
                    error.message = f"No such option: {option}; did you mean {meant}?"  # type: ignore[attr-defined]
            raise

    def _meant(self, option: str, given: list[str]) -> str:
        """Options or settings that an unknown option may stand for, as they are written; "" where there are none."""
        there = [name for parameter in self.params for name in parameter.opts if name.startswith("--")]
        if FORMER.get(option) in there:
            return FORMER[option]
        settings = _settings() if "--set" in there else {}
        name = option.lstrip("-").replace("-", "_")
        if name not in settings and (near := guesses(option, there)):
            return " or ".join(near)
        near = [name] if name in settings else guesses(name, list(settings))
        if len(near) != 1:
            return ""
        at = next(index for index, word in enumerate(given) if word.partition("=")[0] == option)
        value = given[at].partition("=")[2] or next((word for word in given[at + 1 :][:1] if word[:1] != "-"), "VALUE")
        return " or ".join(f"--set {path}={value}" for path in settings[near[0]])


def _settings() -> dict[str, list[str]]:
    """By the name of a setting, how `--set` takes it: with its section where several have one of that name."""
    from bullettrain.config.sections import Config, flatten

    paths: dict[str, list[str]] = {}
    for path in flatten(Config().to_dict()):
        paths.setdefault(path.rpartition(".")[2], []).append(path)
    return {name: [name] if len(found) == 1 else found for name, found in paths.items()}
