"""The C interface of the native kernels as ctypes has it; `native/kpt_cpu.h` says what each part means.

Order and types are those of that file, to which a test holds them. Pointers are passed as addresses: whoever fills a
structure keeps the tensors alive until the call returns.
"""

from collections.abc import Iterator
from ctypes import Structure, c_float, c_int32, c_int64, c_void_p, sizeof
from struct import Struct
from typing import Any

#: KPT_CPU_INTERFACE: libraries of another one are not used.
INTERFACE = 9

#: What `scales_of` may be.
SCALES_NONE, SCALES_N, SCALES_K, SCALES_BLOCK = range(4)

#: Values of `kind`.
ACTIVATIONS = {
    name: kind
    for kind, name in enumerate(
        ("swiglu", "geglu", "geglu_tanh", "reglu", "silu", "gelu", "gelu_tanh", "relu", "relu2")
    )
}
#: Those that take gate and up.
GATED = frozenset({"swiglu", "geglu", "geglu_tanh", "reglu"})

#: Values of `rounding`.
ROUNDINGS = {"none": 0, "up": 1, "down": 2}

#: Values of `score`.
SCORES = {"softmax": 0, "softmax_after": 1, "sigmoid": 2}


class Rows(Structure):
    """`struct kpt_rows`; all zero for none."""

    _fields_ = (("data", c_void_p), ("stride", c_int64), ("dtype", c_int32))


class Matrices(Structure):
    """`struct kpt_matrices`; all zero for none."""

    _fields_ = (
        ("data", c_void_p),
        ("stride_e", c_int64),
        ("stride_k", c_int64),
        ("stride_n", c_int64),
        ("dtype", c_int32),
        ("scales_of", c_int32),
        ("scale", c_void_p),
        ("stride_se", c_int64),
        ("stride_sk", c_int64),
        ("stride_sn", c_int64),
    )


class ActivationSettings(Structure):
    """`struct kpt_activation_settings`."""

    _fields_ = (
        ("kind", c_int32),
        ("interleaved", c_int32),
        ("limited", c_int32),
        ("alpha", c_float),
        ("beta", c_float),
        ("limit", c_float),
    )


class GroupedMM(Structure):
    """`struct kpt_grouped_mm`."""

    _fields_ = (
        ("x", Rows),
        ("out", Rows),
        ("weight", Matrices),
        ("x_scale", c_void_p),
        ("x_scale_columns", c_int64),
        ("offsets", c_void_p),
        ("rows", c_int64),
        ("inner", c_int64),
        ("columns", c_int64),
        ("experts", c_int64),
        ("threads", c_int32),
        ("row_scale", c_void_p),
        ("bias", Rows),
    )


#: The numbers of `GroupedMM.bias` where there is none.
NO_BIAS = (0, 0, 0)


class GroupedMMWgrad(Structure):
    """`struct kpt_grouped_mm_wgrad`."""

    _fields_ = (
        ("x", Rows),
        ("grad", Rows),
        ("out", c_void_p),
        ("offsets", c_void_p),
        ("rows", c_int64),
        ("inner", c_int64),
        ("columns", c_int64),
        ("experts", c_int64),
        ("threads", c_int32),
    )


class Experts(Structure):
    """`struct kpt_experts`."""

    _fields_ = (
        ("x", Rows),
        ("out", Rows),
        ("index", c_void_p),
        ("index_is_int64", c_int32),
        ("weights", Rows),
        ("up", Matrices),
        ("down", Matrices),
        ("up_bias", Rows),
        ("down_bias", Rows),
        ("act", ActivationSettings),
        ("order", c_void_p),
        ("offsets", c_void_p),
        ("h", Rows),
        ("tokens", c_int64),
        ("top_k", c_int64),
        ("experts", c_int64),
        ("hidden", c_int64),
        ("width", c_int64),
        ("intermediate", c_int64),
        ("threads", c_int32),
    )


class ExpertsBackward(Structure):
    """`struct kpt_experts_backward`."""

    _fields_ = (
        ("forward", Experts),
        ("grad", Rows),
        ("grad_x", Rows),
        ("grad_weights", Rows),
        ("grad_up", Matrices),
        ("grad_down", Matrices),
        ("grad_up_bias", Rows),
        ("grad_down_bias", Rows),
    )


class Sort(Structure):
    """`struct kpt_sort`."""

    _fields_ = (
        ("index", c_void_p),
        ("index_is_int64", c_int32),
        ("order", c_void_p),
        ("offsets", c_void_p),
        ("pairs", c_int64),
        ("experts", c_int64),
    )


class TopKGating(Structure):
    """`struct kpt_top_k_gating`."""

    _fields_ = (
        ("logits", Rows),
        ("correction_bias", c_void_p),
        ("weights", c_void_p),
        ("index", c_void_p),
        ("tokens", c_int64),
        ("experts", c_int64),
        ("top_k", c_int64),
        ("num_groups", c_int64),
        ("top_groups", c_int64),
        ("score", c_int32),
        ("renormalize", c_int32),
        ("scale", c_float),
        ("threads", c_int32),
    )


class TopKGatingBackward(Structure):
    """`struct kpt_top_k_gating_backward`."""

    _fields_ = (("forward", TopKGating), ("grad", c_void_p), ("grad_logits", Rows))


class Heads(Structure):
    """`struct kpt_heads`; all zero for none."""

    _fields_ = (
        ("data", c_void_p),
        ("stride_b", c_int64),
        ("stride_h", c_int64),
        ("stride_t", c_int64),
        ("dtype", c_int32),
    )


class Attention(Structure):
    """`struct kpt_attention`."""

    _fields_ = (
        ("q", Heads),
        ("k", Heads),
        ("v", Heads),
        ("out", Heads),
        ("largest", c_void_p),
        ("total", c_void_p),
        ("lse", c_void_p),
        ("intervals", c_void_p),
        ("intervals_stride_b", c_int64),
        ("intervals_stride_h", c_int64),
        ("interval_count", c_int64),
        ("blocks", c_void_p),
        ("blocks_stride_b", c_int64),
        ("blocks_stride_h", c_int64),
        ("block_bits", c_void_p),
        ("sinks", c_void_p),
        ("bias", Heads),
        ("slopes", c_void_p),
        ("by_distance", c_void_p),
        ("far", c_int64),
        ("batch", c_int64),
        ("heads", c_int64),
        ("kv_heads", c_int64),
        ("queries", c_int64),
        ("keys", c_int64),
        ("dim", c_int64),
        ("value_dim", c_int64),
        ("position", c_int64),
        ("seed", c_int64),
        ("offset", c_int64),
        ("first_row", c_int64),
        ("drop_least", c_int32),
        ("drop_scale", c_float),
        ("causal", c_int32),
        ("scale", c_float),
        ("softcap", c_float),
        ("threads", c_int32),
    )


class AttentionBackward(Structure):
    """`struct kpt_attention_backward`."""

    _fields_ = (
        ("forward", Attention),
        ("grad", Heads),
        ("grad_lse", c_void_p),
        ("common", c_void_p),
        ("grad_q", Heads),
        ("grad_k", Heads),
        ("grad_v", Heads),
        ("grad_bias", c_void_p),
        ("grad_slopes", c_void_p),
        ("grad_by_distance", c_void_p),
    )


class Pages(Structure):
    """`struct kpt_pages`."""

    _fields_ = (
        ("data", c_void_p),
        ("stride_page", c_int64),
        ("stride_token", c_int64),
        ("stride_head", c_int64),
        ("dtype", c_int32),
    )


class AttentionPaged(Structure):
    """`struct kpt_attention_paged`."""

    _fields_ = (
        ("q", Heads),
        ("out", Heads),
        ("k", Pages),
        ("v", Pages),
        ("lse", c_void_p),
        ("table", c_void_p),
        ("table_stride", c_int64),
        ("page_size", c_int64),
        ("ends", c_void_p),
        ("spans", c_void_p),
        ("sinks", c_void_p),
        ("k_scale", c_void_p),
        ("v_scale", c_void_p),
        ("bias", Heads),
        ("slopes", c_void_p),
        ("slopes_stride", c_int64),
        ("by_distance", c_void_p),
        ("far", c_int64),
        ("places", c_void_p),
        ("sequences", c_int64),
        ("queries", c_int64),
        ("heads", c_int64),
        ("kv_heads", c_int64),
        ("dim", c_int64),
        ("value_dim", c_int64),
        ("position", c_int64),
        ("scale", c_float),
        ("softcap", c_float),
        ("causal", c_int32),
        ("threads", c_int32),
    )


class Quantize(Structure):
    """`struct kpt_quantize`."""

    _fields_ = (
        ("x", Rows),
        ("codes", c_void_p),
        ("scale", c_void_p),
        ("rows", c_int64),
        ("columns", c_int64),
        ("matrix_rows", c_int64),
        ("block_rows", c_int64),
        ("block_columns", c_int64),
        ("dtype", c_int32),
        ("given", c_int32),
        ("rounding", c_int32),
        ("threads", c_int32),
    )


class RMSNorm(Structure):
    """`struct kpt_rms_norm`."""

    _fields_ = (
        ("x", Rows),
        ("out", Rows),
        ("weight", c_void_p),
        ("rows", c_int64),
        ("columns", c_int64),
        ("eps", c_float),
        ("threads", c_int32),
    )


#: Name of a kernel to the structure that it takes.
KERNELS: dict[str, type[Structure]] = {
    "kpt_grouped_mm": GroupedMM,
    "kpt_grouped_mm_wgrad": GroupedMMWgrad,
    "kpt_experts_decode": Experts,
    "kpt_experts_forward": Experts,
    "kpt_experts_backward": ExpertsBackward,
    "kpt_sort": Sort,
    "kpt_top_k_gating": TopKGating,
    "kpt_top_k_gating_backward": TopKGatingBackward,
    "kpt_quantize": Quantize,
    "kpt_rms_norm": RMSNorm,
    "kpt_attention_forward": Attention,
    "kpt_attention_backward": AttentionBackward,
    "kpt_attention_paged": AttentionPaged,
}

_CODES: dict[Any, str] = {c_void_p: "N", c_int64: "q", c_int32: "i", c_float: "f"}


def packed(structure: type[Structure]) -> Struct:
    """What makes a structure of its numbers, those of structures in it in their place; ten times as fast as ctypes."""
    end, codes = 0, ["@"]
    for offset, kind in _numbers(structure, 0):
        codes += [f"{offset - end}x", _CODES[kind]]
        end = offset + sizeof(kind)
    return Struct("".join([*codes, f"{sizeof(structure) - end}x"]))


def _numbers(structure: Any, start: int) -> Iterator[tuple[int, Any]]:
    """Places and types of the numbers of a structure that begins at `start`."""
    for field in structure._fields_:
        name, kind = field[:2]
        offset = start + getattr(structure, name).offset
        if kind in _CODES:
            yield offset, kind
        else:
            yield from _numbers(kind, offset)
