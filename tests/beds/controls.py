"""Negative controls of a checkpoint: what its log-probabilities notice, in one engine start.

Functions for ``engines.call``. Each returns greatest differences of a log-probability from the
undisturbed answer, by what was done; ``test_checkpoints`` says which must be none and which large.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.beds import kv_store
from tests.beds.answers import ask, ask_all, changed_weight, spoil_cache
from tests.beds.checkpoints import write
from tests.beds.checkpoints.adapter import write_adapter
from tests.beds.checkpoints.pictures import VisionCheckpoint
from tests.beds.engines import engine

# Long enough for a complete unit of every family and the tokens after it.
_LENGTH = 140
_OTHER_LENGTH = 33


def generation(name: str, folder: str) -> dict[str, float]:
    """Norm weight, cache, adapter and picture; and that batch and repetition change nothing."""
    checkpoint = write(name, Path(folder, name))
    prompt: Any = checkpoint.prompt(_LENGTH)
    if isinstance(checkpoint, VisionCheckpoint):
        prompt = checkpoint.picture_prompt(0)
    lora: dict[str, Any] = {"enable_lora": True, "max_loras": 2} if checkpoint.adapts else {}
    found: dict[str, float] = {}
    with engine(checkpoint, **lora) as llm:
        right = ask(llm, prompt)

        def told(**how: Any) -> float:
            llm.reset_prefix_cache()
            return right.difference(ask(llm, prompt, **how))

        found["repeated"] = right.difference(ask(llm, prompt))
        with changed_weight(llm, checkpoint.norm):
            found["norm"] = told()
        found["cache"] = told(after={1: lambda: spoil_cache(llm)})
        llm.reset_prefix_cache()
        other = checkpoint.prompt(_OTHER_LENGTH, seed=1)
        found["batched"] = right.difference(ask_all(llm, [prompt, other])[0])
        if checkpoint.adapts:
            adapter = write_adapter(Path(folder, f"{name}-adapter"), checkpoint)
            found["adapter"] = told(lora=adapter.request())
            llm.reset_prefix_cache()
            # Both slots are taken, the last one too; a request without an adapter is beside them.
            second = write_adapter(Path(folder, f"{name}-second"), checkpoint, number=2)
            loras = [None, adapter.request(), second.request()]
            found["mixed"] = right.difference(ask_all(llm, [prompt] * 3, loras=loras)[0])
        if isinstance(checkpoint, VisionCheckpoint):
            found["picture"] = right.difference(ask(llm, checkpoint.picture_prompt(1)))
        found["restored"] = told()
    return found


def loads(name: str, folder: str, asynchronous: bool) -> dict[str, float]:
    """KV of another run, loaded by ``kv_store``: as it was saved, corrupted, and failed.

    Also returns the tokens that came from the store, as ``external_tokens``.
    """
    from vllm.config import KVTransferConfig

    checkpoint = write(name, Path(folder, name))
    store = Path(folder, f"{name}-store-{int(asynchronous)}")
    prompt = checkpoint.prompt(_LENGTH)
    config = kv_store.transfer_config(
        store, asynchronous=asynchronous, kv_load_failure_policy="recompute"
    )
    found: dict[str, float] = {}
    with engine(checkpoint, kv_transfer_config=KVTransferConfig(**config)) as llm:
        right = ask(llm, prompt)
        llm.reset_prefix_cache()
        loaded = ask(llm, prompt)
        found["loaded"] = right.difference(loaded)
        found["external_tokens"] = loaded.cached_tokens
        llm.reset_prefix_cache()
        kv_store.arm(store, kv_store.Fault("corrupt"))
        found["corrupted"] = right.difference(ask(llm, prompt))
        if name == "llama":
            # One KV group: every release recovers from it by itself.
            llm.reset_prefix_cache()
            kv_store.arm(store, kv_store.Fault("fail"))
            found["recomputed"] = right.difference(ask(llm, prompt))
    return found


def partial_hit(folder: str, length: int) -> dict[str, float]:
    """An LFM2 whose prefixes are matched every 32 tokens in blocks of 128: a hit in a block."""
    checkpoint = write("lfm2", Path(folder, "lfm2"))
    prompt = checkpoint.prompt(length)
    with engine(checkpoint, prefix_match_unit=32) as llm:
        right, again = ask(llm, prompt), ask(llm, prompt)
    return {"hit": right.difference(again), "cached_tokens": again.cached_tokens}
