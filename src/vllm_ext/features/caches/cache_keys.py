"""CACHE_KEYS: vLLM's caches see what the plugin changed, and only that."""

from __future__ import annotations

from vllm_ext.core.caches import compile_factors
from vllm_ext.core.feature import PREFIX, Feature, Judgement, Part, Verdict
from vllm_ext.core.seams import Wrap


def _probe() -> Judgement:
    from vllm import envs

    name = PREFIX + "CACHE_KEYS_PROBE"
    envs.environment_variables[name] = lambda: "1"
    try:
        seen = name in envs.compile_factors()
    finally:
        del envs.environment_variables[name]
    if seen:
        return Judgement(
            Verdict.ACTIVE, "a registered variable enters the compile key, whatever it is for"
        )
    return Judgement(Verdict.NATIVE, "registered variables of plugins stay out of the compile key")


FEATURE = Feature(
    name="CACHE_KEYS",
    area="caches",
    summary="The torch.compile cache key carries active parts that change traced code, only those.",
    why=(
        "vLLM makes every registered variable part of the compile key, so a toggle of a scheduler "
        "fix would cost a recompilation; and it does not see plugins, so a patch to traced code "
        "would load a graph compiled without it. The key equals stock vLLM's while no active part "
        "touches traced code, and differs as soon as one does."
    ),
    upstream_pr=(),
    parts=(
        Part(
            name="compile_key",
            summary="Toggles stay out of the compile key, traced parts go into it.",
            seams=(Wrap("vllm.envs:compile_factors", compile_factors),),
            probe=_probe,
        ),
    ),
)
