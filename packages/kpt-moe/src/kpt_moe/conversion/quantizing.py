"""The experts of converted models in FP8, as checkpoints of the hub have them."""

import copy
from typing import Any

from torch import nn

from kpt_core import InputError
from kpt_moe._scales import SCALE_BLOCK
from kpt_moe.expert_networks import FeedForwardExpert, QuantizedFeedForwardExpert

from .kpt_block import kpt_blocks


def quantize_experts(model: nn.Module, *, inplace: bool = False) -> nn.Module:
    """Quantise the experts of a converted model to float8_e4m3fn with scales of blocks of 128 by 128 (DeepSeek-V3).

    All else stays as it is. `save_pretrained` then writes a checkpoint of the model's family with transformers'
    `quantization_config` for FP8. `from_pretrained` loads it: dequantised on a CPU, and in 8 bits with
    `experts_implementation="kpt"` after `import kpt_moe.transformers`. Of a layer that was not converted, set
    `layer.experts = QuantizedFeedForwardExpert.from_feed_forward(layer.experts)`, and keep its `state_dict()`.

    Args:
        model: what `to_kpt_layers` gave.
        inplace: change `model` itself; otherwise a deep copy, and `model` stays as it is.

    Returns:
        The model with `QuantizedFeedForwardExpert` in its blocks.

    Raises:
        InputError: it has no converted block, or experts that such a checkpoint can't hold: with biases, of another
            layout, or with a size that is no multiple of 128. `model` is then unchanged.

    Examples:
        >>> quantize_experts(to_kpt_layers(model)).save_pretrained("experts-in-fp8")
    """
    for path, block in kpt_blocks("quantize_experts", model).items():
        sizes = (block.config.hidden_size, block.config.expert_width)
        plain = isinstance(block.experts, FeedForwardExpert) and not block.config.bias
        if not plain or any(size % SCALE_BLOCK for size in sizes):
            raise InputError(
                f"quantize_experts: {path or 'the block'} has experts of {block.experts}: FP8 checkpoints of "
                "transformers have none of other layouts, with biases, nor of sizes that are no multiples of "
                f"{SCALE_BLOCK}; leave them as they are"
            )
    if not inplace:
        model = copy.deepcopy(model)
    for block in dict.fromkeys(kpt_blocks("quantize_experts", model).values()):
        experts: Any = block.experts
        block.experts = QuantizedFeedForwardExpert.from_feed_forward(experts)
    if hasattr(model, "base_model_prefix"):
        _describe(model)
    return model


def _describe(model: Any) -> None:
    """Say in the configuration what is quantised, and let scales be saved beside the matrices of their experts.

    Data parallelism is told to leave 8-bit numbers alone: gloo can't send them, and frozen ones need it not.
    """
    from transformers import FineGrainedFP8Config
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange
    from transformers.quantizers.base import HfQuantizer
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

    others = [path for path, module in model.named_modules() if isinstance(module, nn.Linear)]
    config = FineGrainedFP8Config(modules_to_not_convert=others)
    quantizer = FineGrainedFP8HfQuantizer(config, pre_quantized=True)
    model.config.quantization_config = config
    narrow = {name for name, parameter in model.named_parameters() if parameter.dtype.itemsize == 1}
    model._ddp_params_and_buffers_to_ignore = {*getattr(model, "_ddp_params_and_buffers_to_ignore", ()), *narrow}
    names = getattr(model, "_weight_conversions", None)
    if names is None:
        # As `save_pretrained` would: a model that was not loaded has no prefix to put back.
        names = get_model_conversion_mapping(model, add_legacy=False)
        names = [name for name in names if not isinstance(name, PrefixChange)]
    # Of the base class: FP8's own would write scales under the name that one family has for them.
    model._weight_conversions = HfQuantizer.update_weight_conversions(quantizer, names, model)  # type: ignore[no-untyped-call]
