"""A model's life with `experts_implementation="kpt"`: loading, saving, copying, compiling, expert parallelism."""

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, MixtralForCausalLM, PreTrainedModel

from families import FAMILIES, experts_of
from kpt_core import record
from kpt_moe.transformers import NAME, kpt_experts_forward

#: The same again with another setting, for `nox -s full`.
slow = pytest.mark.slow

pytestmark = pytest.mark.usefixtures("quiet")

PROMPT = torch.tensor([[5, 11, 7, 30, 8]])


def logits(model: PreTrainedModel) -> Tensor:
    with torch.no_grad():
        out: Tensor = model(PROMPT).logits
    return out


def ops_of(model: PreTrainedModel) -> set[str]:
    with record() as log:
        logits(model)
    return {selection.op for selection in log}


@pytest.fixture(params=["mixtral", "gpt_oss", "nemotron_h", "muse_spark"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    """One that has run with KPT's experts."""
    built = FAMILIES[request.param].build()
    built.set_experts_implementation(NAME)
    logits(built)
    return built


def test_the_name_is_registered_for_every_model():
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    assert ALL_EXPERTS_FUNCTIONS[NAME] is kpt_experts_forward


def test_may_be_set_back(model):
    ours = logits(model)
    model.set_experts_implementation("eager")
    assert ops_of(model) == set()
    torch.testing.assert_close(logits(model), ours, rtol=1e-4, atol=1e-5)
    model.set_experts_implementation(NAME)
    assert torch.equal(logits(model), ours)


def test_from_config(model):
    made = type(model)._from_config(copy.deepcopy(model.config), experts_implementation=NAME)
    assert ops_of(made.train(False))
    made.load_state_dict(model.state_dict())
    assert torch.equal(logits(made), logits(model))


def test_saved_and_loaded(model, tmp_path):
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, experts_implementation=NAME)
    assert ops_of(loaded)
    assert torch.equal(logits(loaded), logits(model))


def test_what_is_saved_does_not_need_kpt(tmp_path):
    model = FAMILIES["mixtral"].build()
    model.set_experts_implementation(NAME)
    logits(model)
    model.save_pretrained(tmp_path)
    assert "kpt" not in Path(tmp_path, "config.json").read_text(encoding="utf-8")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert isinstance(loaded, MixtralForCausalLM)
    assert ops_of(loaded) == set()
    torch.testing.assert_close(logits(loaded), logits(model), rtol=1e-4, atol=1e-5)


def test_running_leaves_no_trace_in_the_model(model):
    never_ran = type(model)._from_config(copy.deepcopy(model.config))
    assert model.state_dict().keys() == never_ran.state_dict().keys()
    assert repr(model) == repr(never_ran)
    for ran, fresh in zip(experts_of(model), experts_of(never_ran), strict=True):
        assert vars(ran).keys() == vars(fresh).keys()


def test_copies_and_pickles(model):
    pickled = pickle.dumps(model)
    assert b"kpt_moe" not in pickled, "who unpickles need not have KPT"
    for same in (copy.deepcopy(model), pickle.loads(pickled)):
        assert torch.equal(logits(same), logits(model))
        assert ops_of(same)


def test_activation_checkpointing():
    model = FAMILIES["mixtral"].build()
    model.set_experts_implementation(NAME)
    model.train()
    grads = []
    for checkpoint in (False, True):
        if checkpoint:
            model.activation_checkpointing_enable()
        model.zero_grad()
        model(PROMPT, labels=PROMPT).loss.backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_a_step_of_training_lowers_the_loss():
    model = FAMILIES["qwen3_moe"].build()
    model.set_experts_implementation(NAME)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(4):
        loss = model(PROMPT, labels=PROMPT).loss
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses == sorted(losses, reverse=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    model = FAMILIES["mixtral"].build()
    out = {}
    for implementation in ("grouped_mm", NAME):
        model.set_experts_implementation(implementation)
        with torch.autocast("cpu", dtype=dtype):
            out[implementation] = logits(model)
    assert out[NAME].dtype is out["grouped_mm"].dtype
    scale = out["grouped_mm"].abs().max().item()
    torch.testing.assert_close(out[NAME], out["grouped_mm"], rtol=0, atol=0.05 * scale)


@pytest.mark.parametrize("dynamic", [pytest.param(False, marks=slow), True])
def test_decoder_layer_compiles_without_a_break(dynamic):
    model = FAMILIES["mixtral"].build()
    model.set_experts_implementation(NAME)
    layer = model.model.layers[0]
    compiled = torch.compile(layer, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for tokens in (7, 8):
        x = torch.randn(2, tokens, 32, requires_grad=True)
        positions = torch.arange(tokens).unsqueeze(0)
        choices: dict[str, Any] = {
            "position_embeddings": model.model.rotary_emb(x, positions),
            "position_ids": positions,
            "attention_mask": None,
        }
        have, want = compiled(x, **choices), layer(x, **choices)
        torch.testing.assert_close(have, want, rtol=1e-5, atol=1e-5)
        wanted = [x, *layer.parameters()]
        have_grads, want_grads = (torch.autograd.grad(out.sin().sum(), wanted) for out in (have, want))
        torch.testing.assert_close(have_grads, want_grads, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", [pytest.param("mixtral", marks=slow), "gpt_oss"])
def test_model_compiles_without_a_break(name):
    model = FAMILIES[name].build()
    model.set_experts_implementation(NAME)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        have = compiled(PROMPT, use_cache=False).logits
    torch.testing.assert_close(have, logits(model), rtol=1e-5, atol=1e-5)


def half(module: Any, first: int, count: int) -> Any:
    """The module with some of its experts, as expert parallelism leaves them on a rank."""
    part = copy.deepcopy(module)
    for name, parameter in module.named_parameters(recurse=False):
        setattr(part, name, nn.Parameter(parameter.detach()[first : first + count].clone()))
    part.num_experts = count
    part._is_expert_parallel = True
    return part


@pytest.mark.parametrize("poison", [0.0, float("nan")])
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "nemotron_h", "muse_spark", "inkling2", "aria"])
def test_experts_split_over_two_ranks_add_up(name, poison):
    model = FAMILIES[name].build()
    model.set_experts_implementation(NAME)
    module = experts_of(model)[0].double()
    experts, hidden = module.num_experts, module.down_proj.shape[2 if module.is_transposed else 1]
    index = torch.stack([torch.randperm(experts)[:3] for _ in range(20)])
    index[3], index[8] = torch.tensor([0, 1, 2]), torch.tensor([experts - 1, experts - 2, experts - 3])
    leaves = {
        "x": torch.randn(20, hidden, dtype=torch.float64).requires_grad_(),
        "weights": torch.rand(20, 3, dtype=torch.float64).requires_grad_(),
    }
    whole = module(leaves["x"], index, leaves["weights"])
    grad = torch.randn_like(whole)
    want = torch.autograd.grad(whole, [*leaves.values(), *module.parameters()], grad)

    total, inputs = torch.zeros_like(whole), [torch.zeros_like(leaf) for leaf in leaves.values()]
    parameters: list[list[Tensor]] = []
    for first, count in ((0, experts // 2), (experts // 2, experts - experts // 2)):
        part = half(module, first, count)
        away = (index < first) | (index >= first + count)
        nowhere = away.all(1, keepdim=True)
        assert nowhere.any()
        # What a rank holds in the rows of other ranks' tokens is up to the communication.
        x = leaves["x"].detach().masked_fill(nowhere, poison).requires_grad_()
        weights = leaves["weights"].detach().masked_fill(away, 0).requires_grad_()
        out = part(x, torch.where(away, count, index - first), weights)
        total += out.detach()
        assert (out[nowhere.squeeze(1)] == 0).all()
        grad_x, grad_weights, *rest = torch.autograd.grad(out, [x, weights, *part.parameters()], grad)
        assert (grad_weights[away] == 0).all()
        inputs[0] += grad_x
        inputs[1] += grad_weights
        parameters.append(rest)
    torch.testing.assert_close(total, whole.detach())
    torch.testing.assert_close(inputs, list(want[:2]))
    names = [name for name, _ in module.named_parameters()]
    for name, both, expected in zip(names, zip(*parameters, strict=True), want[2:], strict=True):
        if "." in name:  # the post-expert norm, which each rank holds whole and which computes in float32
            torch.testing.assert_close(sum(both), expected, rtol=1e-5, atol=1e-5)
        else:
            torch.testing.assert_close(torch.cat(both), expected)


def test_generation_with_a_static_cache():
    model = FAMILIES["mixtral"].build()
    choices = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "disable_compile": True}
    outputs = []
    for implementation in ("eager", NAME):
        model.set_experts_implementation(implementation)
        outputs.append(model.generate(PROMPT, cache_implementation="static", **choices))
    assert torch.equal(*outputs)
