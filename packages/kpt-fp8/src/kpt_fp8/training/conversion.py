"""Converting the linear layers of a model for FP8 training, in place."""

from collections.abc import Sequence

from torch import nn

from kpt_core import InputError
from kpt_fp8.selection import EXCLUDED, patterns, select

from .layer import FP8TrainingLinear
from .recipe import FP8Recipe, recipe_of

_OWNER = "convert_to_fp8_training"


def convert_to_fp8_training(
    model: nn.Module,
    recipe: FP8Recipe | str = "tensor",
    *,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] = EXCLUDED,
    min_features: int = 64,
) -> dict[str, str]:
    """Make each `nn.Linear` of a model an `FP8TrainingLinear`, in place; parameters stay the objects that they are.

    So an optimizer that was made before goes on with them. A layer that the model uses at several places is converted
    once. Layers that tie their weight to another module and subclasses of `nn.Linear` stay as they are. All is checked
    before anything is changed.

    Args:
        model: on any device.
        recipe: an `FP8Recipe`, or `tensor`, `delayed`, `row`, `block` or `none`.
        include: shell patterns of module names; only layers that one of them describes are converted. None: all. A
            pattern describes a whole name or its end after a dot.
        exclude: patterns of layers that are left as they are.
        min_features: layers with fewer inputs or outputs are left as they are.

    Returns:
        By name, why another `nn.Linear` was left as it is.

    Raises:
        InputError: no layer is left to convert, a pattern describes no module, or a layer can't be converted.
        UnknownNameError: no such recipe.
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"{_OWNER}: model must be an nn.Module; got {type(model).__name__}")
    if type(model) is nn.Linear:
        raise InputError(
            f"{_OWNER}: a single nn.Linear has no place to be replaced at: use FP8TrainingLinear.from_linear"
        )
    chosen_recipe = recipe_of(recipe)
    found = select(
        _OWNER,
        model,
        patterns(_OWNER, "include", include),
        patterns(_OWNER, "exclude", exclude) or (),
        min_features,
    )
    if not found.chosen:
        reasons = "; ".join(f"{name or 'the model'}: {reason}" for name, reason in list(found.skipped.items())[:5])
        raise InputError(
            f"{_OWNER}: no layer to convert; expected an nn.Linear at least; got {len(found.skipped)} that are left as "
            f"they are{f' ({reasons})' if reasons else ''}: change include, exclude or min_features"
        )
    for each in found.chosen:
        made = FP8TrainingLinear.from_linear(each.linear, chosen_recipe)
        for name in each.names:
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, made)
    return found.skipped
