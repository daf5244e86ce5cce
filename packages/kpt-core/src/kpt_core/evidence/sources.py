"""The files that a kernel is made of, and their hash: a record is worth what its source is still worth.

A kernel is made of the module that holds it and, in turn, of the modules that this one imports, as far as they are of
the same package or of a package of KPT. They are found by reading `import` statements anywhere in a file, so that an
import inside a function counts and nothing is imported to find out.

Not counted are

- kpt_core and kpt_conformance. Dispatch decides whether a kernel runs, not what it computes, and has tests of its own;
  if it counted, every change of it would make worthless what was proven on devices that are not at hand.
- third parties, whose versions a record names.
- the `__init__.py` of a package that is only passed on the way to a module: it would bring in all of the package. It
  counts where a name is imported from it.
- modules whose name is made up at run time; a kernel that is loaded so should lie in a package whose version changes
  with it.

Files that are no Python count where a module names them in `KERNEL_SOURCES`, a tuple of paths relative to its own. A
package of native code names a list of its sources' digests there, which its build leaves beside the libraries.
"""

import ast
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec, resolve_name
from pathlib import Path

from .record import EvidenceError

#: Packages that no kernel is made of.
NOT_THE_KERNEL = ("kpt_core", "kpt_conformance")
#: The name of the tuple in which a module names files that are no Python.
_OTHER_FILES = "KERNEL_SOURCES"


@dataclass(frozen=True, slots=True)
class Sources:
    """What a kernel is made of.

    Attributes:
        files: by the name of the module; others by that and, after a colon, their path as the module names it.
        third_parties: top-level names of everything else that is imported.
    """

    files: Mapping[str, Path]
    third_parties: frozenset[str]

    @property
    def hash(self) -> str:
        """SHA-256 over names and contents, the same on every machine and for either kind of line ending."""
        digest = hashlib.sha256()
        for name in sorted(self.files):
            digest.update(f"{name} {digest_of(self.files[name].read_bytes())}\n".encode())
        return digest.hexdigest()


def digest_of(content: bytes) -> str:
    """SHA-256 of a text file's content, the same for either kind of line ending."""
    return hashlib.sha256(content.replace(b"\r\n", b"\n")).hexdigest()


def sources_of(modules: Iterable[str]) -> Sources:
    """What the kernel in these modules is made of.

    Args:
        modules: of the kernel's functions.

    Raises:
        EvidenceError: a module's source is not there, or is no Python, or names a file that is not there.
    """
    waiting, files, third_parties = list(modules), dict[str, Path](), set[str]()
    ours = {_top(module) for module in waiting}
    for module in waiting:
        if _locate(module) is None:
            raise EvidenceError(f"the source of module {module!r} is not there; install the package that has it")
    while waiting:
        module = waiting.pop()
        file = None if module in files else _locate(module)
        if file is None:
            continue
        files[module] = file
        if file.suffix != ".py":
            continue
        statements = _statements(file, file.read_bytes())
        files |= _other_files(module, file, statements)
        for imported in _imports(module, file, statements):
            top = _top(imported)
            if top in ours or (top.startswith("kpt_") and top not in NOT_THE_KERNEL):
                waiting.append(imported)
            else:
                third_parties.add(top)
    return Sources(files, frozenset(third_parties))


def _top(module: str) -> str:
    return module.partition(".")[0]


def _locate(module: str) -> Path | None:
    """The file of a module; nothing is imported, as `find_spec` would do with the packages above it."""
    top, *inner = module.split(".")
    try:
        spec = find_spec(top)
    except ValueError:  # a module made at run time
        spec = None
    if spec is None:
        return None
    if not inner:
        return Path(spec.origin) if spec.origin and spec.has_location else None
    for folder in spec.submodule_search_locations or ():
        path = Path(folder, *inner)
        for file in (path / "__init__.py", path.with_name(f"{path.name}.py"), *path.parent.glob(f"{path.name}.*.so")):
            if file.is_file():
                return file
    return None


@lru_cache(maxsize=1024)
def _statements(file: Path, content: bytes) -> tuple[ast.stmt, ...]:
    """The imports of a file and what it names in `KERNEL_SOURCES`; many kernels are made of the same files."""
    try:
        tree = ast.parse(content)
    except (SyntaxError, ValueError) as error:
        raise EvidenceError(f"{file} can't be read as Python: {error}") from None
    assigned = [node for node in tree.body if isinstance(node, ast.Assign | ast.AnnAssign)]
    return (*assigned, *(node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)))


def _other_files(module: str, file: Path, statements: Iterable[ast.stmt]) -> dict[str, Path]:
    """What a module names in `KERNEL_SOURCES`."""
    found = dict[str, Path]()
    for node in statements:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if not any(isinstance(target, ast.Name) and target.id == _OTHER_FILES for target in targets):
            continue
        value = getattr(node, "value", None)
        parts = [ast.unparse(part) for part in value.elts] if isinstance(value, ast.Tuple) else []
        if not parts or not all(part[0] in "'\"" for part in parts):
            raise EvidenceError(f"{file}: a tuple of paths in quotes was expected; got {ast.unparse(node)}")
        for path in map(ast.literal_eval, parts):
            found[f"{module}:{path}"] = file.parent / path
    absent = [str(path) for path in found.values() if not path.is_file()]
    if absent:
        raise EvidenceError(f"{module} is made of {', '.join(absent)}, which is not there; install the package again")
    return found


def _imports(module: str, file: Path, statements: Iterable[ast.stmt]) -> Iterator[str]:
    """The modules that a file imports, those of its own package by their full names."""
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    for node in statements:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = resolve_name("." * node.level + (node.module or ""), package) if node.level else str(node.module)
            for alias in node.names:
                submodule = f"{base}.{alias.name}"
                yield submodule if _locate(submodule) else base
