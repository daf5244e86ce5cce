"""Auxiliary losses of routers: balance between experts, entropy, and the size of logits.

Each takes one `Routing` or several. Several are pooled: the tokens of all are taken together, as transformers does with
the layers of a model. To weigh layers alike whatever they decide, average the losses of single ones, as `RouterLosses`
does unless told otherwise.

- **Arguments.** `routings` is one routing, or several that are pooled. `score` is how logits become probabilities; None
  is as each routing's router scores. `group` weighs ranks, see the last point; each docstring says what is exact then.
- **One scale.** A loss of balance is 1 in perfect balance, for any `top_k` and number of experts, and the number of
  experts where a single one has it all, so that a weight carries over between layers and between these losses:
  `switch_loss`, `global_batch_loss`, `gshard_loss`, `sequence_loss`. `entropy_loss` is 0 in balance. `z_loss` tells
  nothing of balance. Each docstring has the factor between its formula and its paper's.
- No routing, or routings of different numbers of experts, raise `InputError`; an unknown `score`, `UnknownNameError`.
- Tokens that a mask leaves out count nowhere; where no token counts, the loss is 0 with gradients of zero.
- A token with NaN logits that counts makes the loss NaN: a mean over such tokens has no value. Mask it.
- Results are 0-d and float32, or float64 where the logits are. Gradients flow through logits alone: counts have none.
- **Micro-batches.** Each call is a mean over its own tokens. The mean of the losses of `n` micro-batches with equally
  many tokens is exact for `z_loss`, `sequence_loss` and `entropy_loss(per_token=True)`; the others are products or
  logarithms of means, of each micro-batch by itself. `global_batch_loss` counts beyond it.
- **Data parallelism.** Without `group` each rank's loss is a mean over its own tokens; averaging gradients, as DDP and
  FSDP do, then weighs ranks alike, however many tokens they hold. With `group` the loss is multiplied by
  `tokens * ranks / tokens of all ranks`, so that the average over the ranks, of values as of gradients, is the mean
  weighted by tokens (by sequences in `sequence_loss`). A trainer that sums gradients instead of averaging them must
  divide by the number of ranks. Every rank of the group has to call, in the same order; one number is all-reduced.
"""

from .balance import (
    SCORES,
    GlobalLoad,
    Routings,
    Score,
    entropy_loss,
    global_batch_loss,
    gshard_loss,
    sequence_loss,
    switch_loss,
    z_loss,
)

__all__ = [
    "SCORES",
    "GlobalLoad",
    "Routings",
    "Score",
    "entropy_loss",
    "global_batch_loss",
    "gshard_loss",
    "sequence_loss",
    "switch_loss",
    "z_loss",
]
