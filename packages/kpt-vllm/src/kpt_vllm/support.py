"""Which of vLLM's layers KPT serves, told from their configuration alone."""

from typing import Any

import torch

#: Names of op `moe.experts` for those of vLLM.
ACTIVATIONS = {"silu": "swiglu", "gelu": "geglu", "gelu_tanh": "geglu_tanh"}
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def unsupported(moe: Any) -> str | None:
    """Tell why KPT does not serve a layer, or None.

    Args:
        moe: vLLM's `FusedMoEConfig`.
    """
    try:
        return _reason(moe)
    except AttributeError as error:
        return f"kpt-vllm does not fit this vLLM ({error})"


def _reason(moe: Any) -> str | None:
    parallel = moe.moe_parallel_config
    reasons = {
        f"activation {moe.activation.value!r} is none of {', '.join(ACTIVATIONS)}": (
            moe.activation.value not in ACTIVATIONS
        ),
        "the activation has parameters": any(
            each is not None for each in (moe.swiglu_limit, moe.swiglu_alpha, moe.swiglu_beta)
        ),
        "the experts have biases": moe.has_bias,
        "LoRA is enabled": moe.is_lora_enabled,
        f"the dtype is {moe.in_dtype}": moe.in_dtype not in _DTYPES,
        "tensor, data and expert parallelism were not tried": (
            parallel.use_ep or parallel.tp_size > 1 or parallel.dp_size > 1
        ),
    }
    return next((reason for reason, applies in reasons.items() if applies), None)
