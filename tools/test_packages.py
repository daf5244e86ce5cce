"""The house rules that every package keeps: the same files, a changelog that is up to date, siblings by range."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = sorted(path.parent for path in ROOT.glob("packages/*/pyproject.toml"))
each_package = pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)


def source(package: Path) -> Path:
    return package / "src" / package.name.replace("-", "_")


def toml(path: Path) -> dict[str, Any]:
    return tomllib.loads(path.read_text())


@each_package
def test_package_has_the_files_of_the_house(package: Path) -> None:
    wanted = [package / "README.md", package / "CHANGELOG.md", package / "tests", source(package) / "py.typed"]
    assert [str(path.relative_to(ROOT)) for path in wanted if not path.exists()] == []
    assert (package / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()


@each_package
def test_newest_change_is_of_the_present_version(package: Path) -> None:
    version = re.search(r'^__version__ = "(.+)"$', (source(package) / "__init__.py").read_text(), re.M)
    newest = re.search(r"^## (\d\S*)", (package / "CHANGELOG.md").read_text(), re.M)
    assert version, "__init__.py has no line `__version__ = ...`"
    assert newest, "CHANGELOG.md has no heading `## X.Y.Z (date)`"
    assert newest[1] == version[1]


@each_package
def test_siblings_are_required_by_range(package: Path) -> None:
    project = toml(package / "pyproject.toml")["project"]
    extras = project.get("optional-dependencies", {}).values()
    requirements = [*project["dependencies"], *(requirement for extra in extras for requirement in extra)]
    siblings = [requirement for requirement in requirements if requirement.startswith("kpt-")]
    assert [sibling for sibling in siblings if not re.fullmatch(r"kpt-[\w-]+>=[\d.]+,<[\d.]+", sibling)] == []


def test_the_meta_package_names_folders_of_this_clone_that_need_each_other() -> None:
    project = toml(ROOT / "pyproject.toml")["project"]
    ours = {package.name: toml(package / "pyproject.toml")["project"] for package in PACKAGES}
    for extra in (None, *project["optional-dependencies"]):
        wanted = [*project["dependencies"], *(project["optional-dependencies"][extra] if extra else ())]
        parts = [re.fullmatch(r"([\w-]+)(\[\w+\])? @ \{root:uri\}/packages/\1", each) for each in wanted]
        names = {part[1] for part in parts if part}
        assert len(names) == len(wanted)
        # Whoever is not named by a path here would be looked for on an index, where anybody may have taken its name.
        needed = {re.split(r"[^\w-]", each)[0] for name in names for each in ours[name]["dependencies"]}
        assert {name for name in needed if name.startswith("kpt-")} <= names
    vendors = {name for name in ours if name.startswith("kpt-backend-")} - {"kpt-backend-cpu"}
    assert {f"kpt-backend-{extra}" for extra in project["optional-dependencies"]} == vendors


def test_tools_know_every_package() -> None:
    config = toml(ROOT / "pyproject.toml")["tool"]
    names = {source(package).name for package in PACKAGES}
    assert set(config["importlinter"]["root_packages"]) == names
    assert {Path(path).parent.name for path in config["mypy"]["mypy_path"]} == {package.name for package in PACKAGES}
