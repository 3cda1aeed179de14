"""Refusals shared by the networks."""


def at_least(least: int, **sizes: int) -> None:
    """Refuse any of the named sizes that is not a whole number of at least ``least``."""
    for name, size in sizes.items():
        if not isinstance(size, int) or size < least:
            raise ValueError(f"{name} is {size!r}: give a whole number of at least {least}")
