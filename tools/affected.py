"""Tell which parts of the gate a change can have touched, for .ci/run: `python tools/affected.py`.

What changed is what differs from the newest commit that is older than twelve hours: so much may land at once. Without
such a commit, as in a shallow clone, and where a file changed that all of it rests on, nothing is left out. Prints
lines for a shell: `parts`, `packages` (whose tests are run), `ops` (how the names begin of those that the suite tries)
and `pages` (of the site, that are looked at); nothing means all of the last two.
"""

import os
import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterable
from functools import cache
from pathlib import Path, PurePath
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
WINDOW = "12 hours ago"
#: In the order of .ci/run.
PARTS = (
    *("lint", "imports", "types", "test", "docs", "site", "pages", "suite", "cpu", "nvidia", "amd", "xpu"),
    *("serve", "wheels", "demo", "bench"),
)
#: Seconds, or about any file.
ALWAYS = frozenset({"lint", "imports", "test", "docs", "site"})
#: Tested where no package changed, so that the command for tests is tried.
SMALLEST = frozenset({"kpt-optimize"})
#: The suite, cases of ops and what ops are made of.
BASE = frozenset({"kpt-core", "kpt-optimize", "kpt-conformance"})
#: Packages with ops, and how the names of these begin.
FEATURES = {"kpt-moe": "moe", "kpt-fp8": "fp8", "kpt-attention": "attention"}
#: Of each hardware target: whose kernels or compilation it is about, beside `BASE`.
TARGETS = {
    "suite": frozenset(FEATURES),
    "cpu": frozenset({*FEATURES, "kpt-backend-cpu"}),
    "nvidia": frozenset({"kpt-moe", "kpt-fp8", "kpt-triton", "kpt-backend-nvidia"}),
    "amd": frozenset({"kpt-triton", "kpt-backend-amd"}),
    "xpu": frozenset({"kpt-triton", "kpt-backend-xpu"}),
}
#: What `kpt serve` is made of.
SERVED = frozenset({"kpt-core", "kpt-serve"})


def name_of(requirement: str) -> str:
    """Return what a requirement is on."""
    return re.split(r"[^\w-]", requirement)[0]


@cache
def project_file(package: str) -> dict[str, Any]:
    """Return what a package's pyproject.toml says."""
    return tomllib.loads((ROOT / "packages" / package / "pyproject.toml").read_text(encoding="utf-8"))


@cache
def siblings(package: str) -> frozenset[str]:
    """Return the package and every package of ours that it or its tests require, directly or through another."""
    file = project_file(package)
    required = [*file["project"]["dependencies"], *file.get("dependency-groups", {}).get("test", ())]
    names = {name_of(requirement) for requirement in required} - {package}
    return frozenset({package}).union(*(siblings(name) for name in names if (ROOT / "packages" / name).exists()))


#: Each package after those that it requires.
PACKAGES = sorted(
    (path.parent.name for path in (ROOT / "packages").glob("*/pyproject.toml")),
    key=lambda package: (len(siblings(package)), package),
)


class Affected(NamedTuple):
    """The parts that are run, and on what; `ops` and `pages` are empty for all of them."""

    parts: tuple[str, ...] = PARTS
    packages: frozenset[str] = frozenset(PACKAGES)
    ops: frozenset[str] = frozenset()
    pages: frozenset[str] = frozenset()


def affected(files: Iterable[str] | None) -> Affected:
    """Return what must be run for a change of some files, given by their paths in the repository; None: all of it."""
    if files is None:
        return Affected()
    changed = [PurePath(file) for file in files]
    touched, pages, every_page = set[str](), set[str](), False
    parts = set(ALWAYS)
    for path in changed:
        top = path.parts[0]
        if path.suffix == ".md" or top == "docs":
            if path.suffix in (".css", ".js"):
                every_page = True
            pages.add(page_of(path))
            parts.add("pages")
        elif top == "packages" and path.parts[1] in PACKAGES:
            touched.add(path.parts[1])
        elif path.parts[:2] == ("tools", "pages"):
            every_page = True
            parts.add("pages")
        elif top not in ("examples", "evidence", "benchmarks", "tools", "mkdocs.yml", "LICENSE", "CITATION.cff"):
            return Affected()  # noxfile, constraints, .ci, conftest.py, the root's pyproject.toml: all rests on them
        elif top in ("tools", "mkdocs.yml") and path.name in ("affected.py", "mkdocs.yml", "site_hooks.py"):
            return Affected()
        if path.suffix == ".py":
            parts.add("types")
        if top == "benchmarks":
            parts.add("bench")
        if top == "examples":  # each is run with the target that it is named for, the others with the CPU's
            parts.add(next((target for target in TARGETS if path.name.startswith(f"{target}_")), "cpu"))
        if top == "tools" and path.name.startswith("check_"):
            parts.add("wheels")
    if touched:
        parts |= {"types", "wheels", "demo", "bench"}
    parts |= {target for target, about in TARGETS.items() if touched & (about | BASE)}
    if touched & SERVED:
        parts.add("serve")
    pages |= {f"reference/{package}.html" for package in touched}
    if touched:
        parts.add("pages")  # the reference, and the demo's report
    ops = frozenset[str]()
    if touched <= {*FEATURES, "kpt-cli"}:
        ops = frozenset(FEATURES[package] for package in touched if package in FEATURES)
    reached = frozenset(package for package in PACKAGES if siblings(package) & touched)
    chosen = tuple(part for part in PARTS if part in parts)
    return Affected(chosen, reached or SMALLEST, ops, frozenset() if every_page else frozenset(pages))


def page_of(path: PurePath) -> str:
    """Return where the site has a file of the documentation (tools/site_hooks.py)."""
    if path.suffix != ".md" or str(path) == "README.md":
        return "index.html"  # which shows pictures too
    page = path.with_name("index.html") if path.name == "README.md" else path.with_suffix(".html")
    return str(page).removeprefix("docs/")


def changed_files() -> list[str] | None:
    """Return the files that differ from the newest commit older than twelve hours; None if there is none."""

    def git(*words: str) -> str | None:
        done = subprocess.run(("git", "-C", str(ROOT), *words), capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else None

    base = git("rev-list", "-1", f"--before={WINDOW}", "HEAD")
    told = git("diff", "--name-only", "--no-renames", base) if base else None
    return None if told is None else told.splitlines()


if __name__ == "__main__":
    found = affected(None if os.environ.get("KPT_GATE") == "whole" else changed_files())
    for kind, names in zip(found._fields, found, strict=True):
        print(f"{kind}={shlex.quote(' '.join(names if kind == 'parts' else sorted(names)))}")
