"""What REST and gRPC share: the model behind its queue, whether it is live and ready, and who may ask."""

import asyncio
import hmac
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from kpt_serve.metrics import RequestMetrics
from kpt_serve.package import Manifest

from .batching import Batcher
from .requests import Request, RequestError, Status

_LOG = logging.getLogger("kpt_serve")


class Outcome:
    """Hold what became of a request, which a front end sets and the metrics read."""

    status = Status.OK


class Service:
    """A model that is loaded later, and what it tells of itself meanwhile.

    Args:
        manifest: Of the package.
        metrics: Where requests are counted.
        token: What clients must send, None for everybody.
    """

    def __init__(self, manifest: Manifest, metrics: RequestMetrics, token: str | None) -> None:
        self.manifest, self.metrics = manifest, metrics
        self.live = True  #: until the model gives wrong results: then the process must be started again
        self.draining = False
        self._token = token.strip().encode() if token is not None else None
        self._batcher: Batcher | None = None
        metrics.waiting(lambda: self._batcher.waiting() if self._batcher else 0)

    @property
    def ready(self) -> bool:
        """Return whether the golden input was served, and requests are welcome."""
        return self.live and self._batcher is not None and not self.draining

    def start(self, batcher: Batcher) -> None:
        """Serve a model that was proven."""
        self._batcher = batcher

    def close(self) -> None:
        """Answer what waits, and serve no more."""
        if self._batcher is not None:
            self._batcher.close()

    def check_token(self, authorization: str | None) -> None:
        """Raise unless a request has the token, if there is one; the time that it takes tells nothing of it."""
        if self._token is None:
            return
        kind, _, sent = (authorization or "").partition(" ")
        if kind.lower() != "bearer" or not hmac.compare_digest(sent.strip().encode(), self._token):
            raise RequestError(
                Status.UNAUTHENTICATED, "the token is missing or wrong; send 'Authorization: Bearer TOKEN'"
            )

    async def infer(self, request: Request) -> dict[str, Tensor]:
        """Return the outputs that a request asks for."""
        if self._batcher is None:
            raise RequestError(Status.UNAVAILABLE, "the model is being loaded; /v2/health/ready tells when it serves")
        if not self.live:
            raise RequestError(Status.UNAVAILABLE, "the model gives wrong results; the server must be started again")
        results = await self._batcher.submit({each.name: request.inputs[each.name] for each in self.manifest.inputs})
        return {name: results[name] for name in request.outputs}

    @contextmanager
    def observed(self, protocol: str) -> Iterator[Outcome]:
        """Count a request and its time; errors pass."""
        outcome, start = Outcome(), time.perf_counter()
        try:
            yield outcome
        except RequestError as error:
            outcome.status = error.status
            raise
        except asyncio.CancelledError:
            outcome.status = Status.CANCELLED
            raise
        except Exception:
            outcome.status = Status.FAILED
            raise
        finally:
            code = outcome.status.grpc if protocol == "grpc" else str(outcome.status.http)
            self.metrics.observe(protocol, code, time.perf_counter() - start)
