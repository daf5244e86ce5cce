"""Programs that `torch.export.save` wrote, and archives made of them that are not what they were."""

import json
import struct
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import Dim

MODEL = "models/model.json"


class Program(nn.Module):
    """A layer with its weights as arguments; a result has twice the batch."""

    def forward(self, weights: dict[str, torch.Tensor], x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = nn.functional.linear(x, weights["layer.weight"], weights["layer.bias"])
        return torch.cat([y, y]), y.sum(-1) * x.shape[0] ** 0.5


class Choices(nn.Module):
    """Sizes of many kinds, a guard, a branch, an argument that is None."""

    def forward(self, x: torch.Tensor, y: torch.Tensor, none: None, flag: bool = True) -> tuple[Any, ...]:
        half = x[: y.shape[0] // 2]
        chosen = torch.cond(x.sum() > 0, lambda a: a + 1, lambda a: a * 2, (x,))
        return torch.cat([half, x]), chosen, x.shape[0] * 3, torch.arange(max(x.shape[0], y.shape[0]) % 7), x & 1 == 0


def save(path: Path, model: nn.Module, *args: Any, shapes: Any = None) -> Path:
    program = torch.export.export(model.eval(), args, dynamic_shapes=shapes)
    program._example_inputs = None  # type: ignore[assignment]
    torch.export.save(program, path)
    return path


def clean(path: Path) -> Path:
    weights = {"layer.bias": torch.randn(3), "layer.weight": torch.randn(3, 4)}
    shapes = ({key: {} for key in weights}, {0: Dim("batch", min=1, max=64)})
    return save(path, Program(), weights, torch.randn(2, 4), shapes=shapes)


def entries(path: Path) -> dict[str, bytes]:
    """Return an archive's content by the names below its folder."""
    with zipfile.ZipFile(path) as archive:
        return {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}


def write(
    path: Path,
    content: Mapping[str, bytes] | list[tuple[str, bytes]],
    change: Callable[[zipfile.ZipInfo], object] = bool,
    compression: int = zipfile.ZIP_STORED,
) -> Path:
    """Write an archive that torch loads; `change` works on the description of each entry."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in content.items() if isinstance(content, Mapping) else content:
            info = zipfile.ZipInfo(name if name.startswith(("/", "..")) else f"model/{name}")
            info.compress_type = compression
            change(info)
            archive.writestr(info, data)
    written = path.read_bytes()
    # The end in 64 bits, as torch writes it, before that in 32.
    end, place = struct.unpack("<4s4H2IH", written[-22:]), len(written) - 22
    end64 = struct.pack("<4sQ2H2I4Q", b"PK\6\6", 44, 45, 45, 0, 0, end[3], end[4], end[5], end[6])
    address = struct.pack("<4sIQI", b"PK\6\7", 0, place, 1)
    path.write_bytes(written[:place] + end64 + address + written[place:])
    return path


def changed(source: Path, target: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """Write a program whose JSON was changed."""
    content = entries(source)
    program = json.loads(content[MODEL])
    change(program)
    return write(target, content | {MODEL: json.dumps(program).encode()})
