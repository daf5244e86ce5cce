"""Write a package's bill of materials: the model's files with their checksums, and the distributions that it needs."""

import json
import os
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING
from uuid import UUID, uuid5

from kpt_serve.errors import PackageError

from .manifest import Manifest

if TYPE_CHECKING:
    from cyclonedx.model.license import License

NAME = "sbom.cdx.json"
#: Files that are the model. What KPT writes of it (golden results, card, this file) is not: it is listed elsewhere.
_SUFFIXES = frozenset((".pt2", ".safetensors", ".bin", ".pt", ".pth", ".gguf"))
_GOLDEN = "golden.safetensors"
_NAMESPACE = UUID("0f6b2c1e-6f5b-5d0c-9a53-7e0c1f0a8d11")
#: Older metadata may hold the whole text of a licence where its name belongs.
_LONGEST_NAME = 100


def write_sbom(folder: str | os.PathLike[str], manifest: Manifest) -> Path:
    """Write `sbom.cdx.json`, a bill of materials in CycloneDX 1.6, and return its path.

    The same package and the same installed versions give the same bytes: the serial number is made of the contents, and
    there is a time only where SOURCE_DATE_EPOCH gives one.

    Args:
        folder: The package.
        manifest: Names the model, its files and the distributions that it needs.

    Raises:
        PackageError: A distribution is not installed, SOURCE_DATE_EPOCH is no time, or cyclonedx-python-lib is missing.
    """
    try:
        from cyclonedx.model import HashAlgorithm, HashType
        from cyclonedx.model.bom import Bom, BomMetaData
        from cyclonedx.model.component import Component, ComponentType
        from cyclonedx.output.json import JsonV1Dot6
        from packageurl import PackageURL
    except ImportError as error:
        raise PackageError(f"a bill of materials needs {error.name}: pip install 'kpt-serve[sbom]'") from error

    model = Component(
        type=ComponentType.MACHINE_LEARNING_MODEL,
        name=manifest.name,
        bom_ref="model",
        components=[
            Component(
                type=ComponentType.FILE,
                name=file.path,
                bom_ref=f"file:{file.path}",
                hashes=[HashType(alg=HashAlgorithm.SHA_256, content=file.sha256)],
            )
            for file in manifest.files
            if PurePosixPath(file.path).suffix in _SUFFIXES and file.path != _GOLDEN
        ],
    )
    needed = []
    for name in sorted({each.name for each in manifest.distributions} | {op.distribution for op in manifest.ops}):
        try:
            found = metadata.distribution(name)
        except metadata.PackageNotFoundError as error:
            raise PackageError(
                f"{NAME}: {manifest.name} needs {name}, which is not installed, so its version is not known: "
                f"pip install {name}"
            ) from error
        purl = PackageURL("pypi", None, name, found.version)
        component = Component(
            type=ComponentType.LIBRARY,
            name=name,
            version=found.version,
            bom_ref=purl.to_string(),
            purl=purl,
            licenses=_licences(found),
        )
        needed.append(component)
    time = _time()
    bom = Bom(metadata=BomMetaData(component=model, timestamp=time), components=needed)
    bom.register_dependency(model, needed)
    document = json.loads(JsonV1Dot6(bom).output_as_string())
    del document["serialNumber"]  # a random one
    if time is None:
        del document["metadata"]["timestamp"]  # now
    contents = json.dumps(document, sort_keys=True)
    document["serialNumber"] = uuid5(_NAMESPACE, contents).urn
    path = Path(folder, NAME)
    path.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return path


def _time() -> datetime | None:
    text = os.environ.get("SOURCE_DATE_EPOCH", "")
    if not text:
        return None
    try:
        return datetime.fromtimestamp(int(text), UTC)
    except (ValueError, OverflowError, OSError) as error:
        raise PackageError(
            f"SOURCE_DATE_EPOCH is {text!r}; expected seconds since 1970, as 1764288000: set it so, or unset it"
        ) from error


def _licences(distribution: metadata.Distribution) -> list["License"]:
    """Return what a distribution says of its licence: an expression of SPDX, else a name, else its classifiers."""
    from cyclonedx.contrib.license.factories import LicenseFactory

    fields = distribution.metadata
    for key in ("License-Expression", "License"):
        name = fields[key].strip() if key in fields else ""
        if name and name != "UNKNOWN" and "\n" not in name and (key != "License" or len(name) <= _LONGEST_NAME):
            return [LicenseFactory().make_from_string(name)]
    names = {each.rpartition(" :: ")[2] for each in fields.get_all("Classifier") or [] if each.startswith("License ::")}
    return [LicenseFactory().make_with_name(name) for name in sorted(names)]
