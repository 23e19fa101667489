"""A real scheduler over a small block pool, two batches in flight: what PREEMPTION_FENCE probes.

No engine and no model: the outputs of the steps are constructed, everything else is vLLM's own.
"""

from __future__ import annotations

import json
import logging
import tempfile
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BLOCK = 16
_HIDDEN, _HEAD = 8, 8
_MODEL = "FenceProbeForCausalLM"


def _model_folder(folder: Path) -> str:
    """A folder that holds no more than the config of a one-layer model, its class registered.

    vLLM would inspect a model class of its own in another process, for half a minute.
    """
    import torch
    from vllm import ModelRegistry

    class Probe(torch.nn.Module):  # type: ignore[misc]  # torch is untyped here
        def __init__(self, vllm_config: Any, prefix: str = "") -> None:
            super().__init__()

        def embed_input_ids(self, input_ids: Any) -> Any: ...

        def forward(self, input_ids: Any, positions: Any) -> Any: ...

        def compute_logits(self, hidden_states: Any) -> Any: ...

    if _MODEL not in ModelRegistry.get_supported_archs():
        ModelRegistry.register_model(_MODEL, Probe)
    config = {
        "architectures": [_MODEL],
        "model_type": "llama",
        "hidden_size": _HIDDEN,
        "intermediate_size": _HIDDEN,
        "num_attention_heads": 1,
        "num_hidden_layers": 1,
        "num_key_value_heads": 1,
        "vocab_size": 32,
        "max_position_embeddings": 4096,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def _vllm_config(
    folder: Path, policy: str, deferred: bool, budget: int, chunk: int, blocks: int
) -> Any:
    """A configuration with asynchronous scheduling and a connector that never has a hit."""
    from vllm.config import (
        CacheConfig,
        DeviceConfig,
        KVTransferConfig,
        ModelConfig,
        SchedulerConfig,
        VllmConfig,
    )

    model = ModelConfig(
        model=_model_folder(folder), skip_tokenizer_init=True, dtype="float32", seed=0
    )
    config = VllmConfig(
        model_config=model,
        device_config=DeviceConfig("cpu"),
        cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=False),
        scheduler_config=SchedulerConfig(
            max_num_seqs=32,
            max_num_batched_tokens=budget,
            long_prefill_token_threshold=chunk,
            max_model_len=1024,
            is_encoder_decoder=False,
            policy=policy,
        ),
        kv_transfer_config=KVTransferConfig(
            kv_connector="ExampleConnector",
            kv_role="kv_both" if deferred else "kv_producer",
            kv_connector_extra_config={"shared_storage_path": str(folder / "empty")},
        ),
    )
    # The CPU platform turns asynchronous scheduling off; only the scheduler is wanted here.
    config.scheduler_config.async_scheduling = True
    config.cache_config.num_gpu_blocks = blocks
    return config


class Pipeline:
    """A scheduler with ``blocks`` blocks of 16 tokens and up to two batches in flight.

    ``deferred`` says whether freed blocks wait for the batches in flight (a KV consumer).
    ``budget`` is in tokens a step, ``chunk`` in prompt tokens a request and step (0: no limit).
    One block of the pool is vLLM's own. A context manager: it owns a temporary folder.
    """

    def __init__(
        self,
        blocks: int,
        policy: str = "fcfs",
        deferred: bool = True,
        budget: int = 512,
        chunk: int = 0,
        scheduler_cls: Any = None,
    ) -> None:
        import torch
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.structured_output import StructuredOutputManager

        self._folder = tempfile.TemporaryDirectory()
        config = _vllm_config(Path(self._folder.name), policy, deferred, budget, chunk, blocks)
        spec = FullAttentionSpec(
            block_size=BLOCK, num_kv_heads=1, head_size=_HEAD, dtype=torch.float32
        )
        self.scheduler = (scheduler_cls or AsyncScheduler)(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(
                num_blocks=blocks,
                kv_cache_tensors=[],
                kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
            ),
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK,
        )
        self.steps = 0
        self.tokens: dict[str, int] = {}
        self.preemptions = 0
        self.finished: set[str] = set()
        self._flying: deque[Any] = deque()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, *exception: object) -> None:
        self._folder.cleanup()

    def add(
        self, name: str, prompt: int, outputs: int, priority: int = 0, arrival: float = 0.0
    ) -> Any:
        """A request of ``prompt`` tokens that generates ``outputs`` tokens."""
        from vllm import SamplingParams
        from vllm.v1.request import Request

        params = SamplingParams(max_tokens=outputs, ignore_eos=True)
        request = Request(
            request_id=name,
            prompt_token_ids=[1 + number % 30 for number in range(prompt)],
            sampling_params=params,
            pooling_params=None,
            arrival_time=arrival,
            priority=priority,
        )
        self.scheduler.add_request(request)
        self.tokens[name] = 0
        return request

    def schedule(self) -> Any:
        """Schedule one step and put it in flight."""
        output = self.scheduler.schedule()
        self.steps += 1
        self.preemptions += len(output.preempted_req_ids or ())
        self._flying.append(output)
        return output

    def process(self) -> None:
        """The oldest step in flight comes back: a token for each request past its prompt."""
        from vllm.v1.outputs import ModelRunnerOutput

        output = self._flying.popleft()
        names = list(output.num_scheduled_tokens)
        chunked = {
            name
            for name in names
            if (request := self.scheduler.requests.get(name)) is not None
            and self._computed(output, name) < request.num_tokens
        }
        made = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: at for at, name in enumerate(names)},
            sampled_token_ids=[[] if name in chunked else [1] for name in names],
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        )
        for group in self.scheduler.update_from_output(output, made).values():
            for answer in group.outputs:
                self.tokens[answer.request_id] += len(answer.new_token_ids)
                if answer.finish_reason is not None:
                    self.finished.add(answer.request_id)

    def _computed(self, output: Any, name: str) -> int:
        """Tokens of a request that were computed when this step was through."""
        for new in output.scheduled_new_reqs:
            if new.req_id == name:
                return new.num_computed_tokens + output.num_scheduled_tokens[name]
        cached = output.scheduled_cached_reqs
        at = cached.req_ids.index(name)
        return cached.num_computed_tokens[at] + output.num_scheduled_tokens[name]

    def step(self) -> Any:
        """As EngineCore does it with a batch queue of two: schedule, then wait for the oldest."""
        output = self.schedule()
        if len(self._flying) > 1 or not output.total_num_scheduled_tokens:
            self.process()
        return output

    def run(self, steps: int) -> int:
        """Step until all requests have finished, at most ``steps`` times; how many finished."""
        while len(self.finished) < len(self.tokens) and self.steps < steps:
            self.step()
        return len(self.finished)


def crowd(pipeline: Pipeline, requests: int, prompt: int, outputs: int) -> None:
    """Requests that all fit when they start and outgrow the pool together.

    Under the policy ``priority`` every other one is less urgent.
    """
    for number in range(requests):
        pipeline.add(f"r{number}", prompt, outputs, priority=number % 2, arrival=float(number))


def starve(pipeline: Pipeline) -> Any:
    """Step until a running request is refused blocks; returns the output of that very step.

    ``first`` takes 4 blocks in the first step and 2 in the second, ``starving`` 4 in the first;
    of 12 it lacks 2 in the second, in which ``waiting`` asks for one. The first step is in flight.
    Needs 13 blocks, a budget of 128 and chunks of 64.
    """
    pipeline.add("first", 96, 64)
    pipeline.add("starving", 128, 8, arrival=1.0)
    pipeline.schedule()
    pipeline.add("waiting", 8, 8, arrival=2.0)
    return pipeline.schedule()


@contextmanager
def log_lines() -> Iterator[list[str]]:
    """What vLLM logs meanwhile at INFO or above, whatever the level it was started with."""
    lines: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    vllm, collector = logging.getLogger("vllm"), Collector(logging.INFO)
    level = vllm.level
    vllm.addHandler(collector)
    vllm.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        vllm.removeHandler(collector)
        vllm.setLevel(level)
