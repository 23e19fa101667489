"""What MM_UUIDS adds to a picture without UUID on an instance with a connector and both caches off.

Its content is hashed, by vLLM's own hasher. Beside it, by turns, what the frontend does with the
picture anyway: decoding the JPEG and the image processor of Qwen2.5-VL, on one thread. A picture
that came over HTTP is hashed as it came, one that was given to ``LLM`` by its pixels.

    python -m benchmarks.picture_hash [--release 0.29.0] [--rounds 15] [--json FILE]
"""

from __future__ import annotations

import argparse
import io
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from PIL import Image
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.measure import Spread, describe, machine, measured, save
from tests.beds.layout import extra_path

SIZES = (512, 1024, 2048)
HASHES = {"bytes": "over HTTP", "pixels": "to LLM"}


def picture(size: int) -> tuple[Image.Image, bytes]:
    """A square picture of smooth noise, and its JPEG."""
    coarse = np.random.default_rng(size).integers(0, 256, (size // 8, size // 8, 3), dtype=np.uint8)
    made = Image.fromarray(coarse).resize((size, size), Image.Resampling.BICUBIC)
    written = io.BytesIO()
    made.save(written, "jpeg", quality=90)
    return made, written.getvalue()


def milliseconds(act: Callable[[], object]) -> float:
    """CPU time of one call."""
    start = time.process_time_ns()
    act()
    return (time.process_time_ns() - start) / 1e6


def acts(size: int) -> dict[str, Callable[[], object]]:
    """The two hashes and the work they are compared with."""
    from transformers import Qwen2VLImageProcessor
    from vllm.multimodal.hasher import MultiModalHasher
    from vllm.multimodal.media import MediaWithBytes

    shown, raw = picture(size)
    came = MediaWithBytes(shown, raw)
    processor = Qwen2VLImageProcessor(min_pixels=28 * 28, max_pixels=4096 * 4096)

    def prepare() -> None:
        decoded = Image.open(io.BytesIO(raw)).convert("RGB")
        processor(images=[decoded], return_tensors="pt")

    return {
        "bytes": lambda: MultiModalHasher.hash_kwargs("blake3", model_id="model", image=came),
        "pixels": lambda: MultiModalHasher.hash_kwargs("blake3", model_id="model", image=shown),
        "prepare": prepare,
    }


def main() -> None:
    """Measure and print."""
    description = __doc__.partition("\n")[0]
    options = measured(description, __spec__.name, "rounds", 15)
    sys.path.insert(0, str(extra_path("torchvision")))
    _measure(options)


def _measure(options: argparse.Namespace) -> None:
    import torch

    torch.set_num_threads(1)
    console = Console()
    where = machine()
    console.print(describe(where))
    table = Table("picture", "hashed", "ms to hash", "ms to decode and process", "ratio")
    figures: dict[str, Any] = {}
    for size in SIZES:
        timed = acts(size)
        spent: dict[str, list[float]] = {name: [] for name in timed}
        for number in track(range(-1, options.rounds), description=f"{size}", console=console):
            for name, act in timed.items():
                took = milliseconds(act)
                if number >= 0:
                    spent[name].append(took)
        figures[str(size)] = spent
        for name, how in HASHES.items():
            pairs = zip(spent[name], spent["prepare"], strict=True)
            ratio = Spread.of([hashed / prepared for hashed, prepared in pairs])
            table.add_row(
                f"{size} x {size}",
                how,
                Spread.of(spent[name]).text(2),
                Spread.of(spent["prepare"]).text(),
                ratio.text(4),
            )
    console.print(table)
    if options.json:
        save(options.json, {"machine": where, "release": options.release, "rows": figures})


if __name__ == "__main__":
    main()
