"""Execution providers of ONNX Runtime: what `model.yaml` chooses, and what of it a model gets."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cache.cuda import CudaDevice
from cache.device import Device
from models.errors import ModelConfigError, ModelLoadError
from models.onnx_cuda import CUDA, FIXED_OPTIONS, TENSORRT, not_loaded, provider_options
from models.spec import ProviderEntry

logger = logging.getLogger(__name__)

CPU = "CPUExecutionProvider"
SHORT_TO_NAME = {"cpu": CPU, "cuda": CUDA, "tensorrt": TENSORRT}
NAME_TO_SHORT = {name: short for short, name in SHORT_TO_NAME.items()}
MAX_SHOWN_NODES = 5

REFUSE_CPU_NODES = {"session.disable_cpu_ep_fallback": "1"}
TELL_CPU_NODES = {"session.record_ep_graph_assignment_info": "1"}
REFUSED_CPU_NODES = "assigned to the default CPU EP"  # in the text of the error


@dataclass(frozen=True, slots=True)
class Provider:
    """A provider by ONNX Runtime's name, and its options."""

    name: str
    options: dict[str, str] = field(default_factory=dict)

    @property
    def short(self) -> str:
        """The name as `model.yaml` and error texts have it."""
        return NAME_TO_SHORT.get(self.name, self.name)

    @property
    def is_of_gpu(self) -> bool:
        """Whether it computes on a GPU of CUDA."""
        return self.name in (CUDA, TENSORRT)


def choose_providers(
    entries: Sequence[ProviderEntry] | None, device: Device | None, available: Sequence[str]
) -> tuple[Provider, ...]:
    """What `providers` of `model.yaml` says; None is CUDA on a GPU, else the CPU.

    `available` are the names of what is installed. Raises `ModelConfigError`.
    """
    if entries is None:
        entries = ["cuda" if isinstance(device, CudaDevice) else "cpu"]
    providers = tuple(_provider(entry, device, available) for entry in entries)
    names = [provider.name for provider in providers]
    for provider in providers:
        if names.count(provider.name) > 1:
            raise ModelConfigError(f"providers: {provider.short!r} is listed twice")
    if CPU in names and len(names) > 1:
        raise ModelConfigError("providers: leave 'cpu' out of the list and set cpu_fallback: true")
    return providers


def _provider(entry: ProviderEntry, device: Device | None, available: Sequence[str]) -> Provider:
    given, options = (entry, {}) if isinstance(entry, str) else next(iter(entry.items()))
    provider = Provider(SHORT_TO_NAME.get(given, given))
    for key, value in options.items():
        provider.options[key] = str(int(value)) if isinstance(value, bool) else str(value)
    if provider.is_of_gpu:
        if not isinstance(device, CudaDevice):
            raise ModelConfigError(
                f"providers: {given!r} needs a GPU, but the device is the cpu; "
                "start with --device cuda:0, or leave 'providers' out"
            )
        fixed = sorted(FIXED_OPTIONS & provider.options.keys())
        if fixed:
            raise ModelConfigError(
                f"providers: option {fixed[0]!r} of {given!r} is the server's; leave it out"
            )
        ours = provider_options(provider.name, device)
        provider = Provider(provider.name, ours | provider.options)
    if provider.name not in available:
        raise ModelConfigError(_not_installed(given, provider, available))
    return provider


def _not_installed(given: str, provider: Provider, available: Sequence[str]) -> str:
    installed = ", ".join(NAME_TO_SHORT.get(name, name) for name in available)
    if provider.is_of_gpu:
        fix = (
            "pip uninstall onnxruntime, then pip install -c constraints.txt -c constraints-gpu.txt "
            "-e '.[gpu]' (the extras cpu and gpu exclude each other)"
        )
        return f"providers: {given!r} is not installed, only {installed}; {fix}"
    return f"providers: unknown provider {given!r}; installed are {installed}"


def open_session(
    new_session: Callable[[Mapping[str, str]], Any],
    providers: Sequence[Provider],
    label: str,
    *,
    cpu_fallback: bool,
) -> Any:
    """A session of a model that runs on `providers` alone, or with `cpu_fallback` on the CPU too.

    `new_session` opens one with the given config entries. Raises `ModelLoadError` that names the
    nodes which the providers cannot run, or a provider that cannot be loaded.
    """
    if any(provider.name == CPU for provider in providers):
        return new_session({})
    if cpu_fallback:
        session = new_session(TELL_CPU_NODES)
        _check_loaded(session, providers, label)
        text = _cpu_nodes(session)
        if text is not None:
            logger.warning("%s: ONNX Runtime runs %s on the CPU", label, text)
        return session
    try:
        session = new_session(REFUSE_CPU_NODES)
    except ModelLoadError as error:
        if REFUSED_CPU_NODES not in str(error):
            raise
        raise _refusal(new_session(TELL_CPU_NODES), providers, label) from error
    _check_loaded(session, providers, label)
    return session


def _refusal(session: Any, providers: Sequence[Provider], label: str) -> ModelLoadError:
    """Why the session that did open with the CPU is not wanted."""
    _check_loaded(session, providers, label)
    check_strings(session, providers)
    names = ", ".join(provider.short for provider in providers)
    return ModelLoadError(
        f"{label}: {names} cannot run all of the model, or would be slower than the CPU: ONNX "
        f"Runtime leaves {_cpu_nodes(session)} to the CPU; set cpu_fallback: true in model.yaml to "
        "let it, or providers: [cpu] to run all nodes there"
    )


def check_strings(session: Any, providers: Sequence[Provider]) -> None:
    """Raise `ModelConfigError` for a model of BYTES tensors on a GPU, which has no strings."""
    if not any(provider.is_of_gpu for provider in providers):
        return
    for tensor in (*session.get_inputs(), *session.get_outputs()):
        if tensor.type == "tensor(string)":
            raise ModelConfigError(
                f"providers: the model has BYTES tensors, such as {tensor.name!r}, which a GPU "
                "cannot take; set providers: [cpu]"
            )


def _check_loaded(session: Any, providers: Sequence[Provider], label: str) -> None:
    """Raise for a provider that ONNX Runtime left out, as it does silently."""
    loaded = session.get_providers()
    for provider in providers:
        if provider.name not in loaded:
            raise ModelLoadError(f"{label}: {not_loaded(provider.short)}")


def _cpu_nodes(session: Any) -> str | None:
    """How many of the nodes run on the CPU, and which; None when there are none."""
    cpu_nodes, num_nodes = [], 0
    for part in session.get_provider_graph_assignment_info():
        nodes = part.get_nodes()
        num_nodes += len(nodes)
        if part.ep_name == CPU:
            cpu_nodes += [f"{node.op_type} {node.name!r}" for node in nodes]
    if not cpu_nodes:
        return None
    shown = ", ".join(cpu_nodes[:MAX_SHOWN_NODES])
    more = len(cpu_nodes) - MAX_SHOWN_NODES
    rest = f" and {more} more" if more > 0 else ""
    return f"{len(cpu_nodes)} of {num_nodes} nodes ({shown}{rest})"
