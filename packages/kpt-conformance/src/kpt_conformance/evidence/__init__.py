"""Evidence: what is known of each kernel on each chip, in files that a table is made from and checked against."""

from .claims import Claim, registered
from .record import EvidenceError, Level, Record
from .recording import record_compiled, record_success
from .store import load, save
from .support import table
from .verdict import faults

__all__ = [
    "Claim",
    "EvidenceError",
    "Level",
    "Record",
    "faults",
    "load",
    "record_compiled",
    "record_success",
    "registered",
    "save",
    "table",
]
