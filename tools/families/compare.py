"""Compare one class of transformers served by KPT with the eager one: the same numbers, or refused in a sentence."""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from tiny import BATCH, TOKENS, VARIANTS, inputs_for, tiny_model
from torch import Tensor

from kpt_core import InputError, record

#: Largest difference of an output from the eager one, as a part of its largest number.
TOLERANCE = 2e-4
PADDED = 4


@dataclass
class Outcome:
    """What became of one class.

    Attributes:
        name: of the class.
        outcome: `equal`, `unused` (equal, and KPT never ran), `refused`, `as usual` (not as eager, but as transformers'
            own fast implementation), `wrong`, `error` or `not made`.
        told: the worst difference and where, the refusal, or the error.
        tried: names of what was compared.
    """

    name: str
    outcome: str
    told: str = ""
    tried: tuple[str, ...] = ()


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of numbers in an output, with their names; caches and weights of attention left out."""
    if isinstance(value, Tensor):
        if value.is_floating_point() and value.numel():
            yield name, value.detach()
    elif isinstance(value, dict) or hasattr(value, "items"):
        for key, each in value.items():
            if "past_key_values" not in key and "attentions" not in key and "cache" not in key:
                yield from _flat(each, f"{name}.{key}")
    elif isinstance(value, (list, tuple)):
        for place, each in enumerate(value):
            yield from _flat(each, f"{name}[{place}]")


def _cases(model: Any, plain: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the inputs that a class is compared with: as they are, padded, of few logits, through a static cache."""
    known = inspect.signature(model.forward).parameters
    yield "plain", plain
    if "input_ids" not in plain or "attention_mask" not in known or plain["input_ids"].dim() != 2:
        return
    mask = torch.ones(BATCH, TOKENS, dtype=torch.long)
    mask[1, TOKENS - PADDED :] = 0
    yield "padded right", plain | {"attention_mask": mask}
    yield "padded left", plain | {"attention_mask": mask.flip(1)}
    if "logits_to_keep" in known:
        yield "few logits", plain | {"logits_to_keep": 3}
        yield "few logits padded", plain | {"logits_to_keep": 3, "attention_mask": mask.flip(1)}
    ends = ("CausalLM", "MaskedLM", "ConditionalGeneration", "TokenClassification")
    if "labels" in known and type(model).__name__.endswith(ends):
        yield "labels", plain | {"labels": plain.get("decoder_input_ids", plain["input_ids"]) % 2}


def _run(model: Any, given: dict[str, Any]) -> dict[str, Tensor]:
    torch.manual_seed(0)
    with torch.no_grad():
        out = model(**{name: value.clone() if isinstance(value, Tensor) else value for name, value in given.items()})
    return dict(_flat(out))


def _generated(model: Any, plain: dict[str, Any]) -> dict[str, Tensor]:
    """Return the scores of each step of `generate` through a static cache, behind padding."""
    ids = plain["input_ids"]
    mask = torch.ones_like(ids)
    mask[1, :PADDED] = 0
    found = model.generate(
        ids, attention_mask=mask, max_new_tokens=3, min_new_tokens=3, do_sample=False, cache_implementation="static",
        disable_compile=True, return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    return {f"step {place}": each for place, each in enumerate(found.logits)}


def difference(one: dict[str, Tensor], other: dict[str, Tensor], given: dict[str, Any]) -> tuple[float, str]:
    """Return how far outputs are apart, as a part of the largest number, and which; what is padding isn't compared."""
    worst = 0.0, ""
    mask = given.get("attention_mask")
    for name, want in other.items():
        have = one.get(name)
        if have is None or have.shape != want.shape:
            return 9.0, f"{name} has another shape"
        if mask is not None:
            kept = mask[:, mask.shape[1] - given["logits_to_keep"] :] if "logits_to_keep" in given else mask
            if want.dim() >= 2 and tuple(want.shape[:2]) == tuple(kept.shape):
                have, want = have[kept.bool()], want[kept.bool()]
            elif want.shape[0] != BATCH or "hidden_states" in name or "router" in name:
                continue
        finite = want.isfinite()
        if not torch.equal(finite, have.isfinite()):
            return 9.0, f"{name}: other numbers are finite"
        if finite.any():
            apart = float((have[finite] - want[finite]).abs().max() / want[finite].abs().max().clamp(min=1e-3))
            worst = max(worst, (apart, name))
    return worst


#: What is compared: the argument at load, its other values, of which the first is the truth, and what KPT then runs.
SUBJECTS = {
    "attention": ("attn_implementation", ("eager", "sdpa"), "attention."),
    "experts": ("experts_implementation", ("eager", "grouped_mm"), "moe."),
}


def compare(name: str, config: str, subject: str) -> Outcome:
    """Compare a class by name; the first sizes and inputs that the eager model takes are used."""
    cls, config_class = getattr(transformers, name), getattr(transformers, config)
    argument, (eagerly, _), _ = SUBJECTS[subject]
    reasons: list[str] = []
    for variant in VARIANTS:

        def make(implementation: str, variant: dict[str, int] = variant) -> Any:
            told = {"attn_implementation": "eager"} | {argument: implementation}
            return tiny_model(cls, config_class, variant, told)

        try:
            eager = make(eagerly)
        except Exception as error:  # whatever a class says of settings that were guessed
            reasons.append(f"{type(error).__name__}: {error}")
            continue
        for plain in inputs_for(eager, eager.config):
            try:
                again = difference(_run(eager, plain), _run(eager, plain), {})
            except Exception as error:
                reasons.append(f"{type(error).__name__}: {error}")
                continue
            if again[0] > 0:
                reasons.append(f"two runs differ by {again[0]:.1e} in {again[1]}")
                continue
            return _compared(name, make, eager, plain, subject)
    return Outcome(name, "not made", next(iter(reasons), "no inputs are known")[:200])


def _compared(name: str, make: Callable[[str], Any], eager: Any, plain: dict[str, Any], subject: str) -> Outcome:
    _, (_, usual), ops = SUBJECTS[subject]
    try:
        ours = make("kpt")
    except Exception as error:
        told = f"at load: {error}" if isinstance(error, InputError) else f"at load: {type(error).__name__}: {error}"
        return Outcome(name, "refused" if isinstance(error, InputError) else "error", told[:300])
    tried: list[str] = []
    refusals: list[str] = []
    calls, worst, as_usual, other = 0, (0.0, ""), "", None
    steps: list[tuple[str, dict[str, Any], Any]] = [(case, given, _run) for case, given in _cases(eager, plain)]
    if eager.can_generate() and set(plain) == {"input_ids"} and not eager.config.is_encoder_decoder:
        steps.append(("static cache", plain, _generated))
    for case, given, run in steps:
        try:
            want = run(eager, given)
        except Exception:  # this class takes no such input
            continue
        try:
            with record() as log:
                have = run(ours, given)
        except InputError as error:
            refusals.append(f"{case}: {error}")
            continue
        except Exception as error:
            if _fails_as(error, make, usual, run, given):
                continue
            return Outcome(name, "error", f"{case}: {type(error).__name__}: {error}"[:300], tuple(tried))
        calls += sum(call.op.startswith(ops) for call in log)
        tried.append(case)
        apart, where = difference(have, want, given)
        if apart > max(worst[0], TOLERANCE):
            try:
                other = make(usual) if other is None else other
                if difference(have, run(other, given), given)[0] <= TOLERANCE:
                    as_usual = as_usual or f"{case}: {where} {apart:.1e}"
                    continue
            except Exception:  # the usual one refuses the class, or fails
                pass
            worst = apart, f"{case}: {where} {apart:.1e}"
    if worst[0]:
        return Outcome(name, "wrong", f"{worst[1]} ({calls} calls of KPT)", tuple(tried))
    if as_usual:
        return Outcome(name, "as usual", as_usual, tuple(tried))
    if refusals:
        return Outcome(name, "equal" if tried else "refused", refusals[0][:300], tuple(tried))
    return Outcome(name, "equal" if calls else "unused", "", tuple(tried))


def _fails_as(error: Exception, make: Callable[[str], Any], usual: str, run: Any, given: dict[str, Any]) -> bool:
    """Return whether the usual implementation fails with an error of the same kind."""
    try:
        run(make(usual), given)
    except Exception as same:
        return type(same) is type(error)
    return False
