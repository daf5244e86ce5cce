"""The contract as data: an op, a call's record, a kernel, a backend, a refusal."""

import importlib
import inspect
from collections import namedtuple
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, Self, TypeVar, Union, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from .errors import RegistrationError
from .selection import REFERENCE, KernelCount, Selection

P = ParamSpec("P")
R = TypeVar("R")

Capability = str
"""A fact about a device: `bf16`, `fp8_e4m3fn`, `tma`, `wgmma`, `sm90`, `gfx942`, `avx512`..."""

#: Name of the backend that is built in.
TORCH = "torch"

#: What a parameter of an op may be beside a tensor.
_PLAIN = (int, float, bool, str, torch.dtype)
#: Names of a record's other fields, and of arguments of the torch op for backward.
_RESERVED = ("needs", "config", "saved")
#: `saves` of an op whose results are all that its backward needs beside the arguments.
RESULTS = "results"


class Call(tuple[Any, ...]):
    """One call of an op: a named tuple with a field for each of its parameters.

    Attributes:
        needs: names of the arguments whose gradient is wanted; empty if nothing needs to be saved.
        config: the configuration that tuning chose for the kernel; None for its default.
    """

    __slots__ = ()
    needs: tuple[str, ...]
    config: Mapping[str, Any] | None

    if TYPE_CHECKING:

        def __new__(cls, *values: Any) -> Self: ...  # noqa: D102

        def __getattr__(self, name: str) -> Any: ...

        def _replace(self, **changes: Any) -> "Call": ...

        def _asdict(self) -> dict[str, Any]: ...


def call_type(op: str, parameters: Sequence[str]) -> type[Call]:
    """Make the type of an op's records."""
    name = f"Call_of_{op.replace('.', '_')}"
    base: Any = namedtuple(name, [*parameters, "needs", "config"])  # type: ignore[misc]
    return type(name, (base, Call), {"__slots__": (), "__module__": __name__})


@dataclass(frozen=True, slots=True)
class Kernel:
    """One implementation of an op, named by strings so that registering it imports nothing.

    Args:
        op: name of the op, for instance `moe.grouped_mm`.
        forward: `package.module:function`, a function of the call's record that gives the results. A kernel that has a
            backward, of an op that declares with a function what is saved, gives `(results, saved)`, where saved is
            empty unless `call.needs` names something.
        backward: a function `(call, saved, *gradients of the results)` that gives a dictionary of gradients by the
            names of arguments, None for zeros; the gradient of a result that is not used is None. It gets what
            the op changes as it was before the call. Without it the kernel is forward-only,
            unless it is `differentiable`.
        requires: capabilities that the device must have.
        priority: the higher one is tried first.
        dtypes: dtypes of the op's first tensor that are accepted, as in `"bfloat16"`; None accepts all.
        unsupported: a function of the record that gives None, or the sentence that refuses the call (`Refusal` or a
            string). What it raises propagates: a bug there must not look like a refusal.
        differentiable: the forward is plain PyTorch that autograd differentiates. One of backend `torch` also serves
            under torch.func, vmap excepted, and for derivatives of gradients.
        deterministic: repeated calls give the same bits, gradients included; the conformance suite holds it to that.
        composed_of: names of the ops that it calls, which are dispatched again.
        traceable: plain PyTorch that reads no value on the host, as does what refuses calls: compilers may look into
            both (backend `torch` alone).
        prepare: a function of the record that gives a function of the op's arguments, in their order, or None. Where
            this kernel is the first of its op, that function serves, on the same device, without gradients and without
            asking check and `unsupported` again, all calls whose tensors have the same shapes, strides and dtypes, and
            whose other arguments are equal. So it gives one only where these answer by nothing else. It gives the
            results alone, and keeps no tensor of the call.
        configs: what tuning tries: a sequence, or a function of the record that gives one, of dictionaries or frozen
            dataclasses that JSON gives back as they are. The chosen one comes as `call.config`.
        aot: what is compiled ahead of time to prove the kernel on chips that are not there, see `kpt_conformance.aot`.
    """

    op: str
    forward: str
    backward: str | None = None
    requires: Set[Capability] = frozenset()
    priority: int = 0
    dtypes: Set[str] | None = None
    unsupported: str | None = None
    differentiable: bool = False
    deterministic: bool = False
    composed_of: tuple[str, ...] = ()
    traceable: bool = False
    prepare: str | None = None
    configs: str | None = None
    aot: str | None = None

    def __post_init__(self) -> None:
        who = f"kernel {self.forward} of {self.op}"
        for field, kind in _FIELDS.items():
            value = getattr(self, field)
            if type(value) is not kind and not (value is None and field in _OPTIONAL):
                raise RegistrationError(f"{who}: {field} must be {kind.__name__}; got {value!r}")
        object.__setattr__(self, "requires", _names(who, "requires", self.requires))
        object.__setattr__(self, "composed_of", tuple(sorted(_names(who, "composed_of", self.composed_of))))
        if self.dtypes is not None:
            given: Any = self.dtypes
            given = given if isinstance(given, str) else map(str, given)
            dtypes = {name.removeprefix("torch.") for name in _names(who, "dtypes", given)}
            object.__setattr__(self, "dtypes", frozenset(dtypes))
            for name in sorted(dtypes):
                if not isinstance(getattr(torch, name, None), torch.dtype):
                    raise RegistrationError(f"{who}: dtypes names {name!r}, which is no dtype of torch")
        for target in filter(None, (getattr(self, field) for field in _TARGETS)):
            module, _, attribute = target.partition(":")
            if not module or not attribute:
                raise RegistrationError(f"{who}: {target!r} is not of the form 'package.module:name'")
        if self.differentiable and self.backward is not None:
            raise RegistrationError(f"{who}: it is differentiable and names a backward; autograd needs but one way")

    def load(self) -> Callable[..., Any]:
        """Import the function that `forward` names."""
        return load(self.forward)  # type: ignore[no-any-return]


#: Fields that name a function.
_TARGETS = ("forward", "backward", "unsupported", "prepare", "configs", "aot")
#: Types of a kernel's fields: whatever a plug-in gives is checked where it is made.
_FIELDS = {
    **dict.fromkeys(("op", *_TARGETS), str),
    **dict.fromkeys(("differentiable", "deterministic", "traceable"), bool),
    "priority": int,
}
_OPTIONAL = _TARGETS[1:]


def _names(who: str, field: str, names: object) -> frozenset[str]:
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise RegistrationError(f"{who}: {field} must be a set of names; got {names!r}: put it in braces")
    found = frozenset(names)
    if not all(isinstance(name, str) for name in found):
        raise RegistrationError(f"{who}: {field} must hold names alone; got {set(found)!r}")
    return found


class Backend:
    """A vendor's package: finds devices, tells their capabilities, offers kernels. Backends derive from it.

    Attributes:
        name: short and unique, for instance `nvidia`; what `use("nvidia")` and `KPT_USE=nvidia` name.
        device_types: torch's types of its devices: `("cuda",)`, `("xla", "tpu")`.
        tuning: the folder of the tuning tables that the package ships, as in `"kpt_backend_x:tuning"`.
        chips: what `python -m kpt_conformance.aot` compiles its kernels for.

    None of the methods may import a compiler or a framework other than torch at package import.
    """

    name: str
    device_types: tuple[str, ...]
    tuning: str | None = None
    chips: tuple[str, ...] = ()

    def unavailable(self) -> str | None:
        """Return None if the backend can run here, else the sentence that `kpt doctor` prints."""
        return None

    def capabilities(self, device: torch.device) -> frozenset[Capability]:
        """Return what `device`, which is of one of this backend's types, can do."""
        return frozenset()

    def kernels(self) -> Iterable[Kernel]:
        """Return every kernel offered, whether or not it can run here."""
        return ()

    def device_name(self, device: torch.device) -> str:
        """Return the name of a device's model, which tuning tables and locks go by."""
        tell = getattr(getattr(torch, device.type, None), "get_device_name", None)
        return str(tell(device)) if tell is not None else device.type

    def synchronize(self, device: torch.device) -> None:
        """Wait for what a device was asked to do; a CPU has done it, with an accelerator beside it or without."""
        if device.type != "cpu":
            torch.accelerator.synchronize(device)

    def reference_is_slow(self, device: torch.device) -> bool:
        """Return whether users want to know that no kernel serves a call on a device."""
        return device.type not in ("cpu", "meta")

    def library(self) -> Mapping[str, str]:
        """Return what runs beside Python, for reports of runs: `isa`, the instruction set, and `compiler`."""
        return {}

    def serves(self, device_type: str) -> bool:
        """Return whether it is for devices of a type."""
        return not self.device_types or device_type in self.device_types


#: What kernels of backend `torch` require that are PyTorch's own fused ones for GPUs: they are not slow there.
GPU: Capability = "gpu"
#: Types of devices that have these: NVIDIA's and AMD's, Intel's.
_GPUS = ("cuda", "xpu")


class TorchBackend(Backend):
    """Kernels in plain PyTorch that feature packages list beside their ops: after every vendor's, on any device.

    Args:
        kernels: those of the installed feature packages.
    """

    name = TORCH
    device_types = ()

    def __init__(self, kernels: Iterable[Kernel] = ()) -> None:
        self._kernels = tuple(kernels)

    def capabilities(self, device: torch.device) -> frozenset[Capability]:
        """Return `host_memory` where reading values does not make the host wait for a device, `gpu` of a GPU."""
        found = {"host_memory": device.type == "cpu", GPU: device.type in _GPUS}
        return frozenset(name for name, there in found.items() if there)

    def kernels(self) -> tuple[Kernel, ...]:
        """Return those of the installed feature packages."""
        return self._kernels


class Op(Generic[P, R]):
    """One operation; made by `@kpt_core.op`, which says what its settings mean.

    Attributes:
        name: `family.operation`, for instance `moe.grouped_mm`.
        reference: the decorated function: specification, oracle, and what runs where nothing else may.
        of_graph: what the torch op does with a call's values and the names of what needs a gradient.
        run_reference: the reference, of a call's record.
        parameters: names of the op's parameters, in order.
        defined_in: module and name of the reference.
        required: places of the parameters that are tensors.
        optional: places of those that are tensors or None.
        Call: the type of its calls' records.
    """

    of_graph: Callable[..., Any]
    run_reference: Callable[[Call], Any]

    if TYPE_CHECKING:  # `@kpt_core.op` gives these to each op

        def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
            """Run the best kernel that takes the call."""

        def candidates(self, device: torch.device, dtype: torch.dtype) -> Any:
            """Return the kernels that may serve calls on `device` with a first tensor of `dtype`, by the settings."""

        def explain(self, *args: P.args, **kwargs: P.kwargs) -> Selection:
            """Return what a call with these arguments would run, and why not the others; nothing is computed."""

    def __init__(self, name: str, reference: Callable[P, R], **settings: Any) -> None:
        family, _, operation = name.partition(".")
        if not (family.isidentifier() and operation.isidentifier()):
            raise RegistrationError(f"op name {name!r} is not of the form 'family.operation'")
        self.__doc__, self.__module__ = reference.__doc__, reference.__module__
        self.__name__, self.__qualname__, self.__wrapped__ = reference.__name__, reference.__qualname__, reference
        self.name = name
        self.reference = reference
        self.defined_in = f"{reference.__module__}:{reference.__qualname__}"
        self.check: Callable[[Call], None] | None = settings["check"]
        self.fake: Callable[[Call], Any] | None = settings["fake"]
        self.saves: Callable[[Call], tuple[Tensor, ...]] | str | None = settings["saves"]
        self.fake_saves: Callable[[Call], tuple[Tensor, ...]] | None = settings["fake_saves"]
        self.flops: Callable[[Call], int] | None = settings["flops"]
        self.plain_bytes: Callable[[Call], int] | None = settings["plain_bytes"]
        self.size_key: Callable[[Call], tuple[int | str, ...]] | None = settings["size_key"]
        self.random: bool = settings["random"]
        self.signature = inspect.signature(reference)
        parameters = self.signature.parameters
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
        if self.fake_saves is not None and not self.saved_count:
            raise RegistrationError(f"op {name!r}: fake_saves goes with a function as saves; got saves={self.saves!r}")
        #: As many as there are: code that Dynamo traces may read no number of an object.
        self.result_names = tuple(f"result_{place}" for place in range(self.result_count))
        self.saved_names = tuple(f"saved_{place}" for place in range(self.saved_count))
        self.Call = call_type(name, self.parameters)
        #: By identity of the kernel. They go on when the rest is forgotten.
        self.counts = {REFERENCE: KernelCount(name, REFERENCE, REFERENCE)}
        self.forget()

    def forget(self) -> None:
        """Drop what was chosen and what was said; quarantine ends."""
        # New dictionaries: a thread that is choosing just now puts what it finds into the old ones.
        #: dtype -> the device that was last used (None for the CPU), whom to ask there in turn where the environment
        #: alone applies, whether the reference serves after them without a word, and what the first of them prepared
        #: (False for nothing) by what calls look like; None where it prepares none.
        self.quick: dict[
            torch.dtype, tuple[torch.device | None, tuple[Any, ...], bool, dict[tuple[Any, ...], Any] | None]
        ] = {}
        #: What was prepared, and gave once what the contract says: graphs rely on it.
        self.agreed: set[Callable[..., Any]] = set()
        #: What `dispatch.candidates` knows of devices, and of kernels.
        self.found: dict[Any, Any] = {}
        self.kernels: dict[tuple[str, Kernel], Any] = {}
        #: What compilers look into instead of the opaque op, by what they know of a call.
        self.plain: dict[tuple[str, torch.dtype, bool], Callable[[Call], Any]] = {}
        #: Device types whose fallback to plain PyTorch was said; and "memory", where what that takes was.
        self.told_of: set[str] = set()

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

    def __copy__(self) -> "Op[P, R]":
        return self

    def __deepcopy__(self, memo: object) -> "Op[P, R]":
        return self

    def bind(self, *args: Any, **kwargs: Any) -> Call:
        """Return the record of a call with these arguments, which kernels take; no gradient is wanted in it.

        Raises:
            TypeError: the op can't be called so.
        """
        try:
            bound = self.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{self.name}: {error}") from None
        bound.apply_defaults()
        return self.Call(*bound.arguments.values(), (), None)

    def faked(self, call: Call) -> Any:
        """Return the results as empty tensors: what compilers and the meta device see."""
        return self.run_reference(call) if self.fake is None else self.fake(call)


def _length(annotation: object) -> int:
    """Return how many tensors a tuple of them has, 0 if it is none."""
    kinds = get_args(annotation) if get_origin(annotation) is tuple else ()
    return len(kinds) if all(kind is Tensor or kind == Tensor | None for kind in kinds) else 0


def identity(backend: str, kernel: Kernel) -> str:
    """Return what tells a kernel from all others: backend/op/function."""
    return f"{backend}/{kernel.op}/{kernel.forward}"


def load(target: str) -> Any:
    """Import `package.module:attribute`."""
    module, _, attribute = target.partition(":")
    value: Any = importlib.import_module(module)
    for part in attribute.split("."):
        value = getattr(value, part)
    return value
