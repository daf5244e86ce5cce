"""Evidence: what is known of each kernel on each chip, in files that a table is made from and checked against."""

from .claims import claim_of, registered
from .recording import Outcomes, level_here, record_compiled, record_success, save
from .support import table
from .verdict import Place, Verdict, examine, faults, write

__all__ = [
    "Outcomes",
    "Place",
    "Verdict",
    "claim_of",
    "examine",
    "faults",
    "level_here",
    "record_compiled",
    "record_success",
    "registered",
    "save",
    "table",
    "write",
]
