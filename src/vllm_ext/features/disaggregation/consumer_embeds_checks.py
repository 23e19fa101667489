"""What a patched vLLM does with a lacking item, where the probe looks elsewhere."""

from __future__ import annotations

from vllm_ext.core.feature import Judgement, Verdict
from vllm_ext.features.disaggregation import consumer_embeds_probes as probes
from vllm_ext.features.disaggregation.lacking_items import PREFIX

_SENTENCE = f"{PREFIX}item 0 of the request."


def client_error() -> Judgement:
    """What the queue of a request hands out that the engine has ended with that sentence."""
    from vllm.exceptions import VLLMValidationError
    from vllm.outputs import CompletionOutput, RequestOutput
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import InputStreamError
    from vllm.v1.engine.output_processor import RequestOutputCollector

    lacking = probes.client_error()
    if lacking.verdict is not Verdict.ACTIVE:
        return lacking
    choice = CompletionOutput(0, "", [], None, None, finish_reason="error", stop_reason=_SENTENCE)
    queue = RequestOutputCollector(RequestOutputKind.FINAL_ONLY, "check")
    queue.put(RequestOutput("check", None, None, None, [choice], finished=True))
    try:
        queue.get_nowait()
    except InputStreamError as error:
        if isinstance(error.cause, VLLMValidationError) and _SENTENCE in str(error.cause):
            return Judgement(Verdict.NATIVE, "the client of a lacking request reads which item")
    return Judgement(Verdict.ACTIVE, "the client of a lacking request reads nothing of it")
