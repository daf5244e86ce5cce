import json
import os
import subprocess
import sys

import pytest

import kpt_cli.doctor
import kpt_cli.main
import kpt_core
from kpt_cli import __version__
from kpt_cli.errors import CliError, sentence


def raising(monkeypatch, error):
    def examine(*given):
        raise error

    monkeypatch.setattr(kpt_cli.doctor, "examine", examine)


def test_help_lists_every_command(kpt):
    result = kpt("--help")
    assert result.exit_code == 0
    for command in ("doctor", "kernels", "plan", "optimize", "convert", "bench", "demo"):
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


@pytest.mark.parametrize(("old", "new"), kpt_cli.main.OLD_NAMES.items())
@pytest.mark.parametrize("options", [(), ("--quick", "x")], ids=["alone", "with options"])
def test_an_old_name_is_answered_with_the_new_one(kpt, old, new, options):
    result = kpt(*old.split(), *options)
    assert result.exit_code == 2
    assert result.stderr == f"kpt: error: `kpt {old}` is gone: it is {new} now\n"


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


#: Commands that answer at once, and their exit codes.
QUICK = {
    "--help": 0,
    "--version": 0,
    "optimize --help": 0,
    "doctor --help": 0,
    "optimize no/such/model": 2,
    "optimize . --level balancd": 2,
    "convert in out --to fp9": 2,
    "convert --help": 0,
    "export --help": 0,
    "export a.b:c": 2,
    "export no/such/model -o out": 2,
    "lock --dtype float33": 2,
    "lock -o /proc/kpt.lock": 2,
    "tune -o /nowhere/table.json": 2,
    "validate replay no-trace.safetensors": 2,
    "bisect a.b:c --trace no-trace.safetensors": 2,
    "bench moe --dtype bfloat": 2,
    "demo --level balancd": 2,
    "validate --help": 0,
    "demo --help": 0,
}
LIGHT = """
import json
import sys
from kpt_cli.main import main

for command, code in json.loads(sys.argv[1]).items():
    sys.argv = ["kpt", *command.split()]
    try:
        main()
        ended = 0
    except SystemExit as end:
        ended = end.code or 0
    assert ended == code, (command, ended)
    heavy = {"torch", "transformers", "kpt_core", "kpt_fp8", "kpt_moe", "matplotlib"} & set(sys.modules)
    assert not heavy, (command, heavy)
"""


def test_quick_answers_import_nothing_heavy():
    done = subprocess.run(
        [sys.executable, "-c", LIGHT, json.dumps(QUICK)], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_interrupted_demo_says_so(kpt, monkeypatch, tmp_path):
    def interrupted(*given):
        raise KeyboardInterrupt

    monkeypatch.setattr("kpt_cli.demo.run.run_demo", interrupted)
    result = kpt("demo", "--quick", "-o", tmp_path / "demo")
    assert result.exit_code == 130
    assert result.stderr.endswith("kpt: error: interrupted\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("arguments", [["kernels"], ["kernels", "--json"], ["bench", "--help"]], ids=" ".join)
def test_a_reader_who_has_enough_is_no_error(arguments):
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "kpt_cli", *arguments]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, check=False, timeout=120)
    os.close(write)
    assert "Broken" not in done.stderr
    assert "Traceback" not in done.stderr
    assert done.returncode == (1 if "--help" in arguments else 0)
