"""The compiler of the backend: there to be found, never asked to compile."""

from __future__ import annotations

from types import ModuleType
from typing import Any, NoReturn

from triton.backends import compiler as triton_compiler

REASON = (
    "The test bed's Triton backend `cpu` compiles nothing; set TRITON_INTERPRET=1 before Triton is "
    "imported."
)


class InterpretedBackend(triton_compiler.BaseBackend):  # type: ignore[misc]
    """Fails whatever it is asked, with the reason."""

    @staticmethod
    def supports_target(target: Any) -> bool:
        """None but its own."""
        return bool(target.backend == "cpu")

    def hash(self) -> NoReturn:
        raise RuntimeError(REASON)

    def parse_options(self, options: dict[str, Any]) -> NoReturn:
        raise RuntimeError(REASON)

    def add_stages(self, stages: dict[str, Any], options: object, language: Any) -> NoReturn:
        raise RuntimeError(REASON)

    def load_dialects(self, context: Any) -> NoReturn:
        raise RuntimeError(REASON)

    def get_module_map(self) -> dict[str, ModuleType]:
        return {}
