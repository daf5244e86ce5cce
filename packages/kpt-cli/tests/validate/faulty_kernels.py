"""Kernels of `moe.experts` with a fault each, and tiny models whose experts they may serve."""

import torch
from torch import nn

import kpt_core
from kpt_moe.experts import experts

#: A kernel fails only for weights that begin with this number, so that a test chooses the module that goes wrong.
MARK = 0.015625
NAMES = ("sound", "tail", "coarse", "float8", "swallow_nan", "wrong_gradient")


def _faulty(fault):
    def kernel(call):
        out = experts.run_reference(call)
        return fault(out) if call.gate_up_proj[0, 0, 0] == MARK else out

    return kernel


def _without_last_row(out):
    return torch.cat((out[:-1], torch.zeros_like(out[-1:])))


sound = _faulty(lambda out: out)
tail = _faulty(_without_last_row)
coarse = _faulty(lambda out: out.bfloat16().to(out.dtype))
float8 = _faulty(lambda out: out.to(torch.float8_e4m3fn).to(out.dtype))
swallow_nan = _faulty(torch.nan_to_num)
wrong_gradient = _faulty(lambda out: out + 0.1 * (out - out.detach()))


class Backend(kpt_core.Backend):
    """All of them, for the CPU."""

    name = "faulty"
    device_types = ("cpu",)

    def kernels(self):
        return [kpt_core.Kernel("moe.experts", f"faulty_kernels:{name}", differentiable=True) for name in NAMES]


_SIZES = {
    "vocab_size": 128,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    # transformers' own 0.02 would leave the experts' share of the residual stream out of sight.
    "initializer_range": 0.2,
}


def mixtral(dtype=torch.float32, seed=0) -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(seed)
    config = MixtralConfig(intermediate_size=48, num_local_experts=4, num_experts_per_tok=2, **_SIZES)
    return MixtralForCausalLM(config).to(dtype).eval()


def qwen3(dtype=torch.float32, seed=0) -> nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        intermediate_size=48, moe_intermediate_size=24, num_experts=8, num_experts_per_tok=3, head_dim=8, **_SIZES
    )
    return Qwen3MoeForCausalLM(config).to(dtype).eval()


def marked(model: nn.Module, layer: int) -> nn.Module:
    """The model with the experts of one layer marked for the faulty kernels."""
    with torch.no_grad():
        model.model.layers[layer].mlp.experts.gate_up_proj[0, 0, 0] = MARK
    return model


def inputs(tokens: int = 24) -> dict:
    ids = torch.randint(128, (1, tokens), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "use_cache": False}


def patch_forward(module: nn.Module, change, dtypes=(torch.float32,)) -> None:
    """Change what a module gives in some dtypes; by its class, since a deep copy must take the change along."""
    cls = type(module)

    def forward(self, hidden_states, *args, **kwargs):
        out = cls.forward(self, hidden_states, *args, **kwargs)
        return change(out) if hidden_states.dtype in dtypes else out

    module.__class__ = type(cls.__name__, (cls,), {"forward": forward})


def choose_the_worst(token: int):
    """Send a token of a router to the experts with the lowest scores; the scores stay right."""

    def change(out):
        logits, weights, index = out
        index[token] = logits[token].topk(index.shape[1], largest=False).indices
        return logits, weights, index

    return change
