"""`fp8.scaled_mm` by products of 16 bits: as exact as one rounding of the truth, whatever shares a scale."""

from typing import Any

import pytest
import torch

from kpt_core import Call
from kpt_fp8.cases.scaled_mm import SCALED_MM
from kpt_fp8.scaled_mm import scaled_mm
from kpt_fp8.torch_kernels import gpu_scaled_mm_wide as wide
from kpt_optimize.cases import Case

PAIRS = [
    ("tensor", "tensor"),
    ("row", "row"),
    ("row", "tensor"),
    ("1x128", "128x128"),
    ("row", "128x128"),
    ("1x32", "1x32"),
]


def call(**sizes: Any) -> Call:
    usual = {"rows": 9, "inner": 320, "columns": 136, "biased": True}
    return scaled_mm.bind(
        **SCALED_MM.arguments(Case(name="", sizes={**usual, **sizes}), dtype=sizes.pop("out", torch.bfloat16))
    )


@pytest.mark.parametrize("stored", ["NK", "KN"])
@pytest.mark.parametrize("out", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("pair", PAIRS, ids=" by ".join)
def test_a_product_is_rounded_once(pair: tuple[str, str], out: torch.dtype, stored: str) -> None:
    made = call(granularity_a=pair[0], granularity_b=pair[1], stored=stored)._replace(out_dtype=out)
    if out is torch.float32 and pair not in PAIRS[:3]:
        assert "needs 16 bits" in str(wide.unsupported(made))
        return
    assert wide.unsupported(made) is None
    truth = scaled_mm.run_reference(made._replace(out_dtype=torch.float64))
    found = wide.forward(made)
    assert found.dtype is out
    error, least = ((each.double() - truth).abs().mean().item() for each in (found, truth.to(out)))
    own = (scaled_mm.run_reference(made).double() - truth).abs().mean().item()
    # Both sum in float32, in orders that differ from CPU to CPU: on a Xeon with AMX by up to 16 percent of the error.
    assert error <= max(1.02 * least, (1.25 if out is torch.float32 else 1.1) * own)


@pytest.mark.parametrize(
    ("given", "refused"),
    [
        ({"rows": 0}, "nothing to compute"),
        ({"format": torch.float8_e5m2, "granularity_a": "1x128"}, "infinity has no two parts"),
        ({"format": torch.float8_e5m2}, None),
        ({"format": torch.float8_e4m3fnuz, "other": torch.float8_e4m3fnuz, "granularity_a": "1x128"}, None),
    ],
)
def test_it_says_what_it_does_not_take(given: dict[str, Any], refused: str | None) -> None:
    found = wide.unsupported(call(**given))
    assert found is None if refused is None else refused in str(found)
    assert "scales in float64" in str(wide.unsupported(call()._replace(scale_a=torch.ones(9, dtype=torch.float64))))
