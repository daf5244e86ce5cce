"""`ROCmCompiler`: Triton's settings for a chip, and what becomes of a kernel there, without the chip."""

import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from kpt_core import InputError, UnknownNameError

from .chips import CHIPS, capabilities_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """One kernel for one chip.

    Attributes:
        chip: for instance `gfx942`.
        registers: vector registers of a lane, accumulation registers included.
        spills: vector registers that went to memory; any cost much.
        lds: bytes of local memory of a block.
        occupancy: waves of one SIMD, as far as registers decide it.
        matrix: whether the code has matrix instructions (MFMA or WMMA).
        seconds: that it took; next to none where Triton had it in its cache.
        assembly: for the chip.
    """

    chip: str
    registers: int
    spills: int
    lds: int
    occupancy: int
    matrix: bool
    seconds: float
    assembly: str = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What Triton lets one set on AMD; the defaults are Triton 3.9's.

    Attributes:
        num_warps: waves of a block.
        num_stages: steps whose loads are under way at the same time.
        waves_per_eu: waves of one SIMD that registers must leave room for; 0 leaves it to LLVM.
        matrix_instr_nonkdim: rows and columns of a matrix instruction, 16 or 32; 0 leaves it to Triton. MFMA alone.
        kpack: how many steps of K are packed into one load of an operand from LDS, 1 or 2. MFMA alone.
        enable_fp_fusion: whether products and sums may become one instruction.
    """

    num_warps: int = 4
    num_stages: int = 2
    waves_per_eu: int = 0
    matrix_instr_nonkdim: int = 0
    kpack: int = 1
    enable_fp_fusion: bool = True

    def __post_init__(self) -> None:
        allowed = {
            "num_warps": (1, 2, 4, 8, 16),
            "num_stages": range(1, 9),
            "waves_per_eu": range(9),
            "matrix_instr_nonkdim": (0, 16, 32),
            "kpack": (1, 2),
        }
        for name, values in allowed.items():
            if getattr(self, name) not in values:
                raise InputError(f"{name} must be one of {[*values]}; got {getattr(self, name)!r}")


class ROCmCompiler:
    """Compile Triton kernels for an AMD chip, on any machine, and read what they need there.

    Triton keeps what it compiled in its own cache (`TRITON_CACHE_DIR`).

    Args:
        chip: for instance `gfx942`.
        **options: those of `Options`; every compilation may override them.

    Attributes:
        chip: as given.
        options: as given.
        compiled: every result of this compiler, in order.

    Raises:
        UnknownNameError: no such chip or option.
        InputError: a value is not allowed, or the chip has no such instructions.

    Examples:
        >>> compiler = ROCmCompiler("gfx942", waves_per_eu=2)
        >>> compiler.compile(kernel, {"x": "*bf16:16", "n": "i32"}, {"BLOCK": 1024}).spills
        0
    """

    def __init__(self, chip: str, **options: Any) -> None:
        if chip not in CHIPS:
            raise UnknownNameError("chip", chip, CHIPS)
        self.chip = chip
        self.options = self._with(Options(), options)
        self.compiled: list[Compiled] = []

    def compile(
        self, kernel: Any, signature: Mapping[str, str], constexprs: Mapping[str, Any] | None = None, **options: Any
    ) -> Compiled:
        """Compile a kernel made by `@triton.jit`.

        Args:
            kernel: the kernel.
            signature: its arguments' types as Triton writes them, `*bf16`, `i32`; with `:16` behind those that are
                multiples of 16 (pointers: aligned to as many bytes).
            constexprs: values of its other parameters.
            **options: that override the compiler's.

        Raises:
            UnknownNameError: a name is no parameter, or no option.
            InputError: a parameter has neither type nor value, or both.
            Exception: whatever Triton raises where it refuses the kernel.
        """
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        chosen = self._with(self.options, options)
        constants = dict(constexprs or {})
        for name in (*signature, *constants):
            if name not in kernel.arg_names:
                raise UnknownNameError(f"parameter of {kernel.__name__}", name, kernel.arg_names)
        for name in kernel.arg_names:
            if (name in signature) == (name in constants):
                both = "a type and a value" if name in constants else "neither type nor value"
                raise InputError(f"parameter {name} of {kernel.__name__} has {both}: give one of them")
        types = {name: "constexpr" if name in constants else signature[name].split(":")[0] for name in kernel.arg_names}
        aligned = {
            (kernel.arg_names.index(name),): [["tt.divisibility", 16]]
            for name, kind in signature.items()
            if kind.endswith(":16")
        }
        wave = 64 if "wave64" in capabilities_of(self.chip) else 32
        start = time.perf_counter()
        made = triton.compile(
            ASTSource(kernel, types, constants, aligned),
            target=GPUTarget("hip", self.chip, wave),
            options=asdict(chosen),
        )
        found = _read(self.chip, made, time.perf_counter() - start)
        self.compiled.append(found)
        return found

    def _with(self, options: Options, changes: Mapping[str, Any]) -> Options:
        known = asdict(options)
        for name in changes:
            if name not in known:
                raise UnknownNameError("option", name, known)
        changed = replace(options, **changes)
        if (changed.matrix_instr_nonkdim or changed.kpack != 1) and "mfma" not in capabilities_of(self.chip):
            raise InputError(f"matrix_instr_nonkdim and kpack are for MFMA; {self.chip} has WMMA: leave them out")
        return changed


def _read(chip: str, made: Any, seconds: float) -> Compiled:
    assembly: str = made.asm["amdgcn"]

    def number(pattern: str) -> int:
        return max(map(int, re.findall(pattern, assembly, re.MULTILINE)), default=0)

    return Compiled(
        chip=chip,
        registers=number(r"^\s*-?\s*\.vgpr_count:\s+(\d+)"),
        spills=number(r"^\s*-?\s*\.vgpr_spill_count:\s+(\d+)"),
        lds=int(made.metadata.shared),
        occupancy=number(r"^; Occupancy: (\d+)"),
        matrix=re.search(r"\bv_(mfma|wmma|smfmac|swmmac)", assembly) is not None,
        seconds=seconds,
        assembly=assembly,
    )
