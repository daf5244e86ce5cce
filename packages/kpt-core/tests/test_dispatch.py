"""Which kernel runs when nobody asked for one."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import kpt_core
from kpt_core import Backend, InputError, Kernel, PluginWarning, Selection, SignatureError
from loopback import Loopback, checked, hundreds, kernel, scale, shifted

Add = Callable[[Backend], Backend]


def refusals(selection: Selection) -> dict[str, str]:
    """Reasons by kernel attribute."""
    return {(refusal.kernel or refusal.backend).rpartition(":")[2]: refusal.reason for refusal in selection.refusals}


def test_without_backends_the_reference_runs(x: Tensor) -> None:
    assert torch.equal(scale(x, x, factor=3.0), torch.full((4,), 3.0))
    assert kpt_core.explain(scale, x, x).kernel == "reference"
    assert refusals(kpt_core.explain(scale, x, x)) == {"cpu backend": "none is installed"}


def test_the_kernel_of_highest_priority_runs_and_gets_every_argument(add: Add, x: Tensor) -> None:
    add(Loopback(kernel("first", priority=1), kernel("second", priority=7), kernel("third", priority=-3)))
    assert torch.equal(scale(x, x, factor=3.0), torch.full((4,), 203.0))
    assert kpt_core.explain(scale, x, x).kernel == "loopback:second"


@pytest.mark.parametrize("order", [("b", "a"), ("a", "b")])
def test_ties_go_by_backend_then_by_kernel_whatever_the_order_of_registration(
    add: Add, x: Tensor, order: tuple[str, str]
) -> None:
    offered = {"a": [kernel("third"), kernel("second")], "b": [kernel("first")]}
    for name in order:
        add(Loopback(*offered[name], name=name))
    assert hundreds(scale(x, x)) == 2


def test_a_kernel_runs_only_where_its_capabilities_are(add: Add, x: Tensor) -> None:
    wide = kernel("first", requires={"avx512", "amx"}, priority=2)
    add(Loopback(wide, kernel("second", requires={"avx512"}), capabilities={"avx512"}))
    assert hundreds(scale(x, x)) == 2
    assert refusals(kpt_core.explain(scale, x, x)) == {"first": "needs amx, which cpu lacks"}


def test_a_kernel_of_another_device_is_refused(add: Add, x: Tensor) -> None:
    add(Loopback(kernel("first"), device_type="cuda"))
    assert hundreds(scale(x, x)) == 0
    assert refusals(kpt_core.explain(scale, x, x)) == {"first": "runs on cuda; this call is on cpu"}


def test_an_unavailable_backend_is_refused_with_its_own_sentence(add: Add, x: Tensor) -> None:
    add(Loopback(kernel("first"), unavailable="needs Linux"))
    assert hundreds(scale(x, x)) == 0
    assert refusals(kpt_core.explain(scale, x, x)) == {"first": "needs Linux"}


@pytest.mark.parametrize("method", ["unavailable", "capabilities"])
def test_a_backend_that_raises_is_refused_and_the_others_serve(add: Add, x: Tensor, method: str) -> None:
    def fail(*_: object) -> None:
        raise OSError("driver too old")

    broken = Loopback(kernel("first", priority=9), name="broken")
    setattr(broken, method, fail)
    add(broken)
    add(Loopback(kernel("second")))
    assert hundreds(scale(x, x)) == 2
    assert refusals(kpt_core.explain(scale, x, x)) == {
        "first": "its backend failed to describe cpu: OSError: driver too old"
    }


@pytest.mark.parametrize("dtypes", [{"float64", "bfloat16"}, {torch.float64, torch.bfloat16}])
def test_dtypes_are_of_the_first_tensor(add: Add, x: Tensor, dtypes: set[object]) -> None:
    add(Loopback(kernel("first", dtypes=dtypes)))
    assert hundreds(scale(x, x.double())) == 0
    assert hundreds(scale(x.double(), x)) == 1
    assert refusals(kpt_core.explain(scale, x, x)) == {"first": "dtype float32; needs bfloat16 or float64"}


def test_a_refusal_is_asked_for_at_every_call(add: Add, x: Tensor) -> None:
    add(Loopback(kernel("first", unsupported="at_most_four_rows", priority=1), kernel("second")))
    large = torch.ones(5)
    assert [hundreds(scale(t, t)) for t in (x, large, x, large)] == [1, 2, 1, 2]
    assert refusals(kpt_core.explain(scale, large, large)) == {"first": "5 rows; takes at most 4"}


def test_a_bug_inside_a_refusal_is_no_refusal(add: Add, x: Tensor) -> None:
    add(Loopback(kernel("first", unsupported="buggy_refusal")))
    for call in (scale, scale.explain):
        with pytest.raises(ZeroDivisionError, match="a bug inside unsupported"):
            call(x, x)


def test_forward_only_is_refused_only_when_a_gradient_is_needed(add: Add, x: Tensor) -> None:
    add(Loopback(kernel("first", forward_only=True)))
    weight = torch.ones(4, requires_grad=True)
    assert hundreds(scale(x, x)) == 1
    assert hundreds(scale(x, weight)) == 0
    assert refusals(kpt_core.explain(scale, x, weight)) == {"first": "forward only, and a gradient is needed"}
    with torch.no_grad():
        assert hundreds(scale(x, weight)) == 1
    assert hundreds(scale(x, weight.detach())) == 1


def test_the_first_tensor_may_be_passed_by_keyword(add: Add, x: Tensor) -> None:
    add(Loopback(kernel("first", dtypes={"float32"})))
    assert hundreds(scale(x=x, weight=x)) == 1
    assert hundreds(scale(weight=x, x=x.double())) == 0


@pytest.mark.parametrize("warm", [False, True], ids=["first call", "short path"])
@pytest.mark.parametrize("wrong", [[1.0], 1.0, None, "x"])
def test_a_first_argument_that_is_no_tensor_is_named(x: Tensor, wrong: object, warm: bool) -> None:
    if warm:
        scale(x, x)
    with pytest.raises(
        InputError, match=f"sample.scale: the first argument must be a tensor, not {type(wrong).__name__}"
    ):
        scale(wrong, x)  # type: ignore[arg-type]


def test_no_first_argument_at_all(x: Tensor) -> None:
    with pytest.raises(InputError, match="first argument must be a tensor"):
        scale(weight=x)  # type: ignore[call-arg]


@pytest.mark.parametrize("call", [checked, checked.explain], ids=["call", "explain"])
def test_what_a_check_falls_over_is_named(call: Callable[..., object]) -> None:
    """The check asks for `x.shape`, and has a name of its own that means nothing to the caller."""
    with pytest.raises(InputError, match=r"^sample.checked: the first argument must be a tensor, not list"):
        call([1, 2])
    with pytest.raises(SignatureError) as caught:
        call(torch.ones(2), rwos=2)
    assert str(caught.value) == ("sample.checked: got an unexpected keyword argument 'rwos'; it takes (x, *, rows=2)")
    assert caught.value.__suppress_context__
    with pytest.raises(SignatureError, match=r"sample.checked: too many positional arguments; it takes"):
        call(torch.ones(2), 2)


def test_a_bug_inside_a_check_is_not_the_call_s(monkeypatch: pytest.MonkeyPatch) -> None:
    def buggy(x: Tensor, *, rows: int = 2) -> None:
        raise AttributeError("a bug inside the check")

    monkeypatch.setattr(checked, "check", buggy)
    with pytest.raises(AttributeError, match="a bug inside the check"):
        checked(torch.ones(2))


def test_the_check_runs_before_any_kernel(add: Add) -> None:
    add(Loopback(kernel("checked_first", "sample.checked")))
    assert hundreds(checked(torch.ones(2))) == 1
    for call in (checked, checked.explain):
        with pytest.raises(InputError, match="x must have 2 rows; got 3"):
            call(torch.ones(3))
    with pytest.raises(InputError, match="x must have 5 rows; got 2"):
        checked(torch.ones(2), rows=5)


def test_a_composite_is_served_at_either_level(add: Add, x: Tensor) -> None:
    assert shifted(x)[0] == 3
    add(Loopback(kernel("first")))
    assert shifted(x)[0] == 103
    add(Loopback(kernel("whole", "sample.shifted"), name="other"))
    assert shifted(x, 5.0)[0] == 407


def test_backends_take_effect_and_lose_it_at_once(add: Add, x: Tensor) -> None:
    assert hundreds(scale(x, x)) == 0
    add(Loopback(kernel("first")))
    assert hundreds(scale(x, x)) == 1
    assert scale.has_kernel(x)
    kpt_core.remove_backend("loop")
    assert hundreds(scale(x, x)) == 0
    assert not scale.has_kernel(x)


def test_a_backend_removed_while_its_kernel_runs_does_not_stay(
    add: Add, x: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(x: Tensor, weight: Tensor, *, factor: float = 1.0) -> Tensor:
        worker = threading.Thread(target=kpt_core.remove_backend, args=("loop",))
        worker.start()
        worker.join()
        return x + 100

    monkeypatch.setattr("loopback.first", slow)
    add(Loopback(kernel("first")))
    assert [hundreds(scale(x, x)) for _ in range(3)] == [1, 0, 0]


def test_one_function_claimed_by_two_backends_keeps_them_apart(add: Add, x: Tensor) -> None:
    add(Loopback(kernel("first", requires={"fast"}, priority=3), name="a", capabilities={"fast"}))
    add(Loopback(kernel("first", unsupported="at_most_four_rows", forward_only=True), name="b"))
    assert kpt_core.explain(scale, x, x).backend == "a"
    with kpt_core.use("b"):
        assert kpt_core.explain(scale, x, x).backend == "b"
        with pytest.raises(kpt_core.NoKernelError, match="5 rows"):
            scale(torch.ones(5), torch.ones(5))


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("no_such_module:kernel", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("loopback:no_such_kernel", "AttributeError: module 'loopback' has no attribute 'no_such_kernel'"),
        ("module_without_its_library:kernel", "OSError: libfast.so: cannot open shared object file"),
    ],
)
def test_a_kernel_that_cannot_be_loaded_costs_one_warning(
    add: Add, x: Tensor, target: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "raise OSError('libfast.so: cannot open shared object file')"
    (tmp_path / "module_without_its_library.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    add(Loopback(Kernel("sample.scale", target, priority=5), kernel("second")))
    with pytest.warns(PluginWarning) as warned:
        assert [hundreds(scale(t, t)) for t in (x, x.double(), x)] == [2, 2, 2]
    assert [str(w.message) for w in warned] == [f"KPT goes on without kernel {target}: could not be loaded: {reason}"]
    assert [w.filename for w in warned] == [__file__]
    assert [problem.plugin for problem in kpt_core.problems()] == [f"kernel {target}"]
    assert list(refusals(kpt_core.explain(scale, x, x)).values()) == [f"could not be loaded: {reason}"]


def test_a_kernel_is_imported_when_its_op_is_first_called(add: Add, x: Tensor) -> None:
    """Offering a kernel that can't be imported costs nothing while its needs aren't met."""
    add(Loopback(Kernel("sample.scale", "no_such_module:kernel", requires={"sm90"}), kernel("second", priority=-1)))
    assert hundreds(scale(x, x)) == 2
