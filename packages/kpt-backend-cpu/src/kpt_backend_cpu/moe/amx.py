"""What differs on processors with AMX, whose tiles multiply bfloat16: without a library for it PyTorch is faster."""

import torch

from kpt_backend_cpu.native import asked_instruction_set, library_path

# Asked once: torch.compile can't trace the questions.
_PRESENT = torch.cpu._is_amx_tile_supported()
LEFT_TO_PYTORCH = _PRESENT and not library_path("amx_bf16").exists()
TILES = _PRESENT and not LEFT_TO_PYTORCH and asked_instruction_set() in ("", "amx_bf16")


def refusal_for_amx(dtype: torch.dtype) -> str | None:
    """Why products of many rows are left to PyTorch, or None; `KPT_CPU_ISA` keeps them here."""
    if LEFT_TO_PYTORCH and dtype is torch.bfloat16 and not asked_instruction_set():
        return (
            "bfloat16 on a processor with AMX, which PyTorch uses, while the compiler that this package was installed "
            "with knew none: install g++ from 12 on or clang from 15 on, then kpt-backend-cpu again"
        )
    return None
