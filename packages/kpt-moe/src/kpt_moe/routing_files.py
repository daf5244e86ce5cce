"""Routings in files: safetensors, which other programs read too."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from kpt_core import InputError

from .routing import Routing

T = TypeVar("T")

FORMAT = "kpt.routing"
VERSION = "1"
_PARTS = ("index", "weights", "logits", "mask", "token")
#: The tensors of many routings in one file.
PACKED = ("sizes", *_PARTS)
_INTEGERS = (torch.int16, torch.int32, torch.int64)


def save_routing(routing: Routing, path: str | os.PathLike[str], *, logits: bool = True) -> None:
    """Write a routing to a safetensors file that appears whole or not at all.

    Ids are stored in as few bytes as they fit in. Waits for the device that the routing is on.

    Args:
        routing: is stored without its gradients.
        path: replaced if it exists; its folder must exist.
        logits: store them too: `num_experts` numbers per token, where a choice is `top_k` small ones. Without them the
            loaded routing is as `without_logits` makes it.
    """
    routing = routing if logits else without_logits(routing)
    parts = {"index": routing.index, "token": routing.token}
    tensors = {name: compact(ids) for name, ids in parts.items() if ids is not None}
    tensors["weights"] = routing.weights
    if routing.mask is not None:
        tensors["mask"] = routing.mask
    if routing.logits.numel():
        tensors["logits"] = routing.logits
    write_tensors(path, FORMAT, tensors, {"num_experts": str(routing.num_experts)})


def load_routing(path: str | os.PathLike[str]) -> Routing:
    """Read a routing that `save_routing` wrote, on the CPU.

    Raises:
        InputError: there is no such file, or it holds no routing of this version.
    """
    return read_tensors(path, FORMAT, _read_routing)


def _read_routing(tensors: dict[str, Tensor], metadata: Mapping[str, str]) -> Routing:
    index, weights, token = tensors["index"].long(), tensors["weights"], tensors.get("token")
    logits, mask = tensors.get("logits"), tensors.get("mask")
    if logits is None:
        logits = weights.new_empty(0, int(metadata["num_experts"]))
    return checked(Routing(index, weights, logits, mask, None if token is None else token.long()))


def without_logits(routing: Routing) -> Routing:
    """The routing with logits `[0, num_experts]`: all that it takes to count, to move tokens and to replay.

    Where experts chose tokens, a missing mask becomes one of ones: it then tells how many tokens there are.
    """
    mask = routing.mask
    if mask is None and routing.token is not None:
        mask = torch.ones(num_tokens(routing), dtype=torch.bool, device=routing.index.device)
    return replace(routing, logits=routing.logits.new_empty(0, routing.num_experts), mask=mask)


def num_tokens(routing: Routing) -> int:
    """How many tokens were routed, with or without logits."""
    if routing.token is None:
        return routing.index.shape[0]
    return routing.logits.shape[0] if routing.mask is None else routing.mask.shape[0]


def compact(ids: Tensor) -> Tensor:
    """Integers in the smallest of int16, int32 and int64 that holds them all."""
    if not ids.numel():
        return ids.to(_INTEGERS[0])
    least, most = (int(bound) for bound in ids.aminmax())
    fits = (dtype for dtype in _INTEGERS if torch.iinfo(dtype).min <= least and most <= torch.iinfo(dtype).max)
    return ids.to(next(fits))


def checked(routing: Routing) -> Routing:
    """The routing, if its parts fit together; a file's may not.

    Raises:
        ValueError: they do not.
    """
    rows, tokens = routing.index.shape[0], num_tokens(routing)
    fits = (
        routing.index.dim() == 2
        and routing.weights.shape == routing.index.shape
        and routing.weights.is_floating_point()
        and routing.logits.dim() == 2
        and routing.logits.shape[0] in (0, tokens)
        and routing.num_experts > 0
        and (routing.mask is None or (routing.mask.dtype is torch.bool and routing.mask.shape == (tokens,)))
    )
    if routing.token is not None:
        within = (routing.token >= 0) & (routing.token < tokens)
        fits = fits and routing.token.shape == (rows,) and bool(within.all())
    if not fits:
        raise ValueError("its tensors do not fit together")
    return routing


def pack_routings(routings: Sequence[Routing]) -> dict[str, Tensor]:
    """The parts of all routings, flattened one after the other, and a row of sizes for each."""
    parts: dict[str, list[Tensor]] = {name: [] for name in _PARTS}
    sizes = []
    for routing in routings:
        masked = -1 if routing.mask is None else routing.mask.shape[0]
        sizes.append([*routing.index.shape, *routing.logits.shape, masked, int(routing.token is not None)])
        for name, found in parts.items():
            part: Tensor | None = getattr(routing, name)
            if part is not None:
                found.append(part.detach().reshape(-1).cpu())
    tensors = {name: torch.cat(found) for name, found in parts.items() if found}
    for name in ("index", "token"):
        if name in tensors:
            tensors[name] = compact(tensors[name])
    return {"sizes": torch.tensor(sizes, dtype=torch.int64, device="cpu").view(-1, 6), **tensors}


def unpack_routings(tensors: Mapping[str, Tensor]) -> list[Routing]:
    """The routings that `pack_routings` made the tensors of.

    Raises:
        ValueError, KeyError, RuntimeError: they are not what it makes.
    """
    at = dict.fromkeys(_PARTS, 0)

    def take(name: str, *shape: int) -> Tensor:
        start, at[name] = at[name], at[name] + torch.Size(shape).numel()
        return tensors[name][start : at[name]].view(shape)

    routings = []
    for rows, top_k, tokens, num_experts, masked, by_token in tensors["sizes"].tolist():
        routing = Routing(
            take("index", rows, top_k).long(),
            take("weights", rows, top_k),
            take("logits", tokens, num_experts),
            take("mask", masked) if masked >= 0 else None,
            take("token", rows).long() if by_token else None,
        )
        routings.append(checked(routing))
    if any(tensors[name].numel() != end for name, end in at.items() if name in tensors):
        raise ValueError("its sizes do not add up")
    return routings


def write_tensors(
    path: str | os.PathLike[str], kind: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> None:
    """Write a safetensors file of a format of ours, which appears whole or not at all."""
    from safetensors.torch import save

    # Copies: safetensors refuses tensors that share memory.
    plain = {
        name: tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
    }
    data = save(plain, {"format": kind, "version": VERSION, **metadata})
    path = Path(path)
    # Not safetensors' `save_file`: its files are for their owner only, whatever the umask says.
    temporary = path.with_name(f".{path.name}.{os.urandom(4).hex()}")
    try:
        with temporary.open("xb") as file:
            file.write(data)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read_tensors(
    path: str | os.PathLike[str], kind: str, read: Callable[[dict[str, Tensor], Mapping[str, str]], T]
) -> T:
    """What `read` makes of the tensors and the metadata of a file that `write_tensors` wrote.

    Raises:
        InputError: there is no such file, it is of another format or version, or `read` cannot make sense of it.
    """
    from safetensors import SafetensorError, safe_open

    if not Path(path).is_file():
        raise InputError(f"{path}: there is no such file")
    try:
        with safe_open(path, framework="pt") as file:
            metadata: Mapping[str, str] = file.metadata() or {}
            found = metadata.get("format")
            if found != kind:
                raise InputError(f"{path}: holds {found or 'tensors of no known format'}, not {kind}")
            if metadata.get("version") != VERSION:
                raise InputError(
                    f"{path}: {kind} of version {metadata.get('version')}, and this KPT reads version {VERSION}: "
                    "install the one that wrote it"
                )
            # Copies: the file's own pages would change with the file.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118  it is no mapping
    except SafetensorError as error:
        raise InputError(f"{path}: is no whole safetensors file ({error}): write it again") from error
    try:
        return read(tensors, metadata)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"{path}: is damaged ({error}): write it again") from error
