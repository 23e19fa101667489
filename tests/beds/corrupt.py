"""A tiny chat model in which one word makes a request's logits NaN, and another makes one +inf.

In production NaN comes from a damaged checkpoint, an overflow in a kernel or a bad device; here it
stands in the checkpoint, where vLLM loads it as it loads any other value. Only requests that hold
one of the two words are touched, so the other requests of a batch tell what leaks.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CLEAN_WORDS: tuple[str, ...] = tuple(f"w{at}" for at in range(250))
NAN_WORD, INF_WORD = "nan", "inf"
_BEGIN, _END = "[BEGIN]", "[END]"
# Words first: the id that argmax gives for a row of NaN, 0, is a word and shows in the text.
WORD_IDS: dict[str, int] = {
    word: at for at, word in enumerate((*CLEAN_WORDS, NAN_WORD, INF_WORD, _BEGIN, _END))
}
MAX_MODEL_LEN = 512
BLOCK_SIZE = 32
_HIDDEN, _LAYERS, _HEADS = 128, 2, 4
# Components of the residual stream that no layer writes to: a token's own until the last norm.
_INF, _SPECIAL = 0, 1
_TEMPLATE = "{{ bos_token }}{% for message in messages %} {{ message['content'] }}{% endfor %}"


@dataclass(frozen=True)
class CorruptLlama:
    """The checkpoint, its words and how to serve it.

    A prompt that holds ``nan_word`` anywhere has NaN logits from there on, all of them, and NaN in
    its KV cache. A prompt that ends in ``inf_word`` has one +inf logit at every step, that of
    ``inf_word`` itself, so that it goes on; its KV cache is finite. ``clean_words`` do neither. A
    word is a token; the token at the beginning is added by the tokenizer and the chat template. No
    clean request ends by itself.
    """

    path: Path
    dtype: str
    nan_word: str = NAN_WORD
    inf_word: str = INF_WORD
    clean_words: tuple[str, ...] = CLEAN_WORDS

    @property
    def serve_args(self) -> tuple[str, ...]:
        """Arguments of ``vllm serve`` after the model."""
        return (
            *("--dtype", self.dtype, "--enforce-eager"),
            *("--max-model-len", str(MAX_MODEL_LEN), "--block-size", str(BLOCK_SIZE)),
        )

    def ids(self, *words: str) -> list[int]:
        """Token ids of a prompt of these words."""
        return [WORD_IDS[word] for word in (_BEGIN, *words)]


def corrupt_llama(
    folder: Path,
    *,
    dtype: str = "float32",
    seed: int = 7,
    hidden: int = _HIDDEN,
    layers: int = _LAYERS,
) -> CorruptLlama:
    """Write the checkpoint, float32 or bfloat16, with tokenizer and chat template."""
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(WORD_IDS),
            hidden_size=hidden,
            num_hidden_layers=layers,
            num_attention_heads=_HEADS,
            num_key_value_heads=_HEADS,
            intermediate_size=2 * hidden,
            max_position_embeddings=MAX_MODEL_LEN,
            bos_token_id=WORD_IDS[_BEGIN],
            eos_token_id=WORD_IDS[_END],
            pad_token_id=WORD_IDS[_END],
            tie_word_embeddings=False,
        )
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if parameter.dim() == 1:
                parameter.fill_(1.0)
                continue
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise if "embed" in name else 2 * noise / parameter.shape[1] ** 0.5)
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter[[_INF, _SPECIAL]] = 0.0
        embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        embedding[:, _INF], embedding[:, _SPECIAL] = 0.0, 1.0
        head[:, [_INF, _SPECIAL]] = 0.0
        # Special tokens and the two words are never sampled by a clean request.
        head[len(CLEAN_WORDS) :, _SPECIAL] = -100.0
        # 30 is about 10 after the last norm, and 10 times this overflows in either dtype.
        embedding[WORD_IDS[INF_WORD], _INF] = 30.0
        head[WORD_IDS[INF_WORD], _INF] = torch.finfo(torch.bfloat16).max
        embedding[WORD_IDS[NAN_WORD]] = torch.nan
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    _save_tokenizer(folder)
    return CorruptLlama(folder, dtype)


def _save_tokenizer(folder: Path) -> None:
    backend = Tokenizer(WordLevel(WORD_IDS, unk_token=_END))
    backend.pre_tokenizer = WhitespaceSplit()
    backend.post_processor = TemplateProcessing(
        single=f"{_BEGIN} $A", special_tokens=[(_BEGIN, WORD_IDS[_BEGIN])]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=backend,
        model_max_length=MAX_MODEL_LEN,
        bos_token=_BEGIN,
        eos_token=_END,
        pad_token=_END,
        chat_template=_TEMPLATE,
    ).save_pretrained(folder)
