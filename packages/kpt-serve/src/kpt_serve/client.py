"""A client of the Open Inference Protocol v2 that asks again when servers come and go; it needs numpy alone."""

import http.client
import json
import random
import time
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote, urlsplit

import numpy as np
from numpy.typing import NDArray

Arrays = Mapping[str, NDArray[Any]]
_LENGTH = "Inference-Header-Content-Length"
_KINDS = {"UINT": ("u", (1, 2, 4, 8)), "INT": ("i", (1, 2, 4, 8)), "FP": ("f", (2, 4, 8))}
_DTYPES = {f"{word}{8 * size}": np.dtype(f"<{kind}{size}") for word, (kind, sizes) in _KINDS.items() for size in sizes}
_DTYPES["BOOL"] = np.dtype(bool)
_DATATYPES = {dtype: word for word, dtype in _DTYPES.items()}
_FIRST, _LONGEST = 0.05, 2.0  #: seconds of the first wait, which doubles, and of the longest one


class InferenceError(Exception):
    """A request that got no result; `status` is the code of the last answer, None if there was none."""

    def __init__(self, text: str, status: int | None = None) -> None:
        super().__init__(text)
        self.status = status


class _Again(Exception):
    """A failure that another try may mend, and the seconds that the server asks to wait."""

    def __init__(self, text: str, status: int | None = None, wait: float = 0.0) -> None:
        super().__init__(text)
        self.status, self.wait = status, wait


class Client:
    """Ask servers of one model, and ask again when one is busy, gone or silent: an inference may run twice.

    A client keeps one connection, so each thread needs its own. After a failure it asks the next address.

    Args:
        *urls: Where the servers listen, as in `http://10.0.0.1:8000`.
        token: What they expect, None for nothing.
        timeout: Seconds in which a server must connect and answer, before it is asked again.
        deadline: Seconds in which `infer` returns or raises, all tries and waits together.
    """

    def __init__(self, *urls: str, token: str | None = None, timeout: float = 10.0, deadline: float = 60.0) -> None:
        self._urls = [urlsplit(url) for url in urls]
        if not urls or not all(url.scheme in ("http", "https") and url.hostname for url in self._urls):
            raise ValueError(f"the addresses are {', '.join(urls) or 'none'}; expected some as http://10.0.0.1:8000")
        self._headers = {"Authorization": f"Bearer {token}"} if token is not None else {}
        self._timeout, self._deadline = timeout, deadline
        self._place = random.randrange(len(urls))  # so that many clients don't all ask the first one
        self._connection: http.client.HTTPConnection | None = None
        self.retries = 0  #: tries that failed and were made again

    def infer(self, name: str, inputs: Arrays, outputs: Sequence[str] = ()) -> dict[str, NDArray[Any]]:
        """Return the named outputs of a model, all if none is named.

        Raises:
            InferenceError: The request is refused, the model failed, or the deadline has passed.
        """
        body, headers = _request(inputs, outputs)
        until, longest = time.monotonic() + self._deadline, _FIRST
        while True:
            try:
                return self._ask(name, body, headers | self._headers, until - time.monotonic())
            except _Again as failure:
                self.close()
                self._place = (self._place + 1) % len(self._urls)
                # By chance, or those whom one failure hit would all come back at the same moment.
                wait = max(failure.wait, random.uniform(longest / 2, longest))
                if time.monotonic() + wait >= until:
                    text = f"no result within {self._deadline:g} seconds; the last try: {failure}"
                    raise InferenceError(text, failure.status) from failure
            time.sleep(wait)
            self.retries += 1
            longest = min(2 * longest, _LONGEST)

    def close(self) -> None:
        """Close the connection; the next request makes another one."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _ask(self, name: str, body: bytes, headers: Mapping[str, str], left: float) -> dict[str, NDArray[Any]]:
        url, timeout = self._urls[self._place], max(0.001, min(self._timeout, left))
        try:
            if self._connection is None:
                made = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
                self._connection = made(url.netloc.rpartition("@")[2], timeout=timeout)
            elif self._connection.sock is not None:
                self._connection.sock.settimeout(timeout)
            path = f"{url.path.rstrip('/')}/v2/models/{quote(name, safe='')}/infer"
            self._connection.request("POST", path, body, dict(headers))
            answer = self._connection.getresponse()
            content, status = answer.read(), answer.status
        except (OSError, http.client.HTTPException) as error:
            raise _Again(f"{url.netloc}: {type(error).__name__}: {error}") from error
        if status == 200:
            return _results(content, answer.headers.get(_LENGTH))
        is_json = (answer.headers.get_content_type() or "") == "application/json"
        text = f"{url.netloc} answers {status}: {content[:300].decode(errors='replace')}"
        # A model that failed says so in JSON and would fail again; a proxy whose server died answers 500 in text.
        if status in (502, 503, 504) or (status == 500 and not is_json):
            asked = answer.headers.get("Retry-After", "")
            raise _Again(text, status, float(asked) if asked.isdecimal() else 0.0)
        raise InferenceError(text, status)


def _request(inputs: Arrays, outputs: Sequence[str]) -> tuple[bytes, dict[str, str]]:
    """Return a request's body, arrays as bytes behind the JSON, and its headers."""
    entries, parts = [], []
    for name, array in inputs.items():
        dtype = array.dtype.newbyteorder("<")
        if dtype not in _DATATYPES:
            raise ValueError(f"input {name!r} is an array of {array.dtype}; expected one of {', '.join(_DTYPES)}")
        parts.append(array.astype(dtype, copy=False).tobytes())
        size = {"binary_data_size": len(parts[-1])}
        entries.append({"name": name, "datatype": _DATATYPES[dtype], "shape": array.shape, "parameters": size})
    document: dict[str, Any] = {"inputs": entries, "parameters": {"binary_data_output": True}}
    if outputs:
        document["outputs"] = [{"name": name, "parameters": {"binary_data": True}} for name in outputs]
    header = json.dumps(document).encode()
    kind = {"Content-Type": "application/octet-stream", _LENGTH: str(len(header))}
    return b"".join([header, *parts]), kind


def _results(content: bytes, length: str | None) -> dict[str, NDArray[Any]]:
    place = int(length) if length is not None else len(content)
    results = {}
    for output in json.loads(content[:place])["outputs"]:
        dtype = _DTYPES.get(output["datatype"])
        if dtype is None:
            raise InferenceError(f"output {output['name']!r} is of {output['datatype']}, for which numpy has no dtype")
        size = output.get("parameters", {}).get("binary_data_size")
        if size is None:
            array = np.array(output["data"], dtype)
        else:
            array = np.frombuffer(bytearray(content[place : place + size]), dtype)
            place += size
        results[output["name"]] = array.reshape(output["shape"])
    return results
