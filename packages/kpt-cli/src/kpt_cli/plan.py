"""The command `kpt plan`: whether a model fits a device that is not here, what runs there, and how fast at best."""

import math
import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .console import heading, out, print_json, say, say_all, table
from .errors import CliError
from .kernels import best, levels
from .optimize.model_directory import ModelDirectory, read_config
from .options import Json, WeightDtype, one_of

if TYPE_CHECKING:
    from kpt_optimize.devices.targets import Target
    from kpt_optimize.forecast import Forecast, Step

DEFAULT_TOKENS = 4096
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
    "linear layers where their weights have 8 bits (kpt convert).",
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
        "kernels": _kernels(found, device, fp8),
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

    import kpt_moe.transformers  # noqa: F401  registers its experts
    from kpt_optimize.forecast import ATTENTION, register_attention

    from .optimize.model import as_sentence, config_and_class

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


def _kernels(found: "Forecast", device: "Target", fp8: bool) -> list[dict[str, Any]]:
    from kpt_core.registry import get_op
    from kpt_optimize.devices.targets import served

    rows = []
    for work in found.calls:
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
            chosen = served(get_op(work.op), work.call, device, fp8 and work.op.startswith("moe."))
            function = chosen.kernel.forward if chosen.kernel else "reference"
            proof = levels().get(f"{chosen.backend}/{work.op}/{function}", {})
            here = {
                chip: words for chip, words in proof.items() if device.chip in ("cpu", chip) or "interpreter" in chip
            }
            row |= {"backend": chosen.backend, "kernel": function, "evidence": best(here)}
            row["refused"] = [str(each) for each in chosen.refusals]
    return rows


def _roofline(found: "Forecast", device: "Target", dtype: str, fp8: bool) -> list[dict[str, Any]]:
    rate = device.tflops("float8_e4m3fn" if fp8 else dtype)

    def row(step: "Step") -> dict[str, Any]:
        # Attention multiplies what layers hand on, which has the activations' dtype whatever the weights'.
        own = device.tflops(dtype) if step.name == "attention" else rate
        seconds, bound = (None, None) if device.peaks is None else step.seconds(device.peaks, own)
        return asdict(step) | {
            "tflops": own,
            "seconds": seconds,
            "bound_by": bound,
            "parts": [row(part) for part in step.parts],
        }

    return [row(step) for step in found.steps]


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
    for row in document["kernels"]:
        if row["op"] == "linear":
            continue
        sizes = " x ".join(map(str, row["sizes"])) + (f", {row['note']}" if row["note"] else "")
        chosen = (row[name] or "unknown" for name in ("kernel", "backend", "evidence"))
        made.add_row(row["op"], sizes, str(row["calls"]), *chosen)
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
        made.add_row(name, f"{row['flops'] / 1e12:,.3f}", format_bytes(row["nbytes"]), time, row["bound_by"] or "-")
    out().print(made)
    if document["source"] and document["roofline"][0]["tflops"] is None:
        say(f"No rate of {settings['dtype']} products is listed: times are those of the memory alone.")
    if document["source"]:
        say(f"Rates: {document['source']}.")
    else:
        say(f"No rates of {target['product']} are known, so the time is not either: measure a run there.")
    say_all("Limits", document["limits"])
