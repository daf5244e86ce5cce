"""Hugging Face language models as programs: every family, batch and length dynamic, at other sizes than the example."""

import pytest
import torch
from torch import nn

import families
from kpt_serve.errors import PackageError
from kpt_serve.package.golden import verify
from kpt_serve.package.weights import Program
from kpt_serve.package.writing import write_program

pytestmark = pytest.mark.filterwarnings("ignore")  # of what transformers imports
DYNAMIC = {"input_ids": {0: ("batch", 1, 16), 1: ("length", 1, 64)}}
DENSE = {"Llama", "Qwen3", "Gemma2", "Gemma3"}


@pytest.mark.parametrize("family", families.FAMILIES)
def test_a_family_is_a_program_of_any_batch_and_length(family, tmp_path):
    torch.manual_seed(0)
    model = families.make(family)
    inputs = {"input_ids": torch.randint(128, (3, 12)), "use_cache": False}
    manifest = write_program(tmp_path / "toy", model, inputs, name="toy", dynamic=DYNAMIC)
    assert [op.name for op in manifest.ops] == ["attention.dense", *(["moe.experts"] * (family not in DENSE))]
    assert [(axis.min, axis.max) for axis in manifest.inputs[0].dynamic] == [(1, 16), (1, 64)]
    program = Program(tmp_path / "toy", manifest, "cpu")
    for sizes in ((1, 1), (2, 7), (1, 33), (16, 64)):  # beyond the windows of 8, and beyond a block of a mask
        ids = torch.randint(128, sizes)
        with torch.no_grad():
            expected = model(ids, use_cache=False).logits
        torch.testing.assert_close(program({"input_ids": ids})["logits"], expected, rtol=0, atol=2e-6)
    report = verify(tmp_path / "toy")
    assert report.passed, report
    assert {kernel.partition(" by ")[0] for kernel in report.kernels} >= {op.name for op in manifest.ops}


def test_a_mask_of_padding_is_an_input_too(tmp_path):
    torch.manual_seed(0)
    model = families.make("Mixtral")
    mask = torch.ones(3, 12, dtype=torch.int64)
    inputs = {"input_ids": torch.randint(128, (3, 12)), "attention_mask": mask, "use_cache": False}
    dynamic = dict.fromkeys(("input_ids", "attention_mask"), DYNAMIC["input_ids"])
    program = Program(
        tmp_path / "toy", write_program(tmp_path / "toy", model, inputs, name="toy", dynamic=dynamic), "cpu"
    )
    ids, mask = torch.randint(128, (2, 9)), torch.tensor([[0] * 4 + [1] * 5, [1] * 9])
    found = program({"input_ids": ids, "attention_mask": mask})["logits"]
    with torch.no_grad():
        expected = model(ids, attention_mask=mask, use_cache=False).logits
        alone = model(ids[:1, 4:], use_cache=False).logits
    torch.testing.assert_close(found[mask.bool()], expected[mask.bool()], rtol=0, atol=2e-6)
    torch.testing.assert_close(found[:1, 4:], alone, rtol=0, atol=2e-5)


def test_a_cache_among_the_results_is_refused_with_the_way_out(tmp_path):
    told = "gives a DynamicCache as past_key_values; expected tensors.*give use_cache=False beside the inputs"
    with pytest.raises(PackageError, match=told):
        write_program(tmp_path / "toy", families.make("Llama"), {"input_ids": torch.randint(128, (3, 12))}, name="toy")


class Planning(nn.Module):
    """Calls the op that prepares masks, and no attention: nothing would load it at the reader."""

    def forward(self, x):
        from kpt_attention.plan import all_blocks

        return all_blocks(x[None, None] > 0)["blocks"]


def test_a_helper_of_a_family_that_the_program_does_not_call_is_refused(tmp_path):
    with pytest.raises(PackageError, match=r"calls op kpt\.attention_all_blocks.*no installed package declares"):
        write_program(tmp_path / "toy", Planning(), torch.ones(2, 3), name="toy")
