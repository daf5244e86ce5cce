"""The names that tensors have in checkpoints: those of the block that a KPT layer replaced, and those of the hub."""

import copy
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from kpt_core import InputError


def write_original_names(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Give tensors of a `KptMoEBlock` in a state dict the names and shapes that the block of transformers has."""
    for ours, theirs, shape in _renames(module):
        if (value := state.pop(prefix + ours, None)) is not None:
            state[prefix + theirs] = value if shape is None else value.view(shape)


def read_original_names(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any, *rest: Any) -> None:
    """Give tensors that are to be loaded into a `KptMoEBlock` the names and shapes that they have there."""
    for ours, theirs, shape in _renames(module):
        if (value := state.pop(prefix + theirs, None)) is not None:
            state[prefix + ours] = value if shape is None else value.reshape(-1)


def _renames(block: Any) -> Iterator[tuple[str, str, Any]]:
    """Of tensors with another name in the block: both names, and the shape there if it is another too."""
    for ours, theirs in block.paths.items():
        if ours != theirs:
            yield ours, theirs, block.correction[1] if theirs == block.plan.correction else None


def accept_checkpoint_names(model: nn.Module) -> None:
    """Let a transformers model's `load_state_dict` take the names that tensors have in its checkpoints.

    `save_pretrained` writes each expert's matrices by themselves, as the hub has them; the model holds them merged.
    Trainer gives what it reads there to `load_state_dict`, which leaves out names that it does not know: it resumes
    with the experts that the model came with. `to_kpt_layers` does this by itself.

    Args:
        model: changed in place; a module that is no model of transformers is left as it is.

    Examples:
        >>> model = AutoModelForCausalLM.from_pretrained(name, experts_implementation="kpt")
        >>> accept_checkpoint_names(model)
        >>> Trainer(model, ...).train(resume_from_checkpoint=True)
    """
    refuse_checkpoint_names(model)
    if hasattr(model, "base_model_prefix"):
        model.register_load_state_dict_pre_hook(read_checkpoint_names)


def refuse_checkpoint_names(model: nn.Module) -> None:
    """Undo `accept_checkpoint_names`."""
    hooks = model._load_state_dict_pre_hooks
    for number in [n for n, wrapped in hooks.items() if getattr(wrapped, "hook", None) is read_checkpoint_names]:
        del hooks[number]


def read_checkpoint_names(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any, *rest: Any) -> None:
    """Give tensors that are to be loaded into a model of transformers its names, where they have those of its hub.

    `from_pretrained` does so; `load_state_dict`, by which Trainer resumes, does not. Raises `InputError` if of tensors
    that become one some are missing.
    """
    model: Any = module
    expected = {prefix + name: value.shape for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    unknown = [name for name in state if name.startswith(prefix) and name not in expected]
    if not unknown or expected.keys() <= state.keys():
        return
    for name, value in _by_model_names(model, {name.removeprefix(prefix): state.pop(name) for name in unknown}).items():
        shape = expected.get(prefix + name, value.shape)
        if value.shape != shape:
            raise InputError(
                f"load_state_dict: {name} is put together from several tensors, of which some are missing: of those "
                f"given it would be {list(value.shape)}, and the model has {list(shape)}. Give the tensors of all "
                "files of the checkpoint at once, or load it with from_pretrained"
            )
        state[prefix + name] = value


def _by_model_names(model: Any, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors with the names of the hub, merged and renamed as `from_pretrained` would."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    transforms = getattr(model, "_weight_conversions", None) or get_model_conversion_mapping(model)
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    of_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    made: dict[str, Any] = {}
    for key in sorted(state, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters)
        if name not in made:
            made[name] = WeightRenaming(key, name) if pattern is None else copy.deepcopy(of_pattern[pattern])
        made[name].add_tensor(name, key, key if pattern is None else pattern, state[key])
    found: dict[str, Tensor] = {}
    for name, transform in made.items():
        for target, value in transform.convert(name, model=model, config=model.config).items():
            found[target] = value[0] if isinstance(value, list) else value
    return found
