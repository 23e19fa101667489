"""Requests with NaN, then innocent ones, on one engine: who else pays?

The engine lives in this process (``VLLM_ENABLE_V1_MULTIPROCESSING=0``), so that a test can change
options between two rounds. Innocent requests are asked one after another, so that their numbers
don't depend on a batch, and are compared bit by bit with what the fresh engine answered.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.beds.corrupt import CorruptLlama, corrupt_llama

INNOCENT, CORRUPT = 20, 5
_ENVIRON = {
    # The test registers the plugin itself, or not.
    "VLLM_PLUGINS": "",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # Attention that doesn't depend on the batch.
    "VLLM_CPU_ATTN_SPLIT_KV": "0",
    "HF_HUB_OFFLINE": "1",
}


@dataclass(frozen=True)
class Answer:
    """What a request got: token ids, the bits of its logprobs as text, and how it ended."""

    tokens: tuple[int, ...]
    logprobs: tuple[str, ...]
    finish: str
    reason: str = ""


class Engine:
    """A running engine on the checkpoint."""

    def __init__(self, llm: Any, model: CorruptLlama) -> None:
        self.llm, self.model = llm, model

    def ask(self, prompts: Sequence[list[int]], tokens: int, logprobs: int | None) -> list[Answer]:
        """Answers to prompts that are sent at once."""
        from vllm import SamplingParams

        how = SamplingParams(temperature=0.0, max_tokens=tokens, logprobs=logprobs, ignore_eos=True)
        outputs = self.llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts], how, use_tqdm=False
        )
        return [_answer(output) for output in outputs]

    def innocent(self) -> list[Answer]:
        """The answers of short requests without NaN, asked one after another, with logprobs."""
        words = self.model.clean_words
        asked = [
            self.model.ids(*(words[(at * 7 + step * 3) % len(words)] for step in range(4 + at)))
            for at in range(INNOCENT)
        ]
        return [self.ask([prompt], 6, 3)[0] for prompt in asked]

    def corrupt(self, logprobs: int | None = None) -> list[Answer]:
        """Long requests with NaN in token 41, counted from 0, at once."""
        words = self.model.clean_words
        asked = [
            self.model.ids(*words[at : at + 40], self.model.nan_word, *words[at : at + 90])
            for at in range(CORRUPT)
        ]
        return self.ask(asked, 20, logprobs)


def damage(fresh: Sequence[Answer], now: Sequence[Answer]) -> str:
    """How many innocent requests differ from what a fresh engine answered, in words."""
    wrong = [one for one, two in zip(fresh, now, strict=True) if one != two]
    other = [one for one, two in zip(fresh, now, strict=True) if one.tokens != two.tokens]
    return f"{len(wrong)} of {len(fresh)} innocent requests differ, {len(other)} in their text"


def _answer(output: Any) -> Answer:
    (one,) = output.outputs
    ranked = one.logprobs or []
    bits = tuple(
        f"{token}:{value.logprob.hex()}" for step in ranked for token, value in step.items()
    )
    return Answer(tuple(one.token_ids), bits, str(one.finish_reason), str(one.stop_reason or ""))


@contextmanager
def engine(
    folder: Path,
    *,
    caching: bool,
    dtype: str = "bfloat16",
    shape: Mapping[str, int] | None = None,
    **how: Any,
) -> Iterator[Engine]:
    """An engine on a checkpoint written to ``folder``; vLLM is imported here, not before.

    ``shape``: sizes of the checkpoint, as ``corrupt_llama`` takes them.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name, value in _ENVIRON.items():
            patch.setenv(name, value)
        from vllm import LLM
        from vllm.distributed import cleanup_dist_env_and_memory

        model = corrupt_llama(folder, dtype=dtype, **(shape or {}))
        llm = LLM(
            str(folder),
            dtype=dtype,
            enforce_eager=True,
            max_model_len=512,
            block_size=32,
            enable_prefix_caching=caching,
            max_num_seqs=8,
            seed=0,
            **{"disable_log_stats": True, **how},
        )
        try:
            yield Engine(llm, model)
        finally:
            llm.llm_engine.engine_core.shutdown()
            del llm
            cleanup_dist_env_and_memory()
