"""Every error that a client can see, with its HTTP status."""

from __future__ import annotations


class ServerError(Exception):
    """Base of the errors that are answered with their own text and status."""

    status = 500
    retry_after_s: int | None = None


class InvalidRequestError(ServerError):
    """The request is wrong: the text names the thing, what was expected and what came."""

    status = 400


class NotFoundError(ServerError):
    """No such model, version, table or path."""

    status = 404


class PayloadTooLargeError(ServerError):
    """The body, decoded where it is compressed, is over the limit."""

    status = 413


class UnsupportedEncodingError(ServerError):
    """The Content-Encoding is not one that the server decodes."""

    status = 415


class InferenceError(ServerError):
    """The model could not compute this request."""

    status = 500


class UnavailableError(ServerError):
    """The server cannot take this request now."""

    status = 503
    retry_after_s = 1


class QueueFullError(UnavailableError):
    """The model's queue holds `max_queue_size` requests."""


class RequestTimeoutError(UnavailableError):
    """The request's time-out passed while it was queued; it was not executed."""


class ShuttingDownError(UnavailableError):
    """The server is draining and takes no new requests."""
