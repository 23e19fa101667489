"""What an unpatched vLLM does with a request that has NaN: real scheduler, real sampling step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from vllm_ext.core.feature import Judgement, Verdict
from vllm_ext.features.played_scheduler import (
    LENGTH,
    TOKEN,
    cache_config,
    make_request,
    make_scheduler,
    output_of,
)


def make_runner(names: Sequence[str]) -> Any:
    """vLLM's model runner with just what its sampling step reads, for requests that decode."""
    import numpy as np
    import torch
    from vllm.v1.outputs import SamplerOutput
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    class Sampling(CPUModelRunner):  # type: ignore[misc]  # Any
        """Samples token 7; all else is vLLM's."""

        def __init__(self) -> None:
            self.use_async_scheduling = False
            self.speculative_config = None
            self.kv_connector_output = None
            self.supports_mm_inputs = False
            self.routed_experts_initialized = False
            self.max_model_len = LENGTH
            self.num_prompt_logprobs: dict[str, int] = {}
            count = len(names)
            self.discard_request_mask = SimpleNamespace(np=np.zeros(count, dtype=bool))
            self.requests = {name: SimpleNamespace(output_token_ids=[]) for name in names}
            self.input_batch = SimpleNamespace(
                num_reqs=count,
                req_ids=list(names),
                req_id_to_index={name: at for at, name in enumerate(names)},
                generators={},
                num_tokens_no_spec=np.ones(count, dtype=np.int64),
                token_ids_cpu=np.zeros((count, LENGTH), dtype=np.int64),
                is_token_ids=np.zeros((count, LENGTH), dtype=bool),
                prev_sampled_token_ids=None,
                vocab_size=16,
            )

        def _sample(self, *args: Any, **kwargs: Any) -> Any:
            ids = torch.full((len(names), 1), TOKEN, dtype=torch.int32)
            return SamplerOutput(sampled_token_ids=ids, logprobs_tensors=None)

        def _update_states_after_model_execute(self, *args: Any, **kwargs: Any) -> None: ...

        def eplb_step(self, *args: Any, **kwargs: Any) -> None: ...

    return Sampling()


def sample(runner: Any, hidden: Any, scheduled: Mapping[str, int]) -> Any:
    """One sampling step of the runner over hidden states ``[num_tokens, hidden_size]``."""
    from vllm.v1.worker.gpu_model_runner import ExecuteModelState

    plan = SimpleNamespace(
        num_scheduled_tokens=dict(scheduled), total_num_scheduled_tokens=sum(scheduled.values())
    )
    fields = dict.fromkeys(ExecuteModelState._fields)
    state = ExecuteModelState(**{**fields, "scheduler_output": plan, "hidden_states": hidden})
    runner.execute_model_state = state
    return runner.sample_tokens(None)


def notice() -> Judgement:
    """A sampling step over hidden states with NaN: who is told?"""
    import torch

    hidden = torch.ones(2, 8)
    hidden[1] = torch.nan
    told = sample(make_runner(["good", "bad"]), hidden, {"good": 1, "bad": 1}).num_nans_in_logits
    if (told or {}).get("bad"):
        return Judgement(Verdict.NATIVE, "a step with NaN tells the scheduler which request has it")
    return Judgement(Verdict.ACTIVE, "a step with NaN in a request tells the scheduler nothing")


def notice_v2() -> Judgement:
    """The second runner needs a GPU to run; what it has to notice NaN is one switch."""
    from vllm import envs

    if envs.environment_variables["VLLM_COMPUTE_NANS_IN_LOGITS"]():
        return Judgement(Verdict.NATIVE, "NaN in logits is counted by default")
    return Judgement(
        Verdict.ACTIVE,
        "NaN is noticed with VLLM_COMPUTE_NANS_IN_LOGITS=1 only, in sampled positions only",
    )


def contain() -> Judgement:
    """A prompt of 40 tokens has NaN in all of them; the same prompt comes again."""
    scheduler = make_scheduler()
    scheduler.add_request(make_request("bad", range(40), 1))
    planned = scheduler.schedule()
    report = output_of(scheduler, planned, num_nans_in_logits={"bad": 40})
    scheduler.update_from_output(planned, report)
    scheduler.add_request(make_request("next", range(40), 1))
    found = scheduler.schedule().scheduled_new_reqs[0].num_computed_tokens
    if found:
        return Judgement(
            Verdict.ACTIVE, f"{found} tokens with NaN are found in the prefix cache afterwards"
        )
    return Judgement(Verdict.NATIVE, "tokens with NaN aren't found in the prefix cache")


def wipe() -> Judgement:
    """Whether the blocks of a model with nothing but full attention are zeroed between requests."""
    if cache_config(("full",), 4).needs_kv_cache_zeroing:
        return Judgement(Verdict.NATIVE, "KV blocks are zeroed before another request gets them")
    return Judgement(Verdict.ACTIVE, "a KV block goes to the next request with what it held")


wipe_v2 = wipe


def error_policy() -> Judgement:
    """What becomes of a request whose NaN is reported."""
    scheduler = make_scheduler()
    scheduler.add_request(make_request("bad", range(40)))
    planned = scheduler.schedule()
    report = output_of(scheduler, planned, num_nans_in_logits={"bad": 40})
    scheduler.update_from_output(planned, report)
    request = scheduler.requests.get("bad")
    if request is None:
        return Judgement(Verdict.NATIVE, "a request with NaN is ended")
    return Judgement(Verdict.ACTIVE, "a request with NaN goes on and answers with HTTP 200")


def error_message() -> Judgement:
    """What a client reads whose request the engine has ended with an error."""
    from vllm.entrypoints.generate.base.serving import GenerateBaseServing
    from vllm.exceptions import GenerationError
    from vllm.v1.engine import EngineCoreOutput

    if "error" in EngineCoreOutput.__struct_fields__:
        return Judgement(Verdict.NATIVE, "an output that ends with an error carries its message")
    serving = object.__new__(GenerateBaseServing)
    try:
        serving._raise_if_error("error", "probe")
    except GenerationError as error:
        return Judgement(Verdict.ACTIVE, f"the client of a failed request reads {str(error)!r}")
    return Judgement(Verdict.ACTIVE, "the client of a failed request reads nothing of it")
