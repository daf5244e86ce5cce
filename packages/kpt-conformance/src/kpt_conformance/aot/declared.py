"""What a kernel library declares, and the jobs that follow from it.

A library needs nothing of this package: its objects are recognised by their attributes, so a frozen dataclass of its
own will do.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import kpt_core
from kpt_core import Backend, InputError, Kernel
from kpt_core.contract import load

from .chips import Chip, chip_named
from .contract import Contract, parse_contract
from .readings import Row

#: What a library may need that an ordinary installation lacks, and the extra that brings it.
_COMPILERS = {"triton": "triton", "jax": "tpu", "jaxlib": "tpu", "libtpu": "tpu"}


class Program(Protocol):
    """What every kind of program has; `Kernel.aot` names one, or a sequence of them.

    Attributes:
        name: tells the programs of a kernel apart: `forward bf16`.
        contracts: the contract of each chip by its name, see `parse_contract`.
    """

    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def contracts(self) -> Mapping[str, str]: ...  # noqa: D102

    def configurations(self, chip: str) -> Mapping[str, Mapping[str, Any]]:
        """Return what the program may be launched with on a chip, by name; what a tuning table holds belongs to it.

        Values that are parameters of a Triton function are its constexprs, the others compiler options (`num_warps`).
        `enable_fp_fusion` has to be among them, because its default differs between versions of Triton.
        """


@runtime_checkable
class TritonProgram(Program, Protocol):
    """A Triton function.

    Attributes:
        function: made by `@triton.jit`.
        signature: the types of its arguments at run time: `*bf16`, `i32`, `tensordesc<bf16[{BLOCK_M}, 64]>`, where
            braces stand for a value of the configuration. `:16` behind a type says that the argument (a pointer: the
            address) is a multiple of 16, `:1` that it is 1, which is what Triton finds out at launch. A program may
            have `types(chip)` beside it.
    """

    @property
    def function(self) -> Any: ...  # noqa: D102
    @property
    def signature(self) -> Mapping[str, str]: ...  # noqa: D102


@runtime_checkable
class PallasProgram(Program, Protocol):
    """A Pallas kernel, or any function of JAX that has one in it."""

    def lower(self, devices: Sequence[Any], configuration: Mapping[str, Any]) -> Any:
        """Return what `jax.jit(...).lower(...)` gives for arguments placed on these devices of a topology.

        `jax.sharding.SingleDeviceSharding(devices[0])` places one.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One thing to compile, found again in another process too: by the attribute `Kernel.aot` and the place in it."""

    target: str
    index: int
    chip: Chip
    configuration: str

    def program(self) -> TritonProgram | PallasProgram:
        """Import it."""
        return programs_of(self.target)[self.index]

    def settings(self) -> dict[str, Any]:
        """Return the values of the configuration."""
        return dict(configurations_of(self.program(), self.chip)[self.configuration])


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A job, whose kernel it is, and what its result is held to."""

    backend: str
    kernel: Kernel
    job: Job
    program: str
    contract: Contract


def programs_of(target: str) -> tuple[TritonProgram | PallasProgram, ...]:
    """Import what `Kernel.aot` names; raise `InputError` if it is no program, or two have one name."""
    value = load(target)
    programs = tuple(value) if isinstance(value, list | tuple) else (value,)
    for program in programs:
        if not isinstance(program, TritonProgram | PallasProgram):
            needed = "name, contracts, configurations() and either function and signature or lower()"
            raise InputError(f"{target}: {program!r:.80} is no program; expected an object that has {needed}")
    names = [program.name for program in programs]
    if len(set(names)) < len(names) or not names:
        raise InputError(f"{target} has programs of the names {names}; expected at least one, and each name once")
    return programs


def configurations_of(program: TritonProgram | PallasProgram, chip: Chip) -> Mapping[str, Mapping[str, Any]]:
    """Return all that a program is compiled with for a chip; raise `InputError` if there is nothing."""
    found = program.configurations(chip.name)
    if not found:
        raise InputError(f"it has no configuration for {chip.name}; expected one, or a contract 'not offered: reason'")
    return found


def declared(
    backends: Mapping[str, Backend], chips: frozenset[str] | None, ops: tuple[str, ...] = ("",)
) -> Iterator[Task | Row]:
    """Yield everything to compile for chips (None: all that a backend claims), and a row for each wrong declaration.

    `ops` is how the names of the ops begin.
    """
    for name, backend in backends.items():
        try:
            kernels = list(backend.kernels())
        except Exception as error:
            detail = f"kernels() of backend {name!r} raised {_sentence(error)}"
            yield Row(backend=name, op="", kernel="", status="error", detail=detail)
            continue
        for kernel in kernels:
            if kernel.aot is not None and kernel.op.startswith(ops):
                yield from _tasks_of(name, backend.chips, kernel, kernel.aot, chips)


def without_aot(backends: Mapping[str, Backend]) -> list[str]:
    """Return the kernels that name nothing to compile."""
    return [kernel.forward for backend in backends.values() for kernel in backend.kernels() if kernel.aot is None]


def _tasks_of(
    backend: str, claimed: tuple[str, ...], kernel: Kernel, aot: str, chips: frozenset[str] | None
) -> Iterator[Task | Row]:
    def wrong(detail: str, **more: Any) -> Row:
        return Row(backend=backend, op=kernel.op, kernel=kernel.forward, status="error", detail=detail, **more)

    if not claimed:
        yield wrong(f"backend {backend!r} does not say for which chips it is; give it an attribute chips = ('sm90',)")
        return
    try:
        programs = programs_of(aot)
    except Exception as error:
        yield wrong(why_not_compiled(error))
        return
    for index, program in enumerate(programs):
        for name in program.contracts:
            try:
                chip_named(name)
            except kpt_core.UnknownNameError as error:
                yield wrong(f"a contract is for an {error}", program=program.name, contract=program.contracts[name])
        for name in claimed:
            if chips is None or name in chips:
                text = program.contracts.get(name)
                try:
                    chip = chip_named(name)
                    if text is None:
                        raise InputError(
                            f"backend {backend!r} claims {name}, but there is no contract for it; "
                            f"add one to the program {program.name!r} of {aot}"
                        )
                    contract = parse_contract(text, chip)
                    names = [""] if contract.not_offered is not None else list(configurations_of(program, chip))
                except Exception as error:
                    yield wrong(_sentence(error), program=program.name, chip=name, contract=text)
                    continue
                for configuration in names:
                    job = Job(target=aot, index=index, chip=chip, configuration=configuration)
                    yield Task(backend=backend, kernel=kernel, job=job, program=program.name, contract=contract)


def why_not_compiled(error: Exception) -> str:
    """Return a sentence for a declaration or an installation that is at fault."""
    missing = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if missing in _COMPILERS:
        return (
            f"not compiled: {missing} is not installed; pip install './packages/kpt-conformance[{_COMPILERS[missing]}]'"
        )
    return f"not compiled: {_sentence(error)}"


def _sentence(error: Exception) -> str:
    return str(error) if isinstance(error, kpt_core.KptError) else f"{type(error).__name__}: {error}"
