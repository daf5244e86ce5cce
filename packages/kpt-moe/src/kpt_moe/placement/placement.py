"""Which physical slot holds which expert, and how routings and weights follow."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kpt_core import InputError, UnknownNameError, write_whole

FORMAT = "kpt.placement"
VERSION = 1


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """Where the experts of each layer are: `slots_per_rank` physical slots on every rank, each with one expert or none.

    An expert in several slots has replicas with equal weights, which share its rows. Physical ids are slot ids: rank
    `r` holds those from `r * slots_per_rank` on, as `kpt_moe.parallel` splits experts. A layer of `slots` experts with
    `permute_weights` of the parameters and `physical_index` of the routing computes what the original did.

    Attributes:
        layers: their names, such as the routers' paths in a `RoutingTrace`.
        ranks: that share the experts.
        expert_of_slot: `[layers, slots]` int64, the expert in each slot; -1 in an empty one.
        loads: `[layers, num_experts]` float64 on the CPU, rows per expert that it was planned for.
        copies: `[layers, num_experts]` int64, in how many slots each expert is.

    Raises:
        InputError: an expert is nowhere, an id is out of range, or shapes do not fit together. These checks wait for
            the device.
    """

    layers: tuple[str, ...]
    ranks: int
    expert_of_slot: Tensor
    loads: Tensor
    copies: Tensor = field(init=False)
    #: Slots in the order of their experts, empty ones last; and where each expert begins in it.
    _slots: Tensor = field(init=False, repr=False)
    _start: Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        placed, loads, layers = self.expert_of_slot, self.loads, len(self.layers)
        if len(set(self.layers)) != layers or self.ranks < 1:
            raise InputError(f"Placement: needs names that differ and a rank; got {self.layers} and {self.ranks} ranks")
        if loads.dtype is not torch.float64 or loads.dim() != 2 or loads.shape[0] != layers or not loads.shape[1]:
            raise InputError(
                f"Placement: loads must be float64 [{layers}, num_experts]; got {loads.dtype} {list(loads.shape)}"
            )
        if loads.device.type != "cpu" or not bool(((loads >= 0) & loads.isfinite()).all()):
            raise InputError("Placement: loads must be finite, not negative and on the CPU")
        shaped = (
            placed.dim() == 2 and placed.shape[0] == layers and placed.shape[1] and not placed.shape[1] % self.ranks
        )
        if placed.dtype is not torch.int64 or not shaped:
            raise InputError(
                f"Placement: expert_of_slot must be int64 [{layers}, slots] with as many slots on each of {self.ranks} "
                f"ranks; got {placed.dtype} {list(placed.shape)}"
            )
        experts = loads.shape[1]
        if not bool(((placed >= -1) & (placed < experts)).all()):
            raise InputError(f"Placement: expert_of_slot must hold experts from 0 to {experts - 1}, or -1 for none")
        order = torch.where(placed < 0, experts, placed)
        counts = torch.zeros(layers, experts + 1, dtype=torch.int64, device=placed.device)
        copies = counts.scatter_add(1, order, torch.ones_like(order))[:, :experts]
        if not bool((copies > 0).all()):
            layer, expert = (copies == 0).nonzero()[0].tolist()
            raise InputError(f"Placement: expert {expert} of layer {self.layers[layer]!r} is in no slot")
        object.__setattr__(self, "copies", copies)
        object.__setattr__(self, "_slots", order.argsort(dim=1, stable=True))
        object.__setattr__(self, "_start", copies.cumsum(1) - copies)

    @property
    def num_experts(self) -> int:
        """Logical experts of a layer."""
        return self.loads.shape[1]

    @property
    def slots(self) -> int:
        """Physical slots of a layer, on all ranks."""
        return self.expert_of_slot.shape[1]

    @property
    def slots_per_rank(self) -> int:
        """Physical slots of a layer on each rank."""
        return self.slots // self.ranks

    def row(self, layer: int | str) -> int:
        """The position of a layer, given by that or by its name.

        Raises:
            InputError: there is no such position.
            UnknownNameError: there is no such name.
        """
        if isinstance(layer, str):
            if layer not in self.layers:
                raise UnknownNameError("layer of the placement", layer, self.layers)
            return self.layers.index(layer)
        if not 0 <= layer < len(self.layers):
            raise InputError(f"Placement: layers are 0 to {len(self.layers) - 1}, or a name; got {layer}")
        return layer

    def slots_of_experts(self, layer: int | str) -> list[list[int]]:
        """The slots that hold each expert; read on the host."""
        row = self.row(layer)
        slots: list[int] = self._slots[row].tolist()
        starts: list[int] = self._start[row].tolist()
        return [slots[a : a + n] for a, n in zip(starts, self.copies[row].tolist(), strict=True)]

    def rank_loads(self) -> Tensor:
        """`[layers, ranks]` float64 on the CPU: planned rows of each rank; replicas share their expert's evenly."""
        placed = self.expert_of_slot.cpu()
        by_slot = (self.loads / self.copies.cpu()).gather(1, placed.clamp(min=0)) * (placed >= 0)
        return by_slot.view(len(self.layers), self.ranks, -1).sum(2)

    def imbalance(self) -> tuple[float, ...]:
        """The greatest over the mean planned load of the ranks, for each layer; 1 where a layer has no load."""
        return _max_over_mean(self.rank_loads())

    def imbalance_before(self) -> tuple[float, ...]:
        """What `imbalance` would be with experts in their order, in equal parts without replicas."""
        return _max_over_mean(contiguous_rank_loads(self.loads, self.ranks))

    def physical_index(self, layer: int | str, index: Tensor, *, token: Tensor | None = None) -> Tensor:
        """Slot ids for expert ids, without reading a value on the host.

        Token `t` takes replica `t % copies`: replicas get equal parts of consecutive tokens.

        Args:
            layer: position or name.
            index: `[rows, K]` integers as `Routing.index`, on the placement's device.
            token: `[rows]` integers, the token of each row; None counts rows from 0. On rank `r` add what the ranks
                before it have, so that no replica is the first choice of every rank.

        Returns:
            `[rows, K]` of the dtype of `index`. A refused choice `~e` becomes `~slot`, an id that is no choice becomes
            `slots`.

        Raises:
            InputError: a shape or dtype does not fit, or a tensor is on another device.
            UnknownNameError: there is no such layer.
        """
        row = self.row(layer)
        if index.dim() != 2 or index.dtype not in (torch.int64, torch.int32):
            raise InputError(f"physical_index: index must be int64 or int32 [rows, K]; got {index.dtype} {index.shape}")
        if token is None:
            token = torch.arange(index.shape[0], device=index.device)
        if token.shape != index.shape[:1]:
            raise InputError(f"physical_index: token must be [{index.shape[0]}]; got {list(token.shape)}")
        for name, tensor in (("index", index), ("token", token)):
            if tensor.device != self.copies.device:
                raise InputError(
                    f"physical_index: {name} is on {tensor.device}, the placement on {self.copies.device}: move it "
                    "there once with placement.to(device)"
                )
        asked = torch.where(index < 0, ~index, index).long()
        expert = asked.clamp(max=self.num_experts - 1)
        replica = token.unsqueeze(1) % self.copies[row][expert]
        slot = self._slots[row][self._start[row][expert] + replica]
        slot = torch.where(asked < self.num_experts, slot, self.slots)
        return torch.where(index < 0, ~slot, slot).to(index.dtype)

    def permute_weights(self, layer: int | str, weight: Tensor) -> Tensor:
        """`[slots, ...]`: the weight of each slot's expert, zeros in empty slots; differentiable.

        Args:
            layer: position or name.
            weight: `[num_experts, ...]`.

        Raises:
            InputError: `weight` has not so many experts.
            UnknownNameError: there is no such layer.
        """
        self._require("permute_weights: weight", weight, self.num_experts)
        experts = self.expert_of_slot[self.row(layer)].to(weight.device)
        placed = weight.index_select(0, experts.clamp(min=0))
        return placed.masked_fill((experts < 0).view(-1, *[1] * (weight.dim() - 1)), 0)

    def sum_replicas(self, layer: int | str, gradient: Tensor) -> Tensor:
        """`[num_experts, ...]`: the sum over each expert's slots, as of the gradients of weights kept for each slot.

        Args:
            layer: position or name.
            gradient: `[slots, ...]`.

        Raises:
            InputError: `gradient` has not so many slots.
            UnknownNameError: there is no such layer.
        """
        self._require("sum_replicas: gradient", gradient, self.slots)
        experts = self.expert_of_slot[self.row(layer)].to(gradient.device)
        total = gradient.new_zeros(self.num_experts + 1, *gradient.shape[1:])
        return total.index_add(0, torch.where(experts < 0, self.num_experts, experts), gradient)[:-1]

    def to(self, device: torch.device | str) -> "Placement":
        """The placement with all but its loads on a device."""
        return Placement(self.layers, self.ranks, self.expert_of_slot.to(device), self.loads)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to a JSON file that appears whole or not at all.

        Beside what `load` reads there are the slots of each expert and the imbalances, for other programs and people.

        Args:
            path: replaced if it exists; its folder must exist.
        """
        write_whole(path, json.dumps(self.as_json()) + "\n")

    def as_json(self) -> dict[str, Any]:
        """What `save` writes."""
        parts = (
            self.layers,
            self.expert_of_slot.tolist(),
            map(self.slots_of_experts, range(len(self.layers))),
            self.loads.tolist(),
            self.imbalance_before(),
            self.imbalance(),
        )
        names = ("name", "expert_of_slot", "slots_of_expert", "load", "imbalance_before", "imbalance")
        layers = [dict(zip(names, values, strict=True)) for values in zip(*parts, strict=True)]
        return {"format": FORMAT, "version": VERSION, "ranks": self.ranks, "layers": layers}

    @staticmethod
    def load(path: str | os.PathLike[str]) -> "Placement":
        """Read what `save` wrote, on the CPU.

        Raises:
            InputError: there is no such file, or it holds no valid placement of this version.
        """
        try:
            found = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise InputError(f"{path}: cannot be read ({error.strerror})") from error
        except ValueError as error:
            raise InputError(f"{path}: is no JSON file ({error})") from error
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            raise InputError(f"{path}: holds no {FORMAT}")
        if found.get("version") != VERSION:
            raise InputError(
                f"{path}: {FORMAT} of version {found.get('version')}, and this KPT reads version {VERSION}: install "
                "the one that wrote it"
            )
        try:
            layers = found["layers"]
            placement = Placement(
                tuple(str(layer["name"]) for layer in layers),
                int(found["ranks"]),
                torch.tensor([layer["expert_of_slot"] for layer in layers], dtype=torch.int64, device="cpu"),
                torch.tensor([layer["load"] for layer in layers], dtype=torch.float64, device="cpu"),
            )
        except (InputError, KeyError, TypeError, ValueError) as error:
            raise InputError(f"{path}: is damaged ({error}): write it again") from error
        for row, layer in enumerate(layers):
            if layer.get("slots_of_expert") != placement.slots_of_experts(row):
                raise InputError(
                    f"{path}: expert_of_slot and slots_of_expert of layer {layer['name']!r} contradict each other: "
                    "write it again"
                )
        return placement

    def _require(self, what: str, tensor: Tensor, first: int) -> None:
        if not tensor.dim() or tensor.shape[0] != first:
            raise InputError(f"{what} must begin with {first}; got {list(tensor.shape)}")


def contiguous_placement(loads: Tensor, ranks: int, layers: Sequence[str] | None = None) -> Placement:
    """Experts in their order, as `kpt_moe.parallel` has them without a plan; the last ranks may have empty slots.

    Args:
        loads: `[layers, num_experts]`, moved to the CPU.
        ranks: that share the experts.
        layers: their names; None numbers them.

    Raises:
        InputError: sizes are out of range.
    """
    loads = loads.to("cpu", torch.float64)
    held = -(-loads.shape[1] // ranks)
    slots = torch.arange(held * ranks, device="cpu")
    names = tuple(map(str, range(loads.shape[0]))) if layers is None else tuple(layers)
    placed = torch.where(slots < loads.shape[1], slots, -1).repeat(loads.shape[0], 1)
    return Placement(names, ranks, placed, loads)


def contiguous_rank_loads(loads: Tensor, ranks: int) -> Tensor:
    """`[layers, ranks]`: what each rank has if experts are split in their order."""
    held = -(-loads.shape[1] // ranks)
    padded = torch.nn.functional.pad(loads, (0, held * ranks - loads.shape[1]))
    return padded.view(loads.shape[0], ranks, held).sum(2)


def _max_over_mean(rank_loads: Tensor) -> tuple[float, ...]:
    pairs = zip(rank_loads.amax(1).tolist(), rank_loads.mean(1).tolist(), strict=True)
    return tuple(most / mean if mean else 1.0 for most, mean in pairs)
