"""The compile matrix: every kernel compiled for every chip its backend claims, on a CPU, and held to its contract.

See `docs/aot.md` for what this proves and how a kernel declares what is compiled.
"""

from .chips import CHIPS, Chip
from .contract import Contract, ContractError, parse_contract
from .declared import PallasProgram, TritonProgram
from .matrix import run
from .readings import Reading, Row

__all__ = [
    "CHIPS",
    "Chip",
    "Contract",
    "ContractError",
    "PallasProgram",
    "Reading",
    "Row",
    "TritonProgram",
    "parse_contract",
    "run",
]
