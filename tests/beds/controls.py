"""Negative controls of a checkpoint: what its log-probabilities notice, in one engine start.

Functions for ``engines.call``. Each returns greatest differences of a log-probability from the
undisturbed answer. Those in ``SAME`` must be below ``answers.TOLERANCE``; those in ``MOVED`` above
``CLEAR``, or the checkpoint proves nothing.
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

CLEAR = 0.05
SAME = ("repeated", "restored", "batched", "loaded", "recomputed")
MOVED = ("norm", "cache", "adapter", "picture", "corrupted")
# Long enough for a complete unit of every family and the tokens after it.
_LENGTH = 140
_OTHER_LENGTH = 33


def generation(name: str, folder: str) -> dict[str, float]:
    """Norm weight, cache, adapter and picture; and that batch and repetition change nothing."""
    checkpoint = write(name, Path(folder, name))
    prompt: Any = checkpoint.prompt(_LENGTH)
    if isinstance(checkpoint, VisionCheckpoint):
        prompt = checkpoint.picture_prompt(0)
    lora = {"enable_lora": True, "max_loras": 2} if checkpoint.adapts else {}
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
