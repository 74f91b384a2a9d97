"""The CUDA source, compiled for the CPU, and the CPU kernels give the bytes of plain NumPy."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.device import Pooling
from cache.kernel_launch import MAX_RESIDENT_THREADS, grid_blocks, group_lanes
from cache.plan import TIER_ABSENT, TIER_DEVICE, TIER_FILLED, TIER_HOST
from cache.row_format import RowFormat
from tests import cuda_shim
from tests.cuda_shim import KernelTrap, Shim, load_shim
from tests.kernel_plans import (
    CANARY,
    Case,
    OutputSpec,
    assert_equal,
    empty_case,
    random_case,
    read_word,
    reference,
    run_on_cpu,
    run_on_shim,
    words,
)

ROOT = Path(__file__).resolve().parents[1]
FAR = (1 << 33) + 7  # a number of slots, or words, whose bytes and number leave 32 bits
SLOT_BYTES = (16, 32, 48, 64, 112, 128, 256, 512, 528, 1024, 2048, 4096)

problem = cuda_shim.shim_problem()
pytestmark = pytest.mark.skipif(problem is not None, reason=f"{problem}")

each_format = pytest.mark.parametrize("row_format", RowFormat, ids=lambda found: found.value)
random_plans = given(slot_bytes=st.sampled_from(SLOT_BYTES), seed=st.integers(0, 1 << 32))


@pytest.fixture(scope="session")
def shim() -> Shim:
    return load_shim(is_debug=False)


@pytest.fixture(scope="session")
def debug_shim() -> Shim:
    return load_shim(is_debug=True)


@each_format
@random_plans
@settings(max_examples=60, deadline=None)
def test_both_implementations_do_what_the_plan_says(
    row_format: RowFormat, slot_bytes: int, seed: int
) -> None:
    case = random_case(np.random.default_rng(seed), row_format, slot_bytes)
    expected = reference(case)
    assert_equal(run_on_cpu(case), expected)
    assert_equal(run_on_shim(case, load_shim(False)), expected)
    assert_equal(run_on_shim(case, load_shim(True)), expected)  # and no check fails


@each_format
@random_plans
@settings(max_examples=25, deadline=None)
def test_a_group_with_several_rows_in_flight_writes_the_same(
    row_format: RowFormat, slot_bytes: int, seed: int
) -> None:
    """As in launches with more rows than the GPU has threads."""
    case = random_case(np.random.default_rng(seed), row_format, slot_bytes, max_units=300)
    for is_debug in (False, True):
        result = run_on_shim(case, load_shim(is_debug), max_resident_threads=0)
        assert_equal(result, reference(case))


@each_format
@random_plans
@settings(max_examples=15, deadline=None)
def test_slots_and_words_beyond_32_bits_are_found(
    row_format: RowFormat, slot_bytes: int, seed: int
) -> None:
    case = random_case(np.random.default_rng(seed), row_format, slot_bytes, max_units=80)
    expected = reference(case)
    assert_equal(run_on_cpu(case, slot_shift=FAR), expected)
    for max_threads in (0, MAX_RESIDENT_THREADS):
        result = run_on_shim(
            case, load_shim(False), slot_shift=FAR, word_shift=FAR, max_resident_threads=max_threads
        )
        assert_equal(result, expected)


@each_format
@random_plans
@settings(max_examples=15, deadline=None)
def test_the_order_of_the_threads_does_not_matter(
    row_format: RowFormat, slot_bytes: int, seed: int
) -> None:
    case = random_case(np.random.default_rng(seed), row_format, slot_bytes)
    first, *others = (run_on_shim(case, load_shim(False), order) for order in range(5))
    for other in others:
        assert_equal(other, first)


def test_a_large_batch_has_several_rows_in_flight(shim: Shim) -> None:
    random = np.random.default_rng(1)
    case = random_case(random, RowFormat.FLOAT32, 512, max_outputs=0)
    num_reads = MAX_RESIDENT_THREADS // 32 + 77
    reads = np.array([read_word(TIER_HOST, int(case.fills[0, 1]))] * num_reads)
    case = replace(case, reads=reads, outputs=(OutputSpec(128, (1,) * num_reads),))
    assert grid_blocks(num_reads, 0, 512) == -(-num_reads // 4 // 8)
    assert_equal(run_on_shim(case, shim), reference(case))


def assert_done(case: Case) -> None:
    expected = reference(case)
    assert_equal(run_on_cpu(case), expected)
    for is_debug, max_threads in itertools.product((False, True), (0, MAX_RESIDENT_THREADS)):
        result = run_on_shim(case, load_shim(is_debug), max_resident_threads=max_threads)
        assert_equal(result, expected)


@each_format
def test_plans_of_one_kind_of_operation(row_format: RowFormat) -> None:
    case = empty_case(row_format)
    assert_done(case)
    assert_done(replace(case, fills=words((3, 1, -1), (5, 1, 2), (0, 7, 0))))
    assert_done(replace(case, moves=words((3, 1), (3, 2), (4, 0))))
    assert_done(replace(case, outputs=(OutputSpec(3, ()), OutputSpec(4, (), Pooling.SUM))))
    assert_done(replace(case, outputs=(OutputSpec(5, (0, 0, 0), Pooling.MEAN),)))
    device_slot = read_word(TIER_DEVICE, 6)
    duplicates = OutputSpec(16, (1,) * 9)
    assert_done(replace(case, reads=words(*(device_slot,) * 9).ravel(), outputs=(duplicates,)))
    absent = np.array([read_word(TIER_ABSENT, table) for table in (1, 0, 1)], dtype=np.int64)
    assert_done(replace(case, reads=absent, outputs=(OutputSpec(7, (2, 1), Pooling.MEAN),)))


def test_each_position_and_column_goes_to_its_place(shim: Shim) -> None:
    """Bags between empty ones, in outputs of other widths and poolings, one with odd addresses."""
    case = empty_case(RowFormat.FLOAT32, 32)
    rows = np.arange(8 * 8, dtype=np.float32).reshape(8, 8)
    case = replace(
        case,
        device=rows.view(np.uint8),
        reads=np.array([read_word(TIER_DEVICE, slot) for slot in range(8)], dtype=np.int64),
        outputs=(
            OutputSpec(3, (1, 1)),
            OutputSpec(8, (0, 2, 0, 1), Pooling.SUM),
            OutputSpec(5, (3, 0), Pooling.MEAN, shift=1),
        ),
    )
    zeros = np.zeros(8)
    expected = (
        rows[:2, :3],
        np.array([zeros, rows[2] + rows[3], zeros, rows[4]]),
        np.array([rows[5:8, :5].mean(axis=0), zeros[:5]]),
    )
    for result in (run_on_shim(case, shim), run_on_cpu(case)):
        for output, values in zip(result.outputs, expected, strict=True):
            is_row = output != CANARY
            assert output[is_row].tolist() == values.ravel().tolist()
            assert not is_row[:24].any()
            assert not is_row[-24:].any()


def test_sums_run_from_left_to_right(shim: Shim) -> None:
    """In another order, or in double precision, the small addends would count."""
    case = empty_case(RowFormat.FLOAT32, 16)
    addends = [1e8, 1.0, 1.0, 1.0, 1.0, -1e8, 3.0, 2.0**-24]
    device = np.repeat(np.array(addends, dtype=np.float32), 4).view(np.uint8).reshape(8, 16)
    reads = np.array([read_word(TIER_DEVICE, slot) for slot in range(8)], dtype=np.int64)
    case = replace(case, device=device, reads=reads, outputs=(OutputSpec(4, (8,), Pooling.SUM),))
    for result in (run_on_shim(case, shim), run_on_cpu(case)):
        assert result.outputs[0][24:28].tolist() == [3.0] * 4


@pytest.mark.parametrize("row_format", [RowFormat.FLOAT16, RowFormat.BFLOAT16])
def test_every_half_precision_value_is_exact(row_format: RowFormat, shim: Shim) -> None:
    case = empty_case()
    values = np.arange(1 << 16, dtype=np.uint16).reshape(32, 2048)
    reads = np.array([read_word(TIER_DEVICE, slot) for slot in range(32)], dtype=np.int64)
    case = replace(
        case, row_format=row_format, device=values.view(np.uint8), device_scales=np.zeros(32, "f4"),
        host=np.zeros((1, 4096), np.uint8), reads=reads, outputs=(OutputSpec(2048, (1,) * 32),),
    )  # fmt: skip
    is_half = row_format is RowFormat.FLOAT16
    with np.errstate(invalid="ignore"):  # signalling NaNs
        exact = values.view(np.float16 if is_half else ml_dtypes.bfloat16).astype(float).ravel()
    for result in (run_on_cpu(case), run_on_shim(case, shim)):
        assert_equal(result, reference(case))
        floats = result.outputs[0][24:-24]
        with np.errstate(invalid="ignore"):
            np.testing.assert_array_equal(floats.astype(float), exact)
        bits = floats.view(np.uint32)[np.isnan(exact)]
        expected = values.ravel()[np.isnan(exact)].astype(np.uint32)
        np.testing.assert_array_equal(bits >> 31, expected >> 15)
        num_bits = 10 if is_half else 7
        payload = (1 << num_bits) - 1
        np.testing.assert_array_equal((bits & 0x7FFFFF) >> (23 - num_bits), expected & payload)


def test_every_int8_value_is_multiplied_by_the_scale_of_its_slot(shim: Shim) -> None:
    values = np.arange(-128, 128, dtype=np.int8).reshape(16, 16)
    scales = np.arange(1, 17, dtype=np.float32) / np.float32(7)
    case = replace(
        empty_case(RowFormat.INT8, 16), device=values.view(np.uint8), device_scales=scales,
        reads=np.array([read_word(TIER_DEVICE, slot) for slot in range(16)], dtype=np.int64),
        outputs=(OutputSpec(16, (1,) * 16),),
    )  # fmt: skip
    expected = values.astype(np.float32) * scales[:, None]
    for result in (run_on_cpu(case), run_on_shim(case, shim)):
        assert result.outputs[0][24:-24].tolist() == expected.ravel().tolist()


def broken_plans() -> dict[str, Case]:
    """One plan for each rule that it breaks; all but that is as it should be."""
    case = replace(
        empty_case(),
        reads=np.array([read_word(TIER_DEVICE, 1), read_word(TIER_HOST, 2)], dtype=np.int64),
        outputs=(OutputSpec(16, (1, 1)),),
    )
    pooled = replace(case, outputs=(OutputSpec(16, (0, 2), Pooling.SUM),))
    return {
        "two fills of a slot": replace(case, fills=words((4, 1, -1), (4, 3, -1))),
        "a fill of a slot that is read": replace(case, fills=words((1, 1, -1))),
        "a fill of a slot that is pooled": replace(pooled, fills=words((1, 1, -1))),
        "a fill of a slot that is moved": replace(
            case, fills=words((5, 1, -1)), moves=words((5, 6))
        ),
        "a fill of a slot that is moved to": replace(
            case, fills=words((5, 1, -1)), moves=words((0, 5))
        ),
        "a move to a slot that is read": replace(case, moves=words((0, 1))),
        "two moves to a slot": replace(case, moves=words((0, 5), (2, 5))),
        "a move to itself": replace(case, moves=words((5, 5))),
        "a spill to a slot that is read": replace(case, fills=words((4, 1, 2))),
        "a spill to a slot that is pooled": replace(pooled, fills=words((4, 1, 2))),
        "a spill to a slot that is filled from": replace(case, fills=words((4, 1, 1))),
        "two spills to a slot": replace(case, fills=words((4, 1, 5), (6, 1, 5))),
        "two reads of a fill": replace(
            case, reads=words(*(read_word(TIER_FILLED, 0),) * 2).ravel(), fills=words((4, 1, -1))
        ),
        "a fill by a read of a slot that is read": replace(
            case,
            reads=words(read_word(TIER_DEVICE, 1), read_word(TIER_FILLED, 0)).ravel(),
            fills=words((1, 2, -1)),
        ),
    }


@pytest.mark.parametrize("name", broken_plans())
def test_the_debug_build_traps_where_a_plan_breaks_a_rule(
    name: str, shim: Shim, debug_shim: Shim
) -> None:
    case = broken_plans()[name]
    for seed in range(20):  # whichever of the two comes first
        with pytest.raises(KernelTrap):
            run_on_shim(case, debug_shim, seed)
    run_on_shim(case, shim)  # the release build looks at nothing


def test_threads_of_python_launch_at_once(shim: Shim) -> None:
    """Each has thread and block numbers of its own."""
    case = random_case(np.random.default_rng(3), RowFormat.FLOAT16, 128, max_units=300)
    expected = reference(case)
    with ThreadPoolExecutor(4) as pool:
        for result in pool.map(lambda seed: run_on_shim(case, shim, seed), range(40)):
            assert_equal(result, expected)


def test_a_grid_has_a_thread_for_every_16_bytes_of_a_slot() -> None:
    lanes = [group_lanes(slot_bytes) for slot_bytes in (16, 32, 48, 64, 512, 528, 4096)]
    assert lanes == [1, 2, 4, 4, 32, 32, 32]
    assert grid_blocks(0, 0, 16) == 0
    assert grid_blocks(256, 0, 16) == grid_blocks(0, 256, 16) == 1
    assert grid_blocks(64, 1, 64) == 2  # copies and rows do not share a warp
    assert grid_blocks(1 << 20, 0, 512) == (1 << 20) // 4 // 8


SANITIZED = """
import numpy as np
from cache.row_format import RowFormat
from tests.cuda_shim import load_shim
from tests.kernel_plans import assert_equal, random_case, reference, run_on_shim

shim = load_shim(is_debug=False, sanitize=True)
for seed in range(40):
    random = np.random.default_rng(seed)
    slot_bytes = (16, 48, 64, 528, 4096)[seed % 5]
    case = random_case(random, list(RowFormat)[seed % 4], slot_bytes, max_units=(20, 300)[seed % 2])
    result = run_on_shim(case, shim, seed, max_resident_threads=(1 << 17, 0)[seed // 8 % 2])
    assert_equal(result, reference(case))
print("all equal")
"""

OFF_BY_ONE = """
import os
from dataclasses import replace
from tests.cuda_shim import load_shim
from tests.kernel_plans import OutputSpec, empty_case, run_on_shim, words

shim = load_shim(is_debug=False, sanitize=True)
case = empty_case()  # of 8 slots a tier
for plan in (
    replace(case, reads=words(8 << 3), outputs=(OutputSpec(16, (1,)),)),
    replace(case, reads=words(8 << 3 | 1), outputs=(OutputSpec(16, (1,)),)),
    replace(case, fills=words((8, 1, -1))),
    replace(case, fills=words((1, 8, -1))),
    replace(case, fills=words((1, 2, 8))),
    replace(case, moves=words((1, 8))),
    replace(case, reads=words(4), fills=words((1, 8, -1)), outputs=(OutputSpec(16, (1,)),)),
    case,
):
    child = os.fork()  # the sanitizer ends the process
    if child == 0:
        run_on_shim(plan, shim)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0)
"""


def run_sanitized(code: str) -> subprocess.CompletedProcess[str]:
    environment = cuda_shim.sanitizer_environment()
    if environment is None:
        pytest.skip("there is no g++ with AddressSanitizer")
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=os.environ | environment,
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_no_kernel_touches_what_is_not_its_own() -> None:
    done = run_sanitized(SANITIZED)
    assert (done.returncode, done.stdout) == (0, "all equal\n"), done.stderr


def test_the_sanitizer_sees_a_slot_one_past_the_end() -> None:
    done = run_sanitized(OFF_BY_ONE)
    assert done.stdout.split() == ["True"] * 7 + ["False"], done.stderr
    assert done.stderr.count("ERROR: AddressSanitizer: heap-buffer-overflow") == 7
