"""The backend: what the core asks of it."""

import importlib
import platform

import torch

from kpt_core import Backend, Capability, InputError, Kernel

from .native import INSTRUCTION_SETS, LibraryError, library, provenance


class CPUBackend(Backend):
    """KPT's backend for CPUs. Making one costs nothing: the native library is loaded when something is asked."""

    name = "cpu"
    device_types = ("cpu",)

    def __repr__(self) -> str:
        return "CPUBackend()"

    def unavailable(self) -> str | None:
        """None if kernels can run here, else why not and what to do, in a sentence.

        Raises:
            InputError: `KPT_CPU_ISA` names no instruction set that can be used here.
        """
        try:
            library()
        except LibraryError as error:
            return str(error)
        return None

    def capabilities(self, device: torch.device) -> frozenset[Capability]:
        """What the kernels use of the CPU; `KPT_CPU_ISA` hides what is above the instruction set that it names.

        Instruction sets: `baseline`, `avx2`, `avx512`, `avx512_bf16`, `amx_bf16`, and `neon` on ARM. `bf16` and `fp16`
        are read and written by all of them. Nothing if there is no library.

        Raises:
            InputError: the device is of another type, or `KPT_CPU_ISA` names no instruction set that can be used here.
        """
        if device.type != "cpu":
            raise InputError(f"the CPU backend describes cpu devices; got {device}")
        try:
            used, there, _ = library()
        except LibraryError:
            return frozenset()
        known = {"bf16", "fp16", *INSTRUCTION_SETS[INSTRUCTION_SETS.index(used) :]}.intersection(
            {"bf16", "fp16", *there}
        )
        if platform.machine().lower() in ("arm64", "aarch64"):
            known.add("neon")
        return frozenset(known)

    def library(self) -> dict[str, str]:
        """Return compiler and instruction set, where there are libraries.

        Raises:
            InputError: `KPT_CPU_ISA` names no instruction set that can be used here.
        """
        return provenance()

    def kernels(self) -> tuple[Kernel, ...]:
        """Every kernel, also where none can run; no library is loaded."""
        tables = (
            importlib.import_module(f"kpt_backend_cpu.{feature}")
            for feature in ("moe", "fp8", "attention", "linear", "norm")
        )
        return tuple(kernel for table in tables for kernel in table.KERNELS)
