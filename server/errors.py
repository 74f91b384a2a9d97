"""Every error that a client can see, with its HTTP status, and how foreign errors map to them."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import cache.errors
import models.errors

logger = logging.getLogger(__name__)


class ServerError(Exception):
    """Base of the errors that are answered with their own text and status."""

    status = 500
    retry_after_s: int | None = None

    def headers(self) -> Mapping[str, str]:
        """The response headers that belong to this error."""
        return {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}


class InternalError(ServerError):
    """Something failed that nobody foresaw; the public text is fixed, the log has the traceback."""

    def __init__(self) -> None:
        super().__init__("internal error; the server's log has the details")


class InvalidRequestError(ServerError):
    """The request is wrong: the text names the thing, what was expected and what came."""

    status = 400


class NotFoundError(ServerError):
    """No such model, version, table or path."""

    status = 404


class MethodNotAllowedError(ServerError):
    """The path exists, but not with this HTTP method."""

    status = 405

    def __init__(self, text: str, allowed: str) -> None:
        super().__init__(text)
        self.allowed = allowed

    def headers(self) -> Mapping[str, str]:
        """Names the allowed methods."""
        return {"Allow": self.allowed}


class PayloadTooLargeError(ServerError):
    """The body, decoded where it is compressed, is over the limit."""

    status = 413


class UnsupportedEncodingError(ServerError):
    """The Content-Encoding is not one that the server decodes."""

    status = 415

    def headers(self) -> Mapping[str, str]:
        """Names the encodings that the server decodes."""
        return {"Accept-Encoding": "gzip, deflate, identity"}


class InferenceError(ServerError):
    """The model could not compute this request."""

    status = 500


class DeviceFailedError(InferenceError):
    """The device has failed and does not come back before a restart."""

    status = 503


class UnavailableError(ServerError):
    """The server cannot take this request now."""

    status = 503
    retry_after_s = 1


class QueueFullError(UnavailableError):
    """The queue of the model, or of the table lookups, holds as many requests as it may."""


class RequestTimeoutError(UnavailableError):
    """The request's time-out passed while it was queued; it was not executed."""


class LoadingError(UnavailableError):
    """The model is not loaded yet, but will be."""


class ShuttingDownError(UnavailableError):
    """The server is draining and takes no new requests."""


class ClientDisconnectedError(Exception):
    """The client went away before its answer was there; there is nobody to answer."""


_FOREIGN_ERRORS: tuple[tuple[type[Exception], type[ServerError]], ...] = (
    (models.errors.ModelNotFoundError, NotFoundError),
    (models.errors.ModelNotReadyError, InvalidRequestError),
    (models.errors.ModelLoadError, InvalidRequestError),
    (models.errors.InvalidInputError, InvalidRequestError),
    (models.errors.BackendError, InferenceError),
    (cache.errors.UnknownTableError, NotFoundError),
    (cache.errors.AbsentKeyError, InvalidRequestError),
    (cache.errors.SourceError, InferenceError),
    (cache.errors.OutOfMemoryError, UnavailableError),
    (cache.errors.DeviceError, DeviceFailedError),
)


def as_server_error(error: BaseException, where: str) -> ServerError:
    """The error as the client sees it, with the foreign one as its cause.

    A foreign error that is the server's fault is logged with `where`, the model or the path; one
    that is not known here with its traceback too.
    """
    if isinstance(error, ServerError):
        return error
    server_error = _mapped(error)
    server_error.__cause__ = error
    if isinstance(server_error, InternalError):
        logger.error("%s: unexpected error", where, exc_info=error)
    elif server_error.status >= 500:
        logger.warning("%s: %s", where, error)
    return server_error


def _mapped(error: BaseException) -> ServerError:
    for foreign, own in _FOREIGN_ERRORS:
        if isinstance(error, foreign):
            return own(str(error))
    return InternalError()
