"""Language models of Hugging Face folders, loaded without code of theirs: as they run here, and their reference.

KPT's packages are found by name: none of them is imported unless it is installed and the model has use for it.
"""

import os
from collections.abc import Mapping
from contextlib import nullcontext
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

import kpt_core
from kpt_serve.errors import PackageError

from .exporting import DATATYPES

#: No network, no code of the model's, no pickles.
LOCAL: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}


class TextModel:
    """Run the language model in a folder.

    Args:
        folder: With config.json and weights in safetensors.
        device_type: Where to run.
        reference: Run it in 64 bits, 8-bit weights beside 32 bits, with transformers' own attention and experts, and
            the references of KPT's ops. Without it KPT's kernels serve what they can.

    Raises:
        PackageError: It can't be loaded, or transformers or what an 8-bit model needs is not installed.
    """

    def __init__(self, folder: str | os.PathLike[str], device_type: str, *, reference: bool = False) -> None:
        config, self._model = load(folder, device_type, reference=reference)
        self.quantized = _is_quantized(config)
        text = config.get_text_config()
        longest = getattr(text, "max_position_embeddings", None)
        self.vocabulary = int(text.vocab_size)
        self.longest: int | None = longest if isinstance(longest, int) and longest > 0 else None
        self.dtypes = tuple(sorted({str(each.dtype).removeprefix("torch.") for each in _tensors(self._model)}))
        self.dtype = "float64" if reference and not self.quantized else "float32"
        self._reference = reference

    def __call__(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the logits of token ids."""
        try:
            with torch.no_grad(), kpt_core.use("reference") if self._reference else nullcontext():
                return {"logits": self._model(input_ids=inputs["input_ids"], use_cache=False).logits}
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            raise PackageError(f"the model fails: {(str(error).strip().splitlines() or [''])[0]}") from error

    def datatype(self, tensor: Tensor) -> str:
        """Return the word of the Open Inference Protocol for a result."""
        return DATATYPES[tensor.dtype]


def _tensors(model: nn.Module) -> list[Tensor]:
    """Return the weights, those that a subclass holds too."""
    found: list[Tensor] = []
    for tensor in (*model.parameters(), *model.buffers()):
        inner = tensor.__tensor_flatten__()[0] if hasattr(tensor, "__tensor_flatten__") else ()
        found += [getattr(tensor, name) for name in inner] or [tensor]
    return found


def load(folder: str | os.PathLike[str], device_type: str, *, reference: bool = False) -> tuple[Any, Any]:
    """Return the configuration and the language model in a folder; the arguments are those of `TextModel`.

    Raises:
        PackageError: It can't be loaded, or transformers or what an 8-bit model needs is not installed.
    """
    try:
        from transformers import AutoConfig
    except ImportError as error:
        raise PackageError(f"{folder} needs transformers, which is not installed: pip install transformers") from error
    try:
        config = AutoConfig.from_pretrained(folder, **LOCAL)
        return config, _load(folder, device_type, _is_quantized(config), reference)
    except PackageError:
        raise
    except Exception as error:  # transformers raises whatever its many loaders raise
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise PackageError(f"{folder} can't be loaded by transformers: {lines[0][:400]}") from error


def _is_quantized(config: Any) -> bool:
    return getattr(config, "quantization_config", None) is not None


def _load(folder: str | os.PathLike[str], device_type: str, quantized: bool, reference: bool) -> Any:
    from transformers import AutoModelForCausalLM

    implementations = {"attn_implementation": "eager", "experts_implementation": "eager"} if reference else {}
    if quantized:
        if find_spec("kpt_fp8") is None:
            raise PackageError(
                f"{folder} has 8-bit weights, which kpt-fp8 runs; it is not installed: pip install kpt-fp8"
            )
        options = {**LOCAL, "use_safetensors": True, "model_class": AutoModelForCausalLM, **implementations}
        if reference:
            options |= {"dtype": torch.float32, "quantize_activations": False}
        model = import_module("kpt_fp8.transformers").load(folder, **options)
    else:
        dtype = torch.float64 if reference else "auto"
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, use_safetensors=True, **LOCAL, **implementations
        )
    model = model.eval().to(device_type)
    if not reference:
        _serve(model, quantized)
    return model


def _serve(model: Any, quantized: bool) -> None:
    """Have KPT's packages serve experts and attention, where they are installed and take the model."""
    # Loaded in 8 bits, experts are kpt-fp8's, which run kpt-moe's kernels by themselves.
    if find_spec("kpt_moe") is not None and not quantized:
        is_experts = import_module("kpt_moe.rewrites").is_transformers_experts
        if any(map(is_experts, model.modules())):
            import_module("kpt_moe.transformers")
            model.set_experts_implementation("kpt")
    if find_spec("kpt_attention") is not None:
        import_module("kpt_attention.transformers")
        before = model.config._attn_implementation
        try:
            model.set_attn_implementation("kpt")
        except (kpt_core.KptError, ValueError):  # a class that asks for what KPT has no kernel for
            model.set_attn_implementation(before)
