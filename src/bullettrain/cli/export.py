"""`bullettrain export`: export a network for deployment."""

from pathlib import Path

from bullettrain.cli.commands import Export
from bullettrain.cli.options import load
from bullettrain.config.settings import ConfigError
from bullettrain.exporting import FORMATS
from bullettrain.exporting import export as write
from bullettrain.terminal import terminal
from bullettrain.validation import check_known


def export(options: Export) -> None:
    """Run `bullettrain export`."""
    check_known(options.format_, FORMATS, "--format is", error=ConfigError)
    loaded = load(options, image_size=options.image_size, channels=options.channels)
    for path in write(loaded, options.format_, options.out or (loaded.folder or Path()) / FORMATS[options.format_]):
        terminal().print(f"written  {path}", soft_wrap=True)
