"""Expert parallelism of Hugging Face models: importing this module registers `ep_implementation="kpt"`.

import kpt_moe.parallel.transformers
config = DistributedConfig(fsdp_size=8, ep_size=8, ep_implementation="kpt")
model = AutoModelForCausalLM.from_pretrained(name, distributed_config=config, experts_implementation="kpt")
"""

from typing import cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers.distributed.expert_parallel import EPImplementation, EPImplementationInterface

from kpt_moe.transformers import NAME

from .dispatch import dispatch


class KptEP(EPImplementation):
    """Experts reached by `kpt_moe.parallel.dispatch`: a token travels once to each rank with any of its experts.

    transformers builds one per experts module. The ranks of a tensor-parallel group, which share their tokens, each
    send a slice of them and gather the results.
    """

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """`[tokens, hidden_size]` from tokens, global expert ids `[tokens, top_k]` and weights `[tokens, top_k]`."""
        tokens = hidden_states.shape[0]
        shared = self.tp_mesh.size() > 1
        if shared:
            hidden_states, top_k_index, top_k_weights = (
                DTensor.from_local(t, self.tp_mesh, [Replicate()], run_check=False)
                .redistribute(self.tp_mesh, [Shard(0)])
                .to_local()
                for t in (hidden_states, top_k_index, top_k_weights)
            )
        out = dispatch(
            hidden_states,
            top_k_index.long(),
            top_k_weights,
            self.experts_forward,
            num_experts=cast(int, self.num_local_experts) * self.ep_mesh.size(),
            groups=(self.ep_mesh.get_group(),),
        )
        if shared:
            size = torch.Size((tokens, out.shape[1]))
            out = DTensor.from_local(out, self.tp_mesh, [Shard(0)], shape=size, stride=(size[1], 1)).full_tensor()
        return out


EPImplementationInterface.register(NAME, KptEP)
