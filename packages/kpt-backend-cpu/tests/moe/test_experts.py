"""`moe.experts` against an independent computation in float64: results, every gradient, and what is refused."""

import pytest
import torch
from experts_oracle import Call, cotangent, make_call, truth

import kpt_core
from kpt_backend_cpu.moe import decode, experts
from kpt_core import NoKernelError

CALLS = {
    "plain": {},
    "transposed": {"transposed": True},
    "biased": {"biased": True},
    "gpt-oss": {"biased": True, "transposed": True, "interleaved": True, "alpha": 1.702, "beta": 1.0, "limit": 0.5},
    "relu2": {"activation": "relu2"},
    "geglu": {"activation": "geglu", "biased": True},
    "one token": {"tokens": 1},
    "nobody": {"tokens": 0},
    "no inner": {"inner": 0, "biased": True},
    "odd": {"tokens": 65, "hidden": 33, "inner": 17, "num_experts": 3},
}
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 4e-2, torch.float16: 5e-3}
NAMES = ("x", "top_k_index", "top_k_weights", "gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias")


def assert_near(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype, what: str = "result") -> None:
    assert got.shape == want.shape, what
    if want.numel():
        scale = want.abs().max().clamp(min=1e-3)
        error = ((got.double() - want).abs().max() / scale).item()
        assert error <= TOLERANCE[dtype], f"{what}: {error}"


def run(call: Call, target: str = "cpu") -> torch.Tensor:
    with kpt_core.use(target):
        return kpt_core.ops()["moe.experts"](*call.arguments, **call.options)


def leaves_of(call: Call) -> Call:
    arguments = [
        t.detach().clone().requires_grad_() if t is not None and t.is_floating_point() else t for t in call.arguments
    ]
    return Call(arguments, call.options)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_results_are_right(name, dtype, kernels):
    call = make_call(dtype=dtype, **CALLS[name])
    want, _ = truth(call)
    with torch.no_grad():
        for kernel in ("decode", "experts"):
            got = kernels[kernel](*call.arguments, **call.options)
            assert got.dtype is dtype
            assert_near(got, want, dtype, kernel)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_gradients_are_right_and_in_the_weights_memory_order(name, dtype, trained):
    call = leaves_of(make_call(dtype=dtype, **CALLS[name]))
    _, wanted = truth(call)
    out = trained["experts"](*call.arguments, **call.options)
    (out * cotangent(out)).sum().backward()
    for what, leaf, want in zip(NAMES, call.arguments, wanted, strict=True):
        if leaf is not None and leaf.is_floating_point():
            assert leaf.grad is not None
            got = torch.zeros_like(leaf, dtype=torch.float64) if want is None else want
            assert_near(leaf.grad, got, dtype, what)
            assert leaf.grad.dtype is leaf.dtype
            if leaf.dim() == 3 and leaf.numel():
                assert leaf.grad.stride() == leaf.stride(), what


def test_gradients_of_a_part_alone_are_right(trained):
    for wanted in (0, 2, 3, 4, 5, 6):
        call = make_call(biased=True)
        call.arguments[wanted] = call.arguments[wanted].clone().requires_grad_()
        out = trained["experts"](*call.arguments)
        (out * cotangent(out)).sum().backward()
        _, grads = truth(call)
        assert_near(call.arguments[wanted].grad, grads[wanted], torch.float32, NAMES[wanted])


def strided(t: torch.Tensor) -> torch.Tensor:
    """The same values, no dimension contiguous, NaN between them."""
    wide = torch.full((*t.shape[:-1], 2 * t.shape[-1]), torch.nan if t.is_floating_point() else -7, dtype=t.dtype)
    wide[..., ::2] = t
    return wide[..., ::2]


@pytest.mark.parametrize("kernel", ["decode", "experts"])
def test_strides_change_nothing(kernel, kernels):
    call = make_call(biased=True)
    want = kernels[kernel](*call.arguments)
    got = kernels[kernel](*[strided(t) for t in call.arguments])
    torch.testing.assert_close(got, want)
    every_second = torch.stack([call.arguments[0], call.arguments[0] + torch.nan], 1)[:, 0]
    assert torch.equal(kernels[kernel](every_second, *call.arguments[1:]), want)


def test_gradients_through_strided_arguments_are_right(trained):
    call = leaves_of(make_call(biased=True))
    strided_call = [t if not t.is_floating_point() else t.repeat_interleave(2, -1)[..., ::2] for t in call.arguments]
    out = trained["experts"](*strided_call)
    out.sum().backward()
    expanded = [t.grad for t in call.arguments if t.is_floating_point()]
    again = leaves_of(call)
    trained["experts"](*again.arguments).sum().backward()
    for got, leaf in zip(expanded, [t for t in again.arguments if t.is_floating_point()], strict=True):
        torch.testing.assert_close(got, leaf.grad)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("blocks", [False, True], ids=["channels", "blocks"])
def test_eight_bit_weights_are_their_codes_times_their_scales(blocks, dtype, kernels, trained):
    call = make_call(hidden=160, inner=136, num_experts=3)
    scales, dequantised = [], list(call.arguments)
    for at in (3, 4):
        codes = (call.arguments[at] * 8).to(dtype)
        experts, outputs, inputs = codes.shape
        if blocks:
            scale = torch.rand(experts, -(-outputs // 128), -(-inputs // 128), dtype=torch.float64) + 0.5
            wide = scale.repeat_interleave(128, 1)[:, :outputs].repeat_interleave(128, 2)[..., :inputs]
        else:
            scale = torch.rand(experts, outputs, dtype=torch.float64) + 0.5
            wide = scale.unsqueeze(-1)
        scales.append(scale)
        call.arguments[at], dequantised[at] = codes, codes.double() * wide.float().double()
    call.options = {"gate_up_scale": scales[0], "down_scale": scales[1]}
    want, grads = truth(Call(dequantised))
    call.arguments[0] = call.arguments[0].clone().requires_grad_()
    for kernel in ("decode", "experts"):
        with torch.no_grad():
            assert_near(kernels[kernel](*call.arguments, **call.options), want, torch.float32, kernel)
    out = trained["experts"](*call.arguments, **call.options)
    (out * cotangent(out)).sum().backward()
    assert_near(call.arguments[0].grad, grads[0], torch.float32)


def test_ids_of_32_bits_and_of_no_expert_are_understood(kernels):
    call = make_call()
    call.arguments[1][1:3] = torch.tensor([[5, 2], [2**40, -(2**40)]])
    want, _ = truth(call)
    for kernel in ("decode", "experts"):
        assert_near(kernels[kernel](*call.arguments), want, torch.float32)
    call.arguments[1][2] = 7
    narrow = Call([call.arguments[0], call.arguments[1].int(), *call.arguments[2:]])
    for kernel in ("decode", "experts"):
        assert torch.equal(kernels[kernel](*narrow.arguments), kernels[kernel](*call.arguments))


def test_few_tokens_go_the_way_of_decode_and_gradients_and_many_rows_do_not(kernels):
    op = kpt_core.ops()["moe.experts"]
    call = make_call(tokens=4)
    assert op.explain(*call.arguments).kernel.endswith("decode:forward")
    trained = leaves_of(call)
    assert op.explain(*trained.arguments).kernel.endswith("experts:forward")
    with torch.no_grad():
        assert op.explain(*trained.arguments).kernel.endswith("decode:forward")
    many = make_call(tokens=decode.MAX_TOKENS + 1, num_experts=64)
    assert op.explain(*many.arguments).kernel.endswith("experts:forward")
    crowded = make_call(tokens=25, num_experts=2, top_k=1)
    assert op.explain(*crowded.arguments).kernel.endswith("experts:forward")


def test_routing_weights_of_float64_are_refused_in_a_sentence(kernels):
    call = make_call()
    call.arguments[2] = call.arguments[2].double()
    with pytest.raises(NoKernelError, match="routing weights in float64; needs float32, bfloat16 or float16"):
        run(call)


def test_no_gradient_saves_nothing(trained):
    call = leaves_of(make_call())
    with torch.no_grad():
        assert trained["experts"](*call.arguments).grad_fn is None


def test_training_saves_the_arguments_the_order_and_the_pre_activation(trained):
    call, saved = leaves_of(make_call(tokens=50)), {}

    def note(tensor):
        saved[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        trained["experts"](*call.arguments)
    given = {t.data_ptr() for t in call.arguments if t is not None}
    extra = sum(size for place, size in saved.items() if place not in given)
    pairs, width, experts = 100, 48, 5
    assert extra == 4 * (pairs * width + pairs + experts)


def test_what_is_saved_is_what_the_contract_says(kernels):
    call = kpt_core.get_op("moe.experts").bind(*make_call(tokens=9, biased=True).arguments)
    assert experts.forward(call)[1] == ()
    out, (h, order, offsets) = experts.forward(call._replace(needs=("x",)))
    assert torch.equal(out, experts.forward(call)[0])
    ids = call.top_k_index.flatten()
    here = ids >= 0
    assert order.dtype is offsets.dtype is torch.int32
    assert sorted(order.tolist()) == list(range(18))
    assert torch.equal(offsets, ids[here].bincount(minlength=5).cumsum(0).int())
    assert torch.equal(ids[order][: offsets[-1]], ids[here].sort().values)
    for row, pair in enumerate(order[: offsets[-1]].tolist()):
        torch.testing.assert_close(h[row], call.gate_up_proj[ids[pair]] @ call.x[pair // 2], rtol=1e-4, atol=1e-5)


def test_backward_gives_the_gradients_that_are_wanted_and_no_others(kernels):
    call = kpt_core.get_op("moe.experts").bind(*make_call(biased=True).arguments)._replace(needs=("down_proj", "x"))
    out, saved = experts.forward(call)
    found = experts.backward(call, saved, torch.ones_like(out))
    assert {name: (grad.shape, grad.dtype) for name, grad in found.items()} == {
        name: (getattr(call, name).shape, getattr(call, name).dtype) for name in call.needs
    }


def test_no_token_leaves_an_order_that_others_can_read(kernels):
    empty = make_call(hidden=0)
    call = kpt_core.get_op("moe.experts").bind(*empty.arguments)._replace(needs=("gate_up_proj_bias",))
    _, (h, order, offsets) = experts.forward(call)
    assert sorted(order.tolist()) == list(range(26))
    assert offsets[-1] == 25
    assert h.count_nonzero() == 0


@pytest.mark.parametrize("tokens", [4, 90], ids=["decode", "experts"])
def test_compiled_and_exported_they_give_the_same(tokens, kernels):
    call = make_call(tokens=tokens, biased=True)
    op = kpt_core.ops()["moe.experts"]

    class Module(torch.nn.Module):
        def forward(self, *arguments):
            return op(*arguments)

    with torch.no_grad():
        want = op(*call.arguments)
        compiled = torch.compile(op, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(*call.arguments), want)
        program = torch.export.export(Module(), tuple(call.arguments), strict=False)
        assert torch.equal(program.module()(*call.arguments), want)
        assert not any("kpt_backend_cpu" in str(node.target) for node in program.graph.nodes)


def test_compiled_training_gives_the_same_gradients(kernels):
    call, again = leaves_of(make_call(biased=True)), leaves_of(make_call(biased=True))
    op = kpt_core.ops()["moe.experts"]
    op(*call.arguments).sum().backward()
    torch.compile(op, fullgraph=True, backend="aot_eager")(*again.arguments).sum().backward()
    for name, one, other in zip(NAMES, call.arguments, again.arguments, strict=True):
        if one.is_floating_point():
            assert torch.equal(one.grad, other.grad), name
