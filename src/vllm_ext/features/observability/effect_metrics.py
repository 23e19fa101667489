"""EFFECT_METRICS: verdicts and effect counters on the server's /metrics."""

from __future__ import annotations

from vllm_ext.core.feature import Feature, Judgement, Part, Verdict
from vllm_ext.core.metrics import registry
from vllm_ext.core.seams import Wrap


def _probe() -> Judgement:
    from vllm.v1.metrics.prometheus import get_prometheus_registry

    names = {family.name for family in get_prometheus_registry().collect()}
    if "vllm_ext_effects" in names:
        return Judgement(Verdict.NATIVE, "/metrics has vllm_ext_effects_total")
    return Judgement(Verdict.ACTIVE, "/metrics has no vllm_ext_effects_total")


FEATURE = Feature(
    name="EFFECT_METRICS",
    area="observability",
    summary="The server's /metrics tells what each part changed, how often, and its verdict.",
    why=(
        "A log line says what was in force at the start; an operator wants to see that it still "
        "is, and that it does something. vllm_ext_effects_total{feature,part} counts over all "
        "processes of the server on this host, vllm_ext_feature_info tells the verdicts; both read "
        "the pages that vllm-ext status reads. Works with one API server and with several."
    ),
    upstream_pr=(),
    parts=(
        Part(
            name="metrics",
            summary="Our collector is in the registry that vLLM serves.",
            seams=(Wrap("vllm.v1.metrics.prometheus:get_prometheus_registry", registry),),
            probe=_probe,
        ),
    ),
)
