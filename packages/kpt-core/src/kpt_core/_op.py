"""An op: one operation's contract, and the dispatch of its calls to kernels."""

import functools
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch.compiler import is_dynamo_compiling

from . import _registry
from ._autocast import without_autocast
from ._candidates import (
    Candidate,
    Candidates,
    Unsupported,
    call_key,
    call_signature,
    find_candidates,
    needs_gradient,
)
from ._errors import InputError, NoKernelError, RegistrationError
from ._failures import is_contained, require_binding, warn_of_failure
from ._fallback import refusal_of_reference, warn_of_fallback
from ._kernel import Kernel, signature_of
from ._selection import REFERENCE, Refusal, Selection
from ._settings import Scope, current, effective, scoped
from ._tracing import dispatch_traced, traced_candidates
from ._tuning import configured, tuned_choices
from ._tuning_files import MODELLED, Key, TuningEntry

P = ParamSpec("P")
R = TypeVar("R")


class Op(Generic[P, R]):
    """One operation: calling it runs the best kernel that accepts the call, or else the reference.

    Made by `@kpt_core.op`. The reference, the function that was decorated, is pure PyTorch, differentiable and runs
    on any device.

    Attributes:
        name: `family.operation`, for instance `moe.grouped_mm`.
        reference: the decorated function.
        check: raises `InputError` for wrong arguments, before any kernel sees them; None if nothing is checked.
        composed_of: names of the ops that the reference calls.
        autocast: names of the tensor parameters that autocast converts; the others keep their dtype.
        size_key: gives the sizes of a call that decide which kernel is fastest; None if one is best for all.
        defined_in: module and name of the reference.
        parameters: names of the op's parameters, in order.
    """

    def __init__(
        self,
        name: str,
        reference: Callable[P, R],
        check: Callable[P, None] | None = None,
        composed_of: Iterable[str] = (),
        autocast: Iterable[str] = (),
        size_key: Callable[P, Key] | None = None,
    ) -> None:
        family, _, operation = name.partition(".")
        if not (family.isidentifier() and operation.isidentifier()):
            raise RegistrationError(f"op name {name!r} is not of the form 'family.operation'")
        #: Read here, since Dynamo would take the defaults of a signature that it sees inspected for dynamic inputs.
        self.parameters = tuple(name for name, _, _ in signature_of(reference))
        if not self.parameters:
            raise RegistrationError(f"op {name!r} has no parameters; the first one must be a tensor")
        functools.update_wrapper(self, reference)
        self.name = name
        self.reference = reference
        self.check = check
        self.composed_of = tuple(composed_of)
        self.autocast = frozenset(autocast)
        self.size_key = size_key
        self.defined_in = f"{reference.__module__}.{reference.__qualname__}"
        #: (device, dtype) -> what serves such calls when nothing but the environment applies, whether it has no
        #: gradients, its `unsupported`, and the candidates that it is the first of.
        self._direct: dict[
            tuple[torch.device, torch.dtype], tuple[Callable[..., Any], bool, Unsupported | None, Candidates]
        ] = {}
        self._found: dict[tuple[torch.device, torch.dtype, Scope], Candidates] = {}
        #: What traced calls read: a plain dictionary, so that Dynamo guards on what it finds there.
        self.traced: dict[tuple[torch.device, torch.dtype, str], Candidates] = {}
        self._loaded: dict[tuple[str, Kernel], Candidate] = {}
        #: Device types whose fallback to the reference was said.
        self.said: set[str] = set()

    def __repr__(self) -> str:
        return f"<op {self.name}>"

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if self.autocast and torch._C._is_any_autocast_enabled():
            return self._call_autocast(args, kwargs)
        if self.check is not None:
            self._check(self.check, args, kwargs)
        # Not while Dynamo traces: it would guard on what `_direct` lacks, and trace again after the next eager call.
        if args and current.scope is None and not is_dynamo_compiling():
            first: Any = args[0]
            try:
                direct = self._direct.get((first.device, first.dtype))
            except AttributeError:
                direct = None  # no tensor: `_dispatch` says so
            if direct is not None:
                call, forward_only, unsupported, found = direct
                if not (forward_only and needs_gradient(args, kwargs)) and (
                    unsupported is None or unsupported(*args, **kwargs) is None
                ):
                    try:
                        return call(*args, **kwargs)  # type: ignore[no-any-return]
                    except Exception as error:
                        if call is self.reference or not is_contained(error):
                            raise
                        return self._recover(found, error, args, kwargs)
        return self._dispatch(args, kwargs)

    def _call_autocast(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> R:
        """Convert as autocast asks, and call with autocast off."""
        args, kwargs = self._convert(args, kwargs)
        if self.check is not None:
            self._check(self.check, args, kwargs)
        with without_autocast(self.first_tensor(args, kwargs).device.type):
            return self._dispatch(args, kwargs)

    def _convert(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Convert the parameters named in `autocast`, as torch does for its own ops."""
        device_type = self.first_tensor(args, kwargs).device.type
        if torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type):
            dtype = torch.get_autocast_dtype(device_type)

            def convert(name: str, value: Any) -> Any:
                if name not in self.autocast or not isinstance(value, torch.Tensor) or not value.is_floating_point():
                    return value
                # 8-bit numbers mean nothing without their scales.
                return value if value.dtype is torch.float64 or value.dtype.itemsize == 1 else value.to(dtype)

            args = tuple(convert(name, value) for name, value in zip(self.parameters, args, strict=False))
            kwargs = {name: convert(name, value) for name, value in kwargs.items()}
        return args, kwargs

    def forget(self) -> None:
        """Drop cached selections and quarantine."""
        # New dictionaries: a thread that is choosing just now puts what it finds into the old ones.
        self._direct = {}
        self._found = {}
        self.traced.clear()
        self._loaded.clear()
        self.said.clear()

    def candidates(self, device: torch.device, dtype: torch.dtype) -> Candidates:
        """The kernels that may serve calls on `device` with a first tensor of `dtype`, under the settings in force."""
        scope = effective()
        found = self._found.get((device, dtype, scope))
        if found is None:
            _registry.backends()  # once they are discovered, all is forgotten
            known = self._found
            scope = replace(scope, log=None)
            found = find_candidates(
                self.name, self.reference, bool(self.composed_of), device, dtype, scope, self._loaded
            )
            if found.accepted:
                targets = [candidate.kernel.target for candidate in found.accepted]
                found = replace(found, tuned=tuned_choices(self.name, device, dtype, targets))
            known[device, dtype, scope] = found
        return found

    def has_kernel(self, x: torch.Tensor) -> bool:
        """Whether some kernel, rather than the reference, may serve calls on `x`'s device and dtype."""
        if torch.compiler.is_compiling():
            return bool(traced_candidates(self, x).accepted)
        return bool(self.candidates(x.device, x.dtype).accepted)

    def explain(self, *args: P.args, **kwargs: P.kwargs) -> Selection:
        """What a call with these arguments would run, and why not the others; nothing is computed."""
        first = self.first_tensor(args, kwargs)
        if self.autocast:
            args, kwargs = self._convert(args, kwargs)  # type: ignore[assignment]
            first = self.first_tensor(args, kwargs)
        if self.check is not None:
            self._check(self.check, args, kwargs)
        with without_autocast(first.device.type) if self.autocast else nullcontext():
            found = self.candidates(first.device, first.dtype)
            candidate, refusals, tuned = self._choose(found, args, kwargs)
            if candidate is None and tuned is None:
                self._require_reference(found, refusals, first)
            children = self._explain_children(args, kwargs) if candidate is None and self.composed_of else ()
            return self._selection(candidate, refusals, tuned, children, args, kwargs)

    def _explain_children(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Selection, ...]:
        """What the ops that the reference calls would run: it runs on fake tensors, and so do their references."""
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.utils._pytree import tree_map_only

        log: list[Selection] = []
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        fake_args, fake_kwargs = tree_map_only(torch.Tensor, mode.from_tensor, (args, kwargs))
        with scoped(replace(effective(), log=log, dry=True)), mode:
            self.reference(*fake_args, **fake_kwargs)
        return tuple(log)

    def _check(self, check: Callable[..., None], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            check(*args, **kwargs)
        except (AttributeError, TypeError):
            # A check may suppose tensors and the op's parameters; its own error would name neither the op nor the slip.
            require_binding(self.name, self.reference, args, kwargs)
            self.first_tensor(args, kwargs)
            raise

    def first_tensor(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        first = args[0] if args else kwargs.get(self.parameters[0])
        if not isinstance(first, torch.Tensor):
            raise InputError(f"{self.name}: the first argument must be a tensor, not {type(first).__name__}")
        return first

    def _dispatch(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> R:
        first = self.first_tensor(args, kwargs)
        if torch.compiler.is_compiling():
            return dispatch_traced(self, first, args, kwargs)  # type: ignore[no-any-return]
        scope = effective()
        found, direct = self.candidates(first.device, first.dtype), self._direct
        result = self._run(found, scope, first, args, kwargs)
        # Unless the kernels changed while it ran, in this thread or in another.
        # What was measured depends on each call's sizes, for which the short path has no eye.
        steady = current.scope is None and (found.tuned is None or not found.tuned.reorders)
        if steady and self._found.get((first.device, first.dtype, scope)) is found:
            if not found.accepted:
                direct[first.device, first.dtype] = (self.reference, False, None, found)
            elif not found.accepted[0].quarantined:
                best = found.accepted[0]
                direct[first.device, first.dtype] = (best.call, best.kernel.forward_only, best.unsupported, found)
        return result

    def _choose(
        self, found: Candidates, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Candidate | None, list[Refusal], TuningEntry | None]:
        """The best candidate, None for the reference; the refusals; and what was measured, if that made the choice."""
        refusals = list(found.refusals)
        accepted: Iterable[Candidate] = found.accepted
        entry = None
        if found.tuned is not None:
            entry = found.tuned.entries.get(call_key(self.size_key, args, kwargs))
        if entry is not None:
            if entry.kernel == REFERENCE and found.explicit is None:
                return None, refusals, entry
            accepted = sorted(accepted, key=lambda candidate: candidate.kernel.target != entry.kernel)
        for candidate in accepted:
            reason = candidate.refusal(args, kwargs)
            if reason is None:
                measured = entry is not None and candidate.kernel.target == entry.kernel
                return candidate, refusals, entry if measured else None
            refusals.append(Refusal(candidate.backend, candidate.kernel.target, reason, of_call=True))
        return None, refusals, None

    def _run(
        self,
        found: Candidates,
        scope: Scope,
        first: torch.Tensor,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        failed: list[tuple[Candidate, Exception]] | None = None,
    ) -> R:
        """Run the best candidate; one that raises is quarantined and the next one runs."""
        failed = failed if failed is not None else []
        while True:
            candidate, refusals, tuned = self._choose(found, args, kwargs)
            if candidate is None and tuned is None:
                self._require_reference(found, refusals, first)
                if not scope.dry:
                    warn_of_fallback(self, found, refusals, first.device, first.dtype)
            try:
                result = self._call(candidate, refusals, tuned, scope, args, kwargs)
            except Exception as error:
                if candidate is None or scope.dry:
                    # The reference fails too: the call is wrong, not the kernels.
                    for other, _ in failed:
                        other.quarantined.pop(call_signature(args, kwargs), None)
                    raise
                if scope.strict or found.explicit or not is_contained(error):
                    error.add_note(f"raised by kernel {candidate.kernel.target} of op {self.name}")
                    raise
                self._quarantine(candidate, error, args, kwargs)
                failed.append((candidate, error))
                continue
            for other, failure in failed:
                warn_of_failure(self.name, other, failure, candidate)
            return result

    def _call(
        self,
        candidate: Candidate | None,
        refusals: list[Refusal],
        tuned: TuningEntry | None,
        scope: Scope,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> R:
        call = self.reference if candidate is None or scope.dry else candidate.call
        # Said here: inside an autograd function a kernel can't tell the calls that need a gradient from the others.
        with nullcontext() if tuned is None else configured(self.name, tuned.kernel, tuned.config):
            if scope.log is None:
                return call(*args, **kwargs)
            children: list[Selection] = []
            with scoped(replace(scope, log=children)):
                result = call(*args, **kwargs)
        if scope.dry and candidate is not None:
            children = []
        scope.log.append(self._selection(candidate, refusals, tuned, tuple(children), args, kwargs))
        return result

    def _recover(self, found: Candidates, error: Exception, args: tuple[Any, ...], kwargs: dict[str, Any]) -> R:
        """A kernel on the short path raised: contain it and run the next one.

        The candidates are those that the call began with: a backend may have been removed meanwhile.
        """
        candidate, scope = found.accepted[0], effective()
        if scope.strict or found.explicit:
            error.add_note(f"raised by kernel {candidate.kernel.target} of op {self.name}")
            raise error
        self._quarantine(candidate, error, args, kwargs)
        return self._run(found, scope, self.first_tensor(args, kwargs), args, kwargs, [(candidate, error)])

    def _selection(
        self,
        candidate: Candidate | None,
        refusals: list[Refusal],
        tuned: TuningEntry | None,
        children: tuple[Selection, ...],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Selection:
        first = self.first_tensor(args, kwargs)
        return Selection(
            op=self.name,
            device=str(first.device),
            backend=REFERENCE if candidate is None else candidate.backend,
            kernel=REFERENCE if candidate is None else candidate.kernel.target,
            refusals=tuple(refusals),
            children=children,
            tuned=tuned is not None,
            config=None if tuned is None else tuned.config,
            modelled=tuned is not None and tuned.method == MODELLED,
            dtype=str(first.dtype).removeprefix("torch."),
            key=call_key(self.size_key, args, kwargs),
        )

    def _require_reference(self, found: Candidates, refusals: list[Refusal], first: torch.Tensor) -> None:
        """Raise if the reference may not serve the call."""
        refusal = refusal_of_reference(self, found, refusals, first.device, first.dtype)
        if refusal is not None:
            raise NoKernelError(refusal)

    def _quarantine(
        self, candidate: Candidate, error: Exception, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        candidate.quarantined[call_signature(args, kwargs)] = f"{type(error).__name__}: {error}"
        self._direct.clear()  # the short path asks for no quarantine


def op(
    name: str,
    *,
    check: Callable[..., None] | None = None,
    composed_of: Iterable[str] = (),
    autocast: Iterable[str] = (),
    size_key: Callable[..., Key] | None = None,
) -> Callable[[Callable[P, R]], Op[P, R]]:
    """Make an op of its reference.

    Args:
        name: `family.operation`.
        check: a function with the op's parameters that raises `InputError`; it runs before dispatch.
        composed_of: names of the ops that the reference calls, if any: a backend may serve those instead.
        autocast: names of the tensor parameters that `torch.autocast` converts to its dtype.
        size_key: a function with the op's parameters that gives a tuple of ints and strings: the sizes that decide
            which kernel is fastest. `kpt tune` keeps one result for each, so dimensions that vary from call to call
            are rounded (`kpt_core.next_power_of_two`). Without it, one result serves all calls of a device and dtype.

    Raises:
        RegistrationError: the name is malformed or taken.
    """

    def decorate(reference: Callable[P, R]) -> Op[P, R]:
        made = Op(name, reference, check, composed_of, autocast, size_key)
        _registry.define(made)
        return made

    return decorate
