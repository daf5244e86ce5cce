"""Write which kernel serves what on which GPU into docs/hardware/kernels.md: `python tools/selection.py`.

Dispatch is asked as it is on such a device: by capabilities, dtypes and each kernel's refusals. Nothing runs. A test
holds the page to what this writes.
"""

from pathlib import Path
from typing import Any

import torch

import kpt_core
from kpt_core.contract import GPU, TORCH
from kpt_optimize.cases import Case, case_tables
from kpt_optimize.devices.targets import Served, served, target_of

PAGE = Path(__file__).parents[1] / "docs/hardware/kernels.md"
CHIPS = {"A100": "A100", "H100": "H100", "B200": "B200", "MI300X": "MI300X", "RX 7900": "gfx1100", "Arc B580": "B580"}
_HEAD: dict[str, Any] = {"batch": 1, "kv_heads": 2, "groups": 4, "head_dim": 64, "value_dim": 64, "return_lse": False}
_LONG: dict[str, Any] = {**_HEAD, "queries": 256, "keys": 256}
_PAGES: dict[str, Any] = {"kv_heads": 2, "groups": 4, "page_size": 16, "head_dim": 64, "value_dim": 64}
_FN, _FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz
_ROWS: dict[str, Any] = {"rows": 64, "inner": 64, "columns": 64}
_EXPERTS: dict[str, Any] = {"tokens": 64, "hidden": 64, "inner": 64, "num_experts": 8, "top_k": 2}
#: Words for a call -> op, sizes of its case, whether gradients are wanted.
CALLS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "attention, causal": ("attention.dense", {**_LONG, "mask": "causal"}, False),
    "the same, training": ("attention.dense", {**_LONG, "mask": "causal"}, True),
    "a step of decoding": ("attention.dense", {**_LONG, "queries": 1, "mask": "causal"}, False),
    "a window, training": ("attention.dense", {**_LONG, "mask": "window"}, True),
    "packed documents, training": ("attention.dense", {**_LONG, "mask": "documents"}, True),
    "left padding": ("attention.dense", {**_LONG, "mask": "padding"}, False),
    "any mask": ("attention.dense", {**_LONG, "mask": "blocks"}, False),
    "softcap and sinks": ("attention.dense", {**_LONG, "mask": "causal", "softcap": 50.0, "sinks": True}, False),
    "ALiBi, training": ("attention.dense", {**_LONG, "mask": "causal", "added": "alibi"}, True),
    "a bias, all keys": ("attention.dense", {**_LONG, "added": "bias"}, False),
    "dropout, training": ("attention.dense", {**_LONG, "mask": "causal", "dropout": 0.1, "seed": 1}, True),
    "pages, a step of decoding": ("attention.paged", _PAGES, False),
    "pages, a tree of guesses": ("attention.paged", {**_PAGES, "queries": 9, "mask": "tree"}, False),
    "pages, prefills": ("attention.paged", {**_PAGES, "queries": 9}, False),
    "writing into pages": ("attention.update_cache", {"kv_heads": 2, "head_dim": 64, "value_dim": 64}, False),
    "merging two parts of attention, training": ("attention.merge", {"value_dim": 64}, True),
    "FP8 product, a scale each": (
        "fp8.scaled_mm", {**_ROWS, "granularity_a": "tensor", "granularity_b": "tensor"}, False,
    ),
    "FP8 product, scales of rows": ("fp8.scaled_mm", _ROWS, False),
    "the same in fnuz": ("fp8.scaled_mm", {**_ROWS, "format": _FNUZ, "other": _FNUZ}, False),
    "FP8 product, blocks": (
        "fp8.scaled_mm", {**_ROWS, "inner": 512, "granularity_a": "1x128", "granularity_b": "128x128"}, False,
    ),
    "FP8 product, Microscaling": (
        "fp8.scaled_mm",
        {**_ROWS, "granularity_a": "1x32", "granularity_b": "1x32", "scale_dtype": torch.float8_e8m0fnu}, False,
    ),
    "FP8 linear layer, weights alone": ("fp8.linear", _ROWS, False),
    "FP8 linear layer, DeepSeek's blocks": (
        "fp8.linear", {**_ROWS, "inner": 512, "granularity": "128x128", "activations": "1x128"}, False,
    ),
    "FP8 codes to numbers": ("fp8.dequantize", {"rows": 64, "inner": 64, "granularity": "row"}, False),
    "quantising to FP8": ("fp8.quantize", {"rows": 64, "inner": 64, "granularity": "row"}, False),
    "experts, training": ("moe.experts", _EXPERTS, True),
    "experts in FP8": ("moe.experts", {**_EXPERTS, "up_scheme": "row", "down_scheme": "row"}, False),
    "choice of experts": ("moe.top_k_gating", {"tokens": 64, "experts": 8}, False),
}  # fmt: skip

_INTRO = """\
# Which kernel runs on which GPU

What dispatch chooses for common calls in bfloat16, and beneath in a sentence each why not another kernel.
`tools/selection.py` writes this page by asking dispatch for chips that are not here, and a test holds the page to it.
**It says what is chosen, not that it ran**: that is in [the support table](../support.md).
`kpt plan MODEL --target H100` tells the same of a model of yours.

- *SDPA*, *FlexAttention*: PyTorch's own, forward and backward, the second one compiled.
- *pages at once*: all pages of a step are gathered, then SDPA or products in float32. *All prefills at once*: gathered,
  then one call of `attention.dense`, by FlexAttention.
- *cuBLASLt*, *hipBLASLt*: the vendor's library, by `torch._scaled_mm`. *16-bit products*: of codes, widened.
- *Triton*: KPT's own kernels. *By parts*: PyTorch around such kernels.
- **slow**: plain PyTorch that was not made for GPUs. KPT warns once, with every refusal; `use(strict=True)`
  makes it an error.

"""
#: What people call a kernel.
_NAMES = {
    "gpu_sdpa": "SDPA",
    "gpu_flex": "FlexAttention",
    "gpu_paged": "pages at once",
    "tiles": "tiles",
    "paged": "sequence by sequence",
    "experts_grouped": "by parts",
    "gpu_linear": "16-bit products",
    "gpu_scaled_mm_wide": "16-bit products",
    "gpu_merge": "a dozen launches",
    "gpu_dequantize": "two passes",
}


def call_of(op: str, sizes: dict[str, Any], gradients: bool) -> Any:
    """Return a call in bfloat16 on `meta`."""
    table = case_tables()[op]
    made = table.arguments(Case(name="", sizes=sizes), dtype=torch.bfloat16)
    on_meta = {name: value.to("meta") if isinstance(value, torch.Tensor) else value for name, value in made.items()}
    call = kpt_core.get_op(op).bind(**on_meta)
    wanted = [name for name in table.gradients if on_meta.get(name) is not None and gradients]
    return call._replace(needs=tuple(name for name in wanted if on_meta[name].dtype.itemsize > 1))


def name_of(found: Served, vendor: str) -> str:
    """Return what a reader calls a kernel; a slow one is told so."""
    if found.kernel is None:
        return "**slow**: reference"
    module = found.kernel.forward.partition(":")[0].rpartition(".")[2]
    if module in ("gpu_scaled_mm", "gpu_scaled_mm_blocks"):
        return "hipBLASLt" if vendor == "amd" else "cuBLASLt"
    if module == "gpu_paged" and not found.kernel.forward.endswith(":forward"):
        return "all prefills at once" if found.kernel.forward.endswith(":prefill") else "plain PyTorch"
    if found.backend != TORCH:
        return "Triton" if "kpt_triton" in found.kernel.forward else f"{found.backend}: {module}"
    name = _NAMES.get(module, module)
    return name if GPU in found.kernel.requires or found.kernel.composed_of else f"**slow**: {name}"


def page() -> str:
    """Return the page: a table of what is chosen, and beneath it every reason of a call itself."""
    targets = {name: target_of(words) for name, words in CHIPS.items()}
    lines = [f"| call | {' | '.join(targets)} |", f"|---|{'---|' * len(targets)}"]
    reasons: dict[tuple[str, str], list[str]] = {}
    for words, (op, sizes, gradients) in CALLS.items():
        call, cells = call_of(op, sizes, gradients), []
        for chip, target in targets.items():
            found = served(kpt_core.get_op(op), call, target)
            cells.append(name_of(found, target.backend.name if target.backend else ""))
            for refused in found.refusals:
                if "host_memory" not in refused.reason and refused.kernel is not None:
                    # What a chip lacks is the same sentence for all that lack it.
                    reason = f"`{refused.kernel.partition('.')[2]}`: {refused.reason.partition(', which ')[0]}"
                    if "this kernel" not in reason and "which another kernel" not in reason:
                        reasons.setdefault((words, reason), []).append(chip)
        lines.append(f"| {words} | {' | '.join(cells)} |")
    told = ["", "## Why not another", "", "| call | kernel: reason | on |", "|---|---|---|"]
    for (words, reason), chips in reasons.items():
        told.append(f"| {words} | {reason} | {', '.join(chips) if len(chips) < len(targets) else 'all'} |")
    return _INTRO + "\n".join([*lines, *told]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
