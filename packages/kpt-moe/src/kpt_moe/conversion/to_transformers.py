"""Put the blocks of transformers back."""

import copy
from typing import Any

from torch import nn

from kpt_core import InputError

from ._replace import replace_modules
from .to_kpt import KptMoEBlock, names_of


def to_transformers(model: nn.Module, *, inplace: bool = False) -> nn.Module:
    """Undo `to_kpt_layers`: the same classes, the same names of parameters, and their present values.

    Args:
        model: what `to_kpt_layers` gave, trained or not.
        inplace: change `model` itself; otherwise a deep copy, and `model` stays as it is.

    Returns:
        The model with the blocks of transformers, to be saved with `save_pretrained`.

    Raises:
        InputError: it has no converted block, or one whose layer was changed to something that the block can't compute.
            `model` is then unchanged.
    """
    paths = {
        path: module for path, module in model.named_modules(remove_duplicate=False) if isinstance(module, KptMoEBlock)
    }
    if not paths:
        raise InputError(f"to_transformers: {type(model).__name__} has no block that to_kpt_layers replaced")
    for path, module in paths.items():
        if repr(module.layer) != module.made:
            raise InputError(
                f"to_transformers: {path or 'the module'} was changed since it was converted, to what "
                f"{type(module.origin[0]).__name__} may not compute; it was\n{module.made}\nand is\n{module.layer}"
            )
    if not inplace:
        model = copy.deepcopy(model)
    return replace_modules(model, paths, _restored)


def _restored(path: str, converted: nn.Module) -> nn.Module:
    """The block of transformers, with the parameters of the layer."""
    assert isinstance(converted, KptMoEBlock)
    (block,), plan, layer = converted.origin, converted.plan, converted.layer
    gate = block.get_submodule(plan.gate)
    gate.__class__ = type(gate).__mro__[2]
    _put(block, plan.weight, layer.router.weight)
    if plan.bias is not None:
        _put(block, plan.bias, layer.router.bias)
    (like,) = converted.correction_like
    if plan.correction is not None and like is not None:
        value = layer.router.get_buffer("correction_bias").to(like.dtype).view(like.shape)
        if isinstance(like, nn.Parameter):
            value = nn.Parameter(value, requires_grad=like.requires_grad)
        _put(block, plan.correction, value)
    experts = block.get_submodule(plan.experts)
    for ours, theirs in names_of(experts).items():
        _put(experts, theirs, getattr(layer.experts, ours))
    if plan.dense is not None and plan.shared is not None:
        assert layer.shared_experts is not None
        plan.dense.restore(block.get_submodule(plan.shared), layer.shared_experts)
        if plan.shared_gate is not None:
            assert layer.shared_experts.gate is not None
            _put(block, f"{plan.shared_gate}.weight", layer.shared_experts.gate.weight)
    return block.train(converted.training)


def _put(module: nn.Module, path: str, tensor: Any) -> None:
    owner_path, _, name = path.rpartition(".")
    owner = module.get_submodule(owner_path)
    held: dict[str, Any] = owner._parameters if name in owner._parameters else owner._buffers
    held[name] = tensor
