"""Load a model, from a Hugging Face folder or a function that makes it, and run it in one way or another."""

import importlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kpt_cli.errors import CliError, sentence
from kpt_cli.optimize.model_directory import read_model_directory

if TYPE_CHECKING:
    import torch
    from torch import nn

KPT = "kpt"  #: KPT's implementation of experts
IMPLEMENTATIONS = (KPT, "eager", "grouped_mm", "batched_mm")


@dataclass(frozen=True, slots=True)
class Arm:
    """One way of running a model."""

    name: str = KPT  # what the user wrote
    experts: str = KPT  # the implementation of transformers' experts modules
    #: pairs of an op's name, or `*`, and the backend, kernel or `reference` that must serve it
    choices: tuple[tuple[str, str], ...] = ()

    @classmethod
    def parse(cls, text: str | None) -> "Arm":
        """Read `eager`, `nvidia`, `reference`, `package.module:kernel`, `moe.experts=NAME`, or several with commas."""
        if text is None:
            return cls()
        experts: set[str] = set()
        choices = []
        for part in text.split(","):
            op, separator, name = map(str.strip, part.rpartition("="))
            if not name or (separator and not op):
                raise CliError(f"{part!r} is not of the form NAME or OP=NAME, for instance moe.experts=reference")
            if not separator and name in IMPLEMENTATIONS:
                experts.add(name)
            else:
                choices.append((op or "*", name))
        if len(experts) > 1 or (choices and experts - {KPT}):
            raise CliError(
                f"{text!r} asks for several implementations of experts; expected one of {', '.join(IMPLEMENTATIONS)}, "
                "or kernels, which serve the experts under kpt"
            )
        # The innermost choice wins, and one for an op counts more than one for all.
        choices.sort(key=lambda choice: choice[0] != "*")
        return cls(text, experts.pop() if experts else KPT, tuple(choices))

    @contextmanager
    def running(self, model: "nn.Module") -> Iterator[None]:
        """Run the model this way inside the block; afterwards it is as it was."""
        import kpt_core
        from kpt_moe.rewrites import is_transformers_experts

        with ExitStack() as stack:
            for op, name in self.choices:
                stack.enter_context(kpt_core.use(name, op=op))
            for module in filter(is_transformers_experts, model.modules()):
                import kpt_moe.transformers  # noqa: F401  registers KPT's implementation

                setting = "_experts_implementation_internal"
                stack.callback(setattr, module.config, setting, getattr(module.config, setting))
                setattr(module.config, setting, self.experts)
            yield


#: What the float64 reference runs by: transformers' own loop over experts, and the references of KPT's ops.
ORACLE = Arm("float64", "eager", (("*", "reference"),))


def check_source(text: str) -> None:
    """Raise `CliError` if this names no model, before anything heavy is imported."""
    if not _is_function(text):
        read_model_directory(Path(text))
    elif not all(map(str.isidentifier, text.replace(":", ".", 1).split("."))):
        raise CliError(f"{text!r} is neither a folder nor of the form package.module:function")


def load(
    text: str, dtype: str, device: "torch.device", *, tokens: int | None = None, seed: int = 0
) -> "tuple[nn.Module, Any, str]":
    """Return a model, its inputs, and a sentence on these; no inputs if it is not told for how many tokens.

    A function without arguments returns a model, or a pair of it and a tensor, a sequence or a mapping of arguments.
    """
    if _is_function(text):
        return _call_function(text, dtype, device, tokens is not None)
    from kpt_cli.optimize.model import example_inputs, load_model

    directory = read_model_directory(Path(text))
    model = load_model(directory, dtype, device)
    if tokens is None:
        return model, None, ""
    inputs, said = example_inputs(directory, model.config, tokens, device, seed)
    # A cache grows while it runs, so that a module could not be fed twice.
    return model, {**inputs, "use_cache": False}, said


@contextmanager
def users_code(failure: str) -> Iterator[None]:
    """Make a sentence of what a user's model raises: as a traceback it would end with the exit code of a difference."""
    try:
        yield
    except Exception as error:
        if sentence(error) is not None:  # it is one already
            raise
        first = str(error).partition("\n")[0]
        raise CliError(f"{failure}: {type(error).__name__}: {first}; `kpt --debug` shows where") from error


def _is_function(text: str) -> bool:
    return ":" in text and not Path(text).exists()


def _call_function(text: str, dtype: str, device: "torch.device", needs_inputs: bool) -> "tuple[nn.Module, Any, str]":
    import torch
    from torch import Tensor, nn
    from torch.utils._pytree import tree_map_only

    module, _, name = text.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # a console script has its own folder there instead
    try:
        function = getattr(importlib.import_module(module), name, None)
    except ModuleNotFoundError as error:
        raise CliError(f"{text}: there is no module {error.name} here, nor is there a folder {text}") from error
    if not callable(function):
        raise CliError(f"{text}: module {module} has no function {name}")
    with users_code(f"{text} fails"):
        made = function()
    model, given = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        raise CliError(f"{text} returned a {type(model).__name__}; expected a torch.nn.Module, or one and its inputs")
    if needs_inputs and not isinstance(given, Tensor | Mapping | Sequence):
        raise CliError(
            f"{text} returned a model and {'no inputs' if given is None else f'a {type(given).__name__}'}; let it "
            "return a pair of it and a tensor, a sequence of arguments, or a mapping of keyword arguments"
        )
    if dtype != "auto":
        model.to(getattr(torch, dtype))
    placed = tree_map_only(Tensor, lambda tensor: tensor.to(device), (given,) if isinstance(given, Tensor) else given)
    return model.eval().to(device), placed, f"the inputs of {text}"
