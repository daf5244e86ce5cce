"""A few lines of code that the model writes, before and after."""

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from .speed import greedy

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

#: Beginnings that the corpus is full of. None ends in a space: a word's token has its space in front.
PROMPTS = (
    "import os\nimport",
    "class",
    "    def __init__(self",
    "    if not isinstance(",
)


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
    """Let both models continue every prompt, always with the likeliest token."""
    return [
        Sample(
            prompt=prompt,
            before=_continue(before, tokenizer, prompt, new_tokens),
            after=_continue(after, tokenizer, prompt, new_tokens),
        )
        for prompt in PROMPTS
    ]


def _continue(model: Any, tokenizer: "PreTrainedTokenizerFast", prompt: str, new_tokens: int) -> str:
    inputs: Any = tokenizer(prompt, return_tensors="pt")["input_ids"]
    output = model.generate(inputs, **greedy(new_tokens))
    return str(tokenizer.decode(output[0, inputs.shape[1] :], clean_up_tokenization_spaces=False))
