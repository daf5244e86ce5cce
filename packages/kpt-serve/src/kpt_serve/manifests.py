"""Write what runs a package in containers: a Containerfile, objects of Kubernetes, and KServe's.

Nothing here imports torch, nor needs a cluster or a tool of containers.
"""

import json
import os
import re
import shlex
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

from kpt_serve import __version__
from kpt_serve.errors import PackageError

from .package.manifest import Manifest
from .package.signing import NAME as SIGNATURE
from .package.staging import staged

BASE = "python:3.11-slim"
KUBERNETES = tuple(
    f"{kind}.yaml" for kind in ("deployment", "service", "poddisruptionbudget", "horizontalpodautoscaler")
)
#: All that is written; the last is another way to run what the others run.
FILES = ("Containerfile", *KUBERNETES, "kustomization.yaml", "kserve.yaml")
#: Seconds: until new requests stop, since routers hear late of a pod that leaves; for accepted ones; and to end.
SETTLE, GRACE, END = 10, 30, 5
#: By what a pod is given: the resource that it asks for, and the distribution with the kernels.
_DEVICES = {
    "cuda": ("nvidia.com/gpu", "kpt-backend-nvidia"),
    "rocm": ("amd.com/gpu", "kpt-backend-amd"),
    "cpu": ("", "kpt-backend-cpu"),
}
_PARTS = ("container", "pod", "volumes", "scrape")
_LABEL = re.compile(r"[a-z](?:[a-z0-9-]*[a-z0-9])?")
#: Of a label's 63 characters; KServe and Kubernetes append words of their own.
_LONGEST = 40
_COMPONENT = r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*"
_IMAGE = re.compile(
    rf"(?P<name>(?:[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?(?::[0-9]+)?/)?{_COMPONENT}(?:/{_COMPONENT})*)"
    r"(?::(?P<tag>[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}))?(?P<digest>@sha256:[0-9a-f]{64})?"
)
_REQUIREMENT = re.compile(r"[A-Za-z0-9_.\[\],<>=!~*+-]+")


def write_manifests(
    package: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    image: str,
    base: str | None = None,
    name: str | None = None,
    openai: bool = False,
    device_type: str | None = None,
) -> tuple[str, ...]:
    """Write the files that run a package, all or none, and return their names.

    Args:
        package: Its folder.
        folder: Where to write, new or empty.
        image: What the image will be called, with a tag or a digest: `REGISTRY/toy:1`.
        base: The image that it is built on, with Python 3.11 or later and pip; `python:3.11-slim` if left out.
        name: Of the Kubernetes objects; made of the package's if left out.
        openai: Serve a language model by OpenAI's API.
        device_type: cpu, cuda or rocm; a GPU if left out and the package may run on one.

    Raises:
        PackageError: A name is none, the package can't be served so, or the folder is taken.
    """
    manifest = Manifest.read(package)
    if openai and manifest.kind != "transformers":
        raise PackageError(f"{package} is a {manifest.kind}, not a language model: leave out --openai")
    device = _device(manifest, device_type)
    if device == "rocm" and base is None:
        raise PackageError(
            "torch for ROCm is not on PyPI: give an image that has it, such as rocm/pytorch:TAG, as --base"
        )
    signed = Path(package, SIGNATURE).is_file()
    weights = sum(
        file.size for file in manifest.files if file.path.endswith(".safetensors") and file.path != "golden.safetensors"
    )
    # Torch for ROCm calls its devices cuda.
    serve = _command(device if device in manifest.device_types else "cuda", openai, signed)
    extras = ["serve", *["openai"] * openai, *["sign"] * signed]
    values: dict[str, Any] = {
        "package": manifest.name,
        "name": _label(manifest.name, name),
        "image": _image(image, "--image"),
        "base": _image(base or BASE, "--base"),
        "device": device,
        "gpu": _DEVICES[device][0],
        "openai": openai,
        "signed": signed,
        "requirements": _requirements(manifest, extras, _DEVICES[device][1]),
        "command": serve,
        "kserve_command": "until [ -e /mnt/models/kpt-package.json ]; do sleep 1; done; "
        + f'exec kpt serve "$(readlink /mnt/models || echo /mnt/models)" {shlex.join(serve[3:])}',
        "weights": -(-weights >> 20),
        "memory": -(-weights * 12 // 10 >> 20) + 512,
        "startup": 300 + 10 * -(-weights >> 30),
        "live": "/health" if openai else "/v2/health/live",
        "ready": "/ready" if openai else "/v2/health/ready",
        "settle": SETTLE,
        "grace": GRACE,
        "termination": SETTLE + GRACE + END,
    }
    texts = _rendered(values)
    with staged(folder) as part:
        for file, text in texts.items():
            (part / file).write_text(text, encoding="utf-8")
    return FILES


def _rendered(values: dict[str, Any]) -> dict[str, str]:
    try:
        from jinja2 import Environment, PackageLoader, StrictUndefined
    except ImportError as error:
        raise PackageError("manifests need jinja2: pip install 'kpt-serve[card]'") from error
    environment = Environment(
        loader=PackageLoader("kpt_serve"),
        undefined=StrictUndefined,
        autoescape=False,
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["q"] = json.dumps  # JSON's texts and lists are YAML's, and a Containerfile's
    parts = {part: environment.get_template(f"{part}.j2").render(values).rstrip("\n") for part in _PARTS}
    return {file: environment.get_template(f"{file}.j2").render({**values, **parts}) for file in FILES}


def _device(manifest: Manifest, asked: str | None) -> str:
    known = {*manifest.device_types, *["rocm"] * ("cuda" in manifest.device_types)} & _DEVICES.keys()
    if asked is None and known:
        return next(each for each in _DEVICES if each in known)
    if asked is None or asked not in known:
        raise PackageError(
            f"{manifest.name} runs on {', '.join(manifest.device_types)}, and manifests are for {', '.join(_DEVICES)}; "
            f"got {asked or 'none of these'}: export the model for the device, or choose another --device-type"
        )
    return asked


def _command(device: str, openai: bool, signed: bool) -> list[str]:
    command = ["kpt", "serve", "/models", "--host", "0.0.0.0", "--port", "8080", "--device-type", device]
    command += ["--openai"] if openai else ["--grpc-port", "8081"]
    if signed:
        command += ["--key", "/keys/key.pub.pem"]
    elif not openai:  # which asks for no signature
        command += ["--unsigned"]
    return [*command, "--settle", f"{SETTLE}s", "--grace", f"{GRACE}s"]


def _label(package: str, name: str | None) -> str:
    """Return the name of the Kubernetes objects."""
    found = name if name is not None else re.sub("[^a-z0-9]+", "-", package.lower()).strip("-")
    if not _LABEL.fullmatch(found) or len(found) > _LONGEST:
        raise PackageError(
            f"{found!r} is no name for Kubernetes; expected at most {_LONGEST} of a-z, 0-9 and '-', a letter first: "
            "give another by --name"
        )
    return found


def _image(name: str, option: str) -> str:
    found = _IMAGE.fullmatch(name)
    if found is None:
        raise PackageError(f"{option} is {name!r}; expected an image's name, as REGISTRY/toy:1")
    if found["digest"] is None and found["tag"] in (None, "latest"):
        raise PackageError(f"{option} {name} may be another image tomorrow; expected a tag, as {found['name']}:1")
    return name


def _requirements(manifest: Manifest, extras: list[str], backend: str) -> list[str]:
    """Return what pip installs: the server, the device's kernels, and what the package says that it needs."""
    ranges = {name: {*_compatible(name).split(",")} for name in ("kpt-cli", "kpt-serve", backend)}
    needed = [(each.name, each.versions) for each in manifest.distributions]
    for name, versions in [*needed, *((op.distribution, op.versions) for op in manifest.ops)]:
        ranges.setdefault(canonicalize_name(name), set()).update(versions.replace(" ", "").split(","))
    found = []
    for name, each in sorted(ranges.items()):
        asked = f"[{','.join(extras)}]" if name == "kpt-serve" else ""
        requirement = f"{name}{asked}{','.join(sorted(each, reverse=True))}"
        # It becomes a word of a shell.
        if not _REQUIREMENT.fullmatch(requirement):
            raise PackageError(f"{manifest.name} needs {requirement!r}; expected a name and a range, as torch>=2.8")
        found.append(requirement)
    return found


def _compatible(name: str) -> str:
    """Return the range of versions that keep what the installed one promises; of what isn't here, this package's."""
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        version = __version__
    major, minor = (int(part) for part in version.split(".")[:2])
    return f">={major}.{minor},<{f'0.{minor + 1}' if major == 0 else major + 1}"
