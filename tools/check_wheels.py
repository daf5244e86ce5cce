"""Check built wheels and what they installed: licence and type marker inside, a fitting tag, every entry point loads.

Run where the wheels are installed: `python tools/check_wheels.py dist`.
"""

import sys
import zipfile
from importlib.metadata import distribution
from pathlib import Path


def missing_files(wheel: Path) -> list[str]:
    """Return what a wheel lacks, a sentence for each."""
    package = wheel.name.split("-")[0]
    names = zipfile.ZipFile(wheel).namelist()
    wanted = {"type marker": f"{package}/py.typed", "licence": ".dist-info/licenses/LICENSE"}
    return [
        f"{wheel.name}: no {what} ({ending})"
        for what, ending in wanted.items()
        if not any(name.endswith(ending) for name in names)
    ]


def wrong_tag(wheel: Path) -> list[str]:
    """Return a sentence if a wheel with compiled files is for any platform, or one without them is not."""
    compiled = [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")]
    if bool(compiled) == wheel.name.endswith("-py3-none-any.whl"):
        return [f"{wheel.name}: the tag does not fit its {len(compiled)} compiled files"]
    return []


def broken_entry_points(name: str) -> list[str]:
    """Return the entry points of an installed distribution that don't load, a sentence for each."""
    broken = []
    for point in distribution(name).entry_points:
        try:
            point.load()
        except (ImportError, AttributeError) as error:
            broken.append(f"{name}: entry point {point.group}: {point.name} = {point.value}: {error}")
        else:
            print(f"{name}: {point.group}: {point.name} = {point.value}")
    return broken


def main(dist: Path) -> int:
    """Check every wheel of a folder and return the exit code."""
    wheels = sorted(dist.glob("*.whl"))
    faults = [] if wheels else [f"no wheels in {dist}"]
    for wheel in wheels:
        faults += missing_files(wheel)
        faults += wrong_tag(wheel)
        faults += broken_entry_points(wheel.name.split("-")[0])
    for fault in faults:
        print(fault, file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1])))
