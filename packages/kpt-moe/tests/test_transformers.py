"""Models of transformers give the same with `experts_implementation="kpt"` as with their own eager experts."""

import copy

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import kpt_moe.transformers
from families import FAMILIES, VOCABULARY, Family, experts_of
from kpt_core import KptWarning, record

pytestmark = pytest.mark.usefixtures("quiet")

#: Largest difference in a tensor, relative to its largest number: some hundred float32 roundings on the way through.
TOLERANCE = 1e-5
#: The most that is granted where a gradient nearly cancels.
LOOSEST = 1e-4

#: Gated experts, with biases and a limit, without a gate, with a limit alone, and two that grouped products serve.
KINDS_OF_EXPERTS = {"mixtral", "gpt_oss", "nemotron_h", "deepseek_v4", "muse_spark", "inkling2"}


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]


def hidden_size(model: PreTrainedModel) -> int:
    return model.get_input_embeddings().weight.shape[1]


def run(model: PreTrainedModel, implementation: str, x: Tensor) -> tuple[dict[str, Tensor | None], list[str]]:
    """Logits and the gradients of input embeddings and parameters, and the ops that were called."""
    model.set_experts_implementation(implementation)
    model.zero_grad()
    x = x.clone().requires_grad_()
    with record() as log:
        logits = model(inputs_embeds=x).logits
        logits.backward(torch.randn(logits.shape, generator=torch.Generator().manual_seed(0)))
    tensors = {"logits": logits.detach(), "inputs_embeds": x.grad}
    return tensors | {name: p.grad for name, p in model.named_parameters()}, [selection.op for selection in log]


def difference(have: Tensor, want: Tensor) -> float:
    largest = want.abs().max()
    return ((have - want).abs().max() / largest).item() if largest > 0 else have.abs().max().item()


def test_logits_and_gradients(family):
    model = family.build()
    x = torch.randn(2, 9, hidden_size(model))
    have, ops = run(model, kpt_moe.transformers.NAME, x)
    want, none = run(model, "eager", x)
    assert none == []
    if family.served_by == "moe.experts":
        assert ops == ["moe.experts"] * family.experts
    else:
        # Two products forward, and more backward where the kernel's backward calls ops in turn.
        assert ops.count("moe.grouped_mm") >= 2 * family.experts
        assert set(ops) <= {"moe.grouped_mm", "moe.grouped_mm_wgrad"}
    unused = {name for name, value in want.items() if value is None}
    assert {name for name, value in have.items() if value is None} == unused
    others = [run(model, implementation, x)[0] for implementation in ("grouped_mm", "batched_mm")]
    for name in want.keys() - unused:
        # Where transformers' own implementations differ from each other by more, sums cancel, and ours may differ too.
        theirs = max(difference(other[name], want[name]) for other in others)
        tolerance = min(max(TOLERANCE, 4 * theirs), LOOSEST)
        assert difference(have[name], want[name]) <= tolerance, name
    for module in experts_of(model):
        assert all(p.grad is not None and p.grad.abs().max() > 0 for p in module.parameters())


def test_experts_matter(family):
    # Else the parity above would say little.
    model = family.build()
    model.set_experts_implementation(kpt_moe.transformers.NAME)
    x = torch.randn(2, 9, hidden_size(model))
    with torch.no_grad():
        want = model(inputs_embeds=x).logits
        assert len(experts_of(model)) == family.experts
        for module in experts_of(model):
            module.down_proj.zero_()
        assert difference(model(inputs_embeds=x).logits, want) > 0.1


def test_generates_the_same(family):
    model = family.build()
    prompt = torch.randint(3, VOCABULARY, (2, 5))
    tokens = {}
    for implementation in ("eager", kpt_moe.transformers.NAME):
        model.set_experts_implementation(implementation)
        with record() as log:
            tokens[implementation] = model.generate(prompt, max_new_tokens=6, min_new_tokens=6, do_sample=False)
        called = {selection.op for selection in log}
        assert called == (set() if implementation == "eager" else {family.served_by})
    assert tokens["eager"].shape == (2, 11)
    assert torch.equal(tokens[kpt_moe.transformers.NAME], tokens["eager"])
    assert len(tokens["eager"][:, 5:].unique()) > 1, "one token over and over says nothing"


def replay(model: PreTrainedModel, routings: list[tuple[Tensor, Tensor]]) -> None:
    """Send tokens to the experts that another run chose."""
    for module, (index, weights) in zip(experts_of(model), routings, strict=True):
        module.register_forward_pre_hook(lambda _, args, i=index, w=weights: (args[0], i, w.to(args[2].dtype)))


# One family of each kind of experts: those of the others differ in what is around them, which float32 shows as well.
@pytest.mark.parametrize(
    "family",
    [name if name in KINDS_OF_EXPERTS else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES],
    indirect=True,
)
def test_bfloat16_is_as_good_as_eager(family, tmp_path):
    # The project's rule for a kernel, with transformers' own experts as the reference: both are compared with the same
    # numbers in float32. The routing is that of float32 too: a token that bfloat16 sends elsewhere, which is chance,
    # would drown the experts' own errors.
    model = family.build()
    model.save_pretrained(tmp_path)
    low = type(model).from_pretrained(tmp_path, dtype=torch.bfloat16, experts_implementation=kpt_moe.transformers.NAME)
    exact = copy.deepcopy(low).float()
    exact.set_experts_implementation("eager")
    x = torch.randn(8, 32, hidden_size(low)).bfloat16()
    routings: list[tuple[Tensor, Tensor]] = []
    for module in experts_of(exact):
        module.register_forward_pre_hook(lambda _, args: routings.append(args[1:]))
    with torch.no_grad():
        want = exact(inputs_embeds=x.float()).logits
        replay(low, routings)
        with record() as log:
            ours = (low(inputs_embeds=x).logits.float() - want).abs()
        low.set_experts_implementation("eager")
        theirs = (low(inputs_embeds=x).logits.float() - want).abs()
    assert {selection.op for selection in log} == {family.served_by}
    assert theirs.mean() > 0
    assert ours.mean() <= 1.1 * theirs.mean()
    assert ours.max() <= 2 * theirs.max()


def test_models_with_experts_of_another_kind_are_left_alone():
    # Llama 4 keeps its experts in a batched product of its own, which transformers does not dispatch.
    family = Family(
        model="Llama4ForCausalLM",
        config="Llama4TextConfig",
        values={"num_local_experts": 4, "intermediate_size_mlp": 24, "head_dim": 8, "num_experts_per_tok": 1},
    )
    model = family.build()
    assert any("Experts" in type(module).__name__ for module in model.modules())
    assert experts_of(model) == []
    x = torch.randn(2, 9, hidden_size(model))
    want, _ = run(model, "eager", x)
    have, ops = run(model, kpt_moe.transformers.NAME, x)
    assert ops == []
    assert all(torch.equal(have[name], value) for name, value in want.items() if value is not None)


def test_a_model_that_another_one_switches_off_says_so():
    model, ids = FAMILIES["mixtral"].build(), torch.arange(3, 9)[None]
    model.set_experts_implementation(kpt_moe.transformers.NAME)
    model(ids)
    other = type(model)._from_config(model.config, experts_implementation="eager")
    with pytest.warns(KptWarning, match="'eager', and MixtralForCausalLM has the same config"), record() as log:
        model(ids)
    assert [other.config is model.config, log] == [True, []]
