"""`create_flash_attention_3`: what must serve a layer serves it, or there is no layer."""

import pytest
import torch

import kpt_core
from kpt_attention import FlashAttention3, create_flash_attention_3, modules
from kpt_core import InputError


def test_it_makes_the_layer_that_the_settings_say():
    layer = create_flash_attention_3(32, 4, causal=True, window=4, dropout=0.25, dtype=torch.float64)
    assert type(layer) is FlashAttention3
    assert (layer.causal, layer.window, layer.dropout, layer.q_proj.weight.dtype) == (True, 4, 0.25, torch.float64)
    with pytest.raises(InputError, match=r"num_heads \(4\) must divide embed_dim \(30\)"):
        create_flash_attention_3(30, 4)


@pytest.mark.parametrize("required", ["backend", "kernel", "module"])
def test_what_is_required_is_what_serves_the_layer(required):
    with kpt_core.use("torch"):
        with kpt_core.record() as selections:
            FlashAttention3(32, 4, causal=True)(torch.randn(1, 256, 32))
        kernel = selections[-1].kernel
        name = {"backend": "torch", "kernel": kernel, "module": kernel.partition(":")[0].rpartition(".")[2]}[required]
        create_flash_attention_3(32, 4, causal=True, require=name)


def test_a_fall_back_is_an_error_with_the_refusals():
    with pytest.raises(
        InputError, match=r"'gpu_flex' must serve inference on cpu in torch\.float32; .* would: .*"
    ) as e:
        create_flash_attention_3(32, 4, causal=True, require="gpu_flex")
    assert "gpu_flex" in str(e.value).partition("would: ")[2]


def test_training_is_asked_too(monkeypatch):
    real = modules.dense

    class Dense:
        def explain(self, q, *others, **options):
            with kpt_core.use("torch" if q.requires_grad else "reference"):
                return real.explain(q, *others, **options)

    monkeypatch.setattr(modules, "dense", Dense())
    with pytest.raises(InputError, match=r"'reference' must serve training .* of torch would"):
        create_flash_attention_3(32, 4, require="reference")
