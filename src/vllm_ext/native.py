"""The compiled extensions and what takes over when one is missing.

`python -m vllm_ext.native` prints what this installation has. Importing this module loads neither
torch nor an extension.
"""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

OPS_LIBRARY = Path(__file__).with_name("_ops.so")
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
