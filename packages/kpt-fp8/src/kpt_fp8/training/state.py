"""Save and load recipes and random generators, beside what an engine counts itself."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch

from kpt_core import InputError
from kpt_fp8.formats import FORMATS

from .recipe import FP8Recipe
from .watched import Watched

_VERSION = 2
_DTYPES = {str(dtype): dtype for dtype in FORMATS}


def state_of(layers: Mapping[str, Watched]) -> dict[str, Any]:
    """Return the version, recipes, lengths of histories and states of random generators as plain values."""
    return {
        "version": _VERSION,
        "recipes": {name: _plain(layer.recipe) for name, layer in layers.items()},
        "histories": {name: _remembers(layer) for name, layer in layers.items()},
        "random": _random(_device(layers)),
    }


def require_fitting(owner: str, layers: Mapping[str, Watched], state: Mapping[str, Any]) -> None:
    """Raise `InputError` unless a state is of an engine with such layers."""
    own = state.get("engine")
    if not isinstance(own, Mapping) or not {"model", "optimizer"} <= state.keys():
        raise InputError(f"{owner}: state must be what state_dict gave; got {type(state).__name__} without its parts")
    if own.get("version") != _VERSION:
        raise InputError(
            f"{owner}: the state has version {own.get('version')}; this kpt-fp8 reads {_VERSION}: install the kpt-fp8 "
            "that wrote it"
        )
    given, here = own["histories"], {name: _remembers(layer) for name, layer in layers.items()}
    if given.keys() != here.keys():
        other = sorted(given.keys() ^ here.keys())
        raise InputError(
            f"{owner}: the state is of {len(given)} FP8 layers, this model has {len(here)}, and {other[0]!r} is in one "
            "of them alone: make model and engine with the same include, exclude and min_features"
        )
    wrong = next((name for name in here if given[name] != here[name]), None)
    if wrong is not None:
        raise InputError(
            f"{owner}: the state has histories of {given[wrong]} steps for {wrong!r}, this engine {here[wrong]}: make "
            "it with the same recipe"
        )


def load_state(layers: Mapping[str, Watched], state: Mapping[str, Any]) -> None:
    """Set what `state_of` gave."""
    for name, layer in layers.items():
        layer.set_recipe(_recipe(state["recipes"][name]))
        layer.reset_observed()
    _set_random(state["random"], _device(layers))


def _remembers(layer: Watched) -> int:
    return 0 if layer.amax_history is None else layer.amax_history.shape[1]


def _plain(recipe: FP8Recipe) -> dict[str, Any]:
    return {name: str(value) if isinstance(value, torch.dtype) else value for name, value in asdict(recipe).items()}


def _recipe(plain: Mapping[str, Any]) -> FP8Recipe:
    return FP8Recipe(**{name: _DTYPES.get(value, value) for name, value in plain.items()})


def _device(layers: Mapping[str, Watched]) -> torch.device:
    return next(iter(layers.values())).observed.device


def _random(device: torch.device) -> dict[str, torch.Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        state[device.type] = torch.get_device_module(device).get_rng_state(device)
    return state


def _set_random(state: Mapping[str, torch.Tensor], device: torch.device) -> None:
    torch.set_rng_state(state["cpu"].cpu())
    if device.type in state and device.type != "cpu":
        torch.get_device_module(device).set_rng_state(state[device.type].cpu(), device)
