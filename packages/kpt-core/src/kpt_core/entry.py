"""Make what a call of an op enters from its signature, so that binding is as quick as Python's own."""

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

from .contract import Call, Op
from .dispatch.call import PLAIN, dispatch, dispatch_traced, explain_failure, retry_without, serve, with_needs
from .dispatch.opaque import agrees_with_graph, run_of_graph
from .dispatch.run import prepare, run
from .dispatch.settings import SCOPE
from .selection import REFERENCE

#: The short way: plain tensors, nobody looks on, no block has settings. All else is for `dispatch` and `serve`.
_ENTRY = """\
def entry({declared}):
    if _compiling():
        return _traced(_op, ({values},))
    try:
        if not ({plain}) or _autocast() or _modes() or _traced_by_jit() or _profiled():
            return _dispatch(_op, _new(_Call, ({values}, (), None)))
        scope, graded = _scope(), _grad_enabled()
        if _transforms() or _forward_ad._current_level >= 0 or (scope is not None and scope.dry):
            return _dispatch(_op, _new(_Call, ({values}, (), None)))
        candidates, reference, known = (), False, None
        if scope is None:
            device, candidates, reference, known = _op.quick.get({first}.dtype, _NOWHERE)
            if not ({first}.is_cpu if device is None else {first}.device == device):
                candidates, reference, known = (), False, None
            elif known is not None:
                candidate = candidates[0]
                if graded or candidate.failures:
                    known = None
                else:
                    key = ({looks},)
                    function = known.get(key)
                    if function:
                        try:
                            result = function({values})
                            candidate.count.calls += 1
                            return result
                        except Exception as error:
                            return _retry_without(_op, _new(_Call, ({values}, (), None)), candidate, error)
                    if function is False:
                        known = None
        call = _new(_Call, ({values}, (), None))
        if graded and ({needs}):
            call = _with_needs(_op, call)
        {check}
        for candidate in candidates:
            if candidate.free or candidate.refusal(call) is None:
                try:
                    if call.needs:
                        result = _run(_op, candidate, call)
                    elif known is not None:
                        result = _prepare(_op, candidate, known, key, call)
                    else:
                        {bump}
                        result = candidate.forward(call)
                        if candidate.saves:
                            result = result[0]
                    candidate.count.calls += 1
                    return result
                except Exception as error:
                    return _retry_without(_op, call, candidate, error)
            known = None
        if reference:
            result = {reference}
            _count.calls += 1
            return result
        return _serve(_op, call)
    except Exception as error:
        _explain_failure(_op, _new(_Call, ({values}, (), None)), error)
        raise
"""
#: The torch op's: a call that looks like one before goes to what was prepared for it, once its results agreed.
_GRAPH = """\
def of_graph({values}, needs):
    watched = _modes() or _traced_by_jit() or _profiled() or _transforms() or _grad_enabled()
    if not (needs or watched) and _scope() is None and {plain}:
        device, candidates, reference, known = _op.quick.get({first}.dtype, _NOWHERE)
        if known and not candidates[0].failures and ({first}.is_cpu if device is None else {first}.device == device):
            function = known.get(({looks},))
            if function:
                try:
                    result = function({values})
                except Exception:
                    return _slowly(_op, ({values}, needs))
                if function in _op.agreed or _agrees(_op, function, _new(_Call, ({values}, (), None)), result):
                    candidates[0].count.calls += 1
                    return {laid_out}
    return _slowly(_op, ({values}, needs))
"""
_REFERENCE = """\
def reference_of(call):
    return _reference({handed})
"""

_SHARED: dict[str, Any] = {
    "_compiling": is_dynamo_compiling,
    "_traced": dispatch_traced,
    "_dispatch": dispatch,
    "_serve": serve,
    "_retry_without": retry_without,
    "_with_needs": with_needs,
    "_run": run,
    "_prepare": prepare,
    "_increment": torch._C._increment_version,
    "_explain_failure": explain_failure,
    "_scope": SCOPE.get,
    "_new": tuple.__new__,
    "_plain": PLAIN,
    "_grad_enabled": torch.is_grad_enabled,
    "_autocast": torch._C._is_any_autocast_enabled,
    "_modes": torch._C._len_torch_dispatch_stack,
    "_traced_by_jit": torch._C._is_tracing,
    "_profiled": torch._C._autograd._profiler_enabled,
    "_transforms": torch._C._are_functorch_transforms_active,
    "_forward_ad": forward_ad,
    "_slowly": run_of_graph,
    "_agrees": agrees_with_graph,
    "_NOWHERE": (torch.device("meta"), (), False, None),
}


#: Of which nothing else is equal to a value.
_EXACT = (str, torch.dtype)


def _bump(name: str, optional: bool) -> str:
    """Return the expression that tells autograd of a change of an argument, as `run` does."""
    return f"{name} is None or _increment(({name},))" if optional else f"_increment(({name},))"


def _laid_out(op: Op[..., Any], first: str) -> str:
    """Return the expression of what the torch op gives, of `result`: tensors alone, and those that are saved."""
    if op.result_count == 1:
        every = ["result"]
    else:
        every = [f"result[{place}]" for place in range(op.result_count)]
        for place in op.optional_results:
            every[place] = f"{first}.new_empty(0) if result[{place}] is None else result[{place}]"
    every += [f"{first}.new_empty(0)"] * op.saved_count
    return every[0] if len(every) == 1 else f"({', '.join(every)})"


def entries(op: Op[..., Any]) -> tuple[Callable[..., Any], Callable[..., Any], Callable[[Call], Any]]:
    """Make what binds a call's arguments and serves it, the same for a graph's calls, and what calls the reference."""
    parameters = op.signature.parameters
    names, declared, star = list(parameters), ["_op"], False
    for name, parameter in parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY and not star:
            declared.append("*")
            star = True
        declared.append(name if parameter.default is parameter.empty else f"{name}=_defaults[{name!r}]")
    required, optional = ([names[place] for place in places] for places in (op.required, op.optional))
    plain = [f"type({name}) in _plain" for name in required]
    plain += [f"({name} is None or type({name}) in _plain)" for name in optional]
    needs = [f"{name}.requires_grad" for name in required]
    needs += [f"{name} is not None and {name}.requires_grad" for name in optional]
    handed = [
        f"{name}=call[{place}]" if parameter.kind is parameter.KEYWORD_ONLY else f"call[{place}]"
        for place, (name, parameter) in enumerate(parameters.items())
    ]
    looks = []
    for name in names:  # 1, 1.0 and True are equal, and not alike
        kind = op.annotations[name]
        if name in op.kinds:
            seen = f"{name}.shape, {name}.stride(), {name}.dtype, {name}.device"
            looks.append(f"({seen}) if {name} is not None else None" if name in optional else seen)
        else:
            looks.append(name if kind in _EXACT else f"{name}, type({name})")
    source = _ENTRY.format(
        looks=", ".join(looks),
        declared=", ".join(declared),
        values=", ".join(names),
        plain=" and ".join(plain),
        needs=" or ".join(needs),
        check="pass" if op.check is None else "_op.check(call)",
        first=names[op.first],
        bump="; ".join(_bump(name, name in optional) for name in op.written) or "pass",
        reference="_run(_op, None, call)" if op.mutates else "reference_of(call)",
    )
    source += _GRAPH.format(
        looks=", ".join(looks),
        values=", ".join(names),
        plain=" and ".join(plain),
        first=names[op.first],
        laid_out=_laid_out(op, names[op.first]),
    )
    source += _REFERENCE.format(handed=", ".join(handed))
    own = {"_op": op, "_Call": op.Call, "_reference": op.reference, "_defaults": op.defaults}
    known = _SHARED | own | {"_count": op.counts[REFERENCE]}
    exec(compile(source, f"<op {op.name}>", "exec"), known)  # as dataclasses make their methods
    entry = known["entry"]
    entry.__name__ = entry.__qualname__ = op.name  # what a TypeError names
    return entry, known["of_graph"], known["reference_of"]
