"""`tune` measures, and dispatch then does what was measured; every other rule holds as before."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import kpt_core
import toy_cases
import toy_ops
import tuning_kernels
from clock import CLOCK
from kpt_core import Backend, Call, registry
from kpt_optimize import cases
from kpt_optimize.cases import Case, CaseTable
from kpt_optimize.tuning import TuningWarning
from loopback import Loopback
from tuning_kernels import FEW, MANY, SEEN, WEIGHT, composed, kernel, named, negated, offer, product, tune, two

Add = Callable[[Backend], Backend]
Setting = Callable[[str, str], None]


@pytest.fixture(autouse=True)
def folder(tuning_folder: Path) -> Path:
    return tuning_folder


def test_the_faster_kernel_comes_first_after_tuning_and_in_the_next_process_too(add: Add) -> None:
    add(two())
    assert kernel(product, FEW, WEIGHT) == "slow"
    found = tune()
    assert [(e.kernel, e.default, e.case) for e in found.entries] == [
        (named("quick"), named("slow"), case) for case in ("few", "many")
    ]
    assert all(entry.gain > 2 and entry.noise < 0.1 for entry in found.entries)
    for again in (False, True):
        if again:
            kpt_core.refresh()
        assert kernel(product, FEW, WEIGHT) == "quick"
        with kpt_core.record() as log:
            product(FEW, WEIGHT)
        (ran,) = log
        assert (ran.identity, ran.tuned, ran.key, ran.dtype) == (named("quick"), True, (4, 3), "float32")
        assert "-> tuning_kernels:quick (tuned)" in str(ran)
        assert ran.as_dict()["tuned"] is True


def test_only_calls_of_a_measured_key_are_tuned(add: Add) -> None:
    add(two())
    tune(cases=["few"])
    for rows, served in ((3, "quick"), (4, "quick"), (5, "slow"), (2, "slow")):
        assert kernel(product, torch.randn(rows, 5), WEIGHT) == served
    assert kernel(product, FEW, torch.randn(5, 4)) == "slow"
    assert kernel(product, FEW.double(), WEIGHT.double()) == "slow"
    assert kpt_core.explain(product, torch.randn(5, 5), WEIGHT).tuned is False


def test_each_size_has_its_own_winner(add: Add) -> None:
    add(Loopback(offer("slow", priority=9), offer("quick_for_few")))
    tune()
    assert (kernel(product, FEW, WEIGHT), kernel(product, MANY, WEIGHT)) == ("quick_for_few", "slow")
    assert kpt_core.explain(product, MANY, WEIGHT).tuned is True  # measured, and the default stayed


def test_without_a_size_key_one_result_serves_all_calls(add: Add) -> None:
    add(Loopback(offer("negated_slow", "tuning.negated", priority=1), offer("negated_quick", "tuning.negated")))
    found = tune("tuning.negated")
    assert len(found.results) == 2
    (entry,) = found.entries
    assert entry.key == ()
    assert kernel(negated, torch.randn(77)) == "negated_quick"


def test_without_a_size_key_the_default_stays_where_cases_disagree(add: Add, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product, "size_key", None)
    add(Loopback(offer("slow", priority=9), offer("quick_for_few")))
    found = tune()
    assert [result.entry and result.entry.kernel for result in found.results] == [
        named("quick_for_few"),
        named("slow"),
    ]
    (entry,) = found.entries
    assert (entry.kernel, entry.gain, entry.case) == (named("slow"), 1.0, "few, many")
    assert kernel(product, FEW, WEIGHT) == "slow"


def test_a_kernel_that_is_not_surely_faster_does_not_replace_the_default(add: Add) -> None:
    add(Loopback(offer("quick", priority=1), offer("quick_for_few")))
    (entry,) = tune(cases=["few"]).entries
    assert (entry.kernel, entry.gain) == (named("quick"), 1.0)


@pytest.mark.parametrize(
    "moods",
    [
        pytest.param([1e-3] * 60 + [4.5e-3] * 400, id="it was lucky in the first measurement"),
        pytest.param([1e-3, 3.9e-3, 3.9e-3, 9e-3] * 100, id="it is faster by less than the noise"),
    ],
)
def test_luck_and_noise_do_not_replace_the_default(
    add: Add, monkeypatch: pytest.MonkeyPatch, moods: list[float]
) -> None:
    add(Loopback(offer("slow", priority=9), offer("moody")))
    monkeypatch.setattr(tuning_kernels, "MOODS", moods)
    (entry,) = tune(cases=["few"]).entries
    assert (entry.kernel, entry.gain) == (named("slow"), 1.0)
    assert len(moods) < 340  # there was a second measurement


def test_parts_are_tuned_before_what_is_composed_of_them(add: Add, list_torch: Callable[..., None]) -> None:
    """With its product tuned, the composed kernel beats the one for the whole."""
    list_torch(offer("parts", "tuning.composed", composed_of=("tuning.product",)))
    add(Loopback(offer("whole", "tuning.composed"), offer("slow", priority=9), offer("quick")))
    assert kernel(composed, FEW, WEIGHT) == "whole"
    found = tune("tuning.composed", "tuning.product")
    assert [result.op for result in found.results][-1] == "tuning.composed"
    selection = kpt_core.explain(composed, FEW, WEIGHT)
    assert (selection.kernel, selection.tuned) == ("tuning_kernels:parts", True)
    assert [child.kernel for child in selection.children] == ["tuning_kernels:quick"]
    with kpt_core.record() as log:
        result = composed(FEW, WEIGHT)
    assert log == [selection]
    torch.testing.assert_close(result, FEW @ WEIGHT + 1)
    with kpt_core.use("tuning_kernels:whole"):  # what is asked for runs
        assert kernel(composed, FEW, WEIGHT) == "whole"


def test_the_reference_may_win(add: Add, monkeypatch: pytest.MonkeyPatch) -> None:
    add(Loopback(offer("slow", priority=9)))
    monkeypatch.setattr(tuning_kernels, "_take", lambda seconds: CLOCK.sleep(1e-3 if seconds == 8e-3 else seconds))
    (entry,) = tune(cases=["few"]).entries
    assert (entry.kernel, entry.distribution) == ("reference", None)
    selection = kpt_core.explain(product, FEW, WEIGHT)
    assert (selection.kernel, selection.tuned) == ("reference", True)
    with kpt_core.use("loop"):
        assert kernel(product, FEW, WEIGHT) == "slow"


@pytest.mark.parametrize(("attribute", "said"), [("wrong", "its result is off by"), ("raising", "no such instruction")])
def test_what_is_wrong_or_raises_is_left_out_with_a_sentence(add: Add, attribute: str, said: str) -> None:
    add(Loopback(offer("slow", priority=9), offer(attribute), offer("quick")))
    found = tune(cases=["few"])
    (result,) = found.results
    (refusal,) = result.left_out
    assert refusal.kernel == named(attribute)
    assert said in refusal.reason
    assert "second line" not in refusal.reason
    assert found.entries[0].kernel == named("quick")


def test_a_default_that_is_wrong_is_never_stored(add: Add) -> None:
    add(Loopback(offer("wrong", priority=9), offer("slow", priority=1)))
    (entry,) = tune(cases=["few"]).entries
    assert (entry.kernel, entry.default) == (named("slow"), named("slow"))


def test_what_is_right_is_told_by_references_alone(add: Add) -> None:
    """Here a composed kernel calls a wrong one, and is what is left out."""
    parts = offer("parts", "tuning.composed", composed_of=("tuning.product",))
    add(Loopback(offer("whole", "tuning.composed", priority=1), parts, offer("wrong")))
    (result,) = tune("tuning.composed").results
    assert [refusal.kernel for refusal in result.left_out] == [named("parts", "tuning.composed")]
    assert result.entry is not None
    assert result.entry.kernel == named("whole", "tuning.composed")


def test_refused_kernels_are_reported_and_not_timed(add: Add) -> None:
    add(two(unsupported="refuses_many", requires={"warp"}))
    (few, many) = tune().results
    assert [refusal.reason for refusal in few.left_out] == ["needs warp, which cpu lacks"]
    registry.remove_backend("loop")
    add(two(unsupported="refuses_many"))
    (few, many) = tune().results
    assert few.entry is not None
    assert few.entry.kernel == named("quick")
    assert [refusal.reason for refusal in many.left_out] == ["100 rows; takes at most 8"]


def test_the_tuned_kernel_obeys_every_other_rule(add: Add, setting: Setting) -> None:
    """Its own refusal within the key, explicit choice, KPT_DISABLE."""
    backend = two(unsupported="refuses_many")
    add(backend)
    tune(cases=["few"])
    with pytest.MonkeyPatch.context() as patch:  # let a call that it refuses have its key
        patch.setattr(product, "size_key", lambda call: (4, 3))
        selection = kpt_core.explain(product, MANY, WEIGHT)
    assert (selection.kernel, selection.tuned) == ("tuning_kernels:slow", False)
    assert [refusal.reason for refusal in selection.refusals] == ["100 rows; takes at most 8"]
    for choice, served in (("tuning_kernels:slow", "slow"), ("reference", "reference"), ("loop", "quick")):
        with kpt_core.use(choice):
            assert kernel(product, FEW, WEIGHT) == served
    setting("KPT_DISABLE", "tuning_kernels:quick")
    assert kernel(product, FEW, WEIGHT) == "slow"


def test_a_tuned_kernel_that_raises_is_quarantined(add: Add, monkeypatch: pytest.MonkeyPatch) -> None:
    add(two())
    tune(cases=["few"])

    def fail(call: Call) -> Tensor:
        raise RuntimeError("broken today")

    monkeypatch.setattr(tuning_kernels, "quick", fail)
    kpt_core.refresh()
    for _ in range(3):
        with pytest.warns(kpt_core.KernelFailedWarning, match=r"tuning_kernels:quick raised .*tuning_kernels:slow ran"):
            product(FEW, WEIGHT)
    assert kernel(product, FEW, WEIGHT) == "slow"


def test_training_is_measured_for_itself(add: Add) -> None:
    add(
        Loopback(
            offer("slow", priority=9, backward="backward"),
            offer("quick", backward="backward"),
            offer("moody", backward="doubled_backward"),
            offer("quick_for_few"),
        )
    )
    tuning_kernels.MOODS[:] = [2e-3] * 10_000
    with_gradient = FEW.clone().requires_grad_()
    tune(cases=["few"])
    assert (kernel(product, FEW, WEIGHT), kernel(product, with_gradient, WEIGHT)) == ("quick", "slow")
    (result,) = tune(cases=["few"], training=True).results
    assert result.key == (4, 3, "gradient")
    assert {refusal.kernel: refusal.reason[:12] for refusal in result.left_out} == {
        "tuning_kernels:quick_for_few": "forward only",
        named("moody"): "its result i",
    }
    assert kernel(product, with_gradient, WEIGHT) == "quick"
    assert kpt_core.explain(product, with_gradient, WEIGHT).key == (4, 3, "gradient")


def test_what_changes_its_arguments_is_not_tuned(add: Add, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = {
        name: CaseTable(
            op=name,
            build=table.build,
            cases=tuple(Case(name=case.name, sizes=case.sizes) for case in table.cases),
            gradients=table.gradients,
        )
        for name, table in toy_cases.TABLES.items()
    }
    monkeypatch.setattr(cases, "_cases", lambda: tables)
    add(Loopback(*toy_ops.KERNELS))
    for training in (False, True):
        found = tune("toy.best", "toy.append", cases=["few"], training=training, dtypes=[torch.float32])
        assert found.skipped == {"toy.append": "it changes its arguments, and so each kernel's would differ"}
        (result,) = found.results
        assert (result.left_out, result.entry is not None) == ((), True)


def test_the_best_configuration_is_kept_and_the_kernel_gets_it(add: Add) -> None:
    add(Loopback(offer("tiled", configs="tiles")))
    product(FEW, WEIGHT)
    assert SEEN[-1] == 16
    found = tune(cases=["few"])
    (entry,) = found.entries
    assert (entry.kernel, entry.config) == (named("tiled"), {"rows": 32})
    said = {refusal.kernel: refusal.reason for refusal in found.results[0].left_out}
    assert said.keys() == {f"{named('tiled')} with {{'rows': {rows}}}" for rows in (66, 99)}
    product(FEW, WEIGHT)
    assert SEEN[-1] == 32
    assert kpt_core.explain(product, FEW, WEIGHT).config == {"rows": 32}
    assert "(tuned, rows=32)" in str(kpt_core.explain(product, FEW, WEIGHT))
    product(MANY, WEIGHT)
    assert SEEN[-1] == 16
    tune(cases=["few"])  # the default is tried as such, though a configuration is in force
    assert 16 in SEEN[-20:]


def test_configurations_may_be_a_plain_list_and_their_faults_are_told(
    add: Add, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(Loopback(offer("tiled", configs="SAME")))
    assert tune(cases=["few"]).results[0].left_out == ()
    monkeypatch.setattr(tuning_kernels, "SAME", [{"rows": (16, 2)}, {"rows": 16}])
    (refusal,) = tune(cases=["few"]).results[0].left_out
    assert "would not come back from JSON" in refusal.reason
    monkeypatch.setattr(tuning_kernels, "SAME", 3)
    (refusal,) = tune(cases=["few"]).results[0].left_out
    assert "TypeError" in refusal.reason


def test_a_kernel_that_was_not_there_and_comes_first_is_not_overruled(add: Add) -> None:
    """Nobody knows whether the winner is faster than that one."""
    add(two())
    tune(cases=["few"])
    add(Loopback(offer("quick_for_few", priority=-1), name="later"))
    assert kernel(product, FEW, WEIGHT) == "quick"  # by its priority it would not run anyway
    registry.remove_backend("later")
    add(Loopback(offer("quick_for_few", priority=10), name="better"))
    with pytest.warns(TuningWarning, match="quick_for_few comes first and was not there then; `kpt tune` measures"):
        product(FEW, WEIGHT)
    assert kernel(product, FEW, WEIGHT) == "quick_for_few"
    (entry,) = tune(cases=["few"]).entries
    assert entry.present == (named("quick_for_few", backend="better"), named("slow"), named("quick"))
    assert kernel(product, FEW, WEIGHT) == "quick_for_few"
