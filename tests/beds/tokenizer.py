"""A closed-vocabulary tokenizer for tiny models, so that every token count is known."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

PAD, UNK, START, END = "[PAD]", "[UNK]", "[CLS]", "[SEP]"
_SPECIALS = (PAD, UNK, START, END)
WORDS: tuple[str, ...] = tuple(a + b for a in "bdfghklmnprstvz" for b in ("ae", "io", "ou", "ui"))
VOCABULARY: dict[str, int] = {word: i for i, word in enumerate((*_SPECIALS, *WORDS))}


def sentence(words: int, seed: int) -> str:
    """Return a text of exactly `words` known words; each is one token."""
    return " ".join(random.Random(seed).choices(WORDS, k=words))


def vocabulary(size: int, specials: Sequence[str] = ()) -> dict[str, int]:
    """VOCABULARY, the special tokens of a family, and words nobody says up to ``size`` entries."""
    words = [*VOCABULARY, *specials]
    words += [f"unsaid{at}" for at in range(len(words), size)]
    if len(words) > size:
        raise ValueError(f"{len(words)} words do not fit a vocabulary of {size}")
    return {word: at for at, word in enumerate(words)}


def save_tokenizer(
    folder: Path, max_length: int, size: int = len(VOCABULARY), specials: Sequence[str] = ()
) -> None:
    """Write tokenizer files that wrap a text in START and END and a pair in START, END, END.

    ``size`` entries, ``specials`` among them, whole wherever they stand in a text. There is a
    padding token on purpose: servers that join a pair's ids put one in between.
    """
    backend = Tokenizer(WordLevel(vocabulary(size, specials), unk_token=UNK))
    backend.pre_tokenizer = WhitespaceSplit()
    backend.post_processor = TemplateProcessing(
        single=f"{START} $A {END}",
        pair=f"{START} $A {END} $B:1 {END}:1",
        special_tokens=[(START, VOCABULARY[START]), (END, VOCABULARY[END])],
    )
    PreTrainedTokenizerFast(
        tokenizer_object=backend,
        model_max_length=max_length,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
        pad_token=PAD,
        unk_token=UNK,
        cls_token=START,
        sep_token=END,
        bos_token=START,
        eos_token=END,
        additional_special_tokens=list(specials),
    ).save_pretrained(folder)


def load_tokenizer(folder: Path) -> Tokenizer:
    """Load the saved tokenizer without any server code, truncation or padding."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
