"""Arguments that don't fit are refused before a kernel reads past them, with what was expected and what came."""

from typing import Any

import pytest
import torch

from kpt_triton.moe.experts import experts
from kpt_triton.moe.grouped_mm import grouped_mm
from kpt_triton.moe.grouped_mm_wgrad import grouped_mm_wgrad
from kpt_triton.moe.scaled_grouped_mm import scaled_grouped_mm


def product(**changes: Any) -> dict[str, Any]:
    made = {"x": torch.ones(6, 8), "weight": torch.ones(3, 8, 4), "offsets": torch.tensor([1, 3, 6], dtype=torch.int32)}
    return made | changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": torch.ones(6, 7)}, r"expected x \[rows, K\] and weight.*got float32 \[6, 7\], float32 \[3, 8, 4\]"),
        ({"x": torch.ones(8)}, r"got float32 \[8\]"),
        ({"weight": torch.ones(3, 8, 4).half()}, r"expected a weight of torch.float32; got float16"),
        ({"x": torch.ones(6, 8).double()}, r"expected a weight of torch.float32 or torch.bfloat16"),
        ({"offsets": torch.tensor([1, 6], dtype=torch.int32)}, r"expected offsets int32 \[3\].*got int32 \[2\]"),
        ({"offsets": torch.tensor([1, 3, 6])}, r"got int64 \[3\]"),
        ({"offsets": torch.tensor([1, 3, 6], dtype=torch.int32, device="meta")}, "offsets are on meta: move one"),
    ],
)
def test_a_product_that_does_not_fit_is_refused(changes: dict[str, Any], message: str) -> None:
    if changes.get("x") is not None and changes["x"].dtype is torch.float64:
        changes = changes | {"weight": torch.ones(3, 8, 4).double()}
    with pytest.raises(ValueError, match=f"grouped_mm: .*{message}"):
        grouped_mm(**product(**changes))


def test_a_gradient_of_weights_that_does_not_fit_is_refused() -> None:
    offsets = torch.tensor([2, 6], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"grouped_mm_wgrad: expected x \[rows, K\] and grad \[rows, N\]"):
        grouped_mm_wgrad(torch.ones(6, 8), torch.ones(5, 4), offsets)
    with pytest.raises(ValueError, match="expected one dtype"):
        grouped_mm_wgrad(torch.ones(6, 8), torch.ones(6, 4).half(), offsets)


def test_weights_that_are_not_of_eight_bits_are_refused() -> None:
    with pytest.raises(ValueError, match=r"scaled_grouped_mm: expected a weight of torch\.float8_e4m3fn or"):
        scaled_grouped_mm(**product(), scale=torch.ones(3, 4))


def layer(**changes: Any) -> dict[str, Any]:
    made = {
        "x": torch.ones(5, 8),
        "top_k_index": torch.zeros(5, 2, dtype=torch.int64),
        "top_k_weights": torch.ones(5, 2),
        "gate_up_proj": torch.ones(3, 12, 8),
        "down_proj": torch.ones(3, 8, 6),
    }
    return made | changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": torch.ones(5, 8).double()}, r"expected x \[tokens, hidden_size\].*got float64 \[5, 8\]"),
        ({"top_k_index": torch.zeros(4, 2, dtype=torch.int64)}, r"both \[5, top_k\]; got int64 \[4, 2\]"),
        ({"top_k_index": torch.zeros(5, 2)}, "top_k_index of integers"),
        ({"gate_up_proj": torch.ones(3, 12, 7)}, r"for x \[5, 8\] and swiglu; got float32 \[3, 7, 12\]"),
        ({"down_proj": torch.ones(3, 8, 5)}, r"got float32 \[3, 8, 12\], float32 \[3, 5, 8\]"),
        ({"down_proj": torch.ones(2, 8, 6)}, r"float32 \[2, 6, 8\]"),
        ({"down_proj": torch.ones(3, 8, 6).half()}, "expected matrices of torch.float32 or 8 bits; got float16"),
        ({"gate_up_proj_bias": torch.ones(3, 6)}, r"expected a bias torch.float32 \[3, 12\]; got float32 \[3, 6\]"),
        ({"down_proj_bias": torch.ones(3, 8, device="meta")}, "all must be on the device of x, cpu"),
        ({"activation": "swigloo"}, "swigloo"),
    ],
)
def test_experts_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        experts(**layer(**changes))
