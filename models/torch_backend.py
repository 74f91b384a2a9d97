"""Runs torch modules: built by a factory in Python, with weights from a safetensors file."""

from __future__ import annotations

import importlib
import inspect
import itertools
import logging
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch.utils.dlpack import from_dlpack

from cache.device import Device, Event
from models.errors import BackendError, ModelLoadError
from models.tensor_spec import TensorSpec

if TYPE_CHECKING:
    from cache.cuda import CudaDevice

logger = logging.getLogger(__name__)

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
_TORCH_TO_DATATYPE = {dtype: datatype for datatype, dtype in DATATYPE_TO_TORCH.items()}
# NumPy and torch do not know each other's bfloat16, nor do all versions of DLPack know bool.
_DATATYPE_TO_BITS: dict[str, type[np.generic]] = {"BF16": np.uint16, "BOOL": np.uint8}

_FACTORY = re.compile(r"([^\W\d]\w*(?:\.[^\W\d]\w*)*):([^\W\d]\w*)")
_PICKLE_SUFFIXES = (".pt", ".pt2", ".pth", ".ckpt", ".bin", ".pkl")
_PICKLE_STARTS = (b"PK\3\4", b"\x80")  # torch.save, TorchScript and .pt2; torch.save of old
_HEADER_AT = 8  # a safetensors file begins with the length of its header, of any value
_MAX_NAMED = 5
_package_numbers = itertools.count(1)


class TorchBackend:
    """One torch module, in evaluation mode and without gradients.

    A module gets its inputs as keyword arguments of `forward`. It returns a dict by name, which may
    hold more than `outputs`, or tensors in the order of `outputs`; a single one may stand alone.
    """

    platform = "torch_safetensors"

    def __init__(
        self,
        path: Path,
        *,
        factory: str,
        inputs: Sequence[TensorSpec],
        outputs: Sequence[TensorSpec],
        label: str | None = None,
        device: Device | None = None,
        trust_model_code: bool = False,
        cuda: Callable[[int, int], TorchCuda] | None = None,
    ) -> None:
        """Call `factory`, `module:callable`, without arguments and load the weights of `path`.

        Without `trust_model_code` nothing is imported and the model is refused. The module is first
        looked for in the folder of `path`, then in the folder above, then among the installed ones.
        `label` stands for `path` in error texts; `cuda` is what a test puts in the place of
        `TorchCuda`. Raises `ModelLoadError`.
        """
        label = label if label is not None else path.name
        self.inputs = tuple(inputs)
        self.outputs = tuple(outputs)
        _check_specs(self.inputs, self.outputs, label)
        _refuse_pickles(path, label)
        where = f"{label}: factory {factory!r}"
        if not trust_model_code:
            raise ModelLoadError(
                f"{where} is Python code that would run in the server; "
                "start it with --trust-model-code if you trust that code"
            )
        self._place = _new_place(device, cuda, label)
        self._code = _ModelCode([path.parent, path.parent.parent])
        try:
            module = _built(self._code, factory, where)
            _check_forward(module, self.inputs, where)
            _load_weights(module, path, label)
            self._module: torch.nn.Module | None = self._placed(module, label)
        except BaseException:
            self._code.close()
            raise

    def __repr__(self) -> str:
        return f"<TorchBackend {len(self.inputs)} inputs, {len(self.outputs)} outputs>"

    @property
    def takes_device_arrays(self) -> bool:
        """See `Backend.takes_device_arrays`."""
        return self._place.takes_device_arrays

    def run(
        self, inputs: Mapping[str, Any], outputs: Sequence[str], after: Sequence[Event] = ()
    ) -> dict[str, NDArray[Any]]:
        """See `Backend.run`. The module may write to its inputs in place."""
        module = self._module
        assert module is not None, "run after close"

        def forward(tensors: Tensors) -> Tensors:
            return self._checked(module(**tensors))

        wanted = [spec for spec in self.outputs if spec.name in outputs]
        try:
            with torch.inference_mode():
                return self._place.run(
                    forward, [(spec, inputs[spec.name]) for spec in self.inputs], wanted, after
                )
        except BackendError:
            raise
        except Exception as error:
            logger.debug("a run of a torch module failed", exc_info=error)
            raise BackendError(_reason(error)) from error

    def close(self) -> None:
        """See `Backend.close`."""
        if self._module is not None:
            self._module = None
            self._code.close()
            self._place.close()

    def _placed(self, module: torch.nn.Module, label: str) -> torch.nn.Module:
        try:
            module.eval().requires_grad_(False)
            return self._place.load(module)
        except Exception as error:
            raise ModelLoadError(f"{label}: {_reason(error)}") from error

    def _checked(self, results: object) -> Tensors:
        """All outputs of the specs by name; raises `BackendError` where they do not fit."""
        named = _by_name(results, [spec.name for spec in self.outputs])
        for spec in self.outputs:
            _check_result(named[spec.name], spec, self._place.torch_device)
        return {spec.name: named[spec.name] for spec in self.outputs}


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


class _Place(Protocol):
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
        except BaseException:
            # What is enqueued reads the inputs, which the caller may overwrite after this.
            compute.record().wait()
            raise
        return {spec.name: array for spec, array in zip(wanted, arrays, strict=True)}

    def close(self) -> None:
        self._cuda.release()


def _new_place(
    device: Device | None, cuda: Callable[[int, int], TorchCuda] | None, label: str
) -> _Place:
    if device is None or not device.name.startswith("cuda:"):
        return _HostPlace()
    gpu = cast("CudaDevice", device)
    cuda = TorchCuda if cuda is None else cuda
    try:
        return _CudaPlace(gpu, cuda(gpu.index, gpu.compute.pointer))
    except Exception as error:
        raise ModelLoadError(
            f"{label}: torch cannot use {device.name} ({_reason(error)}); "
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


def _by_name(results: object, names: list[str]) -> Mapping[str, Any]:
    if isinstance(results, Mapping):
        missing = [name for name in names if name not in results]
        if missing:
            raise BackendError(
                f"the module returned {_listed(map(str, results))}, without {_listed(missing)}"
            )
        return results
    results = (results,) if isinstance(results, torch.Tensor) else results
    if not isinstance(results, tuple | list):
        raise BackendError(
            f"the module returned {type(results).__name__}, expected a tensor, a tuple or a dict"
        )
    if len(results) != len(names):
        raise BackendError(
            f"the module returned {len(results)} tensors, expected {len(names)}: {_listed(names)}"
        )
    return dict(zip(names, results, strict=True))


def _check_result(result: object, spec: TensorSpec, device: torch.device) -> None:
    where = f"output {spec.name!r}"
    if not isinstance(result, torch.Tensor):
        raise BackendError(f"{where} is {type(result).__name__}, expected a tensor")
    if result.layout != torch.strided:
        raise BackendError(f"{where} is {result.layout}, expected a dense tensor")
    if result.device != device:
        raise BackendError(f"{where} is on {result.device}, expected {device}")
    shape = list(result.shape)
    is_fit = len(shape) == len(spec.shape) and all(
        size in (-1, given) for size, given in zip(spec.shape, shape, strict=True)
    )
    if result.dtype != DATATYPE_TO_TORCH[spec.datatype] or not is_fit:
        datatype = _TORCH_TO_DATATYPE.get(result.dtype, str(result.dtype))
        raise BackendError(
            f"{where} is {datatype} {shape}, expected {spec.datatype} {list(spec.shape)}"
        )


def _check_specs(inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], label: str) -> None:
    for kind, specs in (("input", inputs), ("output", outputs)):
        names = [spec.name for spec in specs]
        for spec in specs:
            if spec.datatype not in DATATYPE_TO_TORCH:
                raise ModelLoadError(
                    f"{label}: {kind} {spec.name!r} is {spec.datatype}, which torch cannot hold"
                )
            if names.count(spec.name) > 1:
                raise ModelLoadError(f"{label}: {kind} {spec.name!r} is listed twice")


def _refuse_pickles(path: Path, label: str) -> None:
    """Refuse what is no safetensors file but another format of torch; it is not read further."""
    try:
        with path.open("rb") as file:
            start = file.read(_HEADER_AT + 1)
        is_pickle = start.startswith(_PICKLE_STARTS) and start[_HEADER_AT:] != b"{"
        found = path.name
    except FileNotFoundError:
        others = sorted(other.name for other in path.parent.glob("*"))
        found = next((name for name in others if name.endswith(_PICKLE_SUFFIXES)), path.name)
        is_pickle = found != path.name
        if not is_pickle:
            raise ModelLoadError(f"{label}: No such file or directory") from None
    except OSError as error:
        raise ModelLoadError(f"{label}: {error.strerror or error}") from error
    if is_pickle:
        raise ModelLoadError(
            f"{label}: {found} is of torch.save, TorchScript or torch.export, whose loading can "
            "run any code, so it is never loaded; write the weights with "
            "safetensors.torch.save_model and give a factory"
        )


class _ModelCode:
    """The Python files beside one opened model, as a package with a name of its own.

    So `sys.path` stays as it is, models do not meet each other's modules, and a reload reads the
    files anew.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = [str(folder) for folder in folders]
        self._package = f"hotshelf_model_{next(_package_numbers)}"

    def import_module(self, name: str) -> ModuleType:
        """Import from the folders, or else what is installed."""
        importlib.invalidate_caches()
        if not self.has(name):
            return importlib.import_module(name)
        package = ModuleType(self._package)
        package.__path__ = self._folders
        sys.modules[self._package] = package
        return importlib.import_module(f"{self._package}.{name}")

    def has(self, name: str) -> bool:
        """Whether the folders hold the first part of a module's name."""
        return PathFinder.find_spec(name.partition(".")[0], self._folders) is not None

    def reason(self, error: BaseException) -> str:
        """The error in one line, without our name for the package and the place of the folders."""
        text = _reason(error).replace(f"{self._package}.", "")
        for folder in self._folders:
            text = text.replace(f"{folder}/", "")
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and self.has(missing):
            text += "; files beside the model are imported with a dot: from . import ..."
        return text

    def close(self) -> None:
        """Forget the modules; those that are in use stay alive."""
        for name in list(sys.modules):
            if name == self._package or name.startswith(f"{self._package}."):
                sys.modules.pop(name, None)


def _built(code: _ModelCode, factory: str, where: str) -> torch.nn.Module:
    """What the factory returns."""
    match = _FACTORY.fullmatch(factory)
    if match is None:
        raise ModelLoadError(f"{where}: expected package.module:callable")
    module_name, attribute = match.groups()
    try:
        module = getattr(code.import_module(module_name), attribute)()
    except (Exception, SystemExit) as error:  # a script may end itself, but not the server
        logger.warning("%s failed", where, exc_info=error)
        raise ModelLoadError(f"{where}: {code.reason(error)}") from error
    if not isinstance(module, torch.nn.Module):
        raise ModelLoadError(
            f"{where}: returned {type(module).__name__}, expected a torch.nn.Module"
        )
    return module


def _check_forward(module: torch.nn.Module, inputs: Sequence[TensorSpec], where: str) -> None:
    try:
        signature = inspect.signature(module.forward)
    except (TypeError, ValueError):  # a callable without one; the first run will tell
        return
    try:
        signature.bind(**{spec.name: None for spec in inputs})
    except TypeError as error:
        raise ModelLoadError(
            f"{where}: the inputs are {_listed(spec.name for spec in inputs)}, "
            f"but forward takes {_listed(signature.parameters)}: {error}"
        ) from error


def _load_weights(module: torch.nn.Module, path: Path, label: str) -> None:
    """Copy all weights of the file into the module; names, shapes and dtypes must be equal."""
    try:
        weights = load_file(path)
    except SafetensorError as error:
        raise ModelLoadError(
            f"{label}: is not a safetensors file, or is cut short ({_one_line(error)})"
        ) from error
    except OSError as error:
        raise ModelLoadError(f"{label}: {error.strerror or 'cannot be read'}") from error
    try:
        faults = _faults(module, weights)
        if not faults:
            module.load_state_dict(weights, strict=False)  # tied weights are once in the file
    except Exception as error:
        raise ModelLoadError(f"{label}: {_reason(error)}") from error
    if faults:
        raise ModelLoadError(f"{label}: the weights do not fit the module: {'; '.join(faults)}")


def _faults(module: torch.nn.Module, weights: Tensors) -> list[str]:
    """What keeps the weights from being loaded, as parts of one line."""
    state = module.state_dict()
    given = {_memory(tensor) for name, tensor in state.items() if name in weights}
    missing = [n for n, t in state.items() if n not in weights and _memory(t) not in given]
    unexpected = [name for name in weights if name not in state]
    both = [(name, state[name], weights[name]) for name in state if name in weights]
    kinds = {
        "missing": missing,
        "unexpected": unexpected,
        "without memory (device meta)": [
            name
            for name, tensor in [*module.named_parameters(), *module.named_buffers()]
            if tensor.is_meta
        ],
        "of another shape": [
            f"{name} {list(got.shape)}, expected {list(own.shape)}"
            for name, own, got in both
            if got.shape != own.shape
        ],
        "of another dtype": [
            f"{name} {_dtype_name(got)}, expected {_dtype_name(own)}"
            for name, own, got in both
            if got.dtype != own.dtype
        ],
    }
    return [f"{kind}: {_listed(names)}" for kind, names in kinds.items() if names]


def _memory(tensor: object) -> tuple[object, ...]:
    """Equal for tensors that are one, such as tied weights."""
    if not isinstance(tensor, torch.Tensor) or tensor.is_meta or tensor.numel() == 0:
        return (id(tensor),)
    return (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _listed(names: Iterable[str]) -> str:
    """The first names, and how many more there are."""
    names = list(names)
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return ", ".join(names[:_MAX_NAMED]) + more if names else "none"


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def _reason(error: BaseException) -> str:
    """The kind of an error and the first line of its text; torch puts hints and stacks below."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
