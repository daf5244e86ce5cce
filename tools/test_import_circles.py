"""No module of a package imports itself by way of others: not for types, and not inside a function either."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

PACKAGES = sorted(Path(__file__).parents[1].glob("packages/*/src/*/__init__.py"))


def module_files(root: Path) -> dict[str, Path]:
    """Return the file of each module of a package, by the module's dotted name."""
    files = {}
    for path in root.rglob("*.py"):
        parts = path.relative_to(root.parent).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return files


def import_graph(root: Path) -> dict[str, list[str]]:
    """Return what each module of a package imports of the package, at any depth of its source.

    A name taken from a package counts as an import of the module that defines it, not of the `__init__.py` that passes
    it on.
    """
    files = module_files(root)

    @cache
    def sources(module: str) -> dict[str, tuple[str, str]]:
        """Return each name that a module imports from one of the package: the module it names, and the name there."""
        found = {}
        for node in _from_imports(module):
            for alias in node.names:
                found[alias.asname or alias.name] = (_origin(module, node), alias.name)
        return found

    def _from_imports(module: str) -> Iterator[ast.ImportFrom]:
        return (
            node
            for node in ast.walk(ast.parse(files[module].read_text()))
            if isinstance(node, ast.ImportFrom) and _origin(module, node) in files
        )

    def _origin(module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parts = module.split(".")
        parts = parts[: len(parts) - node.level + (files[module].name == "__init__.py")]
        return ".".join([*parts, *filter(None, [node.module])])

    def resolve(origin: str, name: str, seen: tuple[tuple[str, str], ...] = ()) -> str:
        if files[origin].name != "__init__.py":
            return origin
        passed_on = sources(origin).get(name)
        if passed_on and passed_on not in seen and passed_on != (origin, name):
            return resolve(*passed_on, (*seen, passed_on))
        submodule = f"{origin}.{name}"
        return submodule if submodule in files else origin

    def imported(module: str) -> Iterator[str]:
        for node in _from_imports(module):
            for alias in node.names:
                yield resolve(_origin(module, node), alias.name)
        for whole in ast.walk(ast.parse(files[module].read_text())):
            if isinstance(whole, ast.Import):
                yield from (alias.name for alias in whole.names if alias.name in files)

    return {module: sorted(set(imported(module)) - {module}) for module in files}


def shortest_circle(graph: dict[str, list[str]]) -> list[str]:
    """Return the modules of a shortest circle, the first one again at the end, or nothing if there is none."""
    circles = []
    for start in sorted(graph):
        paths, reached = [[start]], {start}
        for path in paths:
            if start in graph[path[-1]]:
                circles.append([*path, start])
                break
            for after in graph[path[-1]]:
                if after not in reached:
                    reached.add(after)
                    paths.append([*path, after])
    return min(circles, key=len, default=[])


@pytest.mark.parametrize("root", [path.parent for path in PACKAGES], ids=lambda root: root.name)
def test_no_modules_import_each_other_in_a_circle(root: Path) -> None:
    circle = shortest_circle(import_graph(root))
    assert not circle, " -> ".join(circle)


def test_circles_are_found_through_types_functions_and_packages(tmp_path: Path) -> None:
    root = tmp_path / "pkg"
    (root / "sub").mkdir(parents=True)
    sources = {
        "__init__": "from .a import A",
        "a": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from . import b\nclass A: ...",
        "b": "def late():\n    from .sub import c",
        "sub/__init__": "from .c import deep as c",
        "sub/c": "from pkg import A\ndeep = A",
    }
    for name, source in sources.items():
        (root / f"{name}.py").write_text(source)
    assert shortest_circle(import_graph(root)) == ["pkg.a", "pkg.b", "pkg.sub.c", "pkg.a"]
