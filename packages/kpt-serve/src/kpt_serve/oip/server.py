"""A server of one package: it listens, loads, proves, serves, and stops without losing a request."""

import asyncio
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kpt_serve.errors import ServeError
from kpt_serve.listening import check_access, impatient_protocol, listener, warn_of_openness
from kpt_serve.package import Manifest, check, check_machine, verify_signature

if TYPE_CHECKING:
    import grpc.aio

    from .batching import Batcher
    from .model import Model
    from .service import Service

_LOG = logging.getLogger("kpt_serve")
DONE, WRONG = 0, 1


@dataclass(frozen=True)
class Options:
    """How a package is served.

    Attributes:
        host: Where it listens.
        port: Of REST; 0 takes a free one.
        grpc_port: Of gRPC; None for none, 0 takes a free one.
        device_type: Where the model runs.
        batch: Most rows of requests that run in one call.
        delay: Seconds that a request may wait for others.
        queue: Most requests that wait; further ones get 503 or RESOURCE_EXHAUSTED.
        largest: Most bytes of a request.
        body_seconds: In which a request must have arrived.
        settle: Seconds between the signal to stop and the end of new requests: readiness says no meanwhile.
        grace: Seconds in which accepted requests must be answered after that.
        token: What clients must send; None for everybody.
        certificate: PEM file of a certificate, for TLS.
        private_key: PEM file of its key.
        key: Public key that the package's signature must fit.
        unsigned: Serve a program without a signature.
        batch_invariant: Compute each row alone, so that it has the same bits in every batch.
    """

    host: str = "127.0.0.1"
    port: int = 8080
    grpc_port: int | None = None
    device_type: str = "cpu"
    batch: int = 32
    delay: float = 0.002
    queue: int = 256
    largest: int = 64 << 20
    body_seconds: float = 10.0
    settle: float = 0.0
    grace: float = 30.0
    token: str | None = None
    certificate: Path | None = None
    private_key: Path | None = None
    key: Path | None = None
    unsigned: bool = False
    batch_invariant: bool = False

    def check(self) -> None:
        """Raise `ServeError` if a value makes no sense."""
        for name, least in (("batch", 1), ("queue", 1), ("largest", 1), ("delay", 0), ("settle", 0), ("grace", 0)):
            if not getattr(self, name) >= least:
                raise ServeError(f"{name} is {getattr(self, name)}; expected at least {least}")
        if not self.body_seconds > 0:
            raise ServeError(f"body_seconds is {self.body_seconds}; expected more than 0")
        check_access(self.token, self.certificate, self.private_key)


def serve(folder: str | os.PathLike[str], options: Options = Options()) -> int:
    """Serve a package until SIGTERM or SIGINT, and return the exit code.

    The package's files, signature and needs are checked before torch is imported. The server listens while the model is
    loaded, and is ready when the golden results were right.

    Raises:
        PackageError: The package was changed, has no right signature, or this machine lacks what it needs.
        ServeError: The options make no sense, or a port is taken.
    """
    manifest = read_package(folder, options)
    check_machine(manifest, device_type=options.device_type)
    try:
        import uvloop
    except ImportError as error:
        raise ServeError(
            f"serving needs {error.name}, which is not installed: pip install 'kpt-serve[serve]'"
        ) from error
    warn_of_openness(options.host, options.token)
    return uvloop.run(_serve(Path(folder), manifest, options))


def read_package(folder: str | os.PathLike[str], options: Options) -> Manifest:
    """Return the manifest of a package whose files, and signature if it needs one, are right; torch is not imported.

    Raises:
        PackageError: The package was changed, or has no right signature.
        ServeError: The options make no sense, or ask for no signature of a program.
    """
    options.check()
    manifest = Manifest.read(folder)
    if options.key is not None:
        verify_signature(folder, options.key)
    elif manifest.kind == "program" and not options.unsigned:
        raise ServeError(
            f"{folder} is a program, and nobody says who made it: give the public key that its signature must fit by "
            "--key, or serve it --unsigned"
        )
    check(folder, manifest)
    return manifest


async def _serve(folder: Path, manifest: Manifest, options: Options) -> int:
    from kpt_serve.metrics import RequestMetrics, server_registry

    from .model import WrongResultsError
    from .service import Service

    registry = server_registry()
    service = Service(manifest, RequestMetrics(registry), options.token)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for each in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(each, _stopped, stop)
    web, listener = _web(service, registry, options)
    serving = asyncio.create_task(web.serve(sockets=[listener]))
    rpc, rpc_port = await _rpc(service, options)
    scheme = "https" if options.certificate else "http"
    host, port, *_ = listener.getsockname()
    _LOG.info("%s: %s://%s:%d%s", manifest.name, scheme, host, port, f", gRPC on {rpc_port}" if rpc else "")
    stopping = asyncio.create_task(stop.wait())
    loading = _in_thread(loop, lambda: _load(folder, manifest, options, service))
    await asyncio.wait((loading, stopping, serving), return_when=asyncio.FIRST_COMPLETED)
    if loading.done() and loading.exception() is None:
        _LOG.info("ready")
        await asyncio.wait((stopping, serving), return_when=asyncio.FIRST_COMPLETED)
    await _drain(service, web, rpc, serving, stop, options)
    stopping.cancel()
    error = loading.exception() if loading.done() else None
    if isinstance(error, WrongResultsError):
        _LOG.error("%s", error)
        return WRONG
    if error is not None:
        raise error
    return DONE


def _stopped(stop: asyncio.Event) -> None:
    if stop.is_set():  # asked for twice: at once
        os._exit(128 + signal.SIGINT)
    stop.set()


def _in_thread(loop: asyncio.AbstractEventLoop, work: Callable[[], None]) -> "asyncio.Future[None]":
    """Run work in a thread that keeps no process from ending."""
    done: asyncio.Future[None] = loop.create_future()

    def finish(error: BaseException | None) -> None:
        if not done.done():
            done.set_result(None) if error is None else done.set_exception(error)

    def run() -> None:
        error: BaseException | None = None
        try:
            work()
        except BaseException as raised:
            error = raised
        with suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(finish, error)

    threading.Thread(target=run, name="kpt-load", daemon=True).start()
    return done


def _load(folder: Path, manifest: Manifest, options: Options, service: "Service") -> None:
    from .model import Model

    model = Model(folder, manifest, options.device_type)
    callbacks = {"on_batch": service.metrics.batch, "on_failure": lambda: _check(model, service)}
    service.start(batcher_of(model, manifest, options, **callbacks))


def batcher_of(model: "Model", manifest: Manifest, options: Options, **callbacks: Any) -> "Batcher":
    """Return the queue before a model, and its thread.

    Raises:
        ServeError: Rows are to be computed alone, and the model has none.
    """
    from .batching import Batcher

    rows = model.rows(manifest, options.batch)
    run: Callable[..., Any] = model
    if options.batch_invariant:
        if rows == 1 < options.batch:
            raise ServeError(f"{manifest.name} has no rows that could be computed alone: leave out --batch-invariant")
        run, rows = model.by_row, 1
    _LOG.info("golden results are right; %s", f"up to {rows} rows in one call" if rows > 1 else "one request a call")
    return Batcher(run, rows=rows, delay=options.delay, queue=options.queue, **callbacks)


def _check(model: "Model", service: "Service") -> None:
    """Tell by liveness if the model is broken for good, as after an error of a device."""
    if service.live and not model.is_right():
        service.live = False
        _LOG.critical("the golden input fails or gives something else: the process must be started again")


async def _drain(
    service: "Service",
    web: Any,
    rpc: "grpc.aio.Server | None",
    serving: "asyncio.Task[None]",
    stop: asyncio.Event,
    options: Options,
) -> None:
    """Answer what was accepted, and end."""
    service.draining = True
    if stop.is_set() and options.settle:
        _LOG.info("stops in %g seconds; not ready any more", options.settle)
        await asyncio.sleep(options.settle)
    web.should_exit = True
    if rpc is not None:
        await asyncio.gather(rpc.stop(options.grace), serving)
    else:
        await serving
    service.close()
    _LOG.info("stopped")


def _web(service: "Service", registry: Any, options: Options) -> tuple[Any, socket.socket]:
    """Return uvicorn's server and the socket that it will use."""
    import uvicorn

    from .rest import application

    class Server(uvicorn.Server):
        """A server that leaves signals to us."""

        def capture_signals(self) -> Any:
            """Take no signals."""
            return nullcontext()

    config = uvicorn.Config(
        application(service, registry, largest=options.largest, body_seconds=options.body_seconds),
        http=impatient_protocol(),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=int(options.grace),
        ssl_certfile=options.certificate,
        ssl_keyfile=options.private_key,
    )
    return Server(config), listener(options.host, options.port, backlog=2048)


async def _rpc(service: "Service", options: Options) -> "tuple[grpc.aio.Server | None, int]":
    """Return a server of gRPC that listens, and its port."""
    if options.grpc_port is None:
        return None, 0
    import grpc

    from .grpc import handlers

    settings = [
        ("grpc.max_receive_message_length", options.largest),
        ("grpc.max_send_message_length", -1),
        ("grpc.so_reuseport", 0),  # else two servers share a port without a word
    ]
    server = grpc.aio.server(handlers=(handlers(service),), options=settings)
    address = f"[{options.host}]:{options.grpc_port}" if ":" in options.host else f"{options.host}:{options.grpc_port}"
    try:
        if options.certificate is not None and options.private_key is not None:
            pair = (options.private_key.read_bytes(), options.certificate.read_bytes())
            port = server.add_secure_port(address, grpc.ssl_server_credentials([pair]))
        else:
            port = server.add_insecure_port(address)
    except RuntimeError as error:
        raise ServeError(f"can't listen on {address}: {error}; choose another by --grpc-port") from error
    await server.start()
    return server, port
