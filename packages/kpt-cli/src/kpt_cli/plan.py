"""The command `kpt plan`: whether a model fits a device that is not here, what runs there, and how fast at best."""

import math
import re
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .console import heading, out, print_json, say, say_all, table
from .errors import CliError
from .kernels import best, levels
from .optimize.model_directory import ModelDirectory, read_config
from .options import Json, WeightDtype, one_of

if TYPE_CHECKING:
    import torch

    from kpt_core.contract import Kernel
    from kpt_optimize.devices.targets import Target
    from kpt_optimize.forecast import Forecast, Step, Work

DEFAULT_TOKENS = 4096
#: Rows of an expert above which kernels round activations to 8 bits, as `kpt_triton.moe.experts` has it.
MOST_ROWS_EXACT = 32
#: Sequences at a time for which rates are told, beside those that are asked for.
BATCHES = (1, 64)
#: Of a paged cache, as `kpt_attention.transformers_cache` makes it.
_PAGE = 16
_BLOCK = 128
#: What memory holds beside weights, and how people call it.
PARTS = {"kv_cache": "KV cache", "gradients": "gradients", "optimizer_state": "AdamW", "activations": "activations"}
_UNITS = {"K": 1, "M": 2, "G": 3, "T": 4}
LIMITS = (
    "Memory is computed from tensor shapes, with fused attention, and all of training in the weights' "
    "dtype: what the driver, the allocator's rounding and kernels take for themselves comes on top.",
    "Times are lower bounds by the data sheet: the cache and every weight that is used are read once (of experts those "
    "that a fair router chooses, or all where KPT does not serve them), activations cost nothing, and nothing is lost "
    "to launches and communication.",
    "Attention is KPT's in a model that is loaded with attn_implementation='kpt' (import kpt_attention.transformers), "
    "linear layers where their weights have 8 bits (kpt convert). Routers, norms and the rest are transformers' own.",
    "Decoding is with KPT's PagedKVCache; transformers' DynamicCache copies the cache in every step.",
    "8-bit linear layers multiply codes where the chip does, with activations quantised by 1x128 "
    "(kpt_fp8.transformers.load); experts likewise where they have more than 32 rows each, of e4m3fn alone. Elsewhere "
    "codes are widened to the activations' dtype first.",
)


def _bytes(given: str | None) -> int | None:
    """Return the number of bytes in `192GiB`, `80 GB`, `8g`; powers of 1000 for GB, of 1024 otherwise."""
    if given is None:
        return None
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT])(i?B)?\s*", given, re.IGNORECASE)
    if found is None or not float(found[1]):
        raise CliError(f"--memory {given!r}: expected an amount with its unit, for instance 192GiB or 80GB")
    base = 1000 if (found[3] or "").lower() == "b" else 1024
    return int(float(found[1]) * base ** _UNITS[found[2].upper()])


def plan(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="Folder of a Hugging Face model, or its config.json.")],
    target: Annotated[str, typer.Option(help="Chip or product: gfx942, sm90, pvc, MI300X, 'arc b580', cpu...")],
    memory: Annotated[str | None, typer.Option(help="As in 192GiB.", show_default="the product's")] = None,
    dtype: WeightDtype = "auto",
    weights: Annotated[
        str | None,
        one_of("weights", ("fp8",), "fp8: matrices in 8 bits, with scales.", show_default="the config's, or --dtype"),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Sequences at a time.")] = 1,
    tokens: Annotated[int | None, typer.Option(min=1, help="Of each sequence; 4096, or what the model reads.")] = None,
    train: Annotated[bool, typer.Option("--train", help="Plan a step of training with AdamW.")] = False,
    as_json: Json = False,
) -> None:
    """Plan a model for a device that need not be here: memory, kernels, evidence, and time at best.

    Only the config is read: no weights are loaded, nothing is computed, nothing is downloaded.
    """
    given = _bytes(memory)
    directory = ModelDirectory(path=model, config=read_config(model, alone=True), weights=(), weight_bytes=0)
    from kpt_optimize.devices.targets import target_of
    from kpt_optimize.forecast import forecast

    from .optimize.model import as_sentence

    device = target_of(target)
    room = given or device.memory
    if room is None:
        raise CliError(f"--target {target}: no product with this chip is known; give its --memory, as in 24GiB")
    built, name, longest = _on_meta(directory, dtype)
    if tokens is None:
        tokens = int(min(DEFAULT_TOKENS, longest))
    elif tokens > longest:
        raise CliError(f"--tokens {tokens}: {model} reads at most {longest} tokens at a time; ask for fewer")
    quantised = getattr(built.config, "quantization_config", None) or {}
    fp8 = weights == "fp8" or (weights is None and not train and dict(quantised).get("quant_method") == "fp8")
    try:
        found = forecast(built, batch=batch, tokens=tokens, training=train, fp8=fp8)
    except Exception as error:  # models raise whatever they like where tensors have no values
        raise as_sentence(error, f"{model} could not be followed without its weights") from error

    def throughput() -> list[dict[str, Any]]:
        """Return rates at several batches; weights and cache have to fit beside one sequence's activations."""
        each = {size: forecast(built, batch=size, tokens=tokens, fp8=fp8) for size in {*BATCHES, batch} - {batch}}
        each[batch] = found
        return _throughput(each, device, name, fp8, tokens, room)

    kernels = _kernels(found, device, fp8)
    document = {
        "model": type(built).__name__,
        "parameters": found.parameters,
        "target": {
            "chip": device.chip,
            "product": device.product,
            "memory_bytes": room,
            "missing_package": device.missing,
        },
        "settings": {"dtype": name, "fp8_weights": fp8, "batch": batch, "tokens": tokens, "training": train},
        "memory": {name: getattr(found, name) for name in ("weights", *PARTS, "peak")},
        "fits": found.peak <= room,
        "missing_bytes": max(found.peak - room, 0),
        "levels": [
            {"level": each.level, "activations": each.memory.activations, "peak": each.memory.peak, "flops": each.flops}
            for each in found.levels
        ],
        "remedies": found.remedies(room, tokens),
        "kernels": kernels,
        "throughput": [] if train else throughput(),
        "roofline": _roofline(found, device, name, fp8),
        "source": device.peaks and device.peaks.source,
        "limits": LIMITS,
    }
    if as_json:
        print_json(document)
    else:
        _show(document)


def _on_meta(directory: ModelDirectory, dtype: str) -> tuple[Any, str, float]:
    """Return the model without data, the name of its dtype, and how many tokens it reads at most."""
    import torch

    from .optimize.model import as_sentence, config_and_class, quiet_transformers

    quiet_transformers()  # before anything imports what it is to be quiet about

    import kpt_moe.transformers  # noqa: F401  registers its experts
    from kpt_optimize.forecast import ATTENTION, register_attention

    config, cls = config_and_class(directory)
    longest = getattr(config.get_text_config(), "max_position_embeddings", None) or math.inf
    register_attention()
    kind = (getattr(config, "dtype", None) or torch.float32) if dtype == "auto" else getattr(torch, dtype)
    make = getattr(cls, "_from_config", None) or cls.from_config
    try:
        with torch.device("meta"):
            model = make(config, dtype=kind, attn_implementation=ATTENTION, experts_implementation="kpt")
    except Exception as error:  # transformers raises whatever its models raise
        raise as_sentence(error, f"{directory.path} could not be made as {cls.__name__}") from error
    if model.main_input_name != "input_ids" or getattr(config, "is_encoder_decoder", False):
        raise CliError(f"{directory.path} is a {type(model).__name__}; expected a language model that reads token ids")
    return model.eval(), str(kind).removeprefix("torch."), longest


def _codes(device: "Target") -> "torch.dtype | None":
    """Return the 8-bit format that a device multiplies, None if it multiplies none: MI300 takes e4m3fnuz alone."""
    import torch

    for name in ("fp8_e4m3fn", "fp8_e4m3fnuz"):
        if name in device.capabilities:
            return {"fp8_e4m3fn": torch.float8_e4m3fn, "fp8_e4m3fnuz": torch.float8_e4m3fnuz}[name]
    known = device.missing is not None and device.peaks is not None and device.peaks.fp8_tflops is not None
    return torch.float8_e4m3fn if known else None


def _as_loaded(work: "Work", codes: "torch.dtype | None", fp8: bool) -> "Work":
    """Return 8-bit layers as `kpt_fp8.transformers.load` makes them: activations are codes where codes multiply."""
    import torch

    if fp8 and work.op == "moe.experts" and work.call is not None:
        given: Any = work.call
        changed = {}
        for name in ("gate_up", "down"):
            experts, rows, columns = getattr(given, f"{name}_proj").shape
            changed[f"{name}_proj"] = torch.empty(experts, rows, columns, dtype=torch.float8_e4m3fn, device="meta")
            sizes = experts, math.ceil(rows / _BLOCK), math.ceil(columns / _BLOCK)
            changed[f"{name}_scale"] = torch.empty(sizes, device="meta")
        rounded = f"1x{_BLOCK}" if codes is torch.float8_e4m3fn else "none"
        return replace(work, call=given._replace(**changed, activations=rounded))
    if work.op != "fp8.linear" or work.call is None or codes is None:
        return work
    call: Any = work.call
    weight = torch.empty(call.weight.shape, dtype=codes, device="meta")
    return replace(work, call=call._replace(weight=weight, activations=f"1x{_BLOCK}", activation_dtype=codes))


def _of_pages(found: "Forecast") -> "Iterator[Work]":
    """Yield what a paged cache adds to attention: writing into pages, and decoding from them."""
    import torch

    from kpt_core.registry import get_op

    for work in found.calls:
        call: Any = work.call
        if work.op != "attention.dense" or call is None:
            continue
        (batch, heads, queries, dim), (_, kv_heads, keys, _) = call.q.shape, call.k.shape
        pages, rows = math.ceil(keys / _PAGE), batch * queries
        k_cache, v_cache = (
            torch.empty(batch * pages, _PAGE, kv_heads, each.shape[-1], dtype=each.dtype, device="meta")
            for each in (call.k, call.v)
        )
        k, v = (
            torch.empty(rows, kv_heads, each.shape[-1], dtype=each.dtype, device="meta") for each in (call.k, call.v)
        )
        slots = torch.empty(rows, dtype=torch.int64, device="meta")
        update = get_op("attention.update_cache").bind(k_cache, v_cache, k, v, slots)
        written = 2 * work.count * (k.nbytes + v.nbytes)  # read and written
        note = f"{_PAGE} to a page"
        yield replace(
            work, op="attention.update_cache", call=update, sizes=(*k.shape,), note=note, flops=0, nbytes=written
        )
        if queries == 1:
            q = torch.empty(batch, heads, dim, dtype=call.q.dtype, device="meta")
            table = torch.empty(batch, pages, dtype=torch.int32, device="meta")
            lengths = torch.empty(batch, dtype=torch.int32, device="meta")
            paged = get_op("attention.paged").bind(q, k_cache, v_cache, table, lengths)
            note = f"{keys} keys of {kv_heads} heads, {_PAGE} to a page"
            nbytes = work.nbytes + work.count * (table.nbytes + lengths.nbytes)
            yield replace(work, op="attention.paged", call=paged, sizes=(*q.shape,), note=note, nbytes=nbytes)


def _within(work: "Work", kernel: "Kernel | None") -> "Iterator[Work]":
    """Yield the calls of other ops that a kernel makes; the work is counted in the whole."""
    import torch

    from kpt_core.registry import get_op

    def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    call: Any = work.call
    if kernel is None or not kernel.composed_of:
        return
    if work.op == "fp8.linear" and call.activations != "none":
        (rows, inner), codes, by = call.x.shape, call.weight.dtype, call.activations
        blocks = math.ceil(inner / _BLOCK)
        own = replace(work, note="", flops=0, nbytes=0)
        quantise = get_op("fp8.quantize").bind(call.x, None, dtype=codes, granularity=by)
        yield replace(own, op="fp8.quantize", call=quantise, sizes=(rows, inner))
        a, scales = empty(rows, inner, dtype=codes), empty(rows, blocks, dtype=torch.float32)
        product = get_op("fp8.scaled_mm").bind(
            a, call.weight.t(), scales, call.scale.t(), None,
            granularity_a=by, granularity_b=call.granularity, out_dtype=call.x.dtype,
        )  # fmt: skip
        yield replace(own, op="fp8.scaled_mm", call=product)


def _kernels(found: "Forecast", device: "Target", fp8: bool) -> list[dict[str, Any]]:
    from kpt_core.registry import get_op
    from kpt_optimize.devices.targets import served

    codes, rows = _codes(device), []
    decodes = len(found.steps) == 2
    waiting = [*(_as_loaded(each, codes, fp8) for each in found.calls), *(_of_pages(found) if decodes else ())]
    while waiting:
        work = waiting.pop(0)
        row: dict[str, Any] = {
            "op": work.op,
            "sizes": list(work.sizes),
            "note": work.note,
            "calls": work.count,
            "flops": work.flops,
            "nbytes": work.nbytes,
            "backend": None,
            "kernel": None,
            "evidence": None,
            "refused": [],
            "missing_package": None,
        }
        rows.append(row)
        if work.op == "linear":
            row |= {"backend": "torch", "kernel": "torch.nn.functional.linear"}
        elif work.call is None:
            row["missing_package"] = f"kpt-{work.op.partition('.')[0]}"
        elif device.missing is None:
            chosen = served(get_op(work.op), work.call, device)
            function = chosen.kernel.forward if chosen.kernel else "reference"
            proof = levels().get(f"{chosen.backend}/{work.op}/{function}", {})
            here = {
                chip: words for chip, words in proof.items() if device.chip in ("cpu", chip) or "interpreter" in chip
            }
            row |= {"backend": chosen.backend, "kernel": function, "evidence": best(here)}
            row["refused"] = [str(each) for each in chosen.refusals]
            if fp8:
                waiting[:0] = _within(work, chosen.kernel)
    return rows


def _roofline(found: "Forecast", device: "Target", dtype: str, fp8: bool) -> list[dict[str, Any]]:
    codes = str(_codes(device)).removeprefix("torch.") if fp8 else "None"
    calls: list[Any] = [work.call for work in found.calls if work.op == "moe.experts" and work.call is not None]
    # The first step has all tokens, the second, of decoding, the fewest.
    rows_of_experts = [
        most(each.top_k_index.numel() / each.gate_up_proj.shape[0] for each in calls) if calls else 0
        for most in (max, min)
    ]

    def row(step: "Step", rows: float) -> dict[str, Any]:
        parts = [row(part, rows) for part in step.parts]
        # Linear layers multiply codes where the chip does, experts those of many rows. Attention multiplies what layers
        # hand on, which has the activations' dtype whatever the weights'.
        coded = step.name == "linear layers" and codes != "None"
        coded |= step.name == "experts" and codes == "float8_e4m3fn" and rows > MOST_ROWS_EXACT
        units = codes if coded else dtype
        rate = _rate(device, units)
        if parts and rate is not None:
            # Parts take their time one after the other, each at its own rate; what is in none has the activations'.
            times: dict[str, float] = {units: (step.flops - sum(part["flops"] for part in parts)) / rate}
            for part in parts:
                times[part["units"]] = times.get(part["units"], 0.0) + part["flops"] / part["tflops"]
            total = sum(times.values())
            units, rate = max(times, key=lambda name: times[name]), step.flops / total if total else rate
        seconds, bound = (None, None) if device.peaks is None else step.seconds(device.peaks, rate)
        return asdict(step) | {
            "tflops": rate,
            "units": units,
            "seconds": seconds,
            "bound_by": bound,
            "parts": parts,
        }

    return [row(step, rows) for step, rows in zip(found.steps, rows_of_experts, strict=False)]


def _rate(device: "Target", dtype: str) -> float | None:
    """Return the rate of products; of codes in the format that `_codes` found."""
    if dtype.startswith("float8") and device.peaks is not None:
        return device.peaks.fp8_tflops or device.peaks.bf16_tflops
    return device.tflops(dtype)


def _throughput(
    forecasts: "dict[int, Forecast]", device: "Target", dtype: str, fp8: bool, tokens: int, room: int
) -> list[dict[str, Any]]:
    """Return tokens a second of each step at each batch."""
    rows, least = [], forecasts[min(forecasts)]
    for batch, found in sorted(forecasts.items()):
        held = sum(found.weights.values()) + found.kv_cache + least.activations
        for name, step in zip(("prefill", "decode"), _roofline(found, device, dtype, fp8), strict=False):
            count = batch * (tokens if name == "prefill" else 1)
            rows.append(
                {key: step[key] for key in ("flops", "nbytes", "seconds", "bound_by", "units")}
                | {
                    "step": name,
                    "batch": batch,
                    "tokens_per_second": step["seconds"] and count / step["seconds"],
                    "held_bytes": held,
                    "fits": held <= room,
                }
            )
    return rows


def _bound(row: dict[str, Any]) -> str:
    """Return what bounds a step in words: memory, or the units that multiply a dtype."""
    if row["bound_by"] != "arithmetic":
        return row["bound_by"] or "-"
    return "FP8 units" if row["units"].startswith("float8") else f"{row['units']} units"


def _show(document: dict[str, Any]) -> None:
    from kpt_optimize.memory import format_bytes

    target, settings, memory = document["target"], document["settings"], document["memory"]
    use = "Training" if settings["training"] else "Inference"
    billions = f"{document['parameters'] / 1e9:.2f} billion parameters"
    heading(f"{document['model']}, {billions}, on {target['chip']} ({target['product']})")
    say(f"{use} with {settings['batch']} x {settings['tokens']} tokens")
    made = table("memory", "size", right=("size",))
    for dtype, size in memory["weights"].items():
        made.add_row(f"weights and buffers, {dtype}", format_bytes(size))
    for name, label in PARTS.items():
        if memory[name]:
            made.add_row(label, format_bytes(memory[name]))
    made.add_row("at most at one time", format_bytes(memory["peak"]))
    out().print(made)
    if document["levels"]:
        heading("Levels of activation checkpointing")
        made = table("level", "activations", "peak", "operations", right=("activations", "peak", "operations"))
        for row in document["levels"]:
            activations, peak = format_bytes(row["activations"]), format_bytes(row["peak"])
            made.add_row(row["level"], activations, peak, f"{row['flops']:.2f}x")
        out().print(made)
    size = format_bytes(target["memory_bytes"])
    if document["fits"]:
        say(f"It fits: {memory['peak'] / target['memory_bytes']:.0%} of {size}.", style="green")
    else:
        say(f"It does not fit into {size}: {format_bytes(document['missing_bytes'])} are missing.", style="bold red")
        say_all("What would make it fit", document["remedies"])
    heading("Kernels")
    made = table("op", "sizes", "calls", "kernel", "backend", "evidence", right=("calls",))
    alike: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in document["kernels"]:
        if row["op"] != "linear":
            # Layers of other sizes with the same kernel share a line, so that all stays on a screen.
            names = (row[name] or "unknown" for name in ("kernel", "backend", "evidence"))
            alike.setdefault((row["op"], *names), []).append(row)
    for (op, *chosen), rows in alike.items():
        sizes = " x ".join(map(str, rows[0]["sizes"])) + (f", {rows[0]['note']}" if rows[0]["note"] else "")
        more = f"; {len(rows) - 1} more" if len(rows) > 1 else ""
        made.add_row(op, sizes + more, str(sum(row["calls"] for row in rows)), *chosen)
    if made.row_count:
        out().print(made)
    if any(row["op"] == "linear" for row in document["kernels"]):
        say("torch's own products run linear layers that stay in the weights' dtype.")
    for name in sorted({target["missing_package"], *(row["missing_package"] for row in document["kernels"])} - {None}):
        say(f"Kernels are unknown: install ./packages/{name} to see which kernels would run.")
    say_all("Refused", list(dict.fromkeys(text for row in document["kernels"] for text in row["refused"])))
    heading("Time at the least" if document["fits"] else "Time at the least, if it fitted")
    made = table("step", "TFLOP", "memory traffic", "time", "bound by", right=("TFLOP", "memory traffic", "time"))
    for row in [each for step in document["roofline"] for each in (step, *step["parts"])]:
        name = row["name"] if row in document["roofline"] else f"  {row['name']}"
        time = "unknown" if row["seconds"] is None else f"{row['seconds'] * 1e3:.2f} ms"
        made.add_row(name, f"{row['flops'] / 1e12:,.3f}", format_bytes(row["nbytes"]), time, _bound(row))
    out().print(made)
    if document["source"] and document["throughput"]:
        heading("Tokens a second at the most")
        made = table("step", "batch", "tokens/s", "bound by", "weights and cache", "fits", right=("batch", "tokens/s"))
        for row in document["throughput"]:
            speed, fits = f"{row['tokens_per_second']:,.0f}", "yes" if row["fits"] else "no"
            made.add_row(row["step"], str(row["batch"]), speed, _bound(row), format_bytes(row["held_bytes"]), fits)
        out().print(made)
    if document["source"] and document["roofline"][0]["tflops"] is None:
        say(f"No rate of {settings['dtype']} products is listed: times are those of the memory alone.")
    if document["source"]:
        say(f"Rates: {document['source']}.")
    else:
        say(f"No rates of {target['product']} are known, so the time is not either: measure a run there.")
    say_all("Limits", document["limits"])
