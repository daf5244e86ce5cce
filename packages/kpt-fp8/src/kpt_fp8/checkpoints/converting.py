"""Checkpoints from one format to another, or quantised for the first time: `convert_checkpoint`."""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kpt_core import InputError, UnknownNameError
from kpt_fp8.conversion import Progress
from kpt_fp8.scales import LEAST
from kpt_fp8.selection import covers, matches, patterns

from .changing import ConvertedTensor, Inexact, quantized_anew, same_numbers
from .contents import Contents, describe
from .folder import CONFIG, CheckpointFolder, Stored, TensorReader
from .foreign import foreign_at, write_foreign
from .formats import Format, format_named, module_of
from .scheme import NUMBERS, QuantizedWeight, Scheme
from .soundness import require_sound
from .stacks import KEY, cut_stacks, layout_of, stacked_modules
from .staging import ShardWriter, check_target, copy_rest, staged, write_json
from .widening import PLAIN, unquantized, write_plain

_OWNER = "convert_checkpoint"
#: Modules of matrices that are no `nn.Linear`, or that lose the most: embeddings, norms, routers, output layers; and
#: `dt_proj`, whose weight Mamba multiplies by without calling it.
HEAD = "lm_head"
_TABLES = ("*embed*", "*norm*", "wte", "wpe", "shared", "relative_attention_bias")
LEFT = (
    *(HEAD, "shared_head.head", "score", "classifier", *_TABLES, "dt_proj"),
    *("gate", "gate.wg", "*router*", "*shared_expert_gate"),
)
#: Models whose matrices are stored transposed, so that a row there is no row of `nn.Linear`.
_TRANSPOSED = ("gpt2", "openai-gpt", "imagegpt")
_SHARD = 2 << 30


@dataclass(slots=True)
class CheckpointReport:
    """What a conversion of a checkpoint did.

    Attributes:
        source, target: names of the formats; `unquantised` where weights were not.
        scheme: how weights are quantised now; None where they are not any more.
        tensors: the quantised ones, in the order of the files.
        notes: what else changed, a sentence each.
        bytes: of all tensors now.
    """

    source: str
    target: str
    scheme: Scheme | None
    tensors: list[ConvertedTensor] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    bytes: int = 0

    @property
    def exact(self) -> bool:
        """Tell whether every weight stands for the same numbers as before."""
        return all(each.exact for each in self.tensors)

    def as_dict(self) -> dict[str, Any]:
        """Return it for JSON."""
        scheme = None if self.scheme is None else str(self.scheme)
        told = {"source": self.source, "target": self.target, "scheme": scheme, "bytes": self.bytes}
        return {**told, "exact": self.exact, "tensors": [asdict(each) for each in self.tensors], "notes": self.notes}

    def __str__(self) -> str:
        exact = Counter(each.how for each in self.tensors if each.exact)
        anew = sorted((each for each in self.tensors if not each.exact), key=lambda each: each.sqnr or 0.0)
        verb = "widened" if self.scheme is None else "quantised"
        noise = f", signal to noise {anew[0].sqnr:.1f} dB or better" if anew and anew[0].sqnr is not None else ""
        done = [f"{verb} {len(anew)} weights{noise}"] if anew else []
        done += [f"kept {exact.total()} weights bit-exact"] if exact else []
        headline = f"{'; '.join(done) or 'no weights'}; {self.bytes / 2**20:.1f} MiB in all"
        wide = max((len(each.name) for each in anew), default=0)
        return "\n".join(
            [
                f"{self.source} -> {self.target}{'' if self.scheme is None else f': {self.scheme}'}",
                headline[0].upper() + headline[1:],
                *(f"bit-exact: {count} weights, {how}" for how, count in exact.items()),
                *(
                    f"{each.name:<{wide}}  {each.how}, signal to noise {each.sqnr:.1f} dB"
                    for each in (anew if self.scheme is not None else ())  # which all are alike
                ),
                *self.notes,
            ]
        )


def convert_checkpoint(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    to: str,
    granularity: str | None = None,
    activations: str | None = None,
    dtype: torch.dtype | None = None,
    scale_dtype: torch.dtype | None = None,
    exclude: str | Sequence[str] = (),
    input_scales: Mapping[str, float] | None = None,
    requantize: bool = False,
    max_shard_bytes: int = _SHARD,
    progress: Progress | None = None,
) -> CheckpointReport:
    """Write a checkpoint in another format; quantise one that is not, matrix by matrix; or undo it.

    Tensors are read, converted and written one after the other; in memory is no more than one file that is written.
    The target appears when all is done, or not at all. Where a weight can be written with the same numbers, it is.

    Args:
        source: a folder with config.json and weights in safetensors; without quantisation in the target also a file of
            GGUF, or weights in MXFP4, both read by transformers with the whole model in memory.
        target: a new or empty folder.
        to: `fp8`, `compressed-tensors`, `fbgemm_fp8`, `modelopt` or `torchao`; or `bfloat16`, `float16` or `float32`
            for a checkpoint without quantisation, for which nothing is asked beneath but `max_shard_bytes`.
        granularity: what shares a scale of a weight: `tensor`, `row` or `128x128`. None: as in the source, if the
            format takes that; else what is usual there, and in `modelopt` `row`, unless there are static scales.
        activations: what readers quantise activations by: `none`, `tensor`, `row` or `1x128`. None: as in the source,
            if the format takes that; else what is usual there.
        dtype: of the codes, float8_e4m3fn or float8_e4m3fnuz. None: as in the source, or float8_e4m3fn.
        scale_dtype: of the scales in the file: float32, bfloat16 or float8_e8m0fnu. None: float32.
        exclude: patterns of modules that stay as they are, with all in them, where the source is not quantised; beside
            embeddings, norms, routers and output layers, which no argument converts.
        input_scales: static scales of activations by the module's name, as `calibrate` finds them; for schemes that
            have such scales.
        requantize: where the same numbers can't be written, quantise them anew instead of raising an error.
        max_shard_bytes: of a file that is written.
        progress: called before each tensor with the number done, of all, and its name.

    Returns:
        What became of each weight.

    Raises:
        InputError: the source is damaged or can't be understood, the target is taken, the format can't hold such
            weights or scales, `exclude` describes nothing, weights hold NaN, or the same numbers can't be written and
            `requantize` is not given. Nothing is written.
        UnknownNameError: no such format.
    """
    if to in PLAIN:
        asked = [granularity, activations, dtype, scale_dtype, input_scales, requantize or None]
        if any(each is not None for each in asked) or exclude:
            raise InputError(f"{_OWNER}: to={to!r} is without quantisation: leave out what says how to quantise")
        if foreign := foreign_at(_OWNER, Path(source)):
            real = check_target(Path(source), Path(target))
            return CheckpointReport(foreign.name, to, None, *write_foreign(_OWNER, foreign, real, to, max_shard_bytes))
        folder = CheckpointFolder(source)
        real = check_target(folder.path, Path(target))
        contents = describe(folder)
        contents.require_good()
        found = write_plain(_OWNER, contents, real, to, max_shard_bytes, progress)
        return CheckpointReport(contents.format.name if contents.format else "unquantised", to, None, *found)
    form = format_named(to)
    excluded = patterns(_OWNER, "exclude", exclude) or ()
    folder = CheckpointFolder(source)
    real = check_target(folder.path, Path(target))
    contents = describe(folder)
    contents.require_good()
    chosen = _scheme(contents, form, granularity, activations, dtype, scale_dtype, input_scales is not None)
    if contents.scheme is not None and excluded:
        raise InputError(
            f"{_OWNER}: {folder.path} is quantised already, so that exclude={excluded[0]!r} could leave nothing in 16 "
            "bits: convert the original checkpoint, or leave exclude out"
        )
    if input_scales is not None and not chosen.static:
        raise InputError(
            f"{_OWNER}: input_scales are for static scales of activations; got {form.name}, {chosen}: choose another "
            "format, granularity or activations='tensor', or leave input_scales out"
        )
    known: set[str] = set()

    def takes(each: Stored) -> bool:
        known.add(module_of(each.name))
        return _taken(each, excluded)

    stacks = cut_stacks(contents, takes) if contents.scheme is None else {}
    _require_use(excluded, [*map(module_of, contents.plain), *sorted(known)])
    anew = _to_quantize(contents, excluded)
    report = CheckpointReport(contents.format.name if contents.format else "unquantised", to, chosen)
    report.notes.extend(_notes(contents, chosen))
    report.notes.extend(_ragged(contents, anew, form, chosen))
    work = _Work(contents, form, chosen, anew, dict(input_scales or {}), requantize)
    report.notes.extend(_stacked(contents, stacks))
    with staged(real) as staging, folder.reading() as reader:
        copy_rest(folder.path, staging)
        write_json(staging / CONFIG, _config(folder.config, stacks, form.write_config(chosen, work.skipped())))
        writer = ShardWriter(staging, work.metadata(), max_shard_bytes)
        for done, name in enumerate(work.names):
            if progress is not None:
                progress(done, len(work.names), name)
            if name in contents.plain and name not in anew:
                writer.add(name, reader.tensor(name))
                continue
            weight, told = work.change(name, reader)
            for stored, tensor in work.tensors(name, weight):
                writer.add(stored, tensor)
            report.tensors.append(told)
        writer.finish()
        report.bytes = writer.total
    return report


@dataclass(slots=True)
class _Work:
    """What is converted, and how."""

    contents: Contents
    format: Format
    scheme: Scheme
    anew: dict[str, Stored]
    input_scales: dict[str, float]
    requantize: bool
    names: list[str] = field(init=False)

    def __post_init__(self) -> None:
        order = {name: place for place, name in enumerate(self.contents.folder.tensors)}
        at = {name: order[name] for name in self.contents.plain}
        at |= {name: order[weight.codes] for name, weight in self.contents.weights.items()}
        self.names = sorted(at, key=at.__getitem__)
        if self.scheme.static:
            self._rename_scales()
            for name in (*self.contents.weights, *self.anew):
                held = name in self.contents.weights and self.contents.weights[name].input_scale
                given = self.input_scales.get(module_of(name))
                if not held and given is None:
                    raise InputError(
                        f"{_OWNER}: {name} needs a static scale of its activations, and there is none for "
                        f"{module_of(name)!r}: in Python call convert_checkpoint(..., input_scales=calibrate(model, "
                        "data)), or choose other activations or another granularity, as in --granularity row"
                    )
                if given is not None and not LEAST <= given < float("inf"):
                    raise InputError(
                        f"{_OWNER}: input_scales[{module_of(name)!r}] must be positive and finite; got {given}: "
                        "calibrate again"
                    )

    def _rename_scales(self) -> None:
        """Name scales as the files name modules, where the model that was calibrated names them otherwise."""
        own = [name for name in (*self.contents.weights, *self.anew) if module_of(name) not in self.input_scales]
        layout = layout_of(self.contents) if own and self.input_scales else None
        for name in own if layout else ():
            held = self.input_scales.get(module_of(layout.name(name, converted=False))) if layout else None
            if held is not None:
                self.input_scales[module_of(name)] = held

    def skipped(self) -> list[str]:
        """Modules with a matrix that stays as it is."""
        left = (each for name, each in self.contents.plain.items() if name not in self.anew)
        found = [module_of(each.name) for each in left if each.name.endswith(".weight") and len(each.shape) > 1]
        config = self.contents.folder.config
        tied = config.get("tie_word_embeddings", (config.get("text_config") or {}).get("tie_word_embeddings", True))
        if tied and not any(HEAD in module_of(name).split(".") for name in self.names):
            found.append(HEAD)  # it is the matrix of the embeddings, which stays as it is
        return list(dict.fromkeys([*found, *stacked_modules(self.contents)]))

    def metadata(self) -> dict[str, str]:
        shapes = {name: each.shape for name, each in self.contents.weights.items()}
        shapes |= {name: each.shape for name, each in self.anew.items()}
        config = self.contents.folder.config
        dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32")
        return self.format.metadata(self.scheme, self.names, shapes, dtype)

    def change(self, name: str, reader: TensorReader) -> tuple[QuantizedWeight, ConvertedTensor]:
        given = self.input_scales.get(module_of(name)) if self.scheme.static else None
        own = None if given is None else torch.tensor(given, dtype=torch.float32)
        if name in self.anew:
            return quantized_anew(name, reader.tensor(name), self.scheme, own)
        if self.contents.scheme is None:
            raise AssertionError("a checkpoint with quantised weights has a scheme")
        weight = self.contents.weights[name].read(reader, self.contents.scheme)
        require_sound(name, weight)
        own = (weight.input_scale if own is None else own) if self.scheme.static else None
        weight = replace(weight, input_scale=own)
        try:
            return same_numbers(name, weight, self.scheme)
        except Inexact as error:
            if not self.requantize:
                raise InputError(
                    f"{_OWNER}: {name} can't be written with the same numbers as {self.format.name} ({error}): pass "
                    "requantize=True (--requantize) to quantise it anew, or choose another format"
                ) from None
            return quantized_anew(name, weight.dequantize(), self.scheme, own)

    def tensors(self, name: str, weight: QuantizedWeight) -> list[tuple[str, Tensor]]:
        shape = self.format.stored_shape(weight.codes.shape, weight.granularity)
        scale = weight.scale.to(self.scheme.scale_dtype).reshape(shape)
        listed = [(self.format.codes_name(name), weight.codes), (self.format.scale_name(name), scale)]
        if weight.input_scale is not None:
            one = self.format.stored_shape((1, 1), "tensor")
            listed.append((self.format.input_scale_name(name), weight.input_scale.reshape(one)))
        return listed


def _scheme(
    contents: Contents,
    form: Format,
    granularity: str | None,
    activations: str | None,
    dtype: torch.dtype | None,
    scale_dtype: torch.dtype | None,
    static: bool,
) -> Scheme:
    """The scheme of the target; raises where the format has none such."""
    origin = contents.scheme
    if granularity is None:
        given = static or (origin is not None and origin.static)
        # Those whose activations need no static scale, where there is none.
        usual = [each for each, known in form.takes.items() if given or not all(fixed for _, fixed in known)]
        granularity = origin.granularity if origin and origin.granularity in usual else usual[0]
    made = Scheme(granularity=granularity, dtype=dtype or (origin.dtype if origin else torch.float8_e4m3fn))
    powers = origin is not None and origin.scale_dtype is torch.float8_e8m0fnu and form is contents.format
    made = replace(made, scale_dtype=scale_dtype or (torch.float8_e8m0fnu if powers else torch.float32))
    if made.dtype not in (torch.float8_e4m3fn, torch.float8_e4m3fnuz):
        raise InputError(
            f"{_OWNER}: dtype must be float8_e4m3fn or float8_e4m3fnuz, as files have it; got {made.dtype}"
        )
    if made.scale_dtype not in (torch.float32, torch.bfloat16, torch.float8_e8m0fnu):
        raise InputError(f"{_OWNER}: scale_dtype must be float32, bfloat16 or float8_e8m0fnu; got {made.scale_dtype}")
    refusal = form.refusal(made)
    if refusal:
        raise InputError(f"{_OWNER}: {form.name} can't hold such weights: {refusal}")
    known = form.takes[granularity]
    if activations is None:
        wanted = (origin.activations, origin.static) if origin else None
        if static and ("tensor", True) in known:
            wanted = ("tensor", True)
        kind = wanted if wanted in known else next((each for each in known if not each[1] or static), known[0])
    else:
        fitting = [each for each in known if each[0] == activations and (static or not each[1])]
        fitting += [each for each in known if each[0] == activations]
        if not fitting:
            listed = tuple(dict.fromkeys(each for each, _ in known))
            raise UnknownNameError(f"activations of {form.name} with scales per {granularity}", activations, listed)
        kind = max(fitting, key=lambda each: each[1]) if static else fitting[0]
    bound = (origin.bound if origin and origin.bound else form.bound) if form.bound else None
    return replace(made, activations=kind[0], static=kind[1], bound=bound)


def _to_quantize(contents: Contents, excluded: tuple[str, ...]) -> dict[str, Stored]:
    """Matrices of a checkpoint that is not quantised."""
    if contents.scheme is not None:
        return {}
    config = contents.folder.config
    if config.get("model_type") in _TRANSPOSED:
        raise InputError(
            f"{_OWNER}: models of type {config['model_type']!r} store matrices transposed (Conv1D), which no format of "
            "FP8 has: use the model as it is"
        )
    routers = _routers(contents.plain)
    found = {
        name: each
        for name, each in contents.plain.items()
        if name.endswith(".weight") and name not in routers and _taken(each, excluded)
        # nn.MultiheadAttention reads the weight of this layer, which it never calls.
        if f"{name.removesuffix('out_proj.weight')}in_proj_weight" not in contents.plain
    }
    if not found:
        raise InputError(
            f"{_OWNER}: no matrix is left to quantise in {contents.folder.path}; expected tensors named '*.weight' of "
            "two dimensions: check exclude, and that experts are stored one by one"
        )
    return found


def _taken(stored: Stored, excluded: tuple[str, ...]) -> bool:
    """Tell whether a tensor is a matrix of numbers whose module is not excluded."""
    name = module_of(stored.name)
    if len(stored.shape) != 2 or stored.dtype not in NUMBERS or any(matches(name, pattern) for pattern in LEFT):
        return False
    return not any(covers(name, pattern) for pattern in excluded)


def _require_use(excluded: tuple[str, ...], names: Sequence[str]) -> None:
    """Raise `InputError` for a pattern that describes nothing: what it was meant for would be quantised."""
    for pattern in excluded:
        # An output layer that is tied is in no file.
        if pattern not in LEFT and not any(covers(name, pattern) for name in names):
            shown = ", ".join(map(repr, names[:5]))
            raise InputError(
                f"{_OWNER}: exclude has {pattern!r}, which describes no module of the files; the first of these are "
                f"{shown}: correct the pattern, or leave it out"
            )


def _stacked(contents: Contents, cut: Mapping[str, Any]) -> list[str]:
    """Say what became of experts stacked in one tensor."""
    notes = []
    if cut:
        notes.append(
            f"Experts stacked in one tensor are written matrix by matrix ({', '.join(cut)}): kpt_fp8.transformers.load "
            "reads that, and --to bfloat16 joins them again; transformers' from_pretrained looks for the stack."
        )
    left = stacked_modules(contents)
    if left:
        notes.append(
            f"Experts stacked in one tensor stay as they are: {', '.join(left)}: excluded, or of a layout that "
            "transformers' experts do not have."
        )
    return notes


def _routers(tensors: Mapping[str, Stored]) -> set[str]:
    """Return matrices beside experts, or alone in a module beside them, that have a row for each of these."""
    experts: dict[str, set[str]] = {}
    counts: dict[str, int] = {}
    for name, each in tensors.items():
        owner, inside, own = name.rpartition(".experts.")
        if inside and len(each.shape) == 3:
            counts[owner] = each.shape[0]
        elif inside:
            experts.setdefault(owner, set()).add(own.partition(".")[0])
    counts = {owner: len(own) for owner, own in experts.items()} | counts
    places = {name: name.rsplit(".", 2)[0] for name, each in tensors.items() if len(each.shape) == 2}
    held = Counter(places.values())
    return {
        name
        for name, place in places.items()
        # A module of one matrix may be a router; one of several is a shared expert, which may have as many rows.
        for owner in (place, place.rpartition(".")[0] if held[place] == 1 else "")
        if counts.get(owner) == tensors[name].shape[0]
    }


def _notes(contents: Contents, chosen: Scheme) -> list[str]:
    origin = contents.scheme
    if origin is None:
        return []
    config = contents.folder.quantization or {}
    own = {**config, **config.get("quantization", {})}
    for key in ("kv_cache_scheme", "kv_cache_quant_algo"):
        if own.get(key):
            raise InputError(
                f"{_OWNER}: quantization_config has {key}={own[key]!r}; scales of caches are not converted: set it to "
                "null, and remove the tensors that end in k_scale and v_scale"
            )
    notes = []
    if (origin.activations, origin.static) != (chosen.activations, chosen.static):
        notes.append(
            f"Readers quantise activations otherwise now: per {chosen.activations}"
            f"{', static' if chosen.static else ''}; before, per {origin.activations}"
            f"{', static, whose scales are left out' if origin.static and not chosen.static else ''}."
        )
    if origin.bound != chosen.bound:
        notes.append(f"The bound of activations was {origin.bound} and is {chosen.bound} now.")
    return notes


def _ragged(contents: Contents, anew: Mapping[str, Stored], form: Format, chosen: Scheme) -> list[str]:
    """Name weights of several blocks of rows, the last of which ends early: transformers 5.23 widens them wrong."""
    if form.name != "fp8" or chosen.granularity != "128x128":
        return []
    shapes = {name: each.shape for name, each in contents.weights.items()}
    shapes |= {name: each.shape for name, each in anew.items()}
    found = [name for name, (rows, _) in shapes.items() if rows > 128 and rows % 128]
    if not found:
        return []
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    return [
        f"{found[0]}{more}: the number of rows is above 128 and no multiple of it. transformers would load that wrong "
        "on a CPU, as if all blocks were equally high, or refuse it; kpt_fp8.transformers.load loads it right. Exclude "
        "them, or choose another granularity, for other readers."
    ]


def _config(config: Mapping[str, Any], stacks: Mapping[str, Any], quantization: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json with another quantization_config."""
    return {**unquantized(config), **({KEY: dict(stacks)} if stacks else {}), "quantization_config": dict(quantization)}
