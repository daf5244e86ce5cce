"""Check that a package may be released, and what was built of it: version, changelog, tag, files.

Run after the build: `python tools/check_release.py kpt-moe dist [--tag kpt-moe-v0.2.0]`.
"""

import argparse
import re
import sys
import tarfile
import zipfile
from email import message_from_bytes
from pathlib import Path

from check_wheels import missing_files, wrong_tag

ROOT = Path(__file__).parents[1]
#: Files of a wheel that no user needs.
UNWANTED = re.compile(r"(^|/)(tests?|benchmarks|__pycache__|\.git[^/]*)/|\.(pyc|orig|rej|log)$")


def unreleased(package: str, version: str, changelog: str) -> list[str]:
    """Return why a changelog does not fit a release of this version, a sentence each."""
    newest = re.search(r"^## (\d\S*)(?: \((.*)\))?", changelog, re.M)
    if newest is None or newest[1] != version:
        return [f"{package} is {version}, and its CHANGELOG.md begins with {newest[1] if newest else 'no version'}"]
    if newest[2] is None or not re.fullmatch(r"\d{4}-\d{2}-\d{2}", newest[2]):
        return [
            f"CHANGELOG.md of {package} says {newest[0]!r}: replace what is in brackets by the date, as in 2026-11-30"
        ]
    return []


def wrong_wheel(wheel: Path, package: str, version: str) -> list[str]:
    """Return what is wrong with a wheel's files and metadata, a sentence each."""
    module = package.replace("-", "_")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        told = message_from_bytes(archive.read(metadata))
    faults = [f"{wheel.name}: {name} has no place in a wheel" for name in names if UNWANTED.search(name)]
    faults += [
        f"{wheel.name}: {name} lies outside {module}/"
        for name in names
        if not name.startswith((f"{module}/", f"{module}-{version}.dist-info/"))
    ]
    if (told["Name"], told["Version"]) != (package, version):
        faults.append(
            f"{wheel.name}: its metadata is of {told['Name']} {told['Version']}; expected {package} {version}"
        )
    if not str(told.get_payload()).strip():
        faults.append(f"{wheel.name}: it has no description, which the index shows")
    return faults + missing_files(wheel) + wrong_tag(wheel)


def wrong_source(source: Path) -> list[str]:
    """Return what a source distribution lacks to be built and tested from, a sentence each."""
    with tarfile.open(source) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = ("pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE", "tests")
    return [
        f"{source.name}: no {each}"
        for each in wanted
        if each not in names and not any(name.startswith(f"{each}/") for name in names)
    ]


def main() -> int:
    """Check, print every fault, and return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("package")
    parser.add_argument("dist", type=Path)
    parser.add_argument("--tag", help="which the release has; without it a changelog may say (unreleased)")
    asked = parser.parse_args()
    folder = ROOT / "packages" / asked.package
    module = folder / "src" / asked.package.replace("-", "_") / "__init__.py"
    found = re.search(r'^__version__ = "(.+)"$', module.read_text(encoding="utf-8"), re.M)
    version = found[1] if found else ""
    changelog = (folder / "CHANGELOG.md").read_text(encoding="utf-8")
    faults = unreleased(asked.package, version, changelog) if asked.tag else []
    if asked.tag not in (None, f"{asked.package}-v{version}"):
        faults.append(f"the tag {asked.tag} is not {asked.package}-v{version}, which the package is")
    wheels, sources = sorted(asked.dist.glob("*.whl")), sorted(asked.dist.glob("*.tar.gz"))
    if not wheels or not sources:
        faults.append(
            f"{asked.dist} has {len(wheels)} wheels and {len(sources)} source distributions; expected one of each"
        )
    for wheel in wheels:
        faults += wrong_wheel(wheel, asked.package, version)
    for source in sources:
        faults += wrong_source(source)
    for fault in faults:
        print(fault, file=sys.stderr)
    print(f"{asked.package} {version}: {'; '.join(path.name for path in [*wheels, *sources])}")
    return 1 if faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
