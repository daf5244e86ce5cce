"""An op: one operation's contract. Its body is its specification; calling it runs the best kernel."""

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from types import NoneType, UnionType
from typing import Any, Generic, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from . import registry
from .contract import Call, Kernel, call_type
from .dispatch.candidates import Candidate, Candidates, find_candidates
from .dispatch.opaque import define_opaque
from .dispatch.settings import Scope, effective
from .entry import entries
from .errors import RegistrationError
from .selection import Selection

P = ParamSpec("P")
R = TypeVar("R")

_PLAIN = (int, float, bool, str, torch.dtype)
#: Names of a record's other fields, and of arguments of the torch op for backward.
_RESERVED = ("needs", "config", "saved")
#: `saves` of an op whose results are all that its backward needs beside the arguments.
RESULTS = "results"


class Op(Generic[P, R]):
    """One operation; made by `@kpt_core.op`, which says what its settings mean.

    Attributes:
        name: `family.operation`, for instance `moe.grouped_mm`.
        reference: the decorated function: specification, oracle, and what runs where nothing else may.
        parameters: names of the op's parameters, in order.
        defined_in: module and name of the reference.
        tensors: places of the parameters that are tensors, in two groups: `required` and `optional`.
    """

    def __init__(self, name: str, reference: Callable[P, R], **settings: Any) -> None:
        family, _, operation = name.partition(".")
        if not (family.isidentifier() and operation.isidentifier()):
            raise RegistrationError(f"op name {name!r} is not of the form 'family.operation'")
        functools.update_wrapper(self, reference)
        self.name = name
        self.reference = reference
        self.defined_in = f"{reference.__module__}:{reference.__qualname__}"
        self.check: Callable[[Call], None] | None = settings["check"]
        self.fake: Callable[[Call], Any] | None = settings["fake"]
        self.saves: Callable[[Call], tuple[Tensor, ...]] | str | None = settings["saves"]
        self.flops: Callable[[Call], int] | None = settings["flops"]
        self.size_key: Callable[[Call], tuple[int | str, ...]] | None = settings["size_key"]
        self.random: bool = settings["random"]
        parameters = inspect.signature(reference).parameters
        self.parameters = tuple(parameters)
        self.defaults = {n: p.default for n, p in parameters.items() if p.default is not p.empty}
        hints = get_type_hints(reference)
        self.annotations = self._annotations(hints, parameters)
        tensors = [n for n, kind in self.annotations.items() if kind is Tensor or kind == Tensor | None]
        self.mutates, self.unread, self.autocast = (
            self._known(setting, settings[setting], tensors, "tensors") for setting in ("mutates", "unread", "autocast")
        )
        if self.random:
            self._known("random: it asks for", ("seed", "offset"), self.parameters, "parameters")
        places = list(enumerate(self.annotations.values()))
        self.required = tuple(place for place, kind in places if kind is Tensor)
        self.optional = tuple(place for place, kind in places if Tensor in get_args(kind))
        self.tensors = tuple(sorted((*self.required, *self.optional)))
        groups = (("required", self.required), ("optional", self.optional))
        #: The same by name, what tells the device first.
        self.kinds = {self.parameters[place]: kind for kind, places in groups for place in places}
        if not self.required:
            raise RegistrationError(f"op {name!r} takes no tensor; one must be there to tell the device")
        self.first = self.required[0]
        results = hints.get("return")
        self.result_count = int(results is Tensor) if results in (Tensor, NoneType) else _length(results)
        if self.result_count == 0 and results is not NoneType:
            raise RegistrationError(f"op {name!r} gives {results}; expected Tensor, a tuple of so many, or None")
        #: Place of a result that may be None -> the argument that asks for it.
        self.optional_results: dict[int, str] = dict(settings["optional_results"])
        may_be_none = [p for p, kind in enumerate(get_args(results)) if kind == Tensor | None]
        asking = self.optional_results.values()
        if may_be_none != sorted(self.optional_results) or {self.annotations.get(each) for each in asking} - {bool}:
            raise RegistrationError(
                f"op {name!r}: its results {may_be_none} may be None; optional_results must name for each of them the "
                f"bool argument that asks for it; got {self.optional_results}"
            )
        #: What it changes, in the order of the parameters.
        self.written = tuple(each for each in self.parameters if each in self.mutates)
        self.saved_count = 0
        if callable(self.saves):
            self.saved_count = _length(get_type_hints(self.saves).get("return"))
            if not self.saved_count:
                raise RegistrationError(f"op {name!r}: saves must be annotated to give a tuple of so many tensors")
        elif self.saves not in (None, RESULTS):
            raise RegistrationError(f"op {name!r}: saves is {self.saves!r}; expected a function or {RESULTS!r}")
        #: As many as there are: code that Dynamo traces may read no number of an object.
        self.result_names = tuple(f"result_{place}" for place in range(self.result_count))
        self.saved_names = tuple(f"saved_{place}" for place in range(self.saved_count))
        self.Call = call_type(name, self.parameters)
        entry, self.run_reference = entries(self, parameters)
        # A class of its own, since a call looks for `__call__` there; binding is Python's own, and as quick.
        self.__class__ = type("Op", (type(self),), {"__call__": entry, "__module__": __name__})
        #: dtype -> the device that was last used (None for the CPU), whom to ask there in turn where the environment
        #: alone applies, and whether the reference serves after them without a word.
        self.quick: dict[torch.dtype, tuple[torch.device | None, tuple[Candidate, ...], bool]] = {}
        self._found: dict[tuple[torch.device, torch.dtype, Scope], Candidates] = {}
        self._candidates: dict[tuple[str, Kernel], Candidate] = {}
        #: Device types whose fallback to plain PyTorch was said.
        self.told_of: set[str] = set()
        #: What compilers look into instead of the opaque op, by what they know of a call.
        self.plain: dict[tuple[str, torch.dtype, bool], Callable[[Call], Any]] = {}

    def _known(self, setting: str, names: Iterable[str], known: Iterable[str], what: str) -> frozenset[str]:
        for name in names:
            if name not in known:
                raise RegistrationError(f"op {self.name!r}: {setting} {name!r}, which is none of its {what}")
        return frozenset(names)

    def _annotations(self, hints: dict[str, Any], parameters: Mapping[str, inspect.Parameter]) -> dict[str, Any]:
        found = {}
        for name, parameter in parameters.items():
            kind = hints.get(name)
            union = get_origin(kind) in (Union, UnionType)
            options = set(get_args(kind) if union else (kind,)) - {NoneType}
            if len(options) != 1 or not options <= {Tensor, *_PLAIN}:
                raise RegistrationError(
                    f"op {self.name!r}: parameter {name!r} is annotated {kind}; expected Tensor, int, float, bool, str "
                    "or torch.dtype (or one of these or None): take richer objects apart in the layer that calls the op"
                )
            if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                raise RegistrationError(f"op {self.name!r}: parameter {name!r} is {parameter.kind.description}")
            if name in _RESERVED or name.startswith(("_", "grad_")):
                raise RegistrationError(f"op {self.name!r}: the name of parameter {name!r} is taken; give it another")
            found[name] = kind
        return found

    def __repr__(self) -> str:
        return f"<op {self.name}>"

    def __reduce__(self) -> Any:
        return _restored, (self.name, self.defined_in)

    def __copy__(self) -> "Op[P, R]":
        return self

    def __deepcopy__(self, memo: object) -> "Op[P, R]":
        return self

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the best kernel that takes the call; replaced for each op by what its signature says."""
        raise AssertionError("every op has its own")

    def bind(self, *args: Any, **kwargs: Any) -> Call:
        """The record of a call with these arguments, which kernels take; no gradient is wanted in it.

        Raises:
            TypeError: the op can't be called so.
        """
        try:
            bound = inspect.signature(self.reference).bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{self.name}: {error}") from None
        bound.apply_defaults()
        return self.Call(*bound.arguments.values(), (), None)

    def forget(self) -> None:
        """Drop cached selections and quarantine."""
        # New dictionaries: a thread that is choosing just now puts what it finds into the old ones.
        self.quick, self._found, self._candidates, self.plain = {}, {}, {}, {}
        self.told_of = set()

    def candidate(self, backend: str, kernel: Kernel) -> Candidate:
        """The state of a kernel, which is one in all scopes and on all devices."""
        return self._candidates.setdefault((backend, kernel), Candidate(self, backend, kernel))

    def candidates(self, device: torch.device, dtype: torch.dtype) -> Candidates:
        """The kernels that may serve calls on `device` with a first tensor of `dtype`, under the settings in force."""
        scope = effective()
        found = self._found.get((device, dtype, scope))
        if found is None:
            registry.backends()  # once they are discovered, all is forgotten
            known = self._found
            found = known[device, dtype, scope] = find_candidates(self, device, dtype, scope)
        return found

    def faked(self, call: Call) -> Any:
        """The results as empty tensors: what compilers and the meta device see."""
        return self.run_reference(call) if self.fake is None else self.fake(call)

    def explain(self, *args: P.args, **kwargs: P.kwargs) -> Selection:
        """What a call with these arguments would run, and why not the others; nothing is computed.

        Raises:
            InputError: the op refuses the arguments.
            NoKernelError: an explicit choice or strict mode can't be satisfied.
        """
        from .explaining import describe

        return describe(self, self.bind(*args, **kwargs))


def _length(annotation: object) -> int:
    """How many tensors a tuple of them has, 0 if it is none."""
    kinds = get_args(annotation) if get_origin(annotation) is tuple else ()
    return len(kinds) if all(kind is Tensor or kind == Tensor | None for kind in kinds) else 0


def _restored(name: str, defined_in: str) -> Op[..., Any]:
    """Where an op is unpickled: the one of this process."""
    if name not in registry.ops():
        __import__(defined_in.partition(":")[0])
    return registry.get_op(name)


def op(
    name: str,
    *,
    check: Callable[[Call], None] | None = None,
    fake: Callable[[Call], Any] | None = None,
    saves: Callable[[Call], tuple[Tensor, ...]] | str | None = None,
    unread: Iterable[str] = (),
    mutates: Iterable[str] = (),
    random: bool = False,
    optional_results: Mapping[int, str] | None = None,
    flops: Callable[[Call], int] | None = None,
    autocast: Iterable[str] = (),
    size_key: Callable[[Call], tuple[int | str, ...]] | None = None,
) -> Callable[[Callable[P, R]], Op[P, R]]:
    """Make an op of its reference: plain PyTorch that autograd differentiates, on any device.

    Functions among the settings take a call's record (`kpt_core.Call`), so that the signature stands in the op alone.

    Args:
        name: `family.operation`.
        check: raises `InputError` for wrong arguments, before any kernel sees them.
        fake: gives the results as empty contiguous tensors; without it the reference runs on fake tensors.
        saves: what backward needs beside the arguments: `"results"`, or a function that computes the saved tensors
            from the call in plain PyTorch, annotated with a tuple of as many. Every kernel with a backward saves these.
        unread: parameters whose values no gradient depends on; they are not kept for backward.
        mutates: parameters that a call changes; None may be given for one that is optional. Such an op is not run again
            when a kernel raised. Gradients are of the other arguments; none flows through what is changed.
        random: it draws numbers, from what its parameters `seed` and `offset` say alone.
        optional_results: place of a result that may be None to the bool parameter that asks for it; the result is
            annotated `Tensor | None`.
        flops: gives the floating-point operations of a forward, for `torch.utils.flop_counter`.
        autocast: tensor parameters that `torch.autocast` converts to its dtype; the others keep theirs.
        size_key: gives a tuple of ints and strings: the sizes that decide which kernel is fastest. `kpt tune` keeps one
            result for each, so dimensions that vary are rounded (`kpt_core.policy.next_power_of_two`).
            Without it, one result serves all calls of a device and dtype.

    Raises:
        RegistrationError: the name is malformed or taken, or a setting or an annotation is not what it must be.
    """

    def decorate(reference: Callable[P, R]) -> Op[P, R]:
        made = Op(
            name, reference, check=check, fake=fake, saves=saves, unread=tuple(unread), mutates=tuple(mutates),
            random=random, optional_results=optional_results or {}, flops=flops, autocast=tuple(autocast),
            size_key=size_key,
        )  # fmt: skip
        registry.define(made, define_opaque)
        return made

    return decorate


def explain(op: Op[..., Any] | str, *args: Any, **kwargs: Any) -> Selection:
    """What `op(*args, **kwargs)` would run, and why not the others; nothing is computed.

    Raises:
        UnknownNameError: no op has that name.
        InputError: the op refuses the arguments.
        NoKernelError: an explicit choice or strict mode can't be satisfied.
    """
    return (registry.get_op(op) if isinstance(op, str) else op).explain(*args, **kwargs)
