"""Errors of the model repository and the backends; the server maps each to one HTTP status."""


class ModelError(Exception):
    """Base of every error that `models` raises on purpose."""


class ModelNotFoundError(ModelError):
    """The repository has no model, or no version of it, with that name."""


class ModelNotReadyError(ModelError):
    """The model is known but not loaded."""


class ModelLoadError(ModelError):
    """A model could not be loaded; the text names the file and the reason."""


class ModelConfigError(ModelLoadError):
    """`model.yaml` is wrong or does not fit the model file."""


class BackendError(ModelError):
    """A run of the model failed; its inputs were accepted but could not be computed."""


class InvalidInputError(BackendError):
    """The content of an input is not what the model can take; the caller is at fault."""
