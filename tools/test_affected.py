"""Hold the gate to what a change may have broken: what is left out can't see it."""

from collections.abc import Sequence
from pathlib import Path

import affected
import pytest
from affected import PACKAGES, PARTS, ROOT
from affected import affected as of

WHOLE = " ".join(PARTS)
RESTED_ON = ("noxfile.py", ".ci/run", "pyproject.toml", "constraints/cpu.txt", "conftest.py", "Makefile", "new/x.py")
KERNELS = sorted(file for file in ROOT.glob("packages/*/src/**/*.py") if "Kernel(" in file.read_text())
SRC = {package: f"packages/{package}/src/{package.replace('-', '_')}" for package in PACKAGES}


@pytest.mark.parametrize(
    ("files", "run", "left_out", "ops"),
    [
        (["docs/moe.md"], "lint imports test docs site pages", "types suite cpu nvidia amd xpu wheels demo bench", ""),
        (["README.md", "packages/kpt-moe/CHANGELOG.md"], "docs pages", "cpu wheels demo types", ""),
        (
            [f"{SRC['kpt-attention']}/dense.py"],
            "types test suite cpu wheels demo bench pages",
            "nvidia amd",
            "attention",
        ),
        ([f"{SRC['kpt-fp8']}/linear.py"], "suite cpu nvidia", "amd xpu", "fp8"),
        ([f"{SRC['kpt-fp8']}/linear.py", f"{SRC['kpt-moe']}/ops.py"], "suite cpu nvidia", "amd", "fp8 moe"),
        ([f"{SRC['kpt-fp8']}/linear.py", f"{SRC['kpt-core']}/registry.py"], WHOLE, "", ""),
        (["packages/kpt-backend-cpu/native/dot.h"], "test cpu wheels bench demo", "suite nvidia amd xpu", ""),
        ([f"{SRC['kpt-triton']}/moe.py"], "nvidia amd xpu test", "suite cpu", ""),
        ([f"{SRC['kpt-backend-xpu']}/chips.py"], "xpu test wheels", "suite cpu nvidia amd", ""),
        ([f"{SRC['kpt-cli']}/plan.py"], "test docs demo wheels", "suite cpu nvidia amd xpu", ""),
        ([f"{SRC['kpt-conformance']}/checks/values.py"], "suite cpu nvidia amd xpu", "", ""),
        (["examples/amd_backend.py"], "amd types docs", "cpu suite", ""),
        (["examples/layer.py"], "cpu types docs", "amd suite", ""),
        (["tools/check_wheels.py"], "wheels docs types", "cpu suite", ""),
        (["evidence/a.json"], "docs", "cpu suite", ""),
        *(([file], WHOLE, "", "") for file in (*RESTED_ON, "tools/affected.py", "mkdocs.yml")),
    ],
)
def test_what_could_see_a_change_is_run(files: Sequence[str], run: str, left_out: str, ops: str) -> None:
    found = of(files)
    assert {*run.split()} <= {*found.parts}
    assert not {*left_out.split()} & {*found.parts}
    assert [*found.parts] == [part for part in PARTS if part in found.parts]
    assert found.ops == {*ops.split()}


def test_nothing_is_left_out_without_a_commit_to_compare_with() -> None:
    assert of(None) == affected.Affected(PARTS, frozenset(PACKAGES), frozenset(), frozenset())


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_that_build_on_a_changed_one_are_tested(package: str) -> None:
    found = of([f"{SRC[package]}/__init__.py"]).packages
    assert {name for name in PACKAGES if package in affected.siblings(name)} == found


@pytest.mark.parametrize("file", KERNELS, ids=lambda file: str(file.relative_to(ROOT)))
def test_each_kernel_is_tried_where_it_runs(file: Path) -> None:
    path = file.relative_to(ROOT)
    package = path.parts[1]
    found = of([str(path)])
    target = "nvidia" if package == "kpt-triton" else package.removeprefix("kpt-backend-")
    assert (target if package.startswith(("kpt-backend-", "kpt-triton")) else "suite") in (*found.parts, "tpu")
    assert package in found.packages


@pytest.mark.parametrize(
    ("path", "page"),
    [
        ("README.md", "index.html"),
        ("docs/moe.md", "moe.html"),
        ("docs/decisions/README.md", "decisions/index.html"),
        ("packages/kpt-moe/README.md", "packages/kpt-moe/index.html"),
        ("packages/kpt-moe/CHANGELOG.md", "packages/kpt-moe/CHANGELOG.html"),
        ("docs/images/smollm.svg", "index.html"),
    ],
)
def test_the_page_of_a_changed_file_is_looked_at(path: str, page: str) -> None:
    assert of([path]).pages == {page}


@pytest.mark.parametrize("path", ["docs/site.css", "tools/pages/check.mjs"])
def test_every_page_is_looked_at_where_their_style_or_the_check_changed(path: str) -> None:
    found = of([path, "docs/moe.md"])
    assert "pages" in found.parts
    assert found.pages == set()
