"""Linear layers as the files have them, which a checkpoint is loaded into."""

from collections.abc import Mapping
from contextlib import suppress

import torch
from torch import nn

import kpt_core
from kpt_core import InputError
from kpt_fp8.checkpoints.changing import Inexact, recoded
from kpt_fp8.checkpoints.folder import Stored
from kpt_fp8.checkpoints.formats import Format
from kpt_fp8.checkpoints.scheme import QuantizedWeight, Scheme
from kpt_fp8.checkpoints.soundness import require_sound
from kpt_fp8.fp8_tensor import FP8Tensor
from kpt_fp8.linear import NONE
from kpt_fp8.native_linear import NativeFP8Linear
from kpt_fp8.scales import scale_shape


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
