"""What the user asked for: the environment variables, and the blocks opened by `use` and `record`."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace

from torch.compiler import is_dynamo_compiling

from kpt_core import registry
from kpt_core.contract import REFERENCE, Kernel
from kpt_core.environment import KPT_DISABLE, read_environment
from kpt_core.errors import InputError, KptWarning, UnknownNameError, warn_caller
from kpt_core.selection import Selection


@dataclass(frozen=True, slots=True)
class Scope:
    """The settings in force in one context: a thread, or an asyncio task.

    Attributes:
        choices: op name (or "*" for all) to the backend, kernel or "reference" that must serve it.
        disabled: backends and kernels that may not run.
        strict: raise where KPT would otherwise warn and go on.
        forced: op name to the backend's name and the kernel that serves it whatever the device.
        log: where `record` collects the selections of calls, None if nobody listens.
        dry: kernels are chosen, but do not run (on fake tensors, for `explain`).
    """

    choices: tuple[tuple[str, str], ...] = ()
    disabled: frozenset[str] = frozenset()
    strict: bool = False
    forced: tuple[tuple[str, str, Kernel], ...] = ()
    log: list[Selection] | None = field(default=None, compare=False)
    dry: bool = field(default=False, compare=False)

    def choice(self, op: str) -> tuple[str, str | None]:
        """Of which op ("*" for all) the innermost choice for `op` was asked, and what must serve it."""
        return next((choice for choice in reversed(self.choices) if choice[0] in ("*", op)), ("*", None))


#: The block that is open; None when nothing but the environment applies.
SCOPE: ContextVar[Scope | None] = ContextVar("kpt_scope", default=None)
_environment: Scope | None = None
_unknown: set[str] = set()


def environment() -> Scope:
    """The scope of the environment variables, read once (`kpt_core.refresh` reads them again)."""
    global _environment
    if _environment is None:
        _environment = Scope(*read_environment())
    return _environment


def _forget() -> None:
    global _environment
    _environment = None
    _unknown.clear()


registry.on_refresh(_forget)


def effective() -> Scope:
    """The scope in force here."""
    return SCOPE.get() or environment()


def warn_of_unknown() -> None:
    """Warn, the first time, of each name in `KPT_DISABLE` that nothing has: it may be a slip of the pen."""
    for name in sorted(environment().disabled - _unknown):
        known = registry.known_choices()
        if name not in known:
            _unknown.add(name)
            hint = f"(in {KPT_DISABLE}, where it has no effect)"
            warn_caller(str(UnknownNameError("backend or kernel", name, known - {REFERENCE}, hint)), KptWarning)


@contextmanager
def scoped(scope: Scope) -> Iterator[Scope]:
    """Put `scope` in force here."""
    token = SCOPE.set(scope)
    try:
        yield scope
    finally:
        SCOPE.reset(token)


def _not_compiled(what: str) -> None:
    if is_dynamo_compiling():  # not torch.compiler.is_compiling(), which is true while another thread compiles
        raise InputError(f"{what} can't be opened inside a compiled function: open it around the call")


@contextmanager
def record() -> Iterator[list[Selection]]:
    """Collect the selection of every op that is called inside the block, in call order.

    What a kernel calls in turn are the `children` of its selection. Calls in compiled code and in exported programs
    are collected as well, but not what a compiler fused (where plain PyTorch alone could serve a device); asyncio tasks
    that begin inside the block add to the same list, other threads do not.

    Raises:
        InputError: opened inside a compiled function.
    """
    _not_compiled("record()")
    log: list[Selection] = []
    with scoped(replace(effective(), log=log)):
        yield log


@contextmanager
def use(name: str | None = None, *, op: str = "*", strict: bool | None = None) -> Iterator[None]:
    """Decide what runs inside the block: in this thread, or in this asyncio task.

    Compiled code and exported programs obey it too, since they choose when they run; not so what was compiled into
    plain PyTorch outside of any block, where nothing else could serve the device. Backward runs under the settings of
    the thread that runs it: on the CPU that is the one that calls `backward`; autograd uses threads of its own for
    accelerators, where a block reaches the forward only. The environment variables reach both.

    Args:
        name: a backend (`nvidia`), a kernel's function (`package.module:function`), its identity
            (`backend/op/function`), `torch` or `reference`. What is named must run: where it can't, the call raises
            `NoKernelError` with every refusal. None leaves the choice free.
        op: limit `name` to one op.
        strict: True turns a failing kernel and a fallback on an accelerator into errors; None leaves it as it is.

    Raises:
        UnknownNameError: no such backend, kernel or op is installed.
        InputError: opened inside a compiled function.
    """
    _not_compiled("use()")
    if op != "*":
        registry.get_op(op)
    if name is not None and name not in registry.known_choices():
        raise UnknownNameError("backend or kernel", name, registry.known_choices(), "(`kpt kernels` lists all)")
    scope = effective()
    if name is not None:
        scope = replace(scope, choices=(*scope.choices, (op, name)))
    if strict is not None:
        scope = replace(scope, strict=strict)
    with scoped(scope):
        yield


@contextmanager
def force(backend: str, kernel: Kernel) -> Iterator[None]:
    """Have a kernel serve its op inside the block whatever the device and its capabilities, for tests of kernels.

    Args:
        backend: name of its backend.
        kernel: the kernel.
    """
    scope = effective()
    with scoped(replace(scope, forced=(*scope.forced, (kernel.op, backend, kernel)))):
        yield
