"""`bullettrain export`: export a network for deployment."""

from pathlib import Path

from bullettrain.cli.commands import Export
from bullettrain.cli.options import check_known, load
from bullettrain.exporting import FORMATS
from bullettrain.exporting import export as write
from bullettrain.terminal import terminal


def export(options: Export) -> None:
    """Run `bullettrain export`."""
    check_known("--format is", options.format_, FORMATS)
    loaded = load(options, image_size=options.image_size, channels=options.channels)
    for path in write(loaded, options.format_, options.out or (loaded.folder or Path()) / FORMATS[options.format_]):
        terminal().print(f"written  {path}", soft_wrap=True)
