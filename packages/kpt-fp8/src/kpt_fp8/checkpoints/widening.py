"""FP8 checkpoints as plain ones, of bfloat16 for instance: what every library reads, and fine-tuning begins with."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kpt_core import InputError
from kpt_fp8.conversion import Progress

from .changing import ConvertedTensor
from .contents import Contents
from .folder import CONFIG, TensorReader
from .soundness import require_sound
from .stacks import KEY, joined
from .staging import ShardWriter, copy_rest, staged, write_json

#: What weights may become that are no longer quantised.
PLAIN = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
#: How names of tensors end that scale caches of attention, which a plain checkpoint has no place for.
OF_CACHES = ("k_scale", "v_scale", "kv_scale")


def write_plain(
    owner: str, contents: Contents, target: Path, to: str, max_shard_bytes: int, progress: Progress | None
) -> tuple[list[ConvertedTensor], list[str], int]:
    """Write a quantised checkpoint without quantisation, tensor by tensor.

    What was not quantised stays as it is; a weight is `codes * scale`, computed in float32 and rounded once.

    Returns:
        What became of each quantised weight, notes, and the bytes of all tensors.

    Raises:
        InputError: nothing in it is quantised, or a weight is too large for float16.
    """
    if contents.scheme is None:
        raise InputError(
            f"{owner}: {contents.folder.path} is not quantised, so there is nothing to make {to} of: load it with "
            "dtype= and save it"
        )
    order = {name: place for place, name in enumerate(contents.folder.tensors)}
    caches = [name for name in contents.plain if name.rpartition(".")[2] in OF_CACHES]
    names = sorted({*contents.plain, *contents.weights}.difference(caches),
                   key=lambda n: order[contents.weights[n].codes if n in contents.weights else n])  # fmt: skip
    notes = [f"Scales of attention's caches are left out: {', '.join(caches[:3])}{' ...' * (len(caches) > 3)}."]
    told: list[ConvertedTensor] = []
    stacks, done_stacks = joined(contents.folder.config, contents.weights), set[str]()
    with staged(target) as staging, contents.folder.reading() as reader:

        def widened(name: str) -> Tensor:
            tensor, change = _widened(owner, name, contents, reader, to)
            told.append(change)
            return tensor

        copy_rest(contents.folder.path, staging)
        write_json(staging / CONFIG, _config(contents.folder.config, to))
        writer = ShardWriter(staging, {"format": "pt"}, max_shard_bytes)
        for done, name in enumerate(names):
            if progress is not None:
                progress(done, len(names), name)
            if name in contents.plain:
                writer.add(name, reader.tensor(name))
                continue
            if name not in stacks:
                writer.add(name, widened(name))
                continue
            whole, stack, experts = stacks[name]
            if whole not in done_stacks:
                writer.add(whole, stack.join(widened, experts))
                done_stacks.add(whole)
        writer.finish()
    return told, notes if caches else [], writer.total


def _widened(
    owner: str, name: str, contents: Contents, reader: TensorReader, to: str
) -> tuple[Tensor, ConvertedTensor]:
    assert contents.scheme is not None  # the caller has looked
    weight = contents.weights[name].read(reader, contents.scheme)
    require_sound(name, weight)
    numbers = weight.dequantize()
    made = numbers.to(PLAIN[to])
    if numbers.numel() and (most := max(abs(float(each)) for each in numbers.aminmax())) > torch.finfo(made.dtype).max:
        raise InputError(f"{owner}: {name} has numbers up to {most:.3g}, which {to} has not: take bfloat16 or float32")
    # In float32, unlike `QualityMeter`, which would take ten times as long as all else.
    signal, noise = (float(torch.linalg.vector_norm(each)) for each in (numbers, numbers - made))
    if noise == 0:
        return made, ConvertedTensor(name, True, f"{to} of the same numbers")
    return made, ConvertedTensor(name, False, f"rounded to {to}", 20 * math.log10(signal / noise))


def unquantized(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json, or that of its text model, without what it says of quantisation."""
    made = {key: value for key, value in config.items() if key != "quantization_config"}
    if isinstance(made.get("text_config"), dict):
        made["text_config"] = unquantized(made["text_config"])
    return made


def _config(config: Mapping[str, Any], to: str) -> dict[str, Any]:
    """Return config.json of the plain checkpoint."""
    made = {key: value for key, value in unquantized(config).items() if key != KEY}
    for part in (made, made.get("text_config")):
        for key in ("dtype", "torch_dtype"):
            if isinstance(part, dict) and (key in part or (key == "dtype" and "torch_dtype" not in part)):
                part[key] = to
    return made
