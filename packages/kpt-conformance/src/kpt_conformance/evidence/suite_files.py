"""The files that decide whether a kernel passes: those of the suite, or those that judge what was compiled."""

from kpt_core.evidence import Claim, Level, Sources, sources_of

#: From these all that checks is imported; not so what collects, counts, prints and records.
_SUITE = ("kpt_conformance.generation", "kpt_conformance.interpreter")
_COMPILED = ("kpt_conformance.aot.matrix",)
_CASES = "kpt_core.cases"


def suite_of(claim: Claim, level: Level) -> Sources:
    """What held a kernel to its contract.

    Args:
        claim: the kernel.
        level: at which it was proven; what was compiled is held to what its library declares for each chip, too.
    """
    if level is Level.COMPILED:
        aot = claim.offered.aot if claim.offered is not None else None
        declared = sources_of([aot.partition(":")[0]]).files if aot is not None else {}
        return Sources({**declared, **sources_of(_COMPILED).files}, frozenset())
    checks = sources_of(_SUITE).files
    cases = sources_of([_CASES]).files[_CASES]
    return Sources({**checks, _CASES: cases}, frozenset())
