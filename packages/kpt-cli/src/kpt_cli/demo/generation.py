"""A few lines of code that the model writes, before and after."""

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

#: Beginnings that the corpus is full of. None ends in a space: a word's token has its space in front.
PROMPTS = (
    "import os\nimport sys\n\ndef",
    "class",
    "    if not isinstance(",
    "    for",
)
#: How much less likely a token is that was used already: without it so small a model soon goes round in circles.
REPETITION_PENALTY = 1.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What both models make of a prompt.

    Attributes:
        prompt: that was given.
        before: what the model adds to it.
        after: what the optimised model adds to it.
    """

    prompt: str
    before: str
    after: str

    @property
    def identical(self) -> bool:
        """Whether both wrote the same."""
        return self.before == self.after

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "identical": self.identical}


def samples(before: Any, after: Any, tokenizer: "PreTrainedTokenizerFast", new_tokens: int) -> list[Sample]:
    """Let both models continue every prompt, always with the likeliest token, so that no chance is involved."""
    return [
        Sample(
            prompt=prompt,
            before=_continue(before, tokenizer, prompt, new_tokens),
            after=_continue(after, tokenizer, prompt, new_tokens),
        )
        for prompt in PROMPTS
    ]


def _continue(model: Any, tokenizer: "PreTrainedTokenizerFast", prompt: str, new_tokens: int) -> str:
    from transformers import GenerationConfig

    make: Any = GenerationConfig
    config = make(
        max_new_tokens=new_tokens,
        do_sample=False,
        repetition_penalty=REPETITION_PENALTY,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
    )
    inputs: Any = tokenizer(prompt, return_tensors="pt")["input_ids"]
    output = model.generate(inputs, generation_config=config)[0, inputs.shape[1] :]
    return str(tokenizer.decode(output, skip_special_tokens=True, clean_up_tokenization_spaces=False))
