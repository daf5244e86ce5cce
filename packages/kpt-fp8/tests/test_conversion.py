import copy
import gc
import math
import pickle
import threading
import weakref
from itertools import pairwise

import pytest
import torch
from torch import nn

from kpt_core import InputError, UnknownNameError
from kpt_fp8 import NativeFP8Linear, conversion_report, convert_model_to_fp8, weights


class Language(nn.Module):
    """A language model of one block; its head is tied to the embedding."""

    def __init__(self, head="head"):
        super().__init__()
        self.embedding = nn.Embedding(96, 64)
        self.block = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
        self.gate = nn.Linear(64, 8)
        setattr(self, head, nn.Linear(64, 96, bias=False))
        getattr(self, head).weight = self.embedding.weight
        self.head_name = head

    def forward(self, tokens):
        return getattr(self, self.head_name)(self.block(self.embedding(tokens)))


def converted(model):
    return [name for name, module in model.named_modules() if isinstance(module, NativeFP8Linear)]


def stack(*widths):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(*pair) for pair in pairwise(widths)))


def test_a_copy_of_a_small_language_model():
    torch.manual_seed(0)
    model = Language().eval()
    before = copy.deepcopy(model.state_dict())
    changed = convert_model_to_fp8(model, granularity="row")
    assert converted(changed) == ["block.linear1", "block.linear2"]
    assert converted(model) == []
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    assert changed.head.weight is changed.embedding.weight
    assert changed.head.weight is not model.head.weight
    tokens = torch.randint(0, 96, (2, 7))
    # Without gradients, too, where torch would take its fused path.
    with torch.no_grad():
        close = torch.nn.functional.cosine_similarity(changed(tokens).flatten(), model(tokens).flatten(), 0)
    assert 0.999 < close < 1
    report = conversion_report(changed)
    assert "tied to embedding.weight" in report.skipped["head"]
    assert "fewer than min_features=64" in report.skipped["gate"]
    first = report.layers[0]
    assert (first.name, first.shape) == ("block.linear1", (128, 64))
    assert (first.bytes_before, first.bytes_after) == ((128 * 64 + 128) * 4, 128 * 64 + 128 * 4 * 2)
    assert 28 < first.quality.worst_row_sqnr < first.quality.sqnr < 36
    assert "block.linear1  [128, 64]" in str(report)


def test_the_encoder_of_torch_without_gradients_and_with_padding():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 64, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    changed = convert_model_to_fp8(model)
    padding = torch.tensor([[False, False, True], [False, False, False]])
    x = torch.randn(2, 3, 64)
    with torch.no_grad():
        out = changed(x, src_key_padding_mask=padding)
    expected = model(x, src_key_padding_mask=padding)
    torch.testing.assert_close(out[~padding], expected[~padding], rtol=0.1, atol=0.1)
    assert model.use_nested_tensor


def test_in_place_old_weights_are_freed_one_by_one():
    model = stack(64, 64, 64, 64)
    bias = model[0].bias
    old = [weakref.ref(layer.weight) for layer in model]
    alive = []

    def progress(done, total, name):
        gc.collect()
        alive.append((done, total, name, sum(each() is not None for each in old)))

    assert convert_model_to_fp8(model, inplace=True, progress=progress) is model
    assert alive == [(0, 3, "0", 3), (1, 3, "1", 2), (2, 3, "2", 1), (3, 3, "done", 0)]
    assert converted(model) == ["0", "1", "2"]
    assert model[0].bias is bias


def test_a_copy_never_copies_what_is_converted(monkeypatch):
    model = stack(64, 128)
    weight = id(model[0].weight)
    copied = []
    original = nn.Parameter.__deepcopy__
    monkeypatch.setattr(nn.Parameter, "__deepcopy__", lambda p, memo: copied.append(id(p)) or original(p, memo))
    changed = convert_model_to_fp8(model)
    assert weight not in copied
    assert changed[0].bias is not model[0].bias
    assert torch.equal(changed[0].bias, model[0].bias)


def test_one_layer_is_never_whole_in_anything_wider(monkeypatch):
    seen = []
    original = weights.quantize
    monkeypatch.setattr(weights, "quantize", lambda x, *a, **k: seen.append(x.numel()) or original(x, *a, **k))
    convert_model_to_fp8(stack(512, 2048))
    assert sum(seen) == 512 * 2048
    assert max(seen) <= 2**18


@pytest.mark.parametrize("inplace", [False, True])
def test_a_shared_layer_is_converted_once_and_stays_shared(inplace):
    shared = nn.Linear(64, 64)
    model = nn.Sequential(shared, nn.ReLU(), nn.ModuleDict({"again": shared})["again"])
    changed = convert_model_to_fp8(model, inplace=inplace)
    assert isinstance(changed[0], NativeFP8Linear)
    assert changed[0] is changed[2]
    assert len(conversion_report(changed).layers) == 1


def test_two_layers_with_one_bias_keep_one_bias():
    model = stack(64, 64, 64)
    model[1].bias = model[0].bias
    changed = convert_model_to_fp8(model)
    assert changed[0].bias is changed[1].bias
    assert changed[0].bias is not model[0].bias


def test_weights_tied_by_memory_alone_stay():
    model = stack(64, 64, 64, 64)
    model[2].weight = nn.Parameter(model[0].weight.data)
    assert converted(convert_model_to_fp8(model)) == ["1"]


def test_patterns():
    model = nn.ModuleDict({"attention": nn.ModuleDict({"q_proj": nn.Linear(64, 64), "k_proj": nn.Linear(64, 64)})})
    model["mlp"] = nn.Linear(64, 64)
    model["inner"] = nn.ModuleDict({"lm_head": nn.Linear(64, 64)})
    assert converted(convert_model_to_fp8(model)) == ["attention.q_proj", "attention.k_proj", "mlp"]
    assert converted(convert_model_to_fp8(model, include="q_proj")) == ["attention.q_proj"]
    assert converted(convert_model_to_fp8(model, include=["attention.*"], exclude="k_*")) == ["attention.q_proj"]
    # What is excluded comes beside `lm_head`, which only include asks for.
    assert converted(convert_model_to_fp8(model, exclude="attention.*")) == ["mlp"]
    assert converted(convert_model_to_fp8(model, exclude=None)) == ["attention.q_proj", "attention.k_proj", "mlp"]
    assert converted(convert_model_to_fp8(model, include=["lm_head", "mlp"])) == ["mlp", "inner.lm_head"]
    assert converted(convert_model_to_fp8(model, include="*", exclude="attention.*")) == ["mlp", "inner.lm_head"]
    with pytest.raises(
        InputError, match=r"include has '\*\.v_proj', which describes no nn\.Linear.*'attention.q_proj'"
    ):
        convert_model_to_fp8(model, include=["*.v_proj"])
    with pytest.raises(InputError, match=r"exclude has 'decoder', which describes no module.*correct the pattern"):
        convert_model_to_fp8(model, exclude=("decoder",))
    with pytest.raises(InputError, match=r"include must be patterns.*got 3"):
        convert_model_to_fp8(model, include=[3])


def test_excluding_a_module_leaves_all_layers_in_it():
    model = nn.ModuleDict({"vision": stack(64, 64, 64), "text": stack(64, 64)})
    model["lm_head"] = nn.ModuleDict({"dense": nn.Linear(64, 64)})
    # `lm_head` is left without being asked for only where it is the layer itself.
    assert converted(convert_model_to_fp8(model, exclude="vision")) == ["text.0", "lm_head.dense"]
    assert converted(convert_model_to_fp8(model, exclude=("vision", "lm_head"))) == ["text.0"]
    assert conversion_report(convert_model_to_fp8(model, exclude="vis*")).skipped["vision.1"] == "excluded by 'vis*'"


def test_a_second_conversion_adds_to_the_report():
    model = stack(64, 64, 64)
    changed = convert_model_to_fp8(convert_model_to_fp8(model, include="0"), include="1", granularity="tensor")
    assert [layer.name for layer in conversion_report(changed).layers] == ["0", "1"]
    assert [layer.granularity for layer in changed] == ["row", "tensor"]


def test_a_single_layer():
    assert isinstance(convert_model_to_fp8(nn.Linear(64, 64)), NativeFP8Linear)
    with pytest.raises(InputError, match=r"use NativeFP8Linear\.from_linear"):
        convert_model_to_fp8(nn.Linear(64, 64), inplace=True)


def test_state_dict_goes_into_another_converted_model_and_through_a_file(tmp_path):
    first, second = (convert_model_to_fp8(stack(64, 96, 64), granularity="mxfp8") for _ in range(2))
    with torch.no_grad():
        second[1].bias.fill_(3)
    torch.save(first.state_dict(), tmp_path / "state.pt")
    second.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    x = torch.randn(3, 64)
    assert torch.equal(first(x), second(x))
    assert torch.equal(copy.deepcopy(first)(x), first(x))


def test_training_goes_on_with_the_biases():
    model = convert_model_to_fp8(stack(64, 64, 64))
    codes = model[0].weight.codes.clone()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    x = torch.randn(8, 64)
    before = model(x).square().mean()
    for _ in range(5):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    assert model(x).square().mean() < before
    assert torch.equal(model[0].weight.codes.view(torch.uint8), codes.view(torch.uint8))


def test_compiled():
    model = convert_model_to_fp8(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)))
    x = torch.randn(3, 64)
    torch.testing.assert_close(torch.compile(model, backend="aot_eager", fullgraph=True)(x), model(x))


def test_subclasses_of_linear_are_left():
    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    model = nn.Sequential(Doubled(64, 64), nn.Linear(64, 64), nn.MultiheadAttention(64, 4))
    changed = convert_model_to_fp8(model)
    assert converted(changed) == ["1"]
    skipped = conversion_report(changed).skipped
    assert skipped["0"] == "it is a Doubled, a subclass of nn.Linear, which may use its weight in its own way"
    assert "NonDynamicallyQuantizableLinear" in skipped["2.out_proj"]


def test_an_encoder_whose_first_layer_is_left():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 64, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    changed = convert_model_to_fp8(model, exclude="layers.0.*")
    padding = torch.tensor([[False, False, True], [False, False, False]])
    x = torch.randn(2, 3, 64)
    with torch.no_grad():
        out = changed(x, src_key_padding_mask=padding)
    torch.testing.assert_close(out[~padding], model(x, src_key_padding_mask=padding)[~padding], rtol=0.1, atol=0.1)


def test_refusals_leave_the_model_as_it_was():
    model = stack(64, 64, 64)
    model[1].weight.data[0, 0] = math.inf
    with pytest.raises(InputError, match=r"the weight of '1' must hold .* finite.*got 1 of 4096"):
        convert_model_to_fp8(model, inplace=True)
    assert converted(model) == []
    with pytest.raises(InputError, match=r"the weight of '0' is on the meta device.*load the weights first"):
        convert_model_to_fp8(nn.Sequential(nn.Linear(64, 64, device="meta")))
    with pytest.raises(
        InputError, match=r"no layer to convert.*got 1 that are left.*0: 8 to 8 features.*change include"
    ):
        convert_model_to_fp8(nn.Sequential(nn.Linear(8, 8)))
    with pytest.raises(InputError, match=r"no layer to convert.*got 1 that are left.*0: it is 8-bit already"):
        convert_model_to_fp8(convert_model_to_fp8(stack(64, 64)))
    with pytest.raises(InputError, match=r"no layer to convert.*got 0"):
        convert_model_to_fp8(nn.ReLU())
    with pytest.raises(UnknownNameError, match=r"unknown granularity 'col'"):
        convert_model_to_fp8(stack(64, 64), granularity="col")
    with pytest.raises(InputError, match=r"must be an nn.Module; got str"):
        convert_model_to_fp8("model")
    with pytest.raises(InputError, match=r"got a ReLU that does not"):
        conversion_report(nn.ReLU())
    hooked = stack(64, 64)
    hooked[0].register_forward_hook(lambda *_: None)
    with pytest.raises(InputError, match=r"'0' has hooks"):
        convert_model_to_fp8(hooked)


def test_wrong_arguments_are_sentences():
    model = stack(64, 64)
    for least in ("64", None, 0, -1):
        with pytest.raises(InputError, match=rf"min_features must be a positive integer; got {least!r}: 64 is usual"):
            convert_model_to_fp8(model, min_features=least)
    with pytest.raises(InputError, match=r"include must be patterns of module names.*got 7"):
        convert_model_to_fp8(model, include=7)
    for scale, got in (("a", "'a'"), (torch.ones(2), r"a tensor of shape \[2\]")):
        with pytest.raises(
            InputError, match=rf"input_scales of '0' must be one number; got {got}: give what calibrate"
        ):
            convert_model_to_fp8(model, activations="tensor", input_scales={"0": scale})


def test_a_model_that_can_not_be_copied_is_converted_in_place():
    model = stack(64, 64)
    model.lock = threading.Lock()
    with pytest.raises(InputError, match=r"can't copy this Sequential: cannot pickle.*lock.*inplace=True"):
        convert_model_to_fp8(model)
    assert converted(model) == []
    assert converted(convert_model_to_fp8(model, inplace=True)) == ["0"]


@pytest.mark.parametrize("inplace", [False, True])
def test_save_pretrained_would_lose_the_scales(inplace, tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=64, hidden_size=64, num_hidden_layers=1, num_attention_heads=4, intermediate_size=128
    )
    model = convert_model_to_fp8(transformers.BertModel(config), inplace=inplace)
    for each in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with pytest.raises(InputError, match=r"would take the codes .* for its weights: save its state dict, or"):
            each.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())


def test_t5_which_converts_its_input_to_the_dtype_of_a_weight():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.T5Config(d_model=64, d_kv=16, d_ff=128, num_layers=1, num_heads=4, vocab_size=96)
    model = transformers.T5EncoderModel(config).eval()
    changed = convert_model_to_fp8(model)
    assert any(name.endswith("DenseReluDense.wo") for name in converted(changed))
    tokens = torch.randint(1, 96, (2, 7))
    with torch.no_grad():
        out, expected = (each(tokens).last_hidden_state.flatten() for each in (changed, model))
        half = changed.bfloat16()(tokens).last_hidden_state
    assert 0.99 < torch.nn.functional.cosine_similarity(out, expected, 0) < 1
    assert half.dtype is torch.bfloat16
