"""The public names of a package: what its `__all__`, and those of its folders, list; and pages that show them."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
#: Folders that several modules share, which no user imports.
INTERNAL = {"kpt_core.dispatch"}
#: Whose Python blocks run; those that are meant as examples of names first.
PAGES = [
    *sorted(ROOT.glob("docs/by-example/*.md")),
    *sorted(ROOT.glob("docs/*.md")),
    *sorted(ROOT.glob("docs/hardware/*.md")),
    *sorted(ROOT.glob("packages/*/README.md")),
    ROOT / "README.md",
]
_PYTHON = re.compile(r"^```python\n(.*?)^```$", re.M | re.S)
_CODE = {page: "\n".join(_PYTHON.findall(page.read_text(encoding="utf-8"))) for page in PAGES}


def page_showing(name: str) -> Path | None:
    """Return the first page whose code has a name, if there is one."""
    word = re.compile(rf"\b{re.escape(name)}\b")
    return next((page for page, code in _CODE.items() if word.search(code)), None)


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
