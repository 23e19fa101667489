"""Captured messages in a file: one multipart message a line, a JSON array of base64 frames."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterator, Sequence
from pathlib import Path


class CaptureError(ValueError):
    """A capture that can't be read; the message says what was found."""


def as_line(frames: Sequence[bytes | bytearray | memoryview]) -> str:
    """One message as a line of a capture file, without the newline."""
    return json.dumps([base64.b64encode(frame).decode() for frame in frames])


def read_capture(path: Path) -> Iterator[tuple[int, list[bytes]]]:
    """Line number and frames of each message. Raises CaptureError for a line that isn't one."""
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield number, _frames(line, number)
    except OSError as error:
        raise CaptureError(f"{path} can't be read: {error.strerror or error}") from error


def _frames(line: bytes, number: int) -> list[bytes]:
    try:
        frames = json.loads(line)
        if not isinstance(frames, list) or not frames:
            raise ValueError("expected a JSON array of at least one frame")
        return [base64.b64decode(frame, validate=True) for frame in frames]
    except (ValueError, TypeError, RecursionError, binascii.Error) as error:
        raise CaptureError(
            f"line {number} is no captured message, which is a JSON array of base64 texts, one for "
            f"each frame: {error}"
        ) from error
