"""The modules that a checkpoint's tensors are loaded into."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS, FP8Experts
from transformers.integrations.moe import use_experts_implementation

import kpt_core
from kpt_core import InputError
from kpt_fp8.checkpoints.changing import Inexact, recoded
from kpt_fp8.checkpoints.folder import Stored
from kpt_fp8.checkpoints.formats import Format
from kpt_fp8.checkpoints.scheme import QuantizedWeight, Scheme
from kpt_fp8.checkpoints.soundness import require_sound
from kpt_fp8.fp8_tensor import FP8Tensor
from kpt_fp8.linear import NONE, linear
from kpt_fp8.native_linear import NativeFP8Linear, clamped
from kpt_fp8.scales import scale_shape

_SIDE = 128


class StoredLinear(nn.Module):
    """A linear layer as the files have it: parameters by the names there; it never runs.

    Scales have the shape that `stored` says for the weight `name`: one number is written as [], [1] or [1, 1].
    """

    def __init__(
        self, linear: nn.Linear, form: Format, scheme: Scheme, name: str, stored: Mapping[str, Stored]
    ) -> None:
        super().__init__()
        self.stored: list[str] = []
        named = [form.codes_name, form.scale_name, *([form.input_scale_name] if scheme.static else [])]
        for place, naming in enumerate(named):
            shape = stored[naming(name)].shape if place else (linear.out_features, linear.in_features)
            tensor = torch.empty(shape, dtype=torch.float32 if place else scheme.dtype, device="meta")
            self.stored.append(naming("0.weight").removeprefix("0."))
            self.register_parameter(self.stored[-1], nn.Parameter(tensor, requires_grad=False))
        self.bias = linear.bias
        self.dtype = linear.weight.dtype
        self.scheme = scheme

    def native(self, name: str, activations: bool) -> NativeFP8Linear:
        """Return the layer that runs, of the same memory; raise `InputError` where its tensors are not sound.

        Where the device multiplies e4m3fnuz alone, and activations are quantised, its codes become those: the same
        numbers with scales twice as large.
        """
        codes, scale, *given = (getattr(self, name).detach() for name in self.stored)
        if codes.is_meta:
            raise InputError(
                "kpt_fp8.transformers: a weight was offloaded, which 8-bit layers can't follow: pass a device_map that "
                "keeps all weights on devices"
            )
        granularity = self.scheme.granularity
        scale = scale.reshape(scale_shape(codes.shape, granularity))
        own = given[0].reshape(()) if given else None
        require_sound(f"{name}.weight", QuantizedWeight(codes, scale, granularity, own))
        own = own if activations else None
        held = FP8Tensor(codes, scale, granularity, self.dtype)
        used = self.scheme.activations if activations else NONE
        if used != NONE and codes.dtype is torch.float8_e4m3fn and multiplies_fnuz_alone(codes.device):
            with suppress(Inexact):  # else 16-bit products serve
                held = FP8Tensor(*recoded(codes, scale, torch.float8_e4m3fnuz), granularity, self.dtype)
                own = None if own is None else own * 2
        bound = self.scheme.bound if activations else None
        return NativeFP8Linear.from_fp8(held, self.bias, activations=used, input_scale=own, input_bound=bound)


class StoredExperts(FP8Experts):
    """transformers' FP8 experts with scales of any scheme, and without its kernels: op `fp8.linear`, expert by expert.

    `gate_up_proj_scale_inv` has the scales of the gate's matrix and then those of the up projection's, as two matrices
    have them in the files: `[E, 2, 1]`, `[E, 2 * I, 1]` or `[E, 2 * ceil(I / 128), ceil(H / 128)]`; those of static
    activations likewise, `[E, 2, 1]`. With `experts_implementation="kpt"` kpt-moe runs them.
    """

    def __init__(self, config: Any, scheme: Scheme, activations: bool, has_gate: bool = True) -> None:
        blocks = scheme.granularity == "128x128"
        super().__init__(
            config,
            block_size=(_SIDE, _SIDE) if blocks else None,
            activation_scheme="static" if scheme.static else "dynamic",
            has_gate=has_gate,
        )
        self.scheme, self.quantize_activations = scheme, activations
        self.register_forward_pre_hook(_refuse_adapters)
        halves = 2 if has_gate else 1
        for name, parts in (("gate_up_proj" if has_gate else "up_proj", halves), ("down_proj", 1)):
            experts, rows, columns = getattr(self, name).shape
            one = scale_shape((rows // parts, columns), scheme.granularity)
            shape = [experts, parts * (one[0] if one else 1), one[1] if blocks else 1]
            self._hold(name, torch.empty(experts, rows, columns, dtype=scheme.dtype))
            self._hold(f"{name}_scale_inv", torch.empty(shape, dtype=torch.float32))
            if scheme.static:
                self._hold(f"{name}_activation_scale", torch.empty(experts, parts, 1, dtype=torch.float32))

    def _hold(self, name: str, tensor: Tensor) -> None:
        setattr(self, name, nn.Parameter(tensor, requires_grad=False))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move codes and scales as `fn` does; their dtypes are the format's, and stay."""

        def moved(tensor: Tensor) -> Tensor:
            probe = fn(tensor.new_empty(0))
            return fn(tensor) if probe.dtype is tensor.dtype else tensor.to(probe.device)

        return super()._apply(moved, recurse)  # type: ignore[no-any-return, no-untyped-call]

    def require_sound(self, name: str) -> None:
        """Raise `InputError` where codes or scales of an expert are not sound."""
        for own in ("up_proj", "gate_up_proj", "down_proj"):
            codes, scales = getattr(self, own, None), getattr(self, f"{own}_scale_inv", None)
            if codes is None or scales is None or codes.is_meta:
                continue
            given = getattr(self, f"{own}_activation_scale", None)
            for expert, (matrix, scale) in enumerate(zip(codes.detach(), scales.detach(), strict=True)):
                parts = max(self._parts(matrix, scale), 1 if given is None else given[expert].numel())
                inputs = [None] * parts if given is None else list(given[expert].detach().flatten())
                for half, part, static in zip(matrix.chunk(parts), scale.chunk(parts), inputs, strict=True):
                    shaped = part.reshape(scale_shape(half.shape, self.scheme.granularity))
                    weight = QuantizedWeight(half, shaped, self.scheme.granularity, static)
                    require_sound(f"{own} of expert {expert} of {name}", weight)

    def _parts(self, weight: Tensor, scale: Tensor) -> int:
        """How many matrices with scales apart a weight is of: two for the gate's and the up projection's."""
        rows = weight.shape[0]
        whole = {"tensor": 1, "row": rows, "128x128": -(-rows // _SIDE)}[self.scheme.granularity]
        return 1 if scale.shape[0] == whole else 2

    def linear(
        self, input: Tensor, weight: Tensor, weight_scale_inv: Tensor, activation_scale: Tensor | None = None
    ) -> Tensor:
        """The product with one expert's matrix, or with the gate's and the up projection's, which scales keep apart."""
        granularity = self.scheme.granularity
        if self.quantize_activations and self.scheme.bound is not None:
            input = clamped(input, self.scheme.bound)
        parts = self._parts(weight, weight_scale_inv)
        if activation_scale is not None:
            parts = max(parts, activation_scale.numel())
        given = activation_scale if self.quantize_activations else None
        products = [
            linear(
                input,
                codes,
                scale.reshape(scale_shape(codes.shape, granularity)),
                None,
                None if given is None else given.reshape(-1)[part],
                granularity=granularity,
                activations=self.scheme.activations if self.quantize_activations else NONE,
                activation_dtype=self.scheme.dtype,
            )
            for part, (codes, scale) in enumerate(
                zip(weight.detach().chunk(parts), weight_scale_inv.detach().chunk(parts), strict=True)
            )
        ]
        return products[0] if parts == 1 else torch.cat(products, -1)


def _chosen(name: str, has_gate: bool) -> Any:
    """Return a class, which pickle finds by its name, whose forward is what `experts_implementation` names."""
    kind = type(name, (StoredExperts,), {"__module__": __name__})
    return use_experts_implementation(
        kind, experts_interface=ALL_FP8_EXPERTS_FUNCTIONS, has_bias=False, has_gate=has_gate
    )


KptFP8Experts = _chosen("KptFP8Experts", has_gate=True)
KptFP8ExpertsWithoutGate = _chosen("KptFP8ExpertsWithoutGate", has_gate=False)


def multiplied(device: torch.device) -> set[str]:
    """Return the 8-bit formats that a device multiplies: none on a CPU."""
    found: set[str] = set()
    for backend in kpt_core.backends().values():
        if backend.serves(device.type) and backend.unavailable() is None:
            found |= backend.capabilities(device)
    return found & {"fp8_e4m3fn", "fp8_e4m3fnuz"}


def multiplies_fnuz_alone(device: torch.device) -> bool:
    """Tell whether a device has 8-bit products of e4m3fnuz, and none of e4m3fn: AMD's MI300 (gfx942)."""
    return multiplied(device) == {"fp8_e4m3fnuz"}


def _refuse_adapters(experts: Any, _: object) -> None:
    """Raise `InputError` under an adapter of PEFT, which adds to codes as if they were numbers, but for kpt-moe."""
    if nn.utils.parametrize.is_parametrized(experts) and experts.config._experts_implementation != "kpt":
        raise InputError(
            'kpt_fp8.transformers: adapters on 8-bit experts need experts_implementation="kpt" (pip install kpt-moe); '
            "or give LoraConfig the names of linear layers in target_modules, as in ['q_proj', 'v_proj']"
        )


def experts_of(module: Any, config: Any, scheme: Scheme, activations: bool) -> StoredExperts:
    """Return experts for a model's own ones; `experts_implementation` chooses what runs them."""
    has_gate = getattr(module, "has_gate", True)
    if getattr(module, "has_bias", False):
        raise InputError(
            f"kpt_fp8.transformers: experts with a bias ({type(module).__name__}) have no 8-bit form here: load the "
            "model with transformers"
        )
    with torch.device("meta"):
        made: StoredExperts = (KptFP8Experts if has_gate else KptFP8ExpertsWithoutGate)(
            getattr(module, "config", config), scheme=scheme, activations=activations, has_gate=has_gate
        )
    return made
