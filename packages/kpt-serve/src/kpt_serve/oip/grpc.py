"""The Open Inference Protocol v2 over gRPC, from its compiled description: no code is generated."""

import asyncio
from collections.abc import Awaitable, Callable
from importlib.resources import files
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from torch import Tensor

from kpt_serve import __version__
from kpt_serve.package import Manifest

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
)
from .service import Service

_SERVICE = "inference.GRPCInferenceService"
#: Fields of numbers that do not come as bytes.
_CONTENTS = {
    "BOOL": "bool_contents",
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    "INT64": "int64_contents",
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
}
_Handler = Callable[[Any, Any], Awaitable[Any]]


def messages() -> dict[str, Any]:
    """Return the protocol's messages by name.

    They are in a pool of their own, so that a client's generated code of the same names may be imported as well.
    """
    pool = descriptor_pool.DescriptorPool()
    content = files(__package__).joinpath("open_inference.desc").read_bytes()
    for each in descriptor_pb2.FileDescriptorSet.FromString(content).file:
        pool.Add(each)
    service = pool.FindServiceByName(_SERVICE)
    found = {method.input_type.name: method.input_type for method in service.methods}
    found |= {method.output_type.name: method.output_type for method in service.methods}
    return {name: message_factory.GetMessageClass(descriptor) for name, descriptor in found.items()}


def handlers(service: Service) -> grpc.GenericRpcHandler:
    """Return what answers the protocol's calls with a model."""
    types = messages()
    manifest = service.manifest

    async def live(request: Any, context: Any) -> Any:
        return types["ServerLiveResponse"](live=service.live)

    async def ready(request: Any, context: Any) -> Any:
        return types["ServerReadyResponse"](ready=service.ready)

    async def model_ready(request: Any, context: Any) -> Any:
        check_model(manifest, request.name, request.version)
        return types["ModelReadyResponse"](ready=service.ready)

    async def server(request: Any, context: Any) -> Any:
        return types["ServerMetadataResponse"](name="kpt-serve", version=__version__)

    async def model(request: Any, context: Any) -> Any:
        service.check_token(_authorization(context))
        check_model(manifest, request.name, request.version)
        answer = types["ModelMetadataResponse"](name=manifest.name, versions=[VERSION], platform=f"kpt_{manifest.kind}")
        for ours, theirs in ((manifest.inputs, answer.inputs), (manifest.outputs, answer.outputs)):
            for each in ours:
                theirs.add(name=each.name, datatype=each.datatype, shape=each.shape)
        return answer

    async def infer(request: Any, context: Any) -> Any:
        with service.observed("grpc"):
            service.check_token(_authorization(context))
            check_model(manifest, request.model_name, request.model_version)
            small = request.ByteSize() <= SMALL
            asked = _parse(manifest, request) if small else await asyncio.to_thread(_parse, manifest, request)
            return _answer(types, manifest, asked, await service.infer(asked))

    calls: dict[str, tuple[_Handler, str]] = {
        "ServerLive": (live, "ServerLive"),
        "ServerReady": (ready, "ServerReady"),
        "ModelReady": (model_ready, "ModelReady"),
        "ServerMetadata": (server, "ServerMetadata"),
        "ModelMetadata": (model, "ModelMetadata"),
        "ModelInfer": (infer, "ModelInfer"),
    }
    methods = {
        name: grpc.unary_unary_rpc_method_handler(
            _told(handler),
            request_deserializer=types[f"{word}Request"].FromString,
            response_serializer=types[f"{word}Response"].SerializeToString,
        )
        for name, (handler, word) in calls.items()
    }
    return grpc.method_handlers_generic_handler(_SERVICE, methods)


def _told(handler: _Handler) -> _Handler:
    """Return a handler whose errors are a status and a sentence."""

    async def call(request: Any, context: Any) -> Any:
        try:
            return await handler(request, context)
        except RequestError as error:
            status = error.status
            trailing = (("retry-after", "1"),) if status in (Status.BUSY, Status.UNAVAILABLE) else ()
            await context.abort(grpc.StatusCode[status.grpc], str(error), trailing)

    return call


def _authorization(context: Any) -> str | None:
    return next((value for key, value in context.invocation_metadata() or () if key == "authorization"), None)


def _parse(manifest: Manifest, request: Any) -> Request:
    raw = list(request.raw_input_contents)
    if raw and len(raw) != len(request.inputs):
        raise invalid(f"the request has {len(raw)} raw contents for {len(request.inputs)} inputs; expected one each")
    inputs: dict[str, Tensor] = {}
    for place, entry in enumerate(request.inputs):
        metadata = metadata_of(manifest, entry.name)
        if metadata.name in inputs:
            raise invalid(f"input {metadata.name!r} is there twice")
        shape = check_tensor(metadata, entry.datatype, list(entry.shape))
        if raw:
            inputs[metadata.name] = from_bytes(metadata, shape, raw[place])
            continue
        if metadata.datatype not in _CONTENTS:
            raise invalid(f"input {metadata.name!r} is {metadata.datatype}; expected it in raw_input_contents")
        inputs[metadata.name] = from_numbers(
            metadata, shape, list(getattr(entry.contents, _CONTENTS[metadata.datatype]))
        )
    return complete(manifest, inputs, [each.name for each in request.outputs], request.id)


def _answer(types: dict[str, Any], manifest: Manifest, request: Request, results: dict[str, Tensor]) -> Any:
    datatypes = {each.name: each.datatype for each in manifest.outputs}
    answer = types["ModelInferResponse"](model_name=manifest.name, model_version=VERSION, id=request.id)
    for name, tensor in results.items():
        answer.outputs.add(name=name, datatype=datatypes[name], shape=tensor.shape)
        answer.raw_output_contents.append(to_bytes(tensor))
    return answer
