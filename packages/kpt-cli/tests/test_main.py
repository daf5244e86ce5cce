import os
import subprocess
import sys

import pytest

import kpt_cli.doctor.report
import kpt_cli.main
import kpt_core
from kpt_cli import __version__
from kpt_cli.errors import CliError, sentence


def raising(monkeypatch, error):
    def examine():
        raise error

    monkeypatch.setattr(kpt_cli.doctor.report, "examine", examine)


def test_help_lists_every_command(kpt):
    result = kpt("--help")
    assert result.exit_code == 0
    for command in ("doctor", "kernels", "optimize", "bench", "demo"):
        assert command in result.stdout


def test_no_argument_shows_the_help(kpt):
    assert "Usage" in kpt().output


def test_version(kpt):
    result = kpt("--version")
    assert (result.exit_code, result.stdout) == (0, f"kpt {__version__}\n")


def test_unknown_command_is_a_usage_error(kpt):
    result = kpt("docter")
    assert result.exit_code == 2
    assert "docter" in result.stderr


@pytest.mark.parametrize(
    "error",
    [
        CliError("this is wrong; do that"),
        kpt_core.KptError("this is wrong; do that"),
        kpt_core.NoKernelError("this is wrong; do that"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_error_on_purpose_is_one_sentence_and_exit_code_2(kpt, monkeypatch, error):
    raising(monkeypatch, error)
    result = kpt("doctor")
    assert result.exit_code == 2
    assert result.stderr == "kpt: error: this is wrong; do that\n"
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(28, os.strerror(28), "/data/out"), "the disk is full or a size limit was hit (/data/out)"),
        (PermissionError(13, os.strerror(13), "/root/x"), "no permission (/root/x)"),
        (FileNotFoundError(2, os.strerror(2), "/nix"), "No such file or directory (/nix)"),
        (OSError("what a library says"), "what a library says"),
        (MemoryError(), "out of memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 9 bytes"), "out of memory"),
    ],
)
def test_what_the_system_refuses_is_a_sentence_too(kpt, monkeypatch, error, said):
    raising(monkeypatch, error)
    result = kpt("doctor")
    assert result.exit_code == 2
    assert said in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("how", ["option", "variable"])
def test_debug_shows_the_traceback_too(kpt, monkeypatch, how):
    raising(monkeypatch, kpt_core.InputError("wrong"))
    if how == "variable":
        monkeypatch.setenv("KPT_DEBUG", "1")
    result = kpt(*(["--debug"] if how == "option" else []), "doctor")
    assert result.exit_code == 2
    assert "Traceback" in result.stderr
    assert "kpt: error: wrong" in result.stderr


def test_interrupt_is_130(kpt, monkeypatch):
    raising(monkeypatch, KeyboardInterrupt())
    result = kpt("doctor")
    assert result.exit_code == 130
    assert "interrupted" in result.stderr


def test_bug_is_not_hidden(kpt, monkeypatch):
    raising(monkeypatch, ZeroDivisionError("a bug"))
    result = kpt("doctor")
    assert isinstance(result.exception, ZeroDivisionError)
    assert sentence(result.exception) is None


def test_warnings_of_kpt_are_sentences(kpt_process, install):
    plugins = install("kpt-odd", "[kpt.ops]\nodd = odd_ops:OPS\n", odd_ops="raise RuntimeError('odd')")
    result = kpt_process("kernels", plugins=plugins)
    assert result.returncode == 0
    assert "kpt: warning: KPT goes on without kpt.ops 'odd' of kpt-odd 1.0: RuntimeError: odd" in result.stderr
    assert ".py:" not in result.stderr


LIGHT = """
import sys
from kpt_cli.main import main
sys.argv = ["kpt", *sys.argv[1:]]
try:
    main()
finally:
    heavy = {"torch", "transformers", "kpt_core", "kpt_moe", "matplotlib"} & set(sys.modules)
    assert not heavy, heavy
"""


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--help"], 0),
        (["--version"], 0),
        (["optimize", "--help"], 0),
        (["doctor", "--help"], 0),
        (["optimize", "no/such/model"], 2),
        (["optimize", ".", "--level", "balancd"], 2),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_quick_answers_import_nothing_heavy(arguments, code):
    done = subprocess.run(
        [sys.executable, "-c", LIGHT, *arguments], capture_output=True, text=True, check=False, timeout=120
    )
    assert (done.returncode, "AssertionError" in done.stderr) == (code, False), done.stderr


FOREIGN = """
import typer
app = typer.Typer()

@app.callback()
def all(): "All of them."

@app.command()
def moe(size: int = 1):
    print(f"size {size}")
    if size == 3:
        raise typer.Exit(1)
    if size == 4:
        import kpt_core
        raise kpt_core.InputError("too large")

def single(size: int = 1):
    print(f"single {size}")
"""


@pytest.fixture
def foreign(tmp_path, monkeypatch):
    """A command that lives elsewhere stands in for `bench` and `demo`."""
    (tmp_path / "foreign_commands.py").write_text(FOREIGN)
    monkeypatch.syspath_prepend(tmp_path)
    forward = kpt_cli.main._forward

    def elsewhere(ctx, target):
        forward(ctx, "foreign_commands:app" if "bench" in target else "foreign_commands:single")

    monkeypatch.setattr(kpt_cli.main, "_forward", elsewhere)


@pytest.mark.usefixtures("foreign")
@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["bench", "moe", "--size", "2"], 0, "size 2\n"),
        (["bench", "--help"], 0, "All of them."),
        (["bench", "moe", "--size", "3"], 1, "size 3\n"),
        (["bench", "moe", "--size", "4"], 2, "kpt: error: too large"),
        (["bench", "moe", "--size", "x"], 2, "Invalid value for '--size'"),
        (["bench", "mo"], 2, "mo"),
        (["demo", "--size", "5"], 0, "single 5\n"),
        (["demo", "--help"], 0, "Usage: kpt demo"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_commands_of_other_folders_keep_their_options_and_exit_codes(kpt, arguments, code, said):
    result = kpt(*arguments)
    assert result.exit_code == code, result.output
    assert said in result.output


def test_commands_of_other_folders_do_not_hide_their_errors(kpt, monkeypatch):
    def broken(ctx, target):
        raise ImportError("no matplotlib")

    monkeypatch.setattr(kpt_cli.main, "_forward", broken)
    assert isinstance(kpt("bench").exception, ImportError)
