"""`kpt new backend`: what it writes is whole, clean, right, and passes the conformance suite."""

import importlib.util
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

import kpt_core
from kpt_cli.new import RESERVED, Skeleton

CONFIG = Path(__file__).parents[3] / "pyproject.toml"


@pytest.fixture
def written(kpt, tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    result = kpt("new", "backend", "acme_x1")
    assert result.exit_code == 0, result.output
    return tmp_path / "kpt-backend-acme-x1"


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def installed(folder: Path) -> Path:
    """An import path on which the package in `folder` is found as if it were installed."""
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    info = folder / "src" / f"{project['name'].replace('-', '_')}-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: 0.1.0\n")
    points = project["entry-points"]["kpt.backends"]
    (info / "entry_points.txt").write_text("\n".join(["[kpt.backends]", *(f"{k} = {v}" for k, v in points.items())]))
    return folder / "src"


def run(*command: object, cwd: Path, path: Path | None = None) -> str:
    env = {name: value for name, value in os.environ.items() if not name.startswith("KPT_")}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=env | ({"PYTHONPATH": str(path)} if path else {}),
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def test_the_repository_is_whole(written):
    assert files(written) == {
        ".gitignore",
        "CHANGELOG.md",
        "README.md",
        "noxfile.py",
        "pyproject.toml",
        "src/kpt_backend_acme_x1/__init__.py",
        "src/kpt_backend_acme_x1/backend.py",
        "src/kpt_backend_acme_x1/grouped_mm.py",
        "src/kpt_backend_acme_x1/py.typed",
        "tests/test_conformance.py",
        "tests/xfails.txt",
    }
    project = tomllib.loads((written / "pyproject.toml").read_text())
    assert project["project"]["name"] == "kpt-backend-acme-x1"
    assert project["project"]["entry-points"]["kpt.backends"] == {"acme_x1": "kpt_backend_acme_x1:BACKEND"}
    assert project["project"]["dependencies"] == ["kpt-core>=0.1,<0.2"]
    left = [
        path for path in written.rglob("*") if path.is_file() and ("{{" in path.read_text() or "PACKAGE" in path.name)
    ]
    assert left == []
    assert list(written.parent.iterdir()) == [written], "something was left behind"


def test_the_answer_says_what_to_do_next(kpt, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    told = kpt("new", "backend", "acme").stdout
    assert "cd kpt-backend-acme\n" in told
    (names,) = re.findall(r"pip wheel --no-deps -w wheels \./packages/kpt-{(.*)}", told)
    needed = (tmp_path / "kpt-backend-acme" / "pyproject.toml").read_text()
    assert set(re.findall(r'"kpt-(\w+)>', needed)) <= set(names.split(","))
    answer = json.loads(kpt("new", "backend", "zap", "--path", "there", "--device-type", "cuda", "--json").stdout)
    assert (answer["name"], answer["device_type"], answer["path"]) == ("zap", "cuda", "there")
    assert set(answer["files"]) == files(tmp_path / "there")


@pytest.mark.parametrize("name", ["Acme", "2x", "a-b", "a__b", "_a", "a_", "", "a b", "é", "../a", "class", *RESERVED])
def test_a_wrong_name_is_refused(kpt, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    result = kpt("new", "backend", "--", name)
    assert result.exit_code == 2
    assert repr(name) in result.stderr
    assert "expected" in result.stderr or "choose another" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_device_with_an_index_is_no_device_type(kpt, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = kpt("new", "backend", "acme", "--device-type", "cuda:0")
    assert result.exit_code == 2
    assert "cuda:0" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_taken_place_is_left_as_it_is(kpt, tmp_path):
    (tmp_path / "note").write_text("mine")
    for place, reason in (
        (tmp_path, "not empty"),
        (tmp_path / "note", "is a file"),
        (tmp_path / "a" / "b", "not exist"),
    ):
        result = kpt("new", "backend", "acme", "--path", place)
        assert result.exit_code == 2
        assert reason in result.stderr.replace("\n", " ")
        assert "--path" in result.stderr.replace("\n", " ")
    assert files(tmp_path) == {"note"}


def test_an_empty_folder_may_be_filled(kpt, tmp_path):
    assert kpt("new", "backend", "acme", "--path", tmp_path).exit_code == 0
    assert "pyproject.toml" in files(tmp_path)


def test_it_is_written_whole_or_not_at_all(kpt, tmp_path, monkeypatch):
    write_text, calls = Path.write_text, []

    def full_disk(self, *arguments, **options):
        calls.append(self)
        if len(calls) == 4:
            raise OSError(28, "No space left on device", str(self))
        return write_text(self, *arguments, **options)

    monkeypatch.setattr(Path, "write_text", full_disk)
    result = kpt("new", "backend", "acme", "--path", tmp_path / "there")
    assert result.exit_code == 2
    assert "No space left" in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(importlib.util.find_spec("ruff") is None, reason="ruff is not installed")
@pytest.mark.parametrize("name", ["a", "acme_x1", "a_backend_of_a_long_name_indeed"])
@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_ruff_finds_nothing(kpt, tmp_path, name, device_type):
    folder = tmp_path / "there"
    assert kpt("new", "backend", name, "--path", folder, "--device-type", device_type).exit_code == 0
    run(sys.executable, "-m", "ruff", "format", "--no-cache", "--check", "--diff", ".", cwd=folder)
    run(sys.executable, "-m", "ruff", "check", "--no-cache", ".", cwd=folder)
    run(sys.executable, "-m", "ruff", "check", "--no-cache", "--config", CONFIG, "src", "noxfile.py", cwd=folder)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("mypy") is None, reason="mypy is not installed")
def test_mypy_finds_nothing(written):
    run(sys.executable, "-m", "mypy", "--cache-dir", os.devnull, "src", cwd=written)


SCRIPT = """
import json, os, torch
os.environ["KPT_DISABLE"] = "cpu"  # which may be installed here too, and is faster
import kpt_core
from kpt_core.registry import problems
out = {"state": kpt_core.backends()["acme_x1"].unavailable(), "problems": [str(p) for p in problems()]}
x = torch.randn(7, 4, requires_grad=True)
weight = torch.randn(3, 4, 5, requires_grad=True)
offsets = torch.tensor([2, 2, 6], dtype=torch.int32)
op = kpt_core.get_op("moe.grouped_mm")

def run():
    y = op(x, weight, offsets)
    return y, *torch.autograd.grad(y.sin().sum(), (x, weight))

out["kernel"] = kpt_core.explain(op, x, weight, offsets).kernel
got = run()
with kpt_core.use("reference"):
    want = run()
out["right"] = [torch.allclose(a, b, atol=1e-5) for a, b in zip(got, want)]
refusals = kpt_core.explain(op, x[:, :0], weight[:, :0], offsets).refusals
out["refused"] = [str(refusal) for refusal in refusals if refusal.backend == "acme_x1"]
compiled = torch.compile(lambda x: op(x, weight, offsets), fullgraph=True, backend="eager")
out["compiled"] = torch.equal(compiled(x), got[0])
print(json.dumps(out))
"""


def test_its_kernels_are_found_chosen_and_right(written):
    answer = json.loads(run(sys.executable, "-c", SCRIPT, cwd=written, path=installed(written)))
    assert answer == {
        "state": None,
        "problems": [],
        "kernel": "kpt_backend_acme_x1.grouped_mm:grouped_mm",
        "right": [True, True, True],
        "refused": [
            "acme_x1 (kpt_backend_acme_x1.grouped_mm:grouped_mm): the inner size is 0, so there is nothing to multiply"
        ],
        "compiled": True,
    }


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, so it is available")
def test_a_backend_without_its_device_says_so(kpt, kpt_process, tmp_path):
    kpt("new", "backend", "zap", "--path", tmp_path / "there", "--device-type", "cuda")
    told = kpt_process("doctor", "--json", plugins=installed(tmp_path / "there"))
    assert told.returncode == 0, told.stderr
    assert f"torch {torch.__version__} finds no cuda device here" in told.stdout


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("kpt_conformance") is None, reason="kpt-conformance is not installed")
def test_the_suite_runs_over_its_kernels(written):
    # A part of the quick selection, which `nox -s wheels` runs.
    chosen = ("--kpt-quick", "-k", "grouped_mm and (values or layouts or declaration or wrong_input)")
    out = run(
        sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen, cwd=written, path=installed(written)
    )
    passed = re.search(r"(\d+) passed", out)
    assert passed, out
    assert int(passed[1]) > 30


def test_requirements_are_ranges_of_what_is_installed():
    found = Skeleton.of("acme", "cpu").requirements
    assert found["kpt-core"].startswith(f"kpt-core>={kpt_core.__version__.rpartition('.')[0]},<")
