"""The torch op that stands for an op of ours where others look on: compilers, tracers and modes.

It is opaque to them, so that the kernel is chosen inside, when it runs, by real sizes.
"""

import math
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import Library, register_autograd, register_fake

from kpt_core.contract import Call, Op
from kpt_core.errors import RegistrationError
from kpt_core.registry import get_op

from .autograd import Kept, copied, flat, gradients, mapped, plain_gradients, wanted
from .candidates import Candidate, candidates_of, first_of
from .containment import agrees, as_tuple, checked
from .run import bump, choose_and_run
from .settings import effective

_library = Library("kpt", "FRAGMENT")
#: Name of a torch op to that of the op that it stands for: it finds the one that was defined last.
_defined: dict[str, str] = {}
_arguments: dict[str, str] = {}
#: Elements of memory behind the last one of a tensor that stands for a saved one, which no compiler looks at.
_VOID = 64
_TYPES = {Tensor: "Tensor", int: "SymInt", float: "float", bool: "bool", str: "str", torch.dtype: "ScalarType"}


def define_opaque(op: Op[..., Any]) -> None:
    """Make the torch ops `kpt::family_operation` and `_backward` and, of an op that changes arguments, `_functional`.

    The last one gives what it changed beside the results: torch differentiates no op that changes its arguments.
    """
    name = op.name.replace(".", "_")
    for each in (name, f"{name}_backward", f"{name}_functional"):
        if _defined.setdefault(each, op.name) != op.name:
            raise RegistrationError(f"op {op.name!r} needs the name kpt::{each}, which {_defined[each]!r} has")
    arguments = ", ".join(f"{_type_of(op, each, kind)} {each}" for each, kind in op.annotations.items())
    if hasattr(torch.ops.kpt, name):  # its module is imported again
        if _arguments[name] != arguments:
            raise RegistrationError(f"op {op.name!r} was defined with other parameters before: restart the process")
        return
    _arguments[name] = arguments
    count = op.result_count + op.saved_count
    results = "Tensor" if count == 1 else f"({', '.join(['Tensor'] * count)})"
    _define(op, name, f"{arguments}, str needs", results, lambda op, values: op.of_graph(*values), _fake)
    differentiable = name
    if op.mutates:
        differentiable = f"{name}_functional"
        arguments = re.sub(r"\(\w!\)", "", arguments)
        every = f"({', '.join(['Tensor'] * (count + len(op.written)))})" if count + len(op.written) > 1 else "Tensor"
        _define(op, differentiable, f"{arguments}, str needs", every, _forward_functional, _fake_functional)
    grads = "".join(f"Tensor? grad_{place}, " for place in range(op.result_count))
    more = f"{arguments}, Tensor[] saved, str needs"
    _define(op, f"{name}_backward", f"{grads}{more}", "Tensor[]", _backward, _backward_fake)
    register_autograd(
        f"kpt::{differentiable}",
        lambda ctx, *grads: _backward_of_graph(get_op(op.name), ctx, grads),
        setup_context=lambda ctx, inputs, output: _setup_context(get_op(op.name), ctx, inputs, output),
        lib=_library,
    )
    count_flops(op)


def _define(op: Op[..., Any], name: str, arguments: str, results: str, implementation: Any, fake: Any) -> None:
    _library.define(f"{name}({arguments}) -> {results}", tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, lambda *values: implementation(get_op(op.name), values), "CompositeExplicitAutograd")
    register_fake(f"kpt::{name}", lambda *values: fake(get_op(op.name), values), lib=_library)


def _type_of(op: Op[..., Any], name: str, kind: Any) -> str:
    plain = next(each for each in _TYPES if each is kind or each in getattr(kind, "__args__", ()))
    # Each may alias itself alone.
    written = f"Tensor({chr(97 + op.parameters.index(name))}!)" if name in op.mutates else _TYPES[plain]
    return written if plain is kind else f"{written}?"


def call_opaque(op: Op[..., Any], call: Call) -> Any:
    """Call the torch op."""
    # What is exported or traced runs elsewhere, mostly for inference: its backward runs the forward again.
    elsewhere = torch.compiler.is_exporting() or torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
    training = torch.is_grad_enabled() and not elsewhere
    needs = wanted(op, call) if training else ()
    if not torch.compiler.is_compiling():
        count_flops(op)
    name = op.name.replace(".", "_")
    if needs and op.mutates:
        # Autograd keeps copies: the caller's tensors go on changing.
        functional = getattr(torch.ops.kpt, f"{name}_functional").default
        results = as_tuple(functional(*copied(op, call)[:-2], ",".join(needs)))
        with torch.no_grad():
            for changed, new in zip(op.written, results[-len(op.written) :], strict=True):
                if (value := getattr(call, changed)) is not None:
                    value.copy_(new)
    else:
        given = [getattr(call, parameter) for parameter in op.parameters]  # by name: see `check_experts` of kpt-moe
        results = as_tuple(getattr(torch.ops.kpt, name).default(*given, ",".join(needs)))
    own = tuple(results[: len(op.result_names)])
    for place, asked_by in op.optional_results.items():
        if not getattr(call, asked_by):
            own = (*own[:place], None, *own[place + 1 :])
    return own if len(own) > 1 else own[0] if own else None


def _call(op: Op[..., Any], values: tuple[Any, ...]) -> Call:
    """The call of a torch op's arguments, the last of which names what needs a gradient (tracers take no lists)."""
    *arguments, needs = values
    return op.Call(*arguments, tuple(needs.split(",")) if needs else (), None)


def _whole(op: Op[..., Any], call: Call, results: Any, saved: tuple[Tensor, ...]) -> Any:
    """Return what the torch op gives: results and saved tensors, laid out as the contract says."""
    absent = first_of(op, call)
    unsaved = op.saved_count if not call.needs else 0
    if op.saved_count and not unsaved and not saved:
        assert callable(op.saves)
        saved = op.saves(call._replace(needs=())) if op.fake_saves is None else _void(op.fake_saves(call))
    every = (*as_tuple(results), *(() if unsaved else saved))
    own = iter(_own((each.contiguous() for each in every if each is not None), flat(op, call)))
    given = [absent.new_empty(0) if each is None else next(own) for each in every]
    given += [absent.new_empty(0) for _ in range(unsaved)]
    return tuple(given) if len(given) > 1 else given[0] if given else None


def _void(saved: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """Return tensors in the place of what is saved, where nothing saves it: to compute it may cost more than the call.

    What autograd differentiates asks for none of it. A kernel that is chosen for the backward alone runs its forward
    again: it knows them by the memory behind them.
    """
    made = []
    for like in saved:
        whole = like.new_full((like.numel() + _VOID,), math.nan if like.is_floating_point() else 0)
        made.append(whole[: like.numel()].view(like.shape))
    return tuple(made)


def _is_void(saved: Sequence[Tensor]) -> bool:
    """Return whether the forward saved nothing."""
    return all(each.untyped_storage().nbytes() == (each.numel() + _VOID) * each.itemsize for each in saved)


def _own(tensors: Iterable[Tensor], others: Iterable[Tensor | None]) -> list[Tensor]:
    """Tensors that share no memory with one another, nor with others: a compiler takes them for that."""
    known, given = {each.untyped_storage()._cdata for each in others if each is not None}, []
    for each in tensors:
        own = each.clone() if each.untyped_storage()._cdata in known else each
        known.add(own.untyped_storage()._cdata)
        given.append(own)
    return given


def agrees_with_graph(op: Op[..., Any], function: Callable[..., Any], call: Call, results: Any) -> bool:
    """Return whether what a prepared function gives is what the torch op gives, and remember that of the function."""
    given = as_tuple(results)
    laid_out = as_tuple(_whole(op, call, results, ()))
    if not agrees(op, call, given) or any(
        one is not other for one, other in zip(given, laid_out, strict=False) if one is not None
    ):
        return False
    op.agreed.add(function)
    return True


def run_of_graph(op: Op[..., Any], values: tuple[Any, ...]) -> Any:
    """Run a call of the torch op, for which nothing is prepared."""
    call = _call(op, values)
    if op.mutates:
        bump(op, call)
    return _run(op, call)


def _run_eagerly(op: Op[..., Any], call: Call) -> Any:
    """Run a call that wants no gradient the short way, as where nobody looks on."""
    given = dict(zip(op.parameters, call, strict=False))
    if torch._C._is_any_autocast_enabled():
        with torch.no_grad(), torch._C._DisableAutocast():
            return op(**given)
    if torch.is_grad_enabled():
        with torch.no_grad():
            return op(**given)
    return op(**given)


def _is_watched() -> bool:
    """Return whether someone looks on beside the graph: an eager call would be shown to them again."""
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or torch._C._is_tracing()
        or torch._C._autograd._profiler_enabled()
        or torch._C._are_functorch_transforms_active()
    )


def _run(op: Op[..., Any], call: Call) -> Any:
    first = first_of(op, call)
    quick = op.quick.get(first.dtype)
    # Where nothing is prepared, an eager call is no shorter: it is checked anew.
    may_be_prepared = quick is None or quick[3] is not None
    if may_be_prepared and not (call.needs or op.mutates or first.is_meta or _is_watched()):
        results = _run_eagerly(op, call)
        if agrees(op, call, as_tuple(results)):  # a graph reads what the contract says
            return _whole(op, call, results, ())

    def run(op: Op[..., Any], candidate: Candidate | None, call: Call) -> Any:
        if candidate is None:
            return _whole(op, call, op.run_reference(call), ())
        return _whole(op, call, *checked(op, candidate, call, candidate.forward(call)))

    with torch.no_grad(), torch._C._DisableAutocast():
        return choose_and_run(op, call, candidates_of(op, first.device, first.dtype), effective(), run)


def _forward_functional(op: Op[..., Any], values: tuple[Any, ...]) -> Any:
    call = copied(op, _call(op, values))
    return _with_changed(op, call, _run(op, call))


def _fake(op: Op[..., Any], values: tuple[Any, ...]) -> Any:
    call = _call(op, values)
    with torch.no_grad():
        saved = op.fake_saves(call) if op.fake_saves is not None and call.needs else ()
        return _whole(op, call, op.faked(call), saved)


def _fake_functional(op: Op[..., Any], values: tuple[Any, ...]) -> Any:
    call = copied(op, _call(op, values))
    return _with_changed(op, call, _fake(op, (*call[:-2], ",".join(call.needs))))


def _with_changed(op: Op[..., Any], call: Call, given: Any) -> Any:
    """Return results with what the op changed behind them."""
    values = [getattr(call, name) for name in op.written]
    changed = [first_of(op, call).new_empty(0) if value is None else value for value in values]
    every = (*as_tuple(given), *changed)
    return every if len(every) > 1 else every[0]


def _setup_context(op: Op[..., Any], ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    call, outputs = _call(op, inputs), as_tuple(output)
    ctx.kept, tensors = Kept.of(op, call)
    ctx.count = len(tensors)
    end = op.result_count + op.saved_count
    first = 0 if op.saves == "results" else op.result_count
    saved = outputs[first:end] if call.needs or op.saves == "results" else ()
    ctx.save_for_backward(*tensors, *saved)
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*outputs[op.result_count :])


def _backward_of_graph(op: Op[..., Any], ctx: Any, grads: tuple[Tensor | None, ...]) -> tuple[Any, ...]:
    """Compute the gradients behind the torch op, by the backward's own torch op."""
    tensors, grads = list(ctx.saved_tensors), grads[: op.result_count]
    call, saved = ctx.kept.whole(tensors[: ctx.count]), tensors[ctx.count :]
    wanting = zip(op.parameters, ctx.needs_input_grad, strict=False)
    needs = tuple(name for name, need in wanting if need)
    call = call._replace(needs=needs)
    found: dict[str, Any] = {}
    if call.needs and any(grad is not None for grad in grads):
        if mapped(grads) or (torch.is_grad_enabled() and not torch.compiler.is_compiling()):
            found = plain_gradients(op, call, grads)
        else:
            operator = getattr(torch.ops.kpt, f"{op.name.replace('.', '_')}_backward").default
            given = iter(operator(*grads, *call[:-2], saved, ",".join(call.needs)))
            found = {name: next(given) for name in call.needs}
    return (*(found.get(name) for name in op.parameters), None)


def _taken_apart(op: Op[..., Any], values: tuple[Any, ...]) -> tuple[tuple[Any, ...], Call, list[Tensor]]:
    """Gradients of the results, the call, and what was saved, of the backward's arguments."""
    *arguments, saved, needs = values[op.result_count :]
    return values[: op.result_count], _call(op, (*arguments, needs)), saved


def _backward(op: Op[..., Any], values: tuple[Any, ...]) -> list[Tensor]:
    grads, call, saved = _taken_apart(op, values)
    absent = op.saves is not None and _is_void(saved)
    with torch.no_grad(), torch._C._DisableAutocast():
        found = gradients(op, None, call, None if absent else tuple(saved), grads)
        laid_out = (_laid_out(getattr(call, name), found[name]) for name in call.needs)
        return _own(laid_out, (*grads, *flat(op, call), *saved))


def _laid_out(like: Tensor, gradient: Tensor) -> Tensor:
    """A gradient in its argument's shape, dtype and layout, which are what the fake says."""
    laid_out, gradient = torch.empty_like(like), gradient.sum_to_size(like.shape)
    same = gradient.dtype is like.dtype and gradient.stride() == laid_out.stride()
    return gradient if same else laid_out.copy_(gradient)


def _backward_fake(op: Op[..., Any], values: tuple[Any, ...]) -> list[Tensor]:
    _, call, _ = _taken_apart(op, values)
    return [torch.empty_like(getattr(call, name)) for name in call.needs]


def count_flops(op: Op[..., Any]) -> None:
    """Tell torch's FLOP counter of an op, if the counter is there: importing it takes longer than all of core."""
    counter = sys.modules.get("torch.utils.flop_counter")
    if op.flops is None or counter is None:
        return
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    name, flops, count = op.name.replace(".", "_"), op.flops, len(op.parameters)

    def of_forward(*values: Any, **kwargs: Any) -> int:
        return flops(op.Call(*values[:count], (), None))

    def of_backward(*values: Any, **kwargs: Any) -> int:
        # Products are linear in both factors: as much again for the gradient of each.
        return 2 * flops(op.Call(*values[op.result_count :][:count], (), None))

    # A counter that runs took its copy of the table when it was made.
    running = [getattr(mode, "counter", None) for mode in _get_current_dispatch_mode_stack()]
    for table in (counter.flop_registry, *(each.flop_registry for each in running if each is not None)):
        for each in (name, *([f"{name}_functional"] if op.mutates else [])):
            table.setdefault(getattr(torch.ops.kpt, each), of_forward)
        table.setdefault(getattr(torch.ops.kpt, f"{name}_backward"), of_backward)
