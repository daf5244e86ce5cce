"""`FP8Tensor`: 8-bit codes and their scale as one tensor."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from kpt_core import InputError

from .dequantize import dequantize
from .linear import linear as linear_op
from .tensor_operations import HANDLERS, ScaledCodes, about, replace

_MATMUL = (torch.matmul, torch.mm, torch.Tensor.matmul, torch.Tensor.mm, torch.Tensor.__matmul__)


#: Functions of the numbers, whose results are plain: an adapter may begin with them.
_OF_NUMBERS = (torch.isfinite, torch.linalg.norm, torch.linalg.qr, torch.linalg.svd)
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]  # a property in C


class FP8Tensor(ScaledCodes):
    """Codes and scale that stand for a tensor of another dtype; only the codes and the scale are in memory.

    `F.linear(x, weight)` and `x @ weight.t()` run op `fp8.linear`, differentiable in `x` and the bias. It has these
    operations too: `detach`, `clone`, `copy_` from one like it, `isfinite`, `empty_like`, `.to(device)`, `.to(dtype)`
    (what it stands for; the codes stay), `.t()`, slices and splits of whole rows where no scale is cut in two, and
    `add_` and `sub_` of plain numbers, which dequantise and quantise the sum alike, as setting `.data` to numbers does.
    A sum with plain numbers is plain, and so are `torch.linalg.norm`, `qr` and `svd`: PEFT asks for them. Every other
    operation raises `InputError`: nothing is dequantised unasked. Call `dequantize()` for that. `nbytes` and
    `element_size()` tell of the memory that it takes, not of the dtype that it stands for.

    FSDP2 (`fully_shard`) shards its rows and gathers them in 8 bits. The number of rows must be a multiple of the
    number of processes, and for `128x128` of 128 times that. gloo has no 8-bit dtype for other collectives: over gloo,
    save and load sharded state dicts, not full ones.

    It may be an `nn.Parameter(tensor, requires_grad=False)`. It has no gradient: with `requires_grad=True` the linear
    raises. State dicts, `copy.deepcopy`, `pickle`, `torch.save` and `torch.load` with `weights_only=True` keep codes
    and scale; `to_tensors` and `from_tensors` make plain tensors of it for safetensors.

    Args:
        codes: `[..., K]` of an 8-bit format.
        scale: of `scale_shape(codes.shape, granularity)`, float32, float64 or float8_e8m0fnu.
        granularity: what shares a scale: `tensor`, `row`, `1x128`, `128x128` or `1x32`.
        dtype: what it stands for: float64, float32, bfloat16 or float16.
        transposed: it stands for the transpose of codes and scale, which have two dimensions.

    Raises:
        InputError: a shape, dtype or device does not fit.
        UnknownNameError: no such granularity.
    """

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The numbers, as a plain tensor.

        Args:
            dtype: of the result; None is what this stands for.
        """
        numbers = dequantize(self.codes, self.scale, granularity=self.granularity, dtype=dtype or self.dtype)
        return numbers.t() if self.transposed else numbers

    @property
    def nbytes(self) -> int:  # type: ignore[override]  # torch's stub has an attribute there
        """Bytes of codes and scale."""
        return self.codes.nbytes + self.scale.nbytes

    def element_size(self) -> int:
        """Bytes of a code."""
        return self.codes.element_size()

    def require_frozen(self) -> None:
        """Raise `InputError` if a gradient is asked for: there is none."""
        if torch.is_grad_enabled() and self.requires_grad:
            raise InputError(
                "FP8Tensor: the weight is frozen and has no gradient; got requires_grad=True: call "
                "requires_grad_(False) on it, or write nn.Parameter(tensor, requires_grad=False)"
            )

    def share_memory_(self) -> Self:
        """Move codes and scale to shared memory; torch's own way looks for memory here, where there is none."""
        self.codes.share_memory_()
        self.scale.share_memory_()
        return self

    def is_shared(self) -> bool:
        """Tell whether codes and scale are in shared memory."""
        return bool(self.codes.is_shared() and self.scale.is_shared())

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        # As bytes: pickle alone, without torch.save, reads no 8-bit floating-point numbers in torch 2.13.
        tensors = (self.codes.view(torch.uint8), self.codes.dtype, _as_bytes(self.scale), self.scale.dtype)
        about = (self.granularity, self.dtype, self.transposed)
        return _unpickled, (*tensors, *about, isinstance(self, torch.nn.Parameter), self.requires_grad)

    def __tensor_flatten__(self) -> tuple[list[str], tuple[str, torch.dtype, bool]]:
        return ["codes", "scale"], (self.granularity, self.dtype, self.transposed)

    @classmethod
    def __tensor_unflatten__(
        cls, inner: Mapping[str, Tensor], about: tuple[str, torch.dtype, bool], size: object, stride: object
    ) -> Self:
        return cls(inner["codes"], inner["scale"], *about)

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: Sequence[int], module: object, mp_policy: object
    ) -> tuple[tuple[Tensor, ...], tuple[torch.dtype, torch.dtype]]:
        """Return what each process sends, and dtypes: as bytes, since some backends know no 8-bit floating dtype."""
        processes = mesh.size()
        if outer_size[0] % processes:
            raise InputError(
                f"FP8Tensor: FSDP2 shards codes together with their scales, in equal parts; got {outer_size[0]} rows "
                f"for {processes} processes: leave this layer as it is (exclude), or pass its weight to fully_shard in "
                "ignored_params"
            )
        scale = self.scale.reshape(1) if self.scale.dim() == 0 else self.scale
        # Of a process alone torch 2.13 takes the first input and no other.
        sent = (self.codes,) if processes == 1 else (self.codes, scale)
        return tuple(map(_as_bytes, sent)), (self.codes.dtype, scale.dtype)

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[Tensor, ...],
        metadata: tuple[torch.dtype, torch.dtype],
        param_dtype: torch.dtype,
        *,
        out: Self | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """Return the whole weight, in the memory that was gathered into.

        Mixed precision chooses another `param_dtype` than the shard's. `out` is what this gave the first time.
        """
        codes, *scales = all_gather_outputs
        whole = self.scale
        if scales:
            # All processes have the same scale where all numbers share one.
            whole = scales[0].view(metadata[1]) if self.scale.dim() else scales[0].view(metadata[1])[0]
        if out is None:
            return type(self)(codes.view(metadata[0]), whole, self.granularity, param_dtype), ()
        out.scale = whole
        return None

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]  # no name in torch's stub
        turned = ", transposed" if self.transposed else ""
        return (
            f"{type(self).__name__}({list(self.shape)}, {self.codes.dtype}, granularity={self.granularity!r}, "
            f"stands for {self.dtype}, device={str(self.device)!r}{turned})"
        )

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        # Here, since below autograd a linear would be a product of matrices and the gradient of its weight.
        kwargs = kwargs or {}
        if func is F.linear:
            return _linear(*args, **kwargs)
        if func in _MATMUL and len(args) == 2 and isinstance(args[1], FP8Tensor) and args[1].transposed:
            return _linear(args[0], args[1].t())
        if func in _OF_NUMBERS and isinstance(args[0], FP8Tensor):
            return func(args[0].dequantize(), *args[1:], **kwargs)
        if func == _SET_DATA:
            own, given = args
            if isinstance(given, FP8Tensor) and about(own) == about(given):
                own.codes, own.scale = given.codes, given.scale
            elif isinstance(given, FP8Tensor):
                raise InputError(
                    "FP8Tensor: setting .data takes numbers, which are quantised alike, or another one like it; got "
                    f"{' '.join(map(str, about(given)))} for {' '.join(map(str, about(own)))}"
                )
            else:
                replace(own, given)
            return None
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares it as if it were no class method
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        handler = HANDLERS.get(func)
        if handler is None and torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
            # What autograd takes apart elsewhere, as `to`, arrives whole where a tensor was made in inference mode.
            return func.decompose(*args, **(kwargs or {}))
        # Where something else comes first, as in `plain.copy_(tensor)`, the result would be plain.
        if handler is None or not isinstance(args[0], FP8Tensor):
            raise InputError(
                f"FP8Tensor: torch's operation {func} is not defined for 8-bit codes with scales: call .dequantize() "
                "on the tensor first, or use it as the weight of F.linear"
            )
        if torch.is_inference_mode_enabled() and not args[0].is_inference():
            # A view of a tensor that autograd knows must be one too: torch ties their versions.
            with torch.inference_mode(False), torch.no_grad():
                return handler(*args, **(kwargs or {}))
        return handler(*args, **(kwargs or {}))


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if not isinstance(weight, FP8Tensor) or isinstance(input, FP8Tensor) or isinstance(bias, FP8Tensor):
        raise InputError("FP8Tensor: F.linear takes one as its weight alone: call .dequantize() on the others")
    if weight.transposed:
        raise InputError(
            "FP8Tensor: F.linear takes a weight [N, K] as quantised; got a transposed one: call .t() on it"
        )
    weight.require_frozen()
    if weight.dim() != 2 or input.dim() == 0 or input.shape[-1] != weight.shape[1]:
        raise InputError(
            "FP8Tensor: F.linear takes x [..., K] and weight [N, K] with equal K; "
            f"got {list(input.shape)} and {list(weight.shape)}"
        )
    # torch.Size.numel would make a graph one of this size alone.
    rows = input.reshape(math.prod(input.shape[:-1]), input.shape[-1])
    out = linear_op(rows, weight.codes, weight.scale, bias, granularity=weight.granularity)
    return out.reshape(*input.shape[:-1], weight.shape[0])


def _as_bytes(tensor: Tensor) -> Tensor:
    """Return a tensor of an 8-bit dtype as one of bytes, in the same memory; others as they are."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


def to_tensors(name: str, tensor: FP8Tensor) -> dict[str, Tensor]:
    """Return plain tensors for a file of safetensors: `name` has the codes, `name` with `_scale` their scale.

    Raise `InputError` for a transposed tensor.
    """
    if tensor.transposed:
        raise InputError(f"to_tensors: {name!r} is transposed, which files can't tell: call .t() on it first")
    return {name: tensor.codes.detach().contiguous(), f"{name}_scale": tensor.scale.detach().contiguous()}


def from_tensors(
    name: str, tensors: Mapping[str, Tensor], *, granularity: str, dtype: torch.dtype = torch.float32
) -> FP8Tensor:
    """Make an `FP8Tensor` again of what `to_tensors` returned.

    Args:
        name: of the codes.
        tensors: has `name` and `name` with `_scale`, as `to_tensors` gives them.
        granularity: what shares a scale; shapes alone don't always tell.
        dtype: what it stands for.

    Raises:
        InputError: one of the two is missing, or they don't belong together.
        UnknownNameError: no such granularity.
    """
    missing = [each for each in (name, f"{name}_scale") if each not in tensors]
    if missing:
        raise InputError(f"from_tensors: expected {name!r} and {name + '_scale'!r}; got no {' and no '.join(missing)}")
    return FP8Tensor(tensors[name], tensors[f"{name}_scale"], granularity, dtype)


def _unpickled(
    codes: Tensor,
    codes_dtype: torch.dtype,
    scale: Tensor,
    scale_dtype: torch.dtype,
    granularity: str,
    dtype: torch.dtype,
    transposed: bool,
    is_parameter: bool,
    requires_grad: bool,
) -> FP8Tensor:
    made = FP8Tensor(codes.view(codes_dtype), scale.view(scale_dtype), granularity, dtype, transposed)
    if is_parameter:
        return cast(FP8Tensor, torch.nn.Parameter(made, requires_grad))
    made.requires_grad_(requires_grad)
    return made


torch.serialization.add_safe_globals([FP8Tensor, _unpickled])
