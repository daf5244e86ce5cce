"""The model that a user names: a Hugging Face folder, or `package.module:function` that makes one."""

import importlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kpt_cli.errors import CliError, sentence
from kpt_cli.optimize.model_directory import check_safetensors, read_model_directory

if TYPE_CHECKING:
    import torch
    from torch import nn

#: Shorter than that of `kpt optimize`, since all that every module gives is kept.
DEFAULT_TOKENS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A model that was loaded.

    Attributes:
        model: in the dtype and on the device that were asked for.
        inputs: what to run it on; None if nothing was said of that.
        said: a sentence on the inputs.
        name: what loads it again.
    """

    model: "nn.Module"
    inputs: Mapping[str, Any] | Sequence[Any] | None
    said: str
    name: str


def check_source(text: str) -> None:
    """Find out before anything heavy is imported whether this names a model.

    Raises:
        CliError: what is wrong with it, and what was expected.
    """
    if _is_function(text):
        module, _, function = text.partition(":")
        if not all(part.isidentifier() for part in (*module.split("."), function)):
            raise CliError(f"{text!r} is neither a folder nor of the form package.module:function")
    else:
        read_model_directory(Path(text))


def load(
    text: str, dtype: str, device: "torch.device", *, tokens: int | None = None, seed: int = 0, inputs: bool = True
) -> Loaded:
    """Load a model and make its inputs.

    Args:
        text: a folder, or `package.module:function` of a function without arguments that returns a model, or a pair of
            it and its inputs: a tensor, a sequence of arguments, or a mapping of keyword arguments.
        dtype: of the weights; `auto` leaves them as they are.
        device: where the model goes.
        tokens: length of the sequence that a model of a folder is run on.
        seed: decides which text, or which random token ids.
        inputs: whether inputs are needed.

    Raises:
        CliError: it can't be loaded, or gives no inputs though they are needed.
    """
    if _is_function(text):
        return _load_function(text, dtype, device, inputs=inputs)
    from kpt_cli.optimize.example_inputs import example_inputs
    from kpt_cli.optimize.model_loading import load_model

    directory = read_model_directory(Path(text))
    model = load_model(directory, dtype, device)
    name = str(directory.path.absolute())
    if not inputs:
        return Loaded(model=model, inputs=None, said="", name=name)
    made = example_inputs(directory, model.config, tokens or DEFAULT_TOKENS, device, seed)
    # A cache grows while it runs, so that a module could not be fed twice.
    return Loaded(model=model, inputs={**made.kwargs, "use_cache": False}, said=made.said, name=name)


def check_trace_file(path: Path) -> None:
    """Find out before anything heavy is imported whether a trace is there, and whole.

    Raises:
        CliError: it is not there, truncated, or no safetensors file.
    """
    if not path.is_file():
        raise CliError(f"{path} is no file; expected a trace, which `kpt validate record MODEL -o {path}` writes")
    check_safetensors(path)


@contextmanager
def users_code(failure: str) -> Iterator[None]:
    """Make a sentence of what a user's model raises: as a traceback it would end with the exit code of a difference.

    Raises:
        CliError: the sentence begins with `failure`.
    """
    try:
        yield
    except Exception as error:
        if sentence(error) is not None:  # it is one already
            raise
        first = str(error).partition("\n")[0]
        raise CliError(f"{failure}: {type(error).__name__}: {first}; `kpt --debug` shows where") from error


def _is_function(text: str) -> bool:
    return ":" in text and not Path(text).exists()


def _load_function(text: str, dtype: str, device: "torch.device", *, inputs: bool) -> Loaded:
    from torch import Tensor, nn
    from torch.utils._pytree import tree_map_only

    from .float64 import cast

    function = _function(text)
    with users_code(f"{text} fails"):
        made = function()
    model, given = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        raise CliError(f"{text} returned a {type(model).__name__}; expected a torch.nn.Module, or one and its inputs")
    if isinstance(given, Tensor):
        given = (given,)
    if given is not None and not isinstance(given, Mapping | Sequence):
        raise CliError(
            f"{text} returned inputs of type {type(given).__name__}; expected a tensor, a sequence of arguments, or a "
            "mapping of keyword arguments"
        )
    if inputs and given is None:
        raise CliError(f"{text} returned a model and no inputs; let it return both, as a pair")
    if dtype != "auto":
        import torch

        cast(model, getattr(torch, dtype))
    placed = tree_map_only(Tensor, lambda tensor: tensor.to(device), given)
    return Loaded(model=model.eval().to(device), inputs=placed, said=f"the inputs of {text}", name=text)


def _function(text: str) -> Any:
    module, _, name = text.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # a console script has its own folder there instead
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise CliError(f"{text}: {module} needs {error.name}, which is not installed") from error
        raise CliError(f"{text}: there is no module {error.name} here, nor is there a folder {text}") from None
    function = getattr(found, name, None)
    if not callable(function):
        raise CliError(f"{text}: module {module} has no function {name}")
    return function
