"""KPT's backend for CPUs: native kernels, compiled once for each instruction set, behind a plain C interface.

Importing it loads no library.
"""

from .backend import CPUBackend
from .native import KPT_CPU_ISA

__version__ = "0.1.0"

BACKEND = CPUBackend()

__all__ = ["BACKEND", "KPT_CPU_ISA", "CPUBackend"]
