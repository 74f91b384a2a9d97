"""The files that an ONNX model is made of: the model file and its external data."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import onnx

from models.errors import ModelLoadError


def model_files(path: Path, label: str) -> list[Path]:
    """Return `path` and the external data files that it refers to, each once.

    `label` stands for `path` in error texts. External data must lie in the folder of the model
    file or below it, links followed; whether something exists outside is not told. Raises
    `ModelLoadError` that names the file.
    """
    locations = sorted(set(_external_locations(_read(path, label))))
    return [path, *(_external_file(path, location, label) for location in locations)]


def _read(path: Path, label: str) -> onnx.ModelProto:
    if os.path.isdir(path):
        raise ModelLoadError(f"{label}: is a folder, expected an ONNX file")
    if os.path.exists(path) and not os.path.isfile(path):
        raise ModelLoadError(f"{label}: is not a regular file, expected an ONNX file")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ModelLoadError(f"{label}: {error.strerror or error}") from error
    if not content:
        raise ModelLoadError(f"{label}: the file is empty")
    try:
        model = onnx.load_model_from_string(content)
    except Exception as error:  # protobuf's DecodeError, of a package that has no types
        if path.suffix in (".pt", ".pth", ".pt2"):
            raise ModelLoadError(
                f"{label}: files of torch.save and torch.export are not loaded, as that runs code "
                "from the file; use safetensors and a factory, see docs/torch-models.md"
            ) from error
        raise ModelLoadError(f"{label}: is not an ONNX model, or is cut short") from error
    if not model.HasField("graph"):
        raise ModelLoadError(f"{label}: is not an ONNX model: it has no graph")
    return model


def _external_file(path: Path, location: str, label: str) -> Path:
    folder = os.path.realpath(path.parent)
    file = os.path.realpath(os.path.join(folder, location)) if "\0" not in location else folder
    if not location or os.path.isabs(location) or not file.startswith(folder + os.sep):
        raise ModelLoadError(
            f"{label}: external data {location!r} is not a file in the folder of the model"
        )
    if not os.path.isfile(file):
        raise ModelLoadError(f"{label}: the external data file {location!r} is missing")
    return Path(file)


def _external_locations(model: onnx.ModelProto) -> Iterator[str]:
    nodes = [node for function in model.functions for node in function.node]
    for tensor in [*_graph_tensors(model.graph), *_node_tensors(nodes)]:
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            yield next((e.value for e in tensor.external_data if e.key == "location"), "")


def _graph_tensors(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    yield from graph.initializer
    for sparse in graph.sparse_initializer:
        yield from (sparse.values, sparse.indices)
    yield from _node_tensors(graph.node)


def _node_tensors(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.TensorProto]:
    """The tensors in the attributes of the nodes, subgraphs included."""
    for attribute in (attribute for node in nodes for attribute in node.attribute):
        yield from (attribute.t, *attribute.tensors)
        for sparse in (attribute.sparse_tensor, *attribute.sparse_tensors):
            yield from (sparse.values, sparse.indices)
        for graph in (attribute.g, *attribute.graphs):
            yield from _graph_tensors(graph)
