"""State dicts that `torch.distributed.checkpoint` can read again on any number of ranks.

Experts that are spread over ranks need nothing: their parameters are DTensors `Shard(0)` with the names and shapes of
the single process, and so are the optimizer's states. Tensor parallelism splits `gate_up_proj` into gate and up first,
so that a rank has two pieces of the tensor, which torch.distributed.checkpoint does not describe. State dicts of such a
layer have it in one piece per rank instead, and `contiguous_shards` does the same for an optimizer's state.
"""

from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._pytree import tree_map, tree_map_only


def contiguous_shards(state: Any) -> Any:
    """Return the same state with each DTensor in one piece per rank: what to save and to load into; communicates.

    Every rank must call it. `load_state_dict` of the model brings the pieces back where they belong;
    `restore_shards` does so for an optimizer's state.
    """

    def plain(value: DTensor) -> DTensor:
        placements = [Shard(p.dim) if isinstance(p, _StridedShard) else p for p in value.placements]
        return value if list(value.placements) == placements else value.redistribute(placements=placements)

    return tree_map_only(DTensor, plain, state)


def restore_shards(state: Any, like: Any) -> Any:
    """Return a state from `contiguous_shards`, each DTensor placed as in `like`, of equal structure; communicates."""

    def placed(value: Any, reference: Any) -> Any:
        if not isinstance(value, DTensor) or value.placements == reference.placements:
            return value
        return value.redistribute(placements=reference.placements)

    return tree_map(placed, state, like)


def one_piece(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """A hook that makes `module.state_dict()` give what `contiguous_shards` would."""
    for name, _ in module.named_parameters():
        if prefix + name in state:
            state[prefix + name] = contiguous_shards(state[prefix + name])
