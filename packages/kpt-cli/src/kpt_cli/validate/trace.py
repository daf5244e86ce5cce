"""A golden trace: one safetensors file, written whole or not at all, checked when read; and the model it belongs to."""

import hashlib
import json
import secrets
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kpt_cli.errors import CliError
from kpt_cli.optimize.model_directory import check_safetensors

if TYPE_CHECKING:
    from torch import Tensor, nn

    from kpt_optimize.judging import Call

FORMAT = 2
_FORMAT_KEY, _CONTENT_KEY, _DIGEST_KEY = "kpt.trace", "kpt.content", "kpt.content_sha256"
#: What a configuration says of the place where it was loaded rather than of the numbers.
_INCIDENTAL = {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache", "architectures"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """A model's numbers on some inputs."""

    #: what was recorded, and how: the model's name, class, `config`, digests of its `weights` and `dtype`, the
    #: `load_dtype` that loads it again, the `arm`, the inputs in words (`said`), `device`, `versions` and `date`
    about: dict[str, Any]
    args: tuple[Any, ...]  # positional arguments of the model, tensors and plain values
    kwargs: dict[str, Any]  # keyword arguments
    layers: "tuple[Call, ...]"  # calls in the order in which they ended
    gradients: "tuple[Call, ...]" = ()  # of the parameters, if they were asked for

    def save(self, path: Path) -> None:
        """Write the file, whole or not at all; `CliError` if an argument is neither a tensor nor a plain value."""
        from safetensors.torch import save_file

        table: dict[str, Tensor] = {}
        text = json.dumps(_encode(self, table))
        digest = hashlib.sha256(text.encode()).hexdigest()
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        try:
            save_file(table, temporary, {_FORMAT_KEY: str(FORMAT), _CONTENT_KEY: text, _DIGEST_KEY: digest})
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: Path) -> "Trace":
        """Read a file; `CliError` if it is missing, truncated, no trace, of another format, or its content changed."""
        from safetensors import SafetensorError, safe_open

        check_trace_file(path)
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  it is no mapping
        except SafetensorError as error:
            raise CliError(f"{path} can't be read as safetensors: {error}; fetch it again") from None
        found, text = metadata.get(_FORMAT_KEY), metadata.get(_CONTENT_KEY, "")
        if found is None:
            raise CliError(f"{path} is a safetensors file and no trace; expected one that `kpt validate record` wrote")
        if found != str(FORMAT):
            raise CliError(f"{path} is a trace of format {found}; this version reads format {FORMAT}: record it again")
        changed = sum(tensor_digest(tensor) != name for name, tensor in tensors.items())
        if changed or hashlib.sha256(text.encode()).hexdigest() != metadata.get(_DIGEST_KEY):
            what = f"{changed} of {len(tensors)} tensors" if changed else "the description"
            raise CliError(f"{what} in {path} is not what was recorded (SHA-256 differs); fetch it again")
        content = _decode(json.loads(text), tensors)
        layers, gradients = (tuple(_call(**entry) for entry in content[name]) for name in ("layers", "gradients"))
        return cls(**content | {"args": tuple(content["args"]), "layers": layers, "gradients": gradients})


def _call(**entry: Any) -> "Call":
    from kpt_optimize.judging import Call

    entry = {key: tuple(value) if isinstance(value, list) else value for key, value in entry.items()}
    return Call(**entry)


def check_trace_file(path: Path) -> None:
    """Raise `CliError` if a trace is not there, or not whole, before anything heavy is imported."""
    if not path.is_file():
        raise CliError(f"{path} is no file; expected a trace, which `kpt validate record MODEL -o {path}` writes")
    check_safetensors(path)


def tensor_digest(tensor: "Tensor") -> str:
    """Return the SHA-256 over dtype, shape and bytes."""
    import torch

    sha = hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)};".encode())
    data: Any = tensor.detach().cpu().contiguous().flatten()
    if len(data):  # a view as bytes needs some
        sha.update(data.view(torch.uint8).numpy())
    return sha.hexdigest()


def _encode(value: Any, table: "dict[str, Tensor]") -> Any:
    """Put tensors into the table, named by their digests: equal ones, as one module gives and the next takes, once."""
    from torch import Tensor

    from kpt_optimize.judging import Call

    if isinstance(value, Call | Trace):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, Tensor):
        name = tensor_digest(value)
        table.setdefault(name, value)
        return {"tensor": name}
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


def _decode(value: Any, tensors: "dict[str, Tensor]") -> Any:
    if isinstance(value, list):
        return [_decode(item, tensors) for item in value]
    if isinstance(value, dict):
        if "tensor" in value:
            return tensors[value["tensor"]]
        return {key: _decode(item, tensors) for key, item in value["items"]}
    return value


def identity(model: "nn.Module") -> dict[str, Any]:
    """Return what a model is told by: its class, its configuration as JSON, and digests of its saved tensors."""
    from torch import Tensor

    config: Any = getattr(model, "config", None)
    told = json.loads(json.dumps(config.to_dict(), default=str)) if hasattr(config, "to_dict") else {}
    state = sorted(model.state_dict().items())
    return {
        "model_class": type(model).__name__,
        "config": {key: value for key, value in told.items() if key not in _INCIDENTAL},
        "weights": {name: tensor_digest(tensor)[:16] for name, tensor in state if isinstance(tensor, Tensor)},
    }


def check_same_model(model: "nn.Module", about: dict[str, Any]) -> None:
    """Raise `CliError` if a model is not the recorded one, by its class, configuration or weights."""
    here = identity(model)
    if here["model_class"] != about["model_class"]:
        raise CliError(
            f"the trace was recorded from a {about['model_class']} and this is a {here['model_class']}; give the "
            "recorded model with --model"
        )
    config, recorded = here["config"], about["config"]
    for key in sorted(config.keys() & recorded.keys()):  # another version of transformers may know more, or fewer
        if config[key] != recorded[key]:
            said = f"{key} (now {config[key]!r}, recorded {recorded[key]!r})"
            raise CliError(f"the model's config differs from the recorded one: {said}; give the recorded model")
    weights, recorded = here["weights"], about["weights"]
    changed = sorted(name for name in weights.keys() | recorded.keys() if weights.get(name) != recorded.get(name))
    if changed:
        raise CliError(
            f"{len(changed)} of {len(recorded)} tensors of the model are not those that were recorded "
            f"({changed[0]} first); give the recorded weights, in the recorded dtype {about['dtype']}"
        )
