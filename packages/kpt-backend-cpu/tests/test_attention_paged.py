"""`attention.paged` natively: what the kernel refuses is computed in plain PyTorch. The suite holds all else."""

import pytest
import torch

import kpt_core
from kpt_core import get_op

NAME = "attention.paged"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"mask": torch.ones(2, 1, dtype=torch.bool)}, "a mask; this kernel reads spans of keys"),
        ({"window": 3, "first": 2}, "the first 2 keys beside a window; this kernel reads one span of keys"),
    ],
)
def test_it_refuses_in_a_sentence_and_plain_pytorch_serves(options, sentence):
    cache, table = torch.randn(7, 4, 2, 6), torch.tensor([[3, 0, 6], [1, 2, 0]], dtype=torch.int32)
    call = (torch.randn(2, 4, 6), cache, cache, table, torch.tensor([11, 5], dtype=torch.int32))
    with kpt_core.use("cpu", op=NAME), pytest.raises(kpt_core.NoKernelError, match=sentence):
        get_op(NAME)(*call, **options)
    with kpt_core.record() as log:
        assert get_op(NAME)(*call, **options)[0].isfinite().all()
    assert log[0].kernel == "kpt_attention.torch_kernels.paged:forward"
