"""A linear layer whose matrix has zeros at the edge, and which looks like one that has not."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kpt_core import InputError


class PaddedLinear(nn.Module):
    """`nn.Linear` of awkward sizes, computed with sizes that tensor cores like.

    The padding never takes part: inputs are padded by zeros and padded outputs are cut off, so the gradient of the
    padding is zero and an optimiser leaves it zero. The state dict holds `weight` and `bias` of the original sizes, as
    copies.

    Args:
        module: whose weight and bias are copied.
        padded_in: columns of the padded weight, at least `in_features`.
        padded_out: rows of the padded weight, at least `out_features`.

    Attributes:
        in_features: of the input, without padding.
        out_features: of the output, without padding.
        padded_weight: `[padded_out, padded_in]`, the parameter.
        padded_bias: `[padded_out]`, the parameter, or None.
    """

    def __init__(self, module: nn.Linear, padded_in: int, padded_out: int) -> None:
        super().__init__()
        self.in_features, self.out_features = module.in_features, module.out_features
        self._extra_in, self._extra_out = padded_in - module.in_features, padded_out - module.out_features
        self.padded_weight = self._padded(module.weight)
        bias: Tensor | None = module.bias  # torch's types leave the None out
        self.padded_bias = None if bias is None else self._padded(bias)

    @property
    def weight(self) -> Tensor:
        """`[out_features, in_features]`, a view of the parameter."""
        return self.padded_weight[: self.out_features, : self.in_features]

    @property
    def bias(self) -> Tensor | None:
        """`[out_features]`, a view of the parameter, or None."""
        padded: Tensor | None = self.padded_bias
        return None if padded is None else padded[: self.out_features]

    def forward(self, x: Tensor) -> Tensor:
        """As `nn.Linear`: `[..., in_features]` to `[..., out_features]`, contiguous.

        Raises:
            InputError: the last dimension is another.
        """
        if x.shape[-1] != self.in_features:  # padded, a wrong size could pass for a right one
            raise InputError(
                f"the input's last dimension must be in_features={self.in_features}; got shape {tuple(x.shape)}"
            )
        if self._extra_in:
            x = F.pad(x, (0, self._extra_in))
        y = F.linear(x, self.padded_weight, self.padded_bias)
        return y[..., : self.out_features].contiguous() if self._extra_out else y

    def unpadded(self) -> nn.Linear:
        """A plain layer with a copy of the weights as they are now."""
        weight, bias = self.weight, self.bias
        module = nn.Linear(self.in_features, self.out_features, bias=bias is not None, device="meta")
        module.weight = nn.Parameter(weight.detach().clone(), weight.requires_grad)
        if bias is not None:
            module.bias = nn.Parameter(bias.detach().clone(), bias.requires_grad)
        return module.train(self.training)

    def extra_repr(self) -> str:
        """Both pairs of sizes."""
        padded_out, padded_in = self.padded_weight.shape
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"padded to {padded_in} and {padded_out}"
        )

    def _padded(self, original: Tensor) -> nn.Parameter:
        """A parameter of the padded size with the values of a weight or bias."""
        extra = (0, self._extra_out) if original.ndim == 1 else (0, self._extra_in, 0, self._extra_out)
        return nn.Parameter(F.pad(original.detach(), extra), original.requires_grad)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        for name, value in (("weight", self.weight), ("bias", self.bias)):
            if value is not None:
                destination[prefix + name] = value if keep_vars else value.detach().clone()

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        own = {"weight": self.weight} if self.bias is None else {"weight": self.weight, "bias": self.bias}
        for name, view in own.items():
            given = state_dict.get(prefix + name)
            if given is None:
                missing_keys.append(prefix + name)
            elif given.shape != view.shape:
                error_msgs.append(
                    f"size mismatch for {prefix + name}: copying a param with shape {tuple(given.shape)} from "
                    f"checkpoint, the shape in current model is {tuple(view.shape)}."
                )
            elif local_metadata.get("assign_to_params_buffers", False):
                kept = getattr(self, f"padded_{name}").requires_grad
                setattr(self, f"padded_{name}", self._padded(given).requires_grad_(kept))
            else:
                with torch.no_grad():
                    view.copy_(given)
        if strict:
            unexpected_keys += [key for key in state_dict if key.startswith(prefix) and key[len(prefix) :] not in own]
