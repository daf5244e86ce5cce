"""A backend's repository, from templates: checked before it is written, written whole or not at all."""

import keyword
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path, PurePosixPath
from typing import Any, Self

from kpt_cli.errors import CliError
from kpt_cli.optimize.output_directory import staged

#: Of KPT itself: what is no kernel, and the backends of its own repository.
RESERVED = ("reference", "torch", "cpu", "nvidia", "amd", "tpu", "xpu")
#: Stands for the import name in the paths of templates.
_PACKAGE = "PACKAGE"


@dataclass(frozen=True, slots=True, kw_only=True)
class Skeleton:
    """What the templates are filled with.

    Attributes:
        name: of the backend.
        device_type: torch's type of its devices.
        distribution: name of the distribution and of the repository.
        package: import name.
        class_name: of the class of the backend.
        requirements: on KPT's packages, by their name.
    """

    name: str
    device_type: str
    distribution: str
    package: str
    class_name: str
    requirements: dict[str, str]

    @classmethod
    def of(cls, name: str, device_type: str) -> Self:
        """The skeleton of a backend.

        Raises:
            CliError: the name or the device type is none.
        """
        if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name) or keyword.iskeyword(name):
            raise CliError(
                f"{name!r} is no name for a backend; expected lower-case letters, digits and single underscores, "
                "beginning with a letter, for instance 'acme' or 'acme_x1'"
            )
        if name in RESERVED:
            raise CliError(f"the name {name!r} is KPT's own, like {', '.join(RESERVED)}; choose another one")
        if not re.fullmatch(r"[a-z][a-z0-9_]*", device_type):
            raise CliError(
                f"--device-type {device_type} is no device type of torch; expected cpu, cuda, xpu... and no index"
            )
        return cls(
            name=name,
            device_type=device_type,
            distribution=f"kpt-backend-{name.replace('_', '-')}",
            package=f"kpt_backend_{name}",
            class_name=f"{name.title().replace('_', '')}Backend",
            requirements={each: each + _range(each) for each in ("kpt-core", "kpt-moe", "kpt-conformance")},
        )


def _range(distribution: str) -> str:
    """The versions that are like the installed one: `>=0.1,<0.2`; none if nothing is installed."""
    try:
        major, minor, *_ = map(int, re.findall(r"\d+", version(distribution)))
    except PackageNotFoundError:
        return ""
    return f">=0.{minor},<0.{minor + 1}" if major == 0 else f">={major}.{minor},<{major + 1}"


def write(skeleton: Skeleton, folder: Path) -> list[str]:
    """Write the repository.

    Args:
        skeleton: what it is.
        folder: the place; must be empty if it exists.

    Returns:
        The files, relative to the folder.

    Raises:
        CliError: the place is taken, or there is none.
    """
    real = folder.resolve()
    if real.exists() and not real.is_dir():
        raise CliError(f"{folder} is a file; name a folder that does not exist yet with --path")
    if real.is_dir() and any(real.iterdir()):
        raise CliError(f"{folder} exists and is not empty; name another folder with --path")
    if not real.parent.is_dir():
        raise CliError(f"the folder {real.parent} does not exist; make it first, or name another one with --path")
    files = dict(_rendered(skeleton))
    with staged(real) as staging:
        for name, text in files.items():
            file = staging / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
    return sorted(files)


def _rendered(skeleton: Skeleton) -> Iterator[tuple[str, str]]:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("kpt_cli.new", "templates/backend"),
        undefined=StrictUndefined,
        autoescape=False,
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    values: dict[str, Any] = asdict(skeleton)
    for template in environment.list_templates(extensions=["j2"]):
        path = PurePosixPath(template.removesuffix(".j2").replace(_PACKAGE, skeleton.package))
        # A template named .gitignore would hide its neighbours from git and from the build.
        name = str(path.with_name(".gitignore") if path.name == "gitignore" else path)
        yield name, environment.get_template(template).render(values)
