"""Keep what the user asked for: the environment variables, and the blocks opened by `use` and `record`."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace

from torch.compiler import is_dynamo_compiling

from kpt_core import registry
from kpt_core.contract import Kernel
from kpt_core.errors import InputError, KptWarning, UnknownNameError, describe_error, warn_caller
from kpt_core.selection import REFERENCE, Selection


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

#: Backend, kernel or "reference" to run; `op=name` pairs limit it to one op. Comma-separated, strict.
KPT_USE = "KPT_USE"
#: Backends or kernels that may not run, comma-separated. A name that nothing has is warned of, once, and no error: what
#: is disabled need not be installed on every machine.
KPT_DISABLE = "KPT_DISABLE"
#: "1" turns quarantine of a failing kernel, and falling back to plain PyTorch on an accelerator, into errors.
KPT_STRICT = "KPT_STRICT"


_environment: Scope | None = None
_unknown: set[str] = set()


def _split(value: str) -> list[str]:
    return [part.strip() for part in value.split(",") if part.strip()]


def parse_choices(value: str) -> tuple[tuple[str, str], ...]:
    """Read `nvidia`, `reference`, `pkg.mod:kernel` or `moe.experts=reference`, comma-separated; pairs win."""
    choices: dict[str, str] = {}
    for part in _split(value):
        op, separator, name = map(str.strip, part.rpartition("="))
        if separator and not (op and name):
            raise InputError(f"{KPT_USE}={value!r}: {part!r} is not of the form 'name' or 'op=name'")
        if op in choices or (not op and "*" in choices):
            raise InputError(f"{KPT_USE}={value!r}: it asks for two things for {op or 'all ops'}; name one")
        choices[op or "*"] = name
    return tuple(sorted(choices.items(), key=lambda choice: choice[0] != "*"))


def read_environment() -> tuple[tuple[tuple[str, str], ...], frozenset[str], bool]:
    """Read what `KPT_USE`, `KPT_DISABLE` and `KPT_STRICT` ask for: choices by op, what is disabled, and strictness."""
    strict = os.environ.get(KPT_STRICT, "").strip().lower()
    if strict not in ("", "0", "1", "false", "true"):
        raise InputError(f"{KPT_STRICT}={strict!r}: expected 0 or 1")
    choices, disabled = os.environ.get(KPT_USE, ""), os.environ.get(KPT_DISABLE, "")
    return parse_choices(choices), frozenset(_split(disabled)), strict in ("1", "true")


def environment() -> Scope:
    """Return the scope of the environment variables, read once (`kpt_core.refresh` reads them again)."""
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
    """Return the scope in force here."""
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
    that begin inside the block add to the same list, other threads do not (see `observe`).

    Raises:
        InputError: opened inside a compiled function.
    """
    _not_compiled("record()")
    log: list[Selection] = []
    with scoped(replace(effective(), log=log)):
        yield log


#: What `observe` has told of calls.
OBSERVERS: list[Callable[[Selection], object]] = []


@contextmanager
def observe(callback: Callable[[Selection], object]) -> Iterator[None]:
    """Call a function with the selection of every call of an op in this process while the block is open.

    Calls of all threads are told, in the thread of the call and once it has its results; ops that a kernel calls in
    turn are told before it, and are the `children` of its selection, too. What a compiler fused is not, as in `record`.
    A callback that raises breaks no call: it is warned of, and not called again. It should be quick, take calls of
    several threads at once, and call no op. While a callback listens, a call takes some microseconds longer.

    Args:
        callback: called with the `Selection`; what it gives is ignored.

    Raises:
        InputError: opened inside a compiled function.
    """
    _not_compiled("observe()")
    OBSERVERS.append(callback)
    # The short way, which tells nobody, is closed: `serve` opens it no more. New dictionaries, as in `Op.forget`.
    for op in registry.defined_ops():
        op.quick = {}
    try:
        yield
    finally:
        _drop(callback)


def tell_observers(selection: Selection) -> None:
    """Call what `observe` was given; what raises is dropped."""
    for callback in tuple(OBSERVERS):
        try:
            callback(selection)
        except (Exception, SystemExit) as error:
            if _drop(callback):
                warn_caller(f"observe: {callback!r} raised {describe_error(error)}; it is not called again", KptWarning)


def _drop(callback: Callable[[Selection], object]) -> bool:
    """Return whether it was still there."""
    try:
        OBSERVERS.remove(callback)
    except ValueError:  # it raised, perhaps in several threads at once
        return False
    return True


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
