"""What `optimize` may do to a model's experts."""

import functools

import pytest
import torch
from torch import nn

import kpt_optimize
from families import FAMILIES, experts_of
from kpt_core import record
from kpt_moe.rewrites import REWRITES, Bfloat16Experts, KptExperts, is_transformers_experts
from kpt_moe.transformers import NAME

pytestmark = pytest.mark.usefixtures("quiet")

PROMPT = torch.tensor([[5, 11, 7, 30, 8]])


@pytest.fixture
def model() -> nn.Module:
    built = FAMILIES["qwen3_moe"].build()
    built.set_experts_implementation("eager")
    return built


def swap(model: nn.Module, rewrite: KptExperts | Bfloat16Experts) -> None:
    for site in list(rewrite.sites(model)):
        model.set_submodule(site.module, rewrite.replacement(model.get_submodule(site.module)))


@pytest.mark.parametrize("name", FAMILIES)
def test_experts_are_recognised(name):
    model = FAMILIES[name].build()
    model.set_experts_implementation("eager")
    found = [module for module in model.modules() if is_transformers_experts(module)]
    assert found == experts_of(model)
    modules = dict(model.named_modules())
    assert [modules[site.module] for site in KptExperts().sites(model)] == found
    assert {site.op for site in KptExperts().sites(model)} == {"moe.experts"}


def test_what_kpt_serves_already_is_no_site(model):
    model.set_experts_implementation(NAME)
    assert list(KptExperts().sites(model)) == []
    assert len(list(Bfloat16Experts().sites(model))) == 2
    assert list(Bfloat16Experts().sites(model.bfloat16())) == []


def test_lossless_gives_the_same_and_shares_the_weights(model):
    want, originals = model(PROMPT).logits, experts_of(model)
    swap(model, KptExperts())
    with record() as log:
        have = model(PROMPT).logits
    assert [selection.op for selection in log] == ["moe.experts"] * 2
    torch.testing.assert_close(have, want)
    for original, new in zip(originals, experts_of(model), strict=True):
        assert new is not original
        assert all(a is b for a, b in zip(new.parameters(), original.parameters(), strict=True))
        assert original.config._experts_implementation == "eager"
    assert model.config._experts_implementation == "eager"


def test_bfloat16_halves_the_weights_and_leaves_the_original(model):
    want, originals = model(PROMPT).logits, experts_of(model)
    swap(model, Bfloat16Experts())
    have = model(PROMPT).logits
    assert have.dtype is torch.float32
    assert not torch.equal(have, want)
    torch.testing.assert_close(have, want, rtol=0, atol=0.05 * want.abs().max().item())
    for original, new in zip(originals, experts_of(model), strict=True):
        assert {p.dtype for p in original.parameters()} == {torch.float32}
        assert {p.dtype for p in new.parameters()} == {torch.bfloat16}
        assert all(torch.equal(a, b.bfloat16()) for a, b in zip(new.parameters(), original.parameters(), strict=True))


@pytest.mark.parametrize("rewrite", REWRITES, ids=lambda rewrite: rewrite.name)
def test_what_is_registered_later_is_not_shared(model, rewrite):
    original = experts_of(model)[0]
    called = []
    original.register_forward_hook(lambda *_: called.append("before"))
    twin = rewrite.replacement(original)
    twin.register_forward_hook(lambda *_: called.append("twin"))
    original.register_forward_hook(lambda *_: called.append("original"))
    twin.register_buffer("late", torch.ones(1), persistent=False)
    args = torch.randn(3, original.down_proj.shape[1]), torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1)
    twin(*args)
    assert called == ["before", "twin"]
    original(*args)
    assert called == ["before", "twin", "before", "original"]
    assert not hasattr(original, "late")
    assert not original._non_persistent_buffers_set


@pytest.mark.parametrize("rewrite", REWRITES, ids=lambda rewrite: rewrite.name)
def test_a_forward_of_the_instance_is_no_site(model, rewrite):
    # What accelerate's hooks do.
    first, second = experts_of(model)
    first.forward = functools.partial(first.forward)
    modules = dict(model.named_modules())
    assert [modules[site.module] for site in rewrite.sites(model)] == [second]


@pytest.mark.parametrize("requires_grad", [False, True])
def test_replacements_stay_trainable_or_frozen(model, requires_grad):
    model.requires_grad_(requires_grad)
    for rewrite in REWRITES:
        replacement = rewrite.replacement(experts_of(model)[0])
        assert {p.requires_grad for p in replacement.parameters()} == {requires_grad}


@pytest.mark.parametrize("rewrite", REWRITES, ids=lambda rewrite: rewrite.name)
def test_other_modules_are_refused(rewrite):
    assert not is_transformers_experts(nn.Linear(2, 2))
    with pytest.raises(kpt_optimize.RejectedError, match="another rewrite had put Linear in their place already"):
        rewrite.replacement(nn.Linear(2, 2))


def test_optimize_finds_them(model):
    names = {rewrite.name: rewrite.lossless for rewrite in REWRITES}
    assert names == {"moe.experts": True, "moe.experts_bfloat16": False}
    installed = kpt_optimize.rewrites()
    assert {name: installed[name].lossless for name in names} == names
