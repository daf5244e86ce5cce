"""What the steps propose on a CUDA device (simulated), and how the search combines them."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import nn

from kpt_optimize import Example
from kpt_optimize.model import OptimizationWarning, OptimizedModel, OptimizerConfig
from kpt_optimize.model.recipe import Recipe
from kpt_optimize.model.steps import STEPS, Situation
from kpt_optimize.model.trials import search


def situation(level: str = "aggressive", device: str = "cuda", **changes: object) -> Situation:
    found = Situation(
        model=nn.Sequential(nn.Linear(8, 8)), device=torch.device(device), sample=Example((torch.ones(2, 8),), {}),
        level=level, config=OptimizerConfig(),
    )  # fmt: skip
    if device == "cuda":
        changes = {"no_accelerator": None, "capabilities": frozenset({"tf32"})} | changes
    return replace(found, **changes)  # type: ignore[arg-type]


def propose(name: str, of: Situation) -> Mapping[str, Recipe] | str:
    (step,) = [step for step in STEPS if step.name == name]
    return step.propose(of)


@pytest.mark.parametrize(
    ("level", "modes"),
    [
        ("conservative", ["default"]),
        ("balanced", ["max-autotune-no-cudagraphs"]),
        ("aggressive", ["reduce-overhead", "max-autotune"]),
    ],
)
def test_simulated_each_level_has_its_modes_of_the_compiler(level: str, modes: list[str]) -> None:
    assert propose("compile", situation(level)) == {mode: Recipe(compile_mode=mode) for mode in modes}


def test_simulated_tf32_is_for_float32_where_the_device_has_it() -> None:
    assert propose("tf32", situation()) == {"high": Recipe(tf32=True)}
    assert propose("tf32", situation(model=nn.Linear(2, 2).half())) == "no parameter is float32"
    torch.set_float32_matmul_precision("high")
    try:
        assert propose("tf32", situation()) == "the process allows it already: its precision is 'high'"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert propose("tf32", situation(capabilities=frozenset())) == "cuda does not multiply TF32"


def test_simulated_a_cuda_graph_is_for_what_is_not_captured_yet_and_can_be() -> None:
    assert propose("cuda_graph", situation()) == {"one form": Recipe(cuda_graph=True)}
    captured = situation(recipe=Recipe(compile_mode="reduce-overhead"))
    assert propose("cuda_graph", captured) == "torch.compile captures graphs of its own in mode 'reduce-overhead'"


@pytest.mark.parametrize("step", ["tf32", "cuda_graph"])
def test_what_needs_an_accelerator_says_so_on_a_cpu(step: str) -> None:
    assert propose(step, situation(device="cpu")) == "needs an accelerator"


def test_a_compiled_part_is_not_compiled_again() -> None:
    model = nn.Sequential(torch.compile(nn.Linear(2, 2), backend="eager"))
    assert propose("compile", situation(model=model)) == "a part of the model is compiled already"


def test_tf32_is_set_while_the_model_runs_and_given_back_whatever_happens() -> None:
    class Watching(nn.Module):
        def forward(self, fail: bool) -> str:
            if fail:
                raise RuntimeError("midway")
            return torch.get_float32_matmul_precision()

    model = OptimizedModel(Watching(), Recipe(tf32=True), training=False)
    assert model(False) == "high"
    assert torch.get_float32_matmul_precision() == "highest"
    with pytest.raises(RuntimeError, match="midway"):
        model(True)
    assert torch.get_float32_matmul_precision() == "highest"
    with model.settings():
        assert torch.get_float32_matmul_precision() == "high"


@dataclass
class FakeTrial:
    """Candidates are their recipes; seconds, bytes and errors are looked up."""

    seconds: dict[Recipe, float]
    errors: dict[Recipe, float] = field(default_factory=dict)
    failing: frozenset[Recipe] = frozenset()

    def build(self, recipe: Recipe) -> Recipe:
        if recipe in self.failing:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return recipe

    def error(self, candidate: Recipe) -> float:
        return self.errors.get(candidate, 0.0)

    def budget(self, *, lossless: bool) -> float:
        return 1e-4 if lossless else 2e-2

    def times(self, before: Recipe, after: Recipe) -> tuple[list[float], list[float]]:
        return [self.seconds[before]] * 9, [self.seconds[after]] * 9

    def bytes(self, candidate: Recipe) -> int:
        return 100


HALF = Recipe(weights=torch.bfloat16)
REDUCED = replace(HALF, compile_mode="reduce-overhead")
TUNED = replace(HALF, compile_mode="max-autotune")
GRAPH = replace(HALF, cuda_graph=True)


def tried(trial: FakeTrial) -> tuple[Any, dict[str, str]]:
    of = situation(config=OptimizerConfig(skip=frozenset({"tf32", "rewrites"})))
    recipe, report = search(trial, of)  # type: ignore[arg-type]
    return recipe, {f"{o.step} {o.setting}".strip(): f"{o.status}: {o.reason}" for o in report.outcomes}


def test_simulated_steps_build_on_each_other_and_the_best_mode_stays() -> None:
    trial = FakeTrial({Recipe(): 8.0, HALF: 4.0, REDUCED: 2.0, TUNED: 1.0}, {HALF: 1e-2, REDUCED: 1e-2, TUNED: 1e-2})
    recipe, outcomes = tried(trial)
    assert recipe == TUNED
    assert outcomes["mixed_precision weights bfloat16"] == "kept: 2.00x faster"
    assert outcomes["compile reduce-overhead"] == "rolled back: 2.00x faster, but max-autotune is better"
    assert outcomes["compile max-autotune"] == "kept: 2.00x faster"
    assert outcomes["cuda_graph"].startswith("not tried: torch.compile captures graphs of its own")


def test_simulated_a_slower_mode_after_a_faster_one_is_rolled_back_and_a_graph_is_tried_without() -> None:
    recipe, outcomes = tried(FakeTrial({Recipe(): 8.0, HALF: 4.0, REDUCED: 5.0, TUNED: 4.0, GRAPH: 2.0}))
    assert recipe == GRAPH
    assert outcomes["compile reduce-overhead"] == "rolled back: 1.25x slower"
    assert outcomes["compile max-autotune"] == "rolled back: as fast"
    assert outcomes["cuda_graph one form"] == "kept: 2.00x faster"


def test_simulated_a_step_out_of_memory_is_rolled_back_with_a_warning_and_the_search_goes_on() -> None:
    trial = FakeTrial({Recipe(): 8.0, HALF: 4.0, TUNED: 1.0}, failing=frozenset({REDUCED}))
    with pytest.warns(OptimizationWarning, match="step 'compile' was rolled back: .*CUDA out of memory"):
        recipe, outcomes = tried(trial)
    assert recipe == TUNED
    assert "OutOfMemoryError" in outcomes["compile reduce-overhead"]


def test_simulated_a_result_that_is_slower_than_the_original_is_given_up() -> None:
    class Drifting(FakeTrial):
        def times(self, before: Recipe, after: Recipe) -> tuple[list[float], list[float]]:
            return ([1.0] * 9, [2.0] * 9) if (before, after) == (Recipe(), TUNED) else super().times(before, after)

    recipe, outcomes = tried(Drifting({Recipe(): 8.0, HALF: 4.0, REDUCED: 4.0, TUNED: 1.0}))
    assert recipe == Recipe()
    assert outcomes["compile max-autotune"] == "rolled back: with the kept steps together the model was 2.00x slower"
    assert not any(outcome.startswith("kept") for outcome in outcomes.values())
