"""What is registered: every kernel of every backend, and the reference of every op."""

from dataclasses import dataclass

import kpt_core
from kpt_core import Backend, Kernel
from kpt_core.contract import REFERENCE, TORCH

from .sources import Sources, sources_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A kernel that says it serves an op.

    Attributes:
        op: name of the op.
        kernel: the kernel's forward function, or `reference`.
        backend: the kernel's backend, or `reference`.
        modules: that the kernel's functions lie in.
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
    """Every kernel that an installed backend offers and every reference, in the order of choice, references last."""
    ops = kpt_core.ops()
    offers = [(backend, kernel) for backend in kpt_core.backends().values() for kernel in backend.kernels()]
    offers.sort(key=lambda o: (o[1].op, o[0].name == TORCH, -o[1].priority, o[0].name, o[1].forward))
    claims = [_claim(backend, kernel) for backend, kernel in offers]
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


def _claim(backend: Backend, kernel: Kernel) -> Claim:
    functions = filter(None, (kernel.forward, kernel.backward, kernel.unsupported))
    needs = [" or ".join(backend.device_types) or "any device", *sorted(kernel.requires)]
    if kernel.dtypes is not None:
        needs.append(" or ".join(sorted(kernel.dtypes)))
    forward_only = kernel.backward is None and not kernel.differentiable
    promises = ["forward only"] * forward_only + ["deterministic"] * kernel.deterministic
    return Claim(
        op=kernel.op,
        kernel=kernel.forward,
        backend=backend.name,
        modules=tuple(dict.fromkeys(function.partition(":")[0] for function in functions)),
        needs=", ".join(needs),
        promises=", ".join(promises),
    )
