"""The command line. Each command has a module; ``boundary`` turns errors into messages."""

from bullettrain.cli.boundary import main

__all__ = ["main"]
