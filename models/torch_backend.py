"""Runs torch modules: built by a factory in Python, with weights from a safetensors file."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray

from cache.device import Device, Event
from models.errors import BackendError, ModelLoadError
from models.tensor_spec import TensorSpec
from models.torch_code import ModelCode, built, check_forward
from models.torch_places import (
    DATATYPE_TO_TORCH,
    TORCH_TO_DATATYPE,
    Tensors,
    TorchCuda,
    new_place,
)
from models.torch_text import listed, reason
from models.torch_weights import load_weights, refuse_pickles

logger = logging.getLogger(__name__)


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
        """Call `factory` without arguments and load the weights of `path`.

        `factory` is `module:callable`, as `ModelConfig` has checked it. Without `trust_model_code`
        nothing is imported and the model is refused. The module is first looked for in the folder
        of `path`, then in the folder above, then among the installed ones. `label` stands for
        `path` in error texts; `cuda` is what a test puts in the place of `TorchCuda`. Raises
        `ModelLoadError`.
        """
        label = label if label is not None else path.name
        self._label = label
        self.inputs = tuple(inputs)
        self.outputs = tuple(outputs)
        _check_specs(self.inputs, self.outputs, label)
        refuse_pickles(path, label)
        where = f"{label}: factory {factory!r}"
        if not trust_model_code:
            raise ModelLoadError(
                f"{where} is Python code that would run in the server; "
                "start it with --trust-model-code if you trust that code"
            )
        self._place = new_place(device, cuda, label)
        self._code = ModelCode([path.parent, path.parent.parent])
        try:
            module = built(self._code, factory, where)
            check_forward(module, self.inputs, where)
            load_weights(module, path, label)
            self._module: torch.nn.Module | None = self._placed(module, label)
        except BaseException:  # whatever it was, the modules must not stay in sys.modules
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
        except BaseException as error:  # torch raises anything, and a module may call sys.exit
            logger.warning("%s: a run failed", self._label, exc_info=error)
            raise BackendError(reason(error)) from error

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
        except BaseException as error:  # torch raises anything, and so do methods of the module
            raise ModelLoadError(f"{label}: {reason(error)}") from error

    def _checked(self, results: object) -> Tensors:
        """All outputs of the specs by name; raises `BackendError` where they do not fit."""
        named = _by_name(results, [spec.name for spec in self.outputs])
        for spec in self.outputs:
            _check_result(named[spec.name], spec, self._place.torch_device)
        return {spec.name: named[spec.name] for spec in self.outputs}


def _by_name(results: object, names: list[str]) -> Mapping[str, Any]:
    if isinstance(results, Mapping):
        missing = [name for name in names if name not in results]
        if missing:
            raise BackendError(
                f"the module returned {listed(map(str, results))}, without {listed(missing)}"
            )
        return results
    results = (results,) if isinstance(results, torch.Tensor) else results
    if not isinstance(results, tuple | list):
        raise BackendError(
            f"the module returned {type(results).__name__}, expected a tensor, a tuple or a dict"
        )
    if len(results) != len(names):
        raise BackendError(
            f"the module returned {len(results)} tensors, expected {len(names)}: {listed(names)}"
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
        datatype = TORCH_TO_DATATYPE.get(result.dtype, str(result.dtype))
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
