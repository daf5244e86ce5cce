"""`explain`: what a call would run, told without running it."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from .contract import TORCH, Call
from .dispatch.autograd import wanted
from .dispatch.call import dispatch, inspect_tensors
from .dispatch.choice import choose, first_of, selection_of
from .dispatch.fallback import fall_back
from .dispatch.settings import Scope, effective, scoped
from .dispatch.transforms import transformed, under_transform
from .errors import KptError
from .selection import Selection

if TYPE_CHECKING:
    from .operation import Op


def describe(op: "Op[..., Any]", call: Call) -> Selection:
    """What a call would run; it runs on fake tensors, and so does what it calls in turn."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    inspect_tensors(op, call)
    log: list[Selection] = []
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes = op.Call(*tree_map_only(Tensor, mode.from_tensor, tuple(call[:-2])), (), None)
    with scoped(replace(effective(), log=log, dry=True)), mode:
        dispatch(op, fakes)
    return log[-1]


def choose_only(op: "Op[..., Any]", call: Call, scope: Scope) -> Any:
    """Choose, look into what the choice calls in turn, and give the results' fakes."""
    call = call._replace(needs=wanted(op, call) if torch.is_grad_enabled() else ())
    first = first_of(op, call)
    found = op.candidates(first.device, first.dtype)
    if under_transform():
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
