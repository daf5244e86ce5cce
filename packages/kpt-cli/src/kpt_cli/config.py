"""The command `kpt config`."""

import os
from typing import Annotated, Any

import typer

from .console import out, print_json, say, table
from .errors import CliError
from .options import GROUP, Json, require_name
from .settings import DEFAULT, FILE, KPT, LIBRARY, options, origin, settings_of, variable_of, words_of

app = typer.Typer(help="See what options are set to, and by what.", **GROUP)


@app.callback()
def config() -> None:
    """See what options are set to, and by what."""


@app.command(context_settings={"ignore_unknown_options": True})
def show(
    ctx: typer.Context,
    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[COMMAND]...",
            help="As it is called, with flags or without; all that is set in any command if left out.",
            show_default=False,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show the value of each option of a command and what it is from: a flag, a variable, a file, a preset.

    Nothing is run. Without COMMAND it checks every value of the file.
    """
    root = ctx.find_root()
    settings = settings_of(root)
    rows = _library(root)
    if command:
        rows += _rows(root, command)
    else:
        of_all = [row for words in _commands(root.command) for row in _rows(root, words)]
        rows = [row for row in rows + of_all if row["origin"] != DEFAULT]
    if as_json:
        file = None if settings.file is None else str(settings.file)
        print_json({"file": file, "preset": settings.preset, "options": rows})
        return
    say(f"File: {settings.file or f'none; {FILE} in this folder would be read'}. Preset: {settings.preset or 'none'}.")
    if not rows:
        say("Nothing is set: every option has its default.")
        return
    made = table("option", "value", "from")
    for row in rows:
        name = f"{row['command']} {row['option']}" if not command else row["option"]
        made.add_row(name.strip(), _text(row["value"]), row["origin"])
    out().print(made)


def _library(root: Any) -> list[dict[str, Any]]:
    """Return a row for each setting of the library."""
    rows = []
    applied = settings_of(root).applied
    for key in LIBRARY:
        variable = variable_of((), key)
        source = applied.get(variable, f"environment variable {variable}" if os.environ.get(variable) else DEFAULT)
        rows.append(_row("", f"[{KPT}] {key}", variable, os.environ.get(variable), source))
    return rows


def _rows(root: Any, words: list[str]) -> list[dict[str, Any]]:
    """Return a row for each option of a command, which is not run."""
    ctx, command, rest = root, root.command, words
    while commands := getattr(command, "commands", None):
        known = sorted(commands)
        if not rest:
            raise CliError(f"kpt config show {' '.join(words)} takes one command more: {', '.join(known)}")
        require_name("command", rest[0], known)
        name, *rest = rest
        command = commands[name]
        if hasattr(command, "commands"):
            ctx = command.context_class(command, info_name=name, parent=ctx)
    for param in command.params:
        param.required = False  # nobody runs it
    ctx = command.make_context(name, rest, parent=ctx)
    of = " ".join(words_of(ctx))
    return [
        _row(of, f"--{key}", param.envvar, ctx.params[param.name], origin(ctx, param))
        for key, param in options(command).items()
    ]


def _row(command: str, option: str, variable: str, value: Any, source: str) -> dict[str, Any]:
    if isinstance(value, list | tuple):
        value = [str(each) for each in value] or None
    plain = value if isinstance(value, str | int | float | list | None) else str(value)
    return {"command": command, "option": option, "variable": variable, "value": plain, "origin": source}


def _commands(command: Any, words: tuple[str, ...] = ()) -> list[list[str]]:
    below = getattr(command, "commands", None)
    if below is None:
        return [list(words)]
    return [found for name, each in below.items() for found in _commands(each, (*words, name))]


def _text(value: Any) -> str:
    if value is None:
        return "-"
    return (
        str(value).lower() if isinstance(value, bool) else ", ".join(value) if isinstance(value, list) else str(value)
    )
