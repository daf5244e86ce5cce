"""Whether a model is the one that was recorded: its weights and its configuration."""

import json
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from kpt_cli.errors import CliError

from .trace import About, digest

#: What a configuration says of the place where it was loaded rather than of the numbers.
_INCIDENTAL = {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache", "architectures"}


def weights_of(model: nn.Module) -> dict[str, str]:
    """The first 16 digits of the SHA-256 of each saved tensor, by name."""
    return {
        name: digest(tensor)[:16] for name, tensor in sorted(model.state_dict().items()) if isinstance(tensor, Tensor)
    }


def config_of(model: nn.Module) -> dict[str, Any]:
    """The configuration of a Hugging Face model, empty for others."""
    to_dict = getattr(getattr(model, "config", None), "to_dict", None)
    if to_dict is None:
        return {}
    told = json.loads(json.dumps(to_dict(), default=str))
    return {key: value for key, value in told.items() if key not in _INCIDENTAL}


def check_same_model(model: nn.Module, about: About) -> None:
    """Refuse a model that is not the recorded one.

    Raises:
        CliError: another class, a number in the configuration, or weights.
    """
    if type(model).__name__ != about.model_class:
        raise CliError(
            f"the trace was recorded from a {about.model_class} and this is a {type(model).__name__}; give the "
            "recorded model with --model"
        )
    changed = sorted(_changed(config_of(model), about.config))
    if changed:
        raise CliError(f"the model's config differs from the recorded one: {_some(changed)}; give the recorded model")
    weights = weights_of(model)
    differing = sorted(n for n in weights.keys() | about.weights.keys() if weights.get(n) != about.weights.get(n))
    if differing:
        raise CliError(
            f"{len(differing)} of {len(about.weights)} tensors of the model are not those that were recorded "
            f"({_some(differing)}); give the recorded weights, in the recorded dtype {about.dtype}"
        )


def _changed(now: Mapping[str, Any], recorded: Mapping[str, Any]) -> list[str]:
    """Keys of both whose values differ; another version may know more or fewer of them."""
    found = []
    for key in now.keys() & recorded.keys():
        if isinstance(now[key], dict) and isinstance(recorded[key], dict):
            found += [f"{key}.{inner}" for inner in _changed(now[key], recorded[key])]
        elif now[key] != recorded[key]:
            found.append(f"{key} (now {now[key]!r}, recorded {recorded[key]!r})")
    return found


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
