"""How a language model is served."""

from dataclasses import dataclass, field
from pathlib import Path

from kpt_serve.errors import ServeError
from kpt_serve.listening import check_access


@dataclass(frozen=True, slots=True)
class OpenAIOptions:
    """Say how a model is served.

    Attributes:
        host: Where to listen.
        port: Where to listen.
        token: What clients send as `Authorization: Bearer TOKEN`; None lets everybody in.
        tls_certificate: A file of PEM, for HTTPS.
        tls_key: Its key.
        max_tokens: The most new tokens that a request may ask for, and what it gets if it does not say.
        max_prompt: The most tokens of a prompt.
        max_body: The most bytes of a request; `largest` may be less.
        max_running: How many requests are computed at once.
        max_waiting: How many more may wait; others get 503.
        settle: Seconds between a signal to leave, when `/ready` turns 503, and the end of new connections.
        device_type: Where the model runs.
        key: A public key (PEM) that must have signed the package.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    token: str | None = field(default=None, repr=False)
    tls_certificate: Path | None = None
    tls_key: Path | None = None
    max_tokens: int = 1024
    max_prompt: int = 4096
    max_body: int = 1 << 20
    max_running: int = 16
    max_waiting: int = 64
    settle: float = 0.0
    device_type: str = "cpu"
    key: Path | None = None

    @property
    def largest(self) -> int:
        """Return the most bytes that a request may have: no more than a prompt of `max_prompt` tokens needs.

        The server splits a prompt into tokens before it can count them, and answers nobody else meanwhile.
        """
        return min(self.max_body, (64 + self.max_prompt) * 64)

    def check(self) -> None:
        """Raise `ServeError` if a value makes no sense."""
        for name in ("max_tokens", "max_prompt", "max_body", "max_running", "max_waiting", "settle"):
            least = 0 if name in ("max_waiting", "settle") else 1
            if not getattr(self, name) >= least:
                raise ServeError(f"{name} is {getattr(self, name)}; expected at least {least}")
        check_access(self.token, self.tls_certificate, self.tls_key)
