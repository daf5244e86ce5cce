"""Judge the model classes of transformers: which KPT may serve, what masks they expect, what they pass along."""

import re
import sys
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch

from kpt_core import InputError

__all__ = ["changes_scores", "check_class", "wants_additive_masks"]

#: What says that a class attends by functions that can be replaced; one is enough.
_FLAGS = ("_supports_sdpa", "_supports_attention_backend", "_supports_flex_attn")
#: Arguments that choose keys for some kernel, though no eager function names them.
_CHOOSES_KEYS = re.compile(r"(.*_)?indices|sinks|cu_.*|block_table")
#: What fits that pattern, or what eager functions name, and is in the mask already or says nothing of the scores.
_HARMLESS = frozenset({"logits_indices", "sliding_window"})


def check_class(model: Any, name: str) -> None:
    """Raise `InputError` if a model's class computes attention by code of its own, where KPT can't serve.

    transformers refuses those for `"sdpa"`, too, but asks nothing of names that it does not know: their own code would
    add the bool mask of another attention as 0 and 1.

    Args:
        model: a `PreTrainedModel` that is made, or whose attention is set.
        name: that it asks for.
    """
    kind = type(model)
    tables = [value for key, value in vars(sys.modules[kind.__module__]).items() if key.endswith("_ATTENTION_CLASSES")]
    known = [list(table) for table in tables if isinstance(table, dict) and name not in table]
    flagged = any(getattr(kind, flag, False) for flag in _FLAGS)
    if not known and (flagged or kind._can_set_attn_implementation()):
        return
    others = known[0] if known else ["eager"]
    use = " or ".join(repr(each) for each in others if not each.startswith("flash"))
    raise InputError(
        f"{name}: {kind.__name__} computes attention by code of its own, which no attn_implementation reaches: load it "
        f"with attn_implementation={use}; where it is part of another model, give that one a dictionary: "
        f"attn_implementation={{'': {name!r}, 'name_of_its_config': {others[0]!r}}}"
    )


def _subclasses(kind: type) -> Iterator[type]:
    each: type
    for each in kind.__subclasses__():
        yield each
        yield from _subclasses(each)


# Compiled code asks these two as well, and can't look into modules.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def wants_additive_masks(config_class: type) -> bool:
    """Return whether the classes of a config were written for additive masks alone, as those without sdpa are."""
    return _wants_additive_masks(config_class)


@cache
def _wants_additive_masks(config_class: type) -> bool:
    from transformers import PreTrainedModel

    kinds = [each for each in _subclasses(PreTrainedModel) if getattr(each, "config_class", None) is config_class]
    return bool(kinds) and not any(getattr(each, "_supports_sdpa", False) for each in kinds)


@cache
def _eager_functions(module: str) -> tuple[Callable[..., Any], ...]:
    named = vars(sys.modules[module]).items() if module in sys.modules else ()
    return tuple(
        value for key, value in named if re.fullmatch(r"eager.*attention.*", key) and hasattr(value, "__code__")
    )


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def changes_scores(argument: str, module: str) -> bool:
    """Return whether an argument of attention might say which keys count, or for how much.

    It might where the eager function of the Python module that passes it reads it, or by its name.
    """
    return _changes_scores(argument, module)


@cache  # each layer asks in each step
def _changes_scores(argument: str, module: str) -> bool:
    if argument in _HARMLESS:
        return False
    if _CHOOSES_KEYS.fullmatch(argument):
        return True
    codes = [each.__code__ for each in _eager_functions(module)]
    return any(
        argument in (*code.co_varnames[: code.co_argcount + code.co_kwonlyargcount], *code.co_consts) for code in codes
    )
