"""Brings a server's cache to where a long replay would leave it, without the replay.

An LRU cache holds the rows that were asked for last, oldest first out. So it is enough to look up
the most recent distinct rows of the trace, as many as fit: the older half, then the newer half,
each sorted by row, so that the server reads the row file in long pieces.
"""

from __future__ import annotations

import http.client
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import orjson
from numpy.typing import NDArray

from loadtests.closed_loop import ReplayError
from loadtests.encoding import HEADER_LENGTH

NUM_THREADS = 4
MAX_KEYS = 8192  # in a lookup: the server limits the bytes of an answer

Keys = NDArray[np.int64]


def recent_rows(keys: Keys, max_rows: int) -> list[list[Keys]]:
    """The `max_rows` distinct (table, row) of `keys` [n, num_tables] that were accessed last.

    Returns steps from the oldest to the newest; a step has the rows of each table, ascending. Where
    all distinct rows are asked for there is one step, since an order matters only to eviction.
    """
    num_tables = keys.shape[1]
    rows, ages, tables = [], [], []
    for table in range(num_tables):
        distinct, age = np.unique(keys[::-1, table], return_index=True)
        rows.append(distinct)
        ages.append(age)
        tables.append(np.full(len(distinct), table))
    order = np.argsort(np.concatenate(ages), kind="stable")[:max_rows][::-1]
    all_rows, all_tables = np.concatenate(rows)[order], np.concatenate(tables)[order]
    steps = []
    for part in np.array_split(np.arange(len(order)), 2 if len(order) == max_rows else 1):
        step_rows, step_tables = all_rows[part], all_tables[part]
        steps.append([np.sort(step_rows[step_tables == table]) for table in range(num_tables)])
    return steps


def preload(port: int, tables: Sequence[str], steps: Sequence[Sequence[Keys]]) -> None:
    """Look up the rows of every step; raises ReplayError at an answer that is no 200."""
    with ThreadPoolExecutor(NUM_THREADS) as executor:
        for step in steps:
            asked = [
                (table, keys[first : first + MAX_KEYS])
                for table, keys in zip(tables, step, strict=True)
                for first in range(0, len(keys), MAX_KEYS)
            ]
            list(executor.map(lambda pair: _look_up(port, *pair), asked))


def _look_up(port: int, table: str, keys: Keys) -> None:
    size = {"binary_data_size": keys.nbytes}
    tensor = {"name": "keys", "datatype": "INT64", "shape": [len(keys)], "parameters": size}
    outputs = [{"name": "rows", "parameters": {"binary_data": True}}]
    head = orjson.dumps({"inputs": [tensor], "outputs": outputs})
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        headers = {HEADER_LENGTH: str(len(head)), "Content-Type": "application/octet-stream"}
        client.request("POST", f"/v2/tables/{table}/lookup", head + keys.tobytes(), headers)
        response = client.getresponse()
        content = response.read()
    except (OSError, http.client.HTTPException) as error:
        raise ReplayError(f"a lookup in {table} failed: {error!r}") from error
    finally:
        client.close()
    if response.status != 200:
        raise ReplayError(f"a lookup in {table}: status {response.status}, {content[:500]!r}")
