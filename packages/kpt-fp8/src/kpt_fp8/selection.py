"""Which layers of a model are converted, and why the others are not."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Generic, TypeVar

from torch import Tensor, nn

from kpt_core import InputError
from kpt_core.shared_config import SwitchWatch

from .experts import NativeFP8Experts, is_stacked
from .formats import DTYPES, NAMES_OF_DTYPES
from .weight_state import FP8Module

#: Left as they are unless they are asked for. No model needs to have such a layer.
EXCLUDED = ("lm_head",)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


Module = TypeVar("Module", bound=nn.Module, covariant=True)


@dataclass(frozen=True, slots=True)
class Chosen(Generic[Module]):
    """A module that is converted, and its names: several where the model shares it."""

    module: Module
    names: tuple[str, ...]


@dataclass(slots=True)
class Selection:
    """What is converted, and by name the reason for each other `nn.Linear` and module with stacked matrices."""

    chosen: list[Chosen[nn.Linear]] = field(default_factory=list)
    experts: list[Chosen[nn.Module]] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)


def require_module(owner: str, model: object) -> None:
    """Raise `InputError` unless it is a module."""
    if not isinstance(model, nn.Module):
        raise InputError(f"{owner}: model must be an nn.Module; got {type(model).__name__}: load the model first")


def require_parent(owner: str, model: nn.Module, instead: str) -> None:
    """Raise `InputError` where a model is a single layer; `instead` converts that."""
    if type(model) is nn.Linear:
        raise InputError(f"{owner}: a single nn.Linear has no place to be replaced at: use {instead}.from_linear")


def patterns(owner: str, name: str, given: object) -> tuple[str, ...] | None:
    """The patterns as a tuple; one string is one pattern."""
    if given is None:
        return None
    listed = []
    for pattern in given if isinstance(given, Iterable) and not isinstance(given, str) else (given,):
        if not isinstance(pattern, str):
            raise InputError(f"{owner}: {name} must be patterns of module names, as in '*.q_proj'; got {pattern!r}")
        listed.append(pattern)
    return tuple(listed)


def matches(name: str, pattern: str) -> bool:
    """Match a module's name, or its end after a dot, with a shell pattern: `lm_head` matches `model.lm_head`."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")


def covers(name: str, pattern: str) -> bool:
    """Match a module's name, or that of a module around it: `vision` covers `model.vision.layers.0.fc`."""
    parts = name.split(".")
    return any(matches(".".join(parts[:count]), pattern) for count in range(1, len(parts) + 1))


def trained(module: nn.Module) -> nn.Module:
    """Return the layer that one of FP8 training stands for, of the same parameters; others as they are."""
    plain = getattr(module, "without_fp8_training", None)
    return module if plain is None else plain()


def holds_matrices(module: nn.Module) -> bool:
    """Tell whether a module is linear, or has stacks of matrices, as experts have, whoever wrote it."""
    if isinstance(module, nn.modules.conv._ConvNd):
        return False
    stacks = (each.dim() == 3 and min(each.shape[1:]) > 1 for each in module.parameters(recurse=False))
    return isinstance(module, nn.Linear) or any(stacks)


def chosen_layers(
    owner: str,
    model: nn.Module,
    include: str | Sequence[str] | None,
    exclude: str | Sequence[str],
    min_features: int,
    *,
    take_trained: bool = False,
) -> Selection:
    """Choose layers and experts by users' patterns; what `EXCLUDED` describes is for `include` to ask for.

    Those that train in FP8 are `trained` of themselves for `take_trained`; else they are left as they are.
    """
    wanted, unwanted = patterns(owner, "include", include), patterns(owner, "exclude", exclude) or ()
    usual = EXCLUDED if wanted is None else ()
    found = select(owner, model, wanted, unwanted, min_features, take_trained, usual)
    require_some(owner, found)
    return found


def require_some(owner: str, found: Selection) -> None:
    """Raise `InputError` if nothing is left to convert, with the reasons."""
    if not found.chosen and not found.experts:
        reasons = "; ".join(f"{name or 'the model'}: {reason}" for name, reason in list(found.skipped.items())[:5])
        raise InputError(
            f"{owner}: no layer to convert; expected an nn.Linear at least; got {len(found.skipped)} that are left as "
            f"they are{f' ({reasons})' if reasons else ''}: change include, exclude or min_features"
        )


def select(
    owner: str,
    model: nn.Module,
    include: tuple[str, ...] | None,
    exclude: tuple[str, ...],
    min_features: int,
    take_trained: bool = False,
    usual: tuple[str, ...] = (),
) -> Selection:
    """Choose the layers; what `exclude` describes is left with all in it, of `usual` the layer of that name alone."""
    least: object = min_features
    if not isinstance(least, int) or least < 1:
        raise InputError(f"{owner}: min_features must be a positive integer; got {min_features!r}: 64 is usual")
    modules = list(model.named_modules(remove_duplicate=False))
    kept: dict[int, tuple[nn.Module, list[str]]] = {}
    for name, module in modules:
        if holds_matrices(module):
            kept.setdefault(id(module), (module, []))[1].append(name)
    _require_use(owner, "include", include or (), [name for _, names in kept.values() for name in names])
    _require_use(owner, "exclude", [each for each in exclude if each not in EXCLUDED], [name for name, _ in modules])
    ties = _ties(model)
    found = Selection()
    for module, names in kept.values():
        own = trained(module)
        if own is not module and not take_trained:
            reason = "it trains in FP8 already"
        else:
            reason = _left(own, names, include, exclude, usual, min_features)
        reason = reason or ties.get(id(module), "")
        if reason:
            found.skipped[names[0]] = reason
            continue
        _require_plain(owner, names[0], module)
        if isinstance(module, nn.Linear):
            found.chosen.append(Chosen(module, tuple(names)))
        else:
            found.experts.append(Chosen(module, tuple(names)))
    return found


def _left(
    module: nn.Module,
    names: list[str],
    include: tuple[str, ...] | None,
    exclude: tuple[str, ...],
    usual: tuple[str, ...],
    min_features: int,
) -> str:
    """Say why a layer is left as it is; empty where it isn't."""
    if isinstance(module, FP8Module | NativeFP8Experts):
        return "it is 8-bit already"
    if not isinstance(module, nn.Linear) and not is_stacked(module):
        return f"it is a {type(module).__name__} with stacked matrices, no experts as transformers fuses them"
    if isinstance(module, nn.Linear) and type(module) is not nn.Linear:
        # It may do something else with its weight, as attention's output projection in torch does.
        return f"it is a {type(module).__name__}, a subclass of nn.Linear, which may use its weight in its own way"
    if include is not None and not any(matches(name, pattern) for name in names for pattern in include):
        return "no pattern of include describes it"
    for patterns_left, describes in ((exclude, covers), (usual, matches)):
        for pattern in patterns_left:
            if any(describes(name, pattern) for name in names):
                return f"excluded by {pattern!r}"
    for name, weight in _weights(module):
        rows, columns = weight.shape[-2:]
        if min(rows, columns) < min_features:
            return f"{columns} to {rows} features, fewer than min_features={min_features}"
        if type(weight) is not nn.Parameter:
            return f"its {name} is a {type(weight).__name__}, no plain nn.Parameter"
    return ""


def _weights(module: nn.Module) -> list[tuple[str, Tensor]]:
    if isinstance(module, nn.Linear):
        return [("weight", module.weight)]
    return [(name, each) for name, each in module.named_parameters(recurse=False) if not name.endswith("bias")]


def _require_use(owner: str, name: str, wanted: Iterable[str], names: list[str]) -> None:
    for pattern in wanted:
        if not any(matches(each, pattern) for each in names):
            known = ", ".join(repr(each) for each in names[:5] if each) or "none"
            what = "nn.Linear" if name == "include" else "module"
            raise InputError(
                f"{owner}: {name} has {pattern!r}, which describes no {what} of the model; the first of its "
                f"{len(names)} are {known}: correct the pattern, or leave it out"
            )


def _require_plain(owner: str, name: str, module: nn.Module) -> None:
    for own, weight in _weights(module):
        if weight.dtype not in DTYPES:
            raise InputError(
                f"{owner}: the {own} of {name!r} must be {NAMES_OF_DTYPES}; got {weight.dtype}: exclude the layer"
            )
    hooked = any(not isinstance(hook, SwitchWatch) for hooks in _HOOKS for hook in getattr(module, hooks).values())
    if hooked or "forward" in vars(module):
        raise InputError(
            f"{owner}: {name!r} has hooks or a forward of its own, which the converted layer would lose: remove them, "
            "convert, and add them again, or exclude the layer"
        )


def _ties(model: nn.Module) -> dict[int, str]:
    """By layer, what shares its weight: a parameter of another module, by object or by memory."""
    owners: dict[object, list[tuple[nn.Module, str]]] = {}
    for name, module in model.named_modules():
        for own, parameter in module.named_parameters(recurse=False):
            owners.setdefault(_place(parameter), []).append((module, f"{name}.{own}" if name else own))
    tied: dict[int, str] = {}
    for sharing in owners.values():
        for module, name in sharing:
            others = [other for which, other in sharing if which is not module]
            if others and not name.endswith("bias"):
                tied[id(module)] = f"its {name.rpartition('.')[2]} is tied to {others[0]}"
    return tied


def _place(parameter: Tensor) -> object:
    # A subclass may have no memory of its own, and on the meta device there is none.
    if parameter.is_meta or type(parameter) is not nn.Parameter or parameter.numel() == 0:
        return id(parameter)
    return parameter.device, parameter.data_ptr()
