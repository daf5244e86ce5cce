"""Each feature of KPT by itself on the saved model: what it gains, and what it costs."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from kpt_optimize.measure import parameter_bytes

from .measure import Figures
from .model import load_model, mean_loss


def _with_experts(folder: Path) -> Any:
    import kpt_moe.transformers  # noqa: F401  registers "kpt"

    return load_model(folder, experts_implementation="kpt")


def _with_fp8(folder: Path) -> Any:
    from kpt_fp8 import convert_model_to_fp8

    return convert_model_to_fp8(_with_experts(folder), inplace=True)


def _with_attention(folder: Path) -> Any:
    import kpt_attention.transformers  # noqa: F401  registers "kpt"

    return load_model(folder, attn_implementation="kpt")


@dataclass(frozen=True, slots=True)
class Feature:
    """One way to use KPT.

    Attributes:
        name: of the feature.
        package: that has it.
        beside: name of the feature that it is compared with, or `before` for the model as transformers loads it.
        what: it does to the model, and beside what.
        code: that turns it on.
        load: loads the saved model with it.
    """

    name: str
    package: str
    beside: str
    what: str
    code: str
    load: Callable[[Path], Any]


FEATURES = (
    Feature(
        "Mixture-of-Experts",
        "kpt-moe",
        "before",
        "KPT's experts beside transformers' own",
        'from_pretrained(..., experts_implementation="kpt")',
        _with_experts,
    ),
    Feature(
        "FP8",
        "kpt-fp8",
        "Mixture-of-Experts",
        "experts and linear layers with weights of 8 bits beside KPT's experts in float32",
        "kpt_fp8.convert_model_to_fp8(model, inplace=True)",
        _with_fp8,
    ),
    Feature(
        "attention",
        "kpt-attention",
        "before",
        "KPT's attention beside PyTorch's",
        'from_pretrained(..., attn_implementation="kpt")',
        _with_attention,
    ),
)


def load_features(folder: Path) -> tuple[dict[str, Any], list[str]]:
    """Load the saved model once with each feature; return the models by name, and a sentence for what is missing."""
    models, missing = {}, []
    for feature in FEATURES:
        try:
            models[feature.name] = feature.load(folder)
        except ModuleNotFoundError as error:
            missing.append(
                f"{feature.name} was left out: {error}; pip install ./packages/{feature.package} from a clone"
            )
    return models, missing


def pairs(models: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return what is compared with what."""
    return [(feature.beside, feature.name) for feature in FEATURES if feature.name in models]


def described(models: Mapping[str, Any], speed: Sequence[list[Figures]], rows: Tensor) -> list[Figures]:
    """Return the report of each feature; `speed` is that of `pairs`, and `rows` `[windows, context]` held-out text."""
    read = {name: math.exp(mean_loss(model, rows)) for name, model in models.items() if name != "plain"}
    size = {name: parameter_bytes(model) for name, model in models.items()}
    found = [feature for feature in FEATURES if feature.name in models]
    return [
        {
            "name": feature.name,
            "what": feature.what,
            "code": feature.code,
            "comparisons": comparisons,
            "bytes": {"before": size[feature.beside], "after": size[feature.name]},
            "perplexity": {"before": read[feature.beside], "after": read[feature.name]},
        }
        for feature, comparisons in zip(found, speed, strict=True)
    ]
