"""The process of an engine: reads a job, answers its batches, writes the answers. Not for import.

`python -m tests.beds.v2.process JOB ANSWERS`
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from tests.beds.v2 import worker


def main(asked: Path, told: Path) -> None:
    """Carry the job in ``asked`` out and write one answer per batch to ``told``."""
    job = json.loads(asked.read_text())
    _keep_scheduling(job["chunk"], job["asynchronous"])
    engine = _engine(job)
    answers = []
    for batch in job["batches"]:
        for name in batch["before"]:
            module, _, function = name.partition(":")
            engine.collective_rpc(getattr(importlib.import_module(module), function))
        before = _counters(engine)
        start = time.perf_counter()
        outputs = _generate(engine, batch)
        seconds = time.perf_counter() - start
        after = _counters(engine)
        spec = {
            "drafts": after["num_drafts"][0] - before["num_drafts"][0],
            "drafted": after["num_draft_tokens"][0] - before["num_draft_tokens"][0],
            "accepted": after["num_accepted_tokens"][0] - before["num_accepted_tokens"][0],
            "accepted_at": [
                now - then
                for now, then in zip(
                    after["num_accepted_tokens_per_pos"],
                    before["num_accepted_tokens_per_pos"],
                    strict=True,
                )
            ],
        }
        workers = engine.collective_rpc(worker.facts)
        answers.append({"outputs": outputs, "workers": workers, "seconds": seconds, **spec})
    told.write_text(json.dumps(answers))


def _engine(job: dict[str, Any]) -> Any:
    from vllm import LLM

    args: dict[str, Any] = {
        "model": job["model"],
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "max_model_len": 256,
        "max_num_seqs": 8,
        "max_logprobs": -1,
        "prefill_context_parallel_size": job["pcp"],
        # Prompts come more than once, and each time all of them is to be computed.
        "enable_prefix_caching": False,
        "disable_log_stats": False,
        "attention_backend": "CPU_MLA",
        # The compiled rotary op of the CPU build is wrong for the strided queries and keys of MLA.
        "compilation_config": {"custom_ops": ["none"]},
    }
    if job["mtp"]:
        args["speculative_config"] = {"method": "mtp", "num_speculative_tokens": job["mtp"]}
    return LLM(**args | job["args"])


def _keep_scheduling(chunk: int, asynchronous: bool) -> None:
    """Put on again what vLLM's CPU platform switches off: chunked prefill, asynchronous steps."""
    from vllm.platforms.cpu import CpuPlatform

    original = CpuPlatform.check_and_update_config.__func__

    def check_and_update_config(cls: type, vllm_config: Any) -> None:
        original(cls, vllm_config)
        scheduler = vllm_config.scheduler_config
        scheduler.async_scheduling = asynchronous
        if chunk:
            scheduler.enable_chunked_prefill = True
            scheduler.max_num_batched_tokens = chunk

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)


def _generate(engine: Any, batch: dict[str, Any]) -> list[dict[str, Any]]:
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=0.0,
        max_tokens=batch["tokens"],
        ignore_eos=True,
        logprobs=batch["logprobs"],
        prompt_logprobs=0 if batch["prompt_logprobs"] else None,
        detokenize=False,
    )
    prompts = [{"prompt_token_ids": prompt} for prompt in batch["prompts"]]
    found = []
    for prompt, result in zip(
        batch["prompts"], engine.generate(prompts, params, use_tqdm=False), strict=True
    ):
        answer = result.outputs[0]
        own = result.prompt_logprobs or [None]
        found.append(
            {
                "tokens": list(answer.token_ids),
                "logprobs": [{k: v.logprob for k, v in at.items()} for at in answer.logprobs],
                "prompt_logprobs": [
                    at[token].logprob for token, at in zip(prompt[1:], own[1:], strict=False)
                ],
            }
        )
    return found


def _counters(engine: Any) -> dict[str, list[int]]:
    """Counters of speculative decoding since the start, zero where the engine has none."""
    names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_accepted_tokens_per_pos")
    found: dict[str, list[int]] = {name: [0] for name in names[:3]} | {names[3]: []}
    for metric in engine.get_metrics():
        name = metric.name.removeprefix("vllm:spec_decode_")
        if name in found:
            found[name] = list(getattr(metric, "values", None) or [metric.value])
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
    # The engine's own end waits seconds for workers; who started this process ends them at once.
    sys.stdout.flush()
    os._exit(0)
