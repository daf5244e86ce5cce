"""Evidence: what is known of each kernel on each chip, by records that travel in the package that offers the kernel.

Nothing here runs at import or while kernels are chosen, unless `KPT_REQUIRE_EVIDENCE` asks for it.
"""

from .claims import Claim, claim_of_kernel, claim_of_reference
from .installed import load, proofs, why_unproven
from .record import EvidenceError, Level, Record
from .sources import Sources, sources_of

__all__ = [
    "Claim",
    "EvidenceError",
    "Level",
    "Record",
    "Sources",
    "claim_of_kernel",
    "claim_of_reference",
    "load",
    "proofs",
    "sources_of",
    "why_unproven",
]
