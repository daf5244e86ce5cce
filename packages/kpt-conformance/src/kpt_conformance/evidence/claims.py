"""What is registered: every kernel of every backend, and the reference of every op."""

from collections.abc import Iterator
from dataclasses import dataclass

import kpt_core
from kpt_core import Kernel

from .sources import Sources, sources_of

REFERENCE = "reference"


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A kernel that says it serves an op.

    Attributes:
        op: name of the op.
        kernel: the kernel's full name, or `reference`.
        backend: the kernel's backend, or `reference`.
        modules: that the kernel lies in.
        needs: what it asks of a device and a call, in words.
        promises: what it says of itself, in words.
    """

    op: str
    kernel: str
    backend: str
    modules: tuple[str, ...]
    needs: str = ""
    promises: str = ""

    @property
    def key(self) -> tuple[str, str, str]:
        """What a record names it by."""
        return (self.backend, self.op, self.kernel)

    def sources(self) -> Sources:
        """What the kernel is made of."""
        return sources_of(self.modules)


def registered() -> list[Claim]:
    """Every kernel that an installed backend offers and every reference, in a stable order, references last."""
    ops = kpt_core.ops()
    offers = sorted(_offers(), key=lambda offer: (offer[1].op, -offer[1].priority, offer[0], offer[1].target))
    claims = [_claim(backend, device_type, kernel) for backend, kernel, device_type in offers]
    for name in sorted(ops):
        module = ops[name].reference.__module__
        claims.append(Claim(op=name, kernel=REFERENCE, backend=REFERENCE, modules=(module,), needs="any device"))
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


def _offers() -> Iterator[tuple[str, Kernel, str]]:
    for name, backend in kpt_core.backends().items():
        for kernel in backend.kernels():
            yield name, kernel, backend.device_type


def _claim(backend: str, device_type: str, kernel: Kernel) -> Claim:
    references = (kernel.target, kernel.unsupported) if kernel.unsupported else (kernel.target,)
    needs = [device_type, *sorted(kernel.requires)]
    if kernel.dtypes is not None:
        needs.append(" or ".join(sorted(kernel.dtypes)))
    promises = ["forward only"] * kernel.forward_only + ["deterministic"] * kernel.deterministic
    return Claim(
        op=kernel.op,
        kernel=kernel.target,
        backend=backend,
        modules=tuple(dict.fromkeys(reference.partition(":")[0] for reference in references)),
        needs=", ".join(needs),
        promises=", ".join(promises),
    )
