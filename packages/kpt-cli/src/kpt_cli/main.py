"""The command `kpt`: its commands, and the one place where errors become sentences and exit codes.

Exit codes: 0 done; 1 something is broken (`doctor`) or differs (`validate replay`, `bisect`), or a bug; 2 what was
asked for, or its input, is wrong; 130 interrupted.
"""

import importlib
import traceback
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from . import __version__
from .console import complain, plain_warnings
from .doctor.command import doctor
from .errors import sentence
from .kernels.command import kernels
from .lock.command import lock
from .new.command import app as new
from .optimize.command import optimize
from .tune.command import tune

WRONG_INPUT = 2
INTERRUPTED = 130


class KptGroup(TyperGroup):
    """A group of commands whose failures end as one sentence on stderr and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command that was asked for."""
        try:
            with plain_warnings():
                return super().invoke(ctx)
        except KeyboardInterrupt:
            complain("error", "interrupted")
            raise typer.Exit(INTERRUPTED) from None
        except Exception as error:
            text = None if isinstance(error, BrokenPipeError) else sentence(error)
            if text is None:
                raise
            if ctx.params.get("debug"):
                traceback.print_exception(error)
            complain("error", text)
            raise typer.Exit(WRONG_INPUT) from None


_HELP = {"help_option_names": ["-h", "--help"]}

app = typer.Typer(
    cls=KptGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings=_HELP,
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kpt {__version__}")
        raise typer.Exit


@app.callback()
def kpt(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", envvar="KPT_DEBUG", help="Show the traceback of an error too.")
    ] = False,
) -> None:
    """Look at the kernels of this machine, optimise a model with them, and see what was chosen and why."""


def _forward(ctx: typer.Context, target: str) -> None:
    """Import a command only now and hand the arguments to it; whatever goes wrong there is not hidden here."""
    module, _, attribute = target.partition(":")
    found = getattr(importlib.import_module(module), attribute)
    if not isinstance(found, typer.Typer):
        function, found = found, typer.Typer(add_completion=False, context_settings=_HELP)
        found.command()(function)
    command = typer.main.get_command(found)
    code = command.main(args=ctx.args, prog_name=ctx.command_path, standalone_mode=False)
    if isinstance(code, int) and code:
        raise typer.Exit(code)


#: Every argument is left to the command that is imported, `--help` included.
_HANDED_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}

app.command()(doctor)
app.command()(kernels)
app.command()(optimize)
app.command()(tune)
app.command()(lock)
app.add_typer(new, name="new")


@app.command(context_settings=_HANDED_ON, add_help_option=False)
def bench(ctx: typer.Context) -> None:
    """Measure kernels and layers on this machine against their peers; `kpt bench --help` lists what can be measured."""
    _forward(ctx, "kpt_cli.bench.command:app")


@app.command(context_settings=_HANDED_ON, add_help_option=False)
def demo(ctx: typer.Context) -> None:
    """Optimise a small model on this machine and show the report."""
    _forward(ctx, "kpt_cli.demo.command:demo")


@app.command(context_settings=_HANDED_ON, add_help_option=False)
def validate(ctx: typer.Context) -> None:
    """Record a model's numbers layer by layer, and judge another machine, backend or version by them."""
    _forward(ctx, "kpt_cli.validate.command:app")


@app.command(context_settings=_HANDED_ON, add_help_option=False)
def bisect(ctx: typer.Context) -> None:
    """Find the first module of a model that goes wrong by itself, between two kernels, backends or machines."""
    _forward(ctx, "kpt_cli.validate.bisect_command:bisect")


def main() -> None:
    """Run the command line."""
    app(prog_name="kpt")
