"""The operators behind `moe.experts`: its calls of the native kernels, and what PyTorch's compilers know of them."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kpt_backend_cpu import native
from kpt_backend_cpu.structures import ACTIVATIONS

from .tensors import address, matrices, ordered_as, rows, with_whole_columns_or_rows, with_whole_rows

_library = torch.library.Library("kpt_backend_cpu", "FRAGMENT")
_TENSORS = (
    "Tensor x, Tensor top_k_index, Tensor top_k_weights, Tensor up, Tensor down, Tensor? up_bias, Tensor? down_bias, "
    "Tensor? up_scale, Tensor? down_scale"
)
_ACTIVATION = "str activation, bool interleaved, float alpha, float beta, float? limit"
_library.define(f"experts({_TENSORS}, {_ACTIVATION}, bool few) -> Tensor")
_library.define(f"experts_training({_TENSORS}, {_ACTIVATION}) -> (Tensor, Tensor, Tensor, Tensor)")
_library.define(
    f"experts_backward(Tensor grad, {_TENSORS}, Tensor h, Tensor order, Tensor offsets, bool[] needed, {_ACTIVATION}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)


class _Tensors(NamedTuple):
    """What the op takes, `[experts, K, N]` matrices, in a layout that the kernels read; copies live as long as this."""

    x: Tensor
    top_k_index: Tensor
    top_k_weights: Tensor
    up: Tensor
    down: Tensor
    up_bias: Tensor | None
    down_bias: Tensor | None
    up_scale: Tensor | None
    down_scale: Tensor | None

    def laid_out(self) -> "_Tensors":
        return _Tensors(
            with_whole_rows(self.x),
            self.top_k_index.contiguous(),
            self.top_k_weights.contiguous(),
            with_whole_columns_or_rows(self.up),
            with_whole_columns_or_rows(self.down),
            None if self.up_bias is None else with_whole_rows(self.up_bias),
            None if self.down_bias is None else with_whole_rows(self.down_bias),
            self.up_scale,
            self.down_scale,
        )

    def arguments(
        self,
        settings: Sequence[Any],
        out: Tensor | None,
        order: Tensor | None = None,
        offsets: Tensor | None = None,
        h: Tensor | None = None,
    ) -> tuple[float, ...]:
        """The numbers of `structures.Experts`."""
        activation, interleaved, alpha, beta, limit = settings
        index = self.top_k_index
        num_experts, hidden, width = self.up.shape
        return (
            *rows(self.x),
            *rows(out),
            index.data_ptr(),
            index.dtype is torch.int64,
            *rows(self.top_k_weights),
            *matrices(self.up, self.up_scale),
            *matrices(self.down, self.down_scale),
            *rows(self.up_bias),
            *rows(self.down_bias),
            *(ACTIVATIONS[activation], interleaved, limit is not None, alpha, beta, limit or 0.0),
            address(order),
            address(offsets),
            *rows(h),
            *index.shape,
            num_experts,
            hidden,
            width,
            self.down.shape[1],
            torch.get_num_threads(),
        )


def _sort(index: Tensor, order: Tensor, offsets: Tensor) -> None:
    """Fill in the pairs in the order of their experts, and the end of each expert's."""
    places = index.data_ptr(), index.dtype is torch.int64, order.data_ptr(), offsets.data_ptr()
    native.run("kpt_sort", *places, order.numel(), offsets.numel())


def _has_pairs(tensors: _Tensors) -> bool:
    """Whether anything is to be computed: else all results are zero."""
    return tensors.x.numel() > 0 and tensors.top_k_index.numel() > 0


@torch.library.impl(_library, "experts", "CPU")
def forward(*arguments: Any) -> Tensor:
    """What `torch.ops.kpt_backend_cpu.experts` does on a CPU."""
    *settings, few = arguments[9:]
    tensors = _Tensors(*arguments[:9])
    out = tensors.x.new_empty(tensors.x.shape)
    if not _has_pairs(tensors):
        return out.zero_()
    tensors = tensors.laid_out()
    if few:
        native.run("kpt_experts_decode", *tensors.arguments(settings, out))
    else:
        index = tensors.top_k_index
        order = index.new_empty(index.numel(), dtype=torch.int32)
        offsets = order.new_empty(tensors.up.shape[0])
        _sort(index, order, offsets)
        native.run("kpt_experts_forward", *tensors.arguments(settings, out, order, offsets))
    return out


@torch.library.impl(_library, "experts_training", "CPU")
def _training(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tensors, settings = _Tensors(*arguments[:9]), arguments[9:]
    out, h, order, offsets = _training_fake(*arguments)
    if not _has_pairs(tensors):
        return out.zero_(), h.zero_(), order.zero_(), offsets.zero_()
    tensors = tensors.laid_out()
    _sort(tensors.top_k_index, order, offsets)
    native.run("kpt_experts_forward", *tensors.arguments(settings, out, order, offsets, h))
    return out, h, order, offsets


@torch.library.impl(_library, "experts_backward", "CPU")
def _backward(grad: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    tensors, (h, order, offsets, needed, *settings) = _Tensors(*arguments[:9]), arguments[9:]
    # Those that nobody needs are empty: results of an op may not be one tensor, nor none.
    found: tuple[Tensor, ...] = _backward_fake(grad, *arguments)
    if not _has_pairs(tensors):
        return tuple(each.zero_() for each in found)
    tensors, grad = tensors.laid_out(), with_whole_rows(grad)
    of_x, of_weights, of_up, of_down, of_up_bias, of_down_bias = (
        each if wanted else None for each, wanted in zip(found, needed, strict=True)
    )
    native.run(
        "kpt_experts_backward",
        *tensors.arguments(settings, None, order, offsets, h),
        *rows(grad),
        *rows(of_x),
        *rows(of_weights),
        *matrices(of_up),
        *matrices(of_down),
        *rows(of_up_bias),
        *rows(of_down_bias),
    )
    return found


@torch.library.register_fake("kpt_backend_cpu::experts", lib=_library)  # type: ignore[untyped-decorator]
def _forward_fake(x: Tensor, *rest: Any) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.register_fake("kpt_backend_cpu::experts_training", lib=_library)  # type: ignore[untyped-decorator]
def _training_fake(
    x: Tensor, top_k_index: Tensor, top_k_weights: Tensor, up: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    pairs = top_k_index.numel()
    order = top_k_index.new_empty(pairs, dtype=torch.int32)
    return x.new_empty(x.shape), x.new_empty(pairs, up.shape[2]), order, order.new_empty(up.shape[0])


@torch.library.register_fake("kpt_backend_cpu::experts_backward", lib=_library)  # type: ignore[untyped-decorator]
def _backward_fake(grad: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    tensors, needed = _Tensors(*arguments[:9]), arguments[12]
    x, up, down = tensors.x, tensors.up, tensors.down

    def empty(wanted: bool, like: Tensor, *shape: int) -> Tensor:
        return like.new_empty(shape if wanted else 0)

    need_x, need_weights, need_up, need_down, need_up_bias, need_down_bias = needed
    return (
        empty(need_x, x, *x.shape),
        empty(need_weights, tensors.top_k_weights, *tensors.top_k_weights.shape),
        ordered_as(up, x.dtype) if need_up else empty(False, x),
        ordered_as(down, x.dtype) if need_down else empty(False, x),
        empty(need_up_bias, x, up.shape[0], up.shape[2]),
        empty(need_down_bias, x, down.shape[0], down.shape[2]),
    )
