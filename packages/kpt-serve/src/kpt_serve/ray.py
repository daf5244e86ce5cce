"""A package on several machines without Kubernetes: a deployment of Ray Serve, `python -m kpt_serve.ray PACKAGE`."""

import argparse
import os
import signal
import threading
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kpt_serve.errors import PackageError, ServeError
from kpt_serve.listening import warn_of_openness
from kpt_serve.oip.server import Options, batcher_of, read_package
from kpt_serve.package import check_machine

if TYPE_CHECKING:
    from ray.serve import Application
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

_MISSING = "this needs Ray Serve, which is not installed: pip install 'ray[serve]' 'kpt-serve[serve]'"
_OPTIONS = Options(port=8000)  #: Ray's port
_UNUSED = ("grpc_port", "settle", "token")  #: options of `kpt serve` that the command line here has not


def deployment(
    folder: str | os.PathLike[str],
    options: Options = _OPTIONS,
    *,
    replicas: tuple[int, int] = (1, 1),
    cpus: float = 1,
    gpus: float = 0,
    autoscaling: Mapping[str, Any] | None = None,
    **settings: Any,
) -> "Application":
    """Return a package as an application for `ray.serve.run`.

    Args:
        folder: The package, at the same path on each machine.
        options: As for `kpt serve`. A replica runs `batch` requests at a time, `queue` more wait at each proxy.
        replicas: Fewest and most; Ray chooses between by the requests that are there.
        cpus: Of each replica; the model runs with so many threads.
        gpus: Of each replica.
        autoscaling: More settings of `ray.serve.config.AutoscalingConfig`.
        **settings: More settings of `ray.serve.deployment`.

    Raises:
        PackageError: The package was changed or has no right signature.
        ServeError: The options make no sense, or Ray is missing.
    """
    try:
        from ray import serve
    except ImportError as error:
        raise ServeError(_MISSING) from error
    least, most = replicas
    if not 0 < least <= most:
        raise ServeError(f"replicas are {least}:{most}; expected a least of 1 and no smaller most")
    read_package(folder, options)
    scale = {"min_replicas": least, "max_replicas": most, "target_ongoing_requests": max(1, options.batch // 4)}
    asked: dict[str, Any] = {
        "name": "kpt",
        "ray_actor_options": {"num_cpus": cpus, "num_gpus": gpus},
        "autoscaling_config": scale | dict(autoscaling or {}),
        "max_ongoing_requests": options.batch,
        "max_queued_requests": options.queue,
        "backpressure_config": {"retry_after_s": 1},
        "graceful_shutdown_timeout_s": options.grace,
        "max_constructor_retry_count": 3,
        "max_surge_percent": 100,  # else one replica ends before the next one is loaded
        "logging_config": {"enable_access_log": False},
    }
    made = serve.deployment(**asked | settings)(serve.ingress()(Replica))
    return made.bind(os.path.abspath(folder), options)


class Replica:
    """Serve a package in one process of Ray's; files and machine are checked before torch is imported."""

    def __init__(self, folder: str, options: Options) -> None:
        manifest = read_package(folder, options)
        check_machine(manifest, device_type=options.device_type)
        from kpt_serve.metrics import RequestMetrics, server_registry
        from kpt_serve.oip.model import Model
        from kpt_serve.oip.service import Service

        self._options, self._registry = options, server_registry()
        self._model = Model(Path(folder), manifest, options.device_type)
        self._service = Service(manifest, RequestMetrics(self._registry), options.token)
        # Ray lets no more in than `batch`, so the queue is never full.
        self._batcher = batcher_of(self._model, manifest, replace(options, queue=2 * options.batch + 1))
        self._service.start(self._batcher)

    def __serve_build_asgi_app__(self) -> "Starlette":
        from starlette.routing import Route

        from kpt_serve.oip.rest import application

        options = self._options
        app = application(self._service, self._registry, largest=options.largest, body_seconds=options.body_seconds)
        app.router.routes.append(Route("/stats", self._stats))
        return app

    async def _stats(self, request: "Request") -> "Response":
        from starlette.responses import JSONResponse

        import ray
        from kpt_core import counts
        from ray import serve

        self._service.check_token(request.headers.get("authorization"))
        place = {"replica": serve.get_replica_context().replica_id.unique_id, "process": os.getpid()}
        node = ray.get_runtime_context().get_node_id()
        return JSONResponse({**place, "node": node, "kernels": [asdict(each) for each in counts()]})

    async def check_health(self) -> None:
        """Raise unless the golden input still gives the right results; Ray then starts another replica."""
        from kpt_serve.oip.requests import RequestError

        try:
            # In the model's own thread: OpenMP's team of another would slow it down from then on.
            right = self._model.is_golden(await self._batcher.submit(self._model.golden))
        except RequestError:
            right = False
        if not right:
            self._service.live = False
            raise RuntimeError("the golden input fails or gives something else")


def main() -> None:
    """Serve the package that the command line names; the options of `kpt serve` have the names of their fields."""
    parser = argparse.ArgumentParser(prog="python -m kpt_serve.ray", description="Serve a package by Ray Serve.")
    parser.add_argument("folder", type=Path, help="a package of kpt export, at the same path on each machine")
    parser.add_argument("--replicas", default="1:1", metavar="LEAST:MOST", help="how many processes serve it")
    parser.add_argument("--cpus", type=float, default=1, help="of each replica, and the threads of its model")
    parser.add_argument("--gpus", type=float, default=0, help="of each replica")
    parser.add_argument("--address", help="of a cluster, as auto; without it Ray starts here, and ends with Ctrl-C")
    for field in fields(Options):
        name, default = f"--{field.name.replace('_', '-')}", field.default
        if isinstance(default, bool):
            parser.add_argument(name, action="store_true")
        elif field.name not in _UNUSED:
            parser.add_argument(name, type=Path if default is None else type(default), default=default)
    parser.set_defaults(port=_OPTIONS.port)
    told = vars(parser.parse_args())
    folder, address, replicas = told.pop("folder"), told.pop("address"), told.pop("replicas")
    least, _, most = replicas.partition(":")
    if not (least.isdecimal() and (most or least).isdecimal()):
        parser.error(f"--replicas is {replicas!r}; expected two numbers as in 1:4")
    resources = {"cpus": told.pop("cpus"), "gpus": told.pop("gpus")}
    options = Options(token=os.environ.get("KPT_TOKEN"), **told)
    try:
        application = deployment(folder, options, replicas=(int(least), int(most or least)), **resources)
    except (PackageError, ServeError) as error:
        parser.exit(2, f"{error}\n")
    import ray
    from ray import serve

    warn_of_openness(options.host, options.token)
    ray.init(address or "local", log_to_driver=False, include_dashboard=False if address is None else None)
    http = {"host": options.host, "port": options.port}
    if options.certificate is not None:
        http |= {"ssl_certfile": str(options.certificate), "ssl_keyfile": str(options.private_key)}
    serve.start(proxy_location="EveryNode", http_options=http, logging_config={"enable_access_log": False})
    serve.run(application, name="kpt")
    if address is None:
        stop = threading.Event()
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, lambda *_: stop.set())
        stop.wait()
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    from kpt_serve.ray import main as run  # so that replicas find the class by the name of its module

    run()
