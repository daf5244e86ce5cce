import errno
import json
import os
import shutil
import signal
import tempfile
from collections import namedtuple
from contextlib import suppress

import pytest

from kpt_cli.demo import KIND, REPORT, run


def refused(kpt, *arguments) -> str:
    done = kpt("demo", "--quick", *arguments)
    assert done.exit_code == 2, done.output
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    return done.stderr


@pytest.fixture
def no_training(monkeypatch):
    """Whatever gets past the checks fails at once, after it wrote something."""

    def fail(settings, folder, screen):
        (folder / "half-written").write_text("x")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run, "run_demo", fail)


@pytest.mark.parametrize(
    ("place", "sentence"),
    [
        ("file", "is a file"),
        ("file/demo", "is no folder"),
        ("folder", "is not empty and holds no earlier demo"),
        ("no/such", "make it first"),
    ],
)
def test_a_wrong_place_is_refused(kpt, tmp_path, place, sentence):
    (tmp_path / "folder").mkdir()
    mine = [tmp_path / "file", tmp_path / "folder" / "thesis.txt"]
    for file in mine:
        file.write_text("mine")
    assert sentence in refused(kpt, "-o", tmp_path / place)
    assert sorted(path for path in tmp_path.rglob("*") if path.is_file()) == mine


@pytest.mark.parametrize("report", ["{}", "[]", "no json", '{"kind": "another report"}'])
def test_another_report_is_not_an_earlier_demo(kpt, tmp_path, report):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / REPORT).write_text(report)
    assert "is not empty" in refused(kpt, "-o", tmp_path / "out")
    assert (tmp_path / "out" / REPORT).read_text() == report


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs a folder in which nobody can write")
def test_a_place_where_nobody_can_write_is_refused(kpt):
    refused(kpt, "-o", "/proc/kpt-demo")


def test_a_folder_without_permission_is_refused(kpt, tmp_path, monkeypatch):
    def refuse(**options):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    assert "nothing can be written in" in refused(kpt, "-o", tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_told_before_any_work(kpt, tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9, 1000))
    assert "make room or choose another disk" in refused(kpt, "-o", tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("no_training")
def test_a_disk_that_fills_up_leaves_nothing_behind(kpt, tmp_path):
    assert "the disk is full" in refused(kpt, "-o", tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("no_training")
def test_an_earlier_demo_survives_a_failure(kpt, tmp_path):
    earlier = tmp_path / "out"
    earlier.mkdir()
    (earlier / REPORT).write_text(json.dumps({"kind": KIND}))
    refused(kpt, "-o", earlier)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert [path.name for path in earlier.iterdir()] == [REPORT]


def test_an_interruption_leaves_nothing_behind(kpt, tmp_path, monkeypatch):
    def interrupt(settings, folder, screen):
        (folder / "half-written").write_text("x")
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "run_demo", interrupt)
    assert kpt("demo", "--quick", "-o", tmp_path / "out").exit_code == 130
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--level", "balancd"], "did you mean balanced?"),
        (["--objective", "speed"], "unknown objective 'speed'"),
        (["--max-error", "-1"], "expected a relative error of 0 or more"),
        (["--steps", "5", "--seconds", "5"], "contradict each other"),
    ],
)
def test_wrong_options_are_refused(kpt, tmp_path, arguments, sentence):
    assert sentence in refused(kpt, "-o", tmp_path / "out", *arguments)
    assert not list(tmp_path.iterdir())


def test_ctrl_c_that_a_stage_swallows_ends_the_demo_after_it():
    screen, then = run.Screen(), signal.getsignal(signal.SIGINT)
    done = []

    def stages():
        with screen.phase("tokenizer", "Training a tokenizer"):
            with suppress(KeyboardInterrupt):  # as the tokenizers library does
                signal.raise_signal(signal.SIGINT)
            done.append("tokenizer")
        done.append("training")

    with pytest.raises(KeyboardInterrupt):
        stages()
    assert done == ["tokenizer"]
    assert signal.getsignal(signal.SIGINT) is then
