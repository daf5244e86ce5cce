"""Faults that kernels really have, one to a kernel, and the check that must find each."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import honest


@dataclass(frozen=True)
class Mutant:
    """A kernel with a fault.

    Attributes:
        name: the fault.
        op: of which the kernel is.
        found_by: the check of the suite that must find it.
        make: makes its forward and its backward.
        offer: what the backend declares beside it.
    """

    name: str
    op: str
    found_by: str
    make: Callable[[], tuple[honest.Function, ...]]
    offer: dict[str, Any] = field(default_factory=dict)


MUTANTS: list[Mutant] = []


def grouped_mm(name: str, found_by: str, **offer: Any) -> Callable[..., Any]:
    """Enter a mutant of `moe.grouped_mm`, made by the decorated function."""

    def enter(make: Callable[[], tuple[honest.Function, ...]]) -> None:
        MUTANTS.append(Mutant(name, "moe.grouped_mm", found_by, make, offer))

    return enter


def forward_fault(name: str, found_by: str, **offer: Any) -> Callable[[honest.Part], None]:
    """Enter a mutant whose forward is the decorated function."""

    def enter(forward: honest.Part) -> None:
        MUTANTS.append(Mutant(name, "moe.grouped_mm", found_by, lambda: honest.grouped_mm_of(forward), offer))

    return enter


@forward_fault("the last row of every expert is left out", "values")
def _(x, weight, offsets):
    out = honest.product(x, weight, offsets)
    out[(offsets.long() - 1).clamp(min=0)[: x.shape[0]]] = 0
    return out


@forward_fault("rows past a multiple of eight are left out", "values")
def _(x, weight, offsets):
    out = honest.product(x, weight, offsets)
    for _, start, end in honest.ends_of(offsets):
        out[start + (end - start) // 8 * 8 : end] = 0
    return out


@forward_fault("the last expert is missing", "values")
def _(x, weight, offsets):
    out = honest.product(x, weight, offsets)
    for expert, start, end in honest.ends_of(offsets):
        if expert == weight.shape[0] - 1:
            out[start:end] = 0
    return out


@forward_fault("the last element of K is not summed", "values")
def _(x, weight, offsets):
    return honest.product(x[:, :-1], weight[:, :-1], offsets)


@forward_fault("the sum is taken in bfloat16", "values")
def _(x, weight, offsets):
    return honest.product(x.bfloat16(), weight.bfloat16(), offsets).to(x.dtype)


@forward_fault("operands are cut to ten bits, as TF32 does", "values")
def _(x, weight, offsets):
    return honest.product(x.half().to(x.dtype), weight.half().to(x.dtype), offsets)


@forward_fault("the result is rounded twice", "values")
def _(x, weight, offsets):
    out = honest.product(x, weight, offsets)
    return (out * 3).to(out.dtype) / 3


@forward_fault("rows of nobody are never written", "poisoned_outputs")
def _(x, weight, offsets):
    out = torch.empty(x.shape[0], weight.shape[2], dtype=x.dtype, device=x.device)
    for expert, start, end in honest.ends_of(offsets):
        out[start:end] = x[start:end] @ weight[expert]
    return out


@forward_fault("the rows of small experts are never written", "poisoned_outputs")
def _(x, weight, offsets):
    out = torch.empty(x.shape[0], weight.shape[2], dtype=x.dtype, device=x.device)
    for expert, start, end in honest.ends_of(offsets):
        if end - start > 1:
            out[start:end] = x[start:end] @ weight[expert]
    out[int(offsets[-1]) if len(offsets) else 0 :] = 0
    return out


def _through_int32(tensor: Tensor) -> Tensor:
    """Read a tensor as a kernel does whose offsets are int32."""
    row = torch.arange(tensor.shape[0]) * tensor.stride(0) if tensor.dim() > 1 else torch.zeros(1).long()
    wrapped = (row + 2**31) % 2**32 - 2**31
    storage = tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)
    rows = []
    for index, start in enumerate(wrapped.tolist()):
        place = (tensor.storage_offset() + start) % storage.shape[0]
        size = 1 + sum((n - 1) * s for n, s in zip(tensor.shape[1:], tensor.stride()[1:], strict=True))
        if min(tensor.shape) == 0 or place + size > storage.shape[0]:
            rows.append(tensor[index])
        else:
            rows.append(storage.as_strided(tensor.shape[1:], tensor.stride()[1:], place))
    return torch.stack(rows) if rows else tensor


@forward_fault("offsets of x overflow int32", "far_strides")
def _(x, weight, offsets):
    return honest.product(_through_int32(x), weight, offsets)


@forward_fault("offsets of the weight overflow int32", "far_strides")
def _(x, weight, offsets):
    return honest.product(x, _through_int32(weight), offsets)


def _as_if_contiguous(tensor: Tensor) -> Tensor:
    strides = [int(torch.tensor(tensor.shape[i + 1 :]).prod()) for i in range(tensor.dim())]
    room = tensor.untyped_storage().nbytes() // tensor.element_size() - tensor.storage_offset()
    return tensor.as_strided(tensor.shape, strides) if tensor.numel() <= room else tensor.contiguous()


@forward_fault("strides are ignored", "layouts")
def _(x, weight, offsets):
    return honest.product(_as_if_contiguous(x), weight, offsets)


@forward_fault("the weight is taken for contiguous", "layouts")
def _(x, weight, offsets):
    return honest.product(x, _as_if_contiguous(weight), offsets)


@forward_fault("the weight is taken for contiguous where x is", "layouts")
def _(x, weight, offsets):
    return honest.product(x, _as_if_contiguous(weight) if x.is_contiguous() else weight, offsets)


@forward_fault("the storage offset is ignored", "layouts")
def _(x, weight, offsets):
    return honest.product(x.as_strided(x.shape, x.stride(), 0), weight, offsets)


@forward_fault("stride zero is read as one", "layouts")
def _(x, weight, offsets):
    expanded = x.dim() == 2 and x.shape[0] > 1 and x.stride(0) == 0
    return honest.product(torch.zeros_like(x) if expanded else x, weight, offsets)


@forward_fault("rows of nobody are zeroed in the argument", "inputs_unchanged")
def _(x, weight, offsets):
    x[int(offsets[-1]) if len(offsets) else 0 :].zero_()
    return honest.product(x, weight, offsets)


@forward_fault("NaN becomes zero", "nans")
def _(x, weight, offsets):
    return honest.product(x.nan_to_num(nan=0.0), weight, offsets)


@forward_fault("a NaN spreads to all rows of its expert", "nans")
def _(x, weight, offsets):
    out = honest.product(x, weight, offsets)
    for _, start, end in honest.ends_of(offsets):
        out[start:end] += out[start:end].sum(0) * 0
    return out


@forward_fault("padding is multiplied by zero rather than left out", "padding")
def _(x, weight, offsets):
    inside = torch.arange(x.shape[0], device=x.device) < (offsets[-1] if len(offsets) else 0)
    out = honest.product(x, weight, offsets)
    return out + (x * ~inside.unsqueeze(1) * 0).sum(1, keepdim=True)


@forward_fault("the result is contiguous in its columns", "fake_result")
def _(x, weight, offsets):
    return honest.product(x, weight, offsets).t().contiguous().t()


@forward_fault("half precision gives a float32 result", "result_type")
def _(x, weight, offsets):
    return honest.product(x, weight, offsets).float()


_buffers: dict[Any, Tensor] = {}


@forward_fault("results share one buffer", "double_use")
def _(x, weight, offsets):
    out = honest.product(x, weight, offsets)
    buffer = _buffers.setdefault((out.shape, out.dtype), torch.empty_like(out))
    return buffer.copy_(out)


_ends: dict[Any, Tensor] = {}


@forward_fault("offsets are remembered by their shape", "double_use")
def _(x, weight, offsets):
    key = (x.shape, offsets.shape)
    return honest.product(x, weight, _ends.setdefault(key, offsets.clone()))


_workspace: dict[str, Tensor] = {}


@forward_fault("threads share one workspace", "threads")
def _(x, weight, offsets):
    _workspace["out"] = honest.product(x, weight, offsets)
    time.sleep(0.002)
    return _workspace["out"].clone()


@forward_fault("sums are taken in an order that changes", "repeatable", deterministic=True)
def _(x, weight, offsets):
    order = torch.randperm(x.shape[1])
    return honest.product(x[:, order], weight[:, order], offsets)


@grouped_mm("the gradient of x uses the next expert's weight", "values")
def _():
    return honest.grouped_mm_of(for_x=lambda g, w, o: honest.product_for_x(g, w.roll(1, 0), o))


@grouped_mm("the gradient of x lacks the last expert", "values")
def _():
    def for_x(grad, weight, offsets):
        out = honest.product_for_x(grad, weight, offsets)
        if len(offsets) > 1:
            out[int(offsets[-2]) :] = 0
        return out

    return honest.grouped_mm_of(for_x=for_x)


@grouped_mm("the gradient of the weight lacks the last row", "values")
def _():
    def for_weight(x, grad, offsets):
        return honest.product_for_weight(x, grad, (offsets - 1).clamp(min=0))

    return honest.grouped_mm_of(for_weight=for_weight)


@grouped_mm("the gradient of the weight of an expert without rows is never written", "poisoned_outputs")
def _():
    def for_weight(x, grad, offsets):
        out = x.new_empty(offsets.shape[0], x.shape[1], grad.shape[1])
        for expert, start, end in honest.ends_of(offsets):
            if end > start:
                out[expert] = x[start:end].t() @ grad[start:end]
        return out

    return honest.grouped_mm_of(for_weight=for_weight)


@grouped_mm("the cotangent is taken for contiguous", "cotangents")
def _():
    return honest.grouped_mm_of(
        for_x=lambda g, w, o: honest.product_for_x(_as_if_contiguous(g), w, o),
        for_weight=lambda x, g, o: honest.product_for_weight(x, _as_if_contiguous(g), o),
    )


@grouped_mm("backward changes the cotangent", "inputs_unchanged")
def _():
    def for_x(grad, weight, offsets):
        out = honest.product_for_x(grad, weight, offsets)
        grad.mul_(0.5)
        return out

    return honest.grouped_mm_of(for_x=for_x)


@grouped_mm("padding gets a gradient", "padding")
def _():
    def for_x(grad, weight, offsets):
        out = honest.product_for_x(grad, weight, offsets)
        out[int(offsets[-1]) if len(offsets) else 0 :] = 1
        return out

    return honest.grouped_mm_of(for_x=for_x)


@grouped_mm("what backward needs is kept in one place", "double_use")
def _():
    kept: dict[str, Tensor] = {}

    def forward(x, weight, offsets):
        kept["x"] = x.clone()
        return honest.product(x, weight, offsets)

    return honest.grouped_mm_of(forward, for_weight=lambda x, g, o: honest.product_for_weight(kept["x"], g, o))


@grouped_mm("the weight gets no gradient", "values")
def _():
    return honest.grouped_mm_of(for_weight=lambda x, g, o: x.new_zeros(o.shape[0], x.shape[1], g.shape[1]))


@grouped_mm("it reads values, though compilers may look into it", "traced", differentiable=True, traceable=True)
def _():
    return (honest.grouped_mm_of()[0],)


@grouped_mm("sizes are fixed, though compilers may look into it", "traced", traceable=True)
def _():
    def grouped_mm(call):
        block = 1 << call.x.shape[0].bit_length()  # a plain number, of the size that is traced
        rows = torch.arange(block)[: call.x.shape[0]].unsqueeze(1)
        of_expert = (rows >= call.offsets).sum(1)
        inside = (of_expert < call.offsets.shape[0]).unsqueeze(1)
        weight = call.weight[of_expert.clamp(max=call.offsets.shape[0] - 1)]
        return (call.x.unsqueeze(1) @ weight).squeeze(1) * inside

    return (grouped_mm,)


class _OnceDifferentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, offsets)
        return honest.product(x, weight, offsets)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, offsets = (tensor.detach() for tensor in ctx.saved_tensors)
        return honest.product_for_x(grad, weight, offsets), honest.product_for_weight(x, grad, offsets), None


@grouped_mm("its gradient does not depend on what it was taken for", "second_derivatives", differentiable=True)
def _():
    return (lambda call: _OnceDifferentiable.apply(call.x, call.weight, call.offsets),)


@grouped_mm("it refuses every call", "declaration", unsupported=lambda call: "too small for this kernel")
def _():
    return honest.grouped_mm_of()


@grouped_mm(
    "it refuses every call that wants a gradient and is not declared forward only",
    "declaration",
    unsupported=lambda call: "it gives no gradients" if call.needs else None,
)
def _():
    return honest.grouped_mm_of()


@grouped_mm("it refuses without a sentence", "declaration", unsupported=lambda call: "no")
def _():
    return honest.grouped_mm_of()


@grouped_mm("forward takes the arguments one by one", "declaration")
def _():
    return honest.product, honest.grouped_mm_of()[1]


@grouped_mm("backward takes no gradient", "declaration")
def _():
    return honest.grouped_mm_of()[0], lambda call, saved: {}


@grouped_mm("the result is the argument where every row is of nobody", "no_aliasing")
def _():
    forward, backward = honest.grouped_mm_of()

    def grouped_mm(call):
        if call.x.shape[1] == 8 and call.weight.shape[2] == 6 and not call.needs and not call.offsets.any():
            return call.x.narrow(1, 0, 6)
        return forward(call)

    return grouped_mm, backward


def _unless_training(fault: honest.Part) -> tuple[honest.Function, ...]:
    """A kernel with a path of its own for calls that want no gradient."""
    forward, backward = honest.grouped_mm_of()
    return lambda call: forward(call) if call.needs else fault(call.x, call.weight, call.offsets), backward


@grouped_mm("rows of nobody are never zeroed where no gradient is wanted", "without_gradients")
def _():
    def forward(x, weight, offsets):
        out = torch.ones(x.shape[0], weight.shape[2], dtype=x.dtype)
        for expert, start, end in honest.ends_of(offsets):
            out[start:end] = x[start:end] @ weight[expert]
        return out

    return _unless_training(forward)


@grouped_mm("results share one buffer where no gradient is wanted", "without_gradients")
def _():
    buffers: dict[Any, Tensor] = {}

    def forward(x, weight, offsets):
        out = honest.product(x, weight, offsets)
        return buffers.setdefault((out.shape, out.dtype), out).copy_(out)

    return _unless_training(forward)


@grouped_mm("rows of nobody are zeroed in the argument where no gradient is wanted", "without_gradients")
def _():
    def forward(x, weight, offsets):
        out = honest.product(x, weight, offsets)
        x[int(offsets[-1]) if len(offsets) else 0 :].zero_()
        return out

    return _unless_training(forward)


@grouped_mm("a workspace of inference mode is used in training", "without_gradients")
def _():
    spaces: dict[Any, Tensor] = {}
    forward, backward = honest.grouped_mm_of()

    def grouped_mm(call):
        key = tuple(call.x.shape)
        if torch.is_inference_mode_enabled() or key in spaces:
            spaces.setdefault(key, torch.ones(key)).mul_(1)
        return forward(call)

    return grouped_mm, backward


@grouped_mm("x gets its gradient only where the weight does", "single_gradients")
def _():
    forward, backward = honest.grouped_mm_of()
    return forward, lambda call, saved, grad: backward(call, saved, grad) if "weight" in call.needs else {}


@forward_fault("it seeds the random numbers", "settings")
def _(x, weight, offsets):
    torch.manual_seed(0)
    return honest.product(x, weight, offsets)


@forward_fault("sums are taken in the default dtype", "settings")
def _(x, weight, offsets):
    default = torch.get_default_dtype()
    return honest.product(x.to(default), weight.to(default), offsets).to(x.dtype)


@grouped_mm("backward leaves deterministic algorithms switched on", "settings")
def _():
    def for_x(grad, weight, offsets):
        torch.use_deterministic_algorithms(True, warn_only=True)
        return honest.product_for_x(grad, weight, offsets)

    return honest.grouped_mm_of(for_x=for_x)


def experts(name: str, found_by: str = "values") -> Callable[[type[honest.Experts]], type[honest.Experts]]:
    """Enter a mutant of `moe.experts`: the decorated class."""

    def enter(cls: type[honest.Experts]) -> type[honest.Experts]:
        MUTANTS.append(Mutant(name, "moe.experts", found_by, lambda: (cls(),), {"differentiable": True}))
        return cls

    return enter


@experts("the last expert is missing")
class _(honest.Experts):
    def rows(self, mask):
        return mask & (mask.new_tensor(0) < 0) if getattr(self, "last", False) else mask

    def here(self, index, num_experts, expert):
        self.last = expert == num_experts - 1
        return index == expert


@experts("a negative id means the last expert")
class _(honest.Experts):
    def here(self, index, num_experts, expert):
        return torch.where(index == -1, num_experts - 1, index) == expert


@experts("an id beyond the experts is clamped")
class _(honest.Experts):
    def here(self, index, num_experts, expert):
        return index.clamp(max=num_experts - 1) == expert


@experts("an expert takes 32 rows and drops the rest")
class _(honest.Experts):
    def rows(self, mask):
        return mask & (mask.flatten().cumsum(0).view(mask.shape) <= 32)


class _NoGradientOfWeights(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(y, weight)
        return y * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        y, weight = ctx.saved_tensors
        return grad * weight, (grad * y).mean(1, keepdim=True)


@experts("the gradient of the routing weights is a mean, not a sum")
class _(honest.Experts):
    def weigh(self, y, weight):
        return _NoGradientOfWeights.apply(y, weight)


@experts("routing weights get no gradient")
class _(honest.Experts):
    def weigh(self, y, weight):
        return y * weight.detach()


@experts("routing weights are rounded to bfloat16")
class _(honest.Experts):
    def weigh(self, y, weight):
        return y * weight.bfloat16().to(weight.dtype)


@experts("the sum over experts is taken in bfloat16")
class _(honest.Experts):
    def total(self, parts, x):
        return sum(part.bfloat16() for part in parts)


@experts("the bias of the down projection is added twice")
class _(honest.Experts):
    def biased(self, y, bias):
        return y if bias is None else y + 2 * bias


@experts("interleaved weights are taken for halves")
class _(honest.Experts):
    def activate(self, h, **parameters):
        return honest.activate(h, **{**parameters, "interleaved": False})


@experts("the limit is not applied")
class _(honest.Experts):
    def activate(self, h, **parameters):
        return honest.activate(h, **{**parameters, "limit": None})


@experts("gelu is always the tanh approximation")
class _(honest.Experts):
    def activate(self, h, **parameters):
        names = {"gelu": "gelu_tanh", "geglu": "geglu_tanh"}
        return honest.activate(
            h, **{**parameters, "activation": names.get(parameters["activation"], parameters["activation"])}
        )


def _scaled(
    name: str,
    forward: Callable[[Any], Any] = honest.scaled_mm,
    backward: honest.Function = honest.scaled_mm_backward,
    found_by: str = "values",
) -> None:
    MUTANTS.append(Mutant(name, "sample.scaled_mm", found_by, lambda: (forward, backward)))


def _exchanged(call: Any) -> Any:
    square = call.x_scale.shape == call.weight_scale.shape
    return honest.scaled_mm(call._replace(x_scale=call.weight_scale, weight_scale=call.x_scale) if square else call)


_scaled("the scales are exchanged where the matrix is square", _exchanged)
_scaled(
    "every row has the first one's scale",
    lambda call: honest.scaled_mm(call._replace(x_scale=call.x_scale[:1].expand(call.x_scale.shape))),
)
_scaled(
    "scales are rounded to bfloat16",
    lambda call: honest.scaled_mm(call._replace(x_scale=call.x_scale.bfloat16().float())),
)


def _saving(change: Callable[[Tensor], Tensor]) -> honest.Function:
    """Forward that saves something else than the scaled rows."""

    def forward(call: Any) -> Any:
        out, saved = honest.scaled_mm(call)
        return out, tuple(map(change, saved))

    return forward


_scaled(
    "a workspace is kept beside what is saved",
    _saving(lambda rows: torch.cat((rows, rows, rows))[: rows.shape[0]]),
    found_by="saved_tensors",
)
_scaled(
    "what is saved means something else than the op declares",
    _saving(lambda rows: -rows),
    lambda call, saved, grad: honest.scaled_mm_backward(call, (-saved[0],), grad),
    "interchangeable",
)
