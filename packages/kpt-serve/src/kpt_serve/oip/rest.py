"""The Open Inference Protocol v2 over HTTP: JSON, and tensors as bytes behind it."""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from torch import Tensor

from kpt_serve import __version__
from kpt_serve.metrics import exposition
from kpt_serve.package import Manifest
from kpt_serve.package import Tensor as Metadata

from .requests import (
    SMALL,
    VERSION,
    Request,
    RequestError,
    Status,
    check_model,
    check_tensor,
    complete,
    from_bytes,
    from_numbers,
    invalid,
    metadata_of,
    to_bytes,
    to_numbers,
)
from .service import Service

EXTENSIONS = ("binary_tensor_data",)
_LENGTH = "Inference-Header-Content-Length"
_LINGER = 2.0  #: seconds in which the rest of a refused body is dropped, since clients read no answer while they send
_LOG = logging.getLogger("kpt_serve")


def application(service: Service, registry: CollectorRegistry, *, largest: int, body_seconds: float) -> Starlette:
    """Return the routes of a server of one model.

    Args:
        service: The model.
        registry: What `/metrics` reports.
        largest: Most bytes of a request.
        body_seconds: In which a request must have arrived.
    """
    manifest = service.manifest

    async def live(request: HttpRequest) -> Response:
        return _health("live", service.live)

    async def ready(request: HttpRequest) -> Response:
        return _health("ready", service.ready)

    async def metrics(request: HttpRequest) -> Response:
        body, kind = exposition(registry, request.headers.get("accept"))
        return Response(body, media_type=kind)

    async def server(request: HttpRequest) -> Response:
        return JSONResponse({"name": "kpt-serve", "version": __version__, "extensions": EXTENSIONS})

    async def model(request: HttpRequest) -> Response:
        service.check_token(request.headers.get("authorization"))
        _check_path(manifest, request)
        return JSONResponse(
            {
                "name": manifest.name,
                "versions": [VERSION],
                "platform": f"kpt_{manifest.kind}",
                "inputs": [_metadata(each) for each in manifest.inputs],
                "outputs": [_metadata(each) for each in manifest.outputs],
            }
        )

    async def model_ready(request: HttpRequest) -> Response:
        _check_path(manifest, request)
        return _health("ready", service.ready)

    async def infer(request: HttpRequest) -> Response:
        with service.observed("rest"):
            service.check_token(request.headers.get("authorization"))
            _check_path(manifest, request)
            body = await _body(request, largest, body_seconds)
            small = len(body) <= SMALL
            arguments = (manifest, body, request.headers.get(_LENGTH), request.headers.get("content-encoding"))
            asked, binary = _parse(*arguments) if small else await asyncio.to_thread(_parse, *arguments)
            results = await _unless_gone(request, service.infer(asked))
            size = sum(tensor.nbytes for tensor in results.values())
            if size <= SMALL:
                return _answer(manifest, asked, results, binary)
            return await asyncio.to_thread(_answer, manifest, asked, results, binary)

    async def told(request: HttpRequest, error: Exception) -> Response:
        assert isinstance(error, RequestError)
        headers = {"Retry-After": "1"} if error.status.http == 503 else {}
        if error.status in (Status.TOO_LARGE, Status.TIMEOUT):
            headers["Connection"] = "close"  # what is left of the body is not read
        if error.status is Status.UNAUTHENTICATED:
            headers["WWW-Authenticate"] = "Bearer"
        # Starlette's own JSON fails for half a surrogate pair, which clients may send and a message quotes.
        return Response(json.dumps({"error": str(error)}), error.status.http, headers, "application/json")

    async def nowhere(request: HttpRequest, error: Exception) -> Response:
        code = getattr(error, "status_code", 404)
        text = f"there is no {request.method} {request.url.path}; the model is at /v2/models/{manifest.name}"
        return JSONResponse({"error": text}, code, getattr(error, "headers", None))

    async def failed(request: HttpRequest, error: Exception) -> Response:
        return JSONResponse({"error": f"the server failed: {type(error).__name__}; its log says more"}, 500)

    one = "/v2/models/{name}"
    routes = [
        Route("/v2", server),
        Route("/v2/health/live", live),
        Route("/v2/health/ready", ready),
        Route("/metrics", metrics),
    ]
    for path in (one, f"{one}/versions/{{version}}"):
        routes += [
            Route(path, model),
            Route(f"{path}/ready", model_ready),
            Route(f"{path}/infer", infer, methods=["POST"]),
        ]
    handlers: dict[Any, Callable[[HttpRequest, Exception], Awaitable[Response]]] = {
        RequestError: told,
        404: nowhere,
        405: nowhere,
        500: failed,
    }
    return Starlette(routes=routes, exception_handlers=handlers, middleware=[])


def _health(word: str, good: bool) -> Response:
    return JSONResponse({word: good}, 200 if good else 503)


def _metadata(tensor: Metadata) -> dict[str, Any]:
    return {"name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.shape)}


def _check_path(manifest: Manifest, request: HttpRequest) -> None:
    check_model(manifest, request.path_params["name"], request.path_params.get("version", ""))


async def _body(request: HttpRequest, largest: int, seconds: float) -> bytes:
    """Return the body of a request, of which no more is kept than a server's limit.

    Raises:
        RequestError: It is too large, or too slow.
    """
    stated = request.headers.get("content-length", "0")
    chunks: list[bytes] = []
    size = 0
    too_large = RequestError(Status.TOO_LARGE, f"the request has more than {largest} bytes; send less, or in parts")
    try:
        async with asyncio.timeout(seconds):
            async for chunk in request.stream():
                size += len(chunk)
                if size > largest or (stated.isdecimal() and int(stated) > largest):
                    await _drop(request)
                    raise too_large
                chunks.append(chunk)
    except TimeoutError:
        text = f"the request did not arrive within {seconds:g} seconds; got {size} bytes"
        raise RequestError(Status.TIMEOUT, text) from None
    except ClientDisconnect:
        raise RequestError(Status.CANCELLED, "the client left") from None
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


async def _drop(request: HttpRequest) -> None:
    try:
        async with asyncio.timeout(_LINGER):
            while (await request.receive()).get("more_body"):
                pass
    except TimeoutError:
        pass


async def _unless_gone(request: HttpRequest, answer: Awaitable[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return an answer; a client that leaves takes its request with it."""
    task = asyncio.ensure_future(answer)
    gone = asyncio.ensure_future(request.receive())  # after the body, this is told of the end of the connection alone
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise RequestError(Status.CANCELLED, "the client left")
        return task.result()
    finally:
        task.cancel()
        gone.cancel()


def _parse(
    manifest: Manifest, body: bytes, header_length: str | None, encoding: str | None
) -> tuple[Request, dict[str, bool]]:
    """Return a request, and for each output whether it is to go as bytes."""
    if encoding not in (None, "identity"):
        raise RequestError(Status.UNSUPPORTED, f"content-encoding is {encoding!r}; expected an uncompressed request")
    length = len(body)
    if header_length is not None:
        if not header_length.isdecimal() or int(header_length) > len(body):
            raise invalid(f"{_LENGTH} is {header_length!r}; expected at most the {len(body)} bytes of the request")
        length = int(header_length)
    try:
        document = json.loads(body[:length])
    except (ValueError, RecursionError) as error:
        raise invalid(f"the request is no JSON: {error}") from None
    if not isinstance(document, dict):
        raise invalid(f"the request is a {type(document).__name__}; expected an object with 'inputs'")
    raw = memoryview(body)[length:]
    inputs: dict[str, Tensor] = {}
    for entry in _objects(document, "inputs"):
        metadata = metadata_of(manifest, _text(entry, "name"))
        if metadata.name in inputs:
            raise invalid(f"input {metadata.name!r} is there twice")
        shape = check_tensor(metadata, entry.get("datatype"), entry.get("shape"))
        size = _parameters(entry).get("binary_data_size")
        if size is not None:
            if type(size) is not int or not 0 <= size <= len(raw):
                raise invalid(f"input {metadata.name!r} has binary_data_size {size!r}; {len(raw)} bytes are left")
            inputs[metadata.name] = from_bytes(metadata, shape, raw[:size])
            raw = raw[size:]
        else:
            inputs[metadata.name] = from_numbers(metadata, shape, entry.get("data"))
    if len(raw):
        raise invalid(f"the request has {len(raw)} bytes more than its inputs; check binary_data_size")
    all_binary = bool(_parameters(document).get("binary_data_output", False))
    wanted = {_text(each, "name"): each for each in _objects(document, "outputs", optional=True)}
    request = complete(manifest, inputs, list(wanted), _text(document, "id", ""))
    binary = {name: bool(_parameters(wanted.get(name, {})).get("binary_data", all_binary)) for name in request.outputs}
    return request, binary


def _objects(document: dict[str, Any], key: str, *, optional: bool = False) -> list[dict[str, Any]]:
    found = document.get(key)
    if optional and found is None:
        return []
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        raise invalid(f"{key!r} is {str(found)[:80]}; expected a list of objects")
    return found


def _text(document: dict[str, Any], key: str, default: str | None = None) -> str:
    found = document.get(key, default)
    if not isinstance(found, str):
        raise invalid(f"{key!r} is {str(found)[:80]}; expected a text")
    return found


def _parameters(document: dict[str, Any]) -> dict[str, Any]:
    found = document.get("parameters") or {}
    if not isinstance(found, dict):
        raise invalid(f"'parameters' is {str(found)[:80]}; expected an object")
    return found


def _answer(manifest: Manifest, request: Request, results: dict[str, Tensor], binary: dict[str, bool]) -> Response:
    datatypes = {each.name: each.datatype for each in manifest.outputs}
    outputs, parts = [], []
    for name, tensor in results.items():
        output: dict[str, Any] = {"name": name, "datatype": datatypes[name], "shape": list(tensor.shape)}
        if binary[name]:
            parts.append(to_bytes(tensor))
            output["parameters"] = {"binary_data_size": len(parts[-1])}
        else:
            output["data"] = to_numbers(name, tensor)
        outputs.append(output)
    document: dict[str, Any] = {"model_name": manifest.name, "model_version": VERSION, "outputs": outputs}
    if request.id:
        document["id"] = request.id
    header = json.dumps(document, separators=(",", ":"), allow_nan=False).encode()
    if not parts:
        return Response(header, media_type="application/json")
    headers = {_LENGTH: str(len(header))}
    return Response(b"".join([header, *parts]), media_type="application/octet-stream", headers=headers)
