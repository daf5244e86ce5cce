"""Train and embed tiny models with libraries that use transformers, by KPT's attention and by eager, and compare.

    python tools/families/clients.py
    python tools/families/clients.py -k trl

Each client prints a line: what ran, versions, the largest difference of losses, weights and outputs from eager's, and
whether it passes. One whose package is not installed is skipped. The exit code is 1 where one fails. It takes
half a minute on one core.

Libraries in a folder of their own (`pip install --target`, `PYTHONPATH`) need `site-packages` in its path: datasets
pickles by dill, which takes other folders for the user's own code and fails on pyarrow.
"""

import argparse
import contextlib
import importlib
import logging
import os
import re
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from kpt_attention.transformers import NAME, enable_continuous_batching, kpt_attention_forward
from kpt_core import InputError

#: Float32 of models of two layers after a few steps of plain descent: their sums are in another order, no more.
TOLERANCE = 1e-4
WORDS = 60
#: Calls of KPT's attention, by the thread that made them: continuous batching has one of its own.
CALLS: Counter[str] = Counter()


@dataclass(frozen=True)
class Client:
    """A client: the packages that it needs, and what runs it with an implementation of attention and a folder."""

    run: Callable[[str, Path], dict[str, Tensor]]
    needs: tuple[str, ...]
    #: Another outcome of eager that the same numbers are expected of: see `padding_free`.
    also: Callable[[str, Path], dict[str, Tensor]] | None = None


@wraps(kpt_attention_forward)
def _counted(*args: Any, **kwargs: Any) -> Any:
    CALLS["main" if threading.current_thread() is threading.main_thread() else "served"] += 1
    return kpt_attention_forward(*args, **kwargs)


def _tokenizer() -> Any:
    """Return a tokenizer of `WORDS` made-up words."""
    tokenizers = importlib.import_module("tokenizers")
    known = {word: place for place, word in enumerate(["[PAD]", "[UNK]", "[BOS]", "[EOS]"])}
    known |= {f"w{place}": place + 4 for place in range(WORDS)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(known, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    kind: Any = transformers.PreTrainedTokenizerFast
    return kind(tokenizer_object=made, pad_token="[PAD]", unk_token="[UNK]", bos_token="[BOS]", eos_token="[EOS]")


def _texts(count: int, longest: int = 20) -> list[str]:
    """Return texts of different lengths."""
    drawn = torch.Generator().manual_seed(0)
    lengths = torch.randint(3, longest, (count,), generator=drawn).tolist()
    return [" ".join(f"w{word}" for word in torch.randint(WORDS, (n,), generator=drawn).tolist()) for n in lengths]


def _llama(implementation: str) -> Any:
    transformers.set_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=WORDS + 4, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, pad_token_id=0, bos_token_id=2, eos_token_id=3,
    )  # fmt: skip
    # Weights of the usual size hide attention's share.
    config.initializer_range = 0.2
    return transformers.LlamaForCausalLM._from_config(  # type: ignore[no-untyped-call]
        config, attn_implementation=implementation
    )


def _settings(folder: Path) -> dict[str, Any]:
    """Return the arguments of a trainer. Descent is plain: Adam makes of noise in a tiny gradient a whole step."""
    return {
        "output_dir": str(folder), "max_steps": 4, "per_device_train_batch_size": 4, "learning_rate": 0.05,
        "optim": "sgd", "logging_steps": 1, "save_strategy": "no", "report_to": "none", "use_cpu": True, "seed": 0,
        "bf16": False, "disable_tqdm": True,
    }  # fmt: skip


def _learned(trainer: Any, *figures: str) -> dict[str, Tensor]:
    """Train, and return the logged figures of every step and the weights."""
    before = {name: each.detach().clone() for name, each in trainer.model.named_parameters() if each.requires_grad}
    trainer.train()
    logged = [each for each in trainer.state.log_history if figures[0] in each]
    if len(logged) != trainer.args.max_steps:
        raise AssertionError(f"{len(logged)} steps were logged, not {trainer.args.max_steps}")
    after = {name: each.detach() for name, each in trainer.model.named_parameters() if each.requires_grad}
    if all(torch.equal(before[name], after[name]) for name in before):
        raise AssertionError("no weight changed: this compares nothing")
    return {name: torch.tensor([each[name] for each in logged]) for name in figures} | after


def _fine_tuned(implementation: str, folder: Path, **settings: Any) -> dict[str, Tensor]:
    trl, datasets = (importlib.import_module(name) for name in ("trl", "datasets"))
    trainer = trl.SFTTrainer(
        _llama(implementation),
        args=trl.SFTConfig(**_settings(folder), gradient_checkpointing=False, **settings),
        train_dataset=datasets.Dataset.from_list([{"text": text} for text in _texts(48)]),
        processing_class=_tokenizer(),
    )
    return _learned(trainer, "loss")


def sft_padded(implementation: str, folder: Path) -> dict[str, Tensor]:
    """Train with padding on the right."""
    return _fine_tuned(implementation, folder, max_length=32)


def sft_packed(implementation: str, folder: Path) -> dict[str, Tensor]:
    """Train on rows that hold several texts each, of which none may see another."""
    return _fine_tuned(implementation, folder, packing=True, max_length=32)


def sft_padding_free(implementation: str, folder: Path) -> dict[str, Tensor]:
    """Train on batches laid into one row, which must learn what padded ones do."""
    return _fine_tuned(implementation, folder, padding_free=True, max_length=None)


def _rewarded(
    implementation: str, folder: Path, batched: bool, kind: str = "GRPO", **settings: Any
) -> dict[str, Tensor]:
    trl, datasets = (importlib.import_module(name) for name in ("trl", "datasets"))

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [sum(ids) / len(ids) / WORDS for ids in completion_ids]

    model = _llama(implementation)
    serving: dict[str, Any] = {}
    if batched:
        # Else most of all memory.
        room = {"num_blocks": 64, "max_batch_tokens": 64}
        serving = {"use_transformers_continuous_batching": True, "transformers_continuous_batching_config": room}
        if implementation == NAME:
            model = enable_continuous_batching(model)
    trainer = getattr(trl, f"{kind}Trainer")(
        model,
        reward_funcs=reward,
        args=getattr(trl, f"{kind}Config")(
            # Two prompts, the shorter one padded on the left.
            **_settings(folder) | {"per_device_train_batch_size": 8}, num_generations=4,
            max_completion_length=8, beta=0.0, gradient_checkpointing=False,
            **serving,
        ),
        train_dataset=datasets.Dataset.from_list([{"prompt": text} for text in _texts(16)]),
        processing_class=_tokenizer(),
        **settings,
    )  # fmt: skip
    learned = _learned(trainer, "loss", "reward", "completions/mean_length")
    if batched and implementation == NAME and not CALLS["served"]:
        raise AssertionError("continuous batching did not run KPT's attention")
    return learned


def grpo(implementation: str, folder: Path) -> dict[str, Tensor]:
    """Train by rewards of what `generate` gives."""
    return _rewarded(implementation, folder, batched=False)


def grpo_continuous(implementation: str, folder: Path) -> dict[str, Tensor]:
    """Train by rewards of what `generate_batch` gives."""
    return _rewarded(implementation, folder, batched=True)


def rloo_continuous(implementation: str, folder: Path) -> dict[str, Tensor]:
    """Do likewise with another trainer, and adapters around the model that was enabled."""
    adapters = importlib.import_module("peft").LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    return _rewarded(implementation, folder, batched=True, kind="RLOO", peft_config=adapters)


def dpo(implementation: str, folder: Path) -> dict[str, Tensor]:
    """Train by preferences, beside a model that stays as it is."""
    trl, datasets = (importlib.import_module(name) for name in ("trl", "datasets"))
    texts = _texts(48)
    rows = zip(texts[::3], texts[1::3], texts[2::3], strict=True)
    told = [{"prompt": one, "chosen": " " + two, "rejected": " " + three} for one, two, three in rows]
    trainer = trl.DPOTrainer(
        _llama(implementation),
        ref_model=_llama(implementation),
        args=trl.DPOConfig(**_settings(folder), gradient_checkpointing=False),
        train_dataset=datasets.Dataset.from_list(told),
        processing_class=_tokenizer(),
    )
    return _learned(trainer, "loss", "rewards/margins")


def _saved(model: str, folder: Path) -> str:
    """Return a folder with a tiny encoder and its tokenizer. It drops nothing: other kernels draw other numbers."""
    transformers.set_seed(0)
    config = getattr(transformers, f"{model}Config")(
        vocab_size=WORDS + 4, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64, pad_token_id=0, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        initializer_range=0.2,
    )  # fmt: skip
    getattr(transformers, f"{model}Model")(config).save_pretrained(folder / model)
    _tokenizer().save_pretrained(folder / model)
    return str(folder / model)


def _sentences(implementation: str, folder: Path, model: str = "Bert") -> Any:
    library = importlib.import_module("sentence_transformers")
    told = {"attn_implementation": implementation}
    return library.SentenceTransformer(_saved(model, folder), model_kwargs=told, device="cpu")


def sentences(implementation: str, folder: Path) -> dict[str, Tensor]:
    """Embed a padded batch; train; embed again."""
    library, datasets = (importlib.import_module(name) for name in ("sentence_transformers", "datasets"))
    losses = importlib.import_module("sentence_transformers.sentence_transformer.losses")
    model, texts = _sentences(implementation, folder), _texts(32)
    before = model.encode(texts[:8], convert_to_tensor=True)
    alone = torch.cat([model.encode([text], convert_to_tensor=True) for text in texts[:8]])
    torch.testing.assert_close(before, alone, atol=TOLERANCE, rtol=0)
    pairs = [{"anchor": one, "positive": other} for one, other in zip(texts[::2], texts[1::2], strict=True)]
    trainer = library.SentenceTransformerTrainer(
        model,
        args=library.SentenceTransformerTrainingArguments(**_settings(folder)),
        train_dataset=datasets.Dataset.from_list(pairs),
        loss=losses.MultipleNegativesRankingLoss(model),
    )
    learned = _learned(trainer, "loss")
    return learned | {"before": before, "after": model.encode(texts[:8], convert_to_tensor=True)}


def sentences_refused(implementation: str, folder: Path) -> dict[str, Tensor]:
    """Load a class that computes its attention itself: KPT must say so, since it would not be used."""
    if implementation == NAME:
        try:
            _sentences(implementation, folder, "MPNet")
        except InputError as error:
            if "'eager'" not in str(error):
                raise AssertionError(f"the refusal names no way out: {error}") from error
        else:
            raise AssertionError("MPNet was loaded without a word")
    return {}


def _batches() -> Any:
    """Return a list of padded batches with labels."""
    tokenizer, texts, batches = _tokenizer(), _texts(32), []
    for first in range(0, len(texts), 4):
        batch = tokenizer(texts[first : first + 4], padding=True, return_tensors="pt")
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
        batches.append(inputs | {"labels": inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)})
    return batches


def accelerated(implementation: str, folder: Path) -> dict[str, Tensor]:
    """Train in a loop of accelerate's, which takes a step each two batches."""
    library = importlib.import_module("accelerate")
    accelerator = library.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, given = _llama(implementation), _batches()
    model, optimizer, batches = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.05), torch.utils.data.DataLoader(given, batch_size=None)
    )
    losses = []
    for batch in batches:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
    weights = accelerator.unwrap_model(model).named_parameters()
    return {"losses": torch.stack(losses)} | {name: each.detach() for name, each in weights}


def dispatched(implementation: str, folder: Path) -> dict[str, Tensor]:
    """Load with a map of devices, and with a layer that lies on disk until it is used."""
    library = importlib.import_module("accelerate")
    _llama("eager").save_pretrained(folder / "llama")
    batch = _batches()[0]
    automatic: Any = transformers.AutoModelForCausalLM.from_pretrained(
        folder / "llama", attn_implementation=implementation, device_map="auto"
    )
    with library.init_empty_weights():
        empty = _llama(implementation)
    places: dict[str, str] = dict.fromkeys(("model.embed_tokens", "model.layers.0", "model.norm"), "cpu")
    places |= {"model.rotary_emb": "cpu", "lm_head": "cpu", "model.layers.1": "disk"}
    partly = library.load_checkpoint_and_dispatch(
        empty, folder / "llama", device_map=places, offload_folder=folder / "offloaded"
    )
    with torch.no_grad():
        found = {"automatic": automatic(**batch).logits, "partly on disk": partly(**batch).logits}
        ids, seen = batch["input_ids"].flip(1), batch["attention_mask"].flip(1)
        told: dict[str, Any] = {"attention_mask": seen, "max_new_tokens": 6, "do_sample": False}
        found |= {"tokens": automatic.generate(ids, **told).float(), "tokens too": partly.generate(ids, **told).float()}
    return found


def _adapted(implementation: str, reentrant: bool) -> dict[str, Tensor]:
    library = importlib.import_module("peft")
    settings = library.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0, init_lora_weights=False)
    base = _llama(implementation)
    base.enable_input_require_grads()
    model = library.get_peft_model(base, settings)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.train()
    learned = {name: each for name, each in model.named_parameters() if each.requires_grad}
    optimizer = torch.optim.SGD(learned.values(), lr=0.05)
    losses = []
    for batch in _batches():
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    merged = model.merge_and_unload().eval()
    with torch.no_grad():
        logits = merged(**_batches()[0]).logits
    return {"losses": torch.stack(losses), "merged": logits} | {name: each.detach() for name, each in learned.items()}


def lora(implementation: str, folder: Path) -> dict[str, Tensor]:
    """Train adapters of low rank, whose layers are computed again in the backward pass; then merge them."""
    return _adapted(implementation, reentrant=False)


def lora_reentrant(implementation: str, folder: Path) -> dict[str, Tensor]:
    """Train them with checkpoints that call autograd within autograd."""
    return _adapted(implementation, reentrant=True)


CLIENTS = {
    "trl SFTTrainer, padding": Client(sft_padded, ("trl", "datasets")),
    "trl SFTTrainer, packing": Client(sft_packed, ("trl", "datasets")),
    "trl SFTTrainer, padding_free": Client(sft_padding_free, ("trl", "datasets"), also=sft_padded),
    "trl DPOTrainer": Client(dpo, ("trl", "datasets")),
    "trl GRPOTrainer, generate": Client(grpo, ("trl", "datasets")),
    "trl GRPOTrainer, continuous batching": Client(grpo_continuous, ("trl", "datasets")),
    "trl RLOOTrainer, LoRA, continuous batching": Client(rloo_continuous, ("trl", "datasets", "peft")),
    "sentence-transformers, BERT": Client(sentences, ("sentence-transformers", "datasets")),
    "sentence-transformers, MPNet is refused": Client(sentences_refused, ("sentence-transformers",)),
    "accelerate, gradient accumulation": Client(accelerated, ("accelerate",)),
    "accelerate, device maps": Client(dispatched, ("accelerate",)),
    "peft LoRA, checkpoints": Client(lora, ("peft",)),
    "peft LoRA, reentrant checkpoints": Client(lora_reentrant, ("peft",)),
}


def _versions(packages: tuple[str, ...]) -> str | None:
    """Return the versions of packages, or None where one is not installed."""
    try:
        return ", ".join(f"{name} {version(name)}" for name in packages)
    except PackageNotFoundError:
        return None


def _outcome(
    run: Callable[[str, Path], dict[str, Tensor]], implementation: str, verbose: bool
) -> tuple[dict[str, Tensor], int]:
    """Return what a run of a client gives, and how often it called KPT's attention."""
    CALLS.clear()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as quiet:
        if not verbose:  # logs of trainers, and progress bars
            nowhere = quiet.enter_context(open(os.devnull, "w", encoding="utf-8"))
            quiet.enter_context(contextlib.redirect_stdout(nowhere))
            quiet.enter_context(contextlib.redirect_stderr(nowhere))
        found = {name: each.detach().clone() for name, each in run(implementation, Path(folder)).items()}
    return found, CALLS.total()


def difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Return the largest difference of two outcomes that must be of the same names and shapes."""
    if one.keys() != other.keys():
        raise AssertionError(f"other names: {sorted(one.keys() ^ other.keys())}")
    pairs = [(one[name], other[name]) for name in one]
    if any(first.shape != second.shape for first, second in pairs):
        raise AssertionError("other shapes")
    if any(bool(each.isnan().any()) for pair in pairs for each in pair):
        raise AssertionError("a figure is no number")
    return max((float((first.double() - second.double()).abs().max()) for first, second in pairs), default=0.0)


def judge(name: str, client: Client, verbose: bool) -> bool:
    """Run a client with both implementations, print its line and return False where it fails."""
    versions = _versions((*client.needs, "transformers", "torch"))
    if versions is None:
        print(f"{name}: skipped: {' or '.join(client.needs)} is not installed", flush=True)
        return True
    begin, told = time.monotonic(), ""
    try:
        wanted, beside = _outcome(client.run, "eager", verbose)
        found, used = _outcome(client.run, NAME, verbose)
        largest = difference(wanted, found)
        if wanted and (beside or not used):
            raise AssertionError(f"KPT's attention was called {used} times, and {beside} times by eager's run")
        if client.also is not None:
            largest = max(largest, difference(_outcome(client.also, "eager", verbose)[0], found))
        passed = largest < TOLERANCE
        told = f"{largest:.1e} from eager, {used} calls of KPT" if wanted else "as expected"
    except Exception as error:
        if verbose:
            traceback.print_exc()
        passed, told = False, f"{type(error).__name__}: {error}".splitlines()[0][:300]
    seconds = time.monotonic() - begin
    print(f"{name}: {'pass' if passed else 'FAIL'}: {told} ({versions}; {seconds:.0f} s)", flush=True)
    return passed


def main() -> int:
    """Run the clients, and return 1 where one fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-k", dest="pattern", default="", help="a pattern of names")
    parser.add_argument("-v", dest="verbose", action="store_true", help="print libraries' words, and errors in full")
    asked = parser.parse_args()
    # Nothing is fetched, and no model card is filled from a hub.
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    torch.set_num_threads(1)
    if not asked.verbose:
        warnings.simplefilter("ignore")
        logging.disable(logging.ERROR)
        transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers.AttentionInterface.register(NAME, _counted)
    outcomes = [
        judge(name, client, asked.verbose) for name, client in CLIENTS.items() if re.search(asked.pattern, name)
    ]
    return int(not all(outcomes))


if __name__ == "__main__":
    sys.exit(main())
