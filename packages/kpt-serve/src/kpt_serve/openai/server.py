"""OpenAI's routes around transformers' handlers: who may ask, how much at once, and errors as OpenAI has them."""

from __future__ import annotations

import asyncio
import hmac
import json
import signal
import time
import uuid
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

import uvicorn
from fastapi import HTTPException
from jinja2 import TemplateError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from transformers.cli.serving.chat_completion import ChatCompletionHandler  # noqa: TID253
from transformers.cli.serving.completion import CompletionHandler  # noqa: TID253
from transformers.cli.serving.model_manager import ModelManager  # noqa: TID253
from transformers.cli.serving.response import ResponseHandler  # noqa: TID253
from transformers.cli.serving.utils import CBWorkerDeadError, GenerationState, Modality  # noqa: TID253

from kpt_serve.listening import impatient_protocol
from kpt_serve.metrics import RequestMetrics, exposition

from .batching import ASKED, Generator
from .requests import Asked, RequestError, conversation, read_request

if TYPE_CHECKING:
    from .options import OpenAIOptions

_HANDLERS = {"chat/completions": ChatCompletionHandler, "completions": CompletionHandler, "responses": ResponseHandler}
_OPEN = ("/health", "/ready", "/metrics")
#: Seconds in which a request has to be sent.
_SENDING = 30.0
#: What transformers' handlers, templates and tokenizers raise for what is no conversation.
_MALFORMED = (KeyError, TypeError, ValueError, AttributeError, IndexError, TemplateError)
_ERROR = 'data: {"error": "'


class _OneModel(ModelManager):
    """Give transformers' handlers the one model, whatever is asked for."""

    def __init__(self, name: str, model: Any, tokenizer: Any) -> None:
        self.force_model, self._pair = name, (model, tokenizer)

    @staticmethod
    def process_model_name(model_id: str) -> str:
        return model_id

    def load_model_and_processor(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        return self._pair

    @staticmethod
    def get_model_modality(model: Any, processor: Any = None) -> Modality:
        return Modality.LLM


class _OneBatch(GenerationState):
    """Give transformers' handlers the one batch."""

    def __init__(self, generator: Generator) -> None:
        super().__init__(continuous_batching=True)
        self._generator = generator

    def use_continuous_batching(self, model: Any, modality: Modality) -> bool:
        return True

    def get_manager(self, model_id: str, use_cb: bool = False) -> Generator:
        return self._generator


class Api:
    """Answer HTTP's requests, as ASGI has them.

    Args:
        name: Of the model.
        model: It runs in the generator.
        tokenizer: The model's.
        generator: The batch.
        options: The server's.
        registry: What `/metrics` reports.
    """

    def __init__(
        self, name: str, model: Any, tokenizer: Any, generator: Generator, options: OpenAIOptions, registry: Any
    ) -> None:
        one, batch = _OneModel(name, model, tokenizer), _OneBatch(generator)
        self._handlers: dict[str, Any] = {route: handler(one, batch) for route, handler in _HANDLERS.items()}
        for each in self._handlers.values():
            each.get_processor_inputs_from_messages = conversation
        template = getattr(tokenizer, "chat_template", None) or ""
        self._shows_tools = "tools" in (template if isinstance(template, str) else "".join(template.values()))
        self._name, self._generator, self._options, self._registry = name, generator, options, registry
        self._metrics = RequestMetrics(registry)
        self._metrics.waiting(lambda: len(generator.batch.requests) - generator.batch.running())
        self._entry = {"id": name, "object": "model", "created": int(time.time()), "owned_by": "kpt"}
        self._accepted = 0
        self.leaving = False

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            return
        request, start, code = Request(scope, receive), time.perf_counter(), 499
        route = request.url.path.removeprefix("/v1/")
        asked = Asked(uuid.uuid4().hex, None, None, None)

        async def answer(message: Any) -> None:
            nonlocal code
            if message["type"] == "http.response.start":
                code = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", asked.id.encode())]
            await send(message)

        if request.url.path == f"/v1/{route}" and route in _HANDLERS and request.method == "POST":
            try:
                await self._generate(request, route, asked, receive, answer)
            finally:
                self._metrics.observe("openai", str(code), time.perf_counter() - start)
        else:
            try:
                response = self._look(request)
            except RequestError as error:
                response = _refusal(error)
            await response(scope, receive, answer)

    def _look(self, request: Request) -> Response:
        path = request.url.path
        if path in _OPEN and request.method in ("GET", "HEAD"):
            alive = self._generator.is_alive()
            if path == "/metrics":
                body, content_type = exposition(self._registry, request.headers.get("accept"))
                return Response(body, headers={"content-type": content_type})
            fine = alive and not (self.leaving and path == "/ready")
            return JSONResponse({"status": "ok" if fine else "unavailable"}, 200 if fine else 503)
        self._authorize(request)
        if request.method == "GET" and path == "/v1/models":
            return JSONResponse({"object": "list", "data": [self._entry]})
        if request.method == "GET" and path == f"/v1/models/{self._name}":
            return JSONResponse(self._entry)
        code = "model_not_found" if path.startswith("/v1/models/") else "not_found"
        raise RequestError(404, f"{request.method} {path[:100]} is not here", code=code)

    def _authorize(self, request: Request) -> None:
        token = self._options.token
        kind, _, given = request.headers.get("authorization", "").partition(" ")
        if token is not None and not (
            kind.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), token.strip().encode())
        ):
            raise RequestError(401, "send the server's token as Authorization: Bearer TOKEN", code="invalid_api_key")

    async def _body(self, request: Request) -> Any:
        most, body = self._options.largest, bytearray()
        try:
            async with asyncio.timeout(_SENDING):
                async for part in request.stream():
                    body += part
                    if len(body) > most:
                        raise RequestError(413, f"the body has more than {most} bytes")
        except TimeoutError:
            raise RequestError(408, f"the body did not come within {_SENDING:.0f} seconds") from None
        try:
            return json.loads(body)
        except (ValueError, RecursionError) as error:
            raise RequestError(400, f"the body is no JSON: {str(error)[:200]}") from None

    async def _generate(self, request: Request, route: str, asked: Asked, receive: Any, send: Any) -> None:
        accepted = False
        gone: asyncio.Task[None] | None = None
        try:
            self._authorize(request)
            document = await self._body(request)
            if self._accepted >= self._options.max_running + self._options.max_waiting:
                raise RequestError(503, "too many requests wait; try again later", code="overloaded")
            accepted = True
            self._accepted += 1
            fields, found = read_request(
                route, document, id=asked.id, model=self._name, max_tokens=self._options.max_tokens
            )
            if fields.get("tools") and not self._shows_tools:
                raise RequestError(400, "this model's chat template takes no tools; leave them out", param="tools")
            gone = asyncio.create_task(_disconnected(receive))
            response = await self._unless(gone, self._handle(route, fields, found))
            if response is not None:
                await response(request.scope, _until(gone), send)
        except RequestError as error:
            await _refusal(error)(request.scope, receive, send)
        finally:
            if gone is not None:
                gone.cancel()
            self._generator.batch.forget(asked.id)
            self._accepted -= accepted

    async def _unless(self, gone: asyncio.Task[None], work: Awaitable[Response]) -> Response | None:
        """Return what the work returns; None if the client is gone before, which ends the work."""
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
            return task.result() if task.done() else None
        finally:
            task.cancel()

    async def _handle(self, route: str, fields: dict[str, Any], asked: Asked) -> Response:
        ASKED.set(asked)
        try:
            response: Response = await self._handlers[route].handle_request(fields, asked.id)
        except (RequestError, asyncio.CancelledError):
            raise
        except HTTPException as error:
            raise RequestError(400, str(error.detail)) from error
        except CBWorkerDeadError as error:
            raise RequestError(503, "the model stopped; restart the server", code="unavailable") from error
        except Exception as error:
            if isinstance(error, _MALFORMED) and not asked.started:
                raise RequestError(400, f"the request can't be read: {_line(error)}") from error
            raise RequestError(500, f"the model failed: {_line(error)}") from error
        if isinstance(response, StreamingResponse):
            response.body_iterator = _stream(response.body_iterator, ends=route != "responses")
        return response


def _refusal(error: RequestError) -> Response:
    kind = {401: "authentication_error", 503: "overloaded_error"}.get(
        error.status, "server_error" if error.status >= 500 else "invalid_request_error"
    )
    body = {"error": {"message": str(error), "type": kind, "param": error.param, "code": error.code}}
    # Starlette's own JSON fails for half a surrogate pair, which clients may send and a message quotes.
    headers = {"retry-after": "1"} if error.status == 503 else None
    return Response(json.dumps(body), error.status, headers, "application/json")


async def _stream(parts: AsyncIterable[Any], *, ends: bool) -> AsyncIterator[str]:
    """Yield the parts of a stream with OpenAI's end, which transformers leaves out, and errors that are JSON."""
    async for part in parts:
        text, found, failed = str(part).partition(_ERROR)
        yield text
        if found:
            message = f"the model failed: {failed.removesuffix(chr(10) * 2).removesuffix(chr(34) + chr(125))[:400]}"
            error = {"message": message, "type": "server_error", "param": None, "code": None}
            yield f"data: {json.dumps({'error': error})}\n\n"
            return
    if ends:
        yield "data: [DONE]\n\n"


async def _disconnected(receive: Callable[[], Awaitable[Any]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _until(gone: asyncio.Task[None]) -> Callable[[], Awaitable[dict[str, str]]]:
    async def receive() -> dict[str, str]:
        await asyncio.shield(gone)
        return {"type": "http.disconnect"}

    return receive


def _line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:400]


class Server(uvicorn.Server):
    """Leave on a signal: not ready, then no new connections, then every accepted request answered.

    Args:
        api: What is served.
        options: The server's.
    """

    def __init__(self, api: Api, options: OpenAIOptions) -> None:
        super().__init__(
            uvicorn.Config(
                api,
                http=impatient_protocol(),
                ssl_certfile=options.tls_certificate,
                ssl_keyfile=options.tls_key,
                lifespan="off",
                log_level="warning",
                server_header=False,
            )
        )
        self._api, self._settle, self._leaves = api, options.settle, 0.0

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to leave; a second Ctrl-C leaves requests unanswered."""
        if self._api.leaving and sig == signal.SIGINT:
            self.force_exit = self.should_exit = True
        elif not self._api.leaving:
            self._api.leaving, self._leaves = True, time.monotonic() + self._settle

    async def on_tick(self, counter: int) -> bool:
        """Say whether it is time to leave; uvicorn asks ten times a second."""
        if self._api.leaving and time.monotonic() >= self._leaves:
            self.should_exit = True
        return await super().on_tick(counter)
