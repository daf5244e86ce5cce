"""Intel's extension for PyTorch (IPEX) as a backend of its own, `ipex`: a kernel for tensors in host memory.

It is an optional extra, found by its metadata and imported by the first call that asks for it by name: importing it
replaces torch's autocast for CPUs, and no size was found where it is faster than KPT's kernels in plain PyTorch.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from kpt_core import Backend, Call, Capability, Kernel
from kpt_core.dispatch.settings import effective

from .environment import IPEX, IPEX_ARCHIVED, version

#: What IPEX computes of the arguments of activations.
_PLAIN = {"interleaved": False, "alpha": 1.0, "beta": 0.0, "limit": None}


class IPEXBackend(Backend):
    """KPT's backend for IPEX on CPUs. Making one, and asking it anything, imports nothing of IPEX."""

    name = "ipex"
    device_types = ("cpu",)

    def unavailable(self) -> str | None:
        """Return None if IPEX is here beside the torch that it was built for, else what is missing, in a sentence."""
        found = version(IPEX)
        if found is None:
            return f"{IPEX} is not installed; {IPEX_ARCHIVED}, and its last version, 2.8.0, runs beside torch 2.8 alone"
        here = str(torch.__version__)
        if here.split(".")[:2] != found.split(".")[:2]:  # it ends in an error where it is imported
            return f"{IPEX} {found} runs beside torch {'.'.join(found.split('.')[:2])} alone; this is torch {here}"
        return None

    def capabilities(self, device: torch.device) -> frozenset[Capability]:
        """Return which of the instruction sets that IPEX asks for the processor has."""
        found = torch.backends.cpu.get_cpu_capability()
        return frozenset({"AVX2": {"avx2"}, "AVX512": {"avx2", "avx512"}}.get(found, ()))

    def kernels(self) -> tuple[Kernel, ...]:
        """Return the kernel, also where it can't run."""
        return (
            Kernel(
                "moe.experts",
                forward=f"{__name__}:experts",
                unsupported=f"{__name__}:unsupported",
                requires={"avx2"},
                dtypes={"float32", "bfloat16"},
                priority=5,  # behind those of kpt-backend-cpu
                deterministic=True,
            ),
        )


BACKEND = IPEXBackend()


def unsupported(call: Call) -> str | None:
    """Return why a call of `moe.experts` is not for IPEX, as a sentence, or None."""
    if effective().choice("moe.experts")[1] is None:
        return "IPEX is not faster than plain PyTorch here, and runs where it is asked for: use('ipex'), KPT_USE=ipex"
    asked = [f"{name}={getattr(call, name)!r}" for name, plain in _PLAIN.items() if getattr(call, name) != plain]
    if call.activation != "swiglu" or asked:
        return f"IPEX computes plain swiglu alone; got {', '.join([call.activation, *asked])}"
    if call.gate_up_proj_bias is not None or call.down_proj_bias is not None:
        return "IPEX adds no bias in experts"
    if call.gate_up_scale is not None or call.down_scale is not None:
        return "IPEX takes no 8-bit weights with scales here"
    return None


def experts(call: Call) -> Tensor:
    """Compute `moe.experts` with what `ipex.llm.modules.GatedMLPMOE` runs for weights as they lie.

    Weights in IPEX's own order are faster where they stay as they are, but the module reorders them in place, and an
    op must see what is written into its arguments between two calls.
    """
    product = _product()
    num_experts, top_k = call.gate_up_proj.shape[0], call.top_k_index.shape[1]
    ids, order = call.top_k_index.flatten().long().sort(stable=True)
    bounds = torch.searchsorted(ids, torch.arange(num_experts + 1)).tolist()
    tokens, weights = order // max(top_k, 1), call.top_k_weights.flatten().float()[order].unsqueeze(1)
    up, down = (w.mT if call.transposed else w for w in (call.gate_up_proj, call.down_proj))
    out = torch.zeros(call.x.shape, dtype=torch.float32)
    for expert, (start, end) in enumerate(pairwise(bounds)):
        if start == end:
            continue
        rows, gate_and_up = tokens[start:end], up[expert].chunk(2)
        x = call.x[rows]
        # It would round routing weights, and the sum at each expert, to x's dtype: they are ours.
        here, one, y = torch.arange(end - start), x.new_ones(end - start, 1), torch.zeros_like(x)
        product(x, here, torch.zeros_like(here), *gate_and_up, down[expert], True, one, y, False)
        out.index_add_(0, rows, y * weights[start:end])
    return out.to(call.x.dtype)


def _product() -> Callable[..., Any]:
    """Return IPEX's op for the rows of one expert, which importing IPEX registers."""
    import intel_extension_for_pytorch  # noqa: F401

    return torch.ops.torch_ipex.mixtral_moe_tpp
