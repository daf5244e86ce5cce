"""Write a package: a model as a program beside its weights, or a Hugging Face folder as it is, whole or not at all."""

import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import torch
from torch import nn

import kpt_core
from kpt_serve.errors import PackageError

from . import golden, references
from .card import write_card
from .exporting import Arguments, Dynamic, Inputs, called_ops, describe_tensor, evaluating, export, inputs_of, save
from .fields import is_plain
from .manifest import UNLISTED, Dimension, Distribution, Manifest, RequiredOp, Tensor, Tolerance, describe_file
from .sbom import write_sbom
from .signing import sign
from .staging import staged
from .weights import PROGRAM, Weights

#: What reads the programs that this torch writes.
_SAME_TORCH = f"=={'.'.join(torch.__version__.split('.')[:2])}.*"
#: What kpt-core asks for.
_TORCH = ">=2.8"
_PLAN = "kpt_plan.json"
#: Float32 summed by another instruction set was 1.3 times as far off in the mean (docs/decisions/0025).
TOLERANCE = Tolerance(mean=2.0, max=4.0)


def write_program(
    folder: str | os.PathLike[str],
    model: nn.Module,
    inputs: Inputs,
    *,
    name: str,
    dynamic: Dynamic | None = None,
    outputs: Sequence[str] | None = None,
    device_types: Sequence[str] | None = None,
    tolerance: Tolerance = TOLERANCE,
    seed: int = 0,
    plan: str | os.PathLike[str] | None = None,
    documents: bool = False,
    key: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
) -> Manifest:
    """Write a model as a package: its program, its weights, golden results and the manifest.

    Args:
        folder: New or empty. It appears when all is written, or not at all.
        model: In evaluation mode while it is exported; it is left as it was.
        inputs: A tensor, a sequence of positional arguments, or a mapping of keyword arguments. What is no tensor is
            fixed in the program. A dimension that is dynamic has at least 2 here: torch takes a size of 1 for fixed.
        name: Of the package.
        dynamic: By the name of an input and the axis, the smallest and largest size, None for no limit:
            `{"x": {0: (1, 64)}}`. Dimensions that are always equal share a name: `{0: ("batch", 1, 64)}`.
        outputs: Names of the results, in their order; those that the model gives them if left out.
        device_types: Where the program may run; where it is exported if left out.
        tolerance: How far from the golden results an answer may be, as multiples of the error here.
        seed: Of the golden inputs that are drawn.
        plan: A file that goes along as `kpt_plan.json`.
        documents: Write a card and a bill of materials, see `write_card` and `write_sbom`.
        key: Sign the package with this private key, see `sign`.
        overwrite: Replace a package that is there.

    Raises:
        PackageError: The model can't be exported, or the program would hold what no reader takes; or the folder is
            taken, or can't be written.
    """
    given = Arguments.of(model, inputs)
    weights = Weights.of(model)
    devices = {tensor.device.type for tensor in (*weights.flat.values(), *given.tensors.values())}
    if len(devices) > 1:
        raise PackageError(f"the model and its inputs are on {' and '.join(sorted(devices))}; expected one device")
    with staged(folder, overwrite=overwrite) as staging, evaluating(model), torch.no_grad():
        program, results = export(model, weights, given, dynamic or {})
        results = _renamed(results, outputs)
        values = next(node for node in program.graph.nodes if node.op == "output").args[0]
        described_outputs = tuple(
            describe_tensor(result, value.meta["val"], program) for result, value in zip(results, values, strict=True)
        )
        described_inputs = tuple(
            describe_tensor(each, placeholder.meta["val"], program)
            for each, placeholder in zip(given.tensors, inputs_of(program, len(weights.flat)), strict=True)
        )
        weights.save(staging)
        save(program, staging / PROGRAM)
        if plan is not None:
            shutil.copyfile(plan, staging / _PLAN)
        dtypes = {tensor.dtype for tensor in (*weights.flat.values(), *given.tensors.values())}
        dtypes |= {value.meta["val"].dtype for value in values}
        manifest = Manifest(
            name=name,
            kind="program",
            inputs=described_inputs,
            outputs=described_outputs,
            ops=tuple(map(required_op, called_ops(program))),
            device_types=tuple(device_types or sorted(devices or {"cpu"})),
            dtypes=tuple(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes)),
            distributions=(_installed("kpt-core"), Distribution("torch", _SAME_TORCH)),
            tolerance=tolerance,
            files=(),
        )
        references.write_program_results(staging, manifest, model, weights, given, dynamic or {}, seed)
        return finish(staging, manifest, documents=documents, key=key)


def write_transformers(
    folder: str | os.PathLike[str],
    source: str | os.PathLike[str],
    *,
    name: str,
    plan: str | os.PathLike[str] | None = None,
    device_types: Sequence[str] = ("cpu",),
    tolerance: Tolerance = TOLERANCE,
    tokens: int = 16,
    seed: int = 0,
    documents: bool = False,
    key: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
) -> Manifest:
    """Write the folder of a Hugging Face language model as a package: its files byte for byte, and KPT's beside them.

    Weights are linked where the disk can do that, so that they take no room twice: don't change them in place. Hidden
    files stay behind. The golden results take memory for the model in 64 bits.

    Args:
        folder: New or empty. It appears when all is written, or not at all.
        source: A folder with config.json and weights in safetensors.
        name: Of the package.
        plan: A file that goes along as `kpt_plan.json`.
        documents: Write a card and a bill of materials, see `write_card` and `write_sbom`.
        key: Sign the package with this private key, see `sign`.
        device_types: Where the model may run. The golden results are made on the CPU.
        tolerance: How far from the golden results an answer may be, as multiples of the error here.
        tokens: Of the longest golden input.
        seed: Of the golden inputs.
        overwrite: Replace a package that is there.

    Raises:
        PackageError: The source is no such folder, the model can't be run, or the folder is taken, or can't be written.
    """
    source = Path(source)
    if not (source / "config.json").is_file() or not any(source.glob("*.safetensors")):
        raise PackageError(f"{source} is no model; expected a folder with config.json and weights in safetensors")
    if Path(folder).resolve() == source.resolve():
        raise PackageError(f"{source} is source and target; expected another folder for the package")
    with staged(folder, overwrite=overwrite) as staging:
        _copy(source, staging, {*UNLISTED, golden.FILE, *([_PLAN] if plan is not None else [])})
        if plan is not None:
            shutil.copyfile(plan, staging / _PLAN)
        made = references.write_text_results(staging, tokens, seed)
        needs = {"kpt-core", "transformers", *(["kpt-fp8"] if made.quantized else [])}
        manifest = Manifest(
            name=name,
            kind="transformers",
            inputs=(Tensor("input_ids", "INT64", (-1, -1), (Dimension(0, 1), Dimension(1, 1, made.longest))),),
            outputs=(
                Tensor(
                    "logits",
                    made.datatype,
                    (-1, -1, made.vocabulary),
                    (Dimension(0, 1), Dimension(1, 1, made.longest)),
                ),
            ),
            ops=tuple(map(required_op, made.ops)),
            device_types=tuple(device_types),
            dtypes=made.dtypes,
            distributions=(*map(_installed, sorted(needs)), Distribution("torch", _TORCH)),
            tolerance=tolerance,
            files=(),
        )
        return finish(staging, manifest, documents=documents, key=key)


def _copy(source: Path, target: Path, without: set[str]) -> None:
    """Link or copy every file of a folder that is not hidden; links of a cache are followed."""
    for path in sorted(source.rglob("*")):
        inside = path.relative_to(source)
        if not path.is_file() or str(inside) in without or any(part.startswith(".") for part in inside.parts):
            continue
        if not all(map(is_plain, inside.parts)):
            raise PackageError(f"{path} has no plain name; expected letters, digits and '_.+@ -': rename the file")
        (target / inside).parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".safetensors":
            try:
                os.link(path.resolve(), target / inside)
                continue
            except OSError:
                pass  # on another disk, or one without links
        shutil.copyfile(path, target / inside)


def finish(
    folder: Path, manifest: Manifest, *, documents: bool = False, key: str | os.PathLike[str] | None = None
) -> Manifest:
    """Write the manifest with the files that the folder has, and return it: again if some were added.

    With `documents` a card and a bill of materials are added before, and `key` signs all.
    """
    if documents:
        whole = finish(folder, manifest)  # which files there are is in the bill of materials
        write_card(folder, whole, errors=golden.Golden.read(folder).errors)
        write_sbom(folder, whole)
    found = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    files = tuple(describe_file(folder, path) for path in sorted(found.difference(UNLISTED)))
    whole = replace(manifest, files=files)
    whole.write(folder)
    if key is not None:
        sign(folder, key)
    return whole


def _renamed(results: Sequence[str], outputs: Sequence[str] | None) -> tuple[str, ...]:
    if outputs is None:
        return tuple(results)
    if len(outputs) != len(results) or len(set(outputs)) != len(outputs):
        found = ", ".join(results)
        raise PackageError(f"outputs={list(outputs)} for {len(results)} results ({found}); expected a name for each")
    return tuple(outputs)


def required_op(name: str) -> RequiredOp:
    """Return what a package says of an op: the distribution that declares it, and the versions that fit.

    Raises:
        PackageError: No installed distribution declares the op.
    """
    package = kpt_core.get_op(name).defined_in.partition(".")[0].partition(":")[0]
    for entry in metadata.entry_points(group="kpt.ops"):
        if entry.module.partition(".")[0] == package and entry.dist is not None:
            return RequiredOp(name, entry.dist.name, compatible(entry.dist.version))
    raise PackageError(
        f"op {name!r} is defined in {package}, which no installed distribution lists under 'kpt.ops'; expected an "
        "installed package, so that others can be told which one they need"
    )


def compatible(version: str) -> str:
    """Return the range of versions that keep what a version promises: `>=0.1,<0.2`, and from 1.0 on `>=1.2,<2`."""
    major, minor = (int(part) for part in version.split(".")[:2])
    return f">={major}.{minor},<{f'0.{minor + 1}' if major == 0 else major + 1}"


def _installed(name: str) -> Distribution:
    return Distribution(name, compatible(metadata.version(name)))
