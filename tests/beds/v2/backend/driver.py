"""The driver of the backend: the one device of this machine is its CPU."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from triton.backends import compiler as triton_compiler
from triton.backends import driver as triton_driver

from tests.beds.v2.backend.compiler import REASON


class CpuDriver(triton_driver.DriverBase):  # type: ignore[misc]
    """Active always; can name its target and its device, and launch nothing."""

    def __init__(self) -> None:
        """No device to set up."""

    @staticmethod
    def is_active() -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> NoReturn:
        raise RuntimeError(REASON)

    def get_current_target(self) -> Any:
        return triton_compiler.GPUTarget("cpu", 0, 1)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_current_device(self) -> int:
        return 0

    def set_current_device(self, device: int) -> None:
        """There is but one."""

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"multiprocessor_count": 1, "max_shared_mem": 1 << 16, "warpSize": 1}

    def get_benchmarker(self) -> NoReturn:
        raise RuntimeError(REASON)

    def get_empty_cache_for_benchmark(self) -> NoReturn:
        raise RuntimeError(REASON)

    def clear_cache(self, cache: Any) -> None:
        """There is none."""
