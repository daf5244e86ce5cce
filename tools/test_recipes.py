"""The recipes of CONTRIBUTING.md work literally: their blocks are applied to a copy, and their commands run there."""

import ast
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^(?P<indent> *)```(?P<language>\w+)\n(?P<text>.*?)^(?P=indent)```$", re.M | re.S)
#: A file that a step is about. A block belongs to the last one before it.
FILE = re.compile(r"`((?:src|tests)/[\w/]+\.py)`")


@dataclass(frozen=True)
class Block:
    """A block of code of a recipe."""

    language: str
    text: str
    file: str


def blocks_of(title: str) -> list[Block]:
    """The blocks of a section."""
    (section,) = re.findall(rf"^## {title}\n(.*?)(?=^## )", (ROOT / "CONTRIBUTING.md").read_text(), re.M | re.S)
    found = []
    for block in BLOCK.finditer(section):
        files = FILE.findall(section, 0, block.start()) or [""]
        text = re.sub(f"^{block['indent']}", "", block["text"], flags=re.M)
        found.append(Block(block["language"], text, files[-1]))
    return found


def apply(blocks: list[Block], package: Path) -> list[Path]:
    """Write what is new, change what is there, and return the files."""
    files = []
    for block in blocks:
        path = package / block.file
        if block.language == "python":
            assert not path.exists(), f"{block.file} is there already"
            path.write_text(block.text)
        elif block.language == "diff":
            lines = block.text.splitlines(keepends=True)
            old, new = ("".join(line[1:] for line in lines if line[0] in kept) for kept in (" -", " +"))
            text = path.read_text()
            assert text.count(old) == 1, f"{block.file} does not have these lines once:\n{old}"
            path.write_text(text.replace(old, new))
        else:
            continue
        files.append(path)
    return files


def commands_of(blocks: list[Block]) -> list[list[str]]:
    """The words of each command of the console blocks, without remarks."""
    lines = [line for block in blocks if block.language == "console" for line in block.text.splitlines()]
    return [line.removeprefix("$ ").partition(" #")[0].split() for line in lines if line.startswith("$ ")]


def run(command: list[str], folder: Path, source: Path) -> str:
    """Run a command of this environment with a folder of packages before all others; show its output if it fails."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("KPT_", "PYTEST_"))}
    env |= {"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=folder, env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}"
    return done.stdout


def run_tests(blocks: list[Block], folder: Path, source: Path) -> None:
    """Run the commands that are pytest's; each must find something."""
    tests = [command for command in commands_of(blocks) if Path(command[0]).name == "pytest"]
    assert tests, "the recipe runs no test"
    for command in tests:
        said = run(["pytest", "-p", "no:cacheprovider", *command[1:]], folder, source)
        assert re.search(r"[1-9]\d* passed", said), said


def run_ruff(files: list[Path], folder: Path, source: Path) -> None:
    """Check what a recipe wrote by the rules of the `pyproject.toml` beside it."""
    run(["ruff", "check", "--no-cache", *map(str, files)], folder, source)
    run(["ruff", "format", "--no-cache", "--check", *map(str, files)], folder, source)


def test_add_an_op(tmp_path: Path) -> None:
    package = tmp_path / "packages/kpt-moe"
    shutil.copytree(ROOT / "packages/kpt-moe", package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for known in ("kpt-core", "kpt-optimize"):
        (tmp_path / "packages" / known).symlink_to(ROOT / "packages" / known)  # so that ruff knows what is ours
    blocks = blocks_of("Add an op")
    files = apply(blocks, package)
    run_ruff(files, tmp_path, package / "src")
    run_tests(blocks, tmp_path, package / "src")


def test_add_a_backend_and_a_kernel(tmp_path: Path) -> None:
    made = next(command for command in commands_of(blocks_of("Add a backend")) if command[0] == "kpt")
    run(["kpt_cli", *made[1:]], tmp_path, tmp_path)
    repository = tmp_path / "kpt-backend-acme"
    assert ["cd", repository.name] in commands_of(blocks_of("Add a backend"))
    source = repository / "src"
    blocks = blocks_of("Add a kernel")
    files = apply(blocks, repository)
    run_ruff(files, repository, source)
    # As `pip install` would leave it.
    info = source / "kpt_backend_acme-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kpt-backend-acme\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text("[kpt.backends]\nacme = kpt_backend_acme:BACKEND\n")
    run_tests(blocks, repository, source)


def sessions_of(noxfile: Path) -> set[str]:
    """The names of a noxfile's sessions."""
    functions = [node for node in ast.parse(noxfile.read_text()).body if isinstance(node, ast.FunctionDef)]
    return {f.name for f in functions if {"session", "in_workspace"} & set(re.findall(r"\w+", _decorators(f)))}


def _decorators(function: ast.FunctionDef) -> str:
    return " ".join(map(ast.unparse, function.decorator_list))


@pytest.mark.parametrize("document", ["CONTRIBUTING.md", "docs/aot.md", "docs/gpu.md", "packages/kpt-triton/README.md"])
def test_sessions_that_are_named_exist(document: str) -> None:
    named: set[str] = set()
    for given in re.findall(r"nox (?:-R )?-s ([\w ]+)", (ROOT / document).read_text()):
        named |= set(given.split())
    templates = ROOT / "packages/kpt-cli/src/kpt_cli/templates/backend/noxfile.py.j2"
    assert named <= sessions_of(ROOT / "noxfile.py") | sessions_of(templates)
