"""A closed loop: a few connections that each send the next rows as soon as they have an answer.

It warms the cache and probes what the server can do. It is never used for latency figures, because
a closed loop sends less while the server is slow.
"""

from __future__ import annotations

import http.client
import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from loadtests.encoding import Encoder
from loadtests.workloads import NUM_DENSE, Workload


class ReplayError(Exception):
    """The server did not answer a replayed request with 200."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """What a replay did."""

    num_requests: int
    elapsed_s: float


def replay(
    port: int,
    model: str,
    workload: Workload,
    *,
    first_sample: int,
    last_sample: int,
    rows_per_request: int,
    num_connections: int,
    watch: Callable[[], bool],
) -> Replayed:
    """Send samples [first, last) of the trace as fast as the server answers.

    `watch` is called again and again on the calling thread, blocks as it likes, and returns True to
    end the replay early. Raises ReplayError at the first answer that is no 200.
    """
    num_requests = max(0, (last_sample - first_sample) // rows_per_request)
    encoder = Encoder(
        rows=rows_per_request,
        num_tables=workload.keys.shape[1],
        num_dense=NUM_DENSE,
        is_binary=True,
    )
    numbers = itertools.count()  # next() of a count is atomic
    faults: list[str] = []
    sent: list[int] = []
    is_over = threading.Event()

    def connection() -> None:
        client = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        try:
            while not is_over.is_set() and (number := next(numbers)) < num_requests:
                first = first_sample + number * rows_per_request
                body = encoder.body(*workload.rows(first, rows_per_request))
                client.request("POST", f"/v2/models/{model}/infer", body, encoder.headers)
                response = client.getresponse()
                content = response.read()
                if response.status != 200:
                    faults.append(f"a replayed request got {response.status}: {content[:500]!r}")
                    break
                sent.append(number)
        except (OSError, http.client.HTTPException) as error:
            faults.append(f"a replayed request failed: {error!r}")
        finally:
            client.close()

    threads = [threading.Thread(target=connection) for _ in range(num_connections)]
    start_s = time.perf_counter()
    for thread in threads:
        thread.start()
    try:
        while not faults and any(thread.is_alive() for thread in threads):
            if watch():
                break
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
    elapsed_s = time.perf_counter() - start_s
    if faults:
        raise ReplayError(faults[0])
    return Replayed(len(sent), elapsed_s)
