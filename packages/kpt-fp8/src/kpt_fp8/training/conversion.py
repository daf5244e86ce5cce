"""Converting the linear layers and experts of a model for FP8 training, in place."""

from collections.abc import Sequence

from torch import nn

from kpt_core.registry import backends
from kpt_fp8.selection import chosen_layers, require_module, require_parent

from .experts import FP8TrainingExperts, refusal
from .layer import FP8TrainingLinear
from .recipe import FP8Recipe, recipe_of
from .watched import Watched

_OWNER = "convert_to_fp8_training"


def convert_to_fp8_training(
    model: nn.Module,
    recipe: FP8Recipe | str = "tensor",
    *,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] = (),
    min_features: int = 64,
) -> dict[str, str]:
    """Make each `nn.Linear` of a model an `FP8TrainingLinear`, in place; parameters stay the objects that they are.

    Experts that transformers fuses become `FP8TrainingExperts`. Parameters stay, so an optimizer that was made before
    goes on with them. A layer that the model uses at several places is converted once. Layers that tie their weight to
    another module and subclasses of `nn.Linear` stay as they are. All is checked before anything is changed.

    Args:
        model: on any device.
        recipe: an `FP8Recipe`, or `tensor`, `delayed`, `row`, `block` or `none`.
        include: shell patterns of module names; only layers that one of them describes are converted. None: all. A
            pattern describes a whole name or its end after a dot.
        exclude: patterns of modules that are left as they are, with all layers in them; `lm_head` is, too, unless
            `include` asks for it.
        min_features: layers with fewer inputs or outputs are left as they are.

    Returns:
        By name, why another `nn.Linear` was left as it is.

    Raises:
        InputError: no layer is left to convert, a pattern describes no module, or a layer can't be converted.
        UnknownNameError: no such recipe.
    """
    require_module(_OWNER, model)
    require_parent(_OWNER, model, "FP8TrainingLinear")
    chosen_recipe = recipe_of(recipe)
    found = chosen_layers(_OWNER, model, include, exclude, min_features)
    made: list[tuple[tuple[str, ...], nn.Module]] = []
    for layer in found.chosen:
        made.append((layer.names, FP8TrainingLinear.from_linear(layer.module, chosen_recipe)))
    for experts in found.experts:
        reason = refusal(experts.module)
        if reason:
            found.skipped[experts.names[0]] = reason
        else:
            made.append((experts.names, FP8TrainingExperts.from_experts(experts.module, chosen_recipe)))
    for names, module in made:
        for name in names:
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, module)
    backends()  # discovered now, and not in the first step, which took four times as long as later ones
    leave_to_each_process(model)
    return found.skipped


def leave_to_each_process(model: nn.Module) -> None:
    """Keep `DistributedDataParallel` from broadcasting what one process observes, and scales, which all compute."""
    own = [
        f"{name}.{buffer}"
        for name, module in model.named_modules()
        if isinstance(module, Watched)
        for buffer, _ in module.named_buffers(recurse=False)
    ]
    others = getattr(model, "_ddp_params_and_buffers_to_ignore", ())
    model._ddp_params_and_buffers_to_ignore = [*others, *own]  # type: ignore[assignment]
