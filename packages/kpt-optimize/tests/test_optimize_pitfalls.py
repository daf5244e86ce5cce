"""`optimize` where a model, its inputs or a plug-in are not what it would like."""

import gc
import math
import sys
import weakref
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import kpt_core
import kpt_core.registry
from kpt_core import InputError, PluginWarning
from kpt_optimize import Site, apply_plan, optimize, relative_error, rewrites, rounding
from kpt_optimize.changes import Changes
from plugins import entry_points_in
from plugins import install as install_plugin
from test_optimize import Cast, Model, Slow, Swap, install

INF, NAN = math.inf, math.nan


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model()


@pytest.fixture
def x() -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(1))


def test_a_module_used_at_two_paths_is_replaced_and_reverted_at_both(
    monkeypatch: pytest.MonkeyPatch, model: Model, x: Tensor
) -> None:
    install(monkeypatch, Swap(dtype=torch.bfloat16))
    model.middle[1] = model.first
    optimized = optimize(model, objective="memory", example_inputs=(x,))
    assert [entry.module for entry in optimized.plan.kept] == ["first"]
    assert optimized.plan.bytes_after < optimized.plan.bytes_before
    for result in (optimized, apply_plan(model, optimized.plan)):
        assert type(result.model.first) is Cast
        assert result.model.middle[1] is result.model.first
        result.revert("middle.1")
        assert type(result.model.first) is Slow
        assert result.model.middle[1] is result.model.first


def test_tied_weights_are_not_untied(monkeypatch: pytest.MonkeyPatch, model: Model, x: Tensor) -> None:
    install(monkeypatch, Swap())
    model.middle[1].weight = model.first.weight
    result = optimize(model, example_inputs=(x,))
    assert not result.plan.kept
    reasons = {entry.module: entry.reason for entry in result.plan.entries}
    assert reasons["first"] == "it would untie this module's weights from middle.1.weight"
    assert reasons["middle.1"] == "it would untie this module's weights from first.weight"


def test_memory_objective_rolls_back_unless_the_whole_model_is_smaller(
    monkeypatch: pytest.MonkeyPatch, model: Model, x: Tensor
) -> None:
    install(monkeypatch, Swap(dtype=torch.bfloat16, only="first"))
    # Two views of one storage: converting one of them frees nothing.
    both = torch.randn(16, 8)
    model.first.weight, model.middle[1].weight = nn.Parameter(both[:8]), nn.Parameter(both[8:])
    result = optimize(model, objective="memory", example_inputs=(x,), inplace=True)
    assert not result.plan.kept
    assert "together the model was not smaller" in result.plan.entries[0].reason
    assert result.plan.bytes_after == result.plan.bytes_before
    assert type(model.first) is Slow


def test_a_rewrite_that_does_not_call_its_op_is_not_kept(
    monkeypatch: pytest.MonkeyPatch, model: Model, x: Tensor
) -> None:
    install(monkeypatch, Swap(op="test.other", only="first"))
    (entry,) = optimize(model, example_inputs=(x,)).plan.entries
    assert not entry.kept
    assert entry.reason == "it does not call test.other"
    assert entry.kernel == ""


@pytest.mark.parametrize(
    ("after", "before", "error"),
    [
        ([1.0, -INF], [1.0, -INF], 0),
        ([1.5, -INF], [1.0, -INF], 0.5),
        ([1.0, INF], [1.0, -INF], INF),
        ([1.0, INF], [1.0, 2.0], INF),
        ([1.0, NAN], [1.0, NAN], 0),
        ([1.0, NAN], [1.0, 2.0], INF),
        ([1.0, 2.0], [1.0, NAN], INF),
        ([1.0, 2.0], [1.0, 4.0], 0.5),
        ([], [], 0),
    ],
)
def test_relative_error_of_special_values(after: list[float], before: list[float], error: float) -> None:
    assert relative_error(torch.tensor(after), torch.tensor(before)) == error


def test_relative_error_of_outputs_that_do_not_match_is_infinite() -> None:
    one = torch.ones(2)
    assert relative_error((one, one), (one,)) == INF
    assert relative_error(one, (one, one)) == INF
    assert relative_error(torch.ones(3), one) == INF
    assert relative_error(None, one) == INF


def test_an_example_that_changes_is_refused(monkeypatch: pytest.MonkeyPatch, x: Tensor) -> None:
    class Caching(Model):
        def forward(self, x: Tensor, cache: list[Tensor]) -> Tensor:
            cache.append(x)
            return super().forward(x) + sum(cache)

    class Filling(Model):
        def forward(self, x: Tensor, cache: list[Tensor]) -> Tensor:
            if cache:
                raise ValueError("the cache is full")
            cache.append(x)
            return super().forward(x)

    install(monkeypatch, Swap())
    with pytest.raises(InputError, match=r"another output when it runs the example again \(difference .*without a cac"):
        optimize(Caching(), example_inputs=(x, []), level="aggressive", max_error=10)
    with pytest.raises(InputError, match="when it runs the example again: ValueError: the cache is full: pass inp"):
        optimize(Filling(), example_inputs=(x, []))


@pytest.mark.parametrize(("dtype", "scale"), [(torch.bfloat16, 1.01), (torch.float16, 1.002)])
def test_budget_of_lossless_rewrites_allows_for_the_rounding_of_the_dtype(
    monkeypatch: pytest.MonkeyPatch, model: Model, x: Tensor, dtype: torch.dtype, scale: float
) -> None:
    monkeypatch.setattr("kpt_optimize.trial.gain_of", lambda *_: (2.0, 0.0))
    install(monkeypatch, Swap(scale=scale, only="first"))
    result = optimize(model.to(dtype), "conservative", example_inputs=(x.to(dtype),))
    assert result.plan.kept[0].error > 1e-4
    assert result.plan.max_error == 4 * torch.finfo(dtype).eps
    assert not optimize(model, "conservative", example_inputs=(x.to(dtype),), max_error=1e-4).plan.kept
    assert not optimize(model.float(), "conservative", example_inputs=(x,)).plan.kept


def test_budget_of_lossy_rewrites_stays(monkeypatch: pytest.MonkeyPatch, model: Model, x: Tensor) -> None:
    install(monkeypatch, Swap(lossless=False, scale=1.025, only="first"))
    (entry,) = optimize(model.bfloat16(), example_inputs=(x.bfloat16(),)).plan.entries
    assert "exceeds the budget of 2.0e-02" in entry.reason


def test_rounding_is_that_of_the_coarsest_output() -> None:
    assert rounding((torch.ones(1), torch.ones(1).bfloat16(), None)) == 2**-5
    assert rounding(torch.ones(1, dtype=torch.int64)) == 0


class Misnaming(Swap):
    def sites(self, model: nn.Module) -> Iterable[Site]:
        return [Site("nowhere", "test.linear")]


class Raising(Swap):
    def sites(self, model: nn.Module) -> Iterable[Site]:
        raise RuntimeError("no idea")


class Greedy(Swap):
    def sites(self, model: nn.Module) -> Iterable[Site]:
        return [Site("", "test.linear")]


@pytest.mark.parametrize(
    ("kind", "reason"),
    [(Misnaming, "no attribute `nowhere`"), (Raising, "no idea"), (Greedy, "names the model itself")],
)
def test_a_rewrite_that_fails_to_name_sites_costs_a_warning(
    monkeypatch: pytest.MonkeyPatch, model: Model, x: Tensor, kind: type[Swap], reason: str
) -> None:
    install(monkeypatch, kind(name="test.bad"), Swap())
    with pytest.warns(PluginWarning, match=r"without rewrite 'test.bad': sites\(\) failed: .*" + reason):
        result = optimize(model, example_inputs=(x,))
    assert {entry.rewrite for entry in result.plan.kept} == {"test.swap"}
    assert [problem.plugin for problem in kpt_core.registry.problems()] == ["rewrite 'test.bad'"]


REWRITE = """
class R:
    name, lossless, level = "{name}", True, "balanced"
    def sites(self, model): return []
    def replacement(self, module): return module
R.ALL = [R()]
"""


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("R.level = 'silly'", "level of rewrite 'bad' must be one of .*; got 'silly'"),
        ("R.name = ''", "the name of a rewrite must be a string that is not empty; got ''"),
        ("R.lossless = 'yes'", "lossless of rewrite 'bad' must be True or False; got 'yes'"),
        ("del R.sites", "it lacks sites; see kpt_optimize.Rewrite for what is needed"),
        ("R.ALL = [R]", "is a class; give an instance of it"),
        ("R.ALL = [R(), R()]", "'bad' exists already"),
        ("R.ALL = 3", "TypeError"),
    ],
)
def test_a_malformed_rewrite_is_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, change: str, reason: str
) -> None:
    for name, source in (("good", REWRITE), ("bad", REWRITE + change)):
        install_plugin(tmp_path, name, source, "kpt.rewrites", **{name: f"{name}:R.ALL"})
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("kpt_core.discovery.entry_points", lambda group: entry_points_in(tmp_path, group))
    for name in ("good", "bad"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    kpt_core.refresh()
    with pytest.warns(PluginWarning, match=f"kpt.rewrites 'bad' of dist-of-bad 1.0: .*{reason}"):
        assert list(rewrites()) == ["good"]


def test_commit_frees_the_originals(monkeypatch: pytest.MonkeyPatch, model: Model, x: Tensor) -> None:
    install(monkeypatch, Swap())
    original = weakref.ref(model.first)
    result = optimize(model, example_inputs=(x,), inplace=True)
    gc.collect()
    assert original() is not None
    result.commit()
    gc.collect()
    assert original() is None
    assert type(model.first) is Cast
    with pytest.raises(InputError, match="the changes were committed: there is no way back"):
        result.revert()


def test_reverting_takes_back_what_builds_on_it(model: Model) -> None:
    changes = Changes(model)
    first, inner, outer = model.first, model.middle[1], model.middle
    changes.swap("a", "middle.1", nn.Linear(8, 8))
    changes.swap("b", "middle", nn.Sequential(nn.ReLU(), nn.Linear(8, 8)))
    changes.swap("c", "middle.1", nn.Identity())
    changes.swap("d", "first", nn.Identity())
    assert [change.rewrite for change in changes.undo("middle")] == ["b", "c"]
    assert model.middle is outer
    assert model.middle[1] is not inner
    assert changes.paths == ["middle.1", "first"]
    changes.revert()
    assert model.middle[1] is inner
    assert model.first is first
