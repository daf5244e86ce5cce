"""CUDA graphs, with `torch.cuda.make_graphed_callables` simulated: it computes again in the places that it was given.

What is tested is the copies in and out, and the guard of the form. That the graph of a GPU gives right numbers needs
one.
"""

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kpt_core import InputError
from kpt_optimize import Example
from kpt_optimize.model import OptimizationWarning
from kpt_optimize.model.cuda_graphs import capture
from kpt_optimize.model.recipe import Recipe, prepare


class OnCuda(Tensor):
    """A tensor that says that it is on a GPU."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", 0)


def on_cuda(*values: float) -> Tensor:
    return torch.tensor(values).as_subclass(OnCuda)


class Simulated:
    """What `make_graphed_callables` was given, and how often it was replayed."""

    def __init__(self) -> None:
        self.places: tuple[Tensor, ...] = ()
        self.results: tuple[Tensor, ...] = ()
        self.parameters: list[Tensor] = []
        self.recorded_gradients = False
        self.replays = 0

    def make(self, function: Any, places: tuple[Tensor, ...], *, allow_unused_input: bool) -> Callable[..., Any]:
        assert allow_unused_input
        self.places, self.recorded_gradients = places, torch.is_grad_enabled()
        self.parameters = list(function.parameters()) if isinstance(function, nn.Module) else []
        self.results = tuple(result.detach() for result in function(*places))

        def graphed(*tensors: Tensor) -> tuple[Tensor, ...]:
            self.replays += 1
            for place, tensor in zip(places, tensors, strict=True):
                place.detach().copy_(tensor)
            for result, new in zip(self.results, function(*places), strict=True):
                result.copy_(new)
            return self.results

        return graphed


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Simulated:
    state = Simulated()
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "make_graphed_callables", state.make)
    return state


def scaled(x: Tensor, by: float = 2.0) -> dict[str, Any]:
    """Something to capture."""
    return {"y": x * by, "cache": None}


def test_simulated_a_replay_takes_new_values_and_leaves_earlier_results_alone(cuda: Simulated) -> None:
    sample = on_cuda(1.0, 2.0)
    graphed = capture(scaled, Example((sample,), {}), training=False)
    first = graphed(on_cuda(3.0, 4.0))
    sample.fill_(100.0)
    second = graphed(on_cuda(5.0, 6.0))
    assert first["y"].tolist() == [6.0, 8.0]
    assert second["y"].tolist() == [10.0, 12.0]
    assert second["cache"] is None
    assert sample.tolist() == [100.0, 100.0]
    assert cuda.replays == 2
    assert not cuda.recorded_gradients


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        (
            (on_cuda(1.0, 2.0, 3.0),),
            {},
            r"torch.float32 \[3\] on cuda:0.*captured was .*torch.float32 \[2\]",
        ),
        ((on_cuda(1.0, 2.0).double(),), {}, r"torch.float64 \[2\] on cuda:0"),
        ((on_cuda(1.0, 2.0),), {"by": 3.0}, r"\{'by': '3.0'\}\), captured was"),
        ((torch.tensor([1.0, 2.0]),), {}, r"torch.float32 \[2\] on cpu"),
    ],
)
def test_simulated_another_form_runs_uncaptured_and_warns_once(
    cuda: Simulated, args: tuple[Any, ...], kwargs: dict[str, Any], message: str
) -> None:
    graphed = capture(scaled, Example((on_cuda(1.0, 2.0),), {}), training=False)
    with pytest.warns(OptimizationWarning, match=f"the call runs uncaptured: .*{message}"):
        first = graphed(*args, **kwargs)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second = graphed(*args, **kwargs)
    assert first["y"].tolist() == second["y"].tolist() == (args[0] * kwargs.get("by", 2.0)).tolist()
    assert cuda.replays == 0


def test_simulated_a_plain_value_is_part_of_the_form(cuda: Simulated) -> None:
    graphed = capture(scaled, Example((on_cuda(1.0),), {"by": 3.0}), training=False)
    assert graphed(on_cuda(2.0), by=3.0)["y"].tolist() == [6.0]
    with pytest.warns(OptimizationWarning, match=r"'by': '4\.0'.*captured was .*'by': '3\.0'"):
        assert graphed(on_cuda(2.0), by=4.0)["y"].tolist() == [8.0]
    assert cuda.replays == 1


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(("sample", "found"), [((torch.ones(2),), "cpu"), ((3,), "none")])
def test_a_capture_needs_cuda_tensors(sample: tuple[Any, ...], found: str, training: bool) -> None:
    with pytest.raises(InputError, match=f"a CUDA graph takes tensors on one accelerator; got {found}"):
        capture(nn.Linear(2, 2), Example(sample, {}), training=training)


def rows(count: int, *, requires_grad: bool = False) -> Tensor:
    return torch.ones(count, 2).as_subclass(OnCuda).requires_grad_(requires_grad)


def test_simulated_training_replays_the_captured_form_and_mode_alone(cuda: Simulated) -> None:
    module = nn.Linear(2, 2, bias=False)
    graphed = capture(module, Example((), {"input": rows(3)}), training=True)
    assert cuda.parameters == [module.weight]
    assert cuda.recorded_gradients
    assert torch.equal(graphed(input=rows(3)), module(rows(3)))
    assert cuda.replays == 1
    with pytest.warns(OptimizationWarning, match=r"\[4, 2\] on cuda:0.*captured was .*torch.float32 \[3, 2\]"):
        assert torch.equal(graphed(input=rows(4)), module(rows(4)))
    with pytest.warns(OptimizationWarning, match="with gradient"):
        graphed(input=rows(3, requires_grad=True))
    module.eval()
    assert torch.equal(graphed(input=rows(3)), module(rows(3)))
    assert cuda.replays == 1


@pytest.mark.parametrize("requires_grad", [False, True])
def test_simulated_training_never_writes_to_the_sample(cuda: Simulated, requires_grad: bool) -> None:
    sample = rows(3, requires_grad=requires_grad)
    graphed = capture(nn.Linear(2, 2, bias=False), Example((sample,), {}), training=True)
    graphed((rows(3) * 7).detach().requires_grad_(requires_grad))
    assert cuda.places[0].tolist() == [[7.0, 7.0]] * 3
    assert cuda.places[0].requires_grad is requires_grad
    assert sample.tolist() == [[1.0, 1.0]] * 3


@pytest.mark.parametrize("training", [False, True])
def test_simulated_a_recipe_with_a_graph_runs_it(cuda: Simulated, training: bool) -> None:
    model, x = nn.Linear(2, 2, bias=False), rows(3)
    prepared = prepare(model, Recipe(cuda_graph=True), Example((x,), {}), training=training)
    assert torch.equal(prepared(x), model(x))
    assert cuda.replays == 1
