"""Experts that a checkpoint has stacked in one tensor: cut into matrices to quantise, and joined again."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from kpt_fp8.experts import is_stacked, is_transposed, unusual_part

from .contents import Contents
from .folder import Cut, Stored

#: In config.json of what was cut, by names of stacks, `*` for any number: how to join them.
KEY = "stacked_experts"
_MATRIX = re.compile(r"(?P<experts>.+\.experts)\.(?P<expert>\d+)\.(?P<projection>\w+)\.weight")
#: What configurations call the number of experts.
_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts", "num_moe_experts")


@dataclass(frozen=True, slots=True)
class Stack:
    """How matrices of all experts are in one tensor.

    Attributes:
        experts: the module whose experts' matrices these are, as files that have them one by one name it.
        projections: of each expert, as Hugging Face names them, in the order of the tensor.
        transposed: the tensor is `[experts, inputs, outputs]`, not `[experts, outputs, inputs]`.
        interleaved: outputs of the projections alternate.
    """

    experts: str
    projections: tuple[str, ...]
    transposed: bool
    interleaved: bool

    def cut(self, stack: Stored) -> Iterator[tuple[Stored, Cut]]:
        """Yield each matrix as if the file had it, and where it is."""
        count, rows, columns = stack.shape
        rows, columns = (columns, rows) if self.transposed else (rows, columns)
        parts = len(self.projections)
        rows //= parts
        for expert in range(count):
            for place, projection in enumerate(self.projections):
                own = slice(place, None, parts) if self.interleaved else slice(place * rows, (place + 1) * rows)
                name = f"{self.experts}.{expert}.{projection}.weight"
                cut = Cut(stack.name, expert, own, self.transposed)
                yield Stored(name, stack.file, stack.dtype, (rows, columns)), cut

    def join(self, matrices: Callable[[str], Tensor], experts: int) -> Tensor:
        """Return the stack of matrices by their names."""
        made = []
        for expert in range(experts):
            own = [matrices(f"{self.experts}.{expert}.{projection}.weight") for projection in self.projections]
            rows = torch.stack(own, 1).flatten(0, 1) if self.interleaved else torch.cat(own)
            made.append(rows.mT if self.transposed else rows)
        return torch.stack(made).contiguous()


def stacked_modules(contents: Contents) -> list[str]:
    """Return modules of experts whose matrices are in one tensor."""
    config = contents.folder.config
    counts = {part.get(key) for part in (config, config.get("text_config") or {}) for key in _COUNTS}
    stacks = (name for name, each in contents.plain.items() if len(each.shape) == 3 and min(each.shape[1:]) > 1)
    owners = {name: name.rpartition(".")[0] for name in stacks}
    found = (o for n, o in owners.items() if o.endswith(".experts") or contents.plain[n].shape[0] in counts)
    return list(dict.fromkeys(found))


def cut_stacks(contents: Contents, takes: Callable[[Stored], bool]) -> dict[str, dict[str, Any]]:
    """Replace stacks by the matrices that they hold, where all those of a module are taken, and say how to join them.

    The layouts are those of transformers' own modules; without it, or where it does not know the model, none is cut.

    Returns:
        For config.json, under `KEY`.
    """
    if not stacked_modules(contents):
        return {}
    stacks = _stacks(contents)
    parts = {name: list(stack.cut(contents.plain[name])) for name, stack in stacks.items()}
    left = {stacks[name].experts for name, cuts in parts.items() if not all(takes(each) for each, _ in cuts)}
    chosen = {name: stack for name, stack in stacks.items() if stack.experts not in left}
    tensors, folder = {}, contents.folder
    for name, stored in folder.tensors.items():
        if name not in chosen:
            tensors[name] = stored
            continue
        for each, cut in parts[name]:
            tensors[each.name], folder.cuts[each.name] = each, cut
    folder.tensors = tensors
    contents.plain = dict(tensors)  # nothing in it is quantised
    return {_any(name): {**asdict(stack), "experts": _any(stack.experts)} for name, stack in chosen.items()}


def joined(config: Mapping[str, Any], names: Mapping[str, object]) -> dict[str, tuple[str, Stack, int]]:
    """Return by name of a matrix that was cut the name of its stack, how to join it, and how many experts it has."""
    known = {}
    for name, fields in config.get(KEY, {}).items():
        stack = Stack(**{**fields, "projections": tuple(fields["projections"])})
        known[name] = (re.compile(re.escape(stack.experts).replace(r"\*", r"(\d+)")), stack)
    found: dict[str, tuple[str, Stack]] = {}
    experts: dict[str, int] = {}
    for name in names:
        place = _MATRIX.fullmatch(name)
        for whole, (pattern, stack) in known.items() if place else ():
            own = pattern.fullmatch(place["experts"]) if place else None
            if own and place and place["projection"] in stack.projections:
                numbers = iter(own.groups())
                of = re.sub(r"\*", lambda _, numbers=numbers: next(numbers), whole)  # type: ignore[misc]
                found[name] = (of, Stack(place["experts"], stack.projections, stack.transposed, stack.interleaved))
                experts[of] = max(experts.get(of, 0), int(place["expert"]) + 1)
    return {name: (of, stack, experts[of]) for name, (of, stack) in found.items()}


def _any(name: str) -> str:
    """Return a name of any layer."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)


@dataclass(frozen=True, slots=True)
class Layout:
    """A model of transformers without numbers, and how it renames what files hold."""

    model: Any
    parameters: dict[str, Tensor]
    renamings: list[Any]
    converters: list[Any]

    def name(self, stored: str, converted: bool = True) -> str:
        """Return the model's name of a tensor in the files; not `converted`: of a part that is merged with others."""
        from transformers.core_model_loading import rename_source_key

        converters = self.converters if converted else []
        own, _ = rename_source_key(stored, self.renamings, converters, self.model.base_model_prefix, self.parameters)
        return stored if own not in self.parameters and stored in self.parameters else str(own)


def layout_of(contents: Contents) -> Layout | None:
    """Return the model that a checkpoint is of; None where transformers is not installed or does not know it."""
    try:
        import transformers
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming
    except ImportError:
        return None
    try:
        config = transformers.AutoConfig.from_pretrained(contents.folder.path)
    except (ValueError, OSError):  # a type of its own, for instance
        return None
    kind = next((k for k in (getattr(transformers, n, None) for n in config.architectures or ()) if k), None)
    if kind is None:
        return None
    with torch.device("meta"):
        model = kind(config)
    transforms = get_model_conversion_mapping(model)
    renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
    converters = [each for each in transforms if isinstance(each, WeightConverter)]
    return Layout(model, model.state_dict(), renamings, converters)


def _stacks(contents: Contents) -> dict[str, Stack]:
    """Return stacks by name, as the model of transformers has them."""
    layout = layout_of(contents)
    found: dict[str, Stack] = {}
    for name, stored in contents.plain.items() if layout is not None else ():
        if layout is None or len(stored.shape) != 3:
            continue
        own = layout.name(name)
        path, _, last = own.rpartition(".")
        if own not in layout.parameters or not path.endswith(".experts"):
            continue
        module = layout.model.get_submodule(path)
        shape = tuple(layout.parameters[own].shape)
        # What has another shape than the module is transposed when it is loaded.
        if not is_stacked(module) or unusual_part(module) or stored.shape not in (shape, (shape[0], *shape[:0:-1])):
            continue
        head, inside, _ = name.rpartition(".experts.")
        owner = head if inside else name.removesuffix(".weight").rpartition(".")[0]
        found[name] = Stack(
            f"{owner}.experts",
            ("gate_proj", "up_proj") if last == "gate_up_proj" else (last,),
            is_transposed(module) != (stored.shape != shape),
            last == "gate_up_proj" and not getattr(module, "is_concatenated", True),
        )
    return found
