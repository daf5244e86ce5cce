"""PyTorch's transforms: custom-op rules, torch.compile, torch.export, vmap and autocast."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kpt_conformance.comparison import assert_right, outputs_of
from kpt_conformance.extent import over
from kpt_conformance.trial import Trial, tensors_of
from kpt_core import Arguments, KptError

#: Inductor would test PyTorch's code generation more than kernels, and takes seconds a case.
COMPILER = "aot_eager"


class _CustomOps(TorchDispatchMode):
    """Notes the operators that are none of PyTorch's own, with what they were called with."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: dict[Any, tuple[tuple[Any, ...], dict[str, Any]]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace not in ("aten", "prim", "prims", "profiler"):
            self.calls.setdefault(func, (args, kwargs or {}))
        return func(*args, **(kwargs or {}))


@over()
def custom_ops(trial: Trial) -> None:
    """Operators that it registered with PyTorch pass `torch.library.opcheck`."""
    arguments = trial.arguments()
    with _CustomOps() as seen:
        trial.run(arguments)
    if not seen.calls:
        pytest.skip("it calls no operator of its own")
    for operator, (args, kwargs) in seen.calls.items():
        plain = torch.utils._pytree.tree_map_only(Tensor, lambda tensor: tensor.detach(), (args, kwargs))
        # torch can't compare 8-bit numbers as test_schema does; `inputs_unchanged` and `no_aliasing` do so instead.
        narrow = any(
            t.is_floating_point() and t.dtype.itemsize == 1 for t in tree_leaves(plain) if isinstance(t, Tensor)
        )
        torch.library.opcheck(
            operator, *plain, test_utils=("test_faketensor",) if narrow else ("test_schema", "test_faketensor")
        )


def _compiled(trial: Trial, dynamic: bool) -> Any:
    """The call, compiled as a function of its tensors; everything else is a constant, as in a model."""
    torch._dynamo.reset()
    function = trial.subject.function()

    def compile_for(arguments: Arguments) -> Any:
        args, kwargs = trial.subject.split({name: name for name in arguments})
        others = {name: value for name, value in arguments.items() if not isinstance(value, Tensor)}

        @torch.compile(fullgraph=True, dynamic=dynamic, backend=COMPILER)
        def call(tensors: Arguments) -> Any:
            values = {**others, **tensors}
            return function(*[values[name] for name in args], **{name: values[name] for name in kwargs})

        return call

    compiled: list[Any] = []

    def run(arguments: Arguments) -> Any:
        if not compiled:
            compiled.append(compile_for(arguments))
        with warnings.catch_warnings():
            # torch 2.13: Dynamo makes an instance of every autograd.Function that it traces.
            warnings.filterwarnings("ignore", ".*should not be instantiated.*", DeprecationWarning)
            return compiled[0](tensors_of(arguments))

    return run


@over()
def compiled(trial: Trial) -> None:
    """torch.compile(fullgraph=True) gives what eager calls give, forward and backward."""
    arguments = trial.arguments()
    trial.assert_right(arguments, trial.run(arguments, _compiled(trial, dynamic=False)))


@over()
def compiled_dynamic(trial: Trial) -> None:
    """One compiled graph serves every number of rows: torch.compile(fullgraph=True, dynamic=True) fixes none."""
    function = _compiled(trial, dynamic=True)
    first = next(iter(trial.arguments()))
    for seed in (0, 1):
        arguments = trial.arguments(seed)

        def call(leaves: Arguments) -> Any:
            if leaves[first].shape[0] > 1:
                torch._dynamo.mark_dynamic(leaves[first], 0)  # raises if the size is fixed
            return function(leaves)

        trial.assert_right(arguments, trial.run(arguments, call))


class _Module(nn.Module):
    def __init__(self, trial: Trial, others: Arguments) -> None:
        super().__init__()
        self.trial = trial
        self.others = others

    def forward(self, **tensors: Tensor) -> Any:
        return self.trial.subject.call({**self.others, **tensors})


@over()
def exported(trial: Trial) -> None:
    """torch.export keeps it, and what was exported computes the same."""
    arguments = trial.arguments()
    tensors = tensors_of(arguments)
    others = {name: value for name, value in arguments.items() if name not in tensors}
    with torch.no_grad(), trial.subject.chosen():
        program = torch.export.export(_Module(trial, others), (), kwargs=tensors, strict=False)
        got = outputs_of(program.module()(**tensors))
        want = outputs_of(trial.subject.call(arguments))
    for name, out in want.items():
        torch.testing.assert_close(got[name], out, equal_nan=True)


@over()
def vmapped(trial: Trial) -> None:
    """Under torch.func.vmap it gives each sample's result, or raises: never something else."""
    first, second = trial.arguments(), trial.arguments(seed=1)
    mapped = [n for n, v in first.items() if trial.wants_gradient(n, v)]
    name = mapped[0] if mapped else next(iter(tensors_of(first)))
    pair = torch.stack((first[name], second[name]))
    with torch.no_grad(), trial.subject.chosen():
        try:
            got = torch.func.vmap(lambda value: trial.subject.call({**first, name: value}))(pair)
        except (RuntimeError, NotImplementedError, KptError) as error:
            text = str(error)
            known = ("vmap", "functorch", "torch.func", "batch", "transform")
            assert any(word in text for word in known), f"vmap ends in an error that does not name it: {text}"
            return
        for index, sample in enumerate((first, second)):
            arguments = {**first, name: sample[name]}
            outputs = {key: out[index] for key, out in outputs_of(got).items()}
            baseline, oracle = trial.forward_truth(arguments)
            assert_right(trial.outcome(outputs, {}), baseline, oracle)


@over()
def autocast(trial: Trial) -> None:
    """Under torch.autocast it gives what it gives for arguments in that dtype, where the op names any to convert."""
    op, device = trial.subject.op, trial.subject.device
    if not op.autocast or trial.subject.direct or not torch.amp.is_autocast_available(device.type):
        pytest.skip("autocast converts none of its arguments here")
    if trial.dtype is not torch.float32:
        pytest.skip("autocast converts float32")
    arguments = trial.arguments()
    low = {
        n: v.bfloat16() if n in op.autocast and isinstance(v, Tensor) and v.dtype is trial.dtype else v
        for n, v in arguments.items()
    }
    if trial.subject.refusal(low) is not None:
        pytest.skip("refused in bfloat16")
    with torch.no_grad(), trial.subject.chosen():
        want = outputs_of(trial.subject.call(low))
        with torch.autocast(device.type, torch.bfloat16):
            got = outputs_of(trial.subject.call(arguments))
    for name, out in want.items():
        assert got[name].dtype is out.dtype, f"{name} is {got[name].dtype} under autocast; expected {out.dtype}"
    converted = any(low[n] is not v for n, v in arguments.items())
    baseline, oracle = trial.forward_truth(low, torch.bfloat16 if converted else None)
    assert_right(trial.outcome(got, {}), baseline, oracle)
