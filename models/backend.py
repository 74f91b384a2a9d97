"""What a model backend must do: run one loaded model file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from numpy.typing import NDArray

from cache.device import Event
from models.tensor_spec import TensorSpec


class Backend(Protocol):
    """One open model file. Its constructor reads the file and raises `ModelLoadError`."""

    @property
    def platform(self) -> str:
        """Triton's name of the framework and the format, such as `onnxruntime_onnx`."""
        ...

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """The model's inputs, in the order of the file."""
        ...

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """The model's outputs, in the order of the file."""
        ...

    @property
    def takes_device_arrays(self) -> bool:
        """Whether inputs are arrays of the device (`Device.new_buffers`), else of the host."""
        ...

    def run(
        self, inputs: Mapping[str, Any], outputs: Sequence[str], after: Sequence[Event] = ()
    ) -> dict[str, NDArray[Any]]:
        """Return the named outputs for all inputs of the model.

        The inputs are there when the events of `after` are done. Every input has the dtype of its
        spec, is C-contiguous and may be read-only; BYTES are object arrays of `bytes`. The outputs
        never share memory with the inputs or the model, and may be read-only. Blocks until the
        outputs are there. When it returns or raises, nothing reads the inputs any more. May be
        called by several threads at once. Raises `BackendError`, or
        `InvalidInputError` where an input's content is at fault.
        """
        ...

    def close(self) -> None:
        """Free the model; no run may follow. May be called again."""
        ...
