"""Errors of the cache; the server maps each to one HTTP status."""


class CacheError(Exception):
    """Base of every error that the cache raises on purpose."""


class OutOfMemoryError(CacheError):
    """A budget or the machine has no room for what was asked."""


class DeviceError(CacheError):
    """A device cannot be used, or has failed; the text says what to do."""


class TableError(CacheError):
    """A table's folder, `table.yaml` or row file is not as it must be."""


class UnknownTableError(CacheError):
    """No table has that name."""


class AbsentKeyError(CacheError):
    """A table with `absent: error` was asked for a key that it does not have."""


class SourceError(CacheError):
    """Rows could not be read from the source; nothing of that read was admitted."""
