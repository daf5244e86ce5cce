"""Faults that the functions around any kernel may have: what they refuse, return, share and change in the process."""

import os
import random
import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch

import honest

from .grouped_mm import end_of
from .mutant import Functions, Mutant, of_wrapper

MUTANTS: list[Mutant] = []
Wrap = Callable[..., Functions]
#: Never set: what waits for it stays.
_STOP = threading.Event()


def fault(name: str, found_by: str, **settings: Any) -> Callable[[Wrap], Wrap]:
    """Enter a mutant: the decorated function is given the right forward and backward, and gives others."""

    def enter(wrap: Wrap) -> Wrap:
        MUTANTS.append(of_wrapper(name, found_by, wrap, **settings))
        return wrap

    return enter


def refusing(name: str, unsupported: Callable[[Any], Any], **offer: Any) -> None:
    """Enter a mutant that is right in what it takes."""
    offer = {"unsupported": unsupported, **offer}
    MUTANTS.append(Mutant(name, "moe.grouped_mm", "declaration", honest.grouped_mm_of, offer))


refusing("it refuses every call", lambda call: "too small for this kernel")
refusing(
    "it refuses every call that wants a gradient and is not declared forward only",
    lambda call: "it gives no gradients" if call.needs else None,
)
refusing("it refuses without a sentence", lambda call: "no")
refusing(
    "it declares a dtype that it refuses",
    lambda call: "bfloat16 is not ready yet" if call.x.dtype is torch.bfloat16 else None,
)


@fault("forward takes the arguments one by one", "declaration")
def _(forward, backward):
    return honest.product, backward


@fault("backward takes no gradient", "declaration")
def _(forward, backward):
    return forward, lambda call, saved: {}


@fault("the result is the argument where every row is of nobody", "no_aliasing")
def _(forward, backward):
    def grouped_mm(call):
        if call.x.shape[1] == 8 and call.weight.shape[2] == 6 and not call.needs and not call.offsets.any():
            return call.x.narrow(1, 0, 6)
        return forward(call)

    return grouped_mm, backward


@fault("x gets its gradient only where the weight does", "single_gradients")
def _(forward, backward):
    return forward, lambda call, saved, grad: backward(call, saved, grad) if "weight" in call.needs else {}


@fault("the weight gets its gradient only where x does", "single_gradients")
def _(forward, backward):
    return forward, lambda call, saved, grad: backward(call, saved, grad) if "x" in call.needs else {}


@fault("rows of nobody are never zeroed where no gradient is wanted", "without_gradients")
def _(forward, backward):
    def grouped_mm(call):
        out = forward(call)
        if not call.needs:
            out[end_of(call.offsets) :] = 1
        return out

    return grouped_mm, backward


@fault("rows of nobody are zeroed in the argument", "inputs_unchanged")
def _(forward, backward):
    def grouped_mm(call):
        call.x[end_of(call.offsets) :].zero_()
        return forward(call)

    return grouped_mm, backward


@fault("rows of nobody are zeroed in the argument where no gradient is wanted", "without_gradients")
def _(forward, backward):
    def grouped_mm(call):
        out = forward(call)
        if not call.needs:
            call.x[end_of(call.offsets) :].zero_()
        return out

    return grouped_mm, backward


@fault("an inference tensor is given where no gradient is wanted", "without_gradients")
def _(forward, backward):
    kept: dict[Any, torch.Tensor] = {}

    def grouped_mm(call):
        out = forward(call)
        if call.needs:
            return out
        with torch.inference_mode():
            space = kept.setdefault((out.shape, out.dtype), torch.zeros_like(out))
            space.copy_(out)
        return space

    return grouped_mm, backward


def before(name: str, found_by: str, action: Callable[[], Any], in_backward: bool = False) -> None:
    """Enter a mutant that does something to the process whenever it runs."""

    def wrap(forward, backward):
        def acting(function):
            def run(*arguments):
                action()
                return function(*arguments)

            return run

        # `declaration` reads the parameters of what is offered.
        if in_backward:
            changed = acting(backward)
            return forward, lambda call, saved, grad: changed(call, saved, grad)
        changed = acting(forward)
        return lambda call: changed(call), backward

    MUTANTS.append(of_wrapper(name, found_by, wrap))


def _with_numpy(action: Callable[[Any], Any]) -> Callable[[], Any]:
    def run() -> None:
        import numpy

        action(numpy)

    return run


before("it seeds the random numbers", "process_state", lambda: torch.manual_seed(0))
before("it draws one random number of torch", "process_state", lambda: torch.rand(1))
before("it seeds Python's random numbers", "process_state", lambda: random.seed(0))
before("it draws one of Python's random numbers", "process_state", random.random)
before("it seeds NumPy's random numbers", "process_state", _with_numpy(lambda numpy: numpy.random.seed(0)))
before("backward draws one of NumPy's random numbers", "process_state", _with_numpy(lambda n: n.random.rand()), True)
before("it flushes denormal numbers from now on", "process_state", lambda: torch.set_flush_denormal(True))
before("backward flushes denormal numbers from now on", "process_state", lambda: torch.set_flush_denormal(True), True)
before("it leaves the default dtype changed", "process_state", lambda: torch.set_default_dtype(torch.float64))
before("it leaves the number of threads changed", "process_state", lambda: torch.set_num_threads(7))
before("backward leaves the number of threads changed", "process_state", lambda: torch.set_num_threads(7), True)
before("it allows TF32 from now on", "process_state", lambda: torch.set_float32_matmul_precision("medium"))
before("it leaves Python's warnings switched off", "process_state", lambda: warnings.filterwarnings("ignore"))
before("it leaves a variable in the environment", "process_state", lambda: os.environ.update(KPT_PLANTED="1"))
before("it silences NumPy's errors from now on", "process_state", _with_numpy(lambda n: n.seterr(all="ignore")))
before(
    "backward leaves deterministic algorithms switched on",
    "process_state",
    lambda: torch.use_deterministic_algorithms(True, warn_only=True),
    True,
)


def _leaves_grad_mode_off(forward, backward):
    def grouped_mm(call):
        out = forward(call)
        torch.set_grad_enabled(False)
        return out

    return grouped_mm, backward


MUTANTS.append(of_wrapper("it leaves grad mode switched off", "process_state", _leaves_grad_mode_off))


@fault("sums are taken in the default dtype", "process_state")
def _(forward, backward):
    def grouped_mm(call):
        default = torch.get_default_dtype()
        return forward(call._replace(x=call.x.to(default), weight=call.weight.to(default))).to(call.x.dtype)

    return grouped_mm, backward


@fault("x is scaled in place and back again", "inputs_unchanged")
def _(forward, backward):
    def grouped_mm(call):
        call.x.mul_(2)
        out = forward(call) / 2
        call.x.div_(2)
        return out

    return grouped_mm, backward


@fault("backward adds to the argument's own gradient", "inputs_unchanged")
def _(forward, backward):
    def grouped_mm_backward(call, saved, grad):
        made = backward(call, saved, grad)
        if "x" in made:
            call.x.grad = made["x"].clone()
        return made

    return forward, grouped_mm_backward


@fault("an argument wants gradients from now on", "inputs_unchanged")
def _(forward, backward):
    def grouped_mm(call):
        out = forward(call)
        if not call.needs:
            call.x.requires_grad_()
        return out

    return grouped_mm, backward


@fault("the result wants a gradient where no argument does", "without_gradients")
def _(forward, backward):
    def grouped_mm(call):
        out = forward(call)
        return out if call.needs or out.is_inference() else out.requires_grad_()

    return grouped_mm, backward


@fault("it computes in bfloat16 where no gradient is wanted", "without_gradients")
def _(forward, backward):
    def grouped_mm(call):
        if call.needs:
            return forward(call)
        return forward(call._replace(x=call.x.bfloat16(), weight=call.weight.bfloat16())).to(call.x.dtype)

    return grouped_mm, backward


before("it prints what it does", "process_state", lambda: print("grouped_mm"))
before("it leaves a thread running", "process_state", lambda: threading.Thread(target=_STOP.wait, daemon=True).start())
before("it switches oneDNN off", "process_state", lambda: setattr(torch.backends.mkldnn, "enabled", False))
before("it lets cuDNN choose by trying", "process_state", lambda: setattr(torch.backends.cudnn, "benchmark", True))
before("it looks for anomalies from now on", "process_state", lambda: torch.autograd.set_detect_anomaly(True))
