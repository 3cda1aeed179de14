"""The commands of `bullettrain`: train, evaluate, predict, export, report, bench, reproduce, data."""

from typing import Annotated

import typer

import bullettrain
from bullettrain.cli import commands
from bullettrain.cli.command import Group, add_command

app = typer.Typer(
    cls=Group,
    help="Train robust neural networks with less compute.",
    epilog="Start here:  bullettrain train",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
data_app = typer.Typer(
    cls=Group,
    help="List, download, verify and corrupt datasets.",
    epilog="Example:  bullettrain data prepare cifar10",
    no_args_is_help=True,
    rich_markup_mode="rich",
)
add_command(app, "train", commands.Train, "train:train")
add_command(app, "evaluate", commands.Evaluate, "evaluate:evaluate")
add_command(app, "predict", commands.Predict, "predict:predict")
add_command(app, "export", commands.Export, "export:export")
add_command(app, "report", commands.Report, "report:report")
add_command(app, "bench", commands.Bench, "bench:bench")
add_command(app, "reproduce", commands.Reproduce, "reproduce:reproduce")
add_command(data_app, "list", commands.DataList, "data:list_datasets")
add_command(data_app, "prepare", commands.DataPrepare, "data:prepare")
add_command(data_app, "verify", commands.DataVerify, "data:verify")
add_command(data_app, "corrupt", commands.DataCorrupt, "data:corrupt")
app.add_typer(data_app, name="data")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"bullettrain {bullettrain.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    pass


__all__ = ["app"]
