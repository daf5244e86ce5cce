"""The case table of `moe.experts`."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kpt_core import UnknownNameError
from kpt_moe.activations import GATED, PLAIN, Activation
from kpt_moe.expert_networks.quantized import SCHEMES
from kpt_moe.experts import ACTIVATIONS
from kpt_optimize.cases import Arguments, CaseTable, Domain, Sizes, WrongInput

from .common import MANY, WIDE, WIDER, case, normal, quantised, wrong

_wrong = partial(wrong, "moe.experts")

#: Which projections have a bias.
_BOTH = ("gate_up", "down")

#: What gpt-oss computes, with a limit that random numbers cross.
_GPT_OSS: dict[str, Any] = {
    "alpha": 1.702,
    "beta": 1.0,
    "limit": 0.7,
    "interleaved": True,
    "transposed": True,
    "biases": _BOTH,
}


def _routing(generator: torch.Generator, tokens: int, num_experts: int, top_k: int, load: str) -> Tensor:
    """`[tokens, top_k]` ids, distinct for each token unless the load is `one`; `far` has some beyond 32 bits."""
    if load == "one":
        return torch.full((tokens, top_k), num_experts // 2)
    if load == "away":  # of other ranks: beyond the experts and negative
        away = torch.tensor([-1, num_experts, num_experts + 7, -5])
        return away[torch.arange(tokens * top_k) % 4].view(tokens, top_k)
    known = num_experts + 2 if load in ("partly away", "far") else num_experts
    scores = torch.rand(tokens, known, generator=generator, dtype=torch.float64)
    if load == "skewed":
        scores = scores + torch.arange(known).flip(0) / 3
    index = scores.argsort(dim=1, descending=True)[:, :top_k]
    if load == "far":  # whose lower 32 bits are an expert's id
        index = torch.where(index == num_experts, 2**32 + num_experts - 1, index)
        return torch.where(index == num_experts + 1, num_experts // 2 - 2**32, index)
    return torch.where(index == num_experts + 1, -1, index)


#: A derivative that jumps: a pre-activation that rounding puts on the other side of the jump changes a whole row.
_KINKED = ("relu", "reglu")


def _away_from_kinks(x: Tensor, up: Tensor, inputs: int, quantised: bool) -> tuple[Tensor, Tensor]:
    """Signs for `x` and odd eighths for `up`: sums of an odd number of their products are odd eighths too.

    So the pre-activation is exact in every dtype, never zero and never at a limit of 0.7. Eighths are all alike where
    they are quantised, and are then exact as well.
    """
    most = float("inf") if quantised else up.abs().mean()
    x = x.sign()
    if inputs % 2 == 0:
        x[:, :1] = 0
    return x, up.sign() * (1 + 2 * (up.abs() > most)) / 8


def _quantised(weight: Tensor, scheme: str, transposed: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    codes, scale = quantised(weight.mT if transposed else weight, scheme, dtype)
    # No option of its own, or there would be more cases: the second of the dtypes has the wider scales.
    scale = scale.to(torch.float64 if dtype is torch.float8_e5m2 else torch.float32)
    if not transposed:
        return codes, scale
    return codes.mT.contiguous(), scale.mT.contiguous() if scheme == "128x128" else scale


def _build_experts(
    generator: torch.Generator,
    tokens: int = 11,
    hidden: int = 8,
    inner: int = 6,
    num_experts: int = 5,
    top_k: int | str = 3,
    activation: str = "swiglu",
    transposed: bool = False,
    biases: tuple[str, ...] = (),
    load: str = "random",
    ids: torch.dtype = torch.int64,
    weights: torch.dtype = torch.float64,
    up_scheme: str | None = None,
    down_scheme: str | None = None,
    float8: torch.dtype = torch.float8_e4m3fn,
    **parameters: Any,
) -> Arguments:
    width = 2 * inner if Activation(activation).gated else inner
    chosen = num_experts if top_k == "every" else min(int(top_k), num_experts)

    def matrices(inputs: int, outputs: int) -> Tensor:
        shape = (inputs, outputs) if transposed else (outputs, inputs)
        return normal(generator, num_experts, *shape, scale=max(inputs, 1) ** -0.5)

    x = normal(generator, tokens, hidden)
    up = matrices(hidden, width)
    bias = normal(generator, num_experts, width).round() / 4 if "gate_up" in biases else None
    if activation in _KINKED or parameters.get("limit") is not None:
        x, up = _away_from_kinks(x, up, inputs=hidden, quantised=up_scheme is not None)
        # Odd halves, which cross it and never meet it; few large numbers times 8-bit ones would be rounding alone.
        if (parameters.get("limit") or 0) > 1 and down_scheme is None:
            up, bias = 4 * up, None if bias is None else 4 * bias
    down = matrices(inner, hidden)
    if up_scheme is not None:
        up, parameters["gate_up_scale"] = _quantised(up, up_scheme, transposed, float8)
    if down_scheme is not None:
        down, parameters["down_scale"] = _quantised(down, down_scheme, transposed, float8)
    return {
        "x": x,
        "top_k_index": _routing(generator, tokens, num_experts, chosen, load).to(ids),
        # A router of one's own may weigh an expert by less than nothing.
        "top_k_weights": (torch.rand(tokens, chosen, generator=generator, dtype=torch.float64) - 0.25).to(weights),
        "gate_up_proj": up,
        "down_proj": down,
        "gate_up_proj_bias": bias,
        "down_proj_bias": normal(generator, num_experts, hidden, scale=0.3) if "down" in biases else None,
        "activation": activation,
        "transposed": transposed,
        **parameters,
    }


def _allowed(values: Mapping[str, Any]) -> bool:
    activation = Activation(values["activation"])
    parameters = (values["alpha"], values["beta"], values["limit"]) != (1.0, 0.0, None)
    if (parameters and activation.name != "swiglu") or (values["interleaved"] and not activation.gated):
        return False
    if values["load"] == "far" and values["ids"] is torch.int32:
        return False
    if values["activations"] != "none" and None in (values["up_scheme"], values["down_scheme"]):
        return False
    quantised = values["up_scheme"] is not None or values["down_scheme"] is not None
    pairs = values.get("tokens", 1) * values.get("num_experts", 1) if values["top_k"] == "every" else 1
    hidden, inner = values.get("hidden", 1), values.get("inner", 1)
    if 3 * values.get("num_experts", 1) * hidden * inner + values.get("tokens", 1) * hidden > _MOST_NUMBERS:
        return False
    return (quantised or values["float8"] is torch.float8_e4m3fn) and pairs <= _MOST_PAIRS


#: Of a token and an expert, so that cases stay small.
_MOST_PAIRS = 1024
_MOST_NUMBERS = 3_500_000

#: Of each the options, the choices and the experts' number, as far as that is small; of widths a part.
_FAMILIES: dict[str, dict[str, Any]] = {
    "gpt-oss": {"tokens": 5, "hidden": 360, "inner": 180, "num_experts": 8, "top_k": 4, **_GPT_OSS, "limit": 7.0},
    "Mixtral": {"tokens": 6, "hidden": 512, "inner": 224, "num_experts": 8, "top_k": 2},
    "Qwen3-MoE, a step": {"tokens": 1, "hidden": 512, "inner": 48, "num_experts": 32, "top_k": 8},
    "Qwen3-Next": {"tokens": 4, "hidden": 128, "inner": 96, "num_experts": 64, "top_k": 10},
    "GraniteMoe": {"tokens": 40, "hidden": 256, "inner": 96, "num_experts": 32, "top_k": 8},
    "DeepSeek-V2-Lite": {"tokens": 16, "hidden": 256, "inner": 66, "num_experts": 64, "top_k": 6},
    "DeepSeek-V3": {
        "tokens": 9,
        "hidden": 300,
        "inner": 130,
        "num_experts": 16,
        "top_k": 8,
        "up_scheme": "128x128",
        "down_scheme": "128x128",
        "activations": "1x128",
    },
    "DeepSeek-V3 of one rank": {"tokens": 40, "hidden": 640, "inner": 60, "num_experts": 16, "load": "partly away"},
    "Llama 4": {"tokens": 9, "hidden": 320, "inner": 160, "num_experts": 16, "top_k": 1, "transposed": True},
    "clamped": {"tokens": 12, "hidden": 192, "inner": 96, "num_experts": 16, "top_k": 4, "limit": 7.0},
    "sixteen choices": {"tokens": 5, "hidden": 64, "inner": 40, "num_experts": 24, "top_k": 16},
    "Switch": {"tokens": 33, "hidden": 256, "inner": 200, "num_experts": 8, "top_k": 1, "activation": "relu"},
}

_DOMAIN = Domain(
    sizes={
        "tokens": Sizes(many=MANY, usual=(1, 8, 16)),
        "hidden": Sizes(1, many=WIDER, usual=(WIDE,)),
        "inner": Sizes(1, many=WIDE, usual=(390,)),
        "num_experts": Sizes(1, 257, usual=(8, 128)),
    },
    options={
        "activation": ("swiglu", *sorted((GATED | PLAIN) - {"swiglu"})),
        "biases": ((), _BOTH, ("gate_up",), ("down",)),
        "load": ("random", "one", "skewed", "partly away", "far"),
        "weights": (torch.float64, torch.float32, torch.bfloat16, torch.float16),
        "up_scheme": (None, *SCHEMES),
        "down_scheme": (None, *SCHEMES),
        "float8": (torch.float8_e4m3fn, torch.float8_e5m2),
        "top_k": (3, 1, "every"),
        "transposed": (False, True),
        "interleaved": (False, True),
        "alpha": (1.0, 1.702, 1.5),
        "beta": (0.0, 1.0, -0.5),
        "limit": (None, 0.7, 7.0),
        "activations": ACTIVATIONS,
        "ids": (torch.int64, torch.int32),
    },
    sized=("up_scheme", "down_scheme", "transposed"),
    families=_FAMILIES,
    allowed=_allowed,
)


def _padding_of_experts(arguments: Arguments) -> Mapping[str, Tensor]:
    """Routing weights of pairs that are not here, and tokens without any pair that is."""
    index, num_experts = arguments["top_k_index"], arguments["gate_up_proj"].shape[0]
    away = (index < 0) | (index >= num_experts)
    return {"top_k_weights": away, "x": away.all(1, keepdim=True)}


def _reduction_of_experts(arguments: Arguments) -> int:
    """The longest sum: over both projections in turn and a token's experts, or over the tokens of an expert."""
    tokens, top_k = arguments["top_k_index"].shape
    width = arguments["gate_up_proj"].numel() // max(arguments["gate_up_proj"].shape[0] * arguments["x"].shape[1], 1)
    return int(max(arguments["x"].shape[1] + width + top_k, tokens * top_k))


# fmt: off
EXPERTS = CaseTable(
    op="moe.experts",
    build=_build_experts,
    cases=(
        case("small"),
        case("no tokens", tokens=0),
        case("one token", tokens=1),
        case("63 tokens, odd sizes", tokens=63, hidden=31, inner=17, num_experts=7),
        case("one expert", num_experts=1, top_k=1),
        case("all to one expert", tokens=40, load="one"),
        case("experts without tokens", tokens=3, num_experts=16, top_k=2),
        case("skewed load", tokens=64, num_experts=8, hidden=32, inner=24, load="skewed"),
        case("some pairs not here", tokens=21, load="partly away"),
        case("no pair here", load="away"),
        case("int32 ids", ids=torch.int32),
        case("bias", biases=_BOTH, tokens=19),
        case("transposed", transposed=True, tokens=19),
        *(
            case(activation, activation=activation, biases=_BOTH if activation == "relu2" else ())
            for activation in ("geglu", "geglu_tanh", "reglu", "silu", "gelu", "gelu_tanh", "relu", "relu2")
        ),
        case("gpt-oss options", tokens=24, hidden=32, inner=16, **_GPT_OSS),
        case("8-bit", tokens=19, up_scheme="row", down_scheme="row"),
        case("8-bit blocks", tokens=13, hidden=136, inner=136, up_scheme="128x128", down_scheme="128x128"),
        case("8-bit, transposed", hidden=136, inner=72, up_scheme="128x128", down_scheme="128x128", transposed=True,
            biases=_BOTH),
        case("8-bit, activations too", tokens=160, hidden=136, inner=136, top_k=2, num_experts=4, up_scheme="128x128",
            down_scheme="128x128", activations="1x128"),
        case("8-bit, rows of activations too", tokens=160, top_k=2, num_experts=4, up_scheme="row", down_scheme="row",
            activations="row"),
        case("granite-3.1-1b-a400m", tokens=63, hidden=1024, inner=512, num_experts=32, top_k=8, model=True),
        case("olmoe-1b-7b decode", tokens=1, hidden=2048, inner=1024, num_experts=64, top_k=8, model=True, large=True),
        case("mixtral-8x7b", tokens=1024, hidden=4096, inner=14336, num_experts=8, top_k=2, model=True, large=True),
        case("qwen3-30b-a3b", tokens=1024, hidden=2048, inner=768, num_experts=128, top_k=8, model=True, large=True),
    ),
    wrong=(
        _wrong("x of three dimensions",
            r"x must be floating \[tokens, hidden_size\].*got torch\.float32 \[1, 11, 8\]", x=lambda t: t[None]),
        _wrong("x of integers", r"x must be floating.*got torch\.int64", x=Tensor.long),
        _wrong("routing of another number of tokens",
            r"top_k_index and top_k_weights must both be \[11, top_k\]; got \[10, 3\]", top_k_index=lambda t: t[:-1]),
        _wrong("ids of floats", r"top_k_index must be int64 or int32.*got torch\.float32", top_k_index=Tensor.float),
        _wrong("matrices stored the other way",
            r"with hidden_size 8.*transposed=True.*asks for itself as \[5, 8, 8\]", transposed=lambda _: True),
        _wrong("down_proj of another width", r".*asks for .*down_proj as \[5, 8, 6\]; got down_proj \[5, 8, 5\]",
            down_proj=lambda t: t[:, :, :-1]),
        _wrong("bias of another width", r"down_proj_bias must be \[5, 8\]; got \[5, 7\]",
            down_proj_bias=lambda t: t[:, 1:], sizes={"biases": _BOTH}),
        _wrong("weights of another dtype", r"down_proj must have x's dtype and device.*got torch\.float64.*convert",
            down_proj=Tensor.double),
        _wrong("weights on another device", r"down_proj must have x's dtype and device.*got torch\.float32 on meta",
            down_proj=lambda t: t.to("meta")),
        _wrong("activations beside weights of x's dtype", r"activations='row' is for weights of 8 bits.*; got "
            r"torch\.float32 and torch\.float32: leave it out", activations=lambda _: "row"),
        WrongInput(
            name="unknown granularity",
            change=lambda a: {**a, "activations": "token"},
            message=r"unknown granularity of activations 'token'",
            error=UnknownNameError,
        ),
        WrongInput(
            name="unknown activation",
            change=lambda a: {**a, "activation": "swigloo"},
            message=r"unknown activation 'swigloo': did you mean 'swiglu'",
            error=UnknownNameError,
        ),
    ),
    gradients=("x", "top_k_weights", "gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias"),
    padding=_padding_of_experts,
    reduction=_reduction_of_experts,
    rare=(torch.float64,),
    domain=_DOMAIN,
    kept=frozenset({"gate_up_scale", "down_scale"}),
    leave=lambda arguments: 0.03 if arguments.get("activations", "none") != "none" else 0.0,
)
# fmt: on
