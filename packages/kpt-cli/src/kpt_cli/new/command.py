"""The command `kpt new`."""

from pathlib import Path
from typing import Annotated

import typer

from kpt_cli.console import print_json, say

app = typer.Typer(help="Write the beginning of a repository that plugs into KPT.", no_args_is_help=True)


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
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Write a backend: a package with a kernel that works, and the conformance suite as its tests."""
    from .backend import Skeleton, write

    skeleton = Skeleton.of(name, device_type)
    folder = path if path is not None else Path(skeleton.distribution)
    files = write(skeleton, folder)
    if as_json:
        print_json({"name": name, "device_type": device_type, "path": str(folder), "files": files})
        return
    say(f"Wrote {folder}: backend {name!r} for {device_type} devices, with kernels for moe.grouped_mm. Now:\n")
    for command, why in (
        (f"cd {folder}", ""),
        (f"nox -s tests{'' if device_type == 'cpu' else ' -- --kpt-device=cpu'}", "runs the conformance suite"),
        ("pip install -e .", "then `kpt kernels moe.grouped_mm` lists its kernels"),
    ):
        say(f"    {command:<40}{'# ' + why if why else ''}".rstrip())
    say("\nIts README.md says what to do next.")
