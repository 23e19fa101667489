"""MOE_RSLORA: what reaches the model of an adapter, against what PEFT makes of the same files."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.beds.registered import registered

EXPERTS, HIDDEN, INTERMEDIATE = 4, 6, 10
MODULE = "model.layers.0.mlp.experts"
NAMES = ("gate_proj", "down_proj", "up_proj")
# Of an adapter: what is beside rank 4 and alpha 8, and ranks of single modules.
RSLORA: dict[str, Any] = {"use_rslora": True}
PATTERNS: dict[str, Any] = {
    "alpha_pattern": {"down_proj": 32, r"experts\.1\.(gate|up)_proj": 2},
}
RANKS: dict[str, Any] = {"rank_pattern": {r"experts\.[02]\.up_proj": 2, "down_proj": 3}}
ASSERTS = "AssertionError|AttributeError|different LoRA ranks|stack expects each tensor"


@pytest.fixture
def patched(installed_release: str, plugin: str) -> Iterator[None]:
    """The process with the plugin registered, or as it came."""
    import vllm.lora.model_manager  # noqa: F401

    with registered(plugin == "with"):
        yield


class Written:
    """An adapter of the experts of one layer in a folder, and its effect by PEFT's rules."""

    def __init__(self, folder: Path, config: dict[str, Any], without: set[str]) -> None:
        import torch
        from safetensors.torch import save_file

        self.path = folder
        self.config = {"r": 4, "lora_alpha": 8, "target_modules": list(NAMES), **config}
        generator = torch.Generator().manual_seed(7)
        tensors, self.deltas = {}, {}
        for at in range(EXPERTS):
            for name in NAMES:
                module = f"{MODULE}.{at}.{name}"
                sizes = (INTERMEDIATE, HIDDEN) if name == "down_proj" else (HIDDEN, INTERMEDIATE)
                self.deltas[at, name] = torch.zeros(sizes[1], sizes[0])
                if f"{at}.{name}" in without or str(at) in without or name in without:
                    continue
                rank, scaling = self._rank_and_scaling(module)
                down = torch.randn(rank, sizes[0], generator=generator)
                up = torch.randn(sizes[1], rank, generator=generator)
                tensors[f"base_model.model.{module}.lora_A.weight"] = down
                tensors[f"base_model.model.{module}.lora_B.weight"] = up
                self.deltas[at, name] = scaling * (up @ down)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "adapter_config.json").write_text(json.dumps(self.config))
        save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})

    def _rank_and_scaling(self, module: str) -> tuple[int, float]:
        """By hand for the patterns above: PEFT takes the first one that matches."""
        import re

        rank, alpha = self.config["r"], self.config["lora_alpha"]
        for key, value in reversed(self.config.get("rank_pattern", {}).items()):
            rank = value if re.search(rf"\.{key}$", module) else rank
        for key, value in reversed(self.config.get("alpha_pattern", {}).items()):
            alpha = value if re.search(rf"\.{key}$", module) else alpha
        return rank, alpha / (math.sqrt(rank) if self.config.get("use_rslora") else rank)

    def load(self) -> Any:
        """The adapter as a worker's LoRA manager loads it."""
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.peft_helper import PEFTHelper

        helper = PEFTHelper.from_local_dir(str(self.path), 4096)
        expected = {f"experts.{at}.{name}" for at in range(EXPERTS) for name in NAMES}
        return LoRAModel.from_local_checkpoint(
            str(self.path), expected, helper, lora_model_id=1, device="cpu"
        )

    def packed(self) -> Any:
        """Its experts as they are packed and scaled for the layer's stacked buffers."""
        from vllm.lora.lora_weights import PackedLoRALayerWeights

        loras = self.load().loras
        names = [f"{MODULE}.{at}.{name}" for at in range(EXPERTS) for name in NAMES]
        try:
            packed = PackedLoRALayerWeights.pack_moe([loras.get(name) for name in names], MODULE)
        except Exception as error:
            raise AssertionError(f"packing ends in {type(error).__name__}: {error}") from error
        return packed.optimize()

    def wrong(self, packed: Any) -> list[str]:
        """Experts' projections whose packed tensors have another effect than PEFT's."""
        found = []
        for (at, name), delta in self.deltas.items():
            slot = NAMES.index(name)
            effect = packed.lora_b[slot][at] @ packed.lora_a[slot][at]
            off = float((effect - delta).abs().max())
            if off > 1e-5:
                found.append(f"{name} of expert {at} is off by {off:.3f}")
        return found


@pytest.mark.behaviour("MOE_RSLORA.scaling", wrong=r"(gate|down|up)_proj of expert \d is off by")
def test_each_projection_of_the_experts_has_its_own_scale(patched: None, tmp_path: Path) -> None:
    """rsLoRA, and scales that differ between projections or between the experts of one."""
    from vllm.lora.lora_weights import LoRALayerWeights, PackedLoRALayerWeights

    written = Written(tmp_path / "rslora", RSLORA, set())
    found = written.wrong(written.packed())
    scales = [2.0, 3.0, 5.0, 2.0, 4.0, 5.0, 2.0, 3.0, 5.0, 7.0, 3.0, 5.0]
    loras = written.load().loras
    names = [f"{MODULE}.{at}.{name}" for at in range(EXPERTS) for name in NAMES]
    for name, scale in zip(names, scales, strict=True):
        at, projection = name.removeprefix(f"{MODULE}.").split(".")
        lora: LoRALayerWeights = loras[name]
        written.deltas[int(at), projection] *= scale / lora.scaling
        lora.scaling = scale
    packed = PackedLoRALayerWeights.pack_moe([loras[name] for name in names], MODULE).optimize()
    found += written.wrong(packed)
    assert not found, "; ".join(found)


@pytest.mark.behaviour("MOE_RSLORA.scaling", wrong=r"w\d is scaled by")
def test_stacked_experts_keep_their_scale(patched: None) -> None:
    """Adapters whose experts share a factor come stacked, and experts without a gate in pairs."""
    import torch
    from vllm.lora.lora_weights import LoRALayerWeights, PackedLoRALayerWeights

    def lora(scaling: float) -> Any:
        return LoRALayerWeights("w", 4, 8, torch.ones(2, 4, 6), torch.ones(2, 6, 4), scaling)

    stacked = PackedLoRALayerWeights.pack_moe_stacked([lora(s) for s in (4.0, 6.0, 8.0)], "e")
    pairs = [one for _ in range(2) for one in (lora(4.0), lora(6.0), None)]
    without_gate = PackedLoRALayerWeights.pack_moe(pairs, "e", is_non_gated_moe=True)
    found = [
        f"w{at} is scaled by {is_} and not {want}"
        for packed, wanted in ((stacked, (4.0, 6.0, 8.0)), (without_gate, (4.0, 6.0, 1.0)))
        for at, (is_, want) in enumerate(zip(packed.scaling, wanted, strict=True), 1)
        if is_ != want
    ]
    assert not found, "; ".join(found)
    # The third pair of tensors is the first: scaled twice it would be squared.
    assert without_gate.lora_b[2] is without_gate.lora_b[0]


@pytest.mark.behaviour("MOE_RSLORA.patterns", wrong=r"(gate|down|up)_proj of expert \d is off by")
@pytest.mark.parametrize("rslora", [False, True], ids=["lora", "rslora"])
def test_patterns_of_an_adapter_count(patched: None, tmp_path: Path, rslora: bool) -> None:
    written = Written(tmp_path, {**PATTERNS, "use_rslora": rslora}, set())
    found = written.wrong(written.packed())
    assert not found, "; ".join(found)


@pytest.mark.behaviour("MOE_RSLORA.patterns", wrong="not refused")
def test_the_largest_rank_counts(patched: None, tmp_path: Path) -> None:
    from vllm.config.lora import LoRAConfig
    from vllm.lora.peft_helper import PEFTHelper

    Written(tmp_path, {"rank_pattern": {"up_proj": 32}}, set(NAMES))
    helper = PEFTHelper.from_local_dir(str(tmp_path), 4096)
    try:
        helper.validate_legal(LoRAConfig(max_lora_rank=16))
    except ValueError as error:
        assert "LoRA rank 32 is greater than max_lora_rank 16" in str(error)
    else:
        raise AssertionError("an adapter with a rank of 32 beyond 16 is not refused")
    assert helper.r == 4


@pytest.mark.area("lora")
@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"rank_pattern": {"up_proj": 0}}, r"rank|positive"),
        ({"rank_pattern": {"up_proj": "8"}}, r"rank|positive"),
    ],
)
def test_patterns_that_cannot_be_used_are_refused(
    installed_release: str, tmp_path: Path, given: dict[str, Any], told: str
) -> None:
    import vllm.lora.model_manager  # noqa: F401

    with registered(True), pytest.raises(ValueError, match=told):
        Written(tmp_path, {}, set())
        (tmp_path / "adapter_config.json").write_text(
            json.dumps({"r": 4, "lora_alpha": 8, "target_modules": [], **given})
        )
        from vllm.lora.peft_helper import PEFTHelper

        PEFTHelper.from_local_dir(str(tmp_path), 4096)


@pytest.mark.behaviour("MOE_RSLORA.uneven_experts", wrong=ASSERTS)
@pytest.mark.parametrize(
    "without",
    ["1", "0 3", "up_proj", "down_proj", "gate_proj up_proj", "2.down_proj"],
)
def test_experts_may_lack(patched: None, tmp_path: Path, without: str) -> None:
    """Whole experts, projections, or one projection of one expert."""
    written = Written(tmp_path, {}, set(without.split()))
    found = written.wrong(written.packed())
    assert not found, "; ".join(found)


@pytest.mark.behaviour("MOE_RSLORA.uneven_experts", wrong=ASSERTS)
def test_experts_may_have_ranks_of_their_own(patched: None, tmp_path: Path) -> None:
    written = Written(tmp_path, {**RANKS, **PATTERNS, **RSLORA}, {"3.up_proj"})
    found = written.wrong(written.packed())
    assert not found, "; ".join(found)


@pytest.mark.area("lora")
def test_what_lacks_is_told_once(
    installed_release: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One warning an adapter, whatever its number of layers."""
    from vllm.lora.model_manager import LoRAModelManager

    written = Written(tmp_path, {}, {"1", "2.up_proj"})
    names = [f"{MODULE}.{at}.{name}" for at in range(EXPERTS) for name in NAMES]
    told: list[str] = []
    with registered(True):
        monkeypatch.setattr(
            logging.getLogger("vllm.vllm_ext"), "warning", lambda text, *of: told.append(text % of)
        )
        model = written.load()
        # Its constructor wants a model on a device.
        manager = object.__new__(LoRAModelManager)
        vars(manager).update(
            packed_modules={MODULE: names},
            modules={},
            is_pooling_model=False,
            _restrict_to_local_experts=lambda module, of_it: of_it,
            _enable_moe_shared_loras=False,
            _is_non_gated_moe=False,
        )
        manager._create_merged_loras_inplace(model)
    assert told == [
        "MOE_RSLORA: LoRA adapter 1 leaves out experts, which stay as in the base model: "
        f"1 expert(s) of w1 in {MODULE}, 1 expert(s) of w2 in {MODULE}, "
        f"2 expert(s) of w3 in {MODULE}"
    ]
    assert not written.wrong(model.loras[MODULE])
