"""Settings of the command line: a variable for each option, the user's file, presets, and what each value is from.

Click asks the command line, then the option's variable, then `default_map`, then the option's default. This module
names the variables and makes `default_map`, in which the user's file goes before a preset.
"""

import os
import re
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand

from .errors import CliError
from .options import require_name

FILE = "kpt.toml"  #: is read where the working folder has one
PRESETS = ("inference", "training", "development")
FLAG, DEFAULT = "flag", "default"
#: Settings of the library, the table [kpt]: they act on every op of the run, by the variables KPT_USE and so on.
KPT = "kpt"
LIBRARY = {
    "use": (str, "the name of a backend or kernel, or 'reference'"),
    "disable": (list, "a list of names of backends and kernels"),
    "strict": (bool, "true or false"),
}
_FOLDER = Path(__file__).with_name("presets")
_SETTINGS, _COMMAND = f"{__name__}.settings", f"{__name__}.command"  # keys of a context's `meta`

Place = tuple[str, ...]  #: the words of a command, and the name of a parameter


class SettingError(CliError):
    """A value that was refused, with the variable, file or preset that it is from."""


@dataclass(slots=True)
class Settings:
    """Hold what the user's file and the preset set."""

    file: Path | None = None
    preset: str | None = None
    of_file: dict[Place, Any] = field(default_factory=dict)
    of_preset: dict[Place, Any] = field(default_factory=dict)
    applied: dict[str, str] = field(default_factory=dict)  # variable of the library: what set it

    def origin(self, place: Place) -> str:
        """Return what sets a parameter: click calls both the default map."""
        if place in self.of_file:
            return f"file {self.file}"
        return f"preset {self.preset}" if place in self.of_preset else DEFAULT

    def default_map(self) -> dict[str, Any]:
        """Return the defaults of all commands as click wants them, one dictionary in another."""
        made: dict[str, Any] = {}
        for (*words, name), value in (self.of_preset | self.of_file).items():
            table = made
            for word in words:
                table = table.setdefault(word, {})
            table[name] = value
        return made


def settings_of(ctx: Any) -> Settings:
    """Return the settings of this run of the command line."""
    found: Settings = ctx.meta.setdefault(_SETTINGS, Settings())
    return found


def read_file(ctx: typer.Context, given: Path | None) -> Path | None:
    """Read the file of --config, or the one in the working folder if there is one."""
    settings = settings_of(ctx)
    settings.file = given or (Path(FILE) if Path(FILE).is_file() else None)
    if settings.file is not None:
        settings.of_file = _read(settings.file, ctx.command)
        ctx.default_map = settings.default_map()
    return settings.file


def read_preset(ctx: typer.Context, given: str | None) -> str | None:
    """Read the preset of --preset."""
    if given == "basic":
        raise CliError(f"preset 'basic' is gone: run without one, or choose another (known: {', '.join(PRESETS)})")
    if given is not None:
        require_name("preset", given, PRESETS)
        settings = settings_of(ctx)
        settings.preset, settings.of_preset = given, _read(_FOLDER / f"{given}.toml", ctx.command)
        ctx.default_map = settings.default_map()
    return given


def _read(file: Path, root: Any) -> dict[Place, Any]:
    """Read a file; `CliError` if a key is no option, or its value has the wrong shape."""
    found: dict[Place, Any] = {}
    try:
        for place, value in _places(root, tomllib.loads(file.read_text(encoding="utf-8"))):
            if place in found:
                raise CliError(f"{place[-1]} is given twice, with - and with _; leave one out")
            found[place] = value
    except ValueError as error:  # of TOML, and of UTF-8
        raise CliError(f"{file} is no TOML: {error}; expected lines as in: [optimize] level = 'balanced'") from error
    except CliError as error:
        raise CliError(f"{file}: {error}") from None
    return found


def _places(command: Any, table: dict[str, Any], words: Place = ()) -> Iterator[tuple[Place, Any]]:
    params, commands = options(command), getattr(command, "commands", {})
    names = sorted({*params, *commands, *(() if words else (KPT,))})
    kind = f"key of [{'.'.join(words)}]" if words else "key or command"
    for written, value in table.items():
        name = written.replace("_", "-")
        require_name(kind, name, names)
        if name in params:
            param = params[name]
            types, expected = _shape(param)
            _require_shape(name, words, value, types, expected)
            yield (*words, param.name), value
            continue
        _require_shape(name, words, value, (dict,), f"a table [{'.'.join((*words, name))}]")
        if name in commands:
            yield from _places(commands[name], value, (*words, name))
            continue
        for key, given in value.items():
            require_name("key of [kpt]", key, tuple(LIBRARY))
            _require_shape(key, (KPT,), given, LIBRARY[key][:1], LIBRARY[key][1])
            yield (KPT, key), given


def _shape(param: Any) -> tuple[tuple[Any, ...], str]:
    if param.is_flag:
        return (bool,), "true or false"
    return ((list,), "a list") if param.multiple else ((str, int, float), "a string or a number")


def _require_shape(name: str, words: Place, value: Any, types: tuple[Any, ...], expected: str) -> None:
    """Raise `CliError` for another kind of value: option types would take `true` as the number 1."""
    right = isinstance(value, types) and (bool in types or not isinstance(value, bool))
    if not right or (isinstance(value, list) and not all(isinstance(each, str) for each in value)):
        raise CliError(f"{_line(words, name, value)}: expected {expected}")


def _line(words: Place, name: str, value: Any) -> str:
    table = f"[{'.'.join(words)}] " if words else ""
    return f"{table}{name} = {value!r}"


def options(command: Any) -> dict[str, Any]:
    """Return the options that can be set, by the key that sets them: their long name without dashes."""
    of_any = (param for param in command.params if param.param_type_name == "option")
    return {key_of(param): param for param in of_any if not param.is_eager or param.name == "preset"}


def key_of(param: Any) -> str:
    """Return the key of an option in a file: `max-error` of --max-error."""
    return next(str(name) for name in param.opts if name.startswith("--")).removeprefix("--")


def words_of(ctx: Any) -> Place:
    """Return the words that call a command, after `kpt`."""
    return tuple(ctx.command_path.split()[1:])


def variable_of(words: Place, key: str) -> str:
    """Return an option's environment variable: KPT_OPTIMIZE_MAX_ERROR of `kpt optimize --max-error`."""
    return "_".join((KPT, *words, key)).replace("-", "_").upper()


def variables(command: Any, words: Place = ()) -> Iterator[str]:
    """Return the variables of all options of a command and those below it."""
    yield from (variable_of(words, key) for key in options(command))
    for name, each in getattr(command, "commands", {}).items():
        yield from variables(each, (*words, name))


def origin(ctx: Any, param: Any) -> str:
    """Return what an option's value is from."""
    source = getattr(ctx.get_parameter_source(param.name), "name", "")
    if source == "COMMANDLINE":
        return FLAG
    if source == "ENVIRONMENT":
        return f"environment variable {param.envvar}"
    return settings_of(ctx).origin((*words_of(ctx), param.name)) if source == "DEFAULT_MAP" else DEFAULT


class KptCommand(TyperCommand):
    """A command whose options have variables, and which says of a refused value what it is from."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the command line, and whatever else sets options."""
        ctx.meta[_COMMAND] = ctx
        for key, param in options(self).items():
            param.envvar, param.show_envvar = variable_of(words_of(ctx), key), False
        with blamed(ctx):
            return super().parse_args(ctx, args)


@contextmanager
def blamed(ctx: Any) -> Iterator[None]:
    """Raise `SettingError` for a value that is refused inside the block, unless it is from the command line."""
    try:
        yield
    except (CliError, typer.BadParameter) as error:
        # The one that was begun and not done.
        begun = [param for param in ctx.command.params if ctx.get_parameter_source(param.name) is not None]
        param = next((param for param in begun if param.expose_value and param.name not in ctx.params), None)
        if param is None or (source := origin(ctx, param)) in (FLAG, DEFAULT):
            raise
        text = error.format_message() if isinstance(error, typer.BadParameter) else str(error)
        line = _line(words_of(ctx), key_of(param), ctx.lookup_default(param.name))
        if source.endswith(variable := str(param.envvar)):
            raise SettingError(f"{variable}={os.environ[variable]}: {text}") from error
        raise SettingError(f"{source.removeprefix('file ')}: {line}: {text}") from error


def explain(ctx: Any, text: str) -> str:
    """Add to an error of a command what set the options and variables that it names."""
    settings, command = settings_of(ctx), ctx.meta.get(_COMMAND)
    named = set(re.findall(r"(?<![\w-])(?:--?[a-z][\w-]*|KPT_\w+)", text))
    found = {variable: source for variable, source in settings.applied.items() if variable in named}
    for param in () if command is None else options(command.command).values():
        if named.intersection(param.opts) and (source := origin(command, param)) not in (FLAG, DEFAULT):
            found[f"--{key_of(param)}"] = source
    return f"{text} ({'; '.join(f'{name} is set by {source}' for name, source in found.items())})" if found else text


@contextmanager
def library(ctx: Any) -> Iterator[None]:
    """Set the library's variables that a file or preset has and the environment has not, while the block runs."""
    settings = settings_of(ctx)
    given = settings.default_map().get(KPT, {})
    texts = {variable_of((), name): _text(value) for name, value in given.items()}
    texts = {variable: text for variable, text in texts.items() if variable not in os.environ}
    settings.applied = {
        variable_of((), name): settings.origin((KPT, name)) for name in given if variable_of((), name) in texts
    }
    os.environ.update(texts)
    try:
        _reread(texts)
        yield
    finally:
        for variable in texts:
            os.environ.pop(variable, None)
        _reread(texts)


def _text(value: Any) -> str:
    return ",".join(value) if isinstance(value, list) else str(int(value)) if isinstance(value, bool) else value


def _reread(changed: dict[str, str]) -> None:
    core = sys.modules.get("kpt_core")  # one that is imported later reads them then
    if changed and core is not None:
        core.refresh()
