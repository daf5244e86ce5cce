"""The file of a golden trace: one safetensors file, written whole or not at all, checked when it is read."""

import hashlib
import json
import secrets
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kpt_cli.errors import CliError

from .bounds import Rounding
from .model_source import check_trace_file

FORMAT = 1
_FORMAT_KEY, _ABOUT_KEY, _DIGEST_KEY = "kpt.trace", "kpt.about", "kpt.about_sha256"
#: Dtypes that a recorder may have had.
_DTYPES = ("float64", "float32", "bfloat16", "float16")
#: The tensors that are kept of a call.
_SIDES = ("inputs", "outputs", "reference", "alone", "handed")
#: What stands in an argument's place in the metadata, with the name of the tensor.
_TENSOR = "tensor"


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of one module.

    Attributes:
        key: the module's path, with `#2` and so on for further calls of it; of a gradient, what it belongs to.
        type: name of its class, or `gradient`.
        inputs: the tensors among its arguments, in order, on the CPU.
        outputs: the tensors that it gave, before any steering.
        kernels: what served KPT's ops in it, as `op: kernel`.
        lengths: over how many terms its own sums go, see `own_lengths`.
    """

    key: str
    type: str
    inputs: tuple[Tensor, ...] = ()
    outputs: tuple[Tensor, ...]
    kernels: tuple[str, ...] = ()
    lengths: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer(Call):
    """A call as the recorder saw it, and float64 beside it.

    Attributes:
        reference: what it gave in float64, where everything before it ran in float64 too.
        alone: what it gives in float64 on the recorder's inputs, its children's results being the recorder's too.
        handed: what the code around it hands to it in float64, where all results of modules are the recorder's.
        upto: what was summed and rounded up to its end, itself included.
    """

    reference: tuple[Tensor, ...]
    alone: tuple[Tensor, ...] = ()
    handed: tuple[Tensor, ...] = ()
    upto: Rounding


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """What a trace was recorded from, and how.

    Attributes:
        model: how the user named it, `""` if it was recorded from Python.
        model_class: its class.
        config: its configuration as JSON, empty if it has none.
        weights: digest of each saved tensor by name.
        dtype: of most of its weights.
        load_dtype: what it is loaded in, `auto` if nothing is to be converted.
        device: the device's name.
        arm: what served experts and ops, see `Arm`.
        versions: of Python, torch, transformers and KPT's packages.
        date: when, ISO 8601 in UTC.
        said: a sentence on the inputs.
    """

    model: str
    model_class: str
    config: dict[str, Any]
    weights: dict[str, str]
    dtype: str
    load_dtype: str
    device: str
    arm: str
    versions: dict[str, str]
    date: str
    said: str = ""

    def __post_init__(self) -> None:
        texts = (self.model, self.model_class, self.device, self.arm, self.date, self.said)
        tables = (self.config, self.weights, self.versions)
        if not (all(isinstance(x, str) for x in texts) and all(isinstance(x, dict) for x in tables)):
            raise TypeError("a text or a table is something else")
        if self.dtype not in _DTYPES:
            raise ValueError(f"dtype {self.dtype!r}; expected one of {', '.join(_DTYPES)}")
        if self.load_dtype not in ("auto", *_DTYPES):
            raise ValueError(f"dtype {self.load_dtype!r} to load; expected auto or one of {', '.join(_DTYPES)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """A model's numbers on some inputs.

    Attributes:
        about: what was recorded.
        args: positional arguments of the model, tensors and plain values.
        kwargs: keyword arguments.
        layers: calls in the order in which they ended.
        gradients: of the parameters and the embeddings, if they were asked for.
    """

    about: About
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    layers: tuple[Layer, ...]
    gradients: tuple[Layer, ...] = ()

    def save(self, path: Path) -> None:
        """Write the file, whole or not at all.

        Raises:
            CliError: an argument of the model is neither a tensor nor a plain value.
        """
        from safetensors.torch import save_file

        table: dict[str, Tensor] = {}
        about = {
            "about": asdict(self.about),
            "inputs": _encode([list(self.args), self.kwargs], table),
            "layers": [_describe(layer, table) for layer in self.layers],
            "gradients": [_describe(layer, table) for layer in self.gradients],
        }
        text = json.dumps(about)
        metadata = {_FORMAT_KEY: str(FORMAT), _ABOUT_KEY: text, _DIGEST_KEY: hashlib.sha256(text.encode()).hexdigest()}
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        try:
            save_file(table, temporary, metadata)
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

    @classmethod
    def load(cls, path: Path) -> "Trace":
        """Read and check a file.

        Raises:
            CliError: it does not exist, is truncated, no trace, of another format, or its content has changed.
        """
        from safetensors import SafetensorError, safe_open

        check_trace_file(path)
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                about = _about(path, metadata)
                tensors = {name: file.get_tensor(name) for name in sorted(file.keys())}
        except SafetensorError as error:
            raise CliError(f"{path} can't be read as safetensors: {error}; fetch it again") from None
        try:
            args, kwargs = _decode(about["inputs"], tensors)
            trace = cls(
                about=About(**about["about"]),
                args=tuple(args),
                kwargs=kwargs,
                layers=tuple(_layer(entry, tensors) for entry in about["layers"]),
                gradients=tuple(_layer(entry, tensors) for entry in about["gradients"]),
            )
            if not trace.layers or not all(layer.outputs for layer in (*trace.layers, *trace.gradients)):
                raise ValueError("nothing was recorded")
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
            raise CliError(
                f"{path} says that it is a trace, and its description is not one ({type(error).__name__}: {error}); "
                "record it again"
            ) from None
        changed = sum(digest(tensor) != name for name, tensor in tensors.items())
        if changed:
            raise CliError(
                f"{changed} of {len(tensors)} tensors in {path} are not those that were recorded (SHA-256 differs); "
                "fetch it again"
            )
        return trace


def digest(tensor: Tensor) -> str:
    """SHA-256 over dtype, shape and bytes."""
    sha = hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)};".encode())
    plain = tensor.detach().cpu().contiguous()
    if plain.numel():  # a view as bytes needs some
        data: Any = plain.flatten().view(torch.uint8).numpy()
        sha.update(data)
    return sha.hexdigest()


def _name(tensor: Tensor, table: dict[str, Tensor]) -> str:
    """A tensor is named by its digest: equal ones, as one module gives and the next takes them, are written once."""
    name = digest(tensor)
    table.setdefault(name, tensor)
    return name


def _describe(layer: Layer, table: dict[str, Tensor]) -> dict[str, Any]:
    return {
        "key": layer.key,
        "type": layer.type,
        "kernels": layer.kernels,
        "lengths": layer.lengths,
        "upto": [layer.upto.terms, layer.upto.roundings],
        **{side: [_name(tensor, table) for tensor in getattr(layer, side)] for side in _SIDES},
    }


def _layer(entry: dict[str, Any], tensors: dict[str, Tensor]) -> Layer:
    terms, roundings = map(int, entry["upto"])
    lengths = tuple(map(int, entry["lengths"]))
    if not all(0 <= number < 2**63 for number in (terms, roundings, *lengths)):
        raise ValueError("a length of a sum is no length")
    sides: dict[str, Any] = {side: tuple(tensors[name] for name in entry[side]) for side in _SIDES}
    return Layer(
        key=str(entry["key"]),
        type=str(entry["type"]),
        kernels=tuple(map(str, entry["kernels"])),
        lengths=lengths,
        upto=Rounding(terms, roundings),
        **sides,
    )


def _about(path: Path, metadata: dict[str, str]) -> dict[str, Any]:
    found = metadata.get(_FORMAT_KEY)
    if found is None or _ABOUT_KEY not in metadata:
        raise CliError(f"{path} is a safetensors file and no trace; expected one that `kpt validate record` wrote")
    if found != str(FORMAT):
        raise CliError(f"{path} is a trace of format {found}, and this version reads format {FORMAT}; update kpt-cli")
    if hashlib.sha256(metadata[_ABOUT_KEY].encode()).hexdigest() != metadata.get(_DIGEST_KEY):
        raise CliError(f"the description in {path} is not what was recorded (its SHA-256 differs); fetch it again")
    try:
        about = json.loads(metadata[_ABOUT_KEY])
    except (ValueError, RecursionError):
        about = None
    if not isinstance(about, dict):
        raise CliError(f"{path} says that it is a trace, and its description is not JSON; record it again")
    return about


def _encode(value: Any, table: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        # A copy, since tensors that share memory can't be written.
        return {_TENSOR: _name(value.detach().cpu().clone(memory_format=torch.contiguous_format), table)}
    if isinstance(value, list | tuple):
        return [_encode(item, table) for item in value]
    if isinstance(value, dict):
        # In a list, so that a key named like the mark of a tensor is no tensor.
        return {"items": [[key, _encode(item, table)] for key, item in value.items()]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise CliError(
        f"an input of the model is a {type(value).__name__}; expected tensors, numbers, strings, lists and dictionaries"
    )


def _decode(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_decode(item, tensors) for item in value]
    if isinstance(value, dict):
        if _TENSOR in value:
            return tensors[value[_TENSOR]]
        return {key: _decode(item, tensors) for key, item in value["items"]}
    return value
