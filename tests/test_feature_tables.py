"""Feature tables over HTTP: a device tier of 64 rows, a host tier of 256, and a file of 1000."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray

from tests import model_zoo
from tests.cache_fixtures import rows_of
from tests.serving import RunningServer, running_server

# 64 slots of 16 bytes; 256 of the host tier and 4 x 2 x 16 of staging.
SIZES = ("--table-memory", "1024", "--host-memory", "6144", "--max-lookup-keys", "16")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    repository = tmp_path_factory.mktemp("repository")
    model_zoo.feature_table(repository)
    model_zoo.feature_table(repository, "other", default_value=7.0)
    model_zoo.sum_features(repository, "feat")
    with running_server(repository, *SIZES) as running:
        yield running


def http_client(server: RunningServer) -> httpx.Client:
    return httpx.Client(base_url=server.url, timeout=60, trust_env=False)


@pytest.fixture
def client(server: RunningServer) -> Iterator[httpx.Client]:
    with http_client(server) as client:
        yield client


def look_up(client: httpx.Client, keys: Sequence[int], table: str = "feat") -> dict[str, Any]:
    answer = client.post(f"/v2/tables/{table}/lookup", json={"keys": list(keys)})
    assert answer.status_code == 200, answer.text
    result: dict[str, Any] = answer.json()
    return result


def infer(client: httpx.Client, keys: list[list[int]]) -> NDArray[np.float32]:
    tensor = {"name": "keys", "shape": [len(keys), len(keys[0])], "datatype": "INT64", "data": keys}
    answer = client.post("/v2/models/sum_features/infer", json={"inputs": [tensor]})
    assert answer.status_code == 200, answer.text
    outputs = {output["name"]: output for output in answer.json()["outputs"]}
    return np.array(outputs["rows"]["data"], np.float32).reshape(outputs["rows"]["shape"])


def metric(client: httpx.Client, name: str, **labels: str) -> float:
    text = ",".join(f'{label}="{value}"' for label, value in labels.items())
    (line,) = (
        line
        for line in client.get("/metrics").text.splitlines()
        if line.startswith(f"hotshelf_{name}{{{text}}} ")
    )
    return float(line.rsplit(" ", 1)[1])


def counts(client: httpx.Client) -> tuple[float, ...]:
    """Rows in both tiers, and evictions, of table `feat`."""
    return tuple(
        metric(client, name, table="feat", tier=tier)
        for name in ("table_rows", "table_evictions_total")
        for tier in ("device", "host")
    )


def test_rows_come_from_every_tier_and_are_the_same(client: httpx.Client) -> None:
    look_up(client, range(64))
    look_up(client, range(64, 128))  # the first 64 are spilled to the host
    seen: dict[str, int] = {}
    for keys in (range(64, 128), range(64), range(900, 964)):
        answer = look_up(client, keys)
        assert answer["rows"] == rows_of(keys).tolist()
        seen |= {tier: answer[tier] for tier in ("device", "host", "source") if answer[tier]}
    assert seen == {"device": 64, "host": 64, "source": 64}


@pytest.mark.parametrize("keys", [[7, 7], [7, 3, 7, 3, 7], [7] * 500, [5000, 7, 5000], []])
def test_repeated_keys_give_one_row_a_position(client: httpx.Client, keys: list[int]) -> None:
    """Cold, spilled to the host, and in the device tier."""
    expected = [[0.0] * 4 if key == 5000 else rows_of([key])[0].tolist() for key in keys]
    num_present = sum(key != 5000 for key in keys)
    num_rows = len({*keys} - {5000})
    look_up(client, range(300, 700))  # both keys leave both tiers
    for tier, evicted_by in (("source", None), ("host", range(100, 200)), ("device", None)):
        if evicted_by is not None:
            look_up(client, evicted_by)
        answer = look_up(client, keys)
        assert answer["rows"] == expected
        # The first position of a row says where it was; by the next one it is in the device tier.
        tiers = {"device": num_present - num_rows, "host": 0, "source": 0}
        tiers[tier] += num_rows
        assert {name: answer[name] for name in tiers} == tiers


def test_repeats_of_an_absent_row_count_as_hits(client: httpx.Client) -> None:
    look_up(client, range(300, 700))
    answer = look_up(client, [7, 3, 7, 3, 7])
    assert (answer["source"], answer["device"], answer["host"]) == (2, 3, 0)


def test_repeated_keys_over_the_requests_of_a_batch(client: httpx.Client) -> None:
    with ThreadPoolExecutor(8) as pool:
        batches = [[[n % 3, 7, n % 3]] for n in range(64)]
        for keys, rows in zip(batches, pool.map(lambda k: infer(client, k), batches), strict=True):
            np.testing.assert_array_equal(rows[0], rows_of(keys[0]))


def test_absent_keys_give_the_default_row_and_are_counted(client: httpx.Client) -> None:
    before = metric(client, "table_lookups_total", table="other", tier="absent")
    answer = look_up(client, [5, 1_234_567, 7, -1, 2**63 - 1], table="other")
    assert answer["absent"] == 3
    assert [answer["rows"][n] for n in (0, 2)] == rows_of([5, 7]).tolist()
    assert [answer["rows"][n] for n in (1, 3, 4)] == [[7.0] * 4] * 3
    assert look_up(client, [-5, -6], table="other")["rows"] == [[7.0] * 4] * 2
    after = metric(client, "table_lookups_total", table="other", tier="absent")
    assert after == before + 5


def test_absent_keys_evict_no_rows(client: httpx.Client) -> None:
    look_up(client, range(60))
    before = counts(client)
    look_up(client, range(10_000, 20_000))
    assert counts(client) == before
    assert look_up(client, range(60))["device"] == 60


@pytest.mark.parametrize("num_keys", [65, 500, 1000])
def test_a_lookup_larger_than_a_tier_works(client: httpx.Client, num_keys: int) -> None:
    keys = np.random.default_rng(num_keys).permutation(1000)[:num_keys].tolist()
    assert look_up(client, keys)["rows"] == rows_of(keys).tolist()
    np.testing.assert_array_equal(infer(client, [keys])[0], rows_of(keys))


def test_rows_in_use_are_not_evicted(server: RunningServer) -> None:
    """Sixteen clients, half through the model, ask for far more rows than the tiers hold."""

    def run(seed: int) -> None:
        random = np.random.default_rng(seed)
        with http_client(server) as client:
            for _ in range(200):
                keys = random.choice(1000, 48, replace=False).tolist()
                rows = infer(client, [keys])[0] if seed % 2 else look_up(client, keys)["rows"]
                np.testing.assert_array_equal(rows, rows_of(keys))

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(run, range(16)))
    with http_client(server) as client:
        for tier, num_slots in (("device", 64), ("host", 256)):
            rows = [
                metric(client, "table_rows", table=name, tier=tier) for name in ("feat", "other")
            ]
            assert sum(rows) <= num_slots
        assert metric(client, "slab_leases", slot_bytes="16") == 0


def test_a_row_file_that_became_short_fails_the_request_and_not_the_server(tmp_path: Path) -> None:
    table = model_zoo.feature_table(tmp_path)
    model_zoo.sum_features(tmp_path, "feat")
    with (
        running_server(tmp_path, *SIZES) as server,
        http_client(server) as client,
    ):
        look_up(client, range(10))
        with (table / "rows.bin").open("r+b") as file:
            file.truncate(16 * 500)
        answer = client.post("/v2/tables/feat/lookup", json={"keys": [3, 600]})
        assert answer.status_code == 500
        assert "row 600 of rows.bin: the file ends at byte 8000" in answer.json()["error"]
        assert look_up(client, [3, 400])["rows"] == rows_of([3, 400]).tolist()
        assert "WARNING server.errors: /v2/tables/feat/lookup: " in server.log()
        assert "Traceback" not in server.log()
