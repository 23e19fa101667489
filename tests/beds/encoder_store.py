"""The store of vLLM's ECExampleConnector: a folder of encoded pictures that instances share.

``found`` and ``reused`` run in an engine, for ``engines.call``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.beds.answers import ask, outcomes
from tests.beds.checkpoints import write
from tests.beds.checkpoints.decoders import HIDDEN
from tests.beds.checkpoints.pictures import VisionCheckpoint, picture
from tests.beds.engines import engine

# What every vLLM calls the first picture of a process, if nobody names it.
FIRST = "renderer0-mm-1-image-0"
# Embeddings of a picture of 56 by 56 in the tiny Qwen2.5-VL.
ROWS = 4


def transfer_config(store: Path, role: str = "ec_both") -> dict[str, Any]:
    """The ECTransferConfig of an instance that uses the store."""
    return {
        "ec_connector": "ECExampleConnector",
        "ec_role": role,
        "ec_connector_extra_config": {"shared_storage_path": str(store)},
    }


def leave(store: Path, identifier: str, seed: int) -> None:
    """Store noise under an identifier, as the embedding of a picture that another has encoded."""
    import torch
    from safetensors.torch import save_file

    noise = torch.randn(ROWS, HIDDEN, generator=torch.Generator().manual_seed(seed))
    folder = store / identifier
    folder.mkdir(parents=True)
    save_file({"ec_cache": noise}, folder / "encoder_cache.safetensors")


def stored(store: Path) -> dict[str, bytes]:
    """Everything in the store: contents by identifier, as far as it is a folder's name."""
    return {
        str(path.parent.relative_to(store)): path.read_bytes()
        for path in store.rglob("encoder_cache.safetensors")
    }


def named(prompt: dict[str, Any], *uuids: str | None) -> dict[str, Any]:
    """The prompt with a UUID for each of its pictures."""
    return {**prompt, "multi_modal_uuids": {"image": list(uuids)}}


def found(folder: str) -> dict[str, Any]:
    """An instance with both caches off whose store holds what another has left there.

    Returns greatest differences of a log-probability from the answer of an instance that has
    encoded the picture itself, and the identifiers that it has stored.
    """
    from vllm.config import ECTransferConfig

    checkpoint = write("qwen25_vl", Path(folder, "model"))
    assert isinstance(checkpoint, VisionCheckpoint)
    store = Path(folder, "store")
    leave(store, FIRST, seed=1)
    leave(store, "left", seed=2)
    before = stored(store)
    transfer = ECTransferConfig(**transfer_config(store))
    off: dict[str, Any] = {"mm_processor_cache_gb": 0, "enable_prefix_caching": False}
    prompt = checkpoint.picture_prompt(1)
    with engine(checkpoint, **off, ec_transfer_config=transfer) as llm:
        first = ask(llm, prompt)
        right = ask(llm, named(prompt, "mine"))
        outside = ask(llm, named(prompt, "../outside"))
        other = ask(llm, checkpoint.picture_prompt(2))
        left = ask(llm, named(prompt, "left"))
    after = stored(store)
    return {
        "first": right.difference(first),
        "outside": right.difference(outside),
        "other": right.difference(other),
        "left": right.difference(left),
        "stored": sorted(after.keys() - before.keys()),
        "overwritten": sorted(name for name in before if after[name] != before[name]),
        "outside_files": sorted(path.name for path in Path(folder).glob("outside*")),
    }


def reused(folder: str) -> dict[str, Any]:
    """A UUID of a picture of four embeddings is used again for one of one embedding."""
    checkpoint = write("qwen25_vl", Path(folder, "model"))
    assert isinstance(checkpoint, VisionCheckpoint)
    large = named(checkpoint.picture_prompt(1), "again")
    small = {**large, "multi_modal_data": {"image": [picture(1, 28)]}}
    with engine(checkpoint, mm_processor_cache_gb=0) as llm:
        right = ask(llm, large)
        llm.reset_prefix_cache()
        try:
            (second,) = outcomes(llm, [small], steps=20)
        except Exception as error:
            return {"second": f"the engine died of {type(error).__name__}: {error}"}
        after = ask(llm, large)
    return {
        "second": second if isinstance(second, str) else "answered",
        "after": right.difference(after),
    }
