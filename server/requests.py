"""What travels between the wire and a model: one inference request and its response."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Tensors = Mapping[str, NDArray[np.generic]]


@dataclass(frozen=True, slots=True)
class RequestedOutput:
    """One output that the client asked for, and whether it goes into the binary part."""

    name: str
    is_binary: bool


@dataclass(frozen=True, slots=True)
class InferenceRequest:
    """A decoded and validated request.

    `inputs` holds C-contiguous arrays by request input name; those from the binary part are
    read-only views of the body. Where the model batches, the first dimension of every input is
    `num_rows`; else `num_rows` is 1.
    """

    inputs: Tensors
    num_rows: int
    outputs: tuple[RequestedOutput, ...]
    id: str | None = None
    timeout_ms: float = 0.0  # 0: none


@dataclass(frozen=True, slots=True)
class InferenceResponse:
    """The outputs of one request, by name, and response parameters for the client.

    `parameters` is empty or holds what the client must know, such as `absent_keys`.
    """

    outputs: Tensors
    parameters: Mapping[str, Any] = field(default_factory=dict)
