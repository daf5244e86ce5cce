"""Which kernels serve where there is AMX (simulated), with a library for it and without."""

import os
import subprocess
import sys

import pytest
import torch

import kpt_core
from kpt_backend_cpu import amx
from kpt_backend_cpu.moe import decode, experts
from kpt_moe.grouped_mm import grouped_mm


def record(x: torch.Tensor, top_k: int, up: torch.Tensor, down: torch.Tensor, **options: bool) -> kpt_core.Call:
    routing = torch.zeros(x.shape[0], top_k)
    return kpt_core.get_op("moe.experts").bind(x, routing.long(), routing, up, down, **options)


@pytest.mark.parametrize(("dtype", "asked", "refused"), [
    (torch.bfloat16, None, True),
    (torch.bfloat16, "avx2", False),
    (torch.float32, None, False),
    (torch.float16, None, False),
])  # fmt: skip
def test_many_rows_of_bfloat16_are_left_to_pytorch_unless_an_instruction_set_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, asked: str | None, refused: bool
) -> None:
    monkeypatch.setattr(amx, "LEFT_TO_PYTORCH", True)
    monkeypatch.delenv("KPT_CPU_ISA", raising=False)
    if asked:
        monkeypatch.setenv("KPT_CPU_ISA", asked)
    up, down = torch.randn(2, 8, 4, dtype=dtype), torch.randn(2, 4, 4, dtype=dtype)
    reason = experts.unsupported(record(torch.randn(3, 4, dtype=dtype), 1, up, down))
    assert ("AMX" in str(reason)) is refused


def test_decoding_reads_weights_and_is_not_left_to_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(amx, "LEFT_TO_PYTORCH", True)
    monkeypatch.delenv("KPT_CPU_ISA", raising=False)
    up, down = torch.randn(2, 8, 4).bfloat16(), torch.randn(2, 4, 4).bfloat16()
    assert decode.unsupported(record(torch.randn(1, 4).bfloat16(), 1, up, down)) is None


@pytest.mark.parametrize(("tiles", "dtype", "transposed", "refused"), [
    (True, torch.float8_e4m3fn, False, True),
    (True, torch.float8_e4m3fn, True, False),
    (True, torch.bfloat16, False, False),
    (False, torch.float8_e4m3fn, False, False),
])  # fmt: skip
def test_six_rows_of_each_expert_are_too_many_to_decode_where_tiles_multiply_weights_of_8_bits(
    monkeypatch: pytest.MonkeyPatch, tiles: bool, dtype: torch.dtype, transposed: bool, refused: bool
) -> None:
    monkeypatch.setattr(amx, "TILES", tiles)
    shapes = ((2, 4, 8), (2, 4, 4)) if transposed else ((2, 8, 4), (2, 4, 4))
    up, down = (torch.randn(shape).to(dtype) for shape in shapes)
    reason = decode.unsupported(record(torch.randn(6, 4).bfloat16(), 2, up, down, transposed=transposed))
    assert str(reason) == ("12 rows for 2 experts; needs 5 each at most" if refused else "None")


@pytest.mark.parametrize("asked", ["baseline", ""])
def test_tiles_are_those_of_the_library_that_is_loaded(asked: str) -> None:
    program = "from kpt_backend_cpu import amx, native\n"
    program += "print(amx.TILES == (native.library().instruction_set == 'amx_bf16'), amx.TILES)"
    environment = {**os.environ, "KPT_CPU_ISA": asked}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    told = done.stdout.split()
    assert told[0] == "True"
    assert asked != "baseline" or told[1] == "False"


def test_a_refused_product_is_computed_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(amx, "LEFT_TO_PYTORCH", True)
    monkeypatch.delenv("KPT_CPU_ISA", raising=False)
    x, weight = torch.randn(5, 3).bfloat16(), torch.randn(1, 3, 2).bfloat16()
    with kpt_core.record() as log:
        out = grouped_mm(x, weight, torch.tensor([5], dtype=torch.int32))
    assert [selection.backend for selection in log] == ["torch"]
    torch.testing.assert_close(out, x @ weight[0])


@pytest.mark.parametrize("there", [False, True])
def test_bfloat16_compiles_as_one_graph_where_no_instruction_set_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, there: bool
) -> None:
    monkeypatch.setattr(amx, "LEFT_TO_PYTORCH", there)
    monkeypatch.delenv("KPT_CPU_ISA", raising=False)
    x, weight = torch.randn(5, 3).bfloat16(), torch.randn(1, 3, 2).bfloat16()
    offsets = torch.tensor([5], dtype=torch.int32)
    compiled = torch.compile(grouped_mm, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, weight, offsets), grouped_mm(x, weight, offsets))
