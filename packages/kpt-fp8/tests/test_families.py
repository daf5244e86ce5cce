"""FP8 checkpoints of many families of transformers beside their twins, plain models with the same numbers."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kpt_fp8 import FP8Tensor

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from checkpoint_files import tensors_of
from family_models import FAMILIES, Family
from kpt_fp8.checkpoints import convert_checkpoint
from kpt_fp8.transformers import load
from transformers_models import sqnr

#: What does not hold, by family, and why.
WRONG = {
    "LongCat-Flash": "experts that return their input have rows in one of the two stacks, which differ in length",
    "JetMoe": "its experts are modules of their own kind, which stay as they are",
    "DBRX": "its experts are modules of their own kind, and attention is within a module norm_attn_norm, as if a norm",
}


def marked(name: str) -> Any:
    """Return a row of the table, which is expected to fail where a reason is known."""
    marks = [pytest.mark.xfail(strict=True, reason=WRONG[name])] if name in WRONG else []
    return pytest.param(FAMILIES[name], id=name, marks=marks)


def eight_bit(model: nn.Module, *owners: str) -> int:
    """Count the 8-bit numbers of a model, or of those of its modules that are named."""
    held = [each for name, each in model.named_parameters() if not owners or name.startswith(owners)]
    codes = [each.codes if isinstance(each, FP8Tensor) else each for each in held]
    return sum(each.numel() for each in codes if each.dtype is torch.float8_e4m3fn)


def experts(model: nn.Module) -> tuple[list[str], int]:
    """Return where a plain model has its experts, and how many numbers their matrices hold."""
    held = {
        name: each
        for name, each in model.named_parameters()
        if "Expert" in type(model.get_submodule(name.rpartition(".")[0])).__name__ and "bias" not in name
    }
    return sorted({f"{name.rpartition('.')[0]}." for name in held}), sum(each.numel() for each in held.values())


def require_equal(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("family", [marked(name) for name in FAMILIES])
def test_an_fp8_checkpoint_computes_what_its_twin_does(family: Family, tmp_path: Any) -> None:
    original = family.made()
    original.save_pretrained(tmp_path / "source")
    convert_checkpoint(tmp_path / "source", tmp_path / "fp8", to="fp8", granularity=family.granularity)
    convert_checkpoint(tmp_path / "fp8", tmp_path / "wide", to="float32")
    twin = type(original).from_pretrained(tmp_path / "wide", dtype=torch.float32).eval()
    loaded = load(tmp_path / "fp8", dtype=torch.float32, quantize_activations=False)
    written = sum(each.numel() for each in tensors_of(tmp_path / "fp8").values() if each.dtype is torch.float8_e4m3fn)

    expected = family.outputs(twin)
    assert expected.isfinite().all()
    assert expected.std() > 1e-2 * expected.abs().max()
    # Quantisation is seen, and no more: what is at a wrong place would leave less of the signal.
    assert 5 < sqnr(family.outputs(original), expected) < 45
    require_equal(family.outputs(loaded), expected)

    assert eight_bit(loaded) == written > 0
    if family.experts:
        owners, size = experts(twin)
        assert eight_bit(loaded, *owners) == size > 0
        eager = load(tmp_path / "fp8", dtype=torch.float32, quantize_activations=False, experts_implementation="eager")
        require_equal(family.outputs(eager), expected)
