"""Check a package before torch is imported: its files against its manifest, and the machine against its needs."""

import os
import stat
from collections.abc import Collection, Iterator, Mapping
from importlib import metadata
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion

from kpt_serve.errors import PackageError

from .fields import AGAIN
from .manifest import NAME, UNLISTED, Manifest, describe_file


def check(folder: str | os.PathLike[str], manifest: Manifest) -> None:
    """Raise unless the folder holds the files of the manifest, and nothing else.

    Args:
        folder: The package.
        manifest: What `Manifest.read` returned; a signature, if there is one, is another's to check.

    Raises:
        PackageError: It names the first file that is missing, added, changed, truncated, or no plain file.
    """
    found = dict(_files(Path(folder)))
    listed = {file.path: file for file in manifest.files}
    for path in sorted(listed.keys() - found.keys()):
        raise PackageError(f"{folder}: file {path!r} is missing; {NAME} lists it: {AGAIN}")
    for path in sorted(found.keys() - listed.keys() - {*UNLISTED}):
        raise PackageError(f"{folder}: file {path!r} was added; {NAME} does not list it: remove it, or {AGAIN}")
    # Sizes of all files first, since checksums of large ones take time.
    for path, file in listed.items():
        if found[path] != file.size:
            word = "is truncated" if found[path] < file.size else "was changed"
            raise PackageError(f"{folder}: file {path!r} {word}: it has {found[path]} bytes, not {file.size}; {AGAIN}")
    for path, file in listed.items():
        try:
            sha256 = describe_file(folder, path).sha256
        except OSError as error:
            raise PackageError(f"{folder}: file {path!r} can't be read: {error.strerror}; {AGAIN}") from error
        if sha256 != file.sha256:
            raise PackageError(
                f"{folder}: file {path!r} was changed: its SHA-256 is {sha256}, not {file.sha256}; {AGAIN}"
            )


def check_machine(
    manifest: Manifest,
    *,
    device_type: str,
    capabilities: Collection[str] | None = None,
    versions: Mapping[str, str] | None = None,
) -> None:
    """Raise unless this machine has what a package needs.

    Args:
        manifest: What `Manifest.read` returned.
        device_type: Where the model is to run, as `cuda`.
        capabilities: What the device can do, and the dtypes that kernels serve there. Without it dtypes are not
            checked: who asks a device for them imports torch.
        versions: Versions of distributions, for a machine that is not this one.

    Raises:
        PackageError: It names the first distribution, op, device type or dtype that is not there.
    """
    if device_type not in manifest.device_types:
        known = ", ".join(manifest.device_types)
        raise PackageError(
            f"{manifest.name} runs on {known}; got {device_type!r}: name one of these, or export it for {device_type}"
        )
    for wanted in manifest.distributions:
        found = _version(wanted.name, versions)
        if found is not None and _holds(wanted.versions, found):
            continue
        if wanted.name == "torch" and found is not None and manifest.kind == "program":
            exporter = wanted.versions.removeprefix("==").removesuffix(".*")
            minor = ".".join(found.split(".")[:2])
            raise PackageError(
                f"{manifest.name} was exported by torch {exporter}; {minor} reads other files: "
                f"install torch{wanted.versions}, or export the model again"
            )
        raise PackageError(f"{manifest.name} {_lacks(wanted.name, wanted.versions, found)}")
    for op in manifest.ops:
        found = _version(op.distribution, versions)
        if found is None or not _holds(op.versions, found):
            raise PackageError(f"{manifest.name} {_lacks(op.distribution, op.versions, found, op.name)}")
    if capabilities is not None:
        for dtype in manifest.dtypes:
            if dtype not in capabilities:
                there = ", ".join(sorted(capabilities)) or "nothing"
                raise PackageError(
                    f"{manifest.name} needs {dtype}, which no kernel serves on {device_type} (there is {there}): "
                    "take another device, or export the model in another dtype"
                )


def _version(name: str, versions: Mapping[str, str] | None) -> str | None:
    if versions is not None:
        return versions.get(name)
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _holds(versions: str, found: str) -> bool:
    try:
        return SpecifierSet(versions).contains(found, prereleases=True)
    except InvalidVersion:
        return False


def _lacks(name: str, versions: str, found: str | None, op: str = "") -> str:
    needs = f"needs op {op} of {name} {versions}" if op else f"needs {name} {versions}"
    there = f"{found} is installed" if found is not None else "it is not installed"
    return f"{needs}; {there}: pip install '{name}{versions}'"


def _files(folder: Path, below: str = "") -> Iterator[tuple[str, int]]:
    """Yield the path and size of each file; links, which may lead out of the folder, and devices are refused."""
    try:
        entries = sorted(os.scandir(folder / below), key=lambda entry: entry.name)
    except OSError as error:
        raise PackageError(
            f"{folder / below} can't be read: {error.strerror}; expected the folder of a package"
        ) from error
    for entry in entries:
        path = f"{below}/{entry.name}" if below else entry.name
        status = entry.stat(follow_symlinks=False)
        if stat.S_ISDIR(status.st_mode):
            yield from _files(folder, path)
        elif stat.S_ISREG(status.st_mode):
            yield path, status.st_size
        else:
            kind = "a link" if stat.S_ISLNK(status.st_mode) else "no plain file"
            raise PackageError(f"{folder}: {path!r} is {kind}; a package holds plain files: put the file itself there")
