"""The command `kpt`: its commands, and the one place where errors become sentences and exit codes.

Modules of commands import nothing heavy until they run, so that help, completion and refusals are quick.

Exit codes: 0 done; 1 something is broken (`doctor`), wrong (`bench`, `export --verify`) or differs (`validate replay`,
`bisect`), or a bug; 2 what was asked for, or its input, is wrong; 130 interrupted.
"""

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from . import __version__, settings
from .bench.command import app as bench
from .config import app as config
from .console import complain, plain_warnings
from .convert import convert
from .demo import demo
from .doctor import doctor
from .errors import CliError, sentence
from .export import export
from .kernels import kernels
from .lock import lock
from .new import app as new
from .optimize.command import optimize
from .options import GROUP
from .plan import plan
from .serve import serve
from .tune import tune
from .validate.command import app as validate
from .validate.command import bisect

WRONG_INPUT, INTERRUPTED = 2, 130
_OPS_BESIDE_PEERS = "`kpt bench moe`, `kpt bench attention` or `kpt bench fp8`"
#: Commands that are gone, and what to run instead.
OLD_NAMES = {
    "benchmark": "`kpt bench`",
    "bench basic": _OPS_BESIDE_PEERS,
    "bench cpu": f"{_OPS_BESIDE_PEERS}, or `nox -s bench` in a checkout",
    "bench training": "`kpt bench moe-training`",
}


class RenamedGroup(TyperGroup):
    """A group of commands that knows what its old commands are called now."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command that was asked for; `CliError` with the new name if it has one."""
        path = " ".join([*ctx.command_path.split()[1:], args[0]])
        if path in OLD_NAMES:
            raise CliError(f"`kpt {path}` is gone: it is {OLD_NAMES[path]} now")
        return super().resolve_command(ctx, args)


class KptGroup(RenamedGroup):
    """A group of commands whose failures end as one sentence on stderr and an exit code."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the options of `kpt` itself, the user's file and a preset."""
        with _sentences(ctx), settings.blamed(ctx):
            return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the command that was asked for."""
        with _sentences(ctx), plain_warnings(), settings.library(ctx):
            try:
                return super().invoke(ctx)
            finally:
                sys.stdout.flush()  # while a closed pipe can still be told from a failure


@contextmanager
def _sentences(ctx: Any) -> Iterator[None]:
    """End what fails inside the block as one sentence on stderr and an exit code."""
    try:
        yield
    except KeyboardInterrupt:
        complain("error", "interrupted")
        raise typer.Exit(INTERRUPTED) from None
    except BrokenPipeError:
        # Who reads has enough, of `| head` for instance; what is left has nowhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        raise typer.Exit from None
    except Exception as error:
        text = sentence(error)
        if text is None:
            raise
        if ctx.params.get("debug"):
            traceback.print_exception(error)
        complain("error", text if isinstance(error, settings.SettingError) else settings.explain(ctx, text))
        raise typer.Exit(WRONG_INPUT) from None


app = typer.Typer(cls=KptGroup, pretty_exceptions_enable=False, **GROUP | {"add_completion": True})


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kpt {__version__}")
        raise typer.Exit


@app.callback()
def kpt(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
    config_file: Annotated[
        Path | None,
        typer.Option(
            "--config",
            metavar="FILE",
            envvar="KPT_CONFIG",
            help=f"TOML file of options; {settings.FILE} of this folder if left out.",
            is_eager=True,  # the preset may be named there
            callback=settings.read_file,
        ),
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(
            envvar="KPT_PRESET",
            help=f"Options for a phase: {', '.join(settings.PRESETS)}.",
            is_eager=True,
            callback=settings.read_preset,
            autocompletion=lambda: settings.PRESETS,
        ),
    ] = None,
    debug: Annotated[
        bool, typer.Option("--debug", envvar="KPT_DEBUG", help="Show the traceback of an error too.")
    ] = False,
) -> None:
    """Look at the kernels of this machine, optimise a model with them, and see what was chosen and why."""


for command in (doctor, kernels, plan, optimize, convert, export, serve, tune, lock, demo, bisect):
    app.command()(command)
for name, group in {"new": new, "bench": bench, "validate": validate, "config": config}.items():
    app.add_typer(group, name=name, cls=RenamedGroup)
for group in (app, new, bench, validate, config):
    for registered in group.registered_commands:
        registered.cls = settings.KptCommand


def main() -> None:
    """Run the command line."""
    app(prog_name="kpt")
