"""fbgemm_fp8, as Llama 3.1 405B has it: a scale for each row, activations by row with a bound."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from kpt_core import InputError
from kpt_fp8.checkpoints.scheme import Scheme

from .base import Format, Takes


class Fbgemm(Format):
    """`quant_method` "fbgemm_fp8" of transformers and vLLM."""

    name = "fbgemm_fp8"
    method = "fbgemm_fp8"
    takes: ClassVar[Takes] = {"row": (("row", False),)}
    bound = 1200.0

    def read_config(self, config: Mapping[str, Any]) -> Scheme:  # noqa: D102
        bound = config.get("activation_scale_ub", self.bound)
        if not isinstance(bound, int | float) or not bound > 0:
            raise InputError(
                f"{self.name}: quantization_config has activation_scale_ub={bound!r}; expected a positive number"
            )
        return Scheme(granularity="row", activations="row", bound=float(bound))

    def write_config(self, scheme: Scheme, skipped: Sequence[str]) -> dict[str, Any]:  # noqa: D102
        return {
            "quant_method": self.method,
            "activation_scale_ub": scheme.bound,
            "modules_to_not_convert": list(skipped),
        }

    def stored_shape(self, shape: Sequence[int], granularity: str) -> list[int]:  # noqa: D102
        return [shape[0], 1]
