"""Checks of ops rather than of kernels find their faults; and how subjects are chosen."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch._inductor.config
from torch import Tensor

import honest
import kpt_core
from kpt_conformance.checks import accelerators, declarations, gradients, randomness, results, transforms, values
from kpt_conformance.checks.catalog import CHECKS
from kpt_conformance.comparison import Outcome, assert_reference_sound, assert_right, assert_same_bits, same_bits
from kpt_conformance.extent import extent_of
from kpt_conformance.loopback import Loopback
from kpt_conformance.subject import Subject
from kpt_conformance.suite import device_of, subjects, trials
from kpt_conformance.trial import Trial
from kpt_core import Call
from kpt_core.contract import TORCH
from kpt_core.selection import REFERENCE
from kpt_optimize.cases import Accuracy, Case, CaseTable, case_tables
from scaled_mm import SCALED_MM, scaled_mm

TABLES = {**case_tables(), SCALED_MM.op: SCALED_MM}
GROUPED_MM = TABLES["moe.grouped_mm"]
CPU = torch.device("cpu")
_numbers = itertools.count()
grouped_mm = kpt_core.get_op("moe.grouped_mm")


@pytest.fixture
def loopback() -> Iterator[Loopback]:
    with Loopback("planted") as backend:
        yield backend


def trial_of(op: str) -> Trial:
    """Of the only subject that there is for an op."""
    (subject,) = (subject for subject, _ in subjects("planted") if subject.op.name == op)
    return Trial(subject, TABLES[op], TABLES[op].cases[0], torch.float32)


def op_of(body: Callable[..., Any], table: CaseTable = GROUPED_MM, **settings: Any) -> Trial:
    """A trial of the reference of an op that is made of this body."""
    made = kpt_core.op(f"faulty.op_{next(_numbers)}", **settings)(body)
    return Trial(Subject(made, REFERENCE, REFERENCE, CPU), table, table.cases[0], torch.float32)


class _HalfGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] / 2


class _Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x.detach() * grads[0]  # no function of x any more


@pytest.mark.parametrize("change", [_HalfGradient, _Squared])
def test_a_wrong_derivative_of_a_reference_is_found(change: Any) -> None:
    def body(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
        out: Tensor = grouped_mm.reference(change.apply(x), weight, offsets)
        return out

    gradients.derivatives(op_of(grouped_mm.reference))
    with pytest.raises(RuntimeError, match="Jacobian"):
        gradients.derivatives(op_of(body))


def test_a_reference_that_is_wrong_on_meta_is_found() -> None:
    def body(x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor) -> Tensor:
        return scaled_mm.reference(x, weight, x_scale, weight_scale).to(torch.float16 if x.is_meta else x.dtype)

    with pytest.raises(AssertionError, match="float16"):
        results.meta_result(op_of(body, SCALED_MM))


@pytest.mark.parametrize(
    "fake",
    [
        lambda call: call.x.new_empty(call.weight.shape[2], call.x.shape[0]),
        lambda call: call.x.new_empty(call.x.shape[0], call.weight.shape[2], dtype=torch.float64),
    ],
    ids=["shape", "dtype"],
)
def test_a_wrong_fake_is_found(fake: Callable[[Call], Tensor]) -> None:
    trial = op_of(grouped_mm.reference, fake=fake)
    with pytest.raises(AssertionError, match="on fake tensors it gives something else"):
        results.fake_result(trial)
    with pytest.raises(Exception, match="opcheck"):
        transforms.custom_ops(trial)


@pytest.mark.parametrize("check", [transforms.compiled, transforms.exported])
def test_an_op_that_reads_values_before_dispatch_is_found(check: Callable[[Trial], None]) -> None:
    def reads_the_end(call: Call) -> None:
        if int(call.offsets[-1]) > call.x.shape[0]:
            raise kpt_core.InputError("offsets end past x")

    check(op_of(grouped_mm.reference))
    with pytest.raises(torch._subclasses.fake_tensor.DataDependentOutputException):
        check(op_of(grouped_mm.reference, check=reads_the_end))


def test_an_op_that_fixes_sizes_is_found(loopback: Loopback) -> None:
    def fake(call: Call) -> Tensor:
        return call.x.new_empty(int(call.x.shape[0]), call.weight.shape[2])

    for settings, fault in (({}, None), ({"fake": fake}, "specialized it to be a constant")):
        trial = op_of(grouped_mm.reference, **settings)
        op = trial.subject.op
        kernel = loopback.offer(op.name, *honest.grouped_mm_of())
        of_kernel = replace(trial, subject=Subject(op, kernel.forward, loopback.name, CPU, kernel))
        with pytest.raises(Exception, match=fault) if fault else nullcontext():
            transforms.compiled_sizes(of_kernel)


def test_a_reference_that_is_not_mapped_is_found() -> None:
    def body(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
        return honest.product(x, weight, offsets)

    transforms.vmapped(op_of(grouped_mm.reference))
    trial = op_of(body, fake=lambda call: call.x.new_empty(call.x.shape[0], call.weight.shape[2]))
    with pytest.raises(RuntimeError, match="vmap"):
        transforms.vmapped(trial)


def test_an_op_that_autocast_does_not_convert_is_found(loopback: Loopback, monkeypatch: pytest.MonkeyPatch) -> None:
    loopback.offer("moe.experts", honest.Experts(), differentiable=True)
    trial = trial_of("moe.experts")
    transforms.autocast(trial)
    monkeypatch.setattr("kpt_core.dispatch.call.converted", lambda op, call: call)
    with pytest.raises(AssertionError, match="float32 under autocast; expected"):
        transforms.autocast(trial)


def test_of_a_result_without_elements_there_are_no_statistics() -> None:
    def body(cache: Tensor, rows: Tensor, *, seed: int = 0, offset: int = 0) -> Tensor:
        return rows.clone()

    table = CaseTable(
        op="faulty.random",
        build=lambda generator: {
            "cache": torch.ones(4, 3, dtype=torch.float64),
            "rows": torch.ones(0, 3, dtype=torch.float64),
        },
        cases=(Case(name="no rows"),),
    )
    randomness.statistics(op_of(body, table, random=True, mutates=("cache",)))


def test_the_code_of_an_8_bit_nan_counts_where_bits_do() -> None:
    first, second = (torch.tensor([0x7F, 1, code], dtype=torch.uint8).view(torch.float8_e4m3fn) for code in (127, 255))
    assert not same_bits(first, second)
    baseline = Outcome({"result": first}, {}, exact=True)
    with pytest.raises(AssertionError, match=r"nan \(0xFF\), expected nan \(0x7F\)"):
        assert_right(Outcome({"result": second}, {}), baseline, baseline)


def test_truths_of_real_models_are_kept_by_their_values(loopback: Loopback) -> None:
    model = Case(name="a model", sizes={"rows": 5}, model=True)
    loopback.offer("moe.grouped_mm", *honest.grouped_mm_of())
    trial = replace(trial_of("moe.grouped_mm"), case=model)
    arguments = trial.arguments()
    baseline, oracle = trial.truth(arguments)
    again = replace(trial, subject=replace(trial.subject, target="another")).truth(dict(arguments))
    assert again[0] is baseline
    assert again[1].outputs is oracle.outputs
    arguments["x"][-1] *= 2
    assert not torch.equal(trial.truth(arguments)[1].outputs["result"], oracle.outputs["result"])


def test_a_kernel_that_takes_no_named_case_is_asked_with_another(loopback: Loopback) -> None:
    loopback.offer(
        "moe.grouped_mm",
        *honest.grouped_mm_of(),
        unsupported=lambda call: None if call.x.shape[1] % 32 == 0 and call.x.shape[1] < 64 else "needs 32 of K",
    )
    trial = trial_of("moe.grouped_mm")
    assert trial.arguments()["x"].shape == (32, 32)
    with pytest.raises(pytest.skip.Exception, match="needs 32 of K"):
        replace(trial, case=trial.table.cases[4]).arguments()


def test_the_sign_of_infinity_matters() -> None:
    def outcome(last: float) -> Outcome:
        return Outcome({"result": torch.tensor([1.0, 2.0, last])}, {})

    infinity = float("inf")
    assert_right(outcome(infinity), outcome(infinity), outcome(infinity))
    with pytest.raises(
        AssertionError, match=r"^here: result: 1 of 3 elements are NaN or infinite .* at \[2\]: -inf, expected inf"
    ):
        assert_right(outcome(-infinity), outcome(infinity), outcome(infinity), "here")


def _of(values: Tensor, **settings: Any) -> Outcome:
    return Outcome({"result": values}, {}, **settings)


def test_a_table_may_narrow_and_widen_the_bounds_of_a_result() -> None:
    want = torch.ones(100_000)
    off = torch.full_like(want, 2.0**-20)
    for times, bounds, right in (
        (1.05, None, True),
        (1.05, (0.9, 2.0), False),
        (2.5, None, False),
        (2.5, (3, 6), True),
    ):
        tolerances = {} if bounds is None else {"result": Accuracy(*bounds, reason="as its paper says")}
        with nullcontext() if right else pytest.raises(AssertionError, match="error"):
            assert_right(_of(want + times * off), _of(want + off), _of(want.double(), tolerances=tolerances))


@pytest.mark.parametrize(("error", "terms", "right"), [(1e-8, 1.0, True), (1e-8, 0.0, False), (1e-4, 1.0, False)])
def test_where_terms_cancel_rounding_is_as_large_as_they_are(error: float, terms: float, right: bool) -> None:
    zero = torch.zeros(24)
    oracle = _of(zero.double(), terms=lambda: {"result": torch.full((24,), terms)})
    with nullcontext() if right else pytest.raises(AssertionError, match="exceeds"):
        assert_right(_of(zero + error), _of(zero), oracle)


def test_a_failed_comparison_is_shown_where_it_was_asked_for() -> None:
    zeros, ones = _of(torch.zeros(3)), _of(torch.ones(3))
    for compare in (
        lambda: assert_right(ones, zeros, zeros),
        lambda: assert_reference_sound(ones, zeros, torch.float32, 1),
        lambda: assert_same_bits(ones.outputs, zeros.outputs, "differs"),
    ):
        with pytest.raises(AssertionError) as raised:
            compare()
        assert {str(entry.path) for entry in raised.traceback.filter(raised)} == {__file__}


def test_where_terms_don_t_cancel_nothing_more_is_allowed() -> None:
    want = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    oracle = _of(want.double(), terms=lambda: {"result": torch.ones(100_000)})
    with pytest.raises(AssertionError, match="exceeds"):
        assert_right(_of(want * (1 + 2.0**-23)), _of(want), oracle)


def test_the_terms_of_a_softmax_s_gradient_are_measured() -> None:
    table = TABLES["moe.top_k_gating"]
    trial = Trial(Subject(kpt_core.get_op(table.op), REFERENCE, REFERENCE, CPU), table, table.cases[0], torch.float32)
    arguments = trial.arguments()
    for cotangent, cancels in ((None, False), (torch.ones_like, True)):
        _, oracle = trial.truth(arguments, cotangent=cotangent)
        assert oracle.terms is not None
        size = oracle.gradients["logits"].abs().mean()
        assert (oracle.terms()["gradient of logits"].mean() > 1e6 * size) == cancels


def test_a_kernel_that_is_wrong_for_some_number_of_rows_is_found_when_compiled(loopback: Loopback) -> None:
    def product(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
        return honest.product(x, weight, offsets) * (2 if x.shape[0] == 65 else 1)

    loopback.offer("moe.grouped_mm", *honest.grouped_mm_of(product))
    with pytest.raises(AssertionError, match="compiled, with 65 rows"):
        transforms.compiled_sizes(trial_of("moe.grouped_mm"))


def test_what_inductor_makes_of_it_is_what_is_tried(loopback: Loopback) -> None:
    def fault(graph: torch.fx.Graph) -> None:
        raise RuntimeError("planted in Inductor")

    loopback.offer("moe.grouped_mm", *honest.grouped_mm_of())
    trial = trial_of("moe.grouped_mm")
    transforms.inductor(trial)
    with torch._inductor.config.patch(post_grad_custom_post_pass=fault), pytest.raises(Exception, match="planted in"):
        transforms.inductor(trial)


@pytest.mark.parametrize(
    "check",
    [
        accelerators.no_host_sync,
        accelerators.graph_capture,
        accelerators.other_streams,
        accelerators.second_device,
        accelerators.past_int32,
    ],
)
def test_what_asks_for_a_gpu_is_said_to_be_absent(check: Callable[[Trial], None], loopback: Loopback) -> None:
    loopback.offer("moe.grouped_mm", *honest.grouped_mm_of())
    with pytest.raises(pytest.skip.Exception, match=r"^absent: "):
        check(trial_of("moe.grouped_mm"))


def _twice(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    return 2 * honest.product(x, weight, offsets)


def test_a_composite_kernel_is_tried_through_its_parts(loopback: Loopback) -> None:
    loopback.offer("moe.grouped_mm", *honest.grouped_mm_of())
    trial = trial_of("moe.experts")
    assert (trial.subject.composite, trial.subject.children) == (True, ("moe.grouped_mm",))
    assert trial.subject.target.endswith("+planted")
    values.values(trial)
    loopback.offer("moe.grouped_mm", *honest.grouped_mm_of(_twice), priority=1)
    with pytest.raises(AssertionError, match="error"):
        values.values(trial)


def test_parts_may_refuse_what_backward_asks(loopback: Loopback) -> None:
    def unsupported(call: Call) -> str | None:
        return "needs a transposed weight" if call.weight.is_contiguous() else None

    loopback.offer("moe.grouped_mm", *honest.grouped_mm_of(), unsupported=unsupported)
    trial = trial_of("moe.experts")
    with pytest.raises(pytest.skip.Exception, match=r"(?s)refused: .*needs a transposed weight"):
        values.values(trial)
    few = replace(trial.table, cases=trial.table.cases[:1])
    with pytest.raises(pytest.skip.Exception, match="the kernels of its parts refuse every case"):
        declarations.declaration(trial.subject, few)


def test_the_kernels_of_torch_are_tried_with_their_own_parts() -> None:
    offered, torch_backend = {subject.target: subject for subject, _ in subjects(TORCH)}, kpt_core.backends()[TORCH]
    able = torch_backend.capabilities(torch.device("cpu"))
    # Those for GPUs are tried where one is.
    assert offered.keys() == {kernel.forward for kernel in torch_backend.kernels() if kernel.requires <= able}
    assert len(offered) < len(list(torch_backend.kernels()))
    composed = [subject for subject in offered.values() if subject.children]
    assert composed
    assert not any(subject.composite or subject.direct for subject in offered.values())


def test_a_kernel_that_is_forced_to_run_still_refuses() -> None:
    with Loopback("planted", device_type="cuda") as backend:
        backend.offer("moe.grouped_mm", *honest.grouped_mm_of(_twice), unsupported=lambda call: "wants other rows")
        ((subject, _),) = subjects("planted", "cpu")
        assert subject.direct
        with pytest.raises(pytest.skip.Exception, match="wants other rows"):
            values.values(Trial(subject, GROUPED_MM, GROUPED_MM.cases[0], torch.float32))
        with pytest.raises(AssertionError, match="it refuses every case"):
            declarations.declaration(subject, GROUPED_MM)


@pytest.mark.parametrize("check", [values.values, transforms.compiled, transforms.exported])
def test_a_kernel_is_forced_to_run_on_another_device(check: Callable[[Trial], None]) -> None:
    with Loopback("planted", device_type="cuda") as backend:
        backend.offer("moe.grouped_mm", *honest.grouped_mm_of())
        ((right, _),) = subjects("planted", "cpu")
        check(Trial(right, GROUPED_MM, GROUPED_MM.cases[0], torch.float32))
    with Loopback("planted", device_type="cuda") as backend:
        backend.offer("moe.grouped_mm", *honest.grouped_mm_of(_twice))
        ((wrong, _),) = subjects("planted", "cpu")
        if check is not transforms.exported:  # which compares the program with the kernel itself
            with pytest.raises(AssertionError, match="error"):
                check(Trial(wrong, GROUPED_MM, GROUPED_MM.cases[0], torch.float32))


def test_a_kernel_of_no_dtype_of_the_table_is_said(loopback: Loopback) -> None:
    loopback.offer("moe.grouped_mm", *honest.grouped_mm_of(), dtypes={"int8"})
    trial = trial_of("moe.grouped_mm")
    with pytest.raises(AssertionError, match="it takes none of the dtypes"):
        declarations.declaration(trial.subject, trial.table)


def test_devices_are_named_as_tensors_name_them() -> None:
    assert [str(device_of(name)) for name in ("cpu", "cpu:0", "cuda", "cuda:1")] == ["cpu", "cpu", "cuda:0", "cuda:1"]
    with pytest.raises(kpt_core.InputError, match="'gpu' is no device"):
        device_of("gpu")


def test_every_check_has_trials(loopback: Loopback) -> None:
    loopback.offer("moe.grouped_mm", *honest.grouped_mm_of())
    some = [trial_of("moe.grouped_mm").subject, Subject(grouped_mm, REFERENCE, REFERENCE, CPU)]
    table = replace(GROUPED_MM, cases=GROUPED_MM.cases[:1])
    for check in CHECKS:
        assert any(any(trials(subject, table, extent_of(check))) for subject in some), check.__name__
