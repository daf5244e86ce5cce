"""The suite tries ops of every kind: that mutate, that take lists, give several results, or draw random numbers."""

import contextlib
import itertools
from dataclasses import replace

import pytest
import torch

import kpt_core
from kpt_conformance.checks import declarations
from kpt_conformance.checks.catalog import CHECKS
from kpt_conformance.checks.values import telling
from kpt_conformance.drawing import drawn_cases
from kpt_conformance.extent import extent_of
from kpt_conformance.loopback import Loopback
from kpt_conformance.subject import Subject
from kpt_conformance.suite import trials
from kpt_conformance.trial import Trial
from kpt_core.selection import REFERENCE
from sample_ops import SAMPLES

CPU = torch.device("cpu")
CHECK = {check.__name__: check for check in CHECKS}
PARTS = [(name, check) for name in SAMPLES for check in CHECK]


def run(check: str, subject: Subject) -> None:
    for trial in trials(subject, SAMPLES[subject.op.name][1], extent_of(CHECK[check])):
        with contextlib.suppress(pytest.skip.Exception):
            CHECK[check](trial)


@pytest.mark.parametrize(("name", "check"), PARTS)
def test_references_pass(name: str, check: str) -> None:
    run(check, Subject(kpt_core.get_op(name), REFERENCE, REFERENCE, CPU))


@pytest.mark.parametrize(("name", "check"), PARTS)
def test_right_kernels_pass(name: str, check: str) -> None:
    functions, table = SAMPLES[name]
    with Loopback() as loopback:
        kernel = loopback.offer(name, *functions)
        subject = Subject(kpt_core.get_op(name), kernel.forward, loopback.name, CPU, kernel)
        run(check, subject)
        declarations.declaration(subject, table)


def broken(name: str, forward, found_by: str) -> None:
    functions, _ = SAMPLES[name]
    with Loopback() as loopback:
        kernel = loopback.offer(name, forward, *functions[1:])
        with pytest.raises(AssertionError):
            run(found_by, Subject(kpt_core.get_op(name), kernel.forward, loopback.name, CPU, kernel))


def test_a_wrong_final_state_is_found() -> None:
    def forgets_the_last(call):
        keep = call.places[:-1]
        before = call.cache.index_select(0, call.places)
        call.cache.index_copy_(0, keep, call.rows[:-1])
        return before

    broken("sample.write_rows", forgets_the_last, "values")


def test_a_change_of_what_is_not_to_be_mutated_is_found() -> None:
    def writes_and_clears(call):
        before = call.cache.index_select(0, call.places)
        call.cache.index_copy_(0, call.places, call.rows)
        call.rows.zero_()
        return before

    broken("sample.write_rows", writes_and_clears, "inputs_unchanged")


def test_a_wrong_second_result_is_found() -> None:
    def always_the_first(call):
        values, index = SAMPLES["sample.largest"][0][0](call)
        return values, torch.zeros_like(index)

    broken("sample.largest", always_the_first, "values")


def test_another_seed_is_found() -> None:
    def forgets_the_offset(call):
        return SAMPLES["sample.dropout"][0][0](call._replace(offset=0))

    broken("sample.dropout", forgets_the_offset, "values")


def test_a_draw_of_another_distribution_is_found() -> None:
    def loses_more(call):
        return SAMPLES["sample.dropout"][0][0](call._replace(rate=0.75))

    broken("sample.dropout", loses_more, "statistics")


def test_numbers_that_do_not_depend_on_the_seed_are_found() -> None:
    def forgets_the_seed(call):
        return SAMPLES["sample.dropout"][0][0](call._replace(seed=0))

    broken("sample.dropout", forgets_the_seed, "replayed")


def test_numbers_of_the_global_generator_are_found() -> None:
    def draws(call):
        return torch.where(torch.rand(call.x.shape) >= call.rate, call.x, 0)

    broken("sample.dropout", draws, "replayed")


def test_a_last_bit_is_found_where_results_are_exact() -> None:
    def multiplies(call):
        return call.x * (1 / call.by)

    broken("sample.divide", multiplies, "values")
    _, table = SAMPLES["sample.divide"]
    for exact, right in ((False, True), (frozenset({"result"}), False), (frozenset({"result 1"}), True)):
        with Loopback() as loopback:
            kernel = loopback.offer("sample.divide", multiplies)
            subject = Subject(kpt_core.get_op("sample.divide"), kernel.forward, loopback.name, CPU, kernel)
            trial = Trial(subject, replace(table, exact=exact), table.cases[0], torch.float32)
            with contextlib.nullcontext() if right else pytest.raises(AssertionError, match="have other bits"):
                CHECK["values"](trial)


def test_what_differs_in_float8_is_said() -> None:
    def halves(call):
        codes, scales = SAMPLES["sample.quantise_rows"][0][0](call)
        return (codes.float() / 2).to(codes.dtype), scales

    _, table = SAMPLES["sample.quantise_rows"]
    for exact, said in ((True, "result 0: 40 of 40 elements have other bits"), (False, "result 0: mean error")):
        with Loopback() as loopback:
            kernel = loopback.offer("sample.quantise_rows", halves)
            subject = Subject(kpt_core.get_op("sample.quantise_rows"), kernel.forward, loopback.name, CPU, kernel)
            trial = Trial(subject, replace(table, exact=exact), table.cases[1], torch.float32)
            with pytest.raises(AssertionError, match=said):
                CHECK["values"](trial)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_case_of_an_exact_op_has_ties_and_zeros(dtype: torch.dtype) -> None:
    def reciprocal(call):
        return SAMPLES["sample.quantise_rows"][0][0](call, lambda part, scale: part * (1 / scale))

    def unsigned(call):
        codes, scales = SAMPLES["sample.quantise_rows"][0][0](call)
        return torch.where(codes.float() == 0, 0, codes.float()).to(codes.dtype), scales

    def no_scale_of_zero_rows(call):
        codes, scales = SAMPLES["sample.quantise_rows"][0][0](call)
        return codes, scales.masked_fill(~call.x.any(1, keepdim=True), 0)

    _, table = SAMPLES["sample.quantise_rows"]
    drawn = next(c for c in drawn_cases(table) if c.sizes["block"] > 1 and not c.sizes["power_of_two"])
    for case, wrong in itertools.product((table.cases[0], drawn), (reciprocal, unsigned, no_scale_of_zero_rows)):
        with Loopback() as loopback:
            kernel = loopback.offer("sample.quantise_rows", wrong)
            subject = Subject(kpt_core.get_op("sample.quantise_rows"), kernel.forward, loopback.name, CPU, kernel)
            with pytest.raises(AssertionError, match=r"with ties and zeros in x: result .* other bits"):
                CHECK["values"](Trial(subject, table, case, dtype))


@pytest.mark.parametrize("coarse", [torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16], ids=str)
def test_ties_are_half_way_between_two_numbers(coarse: torch.dtype) -> None:
    numbers = telling(torch.ones(9, 64), [coarse, torch.float8_e8m0fnu, torch.int64]).double()
    assert not numbers[2::3].any()
    assert numbers[2::3].signbit().any()
    assert not numbers[2::3].signbit().all()
    plain = numbers[1]
    ties = plain[(plain != 0) & (plain.abs() < torch.finfo(coarse).max)].float()
    up, down = ((ties * (1 + sign * 2.0**-12)).to(coarse).double() for sign in (1, -1))
    assert len(ties) > 32
    assert torch.equal((up + down) / 2, ties.double())
    assert (plain.abs() == torch.finfo(coarse).max).any() == (coarse.itemsize == 1)
