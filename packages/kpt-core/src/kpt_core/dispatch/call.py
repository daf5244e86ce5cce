"""Route a call of an op: eager, traced, transformed or told without running it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from kpt_core import registry
from kpt_core.autocast import converted, without_autocast
from kpt_core.contract import GPU, TORCH, Call, Op
from kpt_core.errors import InputError, KptError, NoKernelError
from kpt_core.selection import Selection

from .autograd import named, wanted
from .candidates import Candidate, candidates_of, choose, first_of, selection_of
from .containment import fall_back
from .functional import run_tracked, unwrapped
from .opaque import call_opaque
from .run import after_failure, choose_and_run, run
from .settings import OBSERVERS, SCOPE, Scope, effective, scoped
from .transforms import is_lone_gradient, transformed, under_transform, warn_of_memory

#: Whose tensors stand for others and see every torch op: the opaque op is what they are shown.
_TORCH_OWN = ("torch._subclasses.", "torch.distributed._functional_collectives")


def dispatch(op: Op[..., Any], call: Call) -> Any:
    """Serve an eager call, whoever looks on; the short way for all others is in `kpt_core.entry`."""
    if torch._C._is_any_autocast_enabled():
        call = converted(op, call)
        with torch._C._DisableAutocast():  # for every type of device, so that this is asked once
            return dispatch(op, call)
    seen = inspect_tensors(op, call)
    if op.check is not None:
        op.check(call)
    scope = SCOPE.get()
    if scope is not None and scope.dry:
        return _choose_only(op, call, scope)
    if under_transform():
        return _serve_under_transform(op, call)
    if seen or torch._C._len_torch_dispatch_stack() or torch._C._is_tracing():
        return call_opaque(op, call)
    call = with_needs(op, call) if torch.is_grad_enabled() else call
    if torch._C._autograd._profiler_enabled():
        with named(op):
            return serve(op, call)
    return serve(op, call)


def _choose_only(op: Op[..., Any], call: Call, scope: Scope) -> Any:
    """Choose, look into what the choice calls in turn, and give the results' fakes."""
    call = call._replace(needs=wanted(op, call) if torch.is_grad_enabled() else ())
    first = first_of(op, call)
    found = candidates_of(op, first.device, first.dtype)
    if under_transform() and not (is_lone_gradient() and not op.mutates):
        found = transformed(found)
    candidate, tuned, refusals = choose(op, call, found)
    if tuned is None and (candidate is None or candidate.backend == TORCH):
        fall_back(op, found, candidate, refusals, tell=False)
    children: list[Selection] = []
    if candidate is not None and candidate.backend == TORCH and candidate.kernel.composed_of:  # others are no PyTorch
        gradients = torch.is_grad_enabled() and candidate.kernel.differentiable
        with scoped(replace(scope, log=children)), torch.set_grad_enabled(gradients):
            try:
                candidate.forward(call)
            except KptError:
                raise
            except Exception:
                pass  # it reads values, which fakes lack: what it called before is known
    if scope.log is not None:
        scope.log.append(selection_of(op, call, candidate, tuned, refusals, children))
    return op.faked(call)


def with_needs(op: Op[..., Any], call: Call) -> Call:
    """Return the call, with the names of the arguments that want a gradient."""
    return op.Call(*call[:-2], wanted(op, call), None)


def serve(op: Op[..., Any], call: Call) -> Any:
    """Choose a kernel for a call that nobody looks on, run it, and remember what the next call need not ask."""
    first, quick = first_of(op, call), op.quick
    if first.is_meta:
        return call_opaque(op, call)
    found = candidates_of(op, first.device, first.dtype)
    result = choose_and_run(op, call, found, effective())
    if SCOPE.get() is None and not OBSERVERS and found.tuned is None and not found.explicit:
        # The next call needs no more than to ask these, in their order, as long as nothing has to be said.
        silent = not registry.reference_is_slow(first.device)
        asked = tuple(each for each in found.accepted if silent or each.backend != TORCH or GPU in each.kernel.requires)
        prepares = bool(asked) and asked[0].prepare is not None and not op.mutates
        where = None if first.is_cpu else first.device
        quick[first.dtype] = where, asked, silent and found.reference, {} if prepares else None
    return result


def _serve_under_transform(op: Op[..., Any], call: Call) -> Any:
    first = first_of(op, call)
    if is_lone_gradient() and not (op.mutates or torch._C._len_torch_dispatch_stack() or torch._C._is_tracing()):
        inner = unwrapped(op, call)
        if not first.is_meta and not inspect_tensors(op, inner):
            return run_tracked(op, call, inner)
    found = transformed(candidates_of(op, first.device, first.dtype))

    def plainly(op: Op[..., Any], candidate: Candidate | None, call: Call) -> Any:
        if candidate is None:
            warn_of_memory(op, call)
        return op.run_reference(call) if candidate is None else candidate.forward(call)

    return choose_and_run(op, call, found, effective(), plainly)


def retry_without(op: Op[..., Any], call: Call, candidate: Candidate, error: Exception) -> Any:
    """Serve a call whose kernel raised on the short way."""
    first = first_of(op, call)
    found = candidates_of(op, first.device, first.dtype)
    try:
        return after_failure(op, call, found, effective(), run, ((candidate, error),))
    finally:
        del error  # see there


def inspect_tensors(op: Op[..., Any], call: Call) -> bool:
    """Return whether some tensor stands for others; raise for what is no tensor, or has rules of its own."""
    seen = False
    for name, kind in op.kinds.items():  # no numbers: Dynamo takes those of an object for dynamic ones
        value = getattr(call, name)
        if type(value) not in PLAIN and not (value is None and kind == "optional"):
            seen |= _stands_for_others(op, name, value)
    return seen


def explain_failure(op: Op[..., Any], call: Call, error: Exception) -> None:
    """Raise `InputError` in the place of what torch raised for tensors that are not strided.

    Asked after a failure alone: a layout costs as much to read as all else that a plain call asks of a tensor.
    """
    for name in op.kinds if not isinstance(error, KptError) else ():
        value = getattr(call, name)
        if isinstance(value, Tensor) and (value.layout is not torch.strided or value.is_nested):
            what, instead = f"of layout {value.layout}", f"{name}.to_dense()"
            if value.is_nested:
                what, instead = "a nested tensor", "its values() and offsets(), or the tensors of unbind()"
            raise InputError(f"{op.name}: {name} is {what}; kernels take strided tensors: pass {instead}") from error


#: What tensors mostly are. Dynamo of torch 2.8 can't look into a frozenset; that of 2.13 loses guards by a tuple.
PLAIN = (Tensor, Parameter) if torch.__version__ < "2.9" else frozenset({Tensor, Parameter})


def dispatch_traced(op: Op[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Serve a call while Dynamo traces it."""
    call = op.Call(*arguments, (), None)
    inspect_tensors(op, call)
    if torch._C._is_any_autocast_enabled():
        call = converted(op, call)
        with without_autocast(first_of(op, call).device.type):
            return _trace(op, call)
    return _trace(op, call)


def _trace(op: Op[..., Any], call: Call) -> Any:
    if op.check is not None:
        op.check(call)
    if under_transform():
        return op.run_reference(call)
    if not torch.compiler.is_exporting():
        first = first_of(op, call)
        training = torch.is_grad_enabled() and len(wanted(op, call)) > 0
        if _may_look_into(op.name, str(first.device), first.dtype, training):
            return op.plain[str(first.device), first.dtype, training](call)
    return call_opaque(op, call)


def _constant(function: Callable[..., bool]) -> Callable[..., bool]:
    """Let Dynamo call a function instead of tracing it, as `torch.compiler.assume_constant_result` does.

    That one imports Dynamo, which takes longer than everything else here.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@_constant
def _may_look_into(name: str, device: str, dtype: torch.dtype, training: bool) -> bool:
    """Return whether plain PyTorch alone can serve such calls, which `op.plain` then has: a compiler may fuse it."""
    op = registry.get_op(name)
    if op.mutates or SCOPE.get() is not None:
        return False  # what a block asks for must not stay in the graph
    where = torch.device(device)
    found = candidates_of(op, where, dtype)
    best = found.accepted[0] if found.accepted else None
    if not found.reference or any(each.backend != TORCH for each in found.accepted):
        return False
    if best is not None and not (best.traceable and (best.kernel.differentiable or not training)):
        return False
    try:
        fall_back(op, found, best, found.refusals)
    except NoKernelError:
        return False  # raised when it runs
    op.plain[device, dtype, training] = op.run_reference if best is None else _without_saving(op, best)
    return True


def _without_saving(op: Op[..., Any], candidate: Candidate) -> Callable[[Call], Any]:
    """Return what a compiler looks into: the kernel's forward, and for calls that it refuses the opaque op."""
    forward, unsupported = candidate.forward, candidate.unsupported
    if candidate.saves:
        whole = forward
        forward = lambda call: whole(call)[0]  # noqa: E731
    if unsupported is None:
        return forward
    return lambda call: forward(call) if unsupported(call) is None else call_opaque(op, call)


@_constant
def _has_rules(kind: Any) -> bool:
    """Return whether a class of tensors sees the functions that its tensors are passed to."""
    rules = getattr(kind.__torch_function__, "__func__", kind.__torch_function__)
    return kind.__torch_dispatch__ is not Tensor.__torch_dispatch__ or rules not in _PLAIN_RULES


def _stands_for_others(op: Op[..., Any], name: str, value: Any) -> bool:
    """Return whether a tensor is one of torch's own that stand for others; raise for what it can't be."""
    kind: Any = type(value)
    if not isinstance(value, Tensor):
        if kind.__module__.startswith("torch.fx."):
            raise InputError(
                f"{op.name}: torch.fx.symbolic_trace can't record an op of KPT ({name} is a {kind.__name__}): use "
                "torch.export.export or make_fx, or name the function that calls it in torch.fx.wrap"
            )
        raise InputError(f"{op.name}: {name} must be a tensor; got {kind.__name__}")
    if kind.__module__.startswith(_TORCH_OWN):
        return True
    if not _has_rules(kind):
        return False  # a plain tensor by another name
    raise InputError(
        f"{op.name}: {name} is a {kind.__module__}.{kind.__name__}, a tensor with rules of its own "
        "that no kernel knows: pass the plain tensors that it is made of (a DTensor's local part by to_local(), a "
        "quantised tensor's numbers and scales, a nested tensor's values() and offsets())"
    )


_PLAIN_RULES = (Tensor.__torch_function__.__func__, torch._C._disabled_torch_function_impl)  # type: ignore[attr-defined]
