"""What is compiled ahead of time of a kernel, on a machine without the chip."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kpt_triton.chips import converts_codes

#: Where a chip does not convert 8-bit numbers, `launching.as_read` hands them over as these.
_AS_INTEGERS = {"fp8e4nv": "u8", "fp8e5": "i8"}

#: What kernels without products of matrices must be on each chip.
NO_SPILLS = {
    **dict.fromkeys(("sm80", "sm86", "sm89", "sm90", "sm100", "sm120"), "no spills, registers <= 255, smem <= 99 KiB"),
    **dict.fromkeys(("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201"), "no spills, lds <= 64 KiB"),
    # Registers are given out by the driver's compiler, which makes code of SPIR-V on the machine.
    **dict.fromkeys(("pvc", "bmg_g21"), "slm <= 64 KiB"),
}


@dataclass(frozen=True, slots=True)
class Program:
    """One kernel with the types of its arguments.

    Attributes:
        name: tells the programs of an operation apart: `forward bf16`.
        function: made by `@triton.jit`.
        signature: the types of its arguments at run time, `:16` behind those that are multiples of 16 and `:1` behind
            those that are 1.
        contracts: what the code for each chip must be, in the words of `kpt_conformance.aot`.
        launches: gives, for a chip, the constexprs and compiler options of each launch, by name.
    """

    name: str
    function: Any
    signature: Mapping[str, str]
    contracts: Mapping[str, str]
    launches: Callable[[str], Mapping[str, Mapping[str, Any]]]

    def types(self, chip: str) -> Mapping[str, str]:
        """Return the types of the arguments on a chip."""
        if converts_codes(chip):
            return self.signature
        found = {}
        for name, written in self.signature.items():
            for kind, other in _AS_INTEGERS.items():
                written = written.replace(f"*{kind}:", f"*{other}:")
            found[name] = written
        return found

    def configurations(self, chip: str) -> Mapping[str, Mapping[str, Any]]:
        """Return what the kernel may be launched with on a chip, by name."""
        return self.launches(chip)
