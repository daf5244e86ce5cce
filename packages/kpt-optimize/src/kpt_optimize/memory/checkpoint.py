"""Activation checkpointing by levels: what the blocks of a model save for backward, and what they compute again.

Source: Chen et al., arXiv:1604.06174; the choice of ops is torch's selective checkpointing (`torch.utils.checkpoint`).
"""

from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from kpt_core.errors import InputError, UnknownNameError
from kpt_optimize.rewrite import check_model

#: Experts and their router: a saved choice can't come out otherwise in backward.
_EXPERTS = ("kpt::moe_", "aten::_grouped_mm", "aten::_scaled_grouped_mm")
_ATTENTION = (
    "kpt::attention_",
    "aten::_scaled_dot_product_",
    "aten::_flash_attention_forward",
    "aten::_efficient_attention_forward",
)


def _is_experts(op: Any) -> bool:
    return _name(op).startswith(_EXPERTS)


def _is_kernel(op: Any) -> bool:
    return _name(op).startswith(_EXPERTS + _ATTENTION)


def _is_product(op: Any) -> bool:
    from torch.utils.flop_counter import flop_registry  # it imports triton

    # KPT's ops are told to torch's counter when they are called.
    return _is_kernel(op) or getattr(op, "overloadpacket", None) in flop_registry


def _name(op: Any) -> str:
    schema = getattr(op, "_schema", None)
    return "" if schema is None else str(schema.name)


#: Levels by falling memory and rising time -> whether an op's results are saved inside a block; None for all and none.
LEVELS: dict[str, Callable[[Any], bool] | None] = {
    "none": None,
    "products": _is_product,
    "kernels": _is_kernel,
    "experts": _is_experts,
    "full": None,
}


def checkpoint_blocks(
    model: nn.Module, level: str = "full", blocks: bool | Iterable[type[nn.Module]] = True
) -> dict[str, nn.Module]:
    """Let the blocks of a model compute activations again in the backward pass, in place; gradients stay the same.

    A block keeps its arguments and what its level saves. Names of parameters and the state dict stay. What was set by
    an earlier call is replaced. Models of transformers get it by their own `activation_checkpointing_enable`, which
    also keeps them from filling a cache; they compute again in training mode alone.

    Args:
        model: the model.
        level: a key of `LEVELS`: `none` saves everything; `products` all but what is cheap to compute again: attention,
            experts and matrix products are saved; `kernels` attention and experts; `experts` experts and the choice of
            their router; `full` nothing.
        blocks: True for those of the outermost `nn.ModuleList`s, or of transformers' models; module classes else.

    Returns:
        The blocks by name; empty for a model of transformers, which finds its own.

    Raises:
        UnknownNameError: no such level.
        InputError: no module, or no blocks in it.

    Examples:
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        >>> list(checkpoint_blocks(model, "full", [nn.Linear]))
        ['0']
    """
    check_model(model)
    if level not in LEVELS:
        raise UnknownNameError("level", level, LEVELS)
    hosts = _hosts(model) if blocks is True else []
    found: dict[str, Any] = {} if hosts else find_blocks(model, blocks)
    if level != "none":
        recompute = partial(checkpoint, use_reentrant=False, **_options(level))
    for host in hosts:
        _own(host, "disable")()
        if level != "none":
            _own(host, "enable")({"use_reentrant": False, **_options(level)})
    for block in found.values():
        if is_checkpointed(block):
            if level != "none" and block.forward.keywords == recompute.keywords:
                continue
            _restore(block)
        if level != "none":
            # An attribute of the instance, so that names of modules, parameters and the state dict stay.
            block.forward = partial(recompute, block.forward)
    return found


def is_checkpointed(block: nn.Module) -> bool:
    """Return whether a block computes again, as `checkpoint_blocks` makes it."""
    function = block.__dict__.get("forward")
    return isinstance(function, partial) and function.func is checkpoint


def _restore(block: Any) -> None:
    inner = block.forward.args[0]
    del block.forward
    if inner != block.forward:  # it was an attribute of the instance before
        block.forward = inner


@cache  # so that what is set twice is known to be the same
def _options(level: str) -> dict[str, Any]:
    saved = LEVELS[level]
    if saved is None:
        return {}

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if saved(op) else CheckpointPolicy.PREFER_RECOMPUTE

    return {"context_fn": partial(create_selective_checkpoint_contexts, policy)}


def _hosts(model: nn.Module) -> list[Any]:
    """Return the outermost modules that know how to checkpoint themselves, as transformers' do."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        inside = any(not other or name.startswith(f"{other}.") for other in found)
        if not inside and getattr(module, "supports_gradient_checkpointing", False) is True:
            found[name] = module
    return list(found.values())


def _own(host: Any, what: str) -> Any:
    """Return a method of a model of transformers by its name since 5.23, or before."""
    return getattr(host, f"activation_checkpointing_{what}", None) or getattr(host, f"gradient_checkpointing_{what}")


def find_blocks(model: nn.Module, blocks: bool | Iterable[type[nn.Module]]) -> dict[str, nn.Module]:
    """Return the blocks that are to compute again, outermost ones only.

    Raises:
        InputError: there are none, or `blocks` is neither True nor classes.
    """
    try:
        classes: tuple[Any, ...] = (nn.ModuleList,) if blocks is True else tuple(blocks)  # type: ignore[arg-type]
        found: dict[str, nn.Module] = {}
        for name, module in model.named_modules():
            if isinstance(module, classes) and not any(not other or name.startswith(f"{other}.") for other in found):
                found[name] = module
    except TypeError:
        raise InputError(f"blocks to checkpoint are True or classes of modules; got {blocks!r}") from None
    if blocks is True:
        found = {
            f"{name}.{index}".removeprefix("."): block
            for name, listed in found.items()
            for index, block in listed.named_children()
        }
    if not found:
        wanted = (
            "it has no nn.ModuleList with blocks; name their classes, as in (Block,)"
            if blocks is True
            else f"none of its modules is a {' or '.join(item.__name__ for item in classes)}"
        )
        raise InputError(f"nothing to checkpoint in {type(model).__name__}: {wanted}")
    return found
