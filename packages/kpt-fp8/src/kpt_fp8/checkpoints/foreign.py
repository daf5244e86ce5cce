"""Checkpoints that transformers reads and KPT does not, GGUF and MXFP4, without their quantisation."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kpt_core import InputError

from .changing import ConvertedTensor
from .folder import CONFIG, CheckpointFolder, gguf_files
from .staging import copy_rest, staged, writing
from .widening import PLAIN


@dataclass(frozen=True, slots=True)
class Foreign:
    """A folder that transformers reads; `file` is the one of its weights in GGUF, None where they are MXFP4."""

    folder: Path
    file: str | None

    @property
    def name(self) -> str:
        """Return the name of the format."""
        return "MXFP4" if self.file is None else "GGUF"


def foreign_at(owner: str, source: Path) -> Foreign | None:
    """Return what lies at a path, a file of GGUF or a folder; None where it is for KPT to read, or to refuse."""
    files = gguf_files(source)
    if len(files) > 1:
        raise InputError(f"{owner}: {source} has {len(files)} files of GGUF; expected one: give {files[0]}, say")
    if files:
        return Foreign(files[0].parent, files[0].name)
    method = (CheckpointFolder(source).quantization or {}).get("quant_method")
    return Foreign(source, None) if method == "mxfp4" else None


def write_foreign(
    owner: str, source: Foreign, target: Path, to: str, max_shard_bytes: int
) -> tuple[list[ConvertedTensor], list[str], int]:
    """Write what transformers reads, the whole model in memory, without quantisation; otherwise as `write_plain`.

    Raises:
        InputError: transformers can't read it, or something of it is missing or no number of the dtype.
    """
    notes = [f"{source.name} was read by transformers, the whole model in memory."]
    try:
        model, info = _read(source, to)
    except ImportError as error:
        raise InputError(
            f"{owner}: {source.name} is read by transformers, and a package is missing ({_line(error)}): pip install "
            "'./packages/kpt-fp8[transformers]' gguf"
        ) from error
    except Exception as error:  # foreign code: its failure is what is reported
        raise InputError(
            f"{owner}: transformers can't read {source.folder / (source.file or CONFIG)} ({type(error).__name__}: "
            f"{_line(error)}): start from the unquantised weights"
        ) from error
    held = dict(model.named_parameters())
    wrong = sorted({*info["missing_keys"], *(name for name, each in held.items() if not bool(each.isfinite().all()))})
    if wrong:
        raise InputError(
            f"{owner}: {source.folder} has no {wrong[0]} of finite {to}: take bfloat16, or download it again"
        )
    with staged(target) as staging, writing(staging):
        if source.file is None:
            copy_rest(source.folder, staging)
        else:
            notes += _write_tokenizer(source, staging)
        # The original names of MXFP4 are those of its codes, to which transformers would go back.
        model.save_pretrained(staging, max_shard_size=max_shard_bytes, save_original_format=source.file is not None)
        for file in staging.glob("*.safetensors"):
            file.chmod((staging / CONFIG).stat().st_mode)  # safetensors' files are for their owner only
    how = f"read by transformers as {to}"
    told = [ConvertedTensor(name, False, how) for name, each in held.items() if each.dim() > 1]
    return told, notes, sum(each.nbytes for each in held.values())


def _read(source: Foreign, to: str) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils.quantization_config import GgufConfig, Mxfp4Config

    plain = Mxfp4Config(dequantize=True) if source.file is None else GgufConfig(dequantize=True)
    options: dict[str, Any] = {} if source.file is None else {"gguf_file": source.file}
    return AutoModelForCausalLM.from_pretrained(
        source.folder, quantization_config=plain, dtype=PLAIN[to], output_loading_info=True, **options
    )


def _write_tokenizer(source: Foreign, target: Path) -> list[str]:
    """Write the tokenizer of a file of GGUF; return a note where transformers can't."""
    from transformers import AutoTokenizer

    try:
        AutoTokenizer.from_pretrained(source.folder, gguf_file=source.file).save_pretrained(target)
    except Exception as error:  # foreign code: its failure is what is reported
        return [f"transformers can't read its tokenizer ({_line(error)}): copy that of the original model."]
    return []


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
