"""`tune` measures, and dispatch then does what was measured; every other rule holds as before."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import kpt_core
import tuning_kernels
from kpt_core import (
    Backend,
    Case,
    CaseTable,
    InputError,
    TuningWarning,
    UnknownNameError,
    _registry,
    _tuning,
    _tuning_files,
)
from loopback import Loopback
from test_tuning_files import ENTRY
from tuning_kernels import SEEN, composed, negated, offer, product, two

Add = Callable[[Backend], Backend]
Setting = Callable[[str, str], None]
FEW, MANY = (torch.randn(rows, 5) for rows in (4, 100))
WEIGHT = torch.randn(5, 3)


@pytest.fixture(autouse=True)
def folder(setting: Setting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    setting("KPT_TUNING", str(tmp_path / "tables"))
    tuning_kernels.use_cases(monkeypatch)
    return tmp_path / "tables"


@pytest.fixture(autouse=True)
def same_state_after_refresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """`refresh` forgets case tables, which these tests have put there."""
    refresh = _registry.refresh

    def and_put_back() -> None:
        refresh()
        tuning_kernels.use_cases(monkeypatch)

    monkeypatch.setattr(kpt_core, "refresh", and_put_back)


def kernel(op: kpt_core.Op[..., Tensor], *args: Tensor) -> str:
    return kpt_core.explain(op, *args).kernel.rpartition(":")[2]


def tune(*names: str, **options: object) -> kpt_core.Tuning:
    return kpt_core.tune(names or ("tuning.product",), **options)  # type: ignore[arg-type]


def test_the_faster_kernel_comes_first_after_tuning_and_in_the_next_process_too(add: Add) -> None:
    add(two())
    assert kernel(product, FEW, WEIGHT) == "slow"
    found = tune()
    assert [(e.kernel, e.default, e.case) for e in found.entries] == [
        ("tuning_kernels:quick", "tuning_kernels:slow", case) for case in ("few", "many")
    ]
    assert all(entry.gain > 2 and entry.noise < 0.1 for entry in found.entries)
    for again in (False, True):
        if again:
            kpt_core.refresh()
        assert kernel(product, FEW, WEIGHT) == "quick"
        with kpt_core.record() as log:
            product(FEW, WEIGHT)
        (ran,) = log
        assert (ran.kernel, ran.tuned, ran.key, ran.dtype) == ("tuning_kernels:quick", True, (4, 3), "float32")
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
        "tuning_kernels:quick_for_few",
        "tuning_kernels:slow",
    ]
    (entry,) = found.entries
    assert (entry.kernel, entry.gain, entry.case) == ("tuning_kernels:slow", 1.0, "few, many")
    assert kernel(product, FEW, WEIGHT) == "slow"


def test_a_kernel_that_is_not_surely_faster_does_not_replace_the_default(add: Add) -> None:
    add(Loopback(offer("quick", priority=1), offer("quick_for_few")))
    (entry,) = tune(cases=["few"]).entries
    assert (entry.kernel, entry.gain) == ("tuning_kernels:quick", 1.0)


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
    assert (entry.kernel, entry.gain) == ("tuning_kernels:slow", 1.0)
    assert len(moods) < 340  # there was a second measurement


def test_the_reference_may_win_and_calls_the_kernels_that_won_before(add: Add) -> None:
    """Its product is tuned first, and with that one it beats the kernel for the whole."""
    add(Loopback(offer("whole", "tuning.composed"), offer("slow", priority=9), offer("quick")))
    assert kernel(composed, FEW, WEIGHT) == "whole"
    found = tune("tuning.composed", "tuning.product")
    assert [result.op for result in found.results][-1] == "tuning.composed"
    selection = kpt_core.explain(composed, FEW, WEIGHT)
    assert (selection.kernel, selection.tuned) == ("reference", True)
    assert [child.kernel for child in selection.children] == ["tuning_kernels:quick"]
    with kpt_core.record() as log:
        result = composed(FEW, WEIGHT)
    assert log == [selection]
    torch.testing.assert_close(result, FEW @ WEIGHT + 1)
    with kpt_core.use("loop"):  # what is asked for runs
        assert kernel(composed, FEW, WEIGHT) == "whole"


@pytest.mark.parametrize(("attribute", "said"), [("wrong", "its result is off by"), ("raising", "no such instruction")])
def test_what_is_wrong_or_raises_is_left_out_with_a_sentence(add: Add, attribute: str, said: str) -> None:
    add(Loopback(offer("slow", priority=9), offer(attribute), offer("quick")))
    found = tune(cases=["few"])
    (result,) = found.results
    (refusal,) = result.left_out
    assert refusal.kernel == f"tuning_kernels:{attribute}"
    assert said in refusal.reason
    assert "second line" not in refusal.reason
    assert found.entries[0].kernel == "tuning_kernels:quick"


def test_a_default_that_is_wrong_is_never_stored(add: Add) -> None:
    add(Loopback(offer("wrong", priority=9), offer("slow", priority=1)))
    (entry,) = tune(cases=["few"]).entries
    assert (entry.kernel, entry.default) == ("tuning_kernels:slow", "tuning_kernels:slow")


def test_what_is_right_is_told_by_references_alone(add: Add) -> None:
    """Here the composite's reference calls a wrong kernel, and is what is left out."""
    add(Loopback(offer("whole", "tuning.composed"), offer("wrong")))
    (result,) = tune("tuning.composed").results
    assert [refusal.kernel for refusal in result.left_out] == ["reference"]
    assert result.entry is not None
    assert result.entry.kernel == "tuning_kernels:whole"


def test_refused_kernels_are_reported_and_not_timed(add: Add) -> None:
    add(two(unsupported="refuses_many", requires={"warp"}))
    (few, many) = tune().results
    assert [refusal.reason for refusal in few.left_out] == ["needs warp, which cpu lacks"]
    kpt_core.remove_backend("loop")
    add(two(unsupported="refuses_many"))
    (few, many) = tune().results
    assert few.entry is not None
    assert few.entry.kernel == "tuning_kernels:quick"
    assert [refusal.reason for refusal in many.left_out] == ["100 rows; takes at most 8"]


def test_the_tuned_kernel_obeys_every_other_rule(add: Add, setting: Setting) -> None:
    """Its own refusal within the key, explicit choice, KPT_DISABLE."""
    backend = two(unsupported="refuses_many")
    add(backend)
    tune(cases=["few"])
    product.size_key = lambda x, weight: (4, 3)  # let a call that it refuses have its key
    try:
        selection = kpt_core.explain(product, MANY, WEIGHT)
    finally:
        product.size_key = tuning_kernels._size_key
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

    def fail(x: Tensor, weight: Tensor) -> Tensor:
        raise RuntimeError("broken today")

    monkeypatch.setattr(tuning_kernels, "quick", fail)
    kpt_core.refresh()
    with pytest.warns(kpt_core.KernelFailedWarning, match=r"tuning_kernels:quick raised .*tuning_kernels:slow ran"):
        product(FEW, WEIGHT)
    assert kernel(product, FEW, WEIGHT) == "slow"


def test_training_is_measured_for_itself(add: Add) -> None:
    add(Loopback(offer("slow", priority=9), offer("quick"), offer("wrong_gradient")))
    with_gradient = FEW.clone().requires_grad_()
    tune(cases=["few"])
    assert (kernel(product, FEW, WEIGHT), kernel(product, with_gradient, WEIGHT)) == ("quick", "slow")
    (result,) = tune(cases=["few"], training=True).results
    assert result.key == (4, 3, "gradient")
    assert [refusal.kernel for refusal in result.left_out] == ["tuning_kernels:wrong_gradient"]
    assert kernel(product, with_gradient, WEIGHT) == "quick"
    assert kpt_core.explain(product, with_gradient, WEIGHT).key == (4, 3, "gradient")


def test_the_best_configuration_is_kept_and_the_kernel_gets_it(add: Add) -> None:
    add(Loopback(offer("tiled", configs="tiles")))
    product(FEW, WEIGHT)
    assert SEEN[-1] == 16
    found = tune(cases=["few"])
    (entry,) = found.entries
    assert (entry.kernel, entry.config) == ("tuning_kernels:tiled", {"rows": 32})
    said = {refusal.kernel: refusal.reason for refusal in found.results[0].left_out}
    assert said.keys() == {f"tuning_kernels:tiled with {{'rows': {rows}}}" for rows in (66, 99)}
    product(FEW, WEIGHT)
    assert SEEN[-1] == 32
    assert kpt_core.explain(product, FEW, WEIGHT).config == {"rows": 32}
    assert "(tuned, rows=32)" in str(kpt_core.explain(product, FEW, WEIGHT))
    product(MANY, WEIGHT)
    assert SEEN[-1] == 16
    tune(cases=["few"])  # the default is tried as such, though a configuration is in force
    assert 16 in SEEN[-20:]
    assert kpt_core.tuned_config("tuning.product", "tuning_kernels:slow", FEW, WEIGHT) is None


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


def test_nothing_is_written_where_there_is_nothing_to_choose(folder: Path) -> None:
    found = tune()
    assert (found.entries, found.path) == ((), None)
    assert [result.entry for result in found.results] == [None, None]
    assert not folder.exists()


def test_a_dry_run_writes_nothing_and_changes_nothing(add: Add, folder: Path) -> None:
    add(two())
    assert tune(dry_run=True).entries
    assert not folder.exists()
    assert kernel(product, FEW, WEIGHT) == "slow"


def test_switched_off(add: Add, setting: Setting, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add(two())
    tune()
    setting("KPT_TUNING", "0")
    assert kernel(product, FEW, WEIGHT) == "slow"
    setting("KPT_TUNING", str(folder))
    assert kernel(product, FEW, WEIGHT) == "quick"


def test_the_user_s_table_lies_in_the_cache(
    add: Add, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: Setting
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    setting("KPT_TUNING", "")
    add(two())
    path = tune().path
    assert path is not None
    assert path.parent == tmp_path / "cache" / "kpt" / "tuning"
    document = json.loads(path.read_text())
    assert document["device"] == kpt_core.device_name("cpu")
    assert document["versions"] == {"torch": torch.__version__}
    assert kernel(product, FEW, WEIGHT) == "quick"


def test_a_file_of_its_own_is_not_in_force(add: Add, tmp_path: Path) -> None:
    add(two())
    assert tune(path=tmp_path / "mine.json").path == tmp_path / "mine.json"
    assert kernel(product, FEW, WEIGHT) == "slow"


def test_a_choice_in_force_is_refused(add: Add) -> None:
    add(two())
    with kpt_core.use("loop"), pytest.raises(InputError, match=r"loop was asked for .* take that back"):
        tune()


def test_unknown_names_offer_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'many'"):
        tune(cases=["mny"])
    with pytest.raises(UnknownNameError, match=r"did you mean 'tuning\.product'"):
        tune("tuning.prodct")


def test_ops_without_cases_are_named(add: Add) -> None:
    add(two())
    found = kpt_core.tune(["sample.scale", "tuning.product"], cases=["few"])
    assert list(found.skipped) == ["sample.scale"]
    assert len(found.entries) == 1
    assert tune("tuning.composed", training=True).skipped == {
        "tuning.composed": "its cases name no argument with a gradient"
    }


def test_progress_is_told(add: Add) -> None:
    add(two())
    told: list[tuple[int, int, str]] = []
    tune(on_progress=lambda *told_now: told.append(told_now))
    assert told == [(0, 2, "tuning.product: few"), (1, 2, "tuning.product: many")]


def test_a_key_that_json_would_change_is_refused(add: Add, monkeypatch: pytest.MonkeyPatch) -> None:
    add(two())
    monkeypatch.setattr(product, "size_key", lambda x, weight: (4, True))
    with pytest.raises(kpt_core.RegistrationError, match=r"tuning.product: its size_key gave \(4, True\)"):
        tune()


def test_large_cases_run_on_a_cpu_only_when_named() -> None:
    table: CaseTable = tuning_kernels.TABLES["tuning.product"]

    def names(*arguments: object) -> list[str]:
        found: list[Case] = kpt_core.model_cases(table, *arguments)  # type: ignore[arg-type]
        return [case.name for case in found]

    assert names(torch.device("cpu")) == ["few", "many"]
    assert names(torch.device("cuda")) == ["few", "many", "huge"]
    assert names(torch.device("cpu"), ["huge"]) == ["huge"]


def test_next_power_of_two() -> None:
    assert [kpt_core.next_power_of_two(size) for size in (0, 1, 2, 3, 4, 5, 63, 64, 65)] == [
        1, 1, 2, 4, 4, 8, 64, 64, 128,
    ]  # fmt: skip


def test_shipped_tables_serve_until_the_user_has_measured(
    add: Add, tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = two()
    add(backend)
    package = tmp_path / "shipping_backend"
    package.mkdir()
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    name = tune(cases=["few"], path=tmp_path / "found.json").device
    tables = package / "tuning"
    tables.mkdir()
    table = json.loads((tmp_path / "found.json").read_text())
    (tables / kpt_core._tuning.table_name(name)).write_text(json.dumps(table))
    monkeypatch.setattr(backend, "tuning", "shipping_backend:tuning", raising=False)
    kpt_core.refresh()
    assert kernel(product, FEW, WEIGHT) == "quick"
    table["entries"][0]["kernel"] = "tuning_kernels:slow"
    folder.mkdir()
    (folder / kpt_core._tuning.table_name(name)).write_text(json.dumps(table))
    kpt_core.refresh()
    assert kernel(product, FEW, WEIGHT) == "slow"
    monkeypatch.setattr(backend, "tuning", "no_such_package:tuning")
    kpt_core.refresh()
    with pytest.warns(TuningWarning, match=r"backend 'loop' at 'no_such_package:tuning': ignored, because ModuleNot"):
        product(FEW, WEIGHT)


def test_a_size_key_may_be_a_list(add: Add, monkeypatch: pytest.MonkeyPatch) -> None:
    add(two())
    monkeypatch.setattr(product, "size_key", lambda x, weight: [x.shape[0]])
    tune(cases=["few"])
    assert torch.equal(product(FEW, WEIGHT), FEW @ WEIGHT)
    assert kernel(product, FEW, WEIGHT) == "quick"


def test_a_kernel_gets_the_configuration_of_the_choice_inside_an_autograd_function_too(
    add: Add, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Autograd is off in there: by itself the kernel would take the configuration of calls without a gradient."""
    seen = []

    class Tiled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor, weight: Tensor) -> Tensor:
            seen.append(kpt_core.tuned_config("tuning.product", "tuning_kernels:tiled", x, weight))
            return x @ weight

    monkeypatch.setattr(tuning_kernels, "tiled", lambda x, weight: Tiled.apply(x, weight))
    tuning = replace(ENTRY, kernel="tuning_kernels:tiled", default="tuning_kernels:tiled")
    entries = [
        replace(tuning, config={"rows": 8}),
        replace(tuning, key=(*tuning.key, "gradient"), config={"rows": 32}),
    ]
    name = kpt_core.device_name("cpu")
    _tuning_files.merge_into(folder / _tuning.table_name(name), name, entries)
    add(Loopback(offer("tiled")))
    product(FEW, WEIGHT)
    product(FEW.clone().requires_grad_(), WEIGHT)
    assert seen == [{"rows": 8}, {"rows": 32}]


def test_tables_that_are_refreshed_while_they_are_read_do_not_stay(
    add: Add, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call reads the old table; meanwhile another thread tunes, or refreshes."""
    add(two())
    read = _tuning._read_tables

    def slowly(device: str, where: Path) -> list[kpt_core.TuningEntry]:
        found = read(device, where)
        monkeypatch.setattr(_tuning, "_read_tables", read)
        tune(cases=["few"])
        return found

    monkeypatch.setattr(_tuning, "_read_tables", slowly)
    product(FEW, WEIGHT)
    assert kernel(product, FEW, WEIGHT) == "quick"


def test_a_kernel_that_was_not_there_and_comes_first_is_not_overruled(add: Add) -> None:
    """Nobody knows whether the winner is faster than that one."""
    add(two())
    tune(cases=["few"])
    add(Loopback(offer("quick_for_few", priority=-1), name="later"))
    assert kernel(product, FEW, WEIGHT) == "quick"  # by its priority it would not run anyway
    kpt_core.remove_backend("later")
    add(Loopback(offer("quick_for_few", priority=10), name="better"))
    with pytest.warns(TuningWarning, match="quick_for_few comes first and was not there then; `kpt tune` measures"):
        product(FEW, WEIGHT)
    assert kernel(product, FEW, WEIGHT) == "quick_for_few"
    (entry,) = tune(cases=["few"]).entries
    assert entry.present == tuple(f"tuning_kernels:{name}" for name in ("quick_for_few", "slow", "quick"))
    assert kernel(product, FEW, WEIGHT) == "quick_for_few"
