"""The command `kpt export`: a model as a folder that proves itself, and the proof."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .console import print_json, say
from .errors import CliError
from .options import Json

if TYPE_CHECKING:
    from torch import nn

#: What verifying ends with, as `kpt_serve.package.golden` has them, which is not imported to say so.
_WRONG, _BAD = 1, 2


def export(
    spec: Annotated[
        str | None,
        typer.Argument(
            metavar="SPEC",
            help="A Hugging Face folder, or package.module:function that returns a model, its inputs, and perhaps the "
            "ranges of dynamic dimensions: {'x': {0: (1, 64)}}. With --manifests a package.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FOLDER", help="Folder to write, new or empty.")
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Of the package; the folder's if left out. With --manifests of the objects.")
    ] = None,
    plan: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A plan of `kpt optimize` that goes along as kpt_plan.json.")
    ] = None,
    sign: Annotated[
        Path | None, typer.Option("--sign", metavar="KEY", help="Sign the package with this private key, a PEM file.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a package that is there.")] = False,
    verify: Annotated[
        Path | None,
        typer.Option(
            "--verify",
            metavar="FOLDER",
            help="Check a package in a process of its own: its files, this machine, and its golden results.",
        ),
    ] = None,
    key: Annotated[
        Path | None,
        typer.Option("--key", metavar="FILE", help="Verify the signature too, with this public key, a PEM file."),
    ] = None,
    manifests: Annotated[
        Path | None,
        typer.Option(
            "--manifests",
            metavar="FOLDER",
            help="Write what runs a package: a Containerfile, YAML for Kubernetes, and KServe's.",
        ),
    ] = None,
    image: Annotated[
        str | None, typer.Option(metavar="NAME:TAG", help="What the image will be called; for --manifests.")
    ] = None,
    base: Annotated[
        str | None,
        typer.Option(metavar="NAME:TAG", help="Image to build on; python:3.11-slim if left out.", show_default=False),
    ] = None,
    openai: Annotated[
        bool, typer.Option("--openai", help="With --manifests: serve a language model by OpenAI's API.")
    ] = False,
    device: Annotated[
        str | None,
        typer.Option(
            "--device-type",
            help="Where to verify, one of the device types of the package, cpu if left out; with --manifests where to "
            "serve: cpu, cuda or rocm.",
            show_default=False,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a model as a package: program or folder, weights, golden results, and what it needs; or verify or ship one.

    FOLDER appears when all is written, or not at all. `--verify` ends with 1 if results are wrong, and with 2 if the
    package was changed or this machine lacks what it needs.
    """
    if find_spec("kpt_serve") is None:
        raise CliError("kpt export needs kpt-serve, which is not installed: pip install './packages/kpt-cli[serve]'")
    if verify is not None:
        if spec is not None or out is not None:
            raise CliError("--verify takes a package alone; give SPEC and -o in a call of their own")
        if manifests is not None:
            raise CliError("--verify and --manifests take a package each; give them in calls of their own")
        _verify(verify, device or "cpu", key, as_json)
        return
    if manifests is not None:
        if spec is None or image is None or out is not None:
            raise CliError("--manifests FOLDER takes a package, and --image REGISTRY/NAME:TAG")
        # What signs, plans or verifies has no meaning here.
        for option, value in (("--plan", plan), ("--sign", sign), ("--key", key), ("--overwrite", overwrite or None)):
            if value is not None:
                raise CliError(f"{option} is not for --manifests; `kpt export --help` shows what is")
        given = {"image": image, "base": base, "name": name, "openai": openai, "device_type": device}
        _write_manifests(spec, manifests, given, as_json)
        return
    if image is not None or base is not None or openai:
        raise CliError("--image, --base and --openai are for --manifests FOLDER")
    if spec is None or out is None:
        raise CliError("kpt export takes SPEC and -o FOLDER, or --verify FOLDER; `kpt export --help` shows both")
    if plan is not None and not plan.is_file():
        raise CliError(f"--plan {plan} is no file; expected a plan that `kpt optimize -o` wrote")
    if key is not None:
        raise CliError(f"--key {key} is for --verify; --sign takes the private key that signs")
    options = {"name": name or out.resolve().name, "plan": plan, "key": sign, "overwrite": overwrite}
    _write(spec, out, options, as_json)


def _verify(folder: Path, device: str, key: Path | None, as_json: bool) -> None:
    # With -P, since a folder here could have the package's name.
    command = [sys.executable, "-P", "-m", "kpt_serve.package.golden", str(folder), "--device", device]
    command += ["--json"] * as_json + (["--key", str(key)] if key is not None else [])
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    last = (done.stderr.strip().splitlines() or [""])[-1]
    if done.returncode == _BAD:
        raise CliError(last.removeprefix("error: "))
    if done.returncode not in (0, _WRONG) or not done.stdout:
        raise CliError(f"verifying {folder} ended with {done.returncode}: {last or 'it said nothing'}")
    if as_json:
        print_json(json.loads(done.stdout))
    else:
        typer.echo(done.stdout, nl=False)
    if done.returncode:
        raise typer.Exit(done.returncode)


def _write_manifests(package: str, folder: Path, options: dict[str, Any], as_json: bool) -> None:
    from kpt_serve.errors import PackageError
    from kpt_serve.manifests import write_manifests

    try:
        files = write_manifests(package, folder, **options)
    except PackageError as error:
        raise CliError(str(error)) from error
    if as_json:
        print_json({"path": str(folder), "files": files})
        return
    say(f"Wrote {folder}: {', '.join(files)}. Now, with docker, podman or buildah:\n")
    say(f"    docker build -f {folder}/Containerfile -t {options['image']} {package}")
    say(f"    docker push {options['image']}")
    say(f"    kubectl apply -k {folder}        # {folder}/deployment.yaml names the Secret that must exist")


def _write(spec: str, out: Path, options: dict[str, Any], as_json: bool) -> None:
    from .validate.models import check_source

    check_source(spec)
    from kpt_serve.errors import PackageError
    from kpt_serve.package.writing import write_program, write_transformers

    documents = all(map(find_spec, ("huggingface_hub", "jinja2", "cyclonedx")))
    options = {**options, "documents": documents}
    try:
        if Path(spec).is_dir():
            from .optimize.model import quiet_transformers

            quiet_transformers()
            manifest = write_transformers(out, spec, **options)
        else:
            model, inputs, dynamic = _made_by(spec)
            manifest = write_program(out, model, inputs, dynamic=dynamic, **options)
    except PackageError as error:
        raise CliError(str(error)) from error
    if as_json:
        print_json(manifest.as_dict())
        return
    size = sum(file.size for file in manifest.files)
    ops = ", ".join(op.name for op in manifest.ops) or "none"
    say(f"Wrote {out}: {len(manifest.files)} files, {size / 1e6:.1f} MB; ops of KPT: {ops}.")
    if not documents:
        say("It has no card and no bill of materials: pip install 'kpt-serve[card,sbom]'.")
    say(f"Verify it where it is to run: kpt export --verify {out}")


def _made_by(spec: str) -> "tuple[nn.Module, Any, Any]":
    """Return the model, the inputs and the dynamic dimensions that a function gives."""
    import importlib
    import os

    from torch import nn

    from .validate.models import users_code

    module, _, function = spec.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # a console script has its own folder there instead
    try:
        make = getattr(importlib.import_module(module), function, None)
    except ModuleNotFoundError as error:
        raise CliError(f"{spec}: there is no module {error.name} here, nor is there a folder {spec}") from error
    if not callable(make):
        raise CliError(f"{spec}: module {module} has no function {function}")
    with users_code(f"{spec} fails"):
        made = make()
    if not isinstance(made, tuple) or len(made) not in (2, 3) or not isinstance(made[0], nn.Module):
        raise CliError(
            f"{spec} returned a {type(made).__name__}; expected a model and its inputs, and perhaps the ranges of "
            "dynamic dimensions: (model, inputs, {'x': {0: (1, 64)}})"
        )
    return made[0], made[1], made[2] if len(made) == 3 else None
