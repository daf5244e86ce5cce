"""`kpt export` on a disk that is full, and after Ctrl-C: processes and file systems as they are, nothing replaced."""

import resource
import signal
import subprocess
import sys
import time

import pytest

pytest.importorskip("kpt_cli")

MODEL = """
import torch
from torch import nn

def small():
    return nn.Linear(64, 64), torch.ones(2, 64)

def large():
    return nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(4))), torch.ones(256, 2048), {"input": {0: (1, 512)}}
"""
EXPORT = [sys.executable, "-m", "kpt_cli", "export"]
#: Mounts 1 MB at $1, leaves $2 KB free there, runs what follows, and lists what is there then.
FULL = 'mount -t tmpfs -o size=1m tmpfs "$1" && head -c $((1048576 - $2 * 1024)) /dev/zero > "$1/fill" || exit 99\n'
FULL += 'at=$1; shift 2; "$@"; code=$?; ls -A "$at"; exit $code'


@pytest.fixture
def spec(tmp_path, monkeypatch):
    """Have a module with models where a process finds it."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "toy_models.py").write_text(MODEL)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "code"), prepend=":")
    (tmp_path / "out").mkdir()
    return lambda name: f"toy_models:{name}"


# The weights take 20 KB, the program 8, golden results and each document 4: what doesn't fit is another file each time.
@pytest.mark.parametrize("free", [8, 20, 28, 36])
def test_a_full_disk_is_a_sentence_and_leaves_nothing(free, spec, tmp_path):
    own = ["unshare", "-rm", "sh", "-c", FULL, "sh", str(tmp_path / "out")]
    try:
        tried = subprocess.run([*own, "64", "true"], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("unshare is not installed")
    if tried.returncode:
        pytest.skip(f"this machine mounts no file system for a user: {tried.stderr.strip()}")
    command = [*own, str(free), *EXPORT, spec("small"), "-o", str(tmp_path / "out" / "toy")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "fill\n"), done.stderr
    assert "can't be written: " in done.stderr
    assert "No space left on device" in done.stderr
    assert "make room" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_file_that_grows_too_large_is_a_sentence_and_leaves_nothing(spec, tmp_path):
    done = subprocess.run(
        [*EXPORT, spec("small"), "-o", str(tmp_path / "out" / "toy")],
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192)),
    )
    assert done.returncode == 2, done.stderr
    assert "can't be written: " in done.stderr
    assert "Traceback" not in done.stderr
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize("file", ["model.safetensors", "model.pt2"])
def test_ctrl_c_while_a_package_is_written_leaves_nothing(file, spec, tmp_path):
    process = subprocess.Popen(
        [*EXPORT, spec("large"), "-o", str(tmp_path / "out" / "toy")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A process of a shell's background ignores it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        end = time.monotonic() + 60
        while not list((tmp_path / "out").glob(f".toy.*.partial/{file}")):
            assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() < end
            time.sleep(0.001)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode not in (0, 1, 2), said
    assert not list((tmp_path / "out").iterdir())
    assert "Traceback" not in said
