"""What `bullettrain` can do: train, evaluate, predict, export, report, bench, reproduce, data."""

from typing import Annotated

import typer

import bullettrain
from bullettrain.cli.bench import bench
from bullettrain.cli.command import add_command
from bullettrain.cli.data import data_app
from bullettrain.cli.evaluate import evaluate
from bullettrain.cli.export import export
from bullettrain.cli.predict import predict
from bullettrain.cli.report import report
from bullettrain.cli.reproduce import reproduce
from bullettrain.cli.train import train

app = typer.Typer(
    help="Robust training of neural networks at a fraction of the cost.",
    epilog="Start here:  bullettrain train",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


for _command in (train, evaluate, predict, export, report, bench, reproduce):
    add_command(app, _command)
app.add_typer(data_app, name="data")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"bullettrain {bullettrain.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and stop.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    pass


__all__ = ["app"]
