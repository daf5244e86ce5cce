"""Who reaches a server, and how it listens."""

import functools
import ipaddress
import logging
import socket
import ssl
from pathlib import Path
from typing import Any

from kpt_serve.errors import ServeError

SILENT = 10.0  #: seconds in which a new connection must begin a request


def warn_of_openness(host: str, token: str | None) -> None:
    """Warn where others than this machine reach a server, and it has no token."""
    try:
        local = ipaddress.ip_address(host).is_loopback
    except ValueError:
        local = host == "localhost"
    if not local and token is None:
        logging.getLogger("kpt_serve").warning(
            "%s is open to others, and there is no token: everybody who reaches it may use the model", host
        )


def check_access(token: str | None, certificate: Path | None, private_key: Path | None) -> None:
    """Raise `ServeError` for a token that no client can send, and for files that TLS can't use."""
    if token is not None and not (token.strip() and token.isascii()):
        raise ServeError("the token is empty or not ASCII; expected the text that clients send, or no token at all")
    if (certificate is None) != (private_key is None):
        raise ServeError("TLS needs a certificate and its private key; got one of the two")
    if certificate is not None:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, private_key)
        except OSError as error:  # ssl.SSLError is one
            raise ServeError(f"TLS with {certificate} and {private_key} fails: {error}") from error


def listener(host: str, port: int, backlog: int | None = None) -> socket.socket:
    """Return a socket with an address of its own, which listens if a backlog is given.

    Raises:
        ServeError: The address is taken, or not this machine's.
    """
    made = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((host, port))
        if backlog is not None:
            made.listen(backlog)
    except (OSError, OverflowError) as error:
        made.close()
        text = getattr(error, "strerror", None) or error
        raise ServeError(f"can't listen on {host}:{port}: {text}; choose another by --host or --port") from error
    return made


@functools.cache
def impatient_protocol() -> Any:
    """Return uvicorn's protocol of HTTP with an end to connections that ask nothing."""
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

    class Impatient(HttpToolsProtocol):
        """A connection that is closed if it asks nothing."""

        def connection_made(self, transport: Any) -> None:
            """Begin to wait."""
            super().connection_made(transport)
            self.loop.call_later(SILENT, self._close_if_silent)

        def _close_if_silent(self) -> None:
            asked: object = self.cycle  # None before the first request, which its annotation doesn't say
            if asked is None and not self.transport.is_closing():
                self.transport.close()

    return Impatient
