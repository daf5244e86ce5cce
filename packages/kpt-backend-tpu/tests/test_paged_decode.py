"""Steps of decoding over pages by JAX on the CPU against the op's reference."""

import pytest
import torch

from kpt_attention.paged import paged
from kpt_backend_tpu import BACKEND
from kpt_backend_tpu.attention.paged import MOST_BYTES, unsupported
from kpt_core.dispatch import force

pytest.importorskip("jax")

(KERNEL,) = (kernel for kernel in BACKEND.kernels() if kernel.op == "attention.paged")
LENGTHS = [0, 1, 7, 8, 33, 40]


def arguments(dtype=torch.float32, cache=None, heads=6, kv_heads=2, size=8, **changes):
    generator = torch.Generator().manual_seed(0)
    batch, most, pages = len(LENGTHS), 5, 40
    q = torch.randn(batch, heads, 16, generator=generator).to(dtype)
    k, v = (torch.randn(pages, size, kv_heads, d, generator=generator).to(cache or dtype) for d in (16, 24))
    table = torch.randperm(pages, generator=generator)[: batch * most].view(batch, most).int()
    table[3, 1:] = 10**6  # past its keys: any number
    return {"q": q, "k_cache": k, "v_cache": v, "block_table": table, "lengths": torch.tensor(LENGTHS).int()} | changes


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"dtype": torch.bfloat16},
        {"window": 5},
        {"softcap": 2.0, "scale": 0.7},
        {"sinks": torch.linspace(-1, 3, 6)},
        {"window": 9, "sinks": torch.linspace(-1, 3, 6), "heads": 6, "kv_heads": 6},
        {"kv_heads": 1, "causal": False},
        {"cache": torch.float8_e4m3fn, "k_scale": torch.tensor([0.5, 2.0]), "v_scale": torch.tensor([3.0, 0.25])},
        {"dtype": torch.bfloat16, "cache": torch.float8_e5m2},
    ],
    ids=lambda changes: " ".join(changes) or "plain",
)
def test_equals_the_reference(changes):
    given = arguments(**changes)
    with force("tpu", KERNEL):
        out, lse = paged(**given, return_lse=True)
    want, sums = paged.reference(**given, return_lse=True)
    coarse = 2e-2 if out.dtype is torch.bfloat16 else 2e-5
    torch.testing.assert_close(out, want, rtol=coarse, atol=coarse)
    torch.testing.assert_close(lse, sums, rtol=2e-5, atol=2e-5)


def test_what_is_not_finite_reaches_who_sees_it_alone():
    given = arguments()
    plain = paged.reference(**given)[0]
    page = given["block_table"][4]  # of 33 keys, 5 pages
    given["v_cache"][page[1], 2, 0, 3] = torch.nan
    given["v_cache"][page[2], 0, 1, 5] = torch.inf
    given["v_cache"][page[4], 1] = torch.nan  # the 34th key
    given["k_cache"][page[4], 1] = torch.nan
    with force("tpu", KERNEL):
        out = paged(**given)[0]
    torch.testing.assert_close(out.nan_to_num(), paged.reference(**given)[0].nan_to_num(0, 0, 0), rtol=2e-5, atol=2e-5)
    assert out.isfinite().logical_not().nonzero().tolist() == [
        *([4, head, 3] for head in range(3)), *([4, head, 5] for head in range(3, 6)),
    ]  # fmt: skip
    assert plain.isfinite().all()


def test_what_the_kernel_does_not_do_is_refused_in_a_sentence():
    call = paged.bind(**arguments())
    assert unsupported(call) is None
    for change, says in (
        ({"cu_seqlens_q": torch.arange(7).int()}, "this kernel is for one query of each sequence"),
        ({"k_cache": torch.zeros(1, 8, 2, 600), "v_cache": torch.zeros(1, 8, 2, 600)}, "head_dim is 600"),
        ({"k_cache": torch.zeros(1, 4096, 2, 64)}, f"pages of 2097152 bytes in float32; {MOST_BYTES} fit"),
        ({"block_table": torch.zeros(512, 512).int()}, "a block table of 262144 pages"),
        ({"alibi_slopes": torch.ones(6)}, "alibi_slopes is given; this kernel reads spans of keys"),
        ({"bias": torch.zeros(1, 1, 99)}, "bias is given"),
        ({"mask": torch.ones(6, 1, dtype=torch.bool)}, "mask is given"),
        ({"window": 4, "first": 2}, "the first 2 keys beside a window; this kernel reads one span"),
        ({"lengths": call.lengths[:0], "q": call.q[:0]}, "without elements"),
    ):
        assert says in str(unsupported(call._replace(**change)))
