"""What the tests of conversion convert, and how they compare."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from families import _LATENT_ATTENTION, _NUM_EXPERTS, _ROUTED_EXPERTS, FAMILIES, Family
from kpt_moe.conversion import KptMoEBlock

MORE = {
    "deepseek_v2": Family(
        model="DeepseekV2ForCausalLM",
        config="DeepseekV2Config",
        values={
            **_ROUTED_EXPERTS,
            **_LATENT_ATTENTION,
            "n_group": 4,
            "topk_group": 2,
            "topk_method": "group_limited_greedy",
            "routed_scaling_factor": 1.5,
            "first_k_dense_replace": 1,
            "head_dim": 4,
        },
        experts=1,
    ),
    "dots1": Family(
        model="Dots1ForCausalLM",
        config="Dots1Config",
        values={**_ROUTED_EXPERTS, "head_dim": 8, "first_k_dense_replace": 0},
    ),
    "minimax_m2": Family(
        model="MiniMaxM2ForCausalLM", config="MiniMaxM2Config", values={"num_local_experts": 6, "head_dim": 8}
    ),
    "hunyuan_v1_moe": Family(
        model="HunYuanMoEV1ForCausalLM",
        config="HunYuanMoEV1Config",
        values={"num_experts": 6, "moe_topk": 3, "head_dim": 8},
    ),
    "flex_olmo": Family(model="FlexOlmoForCausalLM", config="FlexOlmoConfig", values=_NUM_EXPERTS),
}
REFUSED = {
    "phimoe": "PhimoeSparseMoeBlock: its router weighs experts as no TopKRouter does",
    "lfm2_moe": "Lfm2MoeSparseMoeBlock: its router weighs experts as no TopKRouter does",
    "muse_spark": "MuseSparkMoE: must consist of a router, experts and perhaps shared experts",
    "gemma4": "Gemma4TextDecoderLayer: must consist of",
    "inkling2": "Inkling2SparseMoeBlock: the activation of the experts is none of ours",
    "minimax_m3_vl": "MiniMaxM3VLDenseMLP: what it computes is none of",
    "deepseek_v4": "DeepseekV4MLP: what it computes is none of",
}
CONVERTED = {name: family for name, family in {**FAMILIES, **MORE}.items() if name not in REFUSED}
PROMPT = torch.tensor([[5, 11, 7, 30, 8, 21, 3], [9, 2, 40, 4, 4, 17, 28]])


def build(name: str) -> PreTrainedModel:
    return CONVERTED[name].build()


def logits(model: nn.Module, **choices: Any) -> Tensor:
    with torch.no_grad():
        out: Tensor = model(PROMPT, **choices).logits
    return out


def blocks_of(model: nn.Module) -> list[KptMoEBlock]:
    return [module for module in model.modules() if isinstance(module, KptMoEBlock)]


def assert_close(have: Tensor, want: Tensor, relative: float = 1e-5) -> None:
    torch.testing.assert_close(have, want, rtol=0, atol=relative * want.abs().max().item())


def assert_same_model(have: PreTrainedModel, want: PreTrainedModel, *, loaded: bool = False) -> None:
    assert repr(have) == repr(want)
    assert [type(module) for module in have.modules()] == [type(module) for module in want.modules()]
    assert list(have.state_dict()) == list(want.state_dict())
    for (name, a), b in zip(have.state_dict().items(), want.state_dict().values(), strict=True):
        assert a.dtype is b.dtype, name
        assert torch.equal(a, b), name
    for (_, a), (_, b) in zip(have.named_parameters(), want.named_parameters(), strict=True):
        assert a.is_contiguous() == b.is_contiguous()
        # A frozen parameter of a class is not frozen in what from_pretrained makes of it.
        assert loaded or a.requires_grad == b.requires_grad
