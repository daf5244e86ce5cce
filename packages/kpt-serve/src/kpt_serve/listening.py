"""Who reaches a server."""

import ipaddress
import logging


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
