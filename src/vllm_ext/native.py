"""The compiled extensions and what takes over when one is missing.

`python -m vllm_ext.native` prints what this installation has. Importing this module loads neither
torch nor an extension.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy
    import torch

OPS_LIBRARY = Path(__file__).with_name("_ops.so")
# Bytes of a copy from which on it would push all else out of the caches.
STREAMING_FROM = 4 * 1024**2
_FALL_BACK = {"_C": "pure Python takes over", "_ops": "torch's own operators take over"}


def status() -> dict[str, str]:
    """For each extension 'built', or 'not built: ' and what falls back. Looks at files only."""
    present = {
        "_C": importlib.util.find_spec("vllm_ext._C") is not None,
        "_ops": OPS_LIBRARY.is_file(),
    }
    return {
        name: "built" if there else f"not built: {_FALL_BACK[name]}"
        for name, there in present.items()
    }


def build_info() -> dict[str, str | int]:
    """What `vllm_ext._C` was built with; empty when it was not built."""
    extension = _buffers()
    return dict(extension.build_info()) if extension is not None else {}


def sum_u8(buffer: bytes | bytearray | memoryview) -> int:
    """Sum of the bytes of a C-contiguous buffer."""
    extension = _buffers()
    if extension is not None:
        return int(extension.sum_u8(buffer))
    return sum(memoryview(buffer).cast("B"))


def copy_spans(
    sources: Sequence[numpy.ndarray[Any, Any]],
    destinations: Sequence[numpy.ndarray[Any, Any]],
    spans: numpy.ndarray[Any, Any],
    streaming_from: int = STREAMING_FROM,
) -> int:
    """Copy spans between buffers, ``sources[i]`` to ``destinations[i]``; returns the bytes copied.

    Buffers are 1-D arrays of bytes (uint8, C-contiguous). ``spans`` is int64 [n, 4]: buffer, source
    offset, destination offset and size, all in bytes. Destinations must not overlap. The compiled
    extension holds no interpreter lock meanwhile, and copies a job of at least ``streaming_from``
    bytes past the caches.

    Raises IndexError, and copies nothing, if a span leaves its buffers.
    """
    extension = _buffers()
    if extension is not None:
        return int(extension.copy_spans(sources, destinations, spans, streaming_from))
    _check_spans(sources, destinations, spans)
    for buffer, source, destination, size in spans.tolist():
        destinations[buffer][destination : destination + size] = sources[buffer][
            source : source + size
        ]
    return int(spans[:, 3].sum())


def _check_spans(
    sources: Sequence[numpy.ndarray[Any, Any]],
    destinations: Sequence[numpy.ndarray[Any, Any]],
    spans: numpy.ndarray[Any, Any],
) -> None:
    for buffer, source, destination, size in spans.tolist():
        if not 0 <= buffer < len(sources):
            raise IndexError(f"a span names buffer {buffer} of {len(sources)}; nothing was copied.")
        for side, offset, held in (
            ("source", source, sources[buffer].size),
            ("destination", destination, destinations[buffer].size),
        ):
            if offset < 0 or size < 0 or offset + size > held:
                raise IndexError(
                    f"{size} bytes at offset {offset} of {side} buffer {buffer}, which has {held} "
                    "bytes; nothing was copied."
                )


def add_one(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor + 1`, in one compiled op where it applies: float32 on CPU, no gradient wanted."""
    import torch

    applies = tensor.device.type == "cpu" and tensor.dtype == torch.float32
    if applies and not tensor.requires_grad and load_ops():
        return torch.ops.vllm_ext.add_one(tensor)
    return tensor + 1


def load_ops() -> bool:
    """Loads the ops library into torch; False when it was not built."""
    if not OPS_LIBRARY.is_file():
        return False
    import torch

    torch.ops.load_library(str(OPS_LIBRARY))
    return True


def _buffers() -> ModuleType | None:
    if importlib.util.find_spec("vllm_ext._C") is None:
        return None
    return importlib.import_module("vllm_ext._C")


if __name__ == "__main__":
    for name, state in status().items():
        print(f"vllm_ext.{name}: {state}")
