"""The experts of vLLM's layers by op `moe.experts`: imported inside vLLM alone, where the class registers itself."""

from typing import Any

import torch
from torch import Tensor
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

from kpt_moe.experts import experts

from .support import ACTIVATIONS, unsupported

logger = init_logger("vllm.kpt")  # vLLM shows what comes from below its own name
_library = torch.library.Library("kpt_vllm", "FRAGMENT")


def _run(output: Tensor, x: Tensor, index: Tensor, weights: Tensor, w1: Tensor, w2: Tensor, activation: str) -> None:
    output.copy_(experts(x, index, weights, w1, w2, activation=activation))


# One op for the graph of a compiled model: KPT's own there allocates what a backward pass would read, and checks each
# result, which takes longer than the experts of one token.
_library.define("experts(Tensor(a!) out, Tensor x, Tensor index, Tensor weights, Tensor w1, Tensor w2, str act) -> ()")
_library.impl("experts", _run, "CompositeExplicitAutograd")
torch.library.register_fake("kpt_vllm::experts", lambda *_: None, lib=_library)


class KptExperts(CPUUnquantizedExperts):  # type: ignore[misc]
    """Run the experts of a layer; how tokens get here, and what is reduced over ranks, stays vLLM's."""

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Leave the weights as they were loaded, `[experts, 2 * width, hidden]` and `[experts, hidden, width]`."""

    def apply(
        self,
        output: Tensor,
        hidden_states: Tensor,
        w1: Tensor,
        w2: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        activation: Any,
        *_: Any,
        apply_router_weight_on_input: bool,
        **__: Any,
    ) -> None:
        """Write the weighted sums of `hidden_states` `[tokens, hidden]` into `output` of the same shape."""
        # Then vLLM has multiplied the tokens by the weights already.
        weights = torch.ones_like(topk_weights) if apply_router_weight_on_input else topk_weights
        told = ACTIVATIONS[activation.value]
        torch.ops.kpt_vllm.experts(output, hidden_states, topk_ids, weights, w1, w2, told)


@UnquantizedFusedMoEMethod.register_oot
class KptMoEMethod(UnquantizedFusedMoEMethod):  # type: ignore[misc]
    """Choose `KptExperts` for each layer that KPT serves, and what vLLM chose for the others."""

    experts_cls: Any

    def __init__(self, moe: Any) -> None:
        super().__init__(moe)
        on_cpu = self.experts_cls is not None and issubclass(self.experts_cls, CPUUnquantizedExperts)
        reason = unsupported(moe) if on_cpu else "it was tried on CPUs alone, and vLLM runs on another device"
        if reason is None:
            self.experts_cls = KptExperts
            logger.info_once("KPT's kernels run the experts; KPT_VLLM=0 leaves them to vLLM.")
        else:
            logger.warning_once("vLLM's own kernels run experts, and not KPT's: %s.", reason)
