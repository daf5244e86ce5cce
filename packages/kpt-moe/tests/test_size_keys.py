"""The keys of tuning results: plain values for every case, alike for sizes that are nearly alike."""

import json

import pytest
import torch

from kpt_core import Op
from kpt_moe import cases, ops
from kpt_moe.experts import experts
from kpt_moe.grouped_mm import grouped_mm, grouped_mm_wgrad
from kpt_optimize.cases import Case, CaseTable

OPS = {op.name: op for op in ops.OPS if isinstance(op, Op)}
TABLES = [table for table in cases.TABLES if isinstance(table, CaseTable)]
ROWS = [(table, case) for table in TABLES for case in table.cases if not case.large]


@pytest.mark.parametrize(("table", "case"), ROWS, ids=[f"{table.op}-{case.name}" for table, case in ROWS])
def test_every_case_has_a_key_that_json_gives_back(table, case):
    op = OPS[table.op]
    key = op.size_key(op.bind(**table.arguments(case)))
    assert all(type(part) in (int, str) for part in key)
    assert tuple(json.loads(json.dumps(key))) == key


def key_of_experts(**sizes):
    return experts.size_key(experts.bind(**cases.EXPERTS.arguments(Case(name="any", sizes=sizes))))


def test_tokens_are_rounded_and_everything_else_counts():
    assert key_of_experts(tokens=63) == (64, 3, 5, 8, 12, "plain") == key_of_experts(tokens=33)
    others = [
        key_of_experts(tokens=65),
        key_of_experts(tokens=63, top_k=2),
        key_of_experts(tokens=63, num_experts=6),
        key_of_experts(tokens=63, hidden=9),
        key_of_experts(tokens=63, inner=7),
        key_of_experts(tokens=63, transposed=True),
    ]
    assert len({key_of_experts(tokens=63), *others}) == 7


def test_rows_are_rounded_and_the_layout_of_weights_counts():
    x, weight, offsets = torch.ones(20, 8), torch.ones(4, 8, 6), torch.tensor([5, 5, 9, 20], dtype=torch.int32)
    other = weight.mT.contiguous().mT
    assert grouped_mm.size_key(grouped_mm.bind(x, weight, offsets)) == (32, 8, 6, 4, "KN")
    assert grouped_mm.size_key(grouped_mm.bind(x, other, offsets)) == (32, 8, 6, 4, "NK")
    wgrad = grouped_mm_wgrad.bind(x, torch.ones(20, 6), offsets)
    assert grouped_mm_wgrad.size_key(wgrad) == (32, 8, 6, 4)
