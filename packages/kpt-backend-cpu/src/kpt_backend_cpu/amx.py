"""What differs on processors with AMX, whose tiles multiply bfloat16: without a library for it PyTorch is faster."""

import torch

from kpt_backend_cpu.native import asked_instruction_set, library, library_path
from kpt_core import KptError


def _loads_tiles() -> bool:
    try:
        return library().instruction_set == "amx_bf16"
    except KptError:  # calls say why
        return False


# Asked once, when a kernel is first chosen: the answers stay.
LEFT_TO_PYTORCH = torch.cpu._is_amx_tile_supported() and not library_path("amx_bf16").exists()
TILES = _loads_tiles()


def refusal_for_amx(dtype: torch.dtype) -> str | None:
    """Why products of many rows are left to PyTorch, or None; `KPT_CPU_ISA` keeps them here."""
    if LEFT_TO_PYTORCH and dtype is torch.bfloat16 and not asked_instruction_set():
        return (
            "bfloat16 on a processor with AMX, which PyTorch uses, while the compiler that this package was installed "
            "with knew none: install g++ from 12 on or clang from 15 on, then kpt-backend-cpu again"
        )
    return None
