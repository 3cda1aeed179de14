"""The command `bullettrain`: one file a command, and one boundary around them all."""

from bullettrain.cli.boundary import main

__all__ = ["main"]
