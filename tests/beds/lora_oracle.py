"""Adapters in an engine against Hugging Face's model with the same adapters merged into it.

For ``engines.call``. The base model and all adapters are in one batch, and take all slots.
"""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

from tests.beds.checkpoints import write
from tests.beds.checkpoints.adapter import Adapter, write_adapter
from tests.beds.checkpoints.checkpoint import Checkpoint
from tests.beds.engines import engine

TOKENS = 4
LENGTH = 24
# Small enough that float32 tells the models apart by no more than 2e-5.
RANK, ALPHA = 4, 1
# What is beside rank 4 and alpha 1, and what ranks and alphas of single modules come of it.
ADAPTERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rslora": {"use_rslora": True},
    "patterns": {
        "alpha_pattern": {"v_proj": 2, r"layers\.1\.self_attn\.[qk]_proj": 0.5},
        "rank_pattern": {"o_proj": 2},
        "ranks": {"o_proj": 2},
    },
}


def mixed(folder: str, prompts_too: bool) -> dict[str, float]:
    """Greatest difference of a log-probability by request, over all orders of a batch.

    ``prompts_too``: those of the prompt's tokens as well, as ``NAME prompt``.
    """
    checkpoint = write("llama", Path(folder, "llama"))
    adapters: dict[str, Adapter | None] = {"base": None}
    for number, (name, config) in enumerate(ADAPTERS.items(), 1):
        adapters[name] = write_adapter(
            Path(folder, name), checkpoint, number, rank=RANK, alpha=ALPHA, **config
        )
    prompts = {name: checkpoint.prompt(LENGTH + at, seed=at) for at, name in enumerate(adapters)}
    right = {
        name: _reference(checkpoint, name, adapter, prompts[name])
        for name, adapter in adapters.items()
    }
    found: dict[str, float] = {}
    lora = {"enable_lora": True, "max_loras": len(ADAPTERS), "max_num_seqs": len(adapters)}
    how: dict[str, Any] = {"enable_prefix_caching": False, **lora}
    with engine(checkpoint, cured=False, **how) as llm:
        for order in itertools.permutations(adapters):
            outputs = llm.generate(
                [{"prompt_token_ids": prompts[name]} for name in order],
                _sampling(prompts_too),
                lora_request=[one.request() if (one := adapters[name]) else None for name in order],
                use_tqdm=False,
            )
            for name, output in zip(order, outputs, strict=True):
                _compare(found, name, output, *right[name])
    return found


def _sampling(prompts_too: bool) -> Any:
    from vllm import SamplingParams

    return SamplingParams(
        temperature=0.0,
        max_tokens=TOKENS,
        ignore_eos=True,
        detokenize=False,
        logprobs=-1,
        prompt_logprobs=-1 if prompts_too else None,
    )


def _compare(found: dict[str, float], name: str, output: Any, told: Any, of_prompt: Any) -> None:
    places = output.outputs[0].logprobs
    differences = [
        abs(one.logprob - float(told[at][token]))
        for at, place in enumerate(places)
        for token, one in place.items()
    ]
    found[name] = max(found.get(name, 0.0), *differences)
    if output.prompt_logprobs:
        differences = [
            abs(one.logprob - float(of_prompt[at][token]))
            for at, place in enumerate(output.prompt_logprobs[1:])
            for token, one in place.items()
        ]
        found[f"{name} prompt"] = max(found.get(f"{name} prompt", 0.0), *differences)


def _reference(
    checkpoint: Checkpoint, name: str, adapter: Adapter | None, prompt: list[int]
) -> tuple[Any, Any]:
    """Log-probabilities of the answer's tokens, [tokens, vocabulary], and of the prompt's."""
    import torch
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(checkpoint.path, dtype=torch.float32).eval()
    if adapter:
        _merge(model, adapter, ADAPTERS[name])
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(TOKENS):
            logits = model(torch.tensor([tokens])).logits[0]
            tokens.append(int(logits[-1].argmax()))
        logits = model(torch.tensor([tokens[:-1]])).logits[0]
    told = torch.log_softmax(logits, -1)
    return told[len(prompt) - 1 :], told[: len(prompt) - 1]


def _merge(model: Any, adapter: Adapter, config: dict[str, Any]) -> None:
    """Add each module's delta, by hand for the three adapters above."""
    from safetensors.torch import load_file

    tensors = load_file(adapter.path / "adapter_model.safetensors")
    for key, down in tensors.items():
        if not key.endswith("lora_A.weight"):
            continue
        module = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        rank, alpha = RANK, float(ALPHA)
        if "alpha_pattern" in config:
            rank = 2 if module.endswith("o_proj") else RANK
            if module.endswith("v_proj"):
                alpha = 2
            elif module.endswith(("layers.1.self_attn.q_proj", "layers.1.self_attn.k_proj")):
                alpha = 0.5
        scaling = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        up = tensors[key.replace("lora_A", "lora_B")]
        model.get_submodule(module).weight.data += scaling * (up @ down)
