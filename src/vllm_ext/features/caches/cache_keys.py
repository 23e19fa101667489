"""CACHE_KEYS: vLLM's caches see what the plugin changed, and only that."""

from __future__ import annotations

import os
from pathlib import Path

from vllm_ext.core.caches import compile_factors, forget, modelinfo_hash, note_inspected
from vllm_ext.core.feature import Feature, Judgement, Part, Verdict
from vllm_ext.core.seams import Wrap
from vllm_ext.names import PREFIX

_LAZY = "vllm.model_executor.models.registry:_LazyRegisteredModel"


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


def _probe_modelinfos() -> Judgement:
    from vllm.model_executor.models.registry import _LazyRegisteredModel

    keys = []
    allowed = os.environ.get("VLLM_PLUGINS", "")
    for plugins in ("", "one", "one,two"):
        os.environ["VLLM_PLUGINS"] = plugins
        keys.append(_LazyRegisteredModel._get_modelinfo_module_hash(Path(__file__)))
    os.environ["VLLM_PLUGINS"] = allowed
    if len(set(keys)) == 1:
        return Judgement(
            Verdict.ACTIVE,
            "a model's cached inspection has the same key whatever plugins are loaded",
        )
    return Judgement(Verdict.NATIVE, "the key of a model's cached inspection knows the plugins")


def _check_modelinfos() -> Judgement:
    from vllm.model_executor.models.registry import _LazyRegisteredModel

    here, part_id = Path(__file__), "CACHE_KEYS.check"
    keys = [_LazyRegisteredModel._get_modelinfo_module_hash(here)]
    note_inspected(part_id, [here])
    keys.append(_LazyRegisteredModel._get_modelinfo_module_hash(here))
    forget(part_id)
    if keys[0] == keys[1]:
        return Judgement(
            Verdict.ACTIVE, "a part that changes a model class leaves the key of its inspection"
        )
    return Judgement(
        Verdict.NATIVE, "a part that changes a model class gives its inspection a key of its own"
    )


FEATURE = Feature(
    name="CACHE_KEYS",
    area="caches",
    summary="vLLM's compile and model-inspection caches see what the plugin changed, only that.",
    why=(
        "vLLM makes every registered variable part of the compile key, so a toggle of a scheduler "
        "fix would cost a recompilation; and it does not see plugins, so a patch to traced code "
        "would load a graph compiled without it. Likewise, what vLLM inspects of a model class is "
        "cached by the hash of its source file: a capability that a plugin adds is not seen, or is "
        "still seen after the plugin is gone. Both keys equal stock vLLM's while no part in force "
        "touches traced code or the model class, and differ as soon as one does."
    ),
    upstream_pr=(),
    parts=(
        Part(
            name="compile_key",
            summary="Toggles stay out of the compile key, traced parts go into it.",
            seams=(Wrap("vllm.envs:compile_factors", compile_factors),),
            probe=_probe,
        ),
        Part(
            name="modelinfos",
            summary="The cached inspection of a model class that a part changes has its own key.",
            seams=(Wrap(f"{_LAZY}._get_modelinfo_module_hash", modelinfo_hash),),
            relies_on=(f"{_LAZY}.inspect_model_cls", f"{_LAZY}._load_modelinfo_from_cache"),
            probe=_probe_modelinfos,
            check=_check_modelinfos,
        ),
    ),
)
