"""Where torch modules run, host memory or a GPU, and their tensors over our arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.dlpack import from_dlpack

from cache.cuda import CudaDevice
from cache.device import Device, Event
from models.errors import ModelLoadError
from models.tensor_spec import TensorSpec
from models.torch_text import reason

Tensors = dict[str, torch.Tensor]
Forward = Callable[[Tensors], Tensors]

DATATYPE_TO_TORCH = {
    "BOOL": torch.bool,
    "UINT8": torch.uint8,
    "UINT16": torch.uint16,
    "UINT32": torch.uint32,
    "UINT64": torch.uint64,
    "INT8": torch.int8,
    "INT16": torch.int16,
    "INT32": torch.int32,
    "INT64": torch.int64,
    "FP16": torch.float16,
    "BF16": torch.bfloat16,
    "FP32": torch.float32,
    "FP64": torch.float64,
}
TORCH_TO_DATATYPE = {dtype: datatype for datatype, dtype in DATATYPE_TO_TORCH.items()}
# NumPy and torch do not know each other's bfloat16, nor do all versions of DLPack know bool.
_DATATYPE_TO_BITS: dict[str, type[np.generic]] = {"BF16": np.uint16, "BOOL": np.uint8}


class TorchCuda:
    """Every call of `torch.cuda`, with our compute stream as torch's."""

    def __init__(self, index: int, stream_pointer: int) -> None:
        """`stream_pointer` is the `cudaStream_t` of device `index`; it must outlive this object."""
        self.torch_device = torch.device("cuda", index)
        self._stream = torch.cuda.ExternalStream(  # type: ignore[no-untyped-call]
            stream_pointer, device=self.torch_device
        )

    def limit_memory(self, max_bytes: int) -> None:
        """Let torch take at most `max_bytes` of the device in this process, for all models.

        A run that needs more fails with torch's error of memory; nothing else is harmed.
        """
        total_bytes = torch.cuda.get_device_properties(self.torch_device).total_memory
        fraction = min(1.0, max(0.0, max_bytes / total_bytes))
        torch.cuda.set_per_process_memory_fraction(fraction, self.torch_device)

    def on_compute_stream(self) -> AbstractContextManager[object]:
        """In this context the calling thread enqueues and allocates on the compute stream."""
        return torch.cuda.stream(self._stream)

    def load(self, module: torch.nn.Module) -> torch.nn.Module:
        """Move the module to the device; blocks, but not the compute stream."""
        module = module.to(self.torch_device)
        torch.cuda.current_stream(self.torch_device).synchronize()
        return module

    def release(self) -> None:
        """Give memory that torch holds and nobody uses back to the driver."""
        torch.cuda.empty_cache()


class Place(Protocol):
    """Where a module and its tensors are."""

    torch_device: torch.device
    takes_device_arrays: bool

    def load(self, module: torch.nn.Module) -> torch.nn.Module:
        """Move the module here."""

    def run(
        self,
        forward: Forward,
        inputs: Sequence[tuple[TensorSpec, Any]],
        wanted: Sequence[TensorSpec],
        after: Sequence[Event],
    ) -> dict[str, NDArray[Any]]:
        """Call `forward` with the inputs; blocks until the wanted outputs are there."""

    def close(self) -> None:
        """Free what a closed module has left."""


class _HostPlace:
    """Host memory; inputs are used in place where they may be written to."""

    torch_device = torch.device("cpu")
    takes_device_arrays = False

    def load(self, module: torch.nn.Module) -> torch.nn.Module:
        return module.to(self.torch_device)

    def run(
        self,
        forward: Forward,
        inputs: Sequence[tuple[TensorSpec, Any]],
        wanted: Sequence[TensorSpec],
        after: Sequence[Event],
    ) -> dict[str, NDArray[Any]]:
        for event in after:
            event.wait()
        results = forward(
            {spec.name: _tensor(spec, _own(array), torch.from_numpy) for spec, array in inputs}
        )
        return {spec.name: _array(spec, results[spec.name]) for spec in wanted}

    def close(self) -> None:
        """The allocator gives memory back by itself."""


class _CudaPlace:
    """Memory of one GPU. Runs are enqueued on the compute stream of all models.

    torch frees memory for reuse on the stream that it was taken on, so what is still enqueued is
    safe there. Inputs are the device's arrays, used in place.
    """

    takes_device_arrays = True

    def __init__(self, device: CudaDevice, cuda: TorchCuda) -> None:
        self._device = device
        self._cuda = cuda
        self.torch_device = cuda.torch_device
        self._cuda.limit_memory(_bytes_for_models(device))

    def load(self, module: torch.nn.Module) -> torch.nn.Module:
        return self._cuda.load(module)

    def run(
        self,
        forward: Forward,
        inputs: Sequence[tuple[TensorSpec, Any]],
        wanted: Sequence[TensorSpec],
        after: Sequence[Event],
    ) -> dict[str, NDArray[Any]]:
        compute = self._device.compute
        for event in after:
            compute.wait_for(event)
        try:
            with self._cuda.on_compute_stream():
                results = forward(
                    {spec.name: _tensor(spec, array, _in_place) for spec, array in inputs}
                )
                tensors = [results[spec.name].resolve_neg().contiguous() for spec in wanted]
            sources = [
                (tensor.data_ptr(), tuple(tensor.shape), spec.dtype)
                for spec, tensor in zip(wanted, tensors, strict=True)
            ]
            arrays = self._device.read_back(sources)
        except BaseException:  # whatever it was
            # What is enqueued reads the inputs, which the caller may overwrite after this.
            compute.record().wait()
            raise
        return {spec.name: array for spec, array in zip(wanted, arrays, strict=True)}

    def close(self) -> None:
        self._cuda.release()


def new_place(
    device: Device | None, cuda: Callable[[int, int], TorchCuda] | None, label: str
) -> Place:
    """The place of modules on `device`; None is the CPU. Raises `ModelLoadError`."""
    if not isinstance(device, CudaDevice):
        return _HostPlace()
    cuda = TorchCuda if cuda is None else cuda
    try:
        return _CudaPlace(device, cuda(device.index, device.compute.pointer))
    except Exception as error:  # torch raises anything
        raise ModelLoadError(
            f"{label}: torch cannot use {device.name} ({reason(error)}); "
            "install a torch with CUDA, or serve this model with --device cpu"
        ) from error


def _bytes_for_models(device: Device) -> int:
    """What the budget leaves when all that is no model has its share; the same in every load."""
    charges = device.budget.charges().items()
    others = sum(size for owner, size in charges if not owner.startswith("model:"))
    return device.budget.max_bytes - others


def _own(array: NDArray[Any]) -> NDArray[Any]:
    """The array, or a copy of one that is read-only or lies at an odd place in a body."""
    return array if array.flags.writeable and array.flags.aligned else array.copy()


def _tensor(spec: TensorSpec, array: Any, convert: Callable[[Any], torch.Tensor]) -> torch.Tensor:
    """A tensor over the array's memory."""
    bits = _DATATYPE_TO_BITS.get(spec.datatype)
    tensor = convert(array if bits is None else array.view(bits))
    return tensor.view(DATATYPE_TO_TORCH[spec.datatype])


def _in_place(array: Any) -> torch.Tensor:
    """A tensor over a device array. -1: the streams are in order already."""
    return from_dlpack(array.__dlpack__(stream=-1))


def _array(spec: TensorSpec, tensor: torch.Tensor) -> NDArray[Any]:
    """A copy: the tensor may be an input, a weight, or a part of either."""
    bits = tensor.view(torch.uint16) if spec.datatype == "BF16" else tensor
    return np.array(bits.numpy(force=True), order="C").view(spec.dtype)
