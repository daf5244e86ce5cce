"""Put KPT's layers in the place of a transformers model's Mixture-of-Experts blocks, and the blocks back."""

import warnings

from torch import nn

from kpt_core import InputError

from ._names import accept_checkpoint_names, refuse_checkpoint_names
from .blocks import MoEBlock, moe_blocks, replace_modules
from .kpt_block import KptMoEBlock


def to_kpt_layers(model: nn.Module, *, inplace: bool = False, strict: bool = False) -> nn.Module:
    """Replace every Mixture-of-Experts block of a transformers model by a `MoELayer` that is called as it was.

    What blocks compute is asked of themselves, whatever their family: a linear router with softmax or sigmoid scores,
    perhaps groups, a correction bias and a scale; fused experts with an activation of ours; shared experts, perhaps
    weighed. Anything else is refused: PhiMoE's sparsemixer, hash routing, latent experts, jitter that experts see.

    Parameters are the same objects as before, so that optimizers keep them, and so are names in the state dict: what
    `save_pretrained` writes is a checkpoint of the model's family, for anybody to load. `load_state_dict` takes the
    names of such a checkpoint too, so that Trainer resumes. Routing is decided in float32: in a bfloat16 model, tokens
    whose experts are nearly tied may go elsewhere than before. `output_router_logits` works as before; its logits are
    float32. Hooks of the blocks, routers and experts rest until `to_transformers`. With a
    router or experts of another kind put into it, a block has names of its own, which only `load_state_dict` reads.

    Args:
        model: of transformers 5, its experts in fused modules; or such a block alone.
        inplace: change `model` itself; otherwise a deep copy, and `model` stays as it is.
        strict: raise for a block that can't be replaced. Otherwise it stays, with a warning that says why.

    Returns:
        The model with `KptMoEBlock` in the place of blocks.

    Raises:
        InputError: there is no such block; or, if `strict`, one that can't be replaced. `model` is then unchanged.

    Examples:
        >>> model = to_kpt_layers(AutoModelForCausalLM.from_pretrained("allenai/OLMoE-1B-7B-0924"), inplace=True)
        >>> model.save_pretrained("trained")
    """
    blocks = dict(moe_blocks(model))
    if not blocks:
        raise InputError(f"to_kpt_layers: {type(model).__name__} has no Mixture-of-Experts block of transformers")
    plans: dict[str, MoEBlock] = {}
    for path, block in blocks.items():
        try:
            plans[path] = MoEBlock.of(block)
        except InputError as error:
            what = f"to_kpt_layers: {path or 'the module'} has no counterpart: {error}"
            if strict:
                raise InputError(what) from error
            warnings.warn(f"{what}. It stays as it is.", stacklevel=2)
    made = replace_modules(model, plans, lambda path, block: KptMoEBlock(block, plans[path]), inplace=inplace)
    if plans:
        accept_checkpoint_names(made)
    return made


def to_transformers(model: nn.Module, *, inplace: bool = False) -> nn.Module:
    """Undo `to_kpt_layers`: the same classes, the same parameters, and their present values.

    Args:
        model: what `to_kpt_layers` gave, trained or not.
        inplace: change `model` itself; otherwise a deep copy, and `model` stays as it is.

    Returns:
        The model with the blocks of transformers.

    Raises:
        InputError: it has no converted block, or one whose layer was changed to something that the block can't compute.
            `model` is then unchanged.
    """
    modules = model.named_modules(remove_duplicate=False)
    blocks = {path: module for path, module in modules if isinstance(module, KptMoEBlock)}
    if not blocks:
        raise InputError(
            f"to_transformers: {type(model).__name__} has no block that to_kpt_layers replaced: call that first"
        )
    for path, block in blocks.items():
        block.require_unchanged(path)
    made = replace_modules(model, blocks, lambda path, block: block.restored(), inplace=inplace)
    refuse_checkpoint_names(made)
    return made
