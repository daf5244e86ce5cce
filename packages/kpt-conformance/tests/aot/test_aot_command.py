"""`python -m kpt_conformance.aot`: what it prints and how it ends."""

import json
import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from aot_backend import SampleBackend, need

from kpt_conformance.aot.__main__ import main
from kpt_conformance.report import read
from kpt_core import registry


@pytest.fixture
def command():
    added = []

    def run_command(aot: tuple[str, ...], chips: tuple[str, ...], *options: str) -> int:
        registry.add_backend(SampleBackend(aot, chips))
        added.append("sample")
        return main(["--backend", "sample", *options])

    yield run_command
    for name in added:
        registry.remove_backend(name)


def test_nothing_to_compile_is_said(command, capsys):
    assert command((), ("sm90",)) == 0
    assert capsys.readouterr().out == "nothing to compile: none of the 0 kernels of 1 backends names an aot\n"


def test_broken_declaration_ends_with_1(command, capsys):
    assert command(("aot_nowhere:X",), ("sm90",)) == 1
    printed = capsys.readouterr().out
    assert "No module named 'aot_nowhere'" in printed
    assert "1 error" in printed


@pytest.mark.parametrize(
    ("ops", "code", "message"),
    [
        (("--op", "aot.", "--op", "fp8."), 1, "No module named 'aot_nowhere'"),
        (("--op", "fp8."), 0, "no kernel of an op that begins with fp8. names an aot"),
    ],
)
def test_ops_are_chosen_by_how_their_names_begin(command, capsys, ops, code, message):
    assert command(("aot_nowhere:X",), ("sm90",), *ops) == code
    assert message in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--chip", "sm91"), "unknown chip 'sm91': did you mean 'sm90'"),
        (("--backend", "sampel"), "unknown backend 'sampel': did you mean 'sample'"),
    ],
)
def test_unknown_name_ends_with_2(command, capsys, options, message):
    assert command((), ("sm90",), *options) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--jobs", "0"), "must be at least 1; got 0"),
        (("--json", "/nowhere/rows.json"), "--json: there is no folder '/nowhere'"),
        (("--table", "/nowhere/kernels.md"), "--table: there is no folder '/nowhere'"),
        (("--table", "/"), "--table: expected a file name, got the folder '/'"),
    ],
)
def test_bad_option_ends_with_2(command, capsys, options, message):
    with pytest.raises(SystemExit) as end:
        command((), ("sm90",), *options)
    assert end.value.code == 2
    assert message in capsys.readouterr().err


def test_table_and_json(command, capsys, tmp_path):
    need("triton")
    file = tmp_path / "rows.json"
    assert command(("aot_triton_kernels:ONE",), ("sm80",), "--json", str(file), "--jobs", "1") == 0
    head, line, *_ = capsys.readouterr().out.splitlines()
    assert head.split()[:5] == ["kernel", "program", "chip", "configuration", "status"]
    assert line.split()[:5] == ["matmul_0", "one", "sm80", "64x64", "ok"]
    assert "mma.sync 16" in line
    (row,) = json.loads(file.read_text())
    assert (row["kernel"], row["op"], row["backend"]) == ("aot_backend:matmul_0", "aot.matmul", "sample")
    assert (row["status"], row["contract"], row["spills"]) == ("ok", "mma.sync", 0)
    assert row["versions"].keys() == {"triton"}


def test_a_report_of_the_run_tells_what_was_compiled(command, tmp_path):
    need("triton")
    file = tmp_path / "run.json"
    assert command(("aot_triton_kernels:ONE", "aot_triton_kernels:STALE"), ("sm80", "sm90"), "--report", str(file)) == 1
    report = read(file)
    assert (report.level, report.backend, report.versions.keys() >= {"triton"}) == ("compiled", "sample", True)
    one, stale = (report.kernels[f"aot.matmul aot_backend:matmul_{place}"] for place in (0, 1))
    assert (one["sm80"]["passed"], one["sm80"]["failed"], one["sm80"]["spills"]) == (1, 0, 0)
    assert (stale["sm90"]["passed"], stale["sm90"]["failed"]) == (0, 1)


def test_page_is_written_with_the_compilers_version(command, tmp_path):
    need("triton")
    file = tmp_path / "kernels.md"
    assert command(("aot_triton_kernels:ONE",), ("sm80",), "--table", str(file)) == 0
    written = file.read_text()
    assert f"with triton {version('triton')};" in written
    assert re.search(r"^\| one \| 64x64 \| \d+ r, \d+ KiB, \d+/64 \|$", written, re.MULTILINE)


def test_broken_contract_ends_with_1(command, capsys):
    need("triton")
    assert command(("aot_triton_kernels:STALE",), ("sm90",)) == 1
    assert "contract: unsupported: it has no fp8" in capsys.readouterr().out


def test_installed_backend_is_found_and_compiled(tmp_path):
    need("triton")
    installed = tmp_path / "sample-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: sample\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text("[kpt.backends]\nsample = aot_installed:BACKEND\n")
    (tmp_path / "aot_installed.py").write_text(
        "from aot_backend import SampleBackend\nBACKEND = SampleBackend(('aot_triton_kernels:ONE',), ('sm80',))\n"
    )
    paths = os.pathsep.join((str(tmp_path), str(Path(__file__).parent)))
    done = subprocess.run(
        [sys.executable, "-m", "kpt_conformance.aot", "--backend", "sample"],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "1 ok"), done.stdout + done.stderr
