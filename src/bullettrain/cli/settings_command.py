"""Commands that take `--set`: an option that is a setting is told so."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand


class SettingsCommand(TyperCommand):
    """A command whose unknown options may be settings: `--weight-decay 1e-4` is `--set weight_decay=1e-4`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the command line; where an option is unknown and a setting is called so, say how it is set."""
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            if type(error).__name__ == "NoSuchOption" and (setting := _setting(error.option_name, given)):  # type: ignore[attr-defined]
                key, forms = setting
                if f"--{key.replace('_', '-')}" not in {name for parameter in self.params for name in parameter.opts}:
                    error.message = f"No such option: {error.option_name}; did you mean {forms}?"  # type: ignore[attr-defined]
                    error.possibilities = None  # type: ignore[attr-defined]
            raise


def _setting(option: str, given: list[str]) -> tuple[str, str] | None:
    """The setting that an unknown option may stand for, and how it is set to the value that was given."""
    from bullettrain.config.describe import meanings, sections
    from bullettrain.errors import guesses

    keys: dict[str, list[str]] = {}
    for section, kind in sections().items():
        for key in meanings(kind):
            keys.setdefault(key, []).append(section)
    name = option.lstrip("-").replace("-", "_")
    near = [name] if name in keys else guesses(name, list(keys))
    if len(near) != 1:
        return None
    homes = keys[near[0]]
    at = next(index for index, word in enumerate(given) if word.partition("=")[0] == option)
    value = given[at].partition("=")[2] or next((word for word in given[at + 1 : at + 2] if word[:1] != "-"), "VALUE")
    forms = [f"--set {near[0] if len(homes) == 1 else f'{home}.{near[0]}'}={value}" for home in homes]
    return near[0], " or ".join(forms)
