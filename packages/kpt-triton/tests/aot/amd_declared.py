"""`python amd_declared.py CHIP`: the compile matrix of the kernels for a chip of AMD, for which no backend is yet.

A backend that only names the kernels stands for one, so that the real one can start from code that compiles.
"""

import sys
from collections.abc import Iterable

from kpt_conformance.aot.__main__ import main
from kpt_core import Backend, Kernel
from kpt_core.registry import add_backend

_CONTRACTS = "kpt_triton.moe.contracts"
_PROGRAMS = (
    f"{_CONTRACTS}.experts:AOT",
    f"{_CONTRACTS}.grouped_mm:AOT",
    f"{_CONTRACTS}.grouped_mm_wgrad:AOT",
    f"{_CONTRACTS}.scaled_grouped_mm:AOT",
    "kpt_triton.moe.gating:AOT",
)


class Declared(Backend):
    """Names what is to be compiled, and nothing that runs."""

    name, device_types = "amd_declared", ("cuda",)

    def __init__(self, chip: str) -> None:
        self.chips = (chip,)

    def unavailable(self) -> str:
        return "it only names what is to be compiled"

    def kernels(self) -> Iterable[Kernel]:
        return [Kernel("declared.compiled", f"declared:{target}", aot=target) for target in _PROGRAMS]


if __name__ == "__main__":
    add_backend(Declared(sys.argv[1]))
    sys.exit(main(["--backend", "amd_declared", *sys.argv[2:]]))
