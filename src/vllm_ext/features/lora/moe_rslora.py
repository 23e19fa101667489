"""MOE_RSLORA: experts' adapters with the scale they were trained with (upstream PR 55548)."""

from __future__ import annotations

import dataclasses
import logging
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from vllm_ext.core.feature import Feature, Part, effect
from vllm_ext.core.seams import Wrap
from vllm_ext.features.lora import moe_rslora_probes as probes

_WEIGHTS = "vllm.lora.lora_weights:PackedLoRALayerWeights"
_HELPER = "vllm.lora.peft_helper:PEFTHelper"
_MODEL = "vllm.lora.lora_model:LoRAModel"
_MERGE = "vllm.lora.model_manager:LoRAModelManager._create_merged_loras_inplace"

PROJECTIONS = ("w1", "w2", "w3")
PATTERNS = ("rank_pattern", "alpha_pattern")
_RESOLVED = "_vllm_ext_patterns"

logger = logging.getLogger("vllm.vllm_ext")


def _by_projection(loras: Sequence[Any]) -> list[list[Any]]:
    """The experts' LoRAs of w1, w2 and w3; those that lack are left out."""
    return [[lora for lora in loras[at::3] if lora is not None] for at in range(3)]


def scale_each_projection(
    original: Callable[..., Any], cls: type, loras: Sequence[Any], *args: Any, **kwargs: Any
) -> Any:
    """Pack experts with the scaling stored for each projection, not alpha / rank of the first.

    Where experts of one projection differ, vLLM has no place for that, so it is folded into B.
    A projection that lacks (w3 of experts without a gate shares the tensors of w1) has scaling 1.
    """
    projections = _by_projection(loras)
    for experts in projections:
        if len({lora.scaling for lora in experts}) > 1:
            for lora in experts:
                lora.optimize()
    scaling = [experts[0].scaling if experts else 1.0 for experts in projections]
    packed = original(cls, loras, *args, **kwargs)
    if list(packed.scaling) != scaling:
        packed.scaling = scaling
        effect("MOE_RSLORA.scaling")
    return packed


def even_experts(
    original: Callable[..., Any],
    cls: type,
    loras: Sequence[Any],
    module_name: str,
    is_non_gated_moe: bool = False,
) -> Any:
    """Pack experts of which some have no LoRA, or others ranks: zeros stand for what lacks."""
    experts = list(loras)
    projections = _by_projection(experts)
    places = range(2 if is_non_gated_moe else 3)
    for at in places:
        rank = max((lora.lora_a.shape[0] for lora in projections[at]), default=0)
        for place in range(at, len(experts), 3):
            if experts[place] is None:
                experts[place] = _zeros(projections, at, rank)
                _LACKING[f"{PROJECTIONS[at]} in {module_name}"] += 1
            elif experts[place].lora_a.shape[0] != rank:
                experts[place] = _padded(experts[place], rank)
    if any(new is not old for new, old in zip(experts, loras, strict=True)):
        effect("MOE_RSLORA.uneven_experts")
    return original(cls, experts, module_name, is_non_gated_moe=is_non_gated_moe)


# How many experts lack a projection's LoRA, by module, in the adapter that is being merged.
_LACKING: Counter[str] = Counter()


def tell_lacking(
    original: Callable[..., Any], self: Any, lora_model: Any, *args: Any, **kwargs: Any
) -> Any:
    """One warning an adapter that names what of its experts stays as in the base model."""
    _LACKING.clear()
    try:
        return original(self, lora_model, *args, **kwargs)
    finally:
        if _LACKING:
            named = [f"{count} expert(s) of {place}" for place, count in _LACKING.items()]
            logger.warning(
                "MOE_RSLORA: LoRA adapter %d leaves out experts, which stay as in the base model: "
                "%s%s",
                lora_model.id,
                ", ".join(named[:4]),
                f" and {len(named) - 4} more" if len(named) > 4 else "",
            )
            _LACKING.clear()


def _zeros(projections: list[list[Any]], at: int, rank: int) -> Any:
    """A LoRA without effect for one projection, shaped like another expert's or projection's.

    A is [rank, inputs], B [outputs, rank]; w1 and w3 map hidden to intermediate size, w2 back.
    """
    like = next(experts for experts in (projections[at], *projections) if experts)[0]
    rank = rank or like.lora_a.shape[0]
    inputs, outputs = like.lora_a.shape[1], like.lora_b.shape[0]
    if (at == 1) != (like in projections[1]):
        inputs, outputs = outputs, inputs
    return type(like)(
        like.module_name,
        rank,
        like.lora_alpha,
        like.lora_a.new_zeros(rank, inputs),
        like.lora_b.new_zeros(outputs, rank),
        like.scaling if projections[at] else 1.0,
    )


def _padded(lora: Any, rank: int) -> Any:
    """The same LoRA with ``rank`` rows of A and columns of B."""
    from torch.nn.functional import pad

    more = rank - lora.lora_a.shape[0]
    return type(lora)(
        lora.module_name,
        rank,
        lora.lora_alpha,
        pad(lora.lora_a, (0, 0, 0, more)),
        pad(lora.lora_b, (0, more)),
        lora.scaling,
    )


@dataclasses.dataclass(frozen=True)
class Patterns:
    """PEFT's ``rank_pattern`` and ``alpha_pattern`` of an adapter: by module, what differs.

    A pattern is a regular expression that matches the whole name of a module in the checkpoint,
    or what follows a dot in it; the first that matches counts.
    """

    ranks: dict[str, int]
    alphas: dict[str, float]

    @classmethod
    def of(cls, config: dict[str, Any]) -> Patterns | None:
        """The patterns of an ``adapter_config.json``; None if it has none.

        Raises ``ValueError`` for patterns that can't be used.
        """
        given = [config.get(name) or {} for name in PATTERNS]
        for name, patterns in zip(PATTERNS, given, strict=True):
            if not isinstance(patterns, dict):
                raise ValueError(
                    f"adapter_config.json: {name} is {patterns!r}; it must map module names to "
                    "numbers. Remove it or write the adapter again."
                )
            for pattern, value in patterns.items():
                _check(name, pattern, value)
        return cls(*given) if any(given) else None

    def rank_and_alpha(self, module: str) -> tuple[int | None, float | None]:
        """What the patterns say of a module by its name in the checkpoint; None: nothing."""
        # PEFT names the tensors of fused experts so, but matches the names of the parameters.
        if module.endswith(".experts.base_layer"):
            module = module.removesuffix("base_layer") + "gate_up_proj"
        elif module.endswith(".experts"):
            module += ".down_proj"
        return _first(self.ranks, module), _first(self.alphas, module)


def _check(name: str, pattern: str, value: Any) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or (name == "rank_pattern" and (value != int(value) or value <= 0)):
        wanted = "a positive integer" if name == "rank_pattern" else "a number"
        raise ValueError(f"adapter_config.json: {name} of {pattern!r} is {value!r}, not {wanted}.")
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(
            f"adapter_config.json: {pattern!r} in {name} is no regular expression ({error})."
        ) from error


def _first(patterns: dict[str, Any], module: str) -> Any:
    return next(
        (
            value
            for pattern, value in patterns.items()
            if re.fullmatch(rf"(?:.*\.)?(?:{pattern})", module)
        ),
        None,
    )


def read_patterns(
    original: Callable[..., Any], cls: type, config_dict: dict[str, Any], *args: Any, **kwargs: Any
) -> Any:
    """Keep an adapter's patterns beside the fields that vLLM knows."""
    helper = original(cls, config_dict, *args, **kwargs)
    patterns = Patterns.of(config_dict)
    if patterns:
        setattr(helper, _RESOLVED, patterns)
    return helper


def check_largest_rank(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Hold the largest rank of an adapter, not the general one, against --max-lora-rank."""
    patterns: Patterns | None = getattr(self, _RESOLVED, None)
    if patterns is None or not patterns.ranks:
        return original(self, *args, **kwargs)
    rank = self.r
    self.r = max(rank, *patterns.ranks.values())
    try:
        return original(self, *args, **kwargs)
    finally:
        self.r = rank


def apply_patterns(
    original: Callable[..., Any],
    cls: type,
    lora_model_id: int,
    tensors: dict[str, Any],
    peft_helper: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Give each module the rank and the scaling that the adapter's patterns say."""
    model = original(cls, lora_model_id, tensors, peft_helper, *args, **kwargs)
    patterns: Patterns | None = getattr(peft_helper, _RESOLVED, None)
    if patterns is None:
        return model
    changed = 0
    for module, name in _names(tensors, model.loras, kwargs.get("weights_mapper")):
        rank, alpha = patterns.rank_and_alpha(name)
        if rank is None and alpha is None:
            continue
        lora = model.loras[module]
        lora.rank = peft_helper.r if rank is None else int(rank)
        lora.lora_alpha = peft_helper.lora_alpha if alpha is None else alpha
        root = math.sqrt(lora.rank) if peft_helper.use_rslora else lora.rank
        lora.scaling = lora.lora_alpha / root
        changed += 1
    if changed:
        effect("MOE_RSLORA.patterns", changed)
    return model


def _names(tensors: Iterable[str], loras: dict[str, Any], mapper: Any) -> Iterable[tuple[str, str]]:
    """Modules of the model, and their names in the checkpoint."""
    from vllm.lora.utils import is_base_embedding_weights, parse_fine_tuned_lora_name

    found = {}
    for tensor in tensors:
        if is_base_embedding_weights(tensor):
            continue
        module, _ = parse_fine_tuned_lora_name(tensor, mapper)
        if module in loras:
            found[module], _ = parse_fine_tuned_lora_name(tensor)
    return found.items()


FEATURE = Feature(
    name="MOE_RSLORA",
    area="lora",
    summary="LoRA adapters keep the scale they were trained with, experts and patterns, too.",
    why=(
        "vLLM 0.29.0 packs the adapters of a mixture's experts with alpha / rank, whatever the "
        "adapter says: one trained with rsLoRA acts sqrt(rank) times too weakly, and nobody is "
        "told. 0.30.0 and 0.31.0 take the first expert's scale for all. Up to 0.31.0 rank_pattern "
        "and alpha_pattern of an adapter are ignored, for dense layers as well. An adapter that "
        "leaves out an expert, or gives experts other ranks, fails to load on every release, with "
        "an assertion that takes the engine down when it is loaded with a request."
    ),
    upstream_pr=(55548,),
    parts=(
        Part(
            name="scaling",
            summary="Experts are packed with the scaling stored for each projection.",
            seams=(
                Wrap(f"{_WEIGHTS}.pack_moe", scale_each_projection),
                Wrap(f"{_WEIGHTS}.pack_moe_stacked", scale_each_projection),
            ),
            relies_on=(f"{_WEIGHTS}.optimize", _MERGE),
            probe=probes.scaling,
        ),
        Part(
            name="patterns",
            summary="rank_pattern and alpha_pattern of an adapter count.",
            seams=(
                Wrap(f"{_HELPER}.from_dict", read_patterns),
                Wrap(f"{_HELPER}.validate_legal", check_largest_rank),
                Wrap(f"{_MODEL}.from_lora_tensors", apply_patterns),
            ),
            relies_on=(
                "vllm.lora.lora_weights:LoRALayerWeights.from_config",
                "vllm.lora.utils:parse_fine_tuned_lora_name",
            ),
            probe=probes.patterns,
        ),
        Part(
            name="uneven_experts",
            summary="Experts may lack a LoRA or have ranks of their own.",
            seams=(Wrap(f"{_WEIGHTS}.pack_moe", even_experts), Wrap(_MERGE, tell_lacking)),
            probe=probes.uneven_experts,
        ),
    ),
)
