"""Opens models: from files on disk to something that can run, checked and charged."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cache.config import ConfigError, load_yaml
from cache.errors import OutOfMemoryError
from models.backend import Backend
from models.errors import ModelConfigError, ModelLoadError
from models.layout import MODEL_FILE, FolderLayout, Layout, ModelFile, SingleFileLayout
from models.onnx_files import model_files
from models.spec import FeatureInput, ModelConfig, VersionPolicy, resolve
from models.tensor_spec import TensorSpec

if TYPE_CHECKING:
    from cache import Device, Table

BACKEND_TO_MODEL_FILE = {"onnxruntime": MODEL_FILE, "torch": "model.safetensors"}


@dataclass(eq=False)
class LoadedModel:
    """One version of a model, ready to run.

    `request_inputs` are what a client sends: the model's inputs, with keys in place of those that
    are fed from tables. `resources` is what goes with the model when it is closed.
    """

    name: str
    version: str
    config: ModelConfig
    request_inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    features: tuple[FeatureInput, ...]
    backend: Backend
    resources: ExitStack = field(default_factory=ExitStack, repr=False)

    @property
    def max_batch_size(self) -> int:
        """Rows of the largest batch; 0 where the model has no batch dimension."""
        assert self.config.max_batch_size is not None, "resolved when the model was opened"
        return self.config.max_batch_size

    def triton_config(self) -> dict[str, Any]:
        """The configuration in the shape of Triton's `/v2/models/{name}/config`."""
        config: dict[str, Any] = {
            "name": self.name,
            "platform": self.backend.platform,
            "backend": self.config.backend,
            "version_policy": _triton_version_policy(self.config.versions),
            "max_batch_size": self.max_batch_size,
            "input": [self._triton_tensor(spec) for spec in self.request_inputs],
            "output": [self._triton_tensor(spec) for spec in self.outputs],
            "default_model_filename": BACKEND_TO_MODEL_FILE[self.config.backend],
            "model_transaction_policy": {"decoupled": False},
        }
        if self.max_batch_size > 1:
            config["dynamic_batching"] = {
                "max_queue_delay_microseconds": round(self.config.max_queue_delay_ms * 1000),
                "default_queue_policy": {
                    "timeout_action": "REJECT",
                    "default_timeout_microseconds": round(self.config.request_timeout_ms * 1000),
                    "max_queue_size": self.config.max_queue_size,
                },
            }
        return config

    def close(self) -> None:
        """Free the model and its charge; no run may follow. May be called again."""
        self.resources.close()

    def _triton_tensor(self, spec: TensorSpec) -> dict[str, Any]:
        datatype = "STRING" if spec.datatype == "BYTES" else spec.datatype
        dims = spec.shape[1:] if self.max_batch_size > 0 else spec.shape
        return {"name": spec.name, "data_type": f"TYPE_{datatype}", "dims": list(dims)}


class ModelRepository:
    """The models of a folder, or a single file. Looks at the disk anew in every call; thread-safe.

    Names come from clients and are not trusted: what is not a plain folder name, or is a link that
    leaves the root, does not exist.
    """

    def __init__(
        self,
        root: Path,
        *,
        tables: Mapping[str, Table],
        device: Device,
        layout: Layout | None = None,
        trust_model_code: bool = False,
        onnx_runtime: Any = None,
    ) -> None:
        """`tables` are those that feature inputs may name; weights are charged to the device.

        Models run on the device. `trust_model_code` lets models of the backend torch run the code
        that `model.yaml` names; `onnx_runtime` stands for the package `onnxruntime`.
        """
        self._root = root
        self._tables = tables
        self._device = device
        self._layout = layout if layout is not None else FolderLayout(root)
        self._trust_model_code = trust_model_code
        self._onnx_runtime = onnx_runtime

    @classmethod
    def single_file(
        cls, path: Path, *, tables: Mapping[str, Table], device: Device
    ) -> ModelRepository:
        """A repository of one model file, without configuration."""
        return cls(path.parent, tables=tables, device=device, layout=SingleFileLayout(path))

    def __repr__(self) -> str:
        return f"<ModelRepository {str(self._root)!r}>"

    def names(self) -> list[str]:
        """The models on disk, sorted."""
        return self._layout.names()

    def versions(self, name: str) -> list[str]:
        """The versions of a model on disk, ascending; raises `ModelNotFoundError`."""
        return self._layout.versions(name)

    def open(self, name: str) -> list[LoadedModel]:
        """Open every version that the policy serves, ascending; blocks until all are ready.

        All or nothing. Raises `ModelNotFoundError`, or `ModelLoadError` that names the file.
        """
        config, label = self._config(name)
        with ExitStack() as opened:
            models = []
            for version in self._served(name, config, label):
                models.append(self._open_version(name, version, config, label))
                opened.callback(models[-1].close)
            opened.pop_all()
        return models

    def _config(self, name: str) -> tuple[ModelConfig, str]:
        """The model's config, and how error texts call the place to change it."""
        file = self._layout.config_file(name)
        if file is None:
            return ModelConfig(), f"model {name}"
        try:
            return load_yaml(file.path, ModelConfig, name=file.label), file.label
        except ConfigError as error:
            raise ModelConfigError(str(error)) from error

    def _served(self, name: str, config: ModelConfig, label: str) -> list[str]:
        versions = self._layout.versions(name)
        if not versions:
            raise ModelLoadError(f"model {name}: has no version folder, such as {name}/1")
        if config.versions.specific is None:
            assert config.versions.latest is not None
            return versions[-config.versions.latest :]
        wanted = [str(version) for version in sorted(set(config.versions.specific))]
        missing = [version for version in wanted if version not in versions]
        if missing:
            raise ModelConfigError(
                f"{label}: versions: no folder for {', '.join(missing)}; "
                f"there are {', '.join(versions)}"
            )
        return wanted

    def _open_version(
        self, name: str, version: str, config: ModelConfig, label: str
    ) -> LoadedModel:
        file = self._layout.model_file(name, version, BACKEND_TO_MODEL_FILE[config.backend])
        with ExitStack() as resources:
            self._charge(f"model:{name}:{version}", file, config, resources)
            try:
                backend = self._backend(file, config)
                resources.callback(backend.close)
                signature = resolve(config, backend.inputs, backend.outputs, self._tables)
            except ModelConfigError as error:
                raise ModelConfigError(f"{label}: {error} ({file.label})") from error
            return LoadedModel(
                name,
                version,
                config.model_copy(update={"max_batch_size": signature.max_batch_size}),
                signature.request_inputs,
                signature.outputs,
                signature.features,
                backend,
                resources.pop_all(),
            )

    def _backend(self, file: ModelFile, config: ModelConfig) -> Backend:
        if config.backend == "torch":
            try:
                from models.torch_backend import TorchBackend  # optional, and slow to import
            except ImportError as error:
                raise ModelLoadError(
                    f"{file.label}: the torch backend needs the package {error.name}; "
                    "pip install -c constraints.txt -e '.[torch]'"
                ) from error
            assert config.factory is not None, "checked by ModelConfig"
            return TorchBackend(
                file.path,
                factory=config.factory,
                inputs=[tensor.spec for tensor in config.inputs or ()],
                outputs=[tensor.spec for tensor in config.outputs or ()],
                label=file.label,
                device=self._device,
                trust_model_code=self._trust_model_code,
            )
        try:
            import onnxruntime

            from models.onnx_backend import OnnxBackend  # one of two packages, or none
        except ImportError as error:
            raise ModelLoadError(
                f"{file.label}: the onnxruntime backend needs the package {error.name}; "
                "pip install -c constraints.txt -e '.[cpu]', or see docs/gpu.md"
            ) from error
        return OnnxBackend(
            file.path,
            label=file.label,
            num_threads=config.intra_op_threads,
            device=self._device,
            providers=config.providers,
            cpu_fallback=config.cpu_fallback,
            runtime=self._onnx_runtime or onnxruntime,
        )

    def _charge(
        self, owner: str, file: ModelFile, config: ModelConfig, resources: ExitStack
    ) -> None:
        """Charge the bytes of the weights; during a reload the old version holds its own."""
        num_bytes = sum(path.stat().st_size for path in _weight_files(file, config))
        try:
            self._device.budget.charge(owner, num_bytes)
        except OutOfMemoryError as error:
            raise ModelLoadError(f"{file.label}: {error}") from error
        resources.callback(self._device.budget.discharge, owner, num_bytes)


def _weight_files(file: ModelFile, config: ModelConfig) -> list[Path]:
    if config.backend == "onnxruntime":
        return model_files(file.path, file.label)
    return [file.path] if file.path.is_file() else []  # the backend says what is missing


def _triton_version_policy(policy: VersionPolicy) -> dict[str, Any]:
    if policy.specific is not None:
        return {"specific": {"versions": sorted(set(policy.specific))}}
    return {"latest": {"num_versions": policy.latest}}
