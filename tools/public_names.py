"""The public names of a package: what its `__all__`, and those of its folders, list."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
#: Folders that several modules share, which no user imports.
INTERNAL = {"kpt_core.dispatch"}


def listed(init: Path) -> list[str]:
    """Return the `__all__` that a module has, read from its source."""
    for node in ast.parse(init.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["__all__"]:
            return sorted(ast.literal_eval(node.value), key=str.lower)
    return []


def public_names(package: Path) -> dict[str, list[str]]:
    """Return the public names of a package, such as `packages/kpt-moe`, by module; those of folders come after."""
    source = package / "src"
    found = {}
    for init in [*sorted(source.glob("*/__init__.py")), *sorted(source.glob("*/*/__init__.py"))]:
        module = ".".join(init.parent.relative_to(source).parts)
        if module not in INTERNAL and (names := listed(init)):
            found[module] = names
    return found
