"""The command line. Thin: what a command does is in runner.py, demo.py, report.py, scaffold.py and registry.py."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dynguard import __version__
from dynguard.errors import DynguardError

if TYPE_CHECKING:
    from rich.table import Table

    from dynguard.registry import PluginInfo

app = typer.Typer(
    name="dynguard",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Entry of the console script. Exits with 2 and one line on stderr when what was asked can't be done."""
    try:
        # Not app(): that would put typer's own sys.excepthook under the scripts that `dynguard run` starts.
        typer.main.get_command(app).main(prog_name="dynguard")
    except DynguardError as error:
        print(f"dynguard: {error}", file=sys.stderr)
        sys.exit(2)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"dynguard {__version__}")
        raise typer.Exit


@app.callback()
def dynguard(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Watch the training of neural networks and boosted trees: say what goes wrong and why, and repair it in time."""


@app.command()
def demo(
    quick: Annotated[
        bool, typer.Option("--quick", help="A tiny model and few steps: seconds instead of minutes.")
    ] = False,
    out: Annotated[Path, typer.Option("--out", help="Folder for loss.png, result.json and the run.")] = Path(
        "dynguard-demo"
    ),
    device: Annotated[str, typer.Option("--device", help="Device of torch to train on: cpu, cuda, mps ...")] = "cpu",
) -> None:
    """Train a small GPT twice, plain and guarded, with three planted faults.

    Shows what was caught at which step and in which layer, and draws both loss curves. Exits with 0 only if every fault
    was caught where it was planted and the guarded run ended better.
    """
    from dynguard import demo as demonstration

    if not demonstration.run(out, quick=quick, device=device):
        raise typer.Exit(1)


@app.command(
    context_settings={"allow_interspersed_args": False},
    options_metavar="[OPTIONS]",
    epilog="Example: dynguard run --plugins default,json train.py --epochs 3",
)
def run(
    target: Annotated[str, typer.Argument(metavar="SCRIPT", help="Script to run; with -m, the module to run.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="ARGS", help="Arguments of the script, handed on untouched.")
    ] = None,
    module: Annotated[bool, typer.Option("-m", help="SCRIPT is a module, as in python -m MODULE.")] = False,
    plugins: Annotated[
        str | None, typer.Option(help='Plugins by name, comma-separated, e.g. "default,json" or "default,-console".')
    ] = None,
    run_dir: Annotated[
        Path | None, typer.Option(help="Folder for the run's files. Default: a new one in ./dynguard-runs.")
    ] = None,
    mode: Annotated[
        str | None, typer.Option(metavar="observe|guard", help="Only watch, or also skip bad steps (the default).")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="Configuration file. Default: dynguard.toml or pyproject.toml here.")
    ] = None,
) -> None:
    """Run an unmodified training script, or a module with -m, under guard.

    Every torch optimizer is watched from its first step on. Exit code and traceback are the script's own. Options of
    dynguard come before SCRIPT.
    """
    from dynguard import runner

    names = tuple(name.strip() for name in plugins.split(",") if name.strip()) if plugins is not None else None
    settings = runner.Settings(plugins=names, run_dir=run_dir, mode=mode, config=config)
    raise typer.Exit(runner.run(target, arguments or (), module=module, settings=settings))


@app.command()
def report(
    run: Annotated[
        Path | None, typer.Argument(metavar="RUN", help="Run directory or its history.sqlite. Default: the newest run.")
    ] = None,
) -> None:
    """Tell in plain text what happened in a run, also while it is still going on or after it was killed."""
    from dynguard import report as reporting

    reporting.show(reporting.find(run))


@app.command()
def plugins(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List the installed plugins, their hooks and options, and why one can't be loaded."""
    from dynguard import registry

    found = registry.describe()
    if as_json:
        typer.echo(json.dumps([asdict(info) for info in found], indent=2))
        return
    from rich.console import Console

    Console().print(_plugin_table(found) if found else "No plugins are installed.")


def _plugin_table(found: list[PluginInfo]) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(title="Plugins in the order of dispatch", box=box.SIMPLE_HEAD, show_lines=True)
    for column in ("#", "plugin", "from", "hooks", "options (type = default)"):
        table.add_column(column, overflow="fold")
    for info in found:
        name, origin = Text(info.name, "bold"), Text(f"{info.distribution}\n{info.version}")
        order = Text("" if info.order is None else str(info.order))
        if info.error is not None:
            table.add_row(order, name, origin, Text("not loaded", "red"), Text(info.error, "red"))
            continue
        options = [f"{name}: {kind}" + (f" = {default}" if default else "") for name, kind, default in info.options]
        table.add_row(order, name, origin, Text("\n".join(info.hooks)), Text("\n".join(options)))
    return table


@app.command("new-plugin")
def new_plugin(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the plugin, as users will write it.")],
    directory: Annotated[Path, typer.Option("--dir", help="Where to make the package's folder.")] = Path("."),
) -> None:
    """Make an installable package for a plugin of your own, with its entry point and a passing test."""
    from dynguard import scaffold

    made = scaffold.create(name, directory)
    typer.echo(f"Made {made}. Try it:\n  pip install -e {made}\n  dynguard plugins\n  pytest {made}")


if __name__ == "__main__":
    main()
