"""How the bytes of a slot hold a row."""

from __future__ import annotations

from enum import Enum

import numpy as np


class RowFormat(Enum):
    """The format of a table's rows; models get float32."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    INT8 = "int8"  # the value is the integer times the scale of its slot, a float32 beside the slab

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """The dtype of a slab's array: half precision is kept as its bits."""
        return np.dtype(_STORAGE[self])

    @property
    def has_scales(self) -> bool:
        """Whether every slot has a scale."""
        return self is RowFormat.INT8


_STORAGE = {
    RowFormat.FLOAT32: np.float32,
    RowFormat.FLOAT16: np.uint16,
    RowFormat.BFLOAT16: np.uint16,
    RowFormat.INT8: np.int8,
}
