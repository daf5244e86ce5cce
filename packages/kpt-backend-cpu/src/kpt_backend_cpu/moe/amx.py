"""Where PyTorch multiplies faster than these kernels: on processors with AMX, which oneDNN uses and these do not."""

import torch

from kpt_backend_cpu.native import asked_instruction_set

#: Asked once: torch.compile can't trace the question.
HAS_AMX = torch.cpu._is_amx_tile_supported()


def refusal_for_amx(dtype: torch.dtype) -> str | None:
    """Why products of many rows are left to PyTorch, or None; `KPT_CPU_ISA` keeps them here."""
    if HAS_AMX and dtype is torch.bfloat16 and not asked_instruction_set():
        return "bfloat16 on a processor with AMX, whose matrix units PyTorch uses and this kernel does not"
    return None
