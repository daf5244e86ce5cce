"""FP8 checkpoints with `experts_implementation="kpt"`: how they are loaded, so that weights stay 8-bit on every device.

Also the layers beside the experts, on devices that transformers has no FP8 kernels for.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.finegrained_fp8 import FP8Experts, FP8GroupedLinear, FP8Linear
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

from kpt_core import InputError
from kpt_moe._scales import SCALE_DTYPES, in_blocks
from kpt_moe.scaled_grouped_mm import scaled_grouped_mm

from .experts import NAME, refusal_of, refuse_widened


class KptFP8Linear(FP8Linear):
    """transformers' `FP8Linear` that runs anywhere, its weights 8-bit.

    Where transformers has kernels it does what that does: they multiply 8-bit activations. Elsewhere activations are
    not quantised, and the product is that of the dequantised weights, by `moe.scaled_grouped_mm`.
    """

    def forward(self, input: Tensor) -> Tensor:
        """`[..., in_features]` to `[..., out_features]`."""
        if _is_theirs(self):
            return super().forward(input)
        return _products(self, input.unsqueeze(-2), 1).squeeze(-2)


class KptFP8GroupedLinear(FP8GroupedLinear):
    """transformers' `FP8GroupedLinear`, likewise."""

    def forward(self, x: Tensor) -> Tensor:
        """`[..., n_groups, in_features]` to `[..., n_groups, out_features / n_groups]`."""
        if _is_theirs(self):
            return super().forward(x)
        return _products(self, x, self.n_groups)


def serve(module: FP8Linear) -> None:
    """Make a layer of transformers' one of these; no tensor is touched."""
    kinds = {FP8Linear: KptFP8Linear, FP8GroupedLinear: KptFP8GroupedLinear}
    module.__class__ = kinds.get(type(module), type(module))


class KptFP8HfQuantizer(FineGrainedFP8HfQuantizer):
    """transformers' quantizer of FP8 checkpoints, and exactly that unless experts are to be served by KPT.

    transformers dequantises a checkpoint where it has no FP8 kernels, on a CPU for instance: twice the memory. With
    `experts_implementation="kpt"`, which needs none, this one keeps the weights as they are, of experts and of all
    other layers, unless `dequantize=True` is asked for.
    """

    def __init__(self, quantization_config: Any, **choices: Any) -> None:
        super().__init__(quantization_config, **choices)
        self._environment: dict[str, Any] | None = {}
        self._kept = False

    def validate_environment(self, *args: Any, **environment: Any) -> None:
        """As the base class, which looks for a GPU; not before `update_attn_implementation`, nor if KPT serves."""
        if self._environment is not None:
            # Who serves stands in the model's configuration, which transformers shows next.
            self._environment = environment
        elif not self._kept:
            super().validate_environment(*args, **environment)  # type: ignore[no-untyped-call]

    def update_attn_implementation(self, config: Any) -> Any:
        """As the base class; the first hook that sees the model's configuration."""
        environment, self._environment = self._environment, None
        chosen = {part._experts_implementation for part in (config, config.get_text_config())}
        wanted = NAME in chosen and self.pre_quantized and not self.quantization_config.dequantize
        refusal = refusal_of(self.quantization_config.weight_block_size, self.quantization_config.expert_dtype)
        self._kept = wanted and refusal is None
        if not self._kept:
            self.validate_environment(**(environment or {}))
        if wanted and refusal is not None and not self.quantization_config.dequantize:
            raise InputError(refusal)
        return super().update_attn_implementation(config)  # type: ignore[no-untyped-call]

    def _process_model_before_weight_loading(self, model: Any, **choices: Any) -> None:
        super()._process_model_before_weight_loading(model, **choices)
        if not self._kept:
            return
        for module in model.modules():
            if isinstance(module, FP8Linear):
                serve(module)
            elif isinstance(module, FP8Experts) and module.has_gate and module.block_size is not None:
                _count_blocks_by_halves(module)


def replace_quantizer() -> None:
    """Put `KptFP8HfQuantizer` in the place of transformers' own, where its hooks are those this one is made for."""
    if hasattr(HfQuantizer, "update_attn_implementation"):
        for method, quantizer in AUTO_QUANTIZER_MAPPING.items():
            if quantizer is FineGrainedFP8HfQuantizer:
                AUTO_QUANTIZER_MAPPING[method] = KptFP8HfQuantizer


def _count_blocks_by_halves(module: Any) -> None:
    """Room for the scales of the gate's and of the up projection's matrix; transformers counts those of both as one."""
    scale = module.gate_up_proj_scale_inv
    rows = 2 * in_blocks(module.gate_up_proj.shape[1] // 2)[0]
    if scale.shape[1] != rows:
        empty = torch.empty(scale.shape[0], rows, scale.shape[2], dtype=scale.dtype, device=scale.device)
        module.gate_up_proj_scale_inv = nn.Parameter(empty, requires_grad=scale.requires_grad)


def _is_theirs(module: FP8Linear) -> bool:
    if module.weight.dtype.itemsize > 1:
        refuse_widened(module, "weight")
        return True
    return _has_kernels(module.weight.device)


def _has_kernels(device: torch.device) -> bool:
    return device.type == "xpu" or (device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9))


def _products(module: Any, x: Tensor, groups: int) -> Tensor:
    """Each group `[..., groups, inputs]` by its own rows of the layer's matrix."""
    codes = module.weight.detach().unflatten(0, (groups, -1))
    scale = module.weight_scale_inv.detach()
    scale = scale if scale.dtype in SCALE_DTYPES else scale.float()
    if module.block_size is None:
        scale = scale.reshape(1, 1).expand(codes.shape[:2])
    else:
        scale = scale.unflatten(0, (groups, -1)).mT
    rows = x.movedim(-2, 0).flatten(1, -2)
    ends = torch.arange(1, groups + 1, dtype=torch.int32, device=x.device) * rows.shape[1]
    out = scaled_grouped_mm(rows.flatten(0, 1), codes.mT, scale, ends)
    out = out.view(groups, *x.shape[:-2], codes.shape[1]).movedim(0, -2)
    return out if module.bias is None else out + module.bias.view(groups, -1)
