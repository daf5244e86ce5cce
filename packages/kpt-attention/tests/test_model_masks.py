"""Masks of transformers' models that are lowered without being made: the same as `sdpa_mask` makes."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import masking_utils
from transformers.masking_utils import sdpa_mask

from kpt_attention.model_masks import ModelMask
from kpt_attention.transformers import FEW, kpt_attention_mask
from test_attention_transformers import compare, decoder, tokens

LEFT = torch.arange(40) >= torch.tensor([[5], [0]])
HOLES = LEFT & (torch.arange(40) % 7 > 0)
PAD = torch.tensor([5, 0])
DOCUMENTS = torch.tensor([[0] * 11 + [1] * 29, [0] * 40])
POSITIONS = torch.tensor([[*range(11), *range(29)], [*range(40)]])
IMAGES = torch.full((2, 40), -1)
IMAGES[0, 3:9] = 0
IMAGES[0, 20:33] = 1


def packed(function: Any) -> Any:
    alone = masking_utils.packed_sequence_mask_function(DOCUMENTS)
    return masking_utils.and_masks(alone, masking_utils.remap_positions_for_packed_sequence(function, POSITIONS))


WINDOW = masking_utils.sliding_window_causal_mask_function(6)
FUNCTIONS: dict[str, Any] = {
    "causal": masking_utils.causal_mask_function,
    "everything": masking_utils.bidirectional_mask_function,
    "window": WINDOW,
    "window both ways": masking_utils.sliding_window_bidirectional_mask_function(6),
    "chunks": masking_utils.chunked_causal_mask_function(8, PAD),
    "packed": packed(masking_utils.causal_mask_function),
    "packed window": packed(WINDOW),
    "images": masking_utils.or_masks(WINDOW, masking_utils.blockwise_overlay(IMAGES)),
}


@pytest.mark.parametrize("seen", [None, LEFT, HOLES, LEFT.int()], ids=["", "left", "holes", "integers"])
@pytest.mark.parametrize(("queries", "first", "behind"), [(40, 0, 0), (20, 20, 0), (20, 5, 0), (20, 17, 6)])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_equals_the_dense_mask(name: str, queries: int, first: int, behind: int, seen: Tensor | None) -> None:
    keys = 40 - behind
    asked: dict[str, Any] = {
        "batch_size": 2, "q_length": queries, "kv_length": keys, "q_offset": first, "kv_offset": behind,
        "mask_function": FUNCTIONS[name], "attention_mask": seen, "allow_is_causal_skip": False,
    }  # fmt: skip
    made = kpt_attention_mask(**asked)
    assert isinstance(made, ModelMask)
    plan = made.plan(queries, keys)
    assert plan is not None
    assert made.plan(queries, keys) is plan
    assert made.plan(queries, keys - 1) is None
    assert made.plan(queries - 1, keys) is None
    lowered = made._mask.dense(queries, keys, batch=2, offset=first - behind).expand(2, 1, queries, keys)
    wanted = sdpa_mask(**asked)
    assert torch.equal(lowered, wanted)
    assert made.shape == wanted.shape
    assert plan.intervals is not None or plan.causal or plan.blocks is None or seen is HOLES
    assert torch.equal(made | False, wanted)
    assert made.plan(queries, keys) is None, "whoever looked into it may have written to it"


def test_is_never_none_and_leaves_what_it_does_not_know() -> None:
    asked: dict[str, Any] = {"batch_size": 1, "q_length": 40, "kv_length": 40}
    assert sdpa_mask(**asked) is None
    for seen in (None, torch.ones(1, 40, dtype=torch.bool)):
        for queries in (40, 1):  # of one query causality is all there is
            made = kpt_attention_mask(**asked | {"q_length": queries, "q_offset": 40 - queries}, attention_mask=seen)
            assert made.plan(queries, 40).causal
    own = kpt_attention_mask(**asked, mask_function=lambda b, h, q, k: (q + k) % 3 > 0, allow_is_causal_skip=False)
    seen = torch.arange(40)[None] > 2
    few = kpt_attention_mask(**asked | {"q_length": FEW - 1, "q_offset": 40 - FEW + 1}, attention_mask=seen)
    for dense in (own, few):
        assert isinstance(dense, Tensor)
        assert not isinstance(dense, ModelMask)


def left_padded(ids: Tensor) -> Tensor:
    seen = torch.ones_like(ids)
    seen[0, :7] = 0
    return seen


FAMILIES = ["Llama", "Mistral", "Gemma2", "Gemma3Text", "GptOss", "Llama4Text", "Cohere2"]


@pytest.mark.parametrize(
    ("family", "how"),
    [*((family, "padded") for family in FAMILIES), *((family, "packed") for family in FAMILIES[:4])],
)
def test_no_model_makes_it_dense(family: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, eager, ids = decoder(family, "kpt").train(), decoder(family, "eager").train(), tokens(2, 40)
    inputs = {"input_ids": ids, "use_cache": False}
    if how == "padded":
        inputs["attention_mask"] = left_padded(ids)
    else:
        inputs["position_ids"] = POSITIONS
    with monkeypatch.context() as patch:
        patch.setattr(ModelMask, "whole", lambda _: pytest.fail("made dense"))
        compare(ours, eager, **inputs)


def test_wrappers_of_layers_leave_it_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = decoder("Llama", "kpt").eval(), tokens(2, 40)
    wanted = model(ids, attention_mask=left_padded(ids)).logits

    def hook(module: Any, args: Any, told: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        mask = told["attention_mask"]
        assert not torch.is_floating_point(mask)  # FSDP with mixed precision asks
        return args, told | {"attention_mask": mask.to("cpu", non_blocking=True)}  # accelerate moves

    for layer in model.model.layers:
        layer.register_forward_pre_hook(hook, with_kwargs=True)
    with monkeypatch.context() as patch:
        patch.setattr(ModelMask, "whole", lambda _: pytest.fail("made dense"))
        assert torch.equal(model(ids, attention_mask=left_padded(ids)).logits, wanted)


def test_a_mask_on_another_device_is_lowered_once_there() -> None:
    made = kpt_attention_mask(batch_size=1, q_length=32, kv_length=32, allow_is_causal_skip=False)
    moved = made.to("meta")
    assert isinstance(moved, ModelMask)
    assert moved.device.type == "meta"
    assert moved is made.to(torch.device("meta"), non_blocking=True)
    assert moved.whole().shape == made.shape
    assert made.to(torch.float32).dtype is torch.float32
    assert made[0, 0, 9].sum() == 10


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_layers(reentrant: bool) -> None:
    ours, eager, ids = decoder("Llama", "kpt").train(), decoder("Llama", "eager").train(), tokens(2, 40)
    ours.activation_checkpointing_enable({"use_reentrant": reentrant})
    ours.enable_input_require_grads()
    compare(ours, eager, input_ids=ids, attention_mask=left_padded(ids), use_cache=False)


def test_a_mask_that_is_written_to_counts_as_it_is_then() -> None:
    made = kpt_attention_mask(batch_size=1, q_length=32, kv_length=32, allow_is_causal_skip=False)
    assert isinstance(made, ModelMask)
    made[..., 5] = False
    assert not made[..., 5].any()
    assert made.plan(32, 32) is None
    assert made[0, 0, 9, 8]
