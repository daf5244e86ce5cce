"""Models of transformers give the same with their experts offloaded, for every budget."""

import pytest
import torch

from families import FAMILIES, VOCABULARY, Family, experts_of
from kpt_moe.offload import offload_experts
from test_transformers_fp8 import load, logits, qwen3, write

pytestmark = pytest.mark.usefixtures("quiet")


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]


def test_logits_are_the_same_to_the_bit_for_every_budget(family):
    import kpt_moe.transformers

    model = family.build()
    model.set_experts_implementation(kpt_moe.transformers.NAME)
    x = torch.randn(2, 9, model.get_input_embeddings().weight.shape[1])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    outs = []
    with torch.no_grad():
        want = model(inputs_embeds=x).logits
        for budget in ("20%", "50%", "100%"):
            with offload_experts(model, budget) as handle:
                outs += [model(inputs_embeds=x).logits, model(inputs_embeds=x).logits]
                total = handle.total()
                assert len(handle.statistics()) == family.experts
                assert total.misses > 0
                assert total.hits > 0 or budget != "100%"
                have = model.state_dict()
                assert list(have) == list(before)
                assert all(torch.equal(have[name], before[name]) for name in before)
        assert torch.equal(model(inputs_embeds=x).logits, want)
    assert all(torch.equal(out, outs[0]) for out in outs)
    torch.testing.assert_close(outs[0], want, rtol=1e-4, atol=1e-4 * want.abs().max().item())


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_generates_the_same(name):
    model = FAMILIES[name].build()
    prompt = torch.randint(3, VOCABULARY, (2, 5))
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    want = model.generate(prompt, **options)
    with offload_experts(model, "25%") as handle:
        assert torch.equal(model.generate(prompt, **options), want)
        assert handle.total().predicted_right > 0
    assert len(experts_of(model)) == 2


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_routers_of_transformers_predict(name):
    with offload_experts(FAMILIES[name].build(), "50%") as handle:
        reasons = [layer.prefetch for layer in handle.statistics().values()]
    assert reasons == ["no prefetch: no module of experts comes before", "router lookahead"]


@pytest.mark.parametrize(("activations", "implementation"), [(False, "kpt"), (True, "eager")])
def test_8_bit_experts_of_a_checkpoint_stay_8_bit_and_their_activations_what_they_are(
    activations, implementation, tmp_path
):
    checkpoint = write(tmp_path / "checkpoint", qwen3(256, 128))
    model = load(checkpoint.path, implementation, quantize_activations=activations)
    with torch.no_grad():
        want = logits(model)
        with offload_experts(model, "50%") as handle:
            torch.testing.assert_close(logits(model), want, rtol=1e-4, atol=1e-5 * want.abs().max().item())
            assert handle.total().misses > 0
