"""The rewrite of attention modules for `kpt_optimize.optimize`."""

import pytest
import torch

import kpt_core
from kpt_attention.rewrites import REWRITES
from kpt_core import InputError
from kpt_optimize.rewrite import check_rewrite

transformers = pytest.importorskip("transformers")
(REWRITE,) = REWRITES

LLAMA = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
MODELS = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA, vocab_size=50)),
    "gemma3": lambda: transformers.Gemma3ForCausalLM(
        transformers.Gemma3TextConfig(**LLAMA, head_dim=16, num_key_value_heads=2, vocab_size=50, sliding_window=8)
    ),
    "bert": lambda: transformers.BertModel(transformers.BertConfig(**LLAMA, vocab_size=50)),
}


def sites(model):
    return [site.module for site in check_rewrite(REWRITE).sites(model)]


@pytest.mark.parametrize("family", MODELS)
def test_each_attention_module_is_replaced_and_the_result_stays(family):
    torch.manual_seed(0)
    model = MODELS[family]().eval()
    ids, mask = torch.randint(0, 50, (2, 24)), torch.ones(2, 24, dtype=torch.long)
    mask[0, :9] = 0
    found = sites(model)
    assert len(found) == 2
    with torch.no_grad(), kpt_core.record() as selections:
        wanted = model(input_ids=ids, attention_mask=mask)[0]
        assert not selections
        for path in found:
            module = model.get_submodule(path)
            twin = REWRITE.replacement(module)
            assert [id(each) for each in twin.parameters()] == [id(each) for each in module.parameters()]
            assert module.config._attn_implementation == "sdpa"
            model.set_submodule(path, twin)
        got = model(input_ids=ids, attention_mask=mask)[0]
    assert [each.op for each in selections] == ["attention.dense"] * 2
    assert model.config._attn_implementation == "sdpa"
    torch.testing.assert_close(got[mask.bool()], wanted[mask.bool()], atol=1e-5, rtol=1e-4)
    assert not sites(model)


def test_what_runs_no_sdpa_is_left():
    model = transformers.BertModel(transformers.BertConfig(**LLAMA, vocab_size=50), add_pooling_layer=False)
    model.set_attn_implementation("eager")
    assert not sites(model)
    with pytest.raises(InputError, match="Linear is no attention module of transformers that runs 'sdpa'"):
        REWRITE.replacement(torch.nn.Linear(2, 2))
