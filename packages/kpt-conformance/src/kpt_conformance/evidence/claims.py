"""What is registered: every kernel of every backend, and the reference of every op."""

import kpt_core
from kpt_core.contract import TORCH
from kpt_core.evidence import Claim, claim_of_kernel, claim_of_reference


def registered() -> list[Claim]:
    """Every kernel that an installed backend offers and every reference, in the order of choice, references last."""
    ops = kpt_core.ops()
    offers = [(backend, kernel) for backend in kpt_core.backends().values() for kernel in backend.kernels()]
    offers.sort(key=lambda o: (o[1].op, o[0].name == TORCH, -o[1].priority, o[0].name, o[1].forward))
    claims = [claim_of_kernel(backend, kernel) for backend, kernel in offers]
    claims += [claim_of_reference(ops[name]) for name in sorted(ops)]
    return sorted(claims, key=lambda claim: claim.op)


def claim_of(op: str, kernel: str, backend: str) -> Claim:
    """The claim of that op, kernel and backend.

    Raises:
        UnknownNameError: nothing of the kind is registered.
    """
    claims = registered()
    for claim in claims:
        if claim.key == (backend, op, kernel):
            return claim
    known = {claim.kernel for claim in claims if claim.op == op}
    raise kpt_core.UnknownNameError(f"kernel of {op}", kernel, known, f"(of backend {backend!r})")
