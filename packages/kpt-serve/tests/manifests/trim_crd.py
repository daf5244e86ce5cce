"""Trim KServe's schemas, which have 2 MB, to the fields that we write; any other field is then an error.

git clone --depth 1 --branch v0.20.0 https://github.com/kserve/kserve
python trim_crd.py kserve/config/crd/full > kserve.schema.json
"""

import json
import sys
from pathlib import Path

import yaml
from test_manifests import VARIANTS, documents, make_package

from kpt_serve.manifests import write_manifests

_KEPT = ("type", "required", "enum", "pattern", "format", "minimum", "maximum", "additionalProperties", "anyOf")


def trim(schema, values):
    """Return what a schema says of these values, without the fields that none of them has."""
    kept = {key: schema[key] for key in _KEPT if key in schema}
    if schema.get("x-kubernetes-int-or-string"):
        kept.pop("type", None)
    if "properties" in schema:
        kept["additionalProperties"] = False
        kept["properties"] = {
            key: trim(each, [value[key] for value in values if key in value])
            for key, each in sorted(schema["properties"].items())
            if any(key in value for value in values)
        }
    if "items" in schema:
        kept["items"] = trim(schema["items"], [each for value in values for each in value])
    return kept


def main(crds, folder):
    """Print the schemas."""
    written = []
    for index, (kwargs, options) in enumerate(VARIANTS.values()):
        package = make_package(folder / f"package{index}", **kwargs)
        write_manifests(package, folder / f"out{index}", image="REGISTRY/toy:1", **options)
        written += documents(folder / f"out{index}" / "kserve.yaml")
    found = {}
    for kind in ("ServingRuntime", "InferenceService"):
        definition = yaml.safe_load((crds / f"serving.kserve.io_{kind.lower()}s.yaml").read_text())
        values = [each for each in written if each["kind"] == kind]
        version = values[0]["apiVersion"].rpartition("/")[2]
        (schema,) = (
            each["schema"]["openAPIV3Schema"] for each in definition["spec"]["versions"] if each["name"] == version
        )
        found[kind] = trim(schema, values)
        found[kind]["properties"]["metadata"] = {"type": "object"}  # of Kubernetes itself, as every object's
    print(json.dumps({"origin": "kserve/kserve at aaac4e2 (v0.20.0), config/crd/full", **found}, indent=1))


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        main(Path(sys.argv[1]), Path(name))
