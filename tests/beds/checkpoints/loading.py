"""vLLM's own loader on a checkpoint, without an engine: which parameters it leaves unset."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from tests.beds.checkpoints import write
from tests.beds.checkpoints.checkpoint import Checkpoint

# Layer scales of RADIO: they stay 1, vLLM's loader leaves them out whatever a checkpoint has.
_CONSTANT = (".ls1", ".ls2")
# The loader of this family tells nobody what it has not found.
_SILENT, _LOST = "nemotron_vl", "mlp1.1.weight"


def unset_after_loading(folder: str, *names: str) -> dict[str, list[str]]:
    """For each family, the parameters that vLLM's loader doesn't fill; run in a fresh process.

    Every parameter is NaN before. A loader that skips what it can't place, as those of some
    families do, leaves NaN behind. "broken" is the negative control, a
    checkpoint that lacks one tensor.
    """
    root = Path(folder)
    found = {name: _unset(write(name, root / name), root) for name in names}
    broken = write(_SILENT, root / "broken")
    weights = broken.path / "model.safetensors"
    kept = {name: tensor for name, tensor in load_file(weights).items() if name != _LOST}
    save_file(kept, weights, metadata={"format": "pt"})
    found["broken"] = _unset(broken, root)
    return found


def _unset(checkpoint: Checkpoint, folder: Path) -> list[str]:
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.model_executor.models import ModelRegistry

    (architecture,) = _architectures(checkpoint)
    # A class that is registered itself is inspected here instead of in a process of its own.
    model_class = ModelRegistry.models[architecture].load_model_cls()
    ModelRegistry.register_model(architecture, model_class)
    config = EngineArgs(**checkpoint.arguments).create_engine_config()
    before = torch.get_default_dtype()
    try:
        with set_current_vllm_config(config):
            # Which groups there are depends on the model.
            store = f"file://{folder / f'store-{checkpoint.path.name}'}"
            parallel_state.init_distributed_environment(1, 0, store, 0, "gloo")
            parallel_state.ensure_model_parallel_initialized(1, 1)
            torch.set_default_dtype(config.model_config.dtype)
            model: Any = initialize_model(config)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(float("nan"))
            get_model_loader(config.load_config).load_weights(model, config.model_config)
    finally:
        torch.set_default_dtype(before)
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()
    return [
        name
        for name, value in model.named_parameters()
        if bool(value.isnan().any()) and not name.endswith(_CONSTANT)
    ]


def _architectures(checkpoint: Checkpoint) -> list[str]:
    import json

    return list(json.loads((checkpoint.path / "config.json").read_text())["architectures"])
