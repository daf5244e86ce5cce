"""The command `kpt new`: the beginning of a repository that plugs into KPT, written whole or not at all."""

import keyword
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated, Self

import typer

from .console import print_json, say
from .errors import CliError
from .options import GROUP, Json
from .output_file import check_new_folder, staged
from .plugins import installed_version

#: Of KPT itself: what is no kernel, and the backends of its own repository.
RESERVED = ("reference", "torch", "cpu", "nvidia", "amd", "tpu", "xpu", "ipex")

app = typer.Typer(help="Write the beginning of a repository that plugs into KPT.", **GROUP)


@app.callback()
def new() -> None:
    """Write the beginning of a repository that plugs into KPT."""


@app.command()
def backend(
    name: Annotated[str, typer.Argument(metavar="NAME", help="What `use` and KPT_USE will call it, such as acme.")],
    path: Annotated[
        Path | None,
        typer.Option(
            "--path", metavar="DIR", help="The folder to write. [default: kpt-backend-NAME]", show_default=False
        ),
    ] = None,
    device_type: Annotated[
        str, typer.Option("--device-type", metavar="TYPE", help="Torch's type of the devices: cpu, cuda, xpu...")
    ] = "cpu",
    as_json: Json = False,
) -> None:
    """Write a backend: a package with a kernel that works, and the conformance suite as its tests."""
    skeleton = Skeleton.of(name, device_type)
    folder = path if path is not None else Path(skeleton.distribution)
    files = _write(skeleton, folder)
    if as_json:
        print_json({"name": name, "device_type": device_type, "path": str(folder), "files": files})
        return
    say(f"Wrote {folder}: backend {name!r} for {device_type} devices, with kernels for moe.grouped_mm. Now:\n")
    say(f"    cd {folder}")
    tests = f"nox -s tests{'' if device_type == 'cpu' else ' -- --kpt-device=cpu'}"
    say(f"    {tests:<40}# runs the conformance suite")
    say(f"    {'pip install -e .':<40}# then `kpt kernels moe.grouped_mm` lists its kernels")
    say("\nKPT is on no package index yet, so tests take it from wheels, which are made in its clone once:\n")
    say("    pip wheel --no-deps -w wheels ./packages/kpt-{core,optimize,moe,conformance}")
    say("    export PIP_FIND_LINKS=$PWD/wheels")
    say(f"\n{folder}/README.md says what to do next.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Skeleton:
    """The values that fill the templates."""

    name: str  # of the backend
    device_type: str  # torch's type of its devices
    distribution: str  # name of the distribution and of the repository
    package: str  # import name
    class_name: str  # of the class of the backend
    requirements: dict[str, str]  # on KPT's packages, by their name

    @classmethod
    def of(cls, name: str, device_type: str) -> Self:
        """Return the skeleton of a backend, or raise `CliError` if the name or the device type is none."""
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
    """Return the versions that are like the installed one, `>=0.1,<0.2`; "" if nothing is installed."""
    installed = installed_version(distribution)
    if installed is None:
        return ""
    major, minor, *_ = map(int, re.findall(r"\d+", installed))
    return f">=0.{minor},<0.{minor + 1}" if major == 0 else f">={major}.{minor},<{major + 1}"


def _write(skeleton: Skeleton, folder: Path) -> list[str]:
    """Write the repository into a folder that is new or empty; return its files, relative to it."""
    real = check_new_folder(folder, f"--path {folder}", "exists and is not empty; choose another folder")
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
        loader=PackageLoader("kpt_cli", "templates/backend"),
        undefined=StrictUndefined,
        autoescape=False,
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    for template in environment.list_templates(extensions=["j2"]):
        path = PurePosixPath(template.removesuffix(".j2").replace("PACKAGE", skeleton.package))
        # A template named .gitignore would hide its neighbours from git and from the build.
        name = str(path.with_name(".gitignore") if path.name == "gitignore" else path)
        yield name, environment.get_template(template).render(asdict(skeleton))
