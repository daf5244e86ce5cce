"""Serve the attention of Hugging Face models: importing this module registers the attention implementation `"kpt"`.

import kpt_attention.transformers
model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="kpt")

The attention function and the mask function are registered under one name: transformers gives no mask, and says
nothing, where the second one is missing. A model's mask looks as for `"sdpa"`, a bool tensor, since models change it in
many ways; but where a model's functions of it are known it is not there until somebody looks into it, so that a long
prompt takes no memory of Q x K. It is lowered once for all layers that share it.
"""

import math
from collections.abc import Callable
from functools import wraps
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel
from transformers.generation.continuous_batching import ContinuousBatchingManager
from transformers.masking_utils import (
    AttentionMaskInterface,
    and_masks,
    causal_mask_function,
    eager_mask,
    padding_mask_function,
    prepare_padding_mask,
    sdpa_mask,
)

from kpt_core import InputError, KptWarning
from kpt_core.errors import warn_caller
from kpt_core.shared_config import warn_of_switch

from .dense import dense
from .mask_algebra import Mask
from .masks import causal, dense_mask, sliding_window
from .model_classes import changes_scores, check_class, wants_additive_masks
from .model_masks import ModelMask, read
from .packed import packed
from .paged import paged
from .plan import Plan, all_blocks
from .transformers_cache import PagedStates, attend_pages

__all__ = ["NAME", "enable_continuous_batching", "kpt_attention_forward", "kpt_attention_mask"]

NAME = "kpt"
#: Masks of fewer queries, as steps of decoding have, are made dense: they are lowered as fast.
FEW = 16


def kpt_attention_mask(*args: Any, **kwargs: Any) -> Tensor:
    """Return the mask of a model as bool `[B, 1, Q, K]`, True where a key is seen.

    It is a `ModelMask` where the model's functions are known, and nothing compiles; of fewer than `FEW` queries only
    where causality or nothing is all there is. Never is it None, which models change the meaning of: they drop queries
    (Gemma 4), or count on being called `"sdpa"`. Classes that were written without sdpa in mind expect numbers to add.
    """
    config = kwargs.get("config")
    if config is not None and wants_additive_masks(type(config)):
        return eager_mask(*args, **kwargs | {"allow_is_bidirectional_skip": False})
    # Dense, it is a tensor always.
    asked = kwargs | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    known = None if args or torch.compiler.is_compiling() or torch.jit.is_tracing() else _read(kwargs)  # type: ignore[attr-defined, no-untyped-call]
    if known is None:
        return cast(Tensor, sdpa_mask(*args, **asked))
    sizes = tuple(kwargs[name] for name in ("batch_size", "q_length", "kv_length"))
    offset = kwargs.get("q_offset", 0) - kwargs.get("kv_offset", 0)
    return ModelMask.of(
        known, sizes, offset, kwargs.get("device", "cpu"), lambda: cast(Tensor, sdpa_mask(**asked)).contiguous()
    )


def _read(asked: dict[str, Any]) -> Mask | None:
    """Return the mask that transformers asks for as a value of the algebra, or None to make it dense."""
    queries, keys = asked.get("q_length", 0), asked.get("kv_length", 0)
    first, behind = asked.get("q_offset", 0), asked.get("kv_offset", 0)
    numbers = isinstance(first, int) and isinstance(behind, int)
    if not numbers or not behind <= first <= behind + keys - queries:
        return None
    function = asked.get("mask_function", causal_mask_function)
    seen = prepare_padding_mask(asked.get("attention_mask"), keys, behind)
    if seen is not None and not bool(seen.all()):
        function = and_masks(function, padding_mask_function(seen))
    known = read(function, keys, behind)
    # Of few queries, as steps of decoding have, the dense mask is lowered as fast.
    return known if known is None or queries >= FEW or known.plain() is not None else None


def kpt_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    cache: Any = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    output_attentions: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend, as transformers' attention functions do.

    Args:
        module: whose attention it is; its `is_causal` counts where no mask and no `is_causal` is given.
        query: `[B, Hq, Q, D]`.
        key: `[B, Hkv, K, D]`, not repeated.
        value: `[B, Hkv, K, Dv]`.
        attention_mask: bool (True is seen) or additive, broadcasts to `[B, Hq, Q, K]`; None for causality, if it is
            asked for and there is more than one query, or else for nothing. Causality is then of the first keys.
        scaling: of the scores.
        dropout: rate; drawn by torch's global generator.
        is_causal: see above.
        softcap: cap of the scores.
        s_aux: `[Hq]` sinks.
        position_bias: added to the scores.
        cache: of continuous batching: it is given the new keys and values, and gives all (transformers 5.23; newer
            models do this themselves).
        cu_seq_lens_q: where packed sequences end, of which none sees another.
        cu_seq_lens_k: likewise, of keys; as those of queries.
        output_attentions: refused where it is true.
        **kwargs: what models pass along. One that might change the scores is an error: `changes_scores` judges it. Of
            keys that a sparse model's indexer chose (`indices`, `block_indices`) a mask is made.

    Returns:
        The output `[B, Q, Hq, Dv]`, and None.

    Raises:
        InputError: an argument may change the scores in a way that is unknown, or asks for what is not there.
    """
    warn_of_switch(module, "_attn_implementation", NAME, getattr(module, "layer_idx", None))
    indices, blocks = kwargs.pop("indices", None), kwargs.pop("block_indices", None)
    passing = type(module).__module__
    for name, given in kwargs.items():
        if given is None or not changes_scores(name, passing):
            continue
        raise InputError(
            f"{NAME}: {type(module).__name__} passes {name!r}, which this attention does not know and must not "
            "ignore: load the model with attn_implementation='eager'"
        )
    if output_attentions:
        raise InputError(f"{NAME}: no attention weights are computed: load with attn_implementation='eager' for them")
    if cache is not None:
        kwargs |= {"cu_seq_lens_q": cu_seq_lens_q, "cu_seq_lens_k": cu_seq_lens_k}
        key, value = cache.update(key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=kwargs)
        cu_seq_lens_k = kwargs["cu_seq_lens_k"]
    if isinstance(key, PagedStates) and isinstance(value, PagedStates):
        if not dropout and all(each is None for each in (cu_seq_lens_q, position_bias, indices, blocks)):
            found = attend_pages(query, key, value, attention_mask, s_aux, scale=scaling, softcap=softcap or 0.0)
            if found is not None:
                return found, None
        key, value = key.whole(), value.whole()
    if key.dtype != query.dtype or value.dtype != query.dtype:
        key, value = key.to(query.dtype), value.to(query.dtype)
    if query.shape[0] != key.shape[0]:
        batch = max(query.shape[0], key.shape[0])
        query, key, value = (each.expand(batch, -1, -1, -1) for each in (query, key, value))
    if "write_index" in kwargs:  # continuous batching: what models make of the queries' positions is no mask for it
        attention_mask = None
        if kwargs.get("max_length_q") == 1 and position_bias is None and dropout == 0:
            options = {"scale": scaling, "softcap": softcap or 0.0, "window": kwargs.get("sliding_window") or 0}
            return _decoded(query, key, value, cu_seq_lens_q, cu_seq_lens_k, s_aux, options), None
    if indices is not None or blocks is not None:
        positions = kwargs.get("position_ids")
        attention_mask = _chosen_alone(module, indices, blocks, attention_mask, query, key, positions)
    bias = position_bias
    known = attention_mask.plan(query.shape[2], key.shape[2]) if isinstance(attention_mask, ModelMask) else None
    if known is not None:
        plan = known
    elif attention_mask is not None and attention_mask.dtype is not torch.bool:
        additive = attention_mask[..., : key.shape[2]]
        bias, attention_mask = additive if bias is None else bias + additive, None
        plan = Plan()
    elif attention_mask is not None and _is_step_of_graph(query):
        shown, plan = attention_mask[..., : key.shape[2]], Plan()
        hiding = torch.where(shown, 0.0, -math.inf).to(query.dtype)
        bias = hiding if bias is None else bias + hiding
    elif attention_mask is not None:
        plan = _lowered(attention_mask, query, key)
    else:
        # No model's own mask is None: what is called without one sees all, unless it says that it is causal. Classes
        # without sdpa say so of modules that are not, since nobody looks.
        says = not wants_additive_masks(type(getattr(module, "config", None))) and getattr(module, "is_causal", False)
        causal = is_causal if is_causal is not None else says
        # A window is in the mask, and an argument beside it; continuous batching gives no mask.
        window = kwargs.get("sliding_window") if "write_index" in kwargs else None
        plan = _packed(cu_seq_lens_q, cu_seq_lens_k, query, key, bool(causal), window)
    queries, keys = query.shape[2], key.shape[2]
    if plan.causal and cu_seq_lens_q is None and queries == keys:
        _warn_of_packing(kwargs.get("position_ids"))
    drawn_seed = torch.randint(1 << 62, (), device=query.device) if dropout > 0 else None
    out, _ = dense(
        query, key, value, **plan.arguments(queries, keys), bias=bias, sinks=s_aux, return_lse=False, scale=scaling,
        softcap=softcap or 0.0, dropout=dropout, drawn_seed=drawn_seed,
    )  # fmt: skip
    return out.transpose(1, 2).contiguous(), None


def _chosen_alone(
    module: nn.Module, indices: Any, blocks: Any, mask: Tensor | None, query: Tensor, key: Tensor, positions: Any
) -> Tensor | None:
    """Return a mask of nothing but the keys that a sparse model's indexer chose, of those that the mask lets through.

    Args:
        module: whose attention it is.
        indices: `[B, Q, n]` of keys, or None.
        blocks: what the module's own indexer makes a mask of, or None.
        mask: of the model.
        query: `[B, Hq, Q, D]`.
        key: `[B, Hkv, K, D]`.
        positions: `[B, Q]` of the queries, where the model tells them.
    """
    queries, keys = query.shape[2], key.shape[2]
    if blocks is not None:
        made = getattr(getattr(module, "indexer", None), "build_block_mask", None)
        if made is None:
            raise InputError(
                f"{NAME}: {type(module).__name__} passes block_indices and has no indexer to make a mask of them: load "
                "the model with attn_implementation='eager'"
            )
        if positions is None:
            positions = torch.arange(keys - queries, keys, device=query.device)[None]
        mask = made(blocks, mask, keys, query.dtype, query.device, positions.expand(query.shape[0], -1))
    if indices is None:
        return mask
    if indices.dim() != 3 or indices.shape[:2] != (query.shape[0], queries) or indices.is_floating_point():
        raise InputError(
            f"{NAME}: indices must be [{query.shape[0]}, {queries}, chosen keys] integers; got {indices.dtype} "
            f"{list(indices.shape)}"
        )
    seen = torch.zeros((*indices.shape[:2], keys), dtype=torch.bool, device=query.device)
    seen = seen.scatter(-1, indices.long(), True).unsqueeze(1)
    if mask is None:
        return seen
    mask = mask[..., :keys]
    return mask & seen if mask.dtype is torch.bool else mask.masked_fill(~seen, torch.finfo(mask.dtype).min)


def _decoded(
    query: Tensor, key: Tensor, value: Tensor, ends: Any, key_ends: Any, sinks: Tensor | None, options: dict[str, Any]
) -> Tensor:
    """Return the output `[1, Q, Hq, Dv]` of a step of decoding, at most one query a sequence, by `attention.paged`."""
    if len(ends) == 2 and query.is_cpu and sinks is None and not options["softcap"]:
        end = int(key_ends[1])
        if end <= _FEW_KEYS:  # of one sequence: it takes as long as a call of torch's own, which costs less to make
            begin = max(end - options["window"], 0) if options["window"] else 0
            k, v = key[:, :, begin:end], value[:, :, begin:end]
            out = scaled_dot_product_attention(query, k, v, scale=options["scale"], enable_gqa=True)
            return out.transpose(1, 2).contiguous()
    rows, k, v = (each[0].transpose(0, 1) for each in (query, key, value))
    table, lengths, of_queries = _pages_of(ends, key_ends, len(k))
    each = len(rows) == len(lengths)  # a query of each sequence, which costs less to say than where they end
    out, _ = paged(rows, k.unsqueeze(1), v.unsqueeze(1), table, lengths, None if each else of_queries, sinks, **options)
    return out.unsqueeze(0)


#: Up to so many keys of one sequence torch's own attention is called on CPUs.
_FEW_KEYS = 512
#: Of the last step: what told of it, and the tensors that all layers share.
_step: tuple[Any, tuple[Tensor, Tensor, Tensor]] | None = None


def _pages_of(ends: Tensor, key_ends: Tensor, keys: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the table of pages of one key, the lengths and the ends of queries, int32; made once for a step's layers.

    Args:
        ends: of the queries of each sequence, `[sequences + 1]`.
        key_ends: likewise of the keys, which lie behind one another.
        keys: how many there are.
    """
    global _step
    # By value: the next step writes into the same memory, and steps of inference mode count no changes.
    told = (key_ends.device, keys, tuple(ends.tolist()), tuple(key_ends.tolist()))
    known = _step
    if known is not None and known[0] == told:
        return known[1]
    lengths = key_ends.diff().int()
    table = key_ends[:-1, None] + torch.arange(int(lengths.max()), device=key_ends.device)
    made = table.clamp(max=keys - 1).int(), lengths, ends.int().clone()
    _step = told, made
    return made


def _packed(
    ends: Tensor | None, key_ends: Tensor | None, query: Tensor, key: Tensor, causality: bool, window: int | None
) -> Plan:
    """Return the plan where there is no mask: causality, within packed sequences if their ends are given."""
    queries, keys = query.shape[2], key.shape[2]
    causality = causality and queries > 1
    if ends is None:
        return Plan(causal=causality)
    own = (ends,) if key_ends is None or key_ends is ends else (ends, key_ends)
    mask = causal() if causality else None
    if window:
        mask = causal() & sliding_window(window)

    def lowered() -> Plan:
        return packed(ends, own[-1], mask).plan(queries, keys, offset=0, device=query.device)

    return _once(own, (queries, keys, causality, window, query.device), lowered)


def _warn_of_packing(positions: Any) -> None:
    """Warn where positions restart within a row and no mask keeps the sequences apart (transformers#46634).

    transformers makes such a mask only if it is given none, and no cache is used.
    """
    # Of other classes are those that stand for tensors and have no values.
    if torch.compiler.is_compiling() or type(positions) is not Tensor or positions.dim() != 2:
        return
    if hasattr(positions, "_kpt_seen"):  # by another layer
        return
    positions._kpt_seen = True  # type: ignore[attr-defined]
    if bool((positions.diff(dim=1) < 0).any()):
        warn_caller(
            f"{NAME}: positions restart within a row, but nothing keeps the packed sequences apart, so that each sees "
            "those before it: leave out attention_mask, and set use_cache=False; or pass cu_seq_lens_q",
            KptWarning,
        )


def _is_step_of_graph(query: Tensor) -> bool:
    """Return whether a graph is made of a step of decoding: to add its mask costs less than to look for its blocks."""
    return torch.compiler.is_compiling() and statically_known_true(query.shape[2] < FEW)


def _lowered(mask: Tensor, query: Tensor, key: Tensor) -> Plan:
    """Return the plan of a bool mask, which is made once for the layers that share the tensor."""
    sizes = query.shape[0], query.shape[1], query.shape[2], key.shape[2]
    if isinstance(mask, ModelMask):
        mask = mask.whole()
    if mask.dim() != 4 or mask.shape[2] not in (1, sizes[2]):
        raise InputError(f"{NAME}: a bool mask of {list(mask.shape)}; expected [B or 1, H or 1, {sizes[2]} or 1, keys]")
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or mask.is_meta:  # type: ignore[attr-defined, no-untyped-call]
        return Plan(**all_blocks(mask[..., : sizes[3]].expand(-1, -1, sizes[2], -1)))
    shown = mask[..., : sizes[3]]

    def lowered() -> Plan:
        made = dense_mask(shown)
        return made.plan(sizes[2], sizes[3], batch=sizes[0], heads=sizes[1], device=query.device, offset=0)

    return _once((mask,), (sizes, query.device), lowered)


def _once(tensors: tuple[Tensor, ...], sizes: object, make: Callable[[], Plan]) -> Plan:
    """Make a plan once for the layers that share the tensors it is made of; the first of these keeps it."""
    known = getattr(tensors[0], "_kpt_plan", None)
    if known is not None and known[0] == sizes and len(known[2]) == len(tensors):
        before = (tensors[0], *known[1])
        if all(map(_is_unchanged, tensors, before, known[2])):
            return known[3]  # type: ignore[no-any-return]
    # Tensors of inference mode count no changes: what they hold is compared.
    states = tuple(each.clone() if each.is_inference() else each._version for each in tensors)
    plan = make()
    tensors[0]._kpt_plan = sizes, tensors[1:], states, plan  # type: ignore[attr-defined]
    return plan


def _is_unchanged(one: Tensor, other: Tensor, state: Tensor | int) -> bool:
    if one is not other:
        return False
    return torch.equal(one, state) if isinstance(state, Tensor) else not one.is_inference() and one._version == state


def enable_continuous_batching(model: PreTrainedModel) -> PreTrainedModel:
    """Let a model that was loaded with `attn_implementation="kpt"` serve by continuous batching, and return it.

    transformers refuses names that it does not know there. This model's `init_continuous_batching`, and with it
    `generate_batch` and `continuous_batching_context_manager`, then accept `"kpt"`; so do copies of it, and models that
    wrap it, as PEFT's do. Other models stay as they are.

    Raises:
        InputError: the model has another attention implementation.

    Examples:
        >>> model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="kpt")
        >>> outputs = enable_continuous_batching(model).generate_batch(prompts, max_new_tokens=64)
    """
    if model.config._attn_implementation != NAME:
        raise InputError(
            f"{NAME}: the model's attn_implementation is {model.config._attn_implementation!r}: load it with "
            f"attn_implementation={NAME!r}, or call model.set_attn_implementation({NAME!r})"
        )
    # The methods of a wrapped model are called with the model inside. A mark, unlike a method, is copied and pickled.
    for each in model.modules():
        if isinstance(each, PreTrainedModel):
            each._kpt_serves_batches = True  # type: ignore[assignment]
    return model


def _serve_batches() -> None:
    """Let transformers' serving take `"kpt"` of models that were enabled, and name the way where it refuses others."""
    asked = ContinuousBatchingManager.switch_to_cb_friendly_attn
    if hasattr(asked, "_kpt"):  # this module is imported again
        return

    @wraps(asked)
    def switch(self: ContinuousBatchingManager, model: Any, *args: Any, **kwargs: Any) -> None:
        if model.config._attn_implementation != NAME:
            return asked(self, model, *args, **kwargs)
        if getattr(model, "_kpt_serves_batches", False):
            return None
        try:
            return asked(self, model, *args, **kwargs)
        except ValueError as error:
            raise InputError(
                f"{error} For {NAME!r}, call kpt_attention.transformers.enable_continuous_batching(model) first."
            ) from error

    switch._kpt = True  # type: ignore[attr-defined]
    ContinuousBatchingManager.switch_to_cb_friendly_attn = switch  # type: ignore[method-assign]


def _ask_of_classes() -> None:
    """Let transformers ask `check_class` where a model is made with, or set to, `"kpt"`; other names as before."""
    asked = PreTrainedModel.get_correct_attn_implementation
    if hasattr(asked, "_kpt"):  # this module is imported again
        return

    @wraps(asked)
    def correct(self: PreTrainedModel, requested_attention: str | None, *args: Any, **kwargs: Any) -> str:
        if requested_attention == NAME:
            check_class(self, NAME)
        return asked(self, requested_attention, *args, **kwargs)

    correct._kpt = True  # type: ignore[attr-defined]
    PreTrainedModel.get_correct_attn_implementation = correct  # type: ignore[method-assign]


_ask_of_classes()
_serve_batches()
AttentionInterface.register(NAME, kpt_attention_forward)
AttentionMaskInterface.register(NAME, kpt_attention_mask)
