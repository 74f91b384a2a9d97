"""Tensor specs and the datatypes of the Open Inference Protocol."""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np

# BYTES tensors are object arrays of `bytes`.
DATATYPE_TO_DTYPE: dict[str, np.dtype[np.generic]] = {
    "BOOL": np.dtype(np.bool_),
    "UINT8": np.dtype(np.uint8),
    "UINT16": np.dtype(np.uint16),
    "UINT32": np.dtype(np.uint32),
    "UINT64": np.dtype(np.uint64),
    "INT8": np.dtype(np.int8),
    "INT16": np.dtype(np.int16),
    "INT32": np.dtype(np.int32),
    "INT64": np.dtype(np.int64),
    "FP16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "FP32": np.dtype(np.float32),
    "FP64": np.dtype(np.float64),
    "BYTES": np.dtype(np.object_),
}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, datatype and shape of one input or output.

    `shape` has -1 for a free dimension. Where the model batches (`max_batch_size` > 0) the first
    dimension is the batch dimension and is -1.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """The NumPy dtype of the datatype; object for BYTES."""
        return DATATYPE_TO_DTYPE[self.datatype]
