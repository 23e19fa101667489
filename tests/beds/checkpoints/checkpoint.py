"""What every family writes: a folder vLLM can serve, whose answers depend on all that is in it."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.beds.tokenizer import VOCABULARY

VOCABULARY_SIZE = 128
POSITIONS = 512
# The rotary operator of the CPU library takes a query of three dimensions for one of two, so that
# an answer depends on its batch; torch's own does not. For families that rotate such queries.
NATIVE_ROPE = {"custom_ops": ["none"]}


@dataclass(frozen=True)
class Checkpoint:
    """A float32 checkpoint with seeded random weights, config and tokenizer.

    ``engine`` are the keyword arguments of ``vllm.LLM`` besides the model, ``norm`` is vLLM's name
    of one norm weight on the way of every token, ``needs`` the names in ``layout.EXTRAS`` that its
    vLLM module imports. ``adapts`` are the ends of the module names that an adapter may change on
    a CPU; none where no forward with an adapter exists.
    """

    path: Path
    norm: str
    engine: Mapping[str, Any] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    adapts: tuple[str, ...] = ()

    @property
    def arguments(self) -> dict[str, Any]:
        """All keyword arguments of ``vllm.LLM`` for a small, eager, seeded engine on a CPU."""
        common = {
            "model": str(self.path),
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": POSITIONS,
            "max_num_seqs": 4,
            "seed": 0,
        }
        return {**common, **self.engine}

    @property
    def serve_args(self) -> tuple[str, ...]:
        """``arguments`` as ``vllm serve`` takes them, without the model."""
        given: list[str] = []
        for name, value in self.arguments.items():
            flag = "--" + name.replace("_", "-")
            if name == "model":
                continue
            if isinstance(value, bool):
                given.append(flag if value else f"--no-{flag.removeprefix('--')}")
            else:
                text = json.dumps(value) if isinstance(value, dict) else str(value)
                given += [flag, text]
        return tuple(given)

    def prompt(self, length: int = 40, seed: int = 0) -> list[int]:
        """``length`` token ids of words, the same for the same seed."""
        first, last = 4, len(VOCABULARY) - 1
        drawn = random.Random(seed)
        return [drawn.randint(first, last) for _ in range(length)]
