"""The protocol's bodies: what is accepted comes back exact, and every fault is named."""

from __future__ import annotations

import contextlib
import json
import struct
from typing import Any

import ml_dtypes
import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from models.tensor_spec import DATATYPE_TO_DTYPE, TensorSpec
from server.errors import InvalidRequestError
from server.oip_decode import decode_request
from server.oip_encode import EncodedResponse, encode_response
from server.requests import InferenceRequest, InferenceResponse, RequestedOutput

SPEC_FP32 = TensorSpec("x", "FP32", (-1, 4))
OUTPUT = TensorSpec("y", "FP32", (-1, 4))
INTEGERS = ["UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64"]
FIXED_SIZE = [datatype for datatype in DATATYPE_TO_DTYPE if datatype != "BYTES"]


def decode(
    message: object,
    *blobs: bytes,
    specs: tuple[TensorSpec, ...] = (SPEC_FP32,),
    outputs: tuple[TensorSpec, ...] = (OUTPUT,),
    header_length: int | None = None,
    max_batch_size: int = 8,
) -> InferenceRequest:
    header = message if isinstance(message, bytes) else orjson.dumps(message)
    if header_length is None and blobs:
        header_length = len(header)
    return decode_request(b"".join((header, *blobs)), header_length, specs, outputs, max_batch_size)


def json_input(datatype: str, shape: object, data: object, name: str = "x") -> dict[str, object]:
    return {"name": name, "datatype": datatype, "shape": shape, "data": data}


def binary_input(datatype: str, shape: object, size: object, name: str = "x") -> dict[str, object]:
    parameters = {"binary_data_size": size}
    return {"name": name, "datatype": datatype, "shape": shape, "parameters": parameters}


def decode_x(datatype: str, data: list[object]) -> NDArray[Any]:
    """Decode one input `x` of one dimension given as JSON."""
    spec = TensorSpec("x", datatype, (-1,))
    request = decode(
        {"inputs": [json_input(datatype, [len(data)], data)]}, specs=(spec,), max_batch_size=64
    )
    return np.asarray(request.inputs["x"])


def fault(message: object, *blobs: bytes, **options: Any) -> str:
    with pytest.raises(InvalidRequestError) as caught:
        decode(message, *blobs, **options)
    return str(caught.value)


# ---- JSON values


@pytest.mark.parametrize("datatype", INTEGERS)
def test_integers_are_exact_to_their_limits(datatype: str) -> None:
    limits = np.iinfo(DATATYPE_TO_DTYPE[datatype])  # type: ignore[type-var]
    array = decode_x(datatype, [int(limits.min), int(limits.max), 7])
    assert array.tolist() == [limits.min, limits.max, 7]
    assert array.dtype == DATATYPE_TO_DTYPE[datatype]


def test_neighbours_above_two_to_the_53_stay_apart() -> None:
    keys: list[object] = [9007199254740992, 9007199254740993, -9007199254740993]
    assert decode_x("INT64", keys).tolist() == keys


@pytest.mark.parametrize(
    ("datatype", "text", "shown"),
    [
        ("UINT8", "256", "256"),
        ("UINT8", "-1", "-1"),
        ("INT8", "-129", "-129"),
        ("INT32", "2147483648", "2147483648"),
        ("INT64", "9223372036854775808", "9223372036854775808"),
        ("INT64", "18446744073709551616", "1.8446744073709552e19"),
        ("UINT64", "-1", "-1"),
        ("INT32", "1.5", "1.5"),
        ("INT32", "1.0", "1.0"),
        ("INT32", '"3"', '"3"'),
        ("INT32", "true", "true"),
        ("INT32", "null", "null"),
        ("BOOL", "2", "2"),
        ("BOOL", "1", "1"),
        ("FP32", "1e39", "1e39"),
        ("FP32", "-3.5e38", "-3.5e38"),
        ("FP32", "null", "null"),
        ("FP32", "true", "true"),
        ("FP32", '"1"', '"1"'),
        ("FP64", "[1]", "[1]"),
        ("BYTES", "1", "1"),
    ],
)
def test_values_that_do_not_fit_are_named(datatype: str, text: str, shown: str) -> None:
    good = {"BOOL": "true", "BYTES": '"a"'}.get(datatype, "1")
    body = (
        f'{{"inputs":[{{"name":"x","datatype":"{datatype}","shape":[2],"data":[{good},{text}]}}]}}'
    )
    error = fault(body.encode(), specs=(TensorSpec("x", datatype, (-1,)),))
    assert error.startswith("input 'x': expected ")
    assert error.replace("e+", "e").endswith(f"got {shown}")


@pytest.mark.parametrize("text", ["1e400", "NaN", "Infinity", "[1", "", "\xff"])
def test_what_is_not_json(text: str) -> None:
    body = f'{{"inputs":[{{"name":"x","datatype":"FP32","shape":[1,1],"data":[{text}]}}]'
    assert fault(body.encode("latin-1")).startswith("the request is not valid JSON: ")


def test_fp32_is_the_nearest_number() -> None:
    values: list[object] = [0.1, 16777217, 3.4028234663852886e38, 1e-45, -0.0, 2**63]
    assert decode_x("FP32", values).tobytes() == np.array(values, np.float32).tobytes()


def test_bool_and_bytes() -> None:
    assert decode_x("BOOL", [True, False]).tolist() == [True, False]
    assert decode_x("BYTES", ["a", "é", ""]).tolist() == [b"a", "é".encode(), b""]


@pytest.mark.parametrize("datatype", ["FP16", "BF16"])
def test_half_precision_in_json_is_refused(datatype: str) -> None:
    spec = TensorSpec("x", datatype, (-1,))
    error = fault({"inputs": [json_input(datatype, [1], [1.5])]}, specs=(spec,))
    assert error == f"input 'x': {datatype} has no JSON form; send it as binary data"


@pytest.mark.parametrize("datatype", ["FLOAT16", "fp32", "INT32", None, 7, ["FP32"]])
def test_other_datatypes(datatype: object) -> None:
    error = fault({"inputs": [{"name": "x", "datatype": datatype, "shape": [1, 4], "data": []}]})
    assert error.startswith(f"input 'x': expected datatype FP32, got {json.dumps(datatype)}")
    assert ("case-sensitive" in error) == (datatype != "INT32")


# ---- shapes


@pytest.mark.parametrize("data", [[1, 2, 3, 4, 5, 6, 7, 8], [[1, 2, 3, 4], [5, 6, 7, 8]]])
def test_flat_and_nested_data_are_the_same(data: object) -> None:
    request = decode({"inputs": [json_input("FP32", [2, 4], data)]})
    assert request.inputs["x"].tolist() == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert request.num_rows == 2


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ([1, 2, 3, 4, 5, 6, 7], "expected 8 values for shape [2, 4], got 7"),
        ([1, 2, 3, 4, 5, 6, 7, 8, 9], "expected 8 values for shape [2, 4], got 9"),
        ([[1, 2, 3, 4], [5, 6, 7]], "flat or nested as [2, 4]"),
        ([[1, 2], [3, 4], [5, 6], [7, 8]], "flat or nested as [2, 4]"),
        ([[1, 2, 3, 4], 5, 6, 7, 8], "flat or nested as [2, 4]"),
        ([1, 2, 3, 4, 5, 6, 7, [8]], "expected numbers for FP32, got [8]"),
        ([[[1], [2], [3], [4]], [[5], [6], [7], [8]]], "expected numbers for FP32, got [1]"),
        ({}, "expected a list as 'data', got {}"),
        (None, "expected a list as 'data', got null"),
        ("abc", "expected a list as 'data', got \"abc\""),
    ],
)
def test_data_that_does_not_fit_the_shape(data: object, text: str) -> None:
    error = fault({"inputs": [json_input("FP32", [2, 4], data)]})
    assert error.startswith("input 'x': ")
    assert text in error


@pytest.mark.parametrize(
    "shape",
    [
        [-1, 4],
        [2, -4],
        "-1",
        ["2", 4],
        [2.0, 4],
        [2.5, 4],
        [True, 4],
        [4294967296, 4294967296],
        [9223372036854775807, 4],
        [18446744073709551615, 4],
        [],
        [1] * 10000,
        None,
        [1, 2, 2],
        [8],
        [2, 5],
        {"a": 1},
    ],
)
def test_wrong_shapes(shape: object) -> None:
    error = fault({"inputs": [json_input("FP32", shape, [1, 2, 3, 4, 5, 6, 7, 8])]})
    assert error.startswith("input 'x': ")
    assert len(error) < 300


@pytest.mark.parametrize(
    "shape", [[4294967296, 4294967296], [0, 2**63 - 1], [2**63, 0], [1, 2**40], [2**48, 2]]
)
def test_huge_free_dimensions_take_no_memory(shape: list[int]) -> None:
    spec = TensorSpec("x", "FP32", (-1, -1))
    error = fault({"inputs": [json_input("FP32", shape, [])]}, specs=(spec,), max_batch_size=0)
    assert error.startswith("input 'x': ")


def test_shape_and_data_left_out() -> None:
    assert "got null" in fault({"inputs": [{"name": "x", "datatype": "FP32", "shape": [2, 4]}]})
    assert "got null" in fault({"inputs": [{"name": "x", "datatype": "FP32", "data": []}]})


def test_zero_rows() -> None:
    request = decode({"inputs": [json_input("FP32", [0, 4], [])]})
    assert request.inputs["x"].shape == (0, 4)
    assert request.num_rows == 0
    request = decode({"inputs": [binary_input("FP32", [0, 4], 0)]}, b"")
    assert request.inputs["x"].shape == (0, 4)


def test_more_rows_than_max_batch_size() -> None:
    message = {"inputs": [json_input("FP32", [9, 4], [0] * 36)]}
    assert fault(message) == "input 'x': expected at most 8 rows (max_batch_size), got 9"
    assert decode(message, max_batch_size=0).num_rows == 1


def test_all_inputs_have_the_same_rows() -> None:
    specs = (SPEC_FP32, TensorSpec("z", "INT32", (-1,)))
    inputs = [json_input("FP32", [1, 4], [0] * 4), json_input("INT32", [2], [1, 2], "z")]
    assert fault({"inputs": inputs}, specs=specs) == (
        "input 'z': expected 1 rows like input 'x', got 2"
    )


# ---- structure


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ([], "the request: expected a JSON object, got []"),
        ({}, "'inputs': expected a list of tensors, got null"),
        ({"inputs": {}}, "'inputs': expected a list of tensors, got {}"),
        ({"inputs": [3]}, "'inputs': expected an object, got 3"),
        ({"inputs": []}, "input 'x' is missing"),
        ({"inputs": [{}]}, "input: expected a string as 'name', got null"),
        ({"inputs": [{"name": ["x"]}]}, "input: expected a string as 'name', got [\"x\"]"),
        ({"inputs": [{"name": "q"}]}, "unknown input \"q\": the model has 'x'"),
        ({"inputs": [], "parameters": 3}, "the request: 'parameters': expected an object, got 3"),
    ],
)
def test_wrong_structure(message: object, text: str) -> None:
    assert fault(message) == text


GOOD = json_input("FP32", [1, 4], [1, 2, 3, 4])


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"id": 7}, "'id': expected a string, got 7"),
        ({"inputs": [GOOD, GOOD]}, "input 'x' is given more than once"),
        ({"outputs": {}}, "'outputs': expected a list of tensors, got {}"),
        ({"outputs": [{"name": "q"}]}, "unknown output \"q\": the model has 'y'"),
        ({"outputs": [{"name": "y"}, {"name": "y"}]}, "output 'y' is requested more than once"),
        (
            {"outputs": [{"name": "y", "parameters": {"classification": 3}}]},
            "output 'y': 'classification' is not supported",
        ),
        (
            {"outputs": [{"name": "y", "parameters": {"shared_memory_region": "r"}}]},
            "output 'y': shared memory is not supported",
        ),
        (
            {"outputs": [{"name": "y", "parameters": {"binary_data": 1}}]},
            "output 'y': 'binary_data': expected true or false, got 1",
        ),
        (
            {"parameters": {"binary_data_output": "yes"}},
            "the request: 'binary_data_output': expected true or false, got \"yes\"",
        ),
        (
            {"parameters": {"sequence_id": 3}},
            "parameter 'sequence_id': sequences are not supported",
        ),
        *(
            (
                {"parameters": {"timeout": timeout}},
                "parameter 'timeout': expected microseconds as an integer of at least 0, "
                f"got {shown}",
            )
            for timeout, shown in [(-1, "-1"), ("5", '"5"'), (1.5, "1.5"), (True, "true")]
        ),
        (
            {"inputs": [GOOD | {"parameters": {"shared_memory_region": "r"}}]},
            "input 'x': shared memory is not supported",
        ),
    ],
)
def test_wrong_fields(fields: dict[str, object], text: str) -> None:
    assert fault({"inputs": [GOOD]} | fields) == text


def test_the_fields_of_a_request() -> None:
    request = decode(
        {
            "id": "r1",
            "parameters": {"timeout": 1500, "binary_data_output": True, "priority": 1, "mine": 2},
            "inputs": [GOOD],
            "outputs": None,
        }
    )
    assert request.id == "r1"
    assert request.timeout_ms == 1.5
    assert request.outputs == (RequestedOutput("y", True),)


def test_each_output_may_differ_from_the_default() -> None:
    outputs = (OUTPUT, TensorSpec("z", "FP32", (-1,)))
    message = {
        "inputs": [GOOD],
        "parameters": {"binary_data_output": True},
        "outputs": [{"name": "z", "parameters": {"binary_data": False}}, {"name": "y"}],
    }
    request = decode(message, outputs=outputs)
    assert request.outputs == (RequestedOutput("z", False), RequestedOutput("y", True))


def test_a_half_precision_output_is_refused_before_it_is_computed() -> None:
    error = fault({"inputs": [GOOD]}, outputs=(TensorSpec("y", "BF16", (-1,)),))
    assert error == "output 'y': BF16 has no JSON form; ask for binary data"


def test_deep_nesting_is_an_ordinary_fault() -> None:
    deep = b"[" * 1000 + b"]" * 1000
    error = fault(b'{"inputs":[{"name":"x","datatype":"FP32","shape":' + deep + b"}]}")
    assert error.startswith("input 'x': expected 2 dimensions")


# ---- binary data


@pytest.mark.parametrize("datatype", FIXED_SIZE)
@pytest.mark.parametrize("padding", range(8))
def test_binary_data_is_exact_and_aligned(datatype: str, padding: int) -> None:
    dtype = DATATYPE_TO_DTYPE[datatype]
    pattern = np.arange(8 * dtype.itemsize, dtype=np.uint8) * 37
    values = (pattern % 2 if datatype == "BOOL" else pattern).tobytes()
    header = orjson.dumps({"inputs": [binary_input(datatype, [2, 4], len(values))]})
    header += b" " * padding
    spec = TensorSpec("x", datatype, (-1, 4))
    array = decode(header, values, specs=(spec,)).inputs["x"]
    assert array.shape == (2, 4)
    assert array.dtype == dtype
    assert array.tobytes() == values
    assert array.flags.aligned
    assert array.flags.c_contiguous


def test_binary_data_is_a_view_of_the_body_where_it_is_aligned() -> None:
    values = np.arange(4, dtype=np.uint8).tobytes()
    spec = TensorSpec("x", "UINT8", (-1, 4))
    array = decode({"inputs": [binary_input("UINT8", [1, 4], 4)]}, values, specs=(spec,)).inputs[
        "x"
    ]
    assert not array.flags.owndata
    assert not array.flags.writeable


SPEC_U32 = TensorSpec("x", "UINT32", (-1, 4))


@pytest.mark.parametrize("size", [15, 12, 20, 0, -16, "16", 16.5, True, 2**63])
def test_a_wrong_binary_data_size(size: object) -> None:
    message = {"inputs": [binary_input("UINT32", [1, 4], size)]}
    error = fault(message, bytes(16), specs=(SPEC_U32,))
    assert error.startswith("input 'x': expected ")
    assert "'binary_data_size'" in error


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (10, "input 'x': expected 16 bytes of binary data, got 10"),
        (20, "expected the body to end after the binary data of the inputs, got 4 more bytes"),
    ],
)
def test_too_few_and_too_many_bytes(num_bytes: int, text: str) -> None:
    message = {"inputs": [binary_input("UINT32", [1, 4], 16)]}
    assert fault(message, bytes(num_bytes), specs=(SPEC_U32,)) == text


def test_two_wrong_sizes_with_a_right_sum() -> None:
    specs = (SPEC_U32, TensorSpec("z", "UINT32", (-1, 4)))
    inputs = [binary_input("UINT32", [1, 4], 12), binary_input("UINT32", [1, 4], 20, "z")]
    assert "16 bytes for UINT32 [1, 4], got 12" in fault({"inputs": inputs}, bytes(32), specs=specs)


def test_json_and_binary_inputs_may_be_mixed() -> None:
    specs = (SPEC_U32, TensorSpec("z", "INT64", (-1,)))
    blob = np.arange(4, dtype="<u4").tobytes()
    inputs = [binary_input("UINT32", [1, 4], 16), json_input("INT64", [1], [5], "z")]
    for order in (inputs, inputs[::-1]):
        request = decode({"inputs": order}, blob, specs=specs)
        assert request.inputs["x"].tolist() == [[0, 1, 2, 3]]
        assert request.inputs["z"].tolist() == [5]


def test_data_and_binary_data_size_together() -> None:
    tensor = binary_input("UINT32", [1, 4], 16) | {"data": [1, 2, 3, 4]}
    assert fault({"inputs": [tensor]}, bytes(16), specs=(SPEC_U32,)) == (
        "input 'x': expected 'data' or 'binary_data_size', got both"
    )


def test_a_bool_byte_other_than_0_and_1() -> None:
    spec = TensorSpec("x", "BOOL", (-1, 4))
    message = {"inputs": [binary_input("BOOL", [1, 4], 4)]}
    assert fault(message, b"\0\1\2\0", specs=(spec,)) == (
        "input 'x': expected bytes 0 or 1 for BOOL, got 2"
    )


def test_the_header_length() -> None:
    body = orjson.dumps({"inputs": [GOOD]})
    assert decode(body, header_length=len(body)).num_rows == 1
    assert "not supported" in fault(body, header_length=0)
    assert "bytes of the body" in fault(body, header_length=len(body) + 1)
    assert "not valid JSON" in fault(body, header_length=len(body) - 1)
    binary = {"inputs": [binary_input("UINT32", [1, 4], 16)]}
    assert "Inference-Header-Content-Length" in fault(binary, specs=(SPEC_U32,))


def packed(*values: bytes) -> bytes:
    return b"".join(struct.pack("<I", len(value)) + value for value in values)


SPEC_BYTES = TensorSpec("x", "BYTES", (-1,))


@given(st.lists(st.binary(max_size=9), max_size=8))
def test_bytes_tensors_round_trip(values: list[bytes]) -> None:
    blob = packed(*values)
    header = orjson.dumps({"inputs": [binary_input("BYTES", [len(values)], len(blob))]})
    request = decode(header, blob, specs=(SPEC_BYTES,), header_length=len(header))
    assert request.inputs["x"].tolist() == values
    encoded = encode_y(request.inputs["x"], "BYTES")
    assert b"".join(encoded.parts[1:]) == blob


@pytest.mark.parametrize(
    ("blob", "text"),
    [
        (packed(b"ab"), "expected 2 elements in 6 bytes, got 1"),
        (packed(b"a", b"b", b"c"), "expected 2 elements in 15 bytes, got 2 and 5 bytes left over"),
        (packed(b"a") + b"\xff\xff\xff\xff", "element 1 goes beyond the 9 bytes"),
        (packed(b"a") + b"\1\0", "element 1 goes beyond the 7 bytes"),
        (packed(b"a", b"bc")[:-1], "element 1 goes beyond the 10 bytes"),
    ],
)
def test_wrong_bytes_tensors(blob: bytes, text: str) -> None:
    message = {"inputs": [binary_input("BYTES", [2], len(blob))]}
    error = fault(message, blob, specs=(SPEC_BYTES,))
    assert error.startswith("input 'x': ")
    assert text in error


# ---- responses


def encode_y(
    array: NDArray[Any], datatype: str, *, is_binary: bool = True, **parameters: object
) -> EncodedResponse:
    request = InferenceRequest({}, 1, (RequestedOutput("y", is_binary),), id="r1")
    response = InferenceResponse({"y": array}, parameters)
    return encode_response("m", "3", request, response, (TensorSpec("y", datatype, (-1,)),))


def header_of(encoded: EncodedResponse) -> Any:
    return json.loads(bytes(encoded.parts[0]))


def test_a_json_response() -> None:
    rows = np.arange(12, dtype=np.float32).reshape(3, 4)[1:]
    encoded = encode_y(rows, "FP32", is_binary=False, absent_keys=2)
    assert encoded.header_length is None
    assert json.loads(b"".join(encoded.parts)) == {
        "model_name": "m",
        "model_version": "3",
        "id": "r1",
        "parameters": {"absent_keys": 2},
        "outputs": [
            {
                "name": "y",
                "datatype": "FP32",
                "shape": [2, 4],
                "data": [4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0],
            }
        ],
    }


@pytest.mark.parametrize("datatype", FIXED_SIZE)
def test_binary_responses_are_exact(datatype: str) -> None:
    dtype = DATATYPE_TO_DTYPE[datatype]
    values = (np.arange(4 * dtype.itemsize, dtype=np.uint8) % 2).tobytes()
    encoded = encode_y(np.frombuffer(values, dtype), datatype)
    header = header_of(encoded)
    assert encoded.header_length == len(encoded.parts[0])
    assert header["outputs"] == [
        {
            "name": "y",
            "datatype": datatype,
            "shape": [4],
            "parameters": {"binary_data_size": len(values)},
        }
    ]
    assert b"".join(encoded.parts[1:]) == values


@pytest.mark.parametrize(
    "bits", [0x7FC00001, 0x7F800000, 0xFF800000, 0x80000000], ids=["nan", "inf", "-inf", "-0"]
)
def test_special_floats_pass_through_binary_bit_for_bit(bits: int) -> None:
    values = np.array([bits] * 4, "<u4").tobytes()
    array = decode({"inputs": [binary_input("FP32", [1, 4], 16)]}, values).inputs["x"]
    assert b"".join(encode_y(np.asarray(array), "FP32").parts[1:]) == values


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_json_cannot_say_is_an_error_that_asks_for_binary(value: float) -> None:
    with pytest.raises(InvalidRequestError, match=r"output 'y' holds NaN .* ask for binary"):
        encode_y(np.array([1.0, value], np.float32), "FP32", is_binary=False)
    not_utf8 = np.array([b"\xff"], np.object_)
    with pytest.raises(InvalidRequestError, match="output 'y' holds bytes that are not UTF-8"):
        encode_y(not_utf8, "BYTES", is_binary=False)


@pytest.mark.parametrize(
    ("datatype", "values"),
    [
        ("INT64", [-(2**63), 2**63 - 1, 9007199254740993]),
        ("UINT64", [0, 2**64 - 1]),
        ("BOOL", [True, False]),
        ("UINT8", [0, 255]),
        ("FP64", [0.1, -1e300]),
    ],
)
def test_json_values_are_exact(datatype: str, values: list[object]) -> None:
    encoded = encode_y(np.array(values, DATATYPE_TO_DTYPE[datatype]), datatype, is_binary=False)
    assert header_of(encoded)["outputs"][0]["data"] == values


def test_empty_scalar_and_strided_outputs() -> None:
    empty = encode_y(np.empty((0, 4), np.float32), "FP32", is_binary=False)
    assert header_of(empty)["outputs"][0]["shape"] == [0, 4]
    scalar = encode_y(np.array(2.5, np.float32), "FP32", is_binary=False)
    assert header_of(scalar)["outputs"][0] | {"name": "y"} == {
        "name": "y",
        "datatype": "FP32",
        "shape": [],
        "data": [2.5],
    }
    strided = np.arange(6, dtype=np.int32).reshape(2, 3).T
    assert header_of(encode_y(strided, "INT32", is_binary=False))["outputs"][0]["data"] == [
        *(0, 3, 1, 4, 2, 5)
    ]


def test_outputs_follow_in_the_order_of_the_request() -> None:
    specs = (OUTPUT, TensorSpec("z", "BF16", (-1,)), TensorSpec("s", "BYTES", (-1,)))
    wanted = tuple(RequestedOutput(name, name != "y") for name in ("s", "y", "z"))
    arrays = {
        "y": np.zeros((1, 4), np.float32),
        "z": np.array([1.5], ml_dtypes.bfloat16),
        "s": np.array([b"hi"], np.object_),
    }
    encoded = encode_response(
        "m", "1", InferenceRequest({}, 1, wanted), InferenceResponse(arrays), specs
    )
    header = header_of(encoded)
    assert [output["name"] for output in header["outputs"]] == ["s", "y", "z"]
    assert list(map(bytes, encoded.parts[1:])) == [packed(b"hi"), arrays["z"].tobytes()]
    assert "id" not in header


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=3),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(
                    ["name", "shape", "datatype", "data", "inputs", "outputs", "parameters", "id"]
                ),
                inner,
            )
        ),
        max_leaves=12,
    )
)
def test_any_json_is_a_request_or_an_ordinary_fault(message: object) -> None:
    inputs = message if isinstance(message, list) else [message]
    for body in (message, {"inputs": inputs}, {"inputs": [GOOD], "outputs": inputs}):
        with contextlib.suppress(InvalidRequestError):
            decode(body)
