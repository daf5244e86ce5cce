"""CUDA graphs, with CUDA simulated: a graph that computes again what it was captured on.

What is tested is the order of a capture's steps, the copies in and out, and the guard of the form. That the graph of a
GPU gives right numbers needs one.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kpt_backend_nvidia.optimizer import (
    OptimizationWarning,
    Recipe,
    capture_inference,
    capture_training,
    prepare,
)
from kpt_backend_nvidia.optimizer.call import Call
from kpt_core import InputError


class OnCuda(Tensor):
    """A tensor that says that it is on a GPU."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", 0)


def on_cuda(*values: float) -> Tensor:
    return torch.tensor(values).as_subclass(OnCuda)


class Simulated:
    """`torch.cuda`'s graphs. A function that is captured leaves how it is computed again in `again`."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.again: Callable[[], None] | None = None

    def double(self, x: Tensor, by: float = 2.0) -> Tensor:
        """Something to capture."""
        self.events.append("run")
        y = x * by
        self.again = lambda: y.copy_(x * by)
        return y


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Simulated:
    state = Simulated()

    class Stream:
        def __init__(self, name: str = "side") -> None:
            self.name = name

        def wait_stream(self, other: "Stream") -> None:
            state.events.append(f"{self.name} waits for {other.name}")

    class Graph:
        def replay(self) -> None:
            state.events.append("replay")
            assert state.again is not None
            state.again()

    @contextmanager
    def named(begin: str, end: str) -> Iterator[None]:
        state.events.append(begin)
        yield
        state.events.append(end)

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: Stream("current"))
    monkeypatch.setattr(torch.cuda, "device", lambda device: named(f"device {device.index}", "device back"))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: named(f"on {stream.name}", "back"))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph: named("capture", "captured"))
    return state


def test_simulated_a_capture_is_warmed_up_on_a_side_stream(cuda: Simulated) -> None:
    capture_inference(cuda.double, Call((on_cuda(1.0),), {}))
    assert cuda.events == [
        "device 0",
        "side waits for current",
        "on side",
        *["run"] * 3,
        "back",
        "current waits for side",
        "capture",
        "run",
        "captured",
        "device back",
    ]


def test_simulated_a_replay_takes_new_values_and_leaves_earlier_results_alone(cuda: Simulated) -> None:
    sample = on_cuda(1.0, 2.0)
    graphed = capture_inference(cuda.double, Call((sample,), {}))
    cuda.events.clear()
    first = graphed(on_cuda(3.0, 4.0))
    sample.fill_(100.0)
    second = graphed(on_cuda(5.0, 6.0))
    assert first.tolist() == [6.0, 8.0]
    assert second.tolist() == [10.0, 12.0]
    assert sample.tolist() == [100.0, 100.0]
    assert cuda.events == ["replay", "replay"]


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        (
            (on_cuda(1.0, 2.0, 3.0),),
            {},
            r"argument 0 is torch.float32 \[3\] on cuda:0, captured was torch.float32 \[2\]",
        ),
        ((on_cuda(1.0, 2.0).double(),), {}, r"argument 0 is torch.float64 \[2\] on cuda:0"),
        ((on_cuda(1.0, 2.0),), {"by": 3.0}, "the arguments are nested as"),
        ((torch.tensor([1.0, 2.0]),), {}, r"torch.float32 \[2\] on cpu"),
    ],
)
def test_simulated_another_form_runs_uncaptured_and_warns_once_or_is_an_error(
    cuda: Simulated, args: tuple[Any, ...], kwargs: dict[str, Any], message: str
) -> None:
    call = Call((on_cuda(1.0, 2.0),), {})
    graphed = capture_inference(cuda.double, call)
    cuda.events.clear()
    with pytest.warns(OptimizationWarning, match=f"the call runs uncaptured: .*{message}"):
        first = graphed(*args, **kwargs)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second = graphed(*args, **kwargs)
    assert first.tolist() == second.tolist() == (args[0] * kwargs.get("by", 2.0)).tolist()
    assert cuda.events == ["run", "run"]
    with pytest.raises(InputError, match=f"can't be replayed: .*{message}"):
        capture_inference(cuda.double, call, strict=True)(*args, **kwargs)


def test_simulated_a_plain_value_is_part_of_the_form(cuda: Simulated) -> None:
    graphed = capture_inference(cuda.double, Call((on_cuda(1.0),), {"by": 3.0}), strict=True)
    assert graphed(on_cuda(2.0), by=3.0).tolist() == [6.0]
    with pytest.raises(InputError, match=r"argument 1 is 4\.0, captured was 3\.0"):
        graphed(on_cuda(2.0), by=4.0)


@pytest.mark.parametrize(("sample", "found"), [((torch.ones(2),), "cpu"), ((3,), "none")])
def test_a_capture_needs_cuda_tensors(sample: tuple[Any, ...], found: str) -> None:
    with pytest.raises(InputError, match=f"a CUDA graph takes tensors on a CUDA device; got {found}"):
        capture_inference(lambda x: x, Call(sample, {}))


def test_a_capture_of_training_needs_cuda_tensors() -> None:
    with pytest.raises(InputError, match="a CUDA graph takes tensors on a CUDA device; got cpu"):
        capture_training(nn.Linear(2, 2), Call((torch.ones(2),), {}))


@pytest.fixture
def places(cuda: Simulated, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """`make_graphed_callables` sets a `forward` that copies into the sample it was given and gives the negative."""
    given: list[Tensor] = []

    def make(module: nn.Module, sample: tuple[Tensor, ...], **options: Any) -> nn.Module:
        assert options == {"num_warmup_iters": 3, "allow_unused_input": True}
        given.extend(sample)

        def forward(x: Tensor) -> Tensor:
            sample[0].detach().copy_(x)
            return nn.functional.linear(-x, module.weight)

        module.forward = forward
        return module

    monkeypatch.setattr(torch.cuda, "make_graphed_callables", make)
    return given


def rows(count: int, *, requires_grad: bool = False) -> Tensor:
    return torch.ones(count, 2).as_subclass(OnCuda).requires_grad_(requires_grad)


def test_simulated_training_replays_the_captured_form_alone_and_leaves_the_module_as_it_was(
    places: list[Tensor],
) -> None:
    module = nn.Linear(2, 2, bias=False)
    graphed = capture_training(module, Call((rows(3),), {}))
    assert "forward" not in vars(module)
    assert torch.equal(graphed(rows(3)), -module(rows(3)))
    with pytest.warns(OptimizationWarning, match=r"\[4, 2\] on cuda:0, captured was torch.float32 \[3, 2\]"):
        assert torch.equal(graphed(rows(4)), module(rows(4)))
    with pytest.warns(OptimizationWarning, match="with gradient"):
        graphed(rows(3, requires_grad=True))


@pytest.mark.parametrize("requires_grad", [False, True])
def test_simulated_training_never_writes_to_the_sample(places: list[Tensor], requires_grad: bool) -> None:
    sample = rows(3, requires_grad=requires_grad)
    graphed = capture_training(nn.Linear(2, 2, bias=False), Call((sample,), {}))
    graphed((rows(3) * 7).detach().requires_grad_(requires_grad))
    assert places[0].tolist() == [[7.0, 7.0]] * 3
    assert places[0].requires_grad is requires_grad
    assert sample.tolist() == [[1.0, 1.0]] * 3


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        (Call((), {"x": torch.ones(2)}), "positional tensors only; the sample has x by keyword"),
        (Call((torch.ones(2), 3), {}), "positional tensors only; the sample has 3"),
    ],
)
def test_training_can_be_captured_with_positional_tensors_alone(sample: Call, message: str) -> None:
    with pytest.raises(InputError, match=message):
        capture_training(nn.Linear(2, 2), sample)


def test_simulated_a_recipe_with_a_graph_runs_it(places: list[Tensor]) -> None:
    model, x = nn.Linear(2, 2, bias=False), rows(3)
    prepared = prepare(model, Recipe(cuda_graph=True), Call((x,), {}), training=True)
    assert torch.equal(prepared(x), -model(x))


def test_simulated_a_recipe_with_a_graph_captures_for_inference_too(cuda: Simulated) -> None:
    class Doubling(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return cuda.double(x)

    prepared = prepare(Doubling(), Recipe(cuda_graph=True), Call((on_cuda(1.0),), {}))
    cuda.events.clear()
    assert prepared(on_cuda(4.0)).tolist() == [8.0]
    assert cuda.events == ["replay"]
