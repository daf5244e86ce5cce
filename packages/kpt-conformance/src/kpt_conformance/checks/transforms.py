"""PyTorch's transforms: rules of custom ops, torch.compile, torch.export, vmap and autocast."""

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from kpt_conformance.comparison import assert_right, outputs_of
from kpt_conformance.extent import over
from kpt_conformance.tensors import parted, tensors_of, with_tensors
from kpt_conformance.trial import Trial
from kpt_optimize.cases import Arguments

#: Inductor, which takes seconds a case, has a check of its own.
COMPILER = "aot_eager"
#: Numbers of rows on both sides of what kernels choose by.
_ROWS = (5, 9, 65, 130)


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
    """The torch ops of the op, and of its backward, pass `torch.library.opcheck` with the kernel inside."""
    arguments = trial.arguments()
    with _CustomOps() as seen:
        trial.run(arguments)
    assert seen.calls, "under a dispatch mode no torch op of its own is called"
    for operator, (args, kwargs) in seen.calls.items():
        plain = tree_map_only(Tensor, lambda tensor: tensor.detach(), (args, kwargs))
        # torch can't compare 8-bit numbers as test_schema does; `inputs_unchanged` and `no_aliasing` do so instead.
        tensors = [leaf for leaf in tree_leaves(plain) if isinstance(leaf, Tensor)]
        narrow = any(tensor.is_floating_point() and tensor.dtype.itemsize == 1 for tensor in tensors)
        with trial.subject.chosen():
            tests = ("test_faketensor",) if narrow else ("test_schema", "test_faketensor")
            torch.library.opcheck(operator, *plain, test_utils=tests)


def _compiled(
    function: Callable[..., Any], compiler: str = COMPILER
) -> tuple[Callable[[Arguments], Any], CompileCounterWithBackend]:
    """A call, compiled as a function of its tensors with all else constant, as in a model; and what counts graphs."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(compiler)
    others: Arguments = {}

    @torch.compile(fullgraph=True, backend=counter)
    def call(tensors: Arguments) -> Any:
        return function(**others, **tensors)

    def run(arguments: Arguments) -> Any:
        tensors, constants = parted(arguments)
        others.update(constants)
        return call(tensors)

    return run, counter


@over()
def compiled(trial: Trial) -> None:
    """torch.compile(fullgraph=True) gives what eager calls give, forward and backward."""
    arguments = trial.arguments()
    trial.assert_right(arguments, trial.run(arguments, _compiled(trial.subject.op)[0]))


@over(first_case=True)
def compiled_sizes(trial: Trial) -> None:
    """One graph serves every number of rows if torch.compile is told that it varies, and two if it is not told."""
    if trial.subject.device.type == "xla":
        pytest.skip("torch.compile makes a graph for each size on xla, and XLA compiles it anew")
    for told in (True, False):
        _require_one_graph(trial, trial.subject.op, told)


@over(dtypes=True, first_case=True)
def inductor(trial: Trial) -> None:
    """Inductor, torch.compile's default, makes of it what computes the same, forward and backward."""
    if trial.subject.device.type == "xla":
        pytest.skip("Inductor makes no code for xla, which has a compiler of its own")
    if trial.subject.device.type == "cpu":
        from torch._inductor import cpp_builder  # takes a second, which others need not wait

        try:
            cpp_builder.get_cpp_compiler()
        except RuntimeError as error:
            pytest.skip(f"absent: Inductor needs a C++ compiler: {error}")
    arguments = trial.arguments()
    trial.assert_right(arguments, trial.run(arguments, _compiled(trial.subject.op, "inductor")[0]))


@over(references=False)
def traced(trial: Trial) -> None:
    """A kernel that compilers may look into is compiled whole, for every number of rows at once."""
    kernel = trial.subject.kernel
    if kernel is None or not kernel.traceable:
        pytest.skip("compilers don't look into it")
    op, forward = trial.subject.op, kernel.load()
    saves = kernel.backward is not None and callable(op.saves)

    def function(**arguments: Any) -> Any:
        # `bind`, which reads the op's signature, is not what is to be traced.
        call = op.Call(*[arguments.get(name, op.defaults.get(name)) for name in op.parameters], (), None)
        return forward(call)[0] if saves else forward(call)

    # Autograd goes through what was compiled only where the kernel says so.
    _require_one_graph(trial if kernel.differentiable else trial.forward_only(), function, others=1)


def _require_one_graph(trial: Trial, function: Callable[..., Any], told: bool = True, others: int = 4) -> None:
    """Raise `AssertionError` unless one graph of a call serves many numbers of rows, and all rightly.

    Args:
        trial: whose case is tried with other numbers of rows.
        function: what is compiled.
        told: the compiler is told which sizes vary, else it finds out from the second call, which costs a graph.
        others: how many other numbers of rows there are, the largest.
    """
    place: dict[str, Any] = {"dtype": trial.dtype, "device": trial.subject.device}
    made = [(each, trial.table.arguments(each.case, **place)) for each in _other_rows(trial)[-others:]]
    cases = [trial.arguments(), *(arguments for other, arguments in made if other.refusal(arguments) is None)]
    if len(cases) < 2:
        pytest.skip("no size of the case says how many rows there are, or there is one at most")
    call, counter = _compiled(function)
    shapes = [{name: tensor.shape for name, tensor in tensors_of(arguments).items()} for arguments in cases]
    varying = [(n, d) for n, shape in shapes[0].items() for d, size in enumerate(shape) if shapes[1][n][d] != size]

    def call_varying(leaves: Arguments) -> Any:
        for name, dimension in varying:
            torch._dynamo.mark_dynamic(tensors_of(leaves)[name], dimension)  # raises if the size is fixed
        return call(leaves)

    for arguments in cases:
        rows = next(iter(tensors_of(arguments).values())).shape[0]
        got = trial.run(arguments, call_varying if told else call)
        trial.assert_right(arguments, got, f"compiled, with {rows} rows")
    allowed = 1 if told else 2
    assert counter.frame_count <= allowed, f"{counter.frame_count} graphs for {len(cases)} numbers of rows"


def _other_rows(trial: Trial) -> list[Trial]:
    """Trials of cases with other numbers of rows in the op's first argument, everything else being the same."""

    def of(name: str, size: int) -> Trial:
        return replace(trial, case=replace(trial.case, sizes={**trial.case.sizes, name: size}))

    def rows(some: Trial) -> int:
        made = trial.table.arguments(some.case, dtype=trial.dtype)
        return next(iter(tensors_of(made).values())).shape[0]

    own = rows(trial)
    for name, parameter in inspect.signature(trial.table.build).parameters.items():
        size = trial.case.sizes.get(name, parameter.default)
        if type(size) is int and size > 1 and rows(of(name, size + 1)) > own > 1:
            # Fewer rows may be too few for what else the case says; the first case says nothing else.
            fewer = [each for each in _ROWS if each < size and not trial.case.sizes]
            return [of(name, each) for each in (*fewer, *(each for each in _ROWS if each > size))]
    return []


class _Module(nn.Module):
    def __init__(self, trial: Trial, others: Arguments) -> None:
        super().__init__()
        self.trial = trial
        self.others = others

    def forward(self, **tensors: Any) -> Any:
        return self.trial.subject.call({**self.others, **tensors})


@over()
def exported(trial: Trial) -> None:
    """torch.export keeps it, and what was exported computes the same."""
    arguments = trial.arguments()
    tensors, others = parted(arguments)
    with torch.no_grad(), trial.subject.chosen():
        program = torch.export.export(_Module(trial, others), (), kwargs=tensors, strict=False)
        got = trial.outputs(trial.leaves(tensors), lambda leaves: program.module()(**leaves))
        want = trial.outputs(trial.leaves(arguments))
    for name, out in want.items():
        torch.testing.assert_close(got[name], out, equal_nan=True)


@over(kernels=False)
def vmapped(trial: Trial) -> None:
    """Under torch.func.vmap the reference gives each sample's result; kernels refuse there."""
    if trial.subject.op.mutates:
        pytest.skip("an op that mutates what is not mapped has no result for each sample")
    first, second = trial.arguments(), trial.arguments(seed=1)
    tensors = tensors_of(first)
    name = next((n for n, tensor in tensors.items() if trial.wants_gradient(n, tensor)), next(iter(tensors)))

    def sample(value: Tensor) -> Arguments:
        return with_tensors(first, lambda each, tensor: value if each == name else tensor)

    pair = torch.stack((tensors[name], tensors_of(second)[name]))
    with torch.no_grad(), trial.subject.chosen():
        got = torch.func.vmap(lambda value: outputs_of(trial.subject.call(sample(value))), randomness="same")(pair)
    for index, value in enumerate(pair):
        outputs = {key: out[index] for key, out in got.items()}
        assert_right(trial.outcome(outputs, {}), *trial.forward_truth(sample(value)), f"sample {index}")


@over()
def autocast(trial: Trial) -> None:
    """Under torch.autocast it gives what it gives for arguments in that dtype, where the op names any to convert."""
    op, device = trial.subject.op, trial.subject.device
    if not op.autocast or not torch.amp.is_autocast_available(device.type):
        pytest.skip("autocast converts none of its arguments here")
    if trial.dtype is not torch.float32:
        pytest.skip("autocast converts float32")
    arguments = trial.arguments()
    low = with_tensors(arguments, lambda n, t: t.bfloat16() if n in op.autocast and t.dtype is trial.dtype else t)
    if trial.subject.refusal(low) is not None:
        pytest.skip("refused in bfloat16")
    with torch.no_grad(), trial.subject.chosen():
        want = trial.outputs(trial.leaves(low))
        with torch.autocast(device.type, torch.bfloat16):
            got = trial.outputs(trial.leaves(arguments))
    for name, out in want.items():
        assert got[name].dtype is out.dtype, f"{name} is {got[name].dtype} under autocast; expected {out.dtype}"
    converted = any(low[n] is not v for n, v in arguments.items())
    baseline, oracle = trial.forward_truth(low, torch.bfloat16 if converted else None)
    assert_right(trial.outcome(got, {}), baseline, oracle)
