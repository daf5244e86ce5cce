"""The file of a golden trace: one safetensors file, written whole or not at all, checked when it is read."""

import hashlib
import json
import secrets
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kpt_cli.errors import CliError
from kpt_cli.optimize.model_directory import check_safetensors

from .bounds import Rounding

FORMAT = 1
_FORMAT_KEY, _ABOUT_KEY, _DIGEST_KEY = "kpt.trace", "kpt.about", "kpt.about_sha256"
#: Dtypes that a recorder may have had.
_DTYPES = ("float64", "float32", "bfloat16", "float16")
#: What stands in an argument's place in the metadata, with the name of the tensor.
_TENSOR = "tensor"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One call of a module as the recorder saw it.

    Attributes:
        key: path of the module, with `#2` and so on for further calls; of a gradient, what it belongs to.
        type: its class, or `gradient`.
        inputs: the tensors among its arguments.
        outputs: what it gave.
        reference: what it gave in float64, where everything before it ran in float64 too.
        alone: what it gives in float64 on the recorder's inputs, its children's results being the recorder's too.
        handed: what the code around it hands to it in float64, where all results of modules are the recorder's.
        kernels: what served KPT's ops in it, as `op: kernel`.
        lengths: over how many terms its own sums go.
        upto: what was summed and rounded up to its end, itself included.
    """

    key: str
    type: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    reference: tuple[Tensor, ...]
    alone: tuple[Tensor, ...]
    handed: tuple[Tensor, ...]
    kernels: tuple[str, ...]
    lengths: tuple[int, ...]
    upto: Rounding


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """What a trace was recorded from, and how.

    Attributes:
        model: how the user named it, `""` if it was recorded from Python.
        model_class: its class.
        config: its configuration as JSON, empty if it has none.
        weights: digest of each saved tensor by name.
        dtype: of its weights.
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
    gradients: tuple[Layer, ...] = field(default=())

    def save(self, path: Path) -> None:
        """Write the file, whole or not at all.

        Raises:
            CliError: an argument of the model is neither a tensor nor a plain value.
        """
        from safetensors.torch import save_file

        table = _Table()
        inputs = _encode([list(self.args), self.kwargs], table)
        about = {
            "about": asdict(self.about),
            "inputs": inputs,
            "inputs_sha256": digest(table.tensors.values()),
            "layers": [_describe(layer, table) for layer in self.layers],
            "gradients": [_describe(layer, table) for layer in self.gradients],
        }
        about["tensors_sha256"] = digest(table.tensors.values())
        text = json.dumps(about)
        metadata = {_FORMAT_KEY: str(FORMAT), _ABOUT_KEY: text, _DIGEST_KEY: hashlib.sha256(text.encode()).hexdigest()}
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        try:
            save_file(table.tensors, temporary, metadata)
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

        if not path.is_file():
            raise CliError(f"{path} is no file; expected a trace, which `kpt validate record MODEL -o {path}` writes")
        names = check_safetensors(path)
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                about = _about(path, metadata)
                tensors = {name: file.get_tensor(name) for name in sorted(names)}
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
            inputs_digest, all_digest = about["inputs_sha256"], about["tensors_sha256"]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CliError(
                f"{path} says that it is a trace, and its description is not one ({type(error).__name__}: {error}); "
                "record it again"
            ) from None
        if digest(tensors[name] for name in _names(about["inputs"])) != inputs_digest:
            raise CliError(
                f"the inputs in {path} are not those that were recorded (their SHA-256 differs); fetch it again"
            )
        if digest(tensors.values()) != all_digest:
            raise CliError(f"the tensors in {path} are not those that were recorded (SHA-256 differs); fetch it again")
        return trace


class _Table:
    """Names for tensors; equal ones, as one module gives and the next takes them, are written once."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._names: dict[str, str] = {}

    def name(self, tensor: Tensor) -> str:
        known = digest([tensor])
        if known not in self._names:
            self._names[known] = f"{len(self.tensors):06}"
            # A copy, since two that share memory can't be written.
            self.tensors[self._names[known]] = tensor.detach().to("cpu", copy=True).contiguous()
        return self._names[known]


def digest(tensors: Iterable[Tensor]) -> str:
    """SHA-256 over dtypes, shapes and bytes."""
    sha = hashlib.sha256()
    for tensor in tensors:
        sha.update(f"{tensor.dtype} {list(tensor.shape)};".encode())
        plain = tensor.detach().cpu().contiguous()
        if plain.numel():  # a view as bytes needs some
            data: Any = plain.flatten().view(torch.uint8).numpy()
            sha.update(data)
    return sha.hexdigest()


def _describe(layer: Layer, table: _Table) -> dict[str, Any]:
    return {
        "key": layer.key,
        "type": layer.type,
        "inputs": [table.name(tensor) for tensor in layer.inputs],
        "outputs": [table.name(tensor) for tensor in layer.outputs],
        "reference": [table.name(tensor) for tensor in layer.reference],
        "alone": [table.name(tensor) for tensor in layer.alone],
        "handed": [table.name(tensor) for tensor in layer.handed],
        "kernels": list(layer.kernels),
        "lengths": list(layer.lengths),
        "upto": [layer.upto.terms, layer.upto.roundings],
    }


def _layer(entry: dict[str, Any], tensors: dict[str, Tensor]) -> Layer:
    def those(names: list[str]) -> tuple[Tensor, ...]:
        return tuple(tensors[name] for name in names)

    terms, roundings = map(int, entry["upto"])
    return Layer(
        key=str(entry["key"]),
        type=str(entry["type"]),
        inputs=those(entry["inputs"]),
        outputs=those(entry["outputs"]),
        reference=those(entry["reference"]),
        alone=those(entry["alone"]),
        handed=those(entry["handed"]),
        kernels=tuple(map(str, entry["kernels"])),
        lengths=tuple(map(int, entry["lengths"])),
        upto=Rounding(terms, roundings),
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
    except ValueError:
        about = None
    if not isinstance(about, dict):
        raise CliError(f"{path} says that it is a trace, and its description is not JSON; record it again")
    return about


def _encode(value: Any, table: _Table) -> Any:
    if isinstance(value, Tensor):
        return {_TENSOR: table.name(value)}
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


def _names(value: Any) -> Iterator[str]:
    """Names of the tensors in encoded arguments, each once, in the order of their first mention."""
    seen: set[str] = set()

    def walk(value: Any) -> Iterator[str]:
        if isinstance(value, list):
            for item in value:
                yield from walk(item)
        elif isinstance(value, dict):
            if _TENSOR in value:
                if value[_TENSOR] not in seen:
                    seen.add(value[_TENSOR])
                    yield value[_TENSOR]
            else:
                for _, item in value["items"]:
                    yield from walk(item)

    yield from walk(value)
