"""Log lines as text or as one JSON object each; what is given as `extra` becomes fields."""

from __future__ import annotations

import logging
import sys
from datetime import UTC, datetime
from typing import Any

import orjson

_STANDARD_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def configure_logging(log_format: str, log_level: str) -> None:
    """Sends all log lines to stderr in the given form (text or json), from the given level on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(log_level.upper())
    # The service says itself what uvicorn would say about its start and its end.
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    logging.getLogger("numba").setLevel(logging.WARNING)
    logging.captureWarnings(True)


def _time(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _extra_fields(record: logging.LogRecord) -> dict[str, Any]:
    return {name: value for name, value in vars(record).items() if name not in _STANDARD_FIELDS}


class TextFormatter(logging.Formatter):
    """`time level logger: message name=value ...`, and the traceback below."""

    def format(self, record: logging.LogRecord) -> str:
        """The lines of one record."""
        fields = "".join(f" {name}={value}" for name, value in _extra_fields(record).items())
        line = f"{_time(record)} {record.levelname} {record.name}: {record.getMessage()}{fields}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message, the extra fields, traceback."""

    def format(self, record: logging.LogRecord) -> str:
        """The line of one record."""
        line = {
            "time": _time(record),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **_extra_fields(record),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return orjson.dumps(line, default=str, option=orjson.OPT_NON_STR_KEYS).decode()
