"""Read the mask functions of transformers as values of the algebra, so that long prompts need no mask of Q x K.

A model's mask function is a closure over closures. Those of `transformers.masking_utils` that say causality, windows,
chunks, documents, blocks and padding are known by their names; of any other the model's mask is made dense, as for
`"sdpa"`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from .mask_algebra import Mask
from .masks import causal, document, everything, padding, window
from .plan import Plan

#: What tells of a mask without looking into it. Wrappers ask (FSDP each layer's arguments for their kind of number).
_OUTSIDE = frozenset(
    getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "is_cuda", "requires_grad")
) | {Tensor.size, Tensor.dim, Tensor.is_inference, Tensor.numel, Tensor.is_floating_point, torch.is_floating_point}


class ModelMask(Tensor):
    """Stand for a mask `[B, 1, Q, K]` bool whose plan is made without it; whoever computes with it gets it dense.

    Attributes:
        dense: makes it; called once, and then no plan is given, since the mask may have been written to.
    """

    dense: Callable[[], Tensor]
    _mask: Mask
    _sizes: tuple[int, int, int]
    _offset: int
    _made: Tensor | None
    _plan: Plan | None
    _elsewhere: "dict[torch.device, ModelMask]"

    @staticmethod
    def of(
        mask: Mask, sizes: tuple[int, int, int], offset: int, device: Any, dense: Callable[[], Tensor]
    ) -> "ModelMask":
        """Return the stand-in.

        Args:
            mask: its value.
            sizes: sequences, queries and keys.
            offset: position of the first query among the keys.
            device: of the dense mask.
            dense: makes it.
        """
        shape = sizes[0], 1, *sizes[1:]
        made = Tensor._make_wrapper_subclass(ModelMask, shape, dtype=torch.bool, device=device)
        made._mask, made._sizes, made._offset, made.dense = mask, sizes, offset, dense
        made._made, made._plan, made._elsewhere = None, None, {}
        return made

    def plan(self, queries: int, keys: int) -> Plan | None:
        """Return the plan, made once; None for other numbers of queries or keys, or where the mask was made dense."""
        if self._made is not None or self._sizes[1:] != (queries, keys):  # a tensor's own shape takes longer to read
            return None
        if self._plan is None:
            self._plan = self._mask.plan(queries, keys, batch=self._sizes[0], offset=self._offset, device=self.device)
        return self._plan

    def whole(self) -> Tensor:
        """Return the mask as a dense tensor, the same one each time."""
        if self._made is None:
            self._made = self.dense()
        return self._made

    def _moved(self, device: Any = None, **told: Any) -> Tensor | None:
        """Return the stand-in for another device, as the hooks of accelerate ask before each layer; else None."""
        if not isinstance(device, (str, int, torch.device)) or told.keys() - {"non_blocking"}:
            return None
        target = torch.device(device)
        if target == self.device:
            return self
        known = self._elsewhere.get(target)
        if known is None or known._made is not None:  # it may have been written to
            dense = self.dense
            known = ModelMask.of(self._mask, self._sizes, self._offset, target, lambda: dense().to(target))
            self._elsewhere[target] = known
        return known

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in _OUTSIDE:
            return super().__torch_function__(function, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        if function is Tensor.to and isinstance(args[0], ModelMask) and args[0]._made is None:
            moved = args[0]._moved(*args[1:], **kwargs or {})
            if moved is not None:
                return moved
        args, kwargs = tree_map_only(ModelMask, ModelMask.whole, (args, kwargs or {}))
        return function(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError(f"kpt: {function} met a mask that is not there; load with attn_implementation='sdpa'")


def read(function: Callable[..., Any], keys: int, offset: int) -> Mask | None:
    """Return a mask function of transformers as a value of the algebra; None where it is not one that is known.

    Args:
        function: takes sequence, head, and positions of query and key.
        keys: how many there are.
        offset: position of the first key.
    """
    if function.__module__ != "transformers.masking_utils":
        return None
    code = function.__code__
    held = dict(zip(code.co_freevars, (cell.cell_contents for cell in function.__closure__ or ()), strict=True))
    name = function.__qualname__.partition(".")[0]

    def ids_of(ids: Tensor) -> Tensor | None:
        return ids[:, offset : offset + keys] if ids.dim() == 2 and ids.shape[1] >= offset + keys else None

    if name in ("and_masks", "or_masks"):
        parts = [read(each, keys, offset) for each in held["mask_functions"]]
        whole = parts[0]
        for part in parts[1:]:
            if whole is None or part is None:
                return None
            whole = whole & part if name == "and_masks" else whole | part
        return whole
    if name == "causal_mask_function":
        return causal()
    if name == "bidirectional_mask_function":
        return everything()
    if name == "sliding_window_overlay":
        size = held["sliding_window"]
        return window(left=size - 1) if size > 0 else None  # 0 sees nothing
    if name == "sliding_window_bidirectional_overlay":
        return window(held["sliding_window"], held["sliding_window"])
    if name == "chunked_overlay":
        places = torch.arange(offset, offset + keys, device=held["left_padding"].device)
        return document((places - held["left_padding"][:, None]) // held["chunk_size"])
    if name == "padding_mask_function":
        seen = ids_of(held["padding_mask"])
        return None if seen is None else padding(seen)
    if name == "packed_sequence_mask_function":
        ids = ids_of(held["packed_sequence_mask"])
        return None if ids is None else document(ids)
    if name == "blockwise_overlay":
        ids = ids_of(held["block_sequence_ids"])
        if ids is None:
            return None
        # What is in no block has an id of its own, since a document is one run of positions.
        alone = -1 - torch.arange(keys, device=ids.device)
        return document(torch.where(ids < 0, alone, ids)) & padding(ids >= 0)
    if name == "remap_positions_for_packed_sequence":
        # Within a packed sequence positions rise by one: what looks at differences alone says the same of places.
        inner = held["mask_function"]
        known = read(inner, keys, offset)
        return known if known is not None and _of_differences(inner) else None
    return None


def _of_differences(function: Callable[..., Any]) -> bool:
    """Return whether a known function looks at nothing but the distance of a key from a query."""
    name = function.__qualname__.partition(".")[0]
    if name in ("and_masks", "or_masks"):
        (functions,) = (cell.cell_contents for cell in function.__closure__ or ())
        return all(map(_of_differences, functions))
    return name in (
        "causal_mask_function", "bidirectional_mask_function", "sliding_window_overlay",
        "sliding_window_bidirectional_overlay",
    )  # fmt: skip
