"""The suite tries ops of every kind: that mutate, that take lists, give several results, or draw random numbers."""

import contextlib
from dataclasses import replace

import pytest
import torch

import kpt_core
from kpt_conformance.checks import declarations
from kpt_conformance.extent import extent_of
from kpt_conformance.loopback import Loopback
from kpt_conformance.suite import CHECKS, trials
from kpt_conformance.trial import Subject, Trial
from kpt_core.contract import REFERENCE
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
