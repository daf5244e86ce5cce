"""Faults in the choice of experts."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kpt_moe.top_k_gating import choose_experts, score_experts, weigh_experts

from .mutant import Mutant

MUTANTS: list[Mutant] = []


class Gating:
    """A right kernel of `moe.top_k_gating`, differentiated by autograd."""

    def read(self, logits: Tensor) -> Tensor:
        return logits.to(torch.float64 if logits.dtype is torch.float64 else torch.float32)

    def scored(self, logits: Tensor, call: Any) -> Tensor:
        return score_experts(logits, call.score)

    def chosen(self, scores: Tensor, call: Any) -> Tensor:
        return choose_experts(scores, call.correction_bias, call.top_k, call.num_groups, call.top_groups)

    def weighed(self, scores: Tensor, index: Tensor, call: Any) -> Tensor:
        return weigh_experts(scores, index, call.score, call.renormalize, call.scale)

    def __call__(self, call: Any) -> tuple[Tensor, Tensor]:
        scores = self.scored(self.read(call.logits), call)
        index = self.chosen(scores.detach(), call)
        return self.weighed(scores, index, call), index


def gating(name: str, found_by: str = "values", at: Any = "small") -> Callable[[type[Gating]], None]:
    """Enter a mutant: the decorated class. `at` may be a part of a case's name."""

    def enter(cls: type[Gating]) -> None:
        likely = (lambda trial: at in trial.case.name) if isinstance(at, str) else at
        MUTANTS.append(Mutant(name, "moe.top_k_gating", found_by, lambda: (cls(),), {"differentiable": True}, likely))

    return enter


@gating("logits beyond two are cut", at=lambda t: t.case.drawn)
class _(Gating):
    def read(self, logits):
        return super().read(logits).clamp(-2, 2)


@gating("softmax is taken without its maximum", at="large logits")
class _(Gating):
    def scored(self, logits, call):
        if call.score != "softmax":
            return super().scored(logits, call)
        raised = logits.exp()
        return raised / raised.sum(-1, keepdim=True)


@gating("a logit of -inf becomes the smallest number", found_by="magnitudes")
class _(Gating):
    def read(self, logits):
        return super().read(logits).nan_to_num(nan=float("nan"), neginf=-1.0)


@gating("a row with -inf is NaN", found_by="magnitudes")
class _(Gating):
    def read(self, logits):
        read = super().read(logits)
        return read + torch.where(read.isneginf().any(-1, keepdim=True), float("nan"), 0.0)


@gating("a correction bias is rounded to whole numbers", at=lambda t: t.case.drawn and t.case.sizes.get("bias"))
class _(Gating):
    def chosen(self, scores, call):
        bias = call.correction_bias
        return super().chosen(scores, call._replace(correction_bias=None if bias is None else bias.round()))


@gating("a negative correction bias counts as zero", at=lambda t: t.case.drawn and t.case.sizes.get("bias"))
class _(Gating):
    def chosen(self, scores, call):
        bias = call.correction_bias
        return super().chosen(scores, call._replace(correction_bias=None if bias is None else bias.clamp(min=0)))


@gating("the correction bias is weighed too", at="correction bias")
class _(Gating):
    def weighed(self, scores, index, call):
        return super().weighed(scores if call.correction_bias is None else scores + call.correction_bias, index, call)


@gating("where all experts are chosen they keep their order", at="every expert")
class _(Gating):
    def chosen(self, scores, call):
        index = super().chosen(scores, call)
        return index.sort(-1).values if call.top_k == scores.shape[1] else index


@gating("experts past the sixty-fourth are never chosen", at=lambda t: t.case.sizes.get("experts", 0) > 64)
class _(Gating):
    def chosen(self, scores, call):
        kept = torch.arange(scores.shape[1]) < 64
        return super().chosen(scores.masked_fill(~kept, -1e30), call)


@gating("experts are lost where their number is no power of two", at="odd sizes")
class _(Gating):
    def chosen(self, scores, call):
        kept = 1 << (scores.shape[1].bit_length() - 1)
        if call.top_k > kept or call.num_groups > 1:
            return super().chosen(scores, call)
        return super().chosen(scores.masked_fill(torch.arange(scores.shape[1]) >= kept, -1e30), call)


@gating("choices past the eighth repeat the first", at=lambda t: t.case.sizes.get("top_k") == "every")
class _(Gating):
    def chosen(self, scores, call):
        index = super().chosen(scores, call)
        return torch.cat((index[:, :8], index[:, :1].expand(-1, max(call.top_k - 8, 0))), 1)


@gating("groups are always judged by their best expert", at="groups with correction bias")
class _(Gating):
    def chosen(self, scores, call):
        if call.correction_bias is None:
            return super().chosen(scores, call)
        return super().chosen(scores + call.correction_bias, call._replace(correction_bias=None))


@gating("groups are always judged by their best two", at="groups")
class _(Gating):
    def chosen(self, scores, call):
        zero = torch.zeros(scores.shape[1])
        bias = zero if call.correction_bias is None else call.correction_bias
        return super().chosen(scores, call._replace(correction_bias=bias))


@gating("groups left out score zero, which may be the best", at="groups with correction bias")
class _(Gating):
    def chosen(self, scores, call):
        if call.num_groups == call.top_groups:
            return super().chosen(scores, call)
        biased = scores if call.correction_bias is None else scores + call.correction_bias
        grouped = biased.unflatten(-1, (call.num_groups, -1))
        best = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values
        judged = best[..., 0] if call.correction_bias is None else best.sum(-1)
        groups = judged.topk(call.top_groups, dim=-1).indices
        inside = (groups.unsqueeze(-1) == torch.arange(call.num_groups)).any(-2)
        return (grouped * inside.unsqueeze(-1)).flatten(-2).topk(call.top_k, dim=-1).indices


@gating("one group more may be chosen from", at="groups")
class _(Gating):
    def chosen(self, scores, call):
        return super().chosen(scores, call._replace(top_groups=min(call.top_groups + 1, call.num_groups)))


@gating("scores are rounded to bfloat16 before the choice", at="deepseek")
class _(Gating):
    def chosen(self, scores, call):
        return super().chosen(scores.bfloat16().float(), call)


@gating("the scale counts only where weights are not renormalised", at="softmax after, renormalised")
class _(Gating):
    def weighed(self, scores, index, call):
        return super().weighed(scores, index, call._replace(scale=1.0 if call.renormalize else call.scale))


@gating("the gradient takes the sum of weights for a constant")
class _(Gating):
    def weighed(self, scores, index, call):
        if not call.renormalize or call.score == "softmax_after":
            return super().weighed(scores, index, call)
        weights = scores.gather(1, index)
        return weights / (weights.sum(-1, keepdim=True).detach() + 1e-20) * call.scale


@gating("the floor of the sum is too high for small sigmoids", found_by="magnitudes")
class _(Gating):
    def weighed(self, scores, index, call):
        weights = scores.gather(1, index)
        if not call.renormalize or call.score != "sigmoid":
            return super().weighed(scores, index, call)
        return weights / (weights.sum(-1, keepdim=True) + 1e-6) * call.scale


@gating("where every sigmoid is zero weights are NaN", at="sigmoids of zero")
class _(Gating):
    def weighed(self, scores, index, call):
        if not call.renormalize or call.score != "sigmoid":
            return super().weighed(scores, index, call)
        weights = scores.gather(1, index)
        return weights / weights.sum(-1, keepdim=True) * call.scale


@gating("ids are given as int32", found_by="result_type")
class _(Gating):
    def __call__(self, call):
        weights, index = super().__call__(call)
        return weights, index.int()


@gating("weights are given in the logits' dtype", found_by="result_type")
class _(Gating):
    def __call__(self, call):
        weights, index = super().__call__(call)
        return weights.to(call.logits.dtype), index


@gating("the best expert comes last")
class _(Gating):
    def __call__(self, call):
        weights, index = super().__call__(call)
        return weights.flip(-1), index.flip(-1)


@gating("ids are a view of one buffer", found_by="double_use")
class _(Gating):
    def __init__(self):
        self.buffers = {}

    def chosen(self, scores, call):
        index = super().chosen(scores, call)
        return self.buffers.setdefault(index.shape, torch.empty_like(index)).copy_(index)
