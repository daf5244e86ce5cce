"""transformers' continuous batching with settings of sampling for each request, bounds of length, and metrics."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextvars import ContextVar
from importlib import import_module
from queue import Empty
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import ContinuousBatchingConfig, GenerationConfig, LogitsProcessorList  # noqa: TID253
from transformers.cli.serving.utils import CBGenerateManager  # noqa: TID253
from transformers.generation.continuous_batching import ContinuousBatchingManager  # noqa: TID253
from transformers.generation.continuous_batching.cb_logits_processors import (  # noqa: TID253
    ContinuousBatchingLogitsProcessorList,
)

from kpt_serve.metrics.generation import GenerationMetrics

from .requests import Asked, RequestError

if TYPE_CHECKING:
    from .options import OpenAIOptions

_LOG = logging.getLogger("kpt_serve")
#: What the request asks for that the running task answers.
ASKED: ContextVar[Asked] = ContextVar("ASKED")
#: Tokens of a page of the cache.
_PAGE = 64
#: Settings of a model's generation config that a batch does not apply, and the values that change nothing.
_LEFT_OUT = {"repetition_penalty": 1.0, "min_p": 0.0, "typical_p": 1.0, "no_repeat_ngram_size": 0}


class Sampling(ContinuousBatchingLogitsProcessorList):
    """Sample each request with its own temperature and nucleus, where transformers has one setting for the batch.

    transformers then takes the largest score. A request of temperature 0 keeps its scores, and so gets the token of
    `generate`. Others get Gumbel noise on their scores: the largest sum is a sample of their softmax.

    Args:
        defaults: The model's generation config, for requests that do not say.
    """

    def __init__(self, defaults: GenerationConfig) -> None:
        super().__init__(LogitsProcessorList())
        self.temperature = _or(defaults.temperature, 1.0) if defaults.do_sample else 0.0
        self.top_p, self.top_k = _or(defaults.top_p, 1.0), _or(defaults.top_k, 0)
        for name, neutral in _LEFT_OUT.items():
            if (value := _or(getattr(defaults, name, None), neutral)) != neutral:
                _LOG.warning("%s=%s of the model's generation config is not applied", name, value)
        self.tensors_required, self.do_processing = 2, True
        self.supported_keys = {"temperature": float, "top_p": float}

    def settings(self, asked: Asked) -> dict[str, float]:
        """Return what a request is sampled with."""
        return {"temperature": _or(asked.temperature, self.temperature), "top_p": _or(asked.top_p, self.top_p)}

    def fill_defaults(self, int32_tensor: Tensor) -> None:
        """Let rows of no request be greedy."""
        int32_tensor.zero_()

    def prepare_tensor_args(self, requests_in_batch: list[Any], arg_storage: Tensor) -> Tensor:
        """Write the settings of the requests that get a token now, as bits of float32."""
        told = [each.state.logit_processor_kwargs for each in requests_in_batch if each.has_new_token]
        if told:  # warm-up's requests have none
            rows = [[each.get("temperature", 0.0) for each in told], [each.get("top_p", 1.0) for each in told]]
            arg_storage[:2, : len(told)] = torch.tensor(rows).view(torch.int32).to(arg_storage.device)
        return arg_storage

    def __call__(self, input_ids: Tensor, scores: Tensor, logits_processor_args: Tensor) -> Tensor:
        """Return scores `[requests, vocabulary]` of which the largest is each request's token."""
        temperature, top_p = logits_processor_args[:2, : len(scores)].view(torch.float32)[..., None]
        sampled = temperature > 0
        # Without an accelerator looking costs nothing, and sorting a vocabulary does.
        looks = scores.device.type == "cpu"
        if looks and not bool(sampled.any()):
            return scores
        # From the largest score down: divided by a tiny temperature, scores would all be infinite, and the same.
        changed = (scores - scores.amax(-1, keepdim=True)) / torch.where(sampled, temperature, 1)
        if 0 < self.top_k < scores.shape[-1]:
            least = changed.topk(self.top_k, dim=-1).values[:, -1:]
            changed = changed.masked_fill(changed < least, -torch.inf)
        if not looks or bool((sampled & (top_p < 1)).any()):
            ordered, places = changed.sort(dim=-1, descending=True)
            before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
            # The first one stays whatever rounding does.
            dropped = (before >= top_p) & (torch.arange(scores.shape[-1], device=scores.device) > 0) & (top_p < 1)
            changed = changed.masked_fill(torch.zeros_like(dropped).scatter(-1, places, dropped), -torch.inf)
        noise = -torch.empty_like(changed).exponential_().log()
        return torch.where(sampled, changed + noise, scores)


class Manager(ContinuousBatchingManager):
    """Batch requests with their own settings, know which are in it, and measure them.

    Args:
        model: It runs here.
        config: Of the batch.
        metrics: What requests took.
    """

    def __init__(self, model: Any, config: ContinuousBatchingConfig, metrics: GenerationMetrics) -> None:
        self.requests: set[str] = set()
        told = GenerationConfig(  # type: ignore[no-untyped-call]
            do_sample=False, eos_token_id=model.generation_config.eos_token_id
        )
        super().__init__(model=model, generation_config=told, continuous_batching_config=config)
        self.logit_processor = self.sampling = Sampling(model.generation_config)
        self._metrics = metrics
        metrics.counts(self.running, lambda: len(self.requests) - self.running())

    def running(self) -> int:
        """Return how many requests are computed; the others wait."""
        batch = self.batch_processor
        return 0 if batch is None else min(len(batch.scheduler.active_requests), len(self.requests))

    def add_request(self, input_ids: list[int], *args: Any, **kwargs: Any) -> str | None:
        """Add the request of the running task with its settings."""
        asked = ASKED.get()
        asked.started = True
        self.requests.add(asked.id)
        self._metrics.started(len(input_ids))
        kwargs |= {"request_id": asked.id, "record_timestamps": True, **self.sampling.settings(asked)}
        added: str | None = super().add_request(input_ids, *args, **kwargs)
        if added is None:  # the batch ends, and nobody would answer
            raise RequestError(503, "the model stopped; restart the server", code="unavailable")
        return added

    def register_result_handler(self, request_id: str, callback: Callable[[Any], None]) -> None:
        """Register who takes a request's results, and measure the request when it ends."""
        start = time.perf_counter()

        def observed(result: Any) -> None:
            if result.is_finished():
                self.requests.discard(request_id)
                if result.error is None:
                    self._metrics.finished(len(result.generated_tokens), start, result.timestamps or ())
            callback(result)

        super().register_result_handler(request_id, observed)
        # Streams add their request first: results that came before their handler lie here.
        early = self.output_router.output_queue
        try:
            while True:
                result = early.get_nowait()
                if result.request_id == request_id:
                    observed(result)
        except Empty:
            pass

    def forget(self, request_id: str) -> None:
        """Cancel a request whose client is gone; one that is answered is not there any more."""
        if request_id in self.requests:
            self.requests.discard(request_id)
            self.cancel_request(request_id)
        with self.output_router._lock:
            self.output_router.result_handlers.pop(request_id, None)


class Generator(CBGenerateManager):
    """Bound a request's prompt and tokens before it is batched.

    Args:
        model: It runs here.
        longest: Tokens of the model's context; None if it does not say.
        options: The server's.
        metrics: What requests took.

    Raises:
        MemoryError: There is no room for the cache of one request.
    """

    def __init__(self, model: Any, longest: int | None, options: OpenAIOptions, metrics: GenerationMetrics) -> None:
        super().__init__()
        self._options = options
        served = model.config._attn_implementation == "kpt"
        if served:
            import_module("kpt_attention.transformers").enable_continuous_batching(model)
        self.longest = min(longest or options.max_prompt + options.max_tokens, options.max_prompt + options.max_tokens)
        pages = options.max_running * -(-self.longest // _PAGE)
        while True:
            config = ContinuousBatchingConfig(
                page_size=_PAGE,
                num_blocks=pages,
                max_requests_per_batch=options.max_running,
                max_batch_tokens=max(options.max_running, min(self.longest, 2048)),
                auto_switch_to_flash=not served,
                max_memory_percent=0.8,
            )
            self.batch = Manager(model, config, metrics)
            try:
                self.batch.warmup()
                break
            except MemoryError:
                # A smaller cache makes requests wait; less than one request is none.
                pages //= 2
                if pages * _PAGE < self.longest:
                    raise
        self._cb = self.batch
        self.batch.start()

    def init_cb(self, model: Any, gen_config: Any) -> None:
        """Do nothing: the batch exists, and no request changes it."""

    def generate_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str, response_parser: Any = None
    ) -> tuple[asyncio.Queue[Any], Any]:
        """Start a stream."""
        self._bound(inputs, gen_config)
        return super().generate_streaming(model, processor, inputs, gen_config, request_id, response_parser)

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str
    ) -> tuple[str, int, list[int]]:
        """Generate a whole answer."""
        self._bound(inputs, gen_config)
        return await super().generate_non_streaming(model, processor, inputs, gen_config, request_id)

    def _bound(self, inputs: Any, gen_config: Any) -> None:
        asked, tokens = ASKED.get(), len(inputs["input_ids"])
        most = min(self._options.max_prompt, self.longest - 1)
        if not 1 <= tokens <= most:
            raise RequestError(
                400, f"the prompt has {tokens} tokens; it must have 1 to {most}", code="context_length_exceeded"
            )
        room = self.longest - tokens
        if asked.max_tokens is not None and asked.max_tokens > room:
            raise RequestError(
                400,
                f"the prompt has {tokens} tokens, and {asked.max_tokens} more were asked for; both together may be "
                f"{self.longest}",
                code="context_length_exceeded",
            )
        gen_config.max_new_tokens = asked.max_tokens or min(self._options.max_tokens, room)


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value
