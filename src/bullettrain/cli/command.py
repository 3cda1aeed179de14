"""A function as a command: its docstring is the help, and an unknown option is told what may have been meant."""

from __future__ import annotations

import copy
import inspect
import re
import typing
from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from bullettrain.errors import guesses

FORMER = {"--size": "--images", "--curve-size": "--curve-images", "--again": "--overwrite", "--pace": "--timing"}
"""Options that are called otherwise now."""


def add_command(app: typer.Typer, function: Callable[..., None], name: str | None = None) -> None:
    """Make a command of ``function``.

    Its positional parameters are arguments; those after ``*`` are options: ``batch_size`` is `--batch-size`, a bool is
    a flag, and an underscore at the end is left out. What the docstring says of a parameter, under ``Args`` at its end,
    is the help of it, unless its type brings one.
    """
    text, _, listed = (inspect.getdoc(function) or "").partition("\n\nArgs:\n")
    helps = dict(re.findall(r"^    (\w+): (.*(?:\n     .*)*)", listed, re.MULTILINE))
    hints = typing.get_type_hints(function, include_extras=True)
    for key, parameter in inspect.signature(function).parameters.items():
        kind, *declared = typing.get_args(hints[key]) if hasattr(hints[key], "__metadata__") else [hints[key]]
        option = parameter.kind is parameter.KEYWORD_ONLY
        info = copy.copy(declared[0]) if declared else typer.Option() if option else typer.Argument()
        info.help = info.help or " ".join(helps[key].split())
        if option and info.default is ...:  # else that is its name
            info.param_decls = (f"--{key.rstrip('_').replace('_', '-')}",)
        function.__annotations__[key] = Annotated[kind, info]
    # Each paragraph on one line, for the terminal to break; lines of code, which are indented, as they are.
    paragraphs = [part if part.startswith(" ") else " ".join(part.split("\n")) for part in text.split("\n\n")]
    app.command(name, cls=Command, help="\n\n".join(paragraphs))(function)


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
