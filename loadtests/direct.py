"""GET requests that go straight to their server: a load test never measures a proxy."""

from __future__ import annotations

import urllib.request

_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def get(url: str, timeout_s: float) -> bytes:
    """The body of a 2xx answer; raises OSError for anything else."""
    with _OPENER.open(url, timeout=timeout_s) as response:
        body: bytes = response.read()
        return body
