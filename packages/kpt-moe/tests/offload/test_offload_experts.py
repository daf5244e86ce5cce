"""Offloaded layers give what they gave before, for every budget and store, and come back whole."""

import copy
import os
import pickle
import subprocess
import sys
import threading

import pytest
import torch
from torch import nn

from kpt_core import InputError, KptError
from kpt_moe import FeedForwardExpert, MoEConfig, MoELayer, Routing
from kpt_moe.expert_networks.attention import AttentionExpert
from kpt_moe.expert_networks.convolutional import ConvolutionalExpert
from kpt_moe.expert_networks.parameter_efficient import ParameterEfficientExpert
from kpt_moe.offload import offload_experts
from network_checks import EXPERTS, ROUTINGS
from oracle import Inputs, naive_experts

HIDDEN = 16
#: The least, some that hold several experts, and all.
BUDGETS = ("least", "30%", "100%")

NETWORKS = {
    "swiglu": lambda: FeedForwardExpert(HIDDEN, num_experts=EXPERTS, intermediate_size=12),
    "gelu_bias": lambda: FeedForwardExpert(
        HIDDEN, num_experts=EXPERTS, intermediate_size=12, activation="gelu", bias=True
    ),
    "attention": lambda: AttentionExpert(HIDDEN, num_experts=EXPERTS, head_dim=8, bias=True),
    "convolutional": lambda: ConvolutionalExpert(HIDDEN, num_experts=EXPERTS, intermediate_size=12, bias=True),
    "lora": lambda: ParameterEfficientExpert(HIDDEN, num_experts=EXPERTS, intermediate_size=12, rank=2, bias=True),
    "lora_of_experts": lambda: ParameterEfficientExpert.from_feed_forward(
        FeedForwardExpert(HIDDEN, num_experts=EXPERTS, intermediate_size=12), rank=2
    ),
    "adapter": lambda: ParameterEfficientExpert(
        HIDDEN, num_experts=EXPERTS, intermediate_size=12, mode="adapter", rank=2
    ),
}


class Residual(nn.Module):
    def __init__(self, moe: MoELayer) -> None:
        super().__init__()
        self.moe = moe

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.moe(x)


def make(layers: int = 2, dtype: torch.dtype | None = None, **choices) -> nn.Sequential:
    torch.manual_seed(0)
    values = {"hidden_size": HIDDEN, "num_experts": 8, "top_k": 2, "intermediate_size": 12, **choices}
    return nn.Sequential(*(Residual(MoELayer(MoEConfig(**values), dtype=dtype)) for _ in range(layers)))


def least(model: nn.Module) -> int:
    """Bytes of the largest expert."""
    try:
        offload_experts(model, 1)
    except InputError as error:
        return int(str(error).split()[-2])
    raise AssertionError


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("network", NETWORKS)
def test_every_network_gives_the_same_for_every_budget(network, routing):
    holder = nn.Sequential(NETWORKS[network]()).double()
    with torch.no_grad():
        for parameter in holder.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    x, cu_seqlens = torch.randn(13, HIDDEN, dtype=torch.float64), torch.tensor([0, 5, 13], dtype=torch.int32)
    decided = ROUTINGS[routing](13)
    if decided.mask is not None:
        x[~decided.mask] = torch.nan
    outs = {}
    with torch.no_grad():
        want = holder[0](x, decided, cu_seqlens=cu_seqlens)
        for budget in (least(holder), *BUDGETS[1:]):
            with offload_experts(holder, budget) as handle:
                outs[budget] = holder[0](x, decided, cu_seqlens=cu_seqlens)
                holder[0](x, decided, cu_seqlens=cu_seqlens)
                assert handle.total().bytes_moved > 0
        assert torch.equal(holder[0](x, decided, cu_seqlens=cu_seqlens), want)
    assert len({out.numpy().tobytes() for out in outs.values()}) == 1
    torch.testing.assert_close(outs["100%"], want, rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("references")
@pytest.mark.parametrize("store", ["host", "disk"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [0, 1, 40])
def test_models_give_the_same_to_the_bit_for_every_budget(tokens, dtype, store, tmp_path):
    model = make(dtype=dtype, bias=True)
    x = torch.randn(tokens, HIDDEN).to(dtype)
    outs = []
    with torch.no_grad():
        want = model(x)
        for prefetch in (False, True):
            for budget in (least(model), "30%", "100%"):
                where = "host" if store == "host" else tmp_path / f"{budget}{prefetch}"
                with offload_experts(model, budget, store=where, prefetch=prefetch) as handle:
                    outs += [model(x), model(x)]
                    assert handle.total().hits > 0 or budget != "100%" or not tokens
    assert all(torch.equal(out, outs[0]) for out in outs)
    rounding = {torch.float32: 1e-6, torch.bfloat16: 2**-7}[dtype]
    torch.testing.assert_close(outs[0], want, rtol=rounding, atol=rounding)


def test_value_is_that_of_the_definition():
    model = make(layers=1, bias=True)
    x = torch.randn(9, HIDDEN)
    moe = model[0].moe
    routing = moe.route(x)
    parts = (moe.experts.gate_up_proj, moe.experts.down_proj, moe.experts.gate_up_proj_bias)
    parts = (*parts, moe.experts.down_proj_bias)
    inputs = Inputs(x, routing.index, routing.weights, *parts).to(torch.float64)
    want = x.double() + naive_experts(inputs)
    with torch.no_grad(), offload_experts(model, "25%"):
        torch.testing.assert_close(model(x).double(), want, rtol=1e-5, atol=1e-5)


def test_budget_is_kept_and_shared_by_all_layers():
    model = make(layers=3)
    handle = offload_experts(model, "25%", prefetch=False)
    cache = handle._cache
    assert handle.budget * 4 == handle.expert_bytes == 3 * 8 * 4 * (24 * HIDDEN + HIDDEN * 12)
    with torch.no_grad():
        one, other = torch.randn(1, HIDDEN), torch.randn(8, HIDDEN)
        for x in (one, one, other):  # two experts a layer, the same, and more than fit
            model(x)
            assert 0 < cache.used <= handle.budget
    by_layer = handle.statistics()
    assert list(by_layer) == ["0.moe.experts", "1.moe.experts", "2.moe.experts"]
    total = handle.total()
    for name in ("hits", "misses", "evictions", "bytes_moved"):
        assert getattr(total, name) == sum(getattr(layer, name) for layer in by_layer.values()) > 0
    assert total.bytes_moved == total.misses * handle.expert_bytes // 24


@pytest.mark.parametrize("store", ["host", "disk"])
def test_state_dict_stays_complete_and_restoring_gives_the_parameters_back(store, tmp_path):
    model = make(bias=True)
    parameters, want = dict(model.named_parameters()), {k: v.clone() for k, v in model.state_dict().items()}
    handle = offload_experts(model, "25%", store="host" if store == "host" else tmp_path / "experts")
    assert set(dict(model.named_parameters())) == {"0.moe.router.weight", "1.moe.router.weight"}
    assert sum(p.numel() for p in parameters.values()) == 2 * 8 * HIDDEN
    for _ in range(2):
        have = model.state_dict()
        assert list(have) == list(want)
        assert all(torch.equal(have[name], want[name]) for name in want)
        handle.restore()
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    model(torch.randn(3, HIDDEN)).sum().backward()
    assert parameters["0.moe.experts.down_proj"].grad is not None


def test_another_dtype_is_refused_and_a_device_is_not():
    """The store's numbers would keep theirs, and the next call would fail by them."""
    model = make()
    with offload_experts(model, "25%"), torch.no_grad():
        with pytest.raises(InputError, match=r"is offloaded as torch.float32 and can't become .*: restore\(\)"):
            model.to(torch.bfloat16)
        model.to("cpu", torch.float32)
        model(torch.randn(3, HIDDEN))


def test_loading_weights_into_an_offloaded_model_is_refused():
    model = make()
    state = model.state_dict()
    with offload_experts(model, "25%"), pytest.raises(RuntimeError, match=r"1.moe.experts is offloaded: restore\(\)"):
        model.load_state_dict(state)
    model.load_state_dict(state)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickle.dumps])
def test_copying_an_offloaded_model_is_refused(duplicate):
    model = make()
    with offload_experts(model, "25%"), pytest.raises(InputError, match=r"restore\(\) the model before copying"):
        duplicate(model)
    duplicate(model)


def test_training_an_offloaded_model_is_refused():
    model = make()
    with offload_experts(model, "25%"):
        with pytest.raises(InputError, match=r"0.moe.experts: offloaded experts are for inference: .* torch.no_grad"):
            model(torch.randn(3, HIDDEN))
        with torch.inference_mode():
            model(torch.randn(3, HIDDEN))


def test_attributes_hooks_and_mode_are_those_of_the_network():
    model = make()
    experts = model[0].moe.experts
    calls = []
    hook = experts.register_forward_hook(lambda module, args, out: calls.append(out.shape))
    weight = experts.down_proj.detach().clone()
    model.eval()
    with offload_experts(model, "25%"), torch.no_grad():
        stand_in = model[0].moe.experts
        assert (stand_in.num_experts, stand_in.intermediate_size, stand_in.training) == (8, 12, False)
        assert torch.equal(stand_in.down_proj, weight)
        assert not hasattr(stand_in, "rows")
        assert not hasattr(stand_in, "no_such_thing")
        assert "FeedForwardExpert, 8 experts of 2304 bytes" in repr(model)
        model(torch.randn(3, HIDDEN))
        hook.remove()
        model(torch.randn(3, HIDDEN))
    assert calls == [(3, HIDDEN)]
    model(torch.randn(3, HIDDEN))
    assert len(calls) == 1
    with offload_experts(model, "25%"):
        model.train()
    assert experts.training, "what was set while the model was offloaded stays"


def test_a_layer_that_is_used_twice_is_replaced_twice():
    shared = make(layers=1)[0]
    model = nn.Sequential(shared, nn.Linear(HIDDEN, HIDDEN), nn.ModuleDict({"again": shared.moe}))
    with offload_experts(model, "25%") as handle:
        assert list(handle.statistics()) == ["0.moe.experts"]
        assert model[0].moe.experts is model[2]["again"].experts


def test_threads_share_a_model():
    model = make(layers=3)
    xs = [torch.randn(6, HIDDEN) for _ in range(4)]
    with torch.no_grad(), offload_experts(model, least(model)):
        want = [model(x) for x in xs]
        wrong = []

        def work(i):
            with torch.no_grad():
                wrong.extend(not torch.equal(model(xs[i]), want[i]) for _ in range(8))

        threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert wrong == [False] * 32


def test_experts_on_meta_are_read_from_the_file(tmp_path):
    model = make()
    x = torch.randn(5, HIDDEN)
    with torch.no_grad():
        want = model(x)
    offload_experts(model, "100%", store=tmp_path / "experts").restore()
    for block in model:
        block.moe.experts.to("meta")
    with pytest.raises(InputError, match="experts on 'meta' have no weights: give the path of a file"):
        offload_experts(model, "25%")
    handle = offload_experts(model, "25%", store=tmp_path / "experts")
    with torch.no_grad():
        torch.testing.assert_close(model(x), want, rtol=1e-6, atol=1e-6)
    handle.restore()
    with torch.no_grad():
        assert torch.equal(model(x), want)
    assert model[0].moe.experts.down_proj.requires_grad


def test_a_file_that_disappears_is_named_and_the_model_goes_on(tmp_path):
    model, path = make(), tmp_path / "experts"
    x = torch.randn(5, HIDDEN)
    handle = offload_experts(model, least(model), store=path, prefetch=False)
    with torch.no_grad():
        want = model(x)
        path.rename(tmp_path / "elsewhere")
        with pytest.raises(KptError, match=r"expert \d of '0.moe.experts' could not be loaded: .*experts is no file"):
            model(x)
        with pytest.raises(InputError, match="experts is no file"):
            handle.restore()
        (tmp_path / "elsewhere").rename(path)
        assert torch.equal(model(x), want)
    handle.restore()


class Mixed(FeedForwardExpert):
    def __init__(self, **extra) -> None:
        super().__init__(HIDDEN, num_experts=8, intermediate_size=12)
        for name, value in extra.items():
            if isinstance(value, nn.Parameter):
                self.register_parameter(name, value)
            else:
                self.register_buffer(name, value)


def refused() -> dict[str, tuple[nn.Module, str]]:
    tied, twice = make(), make()
    tied[1].moe.experts.down_proj = tied[0].moe.experts.down_proj
    offload_experts(twice, "100%")
    hooked = make()
    hooked[0].moe.experts.forward = lambda x, routing: x
    quantised = nn.Sequential(Mixed(scales=torch.ones(8)))
    other, below = nn.Sequential(Mixed(norm=nn.Parameter(torch.ones(HIDDEN)))), nn.Sequential(Mixed())
    below[0].inner = nn.Sequential(
        FeedForwardExpert(HIDDEN, num_experts=8, intermediate_size=12), nn.Linear(HIDDEN, HIDDEN)
    )
    return {
        "none": (nn.Linear(2, 2), "Linear has no experts that can be offloaded"),
        "itself": (
            FeedForwardExpert(HIDDEN, num_experts=8, intermediate_size=12),
            "is itself a module of experts: pass the module that holds it",
        ),
        "tied": (tied, "0.moe.experts cannot be offloaded: it shares parameters with 1.moe.experts"),
        "twice": (twice, r"0.moe.experts is offloaded already: restore\(\) it first"),
        "hooked": (hooked, "0.moe.experts has a forward of its own"),
        "buffers": (quantised, r"each parameter of Mixed must be \[8, ...\], .*; got scales"),
        "shared": (other, r"each parameter of Mixed must be \[8, ...\], .*; got norm \[16\]"),
        "shared below": (
            below,
            r"each parameter of Linear must be \[8, ...\], .*; got inner.1.weight \[16, 16\], inner",
        ),
    }


@pytest.mark.parametrize("what", refused())
def test_what_cannot_be_offloaded_is_refused_and_left_alone(what):
    model, message = refused()[what]
    before = {name: p.shape for name, p in model.named_parameters()}
    with pytest.raises(InputError, match=message):
        offload_experts(model, "100%")
    assert {name: p.shape for name, p in model.named_parameters()} == before


def test_a_model_on_meta_needs_a_device():
    with pytest.raises(InputError, match="say on which device to compute"):
        offload_experts(make().to("meta"), "100%", store="unused")


def test_a_routing_without_logits_will_do():
    model = make(layers=1)
    routing = Routing(torch.tensor([[0, 1], [7, ~2]]), torch.tensor([[0.5, 0.5], [1.0, 0.0]]), torch.empty(0))
    x = torch.randn(2, HIDDEN)
    with torch.no_grad():
        want = model[0].moe(x, routing)
        with offload_experts(model, "25%"):
            torch.testing.assert_close(model[0].moe(x, routing), want, rtol=1e-6, atol=1e-6)


_PEAK = """
import sys, torch
from kpt_moe import MoEConfig, MoELayer
from kpt_moe.offload import offload_experts

def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))

def layer(device, **sizes):
    return MoELayer(MoEConfig(top_k=2, hidden_size=512, **sizes), device=device)

torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Sequential(*(layer("meta", num_experts=32, intermediate_size=512) for _ in range(2)))
for block in model:
    block.router.to_empty(device="cpu").reset_parameters()
warm = torch.nn.Sequential(layer("cpu", num_experts=4, intermediate_size=32))
with torch.no_grad():
    with offload_experts(warm, "100%", store=sys.argv[2]):
        warm(torch.randn(64, 512))
    handle = offload_experts(model, "12.5%", store=sys.argv[1])
    before = peak()
    for _ in range(4):
        model(torch.randn(64, 512))
total = handle.total()
print(peak() - before, handle.budget, handle.expert_bytes, total.bytes_moved)
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="the peak of a process is read from /proc")
def test_from_disk_a_process_needs_about_the_budget(tmp_path):
    config = MoEConfig(hidden_size=512, num_experts=32, top_k=2, intermediate_size=512)
    model = nn.Sequential(*(MoELayer(config) for _ in range(2)))
    offload_experts(model, "100%", store=tmp_path / "experts", prefetch=False)
    command = [sys.executable, "-c", _PEAK, str(tmp_path / "experts"), str(tmp_path / "warm")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    growth, budget, weights, moved = map(int, done.stdout.split())
    assert weights == 8 * budget == 2 * 32 * 3 * 2**20
    assert moved > weights, "every expert was needed"
    assert growth < 2 * budget
