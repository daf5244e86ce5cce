"""Hugging Face models reach their experts on other ranks through KPT."""

import pytest
import torch
from torch.distributed.tensor import DTensor

PROMPT = torch.tensor([[5, 11, 7, 30, 8, 2, 9], [3, 1, 4, 1, 5, 9, 2]])


def mixtral():
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    return MixtralForCausalLM(
        MixtralConfig(
            vocab_size=40,
            hidden_size=16,
            intermediate_size=12,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            num_local_experts=4,
            num_experts_per_tok=2,
        )
    )


def gives_the_same(rank, folder):
    from transformers import MixtralForCausalLM, logging
    from transformers.distributed import DistributedConfig
    from transformers.distributed.utils import initialize_distributed_mesh

    import kpt_moe.parallel.transformers
    from kpt_core import record

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    alone = MixtralForCausalLM.from_pretrained(folder, experts_implementation="eager")
    for sizes in ({"tp_size": 2}, {"fsdp_size": 2}):
        config = DistributedConfig(**sizes, ep_size=2, ep_implementation="kpt")
        # What from_pretrained does with a distributed_config, which needs accelerate.
        model = MixtralForCausalLM.from_pretrained(folder, experts_implementation="kpt")
        _, mesh = initialize_distributed_mesh(config)
        model = MixtralForCausalLM.maybe_distribute_model(model, config, mesh)
        experts = model.model.layers[0].mlp.experts
        assert isinstance(experts.gate_up_proj, DTensor)
        assert experts.gate_up_proj.to_local().shape[0] == 2
        shared = "tp_size" in sizes
        prompt = PROMPT if shared else PROMPT[rank : rank + 1]
        with record() as log:
            out = model(prompt).logits
        assert {selection.op for selection in log} == {"moe.experts"}
        alone.zero_grad()
        expected = alone(PROMPT).logits
        torch.testing.assert_close(out, expected if shared else expected[rank : rank + 1], rtol=1e-5, atol=1e-6)
        out.square().sum().backward()
        expected.square().sum().backward()
        grad = experts.gate_up_proj.grad.full_tensor()
        if not shared:
            grad = grad * 2  # FSDP averages over the two ranks, each with a loss of its own
        torch.testing.assert_close(grad, alone.model.layers[0].mlp.experts.gate_up_proj.grad, rtol=1e-4, atol=1e-5)
    del kpt_moe
    return True


@pytest.mark.usefixtures("quiet")
def test_mixtral_on_two_ranks_gives_what_one_gives(launch, tmp_path):
    mixtral().save_pretrained(tmp_path)
    assert launch(2, gives_the_same, str(tmp_path)) == [True, True]
