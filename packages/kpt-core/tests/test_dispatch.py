"""Which kernel runs when nobody asked for one."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import kpt_core
from kpt_core import Backend, Call, InputError, Kernel, PluginWarning, RegistrationError, Selection, registry
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


def test_every_form_of_call_reaches_the_kernel_as_one_record(
    add: Add, x: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Call] = []
    monkeypatch.setattr("loopback.first", lambda call: seen.append(call) or x)
    add(Loopback(kernel("first")))
    for args, named in (((x, x), {}), ((x,), {"weight": x}), ((), {"weight": x, "x": x, "factor": 1.0})):
        scale(*args, **named)
    assert [call[2:] for call in seen] == [(1.0, (), None)] * 3
    (one, *_) = seen
    assert (one.factor, one.needs, one.config) == (1.0, (), None)
    assert one.x is x
    assert one._replace(factor=2.0).factor == 2.0
    assert one == scale.bind(x, weight=x)


@pytest.mark.parametrize("order", [("b", "a"), ("a", "b")])
def test_ties_go_by_backend_then_by_kernel_whatever_the_order_of_registration(
    add: Add, x: Tensor, order: tuple[str, str]
) -> None:
    offered = {"a": [kernel("third"), kernel("second")], "b": [kernel("first")]}
    for name in order:
        add(Loopback(*offered[name], name=name))
    assert hundreds(scale(x, x)) == 2


def test_plain_pytorch_comes_after_every_vendor_whatever_the_numbers(
    add: Add, list_torch: Callable[..., None], x: Tensor
) -> None:
    list_torch(kernel("first", priority=1000), kernel("second", requires={"host_memory"}, priority=2000))
    assert [kpt_core.explain(scale, x, x).backend, hundreds(scale(x, x))] == ["torch", 2]
    add(Loopback(kernel("third", priority=-1000), name="zzz"))
    assert hundreds(scale(x, x)) == 3
    assert refusals(kpt_core.explain(scale, x.to("meta"), x.to("meta"))) == {
        "third": "runs on cpu; this call is on meta",
        "second": "needs host_memory, which meta lacks",
    }


def test_a_kernel_runs_only_where_its_capabilities_are(add: Add, x: Tensor) -> None:
    wide = kernel("first", requires={"avx512", "amx"}, priority=2)
    add(Loopback(wide, kernel("second", requires={"avx512"}), capabilities={"avx512"}))
    assert hundreds(scale(x, x)) == 2
    assert refusals(kpt_core.explain(scale, x, x)) == {"first": "needs amx, which cpu lacks"}


def test_a_kernel_of_another_device_is_refused(add: Add, x: Tensor) -> None:
    add(Loopback(kernel("first"), device_types=("cuda", "hip")))
    assert hundreds(scale(x, x)) == 0
    assert refusals(kpt_core.explain(scale, x, x))["first"] == "runs on cuda and hip; this call is on cpu"


def test_an_unavailable_backend_is_refused_with_its_own_sentence(add: Add, x: Tensor) -> None:
    add(Loopback(kernel("first"), unavailable="needs Linux"))
    assert hundreds(scale(x, x)) == 0
    assert refusals(kpt_core.explain(scale, x, x)) == {"first": "needs Linux"}


@pytest.mark.parametrize("dtypes", [{"float64", "bfloat16"}, {torch.float64, torch.bfloat16}])
def test_dtypes_are_of_the_first_tensor(add: Add, x: Tensor, dtypes: set[str]) -> None:
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


@pytest.mark.parametrize("answer", [False, True, 0])
def test_an_answer_that_is_no_sentence_is_no_refusal(
    add: Add, x: Tensor, answer: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loopback.never_refuses", lambda call: answer)
    add(Loopback(kernel("first", unsupported="never_refuses")))
    for call in (scale, scale.explain):
        with pytest.raises(RegistrationError, match=f"loopback:never_refuses gave {answer}; expected None, a sentence"):
            call(x, x)


def test_nobody_reads_a_refusal_and_so_no_string_is_built(add: Add, x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    class Counted:
        said = 0

        def __str__(self) -> str:
            Counted.said += 1
            return "many rows"

    monkeypatch.setattr("loopback.never_refuses", lambda call: kpt_core.Refusal("{rows}", rows=Counted()))
    add(Loopback(kernel("first", unsupported="never_refuses", priority=1), kernel("second")))
    assert [hundreds(scale(x, x)) for _ in range(3)] == [2, 2, 2]
    with kpt_core.record() as log:
        scale(x, x)
    torch.compile(lambda x: scale(x, x), backend="eager")(x)
    assert Counted.said == 0
    assert log[0].refusals[0].reason == "many rows"
    assert Counted.said == 1


def test_forward_only_is_refused_only_when_a_gradient_is_needed(add: Add, x: Tensor) -> None:
    add(Loopback(kernel("first")))
    weight = torch.ones(4, requires_grad=True)
    assert hundreds(scale(x, x)) == 1
    assert hundreds(scale(x, weight)) == 0
    assert refusals(kpt_core.explain(scale, x, weight)) == {"first": "forward only, and a gradient is needed"}
    with torch.no_grad():
        assert hundreds(scale(x, weight)) == 1
    assert hundreds(scale(x, weight.detach())) == 1


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("warm", [False, True], ids=["first call", "short path"])
@pytest.mark.parametrize("wrong", [[1.0], 1.0, None, "x"])
def test_an_argument_that_is_no_tensor_is_named(x: Tensor, wrong: object, warm: bool, compiled: bool) -> None:
    if warm:
        scale(x, x)
    call = torch.compile(lambda a, b: scale(a, b), backend="eager") if compiled else scale
    for name, args in (("x", (wrong, x)), ("weight", (x, wrong))):
        with pytest.raises(InputError, match=f"sample.scale: {name} must be a tensor; got {type(wrong).__name__}"):
            call(*args)


@pytest.mark.parametrize("call", [checked, checked.explain], ids=["call", "explain"])
def test_wrong_arguments_are_a_type_error_of_the_op(call: Callable[..., object]) -> None:
    for args, named in (((), {}), ((torch.ones(2), 2), {}), ((torch.ones(2),), {"rwos": 2})):
        with pytest.raises(TypeError, match=r"sample\.checked"):
            call(*args, **named)


def test_the_check_runs_before_any_kernel(add: Add, monkeypatch: pytest.MonkeyPatch) -> None:
    add(Loopback(kernel("checked_first", "sample.checked")))
    assert hundreds(checked(torch.ones(2))) == 1
    compiled = torch.compile(lambda x: checked(x), backend="eager")
    for call in (checked, checked.explain, compiled):
        with pytest.raises(InputError, match="x must have 2 rows; got 3"):
            call(torch.ones(3))
    with pytest.raises(InputError, match="x must have 5 rows; got 2"):
        checked(torch.ones(2), rows=5)
    monkeypatch.setattr(checked, "check", lambda call: call.no_such_argument)
    with pytest.raises(AttributeError, match="no_such_argument"):  # a bug in the check is not the caller's
        checked(torch.ones(2))


def test_a_composite_is_served_at_either_level(add: Add, list_torch: Callable[..., None], x: Tensor) -> None:
    assert shifted(x)[0] == 3
    list_torch(kernel("parts", "sample.shifted", composed_of=("sample.scale",)))
    add(Loopback(kernel("first")))
    assert shifted(x)[0] == 103
    add(Loopback(kernel("whole", "sample.shifted"), name="other"))
    assert shifted(x, 5.0)[0] == 407


def test_backends_take_effect_and_lose_it_at_once(add: Add, x: Tensor) -> None:
    assert hundreds(scale(x, x)) == 0
    add(Loopback(kernel("first")))
    assert hundreds(scale(x, x)) == 1
    registry.remove_backend("loop")
    assert hundreds(scale(x, x)) == 0


def test_a_backend_removed_while_its_kernel_runs_does_not_stay(
    add: Add, x: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(call: Call) -> Tensor:
        worker = threading.Thread(target=registry.remove_backend, args=("loop",))
        worker.start()
        worker.join()
        return call.x + 100

    monkeypatch.setattr("loopback.first", slow)
    add(Loopback(kernel("first")))
    assert [hundreds(scale(x, x)) for _ in range(3)] == [1, 0, 0]


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("no_such_module:kernel", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("loopback:no_such_kernel", "AttributeError: module 'loopback' has no attribute 'no_such_kernel'"),
        ("module_without_its_library:kernel", "OSError: libfast.so: cannot open shared object file"),
        ("module_that_leaves:kernel", "SystemExit: no licence"),
        ("module_of_old:kernel", "RegistrationError: module_of_old:kernel must take 1 argument: missing a required"),
        ("module_of_old:SIZE", "RegistrationError: module_of_old:SIZE must take 1 argument: 3 is not a callable"),
    ],
)
def test_a_kernel_that_cannot_be_loaded_costs_one_warning_and_only_when_it_would_run(
    add: Add, x: Tensor, target: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "raise OSError('libfast.so: cannot open shared object file')"
    (tmp_path / "module_without_its_library.py").write_text(source)
    (tmp_path / "module_that_leaves.py").write_text("import sys\nsys.exit('no licence')")
    (tmp_path / "module_of_old.py").write_text("SIZE = 3\ndef kernel(x, weight, *, factor=1.0):\n    return x")
    monkeypatch.syspath_prepend(tmp_path)
    broken = Kernel("sample.scale", target)
    add(Loopback(broken, kernel("second", priority=5)))
    assert [hundreds(scale(t, t)) for t in (x, x.double())] == [2, 2]
    assert registry.problems() == ()
    registry.remove_backend("loop")
    add(Loopback(Kernel("sample.scale", target, priority=5), kernel("second")))
    with pytest.warns(PluginWarning) as warned:
        assert [hundreds(scale(t, t)) for t in (x, x.double(), x)] == [2, 2, 2]
    (warning,) = warned
    said = f"KPT goes on without kernel loop/sample.scale/{target}: could not be loaded: {reason}"
    assert str(warning.message).startswith(said)
    assert warning.filename == __file__
    assert [problem.plugin for problem in registry.problems()] == [f"kernel loop/sample.scale/{target}"]
    (refusal,) = refusals(kpt_core.explain(scale, x, x)).values()
    assert refusal.startswith(f"could not be loaded: {reason}")


def test_targets_may_lie_inside_a_class(add: Add, x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    class Holder:
        @staticmethod
        def inner(call: Call) -> Tensor:
            return call.x + 700

    monkeypatch.setattr("loopback.Holder", Holder, raising=False)
    add(Loopback(kernel("Holder.inner")))
    assert hundreds(scale(x, x)) == 7
    assert kpt_core.explain(scale, x, x).kernel == "loopback:Holder.inner"
