"""Attention under any mask: the mask is a value that composes, and the backward exists on every device."""

from .flex import flex_attention
from .functional import attention
from .kv_cache import PagedCache
from .mask_algebra import Mask
from .masks import (
    block_sparse,
    causal,
    dense_mask,
    dilated,
    document,
    everything,
    global_tokens,
    natten,
    padding,
    predicate,
    prefix_lm,
    sliding_window,
    tree,
    window,
)
from .merge import merge
from .modules import Attention, CrossAttention, FlashAttention3, FlexAttention, create_flash_attention_3
from .packed import attention_varlen, packed
from .plan import Plan, live_blocks

__version__ = "0.1.0"

__all__ = [
    "Attention",
    "CrossAttention",
    "FlashAttention3",
    "FlexAttention",
    "Mask",
    "PagedCache",
    "Plan",
    "attention",
    "attention_varlen",
    "block_sparse",
    "causal",
    "create_flash_attention_3",
    "dense_mask",
    "dilated",
    "document",
    "everything",
    "flex_attention",
    "global_tokens",
    "live_blocks",
    "merge",
    "natten",
    "packed",
    "padding",
    "predicate",
    "prefix_lm",
    "sliding_window",
    "tree",
    "window",
]
