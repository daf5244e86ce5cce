"""What sets options: flags, variables, the user's file, presets, defaults; and `kpt config show`, which tells it."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from kpt_cli import settings
from kpt_cli.doctor import KNOWN
from kpt_cli.errors import CliError
from kpt_cli.main import app

ROOT = typer.main.get_command(app)
#: Values that some option of each kind takes.
CANDIDATES: dict[str, list[Any]] = {
    "flag": [True],
    "list": [["float16"], ["demo"]],
    "value": [7, 0.5, "some", "memory", "aggressive", "float16", "fp8", "float8_e4m3fn", "full"],
}


def leaves(command: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the commands that can be run."""
    for name, each in getattr(command, "commands", {}).items():
        yield from leaves(each, (*words, name))
    if not hasattr(command, "commands"):
        yield words, command


OPTIONS = [(words, key) for words, command in leaves(ROOT) for key in settings.options(command)]
IDS = [" ".join((*words, f"--{key}")) for words, key in OPTIONS]


def parsed(words: tuple[str, ...], *arguments: str, root: tuple[str, ...] = ()) -> Any:
    """Return the context of a command as it would run."""
    ctx = ROOT.make_context("kpt", [*root, *words])
    command: Any = ROOT
    for word in words:
        command = command.commands[word]
        for param in command.params:
            param.required = False
        rest = list(arguments) if word == words[-1] else ["-"]
        ctx = command.make_context(word, rest, parent=ctx)
    return ctx


def toml(words: tuple[str, ...], key: str, value: Any) -> str:
    return f"[{'.'.join(words)}]\n{key} = {json.dumps(value)}\n"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    """Work in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_there_are_options_of_commands_and_of_groups_of_commands():
    assert {"optimize --level", "bench moe-training --dtype", "config show --json"} <= set(IDS)
    assert all(isinstance(command, settings.KptCommand) for _, command in leaves(ROOT))


@pytest.mark.parametrize(("words", "key"), OPTIONS, ids=IDS)
def test_every_option_is_set_by_a_preset_a_file_a_variable_and_a_flag_in_this_order(words, key, folder, monkeypatch):
    (folder / "presets").mkdir()
    monkeypatch.setattr(settings, "_FOLDER", folder / "presets")
    (file := folder / "kpt.toml").touch()
    preset = folder / "presets" / "training.toml"
    param = settings.options(parsed(words).command)[key]
    kind = "flag" if param.is_flag else "list" if param.multiple else "value"
    default = parsed(words).params[param.name]

    def given(*arguments: str) -> tuple[Any, str]:
        ctx = parsed(words, *arguments, root=("--preset", "training"))
        return ctx.params[param.name], settings.origin(ctx, param)

    def taken() -> Any:
        for value in CANDIDATES[kind]:
            preset.write_text(toml(words, key, value))
            try:
                found, _ = given()
            except (CliError, typer.BadParameter):
                continue
            if found != default:
                return value
        raise AssertionError(f"no candidate for {words} {key}")

    value = taken()
    text = {"flag": "1", "list": value[0] if kind == "list" else ""}.get(kind, str(value))
    found, source = given()
    assert (source, str(found)) == ("preset training", str(type(found)(value)))
    assert parsed(words).params[param.name] == default
    file.write_text(toml(words, key, value))
    assert given() == (found, f"file {file.name}")
    variable = settings.variable_of(words, key)
    monkeypatch.setenv(variable, text)
    assert given() == (found, f"environment variable {variable}")
    flag = f"--{key}"
    assert given(*([flag] if kind == "flag" else [flag, text])) == (found, "flag")


def test_each_level_goes_before_those_below_it(kpt, folder, monkeypatch):
    def shown(*root: str, flags: tuple[str, ...] = ()) -> tuple[str, str]:
        rows = json.loads(kpt(*root, "config", "show", "optimize", *flags, "--json").stdout)["options"]
        (row,) = [row for row in rows if row["option"] == "--level"]
        return row["value"], row["origin"]

    assert shown() == ("balanced", "default")
    assert shown("--preset", "training") == ("conservative", "preset training")
    (folder / "kpt.toml").write_text("preset = 'training'\n[optimize]\nlevel = 'aggressive'\n")
    assert shown() == ("aggressive", "file kpt.toml")
    monkeypatch.setenv("KPT_OPTIMIZE_LEVEL", "balanced")
    assert shown() == ("balanced", "environment variable KPT_OPTIMIZE_LEVEL")
    assert shown(flags=("--level", "conservative")) == ("conservative", "flag")


def test_a_preset_is_named_by_a_flag_a_variable_or_the_file(kpt, folder, monkeypatch):
    def shown(*root: str) -> str | None:
        return json.loads(kpt(*root, "config", "show", "--json").stdout)["preset"]

    assert shown() is None
    (folder / "kpt.toml").write_text("preset = 'inference'\n")
    assert shown() == "inference"
    monkeypatch.setenv("KPT_PRESET", "training")
    assert shown() == "training"
    assert shown("--preset", "development") == "development"
    (folder / "other.toml").write_text("preset = 'inference'\n")
    monkeypatch.delenv("KPT_PRESET")
    monkeypatch.setenv("KPT_CONFIG", "other.toml")
    (folder / "kpt.toml").write_text("preset = 'training'\n")
    assert shown() == "inference"
    assert shown("--config", "kpt.toml") == "training"
    assert shown("--preset", "development", "--config", "kpt.toml") == "development"


def test_no_variable_of_an_option_is_one_of_the_library():
    library = {*KNOWN, "KPT_TOKEN", "KPT_CPU_INTERFACE", "KPT_TPU_INTERPRET", "KPT_AOT_TILES", "KPT_GATE", "KPT_PORT"}
    of_options = list(settings.variables(ROOT))
    assert len(of_options) == len(set(of_options)) > 100
    assert set(of_options) & library == {"KPT_DEBUG"}  # the option --debug itself


def test_a_slip_in_a_variable_of_an_option_is_told_by_doctor(kpt, monkeypatch):
    for name in ("KPT_OPTIMIZE_LEVLE", "KPT_TOKEN", "KPT_TPU_INTERPRET", "KPT_CPU_INTERFACE", "KPT_SERVE_PORT"):
        monkeypatch.setenv(name, "1")
    advice = [each for each in json.loads(kpt("doctor", "--json").stdout)["advice"] if "is not read" in each]
    assert advice == ["KPT_OPTIMIZE_LEVLE is not read by anything; did you mean KPT_OPTIMIZE_LEVEL?"]


WRONG = {
    "[optimize]\nlevle = 'x'": "kpt.toml: unknown key of [optimize] 'levle': did you mean level",
    "[optimise]\nlevel = 'x'": "kpt.toml: unknown key or command 'optimise': did you mean optimize?",
    "[bench.mou]\nquick = true": "kpt.toml: unknown key of [bench] 'mou': did you mean moe?",
    "version = true": "kpt.toml: unknown key or command 'version'",
    "preset = 'trainig'": "kpt.toml: preset = 'trainig': unknown preset 'trainig': did you mean training?",
    "preset = 'basic'": "kpt.toml: preset = 'basic': preset 'basic' is gone: run without one",
    "optimize = 3": "kpt.toml: optimize = 3: expected a table [optimize]",
    "[kpt]\nues = 'cpu'": "kpt.toml: unknown key of [kpt] 'ues': did you mean use?",
    "[kpt]\nstrict = 1": "kpt.toml: [kpt] strict = 1: expected true or false",
    "[kpt]\ndisable = 'cpu'": "kpt.toml: [kpt] disable = 'cpu': expected a list of names",
    "[optimize]\ntokens = true": "kpt.toml: [optimize] tokens = True: expected a string or a number",
    "[optimize]\nforce = 1": "kpt.toml: [optimize] force = 1: expected true or false",
    "[tune]\ndtype = 'float32'": "kpt.toml: [tune] dtype = 'float32': expected a list",
    "[tune]\ndtype = [32]": "kpt.toml: [tune] dtype = [32]: expected a list",
    "[optimize]\nmax-error = 1\nmax_error = 1": "kpt.toml: max_error is given twice, with - and with _",
    "level = ": "kpt.toml is no TOML: ",
}


@pytest.mark.parametrize(("text", "error"), WRONG.items())
def test_what_no_option_has_is_an_error_of_every_command(kpt, folder, text, error):
    (folder / "kpt.toml").write_text(text)
    result = kpt("new", "backend", "9")
    assert result.exit_code == 2
    assert result.stderr.startswith(f"kpt: error: {error}")


def test_a_wrong_value_is_an_error_that_says_where_it_is(kpt, folder, monkeypatch):
    def refused(*command: str) -> str:
        result = kpt(*command)
        assert result.exit_code == 2, result.output
        return " ".join(result.stderr.split())

    (folder / "kpt.toml").write_text("[optimize]\nlevel = 'agressive'\ntokens = 0\n[serve]\ndelay = '2'\n")
    where = "kpt: error: kpt.toml: [optimize] level = 'agressive': unknown level 'agressive': did you mean aggressive?"
    assert refused("optimize", "nowhere").startswith(where)
    assert refused("config", "show").startswith(where)
    found = refused("optimize", "nowhere", "--level", "balanced")
    assert found.startswith("kpt: error: kpt.toml: [optimize] tokens = 0: Invalid value for '--tokens'")
    assert refused("optimize", "nowhere", "--level", "balanced", "--tokens", "8").startswith("kpt: error: nowhere")
    # A check of the command itself.
    assert refused("serve", "toy").endswith("as 2ms (--delay is set by file kpt.toml)")
    assert refused("serve", "toy", "--delay", "3").endswith("as 2ms")
    monkeypatch.setenv("KPT_OPTIMIZE_LEVEL", "slow")
    assert refused("optimize", "nowhere").startswith("kpt: error: KPT_OPTIMIZE_LEVEL=slow: unknown level 'slow'")
    monkeypatch.setenv("KPT_PRESET", "trainig")
    assert refused("kernels").startswith("kpt: error: KPT_PRESET=trainig: unknown preset 'trainig': did you mean train")
    assert refused("--preset", "basic", "kernels").startswith("kpt: error: preset 'basic' is gone")
    monkeypatch.setenv("KPT_CONFIG", "absent.toml")
    assert refused("kernels") == "kpt: error: No such file or directory (absent.toml)"


def test_help_and_version_need_no_valid_file(kpt, folder):
    (folder / "kpt.toml").write_text("nonsense")
    assert kpt("--help").exit_code == 0
    assert kpt("--version").exit_code == 0


def test_show_lists_every_option_and_where_its_value_is_from(kpt, folder, monkeypatch):
    (folder / "kpt.toml").write_text("preset = 'training'\n[tune]\ndtype = ['float32', 'bfloat16']\n")
    monkeypatch.setenv("KPT_TUNE_SECONDS", "0.5")
    result = kpt("config", "show", "tune", "moe.experts", "--output", "t.json")
    lines = [re.split(" {2,}", line.strip()) for line in result.stdout.splitlines()]
    rows = {name: tuple(cells) for name, *cells in lines}
    assert result.stdout.startswith("File: kpt.toml. Preset: training.\n")
    assert rows["--dtype"] == ("float32, bfloat16", "file kpt.toml")
    assert rows["--training"] == ("true", "preset training")
    assert rows["--seconds"] == ("0.5", "environment variable KPT_TUNE_SECONDS")
    assert rows["--output"] == ("t.json", "flag")
    assert rows["--device"] == ("-", "default")
    assert {f"--{key}" for key in settings.options(ROOT.commands["tune"])} <= rows.keys()
    assert not (folder / "t.json").exists()


def test_show_without_a_command_lists_what_is_set(kpt, folder):
    first, second = kpt("config", "show").stdout.splitlines()
    assert first == "File: none; kpt.toml in this folder would be read. Preset: none."
    assert second == "Nothing is set: every option has its default."
    (folder / "kpt.toml").write_text("[bench.moe_training]\nquick = true\n[kpt]\nuse = 'reference'\n")
    rows = json.loads(kpt("config", "show", "--json").stdout)["options"]
    assert [(row["command"], row["option"], row["value"], row["origin"]) for row in rows] == [
        ("", "[kpt] use", "reference", "file kpt.toml"),
        ("bench moe-training", "--quick", True, "file kpt.toml"),
    ]


def test_show_asks_for_a_command_that_is_there(kpt):
    assert "unknown command 'optimise': did you mean optimize?" in kpt("config", "show", "optimise").stderr
    assert "kpt config show bench takes one command more: attention, fp8" in kpt("config", "show", "bench").stderr
