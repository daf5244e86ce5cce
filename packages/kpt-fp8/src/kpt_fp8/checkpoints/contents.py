"""What a checkpoint holds, from its headers and configuration alone: `describe`."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch

from kpt_core import InputError
from kpt_fp8.scales import BLOCKS, scale_shape

from .folder import CheckpointFolder, Stored, TensorReader
from .formats import FORMATS, Format, format_of, module_of
from .scheme import CODES, SCALES, QuantizedWeight, Scheme

#: Names that scales have been given, and what they mean to the one or the other library.
_SCALE_ENDINGS = ("_scale", "_scale_inv", "_scale_2")
_E5M2 = (
    "weights of e5m2 are read by no format here, and no device multiplies them by activations of e5m2: quantise the "
    "model to e4m3"
)


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A quantised weight: its name in the model, the codes' shape, and the names of its tensors in the files."""

    name: str
    shape: tuple[int, ...]
    codes: str
    scale: str
    input_scale: str | None

    def read(self, reader: TensorReader, scheme: Scheme) -> QuantizedWeight:
        """The weight; its codes are as the file has them."""
        scale = reader.tensor(self.scale).to(torch.float32)
        given = None if self.input_scale is None else reader.tensor(self.input_scale).to(torch.float32).reshape(())
        return QuantizedWeight(
            reader.tensor(self.codes),
            scale.reshape(scale_shape(self.shape, scheme.granularity)),
            scheme.granularity,
            given,
        )


@dataclass(slots=True)
class Contents:
    """What a checkpoint holds; format and scheme are None where it is not quantised.

    Quantised weights and plain tensors are by name, faults are sentences about what is wrong.
    """

    folder: CheckpointFolder
    format: Format | None = None
    scheme: Scheme | None = None
    weights: dict[str, StoredWeight] = field(default_factory=dict)
    plain: dict[str, Stored] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    def require_good(self) -> None:
        """Raise `InputError` with the first fault, if there is one."""
        if self.faults:
            more = f" (and {len(self.faults) - 1} more: check_checkpoint lists them)" if len(self.faults) > 1 else ""
            raise InputError(self.faults[0] + more)


def describe(folder: CheckpointFolder) -> Contents:
    """Look at headers and configuration; whatever is wrong is a sentence in `faults`."""
    found = Contents(folder, faults=list(folder.faults))
    codes = [each for each in folder.tensors.values() if each.dtype in CODES]
    try:
        config = folder.quantization
        if config is not None:
            found.format = format_of(config)
            found.scheme = found.format.read_config(config)
    except InputError as error:
        found.faults.append(str(error))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        found.faults.append(f"{folder.path}: quantization_config has an unexpected form ({error!r}): write it again")
    if found.format is None or found.scheme is None:
        if codes and not found.faults:
            found.faults.append(
                f"{codes[0].name} is {CODES[codes[0].dtype]} and config.json has no quantization_config that says how "
                f"it is scaled: add one of {', '.join(repr(each.method) for each in FORMATS.values())}"
            )
        found.plain = dict(folder.tensors)
        return found
    if not codes and not folder.faults:
        found.faults.append(
            f"{folder.path}: quantization_config says {found.format.method!r}, and no tensor is 8-bit: remove "
            "quantization_config, or quantise the weights"
        )
    used: set[str] = set()
    for each in codes:
        used.add(each.name)
        used.update(_add(found, found.format, found.scheme, each))
    found.plain = {name: each for name, each in folder.tensors.items() if name not in used}
    try:
        found.faults.extend(_strays(found, found.format))
    except InputError as error:
        found.faults.append(str(error))
    except re.error as error:
        found.faults.append(
            f"{folder.path}: quantization_config names a module left out by {error.pattern!r}, which is no regular "
            f"expression ({error}): readers take it for one, so write the name itself"
        )
    if any(folder.tensors[weight.scale].dtype == "BF16" for weight in found.weights.values()):
        found.scheme = replace(found.scheme, scale_dtype=torch.bfloat16)
    return found


def _add(found: Contents, form: Format, scheme: Scheme, codes: Stored) -> set[str]:
    """Add a weight or faults; returns the other tensors that belong to it."""
    tensors, name = found.folder.tensors, form.weight_name(codes.name)
    scale, given = form.scale_name(name), form.input_scale_name(name)
    belonging = {each for each in (scale, given) if each in tensors}
    faults = list(_wrong_codes(found, scheme, codes)) or list(_wrong_scale(tensors, form, scheme, codes, name))
    if scheme.static and not faults:
        held = tensors.get(given)
        if held is None:
            faults.append(f"{name} has no {given}, the static scale of its activations: calibrate and write it again")
        elif max(held.shape, default=1) != 1 or held.dtype not in SCALES:
            faults.append(f"{given} must be one number; got {held.dtype} {list(held.shape)}: write it again")
    if not faults:
        found.weights[name] = StoredWeight(name, codes.shape, codes.name, scale, given if scheme.static else None)
    found.faults.extend(faults)
    return belonging


def _wrong_codes(found: Contents, scheme: Scheme, codes: Stored) -> Iterator[str]:
    dtype = CODES[codes.dtype]
    if dtype in (torch.float8_e5m2, torch.float8_e5m2fnuz):
        yield f"{codes.name} is {dtype}: {_E5M2}"
    elif dtype is not scheme.dtype:
        yield (
            f"{codes.name} is {dtype}, and quantization_config says {scheme.dtype}, in which the same bits are other "
            "numbers: correct the one that is wrong"
        )
    elif len(codes.shape) != 2:
        yield (
            f"{codes.name} is 8-bit of shape {list(codes.shape)}; KPT reads matrices, of experts one by one: split it, "
            "or load it with the library that wrote it"
        )


def _wrong_scale(tensors: dict[str, Stored], form: Format, scheme: Scheme, codes: Stored, name: str) -> Iterator[str]:
    wanted = form.scale_name(name)
    held = tensors.get(wanted)
    if held is None:
        other = next((found for end in _SCALE_ENDINGS if (found := f"{name}{end}") in tensors), None)
        if other is not None:
            yield f"{name} has its scale as {other}; {form.name} names it {wanted}: rename it, if it multiplies"
        else:
            yield f"{name} is 8-bit and has no scale {wanted}: write the checkpoint again"
        return
    if held.dtype not in SCALES:
        yield f"{wanted} must be {', '.join(SCALES)}; got {held.dtype}: write it again"
    expected = form.stored_shape(codes.shape, scheme.granularity)
    # One number is written with and without a dimension, and so are those of rows.
    rows = codes.shape[0]
    alike = {"tensor": max(held.shape, default=1) == 1, "row": held.shape in ((rows,), (rows, 1))}
    if list(held.shape) == expected or alike.get(scheme.granularity):
        return
    others = [each for each in BLOCKS if _fits(held.shape, codes.shape, each)]
    if list(held.shape) == expected[::-1]:
        reason = "it is transposed"
    elif others:
        reason = f"that is a scale per {others[0]}, and a checkpoint has one scheme"
    else:
        reason = "it fits no scheme"
    yield (
        f"{wanted} must be {expected} for {name} {list(codes.shape)} with scales per {scheme.granularity}; "
        f"got {list(held.shape)}: {reason}, so write it again"
    )


def _fits(shape: tuple[int, ...], weight: tuple[int, ...], granularity: str) -> bool:
    return [each for each in shape if each != 1] == [each for each in scale_shape(weight, granularity) if each != 1]


def _strays(found: Contents, form: Format) -> Iterator[str]:
    """Scales without a weight, and weights that a reader expects to be quantised."""
    for name in found.plain:
        owner = next((name.removesuffix(end) for end in _SCALE_ENDINGS if name.endswith(f".weight{end}")), None)
        if owner is not None and owner not in found.weights and found.plain.get(owner) is not None:
            yield (
                f"{name} is a scale, and {owner} is {found.plain[owner].dtype}, not 8-bit: readers would scale it "
                "again, so remove the scale, or quantise the weight"
            )
    config = found.folder.quantization or {}
    quantised = {module_of(name).rpartition(".")[2] for name in found.weights}
    for name, each in found.plain.items():
        module = module_of(name)
        matrix = name.endswith(".weight") and len(each.shape) == 2
        if matrix and module.rpartition(".")[2] in quantised and not form.skips(config, module):
            yield (
                f"{name} is {each.dtype} where others of its kind are 8-bit, and quantization_config does not name "
                f"{module} among those left out: add it there, or quantise it"
            )
    for name in found.weights:
        if form.skips(config, module_of(name)):
            yield (
                f"{name} is 8-bit, and quantization_config names {module_of(name)} among those left out: readers would "
                "take its codes for numbers, so remove it there"
            )
