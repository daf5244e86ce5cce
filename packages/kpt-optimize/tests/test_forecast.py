"""What a model of transformers computes and reads, with kernels of no package but the core."""

import pytest
import torch

from kpt_optimize.forecast import ATTENTION, forecast, register_attention

transformers = pytest.importorskip("transformers")
SIZES = {"hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 2, "vocab_size": 512}


def model_of(kind, **options):
    register_attention()
    config = getattr(transformers, f"{kind}Config")(**SIZES | options)
    cls = {
        "GPT2": "GPT2LMHeadModel",
        "Llama": "LlamaForCausalLM",
        "Bert": "BertForMaskedLM",
        "GPTNeoX": "GPTNeoXForCausalLM",
    }[kind]
    with torch.device("meta"):
        return getattr(transformers, cls)._from_config(config, attn_implementation=ATTENTION).eval()


@pytest.mark.parametrize(
    ("kind", "options", "note", "halves"),
    [
        ("Llama", {"num_attention_heads": 4, "num_key_value_heads": 4}, "causal, 64 keys of 4 heads", 1),
        ("Llama", {"num_attention_heads": 4, "num_key_value_heads": 2}, "causal, 64 keys of 2 heads", 1),
        ("GPTNeoX", {"num_attention_heads": 4}, "causal, 64 keys of 4 heads", 1),
        ("Bert", {"num_attention_heads": 4}, "64 keys of 4 heads", 2),
    ],
)
def test_attention_is_counted_with_its_heads_and_causality(kind, options, note, halves):
    found = forecast(model_of(kind, **options), batch=3, tokens=64)
    first = next(work for work in found.calls if work.op == "attention.dense")
    assert (first.sizes, first.count, first.note) == ((3, 4, 64, 64), 2, note)
    assert first.flops == halves * 2 * 2 * 3 * 4 * 64 * 64 * 64
    assert len(found.steps) == (1 if kind == "Bert" else 2)


def test_transposed_layers_are_counted_too():
    found = forecast(model_of("GPT2", num_attention_heads=4), batch=2, tokens=64)
    assert {work.sizes[1:] for work in found.calls if work.op == "linear"} == {
        (256, 768), (256, 256), (256, 1024), (1024, 256), (256, 512)
    }  # fmt: skip
    assert all(sum(part.flops for part in step.parts) == step.flops for step in found.steps)


@pytest.mark.parametrize("fp8", [False, True])
def test_layers_are_counted_by_size_and_the_parts_make_the_step(fp8):
    found = forecast(model_of("Llama", num_attention_heads=4), batch=2, tokens=64, fp8=fp8)
    layers = {work.sizes: work for work in found.calls if work.op.endswith("linear")}
    name = "fp8.linear" if fp8 else "linear"
    up = layers[128, 256, 384]
    nbytes = 256 * 384 + 4 * 2 * 3 if fp8 else 256 * 384 * 4
    assert (up.op, up.count, up.flops, up.nbytes) == (name, 4, 4 * 2 * 128 * 256 * 384, 4 * nbytes)
    assert layers[2, 256, 512].op == "linear"  # the output's matrix stays
    for step in found.steps:
        assert sum(part.flops for part in step.parts) == step.flops
        assert {part.name for part in step.parts} == {"attention", "linear layers"}


def test_training_takes_three_times_the_forward_pass():
    model = model_of("Bert", num_attention_heads=4)
    once, training = (forecast(model, batch=1, tokens=32, training=each).steps[0] for each in (False, True))
    assert [part.flops for part in training.parts] == [3 * part.flops for part in once.parts]
