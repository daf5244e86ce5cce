"""A tour of kpt-fp8 in eight parts. Every figure is measured while you look.

    python examples/fp8_tour.py
    python examples/fp8_tour.py --part 5

It needs kpt-fp8 and kpt-optimize; parts 7 and 8 use transformers, part 8 PEFT too, where they are installed.
"""

import argparse
import copy
import tempfile
import warnings
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import kpt_optimize
from kpt_fp8 import (
    NativeFP8Linear,
    calibrate,
    conversion_report,
    convert_model_to_fp8,
    dequantize,
    linear,
    quantize,
)
from kpt_fp8.planner import plan_fp8
from kpt_fp8.quality import sqnr
from kpt_fp8.training import FP8TrainingEngine
from kpt_optimize import interleaved_times, parameter_bytes

torch.set_num_threads(1)  # sizes as small as these gain nothing from more
CPU = torch.device("cpu")
#: By granularity, options of `quantize` beside it.
SCALES: dict[str, tuple[str, dict[str, Any]]] = {
    "tensor": ("tensor", {}),
    "row": ("row", {}),
    "128x128": ("128x128", {}),
    "1x128": ("1x128", {}),
    "1x32": ("1x32", {}),
    "1x32, powers of two (MXFP8)": ("1x32", {"scale_dtype": torch.float8_e8m0fnu, "scale_rounding": "up"}),
}


def numbers(rows: int, columns: int, seed: int = 0, spread: float = 0.0) -> Tensor:
    """Normal numbers, whose rows differ in magnitude by factors of about e to the spread."""
    generator = torch.Generator().manual_seed(seed)
    made = torch.randn(rows, columns, generator=generator)
    return made * torch.exp(spread * torch.randn(rows, 1, generator=generator))


def network(seed: int = 0, width: int = 256) -> nn.Sequential:
    """A small network, the same whenever it is made."""
    torch.manual_seed(seed)
    layers = [nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width), nn.GELU(), nn.Linear(width, width)]
    return nn.Sequential(*layers)


def relative(found: Tensor, exact: Tensor) -> float:
    """The norm of the error over that of the exact numbers."""
    return ((found.double() - exact.double()).norm() / exact.double().norm()).item()


def table(*rows: Sequence[object]) -> None:
    """Print rows in columns; the first is the head."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for first, *others in cells:
        shown = ("  " + cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))
        print("  ", first.ljust(widths[0]), *shown)
    print()


def formats() -> None:
    """Formats and rounding: what a weight loses by what shares a scale, and by the format of its codes."""
    weight, head = numbers(512, 512, spread=1.0), ("bytes a number", "relative error", "worst row, dB")

    def row(name: str, granularity: str, **options: Any) -> tuple[str, str, str, str]:
        codes, scale = quantize(weight, granularity=granularity, **options)
        back = dequantize(codes, scale, granularity=granularity)
        size = f"{(codes.nbytes + scale.nbytes) / weight.numel():.4f}"
        return name, size, f"{relative(back, weight):.2%}", f"{sqnr(weight, back).worst_row_sqnr:.1f}"

    rows = (row(name, granularity, **options) for name, (granularity, options) in SCALES.items())
    table(("one scale for", *head), *rows)
    kinds = (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz)
    rows = (row(str(kind).removeprefix("torch."), "row", dtype=kind) for kind in kinds)
    stochastic = row("float8_e4m3fn, stochastic", "row", stochastic=True, seed=1)
    table(("codes, a scale for each row", *head), *rows, stochastic)


def products() -> None:
    """Multiply: the error of a product beside that of bfloat16, against float64."""
    x, weight = numbers(256, 512, seed=1, spread=0.5), numbers(512, 512, seed=2, spread=0.5)
    exact = x.double() @ weight.double().t()
    plain = x.bfloat16() @ weight.bfloat16().t()
    rows = [("product", "relative error", "times bfloat16's"), ("bfloat16", f"{relative(plain, exact):.2%}", "1.0")]
    schemes = (("row", "none"), ("128x128", "none"), ("row", "row"), ("128x128", "1x128"), ("tensor", "tensor"))
    for granularity, activations in schemes:
        codes, scale = quantize(weight, granularity=granularity)
        error = relative(linear(x, codes, scale, granularity=granularity, activations=activations), exact)
        given = "as they are" if activations == "none" else f"per {activations}"
        name = f"weight per {granularity}, activations {given}"
        rows.append((name, f"{error:.2%}", f"{error / relative(plain, exact):.1f}"))
    table(*rows)


def converting() -> None:
    """Convert a model: bytes, what each layer lost, and the time of a call here."""
    model = network(width=512).eval()
    small = convert_model_to_fp8(model)
    report = conversion_report(small)
    rows = [("layer", "bytes", "in 8 bits", "SQNR, dB", "of the worst row")]
    for layer in report.layers:
        decibels = (f"{value:.1f}" for value in (layer.quality.sqnr, layer.quality.worst_row_sqnr))
        rows.append((layer.name, f"{layer.bytes_before:,}", f"{layer.bytes_after:,}", *decibels))
    table(*rows)
    half = copy.deepcopy(model).bfloat16()
    half_small = convert_model_to_fp8(half)
    models = {"float32": model, "bfloat16": half, "FP8 weights": small, "FP8 weights, bfloat16": half_small}
    rows = [("model", "bytes", "ms, 1 row", "ms, 256 rows", "relative error")]
    x = numbers(256, 512, seed=3)
    with torch.no_grad():
        exact = copy.deepcopy(model).double()(x.double())
        inputs = {name: x.to(next(each.parameters()).dtype) for name, each in models.items()}
        inputs |= {"FP8 weights": x, "FP8 weights, bfloat16": x.bfloat16()}
        times = [
            interleaved_times([partial(each, inputs[name][:count]) for name, each in models.items()], CPU, 1.0)
            for count in (1, 256)
        ]
        for (name, each), *seconds in zip(models.items(), *times, strict=True):
            measured = (f"{median(taken) * 1e3:.2f}" for taken in seconds)
            error = relative(each(inputs[name]), exact)
            rows.append((name, f"{parameter_bytes(each):,}", *measured, f"{error:.2%}"))
    table(*rows)


def calibrating() -> None:
    """Calibrate: static scales of activations by three methods, beside scales that each call computes."""
    model = network().eval()

    def batch(seed: int) -> Tensor:
        x = numbers(256, 256, seed=seed)
        return x * torch.where(torch.arange(256) == 7, 40.0, 1.0)  # one feature is an outlier, as in transformers

    batches, unseen = [batch(seed) for seed in range(4)], batch(99)
    rows = [("activations", "first layer divides by", "relative error of the output")]
    with torch.no_grad():
        exact = model(unseen)
        for method in ("max", "percentile", "mse"):
            scales = calibrate(model, batches, method=method, percentile=99.9)
            static = convert_model_to_fp8(model, activations="tensor", input_scales=scales)
            rows.append((f"static, {method}", f"{scales['0']:.4f}", f"{relative(static(unseen), exact):.2%}"))
        for activations in ("tensor", "row", "none"):
            found = relative(convert_model_to_fp8(model, activations=activations)(unseen), exact)
            what = "as they are" if activations == "none" else f"dynamic, per {activations}"
            rows.append((what, "-", f"{found:.2%}"))
    table(*rows)


def planning() -> None:
    """Plan what pays: the layers that save most within a budget of the output's error."""
    model, texts = network().eval(), [numbers(64, 256, seed=seed) for seed in range(2)]
    rows = [("budget", "layers converted", "bytes saved", "error of the worst row, measured")]
    for budget in (0.0, 0.02, 0.03, 0.04, 0.06):
        plan = plan_fp8(model, texts, max_error=budget).plan
        saved = f"{plan.bytes_before - plan.bytes_after:,}"
        rows.append((f"{budget:.0%}", f"{len(plan.kept)} of 3", saved, f"{plan.error:.2%}"))
    table(*rows)
    optimized = kpt_optimize.apply_plan(model, plan)
    changed = [name for name, _ in converted_layers(optimized.model)]
    optimized.revert()
    print(f"   applied: layers {', '.join(changed)}; reverted: {len(converted_layers(optimized.model))} are 8-bit\n")


def converted_layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Layers whose weight is 8-bit."""
    return [(name, each) for name, each in model.named_modules() if isinstance(each, NativeFP8Linear)]


def train(recipe: str) -> tuple[nn.Module, list[float], int]:
    """Train the same network on the same batches: 150 steps in float32, bfloat16, or by a recipe of FP8."""
    teacher, student = network(seed=9, width=128).requires_grad_(False), network(seed=1, width=128)
    optimizer = torch.optim.AdamW(student.parameters(), lr=2e-3)
    fp8 = recipe not in ("float32", "bfloat16")
    engine = FP8TrainingEngine(student, optimizer, recipe=recipe if fp8 else "none", clip_norm=1.0)
    losses = []
    for step in range(150):
        x = numbers(128, 128, seed=1000 + step)
        with torch.autocast("cpu", torch.bfloat16, enabled=recipe != "float32"):
            loss = F.mse_loss(engine(x).float(), 10 * teacher(x).float())
        engine.step(loss)
        losses.append(loss.item())
    return student, losses, engine.report.skipped


def training() -> None:
    """Train: a network by each recipe, the same weights and batches."""
    rows: list[Sequence[object]] = [("products", "first loss", "of steps 130 to 150", "beside bfloat16", "skipped")]
    results = {recipe: train(recipe) for recipe in ("float32", "bfloat16", "tensor", "delayed", "row", "block")}
    last = {recipe: mean(losses[-20:]) for recipe, (_, losses, _) in results.items()}
    for recipe, (_, losses, skipped) in results.items():
        ratio = f"{last[recipe] / last['bfloat16'] - 1:+.1%}"
        name = recipe if recipe in ("float32", "bfloat16") else f"FP8, {recipe}"
        rows.append((name, f"{losses[0]:.4f}", f"{last[recipe]:.4f}", ratio, skipped))
    table(*rows)
    trained = results["row"][0].eval()
    small, x = convert_model_to_fp8(trained), numbers(128, 128, seed=5)
    with torch.no_grad():
        exact = copy.deepcopy(trained)(x)
        error = relative(small(x), exact)
    sizes = f"{parameter_bytes(trained):,} -> {parameter_bytes(small):,} bytes"
    print(f"   the one trained per row, converted for inference: {sizes}; its output differs by {error:.2%}\n")


def tiny_llama(folder: Path) -> Any:
    """Save a Llama with random weights, and return it in float32."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=256))
    model.save_pretrained(folder)
    return model.eval()


def have(*libraries: str) -> bool:
    """Tell whether libraries are there; say which is not."""
    missing = [name for name in libraries if find_spec(name) is None]
    if missing:
        print(f"   left out: {' and '.join(missing)} not installed\n")
    return not missing


def checkpoints() -> None:
    """Checkpoints: quantise one, write it in other formats, check it, load it with 8-bit weights."""
    if not have("transformers"):
        return
    from transformers import AutoModelForCausalLM

    from kpt_fp8.checkpoints import check_checkpoint, convert_checkpoint
    from kpt_fp8.transformers import load

    ids = torch.randint(256, (4, 32), generator=torch.Generator().manual_seed(0))
    with tempfile.TemporaryDirectory() as name, torch.no_grad():
        folder = Path(name)
        model = tiny_llama(folder / "llama")
        exact = model.double()(ids).logits
        half = AutoModelForCausalLM.from_pretrained(folder / "llama", dtype=torch.bfloat16)
        rows: list[Sequence[object]]
        rows = [("checkpoint", "weights the same to the bit", "faults", "MiB in files", "error of the logits")]
        sizes = sum(file.stat().st_size for file in (folder / "llama").glob("*.safetensors")) / 2**20
        rows.append(("float32, run in bfloat16", "-", "-", f"{sizes:.2f}", f"{relative(half(ids).logits, exact):.2%}"))
        source = "llama"
        for target in ("compressed-tensors", "fbgemm_fp8", "torchao"):
            report = convert_checkpoint(folder / source, folder / target, to=target)
            same = f"{sum(each.exact for each in report.tensors)} of {len(report.tensors)}, from {source}"
            faults = len(check_checkpoint(folder / target))
            logits = load(folder / target, quantize_activations=False)(ids).logits
            cells = (f"{report.bytes / 2**20:.2f}", f"{relative(logits, exact):.2%}")
            rows.append((target, same, faults, *cells))
            source = target
        table(*rows)


def adapting() -> None:
    """LoRA: adapters that train on 8-bit weights, and merge into them."""
    if not have("transformers", "peft"):
        return
    from peft import LoraConfig, get_peft_model

    warnings.simplefilter("ignore")  # PEFT asks transformers by an old name
    ids = torch.randint(256, (4, 32), generator=torch.Generator().manual_seed(0))
    with tempfile.TemporaryDirectory() as name:
        base = convert_model_to_fp8(tiny_llama(Path(name)))
    adapted = get_peft_model(base, LoraConfig(target_modules="all-linear", r=8))
    trainable = [each for each in adapted.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=1e-2)
    rows: list[Sequence[object]] = [("step", "loss")]
    for step in range(41):
        loss = adapted(input_ids=ids, labels=ids).loss
        if step % 10 == 0:
            rows.append((step, f"{loss.item():.3f}"))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    table(*rows)
    with torch.no_grad():
        before = adapted(input_ids=ids, labels=ids).loss.item()
        merged = adapted.merge_and_unload()
        after = merged(input_ids=ids, labels=ids).loss.item()
    count, layers = sum(each.numel() for each in trainable), len(converted_layers(merged))
    print(f"   {count:,} numbers trained beside {layers} layers of 8 bits; loss {before:.3f}, merged {after:.3f}")


PARTS = (formats, products, converting, calibrating, planning, training, checkpoints, adapting)


def main() -> None:
    """Run the parts that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", type=int, choices=range(1, len(PARTS) + 1), help="one part alone")
    chosen = parser.parse_args().part
    for number, part in enumerate(PARTS, 1):
        if chosen in (None, number):
            print(f"{number}. {part.__doc__}\n", flush=True)
            part()


if __name__ == "__main__":
    main()
