"""Nemotron Nano VL: attention and MLP layers only (pattern ``*-*-``) after a RADIO tower.

There is neither a Mamba layer nor an expert in it, which the CPU can't run for this family. The
tower has the size of the smallest that vLLM knows by name; vLLM casts to bfloat16 in places, so
everything is bfloat16.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.beds.checkpoints.checkpoint import POSITIONS, VOCABULARY_SIZE
from tests.beds.checkpoints.decoders import BLOCK_SIZE, HEAD_DIM, HEADS, HIDDEN
from tests.beds.checkpoints.pictures import VisionCheckpoint
from tests.beds.tokenizer import END, PAD, START, VOCABULARY, save_tokenizer

PATTERN = "*-*-"
MARKERS = ("<img>", "</img>", "<image>", "<video>")
_TOWER = "vit_small_patch16_224"
_WIDTH, _DEPTH, _MLP = 384, 12, 1536
_PATCH, _SIDE = 16, 32
_MAX_SIDE = 64
_PROJECTOR = 64

_CONFIG_CLASSES = '''"""Configuration of the tiny Nemotron Nano VL."""

from transformers import PretrainedConfig


def _language_config(values):
    try:
        from vllm.transformers_utils.configs.nemotron_h import NemotronHConfig
    except ImportError:
        from transformers import NemotronHConfig
    return NemotronHConfig(**values)


class TinyNemotronConfig(PretrainedConfig):
    model_type = "NemotronH_Nano_VL_V2"
    is_composition = True

    def __init__(self, vision_config=None, llm_config=None, **kwargs):
        self.vision_config = PretrainedConfig(**(vision_config or {}))
        self.text_config = _language_config(llm_config or {})
        super().__init__(**kwargs)
        self.text_config.dtype = self.dtype

    def get_text_config(self, *args, **kwargs):
        return self.text_config

    def to_dict(self):
        written = super().to_dict()
        written.pop("text_config", None)
        written["llm_config"] = self.text_config.to_dict()
        return written
'''


def nemotron_vl(path: Path, seed: int = 0) -> VisionCheckpoint:
    """Write the model; its configuration class lies beside it (``trust_remote_code``)."""
    language = {
        "vocab_size": VOCABULARY_SIZE,
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": len(PATTERN),
        "hybrid_override_pattern": PATTERN,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": HEAD_DIM,
        "attention_head_dim": HEAD_DIM,
        "max_position_embeddings": POSITIONS,
        "pad_token_id": VOCABULARY[PAD],
        "bos_token_id": VOCABULARY[START],
        "eos_token_id": VOCABULARY[END],
        "tie_word_embeddings": False,
        "mamba_num_heads": 2,
        "mamba_head_dim": HEAD_DIM,
        "n_groups": 1,
    }
    config = {
        "architectures": ["NemotronH_Nano_VL_V2"],
        "auto_map": {"AutoConfig": "configuration.TinyNemotronConfig"},
        "model_type": "NemotronH_Nano_VL_V2",
        "dtype": "bfloat16",
        "force_image_size": _SIDE,
        "patch_size": _PATCH,
        "downsample_ratio": 0.5,
        "ps_version": "v2",
        "template": "none",
        "image_tag_type": "internvl",
        "use_thumbnail": False,
        "img_context_token": "<image>",
        "img_context_token_id": VOCABULARY_SIZE - 1,
        "vit_hidden_size": _WIDTH,
        "projector_hidden_size": _PROJECTOR,
        "norm_mean": [0.5, 0.5, 0.5],
        "norm_std": [0.5, 0.5, 0.5],
        "llm_config": language,
        "vision_config": {
            "model_type": "radio",
            "patch_size": _PATCH,
            "preferred_resolution": [_SIDE, _SIDE],
            "args": {"model": _TOWER, "cpe_max_size": _MAX_SIDE},
        },
        "max_sequence_length": POSITIONS,
    }
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config, indent=2))
    (path / "configuration.py").write_text(_CONFIG_CLASSES)
    save_tokenizer(path, POSITIONS, VOCABULARY_SIZE, MARKERS)
    weights = {name: tensor.bfloat16() for name, tensor in _weights(seed).items()}
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return VisionCheckpoint(
        path,
        norm="language_model.model.layers.0.norm.weight",
        engine={
            "dtype": "bfloat16",
            "block_size": BLOCK_SIZE,
            "trust_remote_code": True,
            # vLLM would keep prefixes of states, and there is no layer with a state.
            "enable_prefix_caching": False,
            "limit_mm_per_prompt": {"image": 2, "video": 1},
        },
        needs=("torchvision",),
        placeholder="<image>",
    )


def _weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    made: dict[str, torch.Tensor] = {}

    def matrix(name: str, *shape: int) -> None:
        made[name] = 2.0 * torch.randn(shape, generator=generator) / shape[-1] ** 0.5

    def vector(name: str, size: int, centre: float) -> None:
        made[name] = centre + 0.1 * torch.randn(size, generator=generator)

    language = "language_model.backbone."
    made[language + "embeddings.weight"] = torch.randn(VOCABULARY_SIZE, HIDDEN, generator=generator)
    for at, kind in enumerate(PATTERN):
        layer = f"{language}layers.{at}."
        vector(layer + "norm.weight", HIDDEN, 1.0)
        if kind == "*":
            for projection in ("q_proj", "k_proj", "v_proj"):
                matrix(f"{layer}mixer.{projection}.weight", HEADS * HEAD_DIM, HIDDEN)
            matrix(layer + "mixer.o_proj.weight", HIDDEN, HEADS * HEAD_DIM)
        else:
            matrix(layer + "mixer.up_proj.weight", 2 * HIDDEN, HIDDEN)
            matrix(layer + "mixer.down_proj.weight", HIDDEN, 2 * HIDDEN)
    vector(language + "norm_f.weight", HIDDEN, 1.0)
    matrix("language_model.lm_head.weight", VOCABULARY_SIZE, HIDDEN)

    vector("mlp1.0.weight", 4 * _WIDTH, 1.0)
    matrix("mlp1.1.weight", _PROJECTOR, 4 * _WIDTH)
    matrix("mlp1.3.weight", HIDDEN, _PROJECTOR)

    tower = "vision_model.radio_model.model."
    patches = tower + "patch_generator."
    matrix(patches + "embedder.weight", _WIDTH, 3 * _PATCH**2)
    positions = torch.randn(1, (_MAX_SIDE // _PATCH) ** 2, _WIDTH, generator=generator)
    made[patches + "pos_embed"] = 0.1 * positions
    made[patches + "cls_token.token"] = torch.randn(1, _WIDTH, generator=generator)
    for at in range(_DEPTH):
        block = f"{tower}blocks.{at}."
        for norm in ("norm1", "norm2"):
            vector(f"{block}{norm}.weight", _WIDTH, 1.0)
            vector(f"{block}{norm}.bias", _WIDTH, 0.0)
        for name, rows, columns in (
            ("attn.qkv", 3 * _WIDTH, _WIDTH),
            ("attn.proj", _WIDTH, _WIDTH),
            ("mlp.fc1", _MLP, _WIDTH),
            ("mlp.fc2", _WIDTH, _MLP),
        ):
            matrix(f"{block}{name}.weight", rows, columns)
            vector(f"{block}{name}.bias", rows, 0.0)
    return made
