"""Vision-language models: Idefics3 and Qwen2.5-VL, with towers that look at what they are shown."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from transformers import (
    AutoTokenizer,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3Processor,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
)
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

from tests.beds.checkpoints.checkpoint import (
    POSITIONS,
    VOCABULARY_SIZE,
    Checkpoint,
    randomise,
)
from tests.beds.checkpoints.decoders import BLOCK_SIZE, HIDDEN, shape
from tests.beds.tokenizer import save_tokenizer, sentence, vocabulary


@dataclass(frozen=True)
class VisionCheckpoint(Checkpoint):
    """A checkpoint that takes pictures; ``placeholder`` stands for one in a text prompt."""

    placeholder: str = ""

    def picture_prompt(self, *seeds: int, words: int = 12) -> dict[str, Any]:
        """A prompt for ``LLM.generate`` of pictures, one for each seed, and ``words`` words."""
        return {
            "prompt": self.placeholder * len(seeds) + " " + sentence(words, 0),
            "multi_modal_data": {"image": [picture(seed) for seed in seeds]},
        }


def picture(seed: int, size: int = 56) -> Image.Image:
    """A square RGB picture of coarse noise, the same for the same seed."""
    coarse = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((size, size), Image.Resampling.NEAREST)


def idefics3(path: Path, seed: int = 0) -> VisionCheckpoint:
    """Write an Idefics3: a Llama after a vision tower of two layers, four tokens per picture.

    The one family that needs no torchvision.
    """
    fake, image, whole = "<fake_token_around_image>", "<image>", "<global-img>"
    specials = (fake, image, whole, "<end_of_utterance>")
    config = Idefics3Config(
        image_token_id=vocabulary(VOCABULARY_SIZE, specials)[image],
        scale_factor=2,
        text_config={"model_type": "llama", **shape()},
        vision_config={
            "hidden_size": HIDDEN,
            "intermediate_size": 2 * HIDDEN,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 32,
            "patch_size": 8,
        },
        tie_word_embeddings=False,
        pad_token_id=0,
    )
    checkpoint = _finish(
        path,
        Idefics3ForConditionalGeneration(config),
        seed,
        specials,
        norm="model.text_model.layers.0.input_layernorm.weight",
        placeholder=image,
        needs=(),
    )
    Idefics3Processor(
        Idefics3ImageProcessorPil(
            size={"longest_edge": 32},
            max_image_size={"longest_edge": 32},
            do_image_splitting=False,
        ),
        AutoTokenizer.from_pretrained(path),
        image_seq_len=4,
    ).save_pretrained(path)
    return checkpoint


def qwen25_vl(path: Path, seed: int = 0) -> VisionCheckpoint:
    """Write a Qwen2.5-VL: four tokens for a picture of 56 by 56; needs torchvision."""
    start, end, image, video = (
        "<|vision_start|>",
        "<|vision_end|>",
        "<|image_pad|>",
        "<|video_pad|>",
    )
    specials = (start, end, image, video)
    words = vocabulary(VOCABULARY_SIZE, specials)
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
    config = Qwen2_5_VLConfig(
        text_config=shape(rope_parameters=rope),
        vision_config={
            "depth": 2,
            "hidden_size": HIDDEN,
            "intermediate_size": 2 * HIDDEN,
            "num_heads": 2,
            "out_hidden_size": HIDDEN,
            "patch_size": 14,
            "window_size": 112,
            "fullatt_block_indexes": [1],
        },
        vision_start_token_id=words[start],
        vision_end_token_id=words[end],
        image_token_id=words[image],
        video_token_id=words[video],
        tie_word_embeddings=False,
    )
    checkpoint = _finish(
        path,
        Qwen2_5_VLForConditionalGeneration(config),
        seed,
        specials,
        norm="language_model.model.layers.0.input_layernorm.weight",
        placeholder=start + image + end,
        needs=("torchvision",),
    )
    patches = {
        "processor_class": "Qwen2_5_VLProcessor",
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "size": {"shortest_edge": 28 * 28, "longest_edge": 56 * 56},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    processors = {
        "preprocessor_config.json": {"image_processor_type": "Qwen2VLImageProcessor"},
        "video_preprocessor_config.json": {"video_processor_type": "Qwen2VLVideoProcessor"},
    }
    for file, kind in processors.items():
        (path / file).write_text(json.dumps({**patches, **kind}, indent=2))
    return checkpoint


def _finish(
    path: Path,
    model: PreTrainedModel,
    seed: int,
    specials: Sequence[str],
    **facts: Any,
) -> VisionCheckpoint:
    randomise(model, seed)
    model.save_pretrained(path)
    save_tokenizer(path, POSITIONS, VOCABULARY_SIZE, specials)
    engine = {"block_size": BLOCK_SIZE, "limit_mm_per_prompt": {"image": 2, "video": 0}}
    return VisionCheckpoint(path, engine=engine, **facts)
