"""Making our packages importable where they are not installed, and the variables that processes run with."""

import os
import re
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
CHECKOUT = HERE.parents[1]


def install_wheels(wheels: Path, target: Path) -> list[str]:
    """Install all wheels of a folder into another one; no index is asked.

    Raises:
        SystemExit: there are no wheels, or pip fails.
    """
    found = sorted(wheels.glob("*.whl"))
    if not found:
        raise SystemExit(f"--wheels {wheels}: no wheel is there; `nox -s wheels` builds them")
    options = ("--quiet", "--no-index", "--no-deps", "--no-compile", "--upgrade", "--target", target)
    if subprocess.run([sys.executable, "-m", "pip", "install", *options, *found], check=False).returncode:
        raise SystemExit(f"--wheels {wheels}: pip did not install them")
    return [str(target)]


def link_source(checkout: Path, target: Path) -> list[str]:
    """Return folders that make the packages of a checkout importable, their entry points included.

    Entry points are read from metadata that a build makes. Here it is written from each `pyproject.toml`, since nothing
    that builds is needed then.
    """
    paths = [str(target)]
    for file in sorted(checkout.glob("packages/*/pyproject.toml")):
        project: dict[str, Any] = tomllib.loads(file.read_text())["project"]
        module = project["name"].replace("-", "_")
        source = file.parent / "src"
        version = re.search(r'^__version__ = "(.+)"$', (source / module / "__init__.py").read_text(), re.M)
        if version is None:
            raise SystemExit(f"{source / module}/__init__.py has no line `__version__ = ...`")
        folder = target / f"{module}-{version[1]}.dist-info"
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {version[1]}\n")
        groups: dict[str, dict[str, str]] = project.get("entry-points", {})
        lines = [line for group, points in groups.items() for line in (f"[{group}]", *map(" = ".join, points.items()))]
        (folder / "entry_points.txt").write_text("\n".join(lines) + "\n")
        paths.append(str(source))
    return paths


def environment_with(paths: list[str], device: str) -> dict[str, str]:
    """Return variables: our packages, no choice of kernels from outside, and no look at a model hub."""
    env = {name: value for name, value in os.environ.items() if name not in ("KPT_USE", "KPT_DISABLE", "KPT_STRICT")}
    inherited = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    ours = (str(HERE), str(CHECKOUT / "benchmarks"))
    env["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([*paths, *ours, *inherited]))
    env |= {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
    env.pop("TRITON_INTERPRET", None)
    if device == "cpu":
        env["TRITON_INTERPRET"] = "1"
        if any(Path(paths[0]).glob("kpt_backend_cpu*")) if paths else find_spec("kpt_backend_cpu") is not None:
            # Its kernels are for this device, and would serve the calls that are tried here.
            env["KPT_DISABLE"] = "cpu"
    return env
