"""A byte-level tokenizer with DeepSeek-V4's special tokens, learnt in milliseconds, as a checkpoint folder."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIALS = (
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<think>",
    "</think>",
)
BOS, EOS, USER, ASSISTANT, THINK, END_THINK = range(6)

_TEXTS = ("the cat sat on the mat and the dog sat on the log", "stop the train at the station")


def write_tokenizer(folder: Path) -> Path:
    """Write tokenizer.json and a config.json with the special ids; returns the folder."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=[AddedToken(text, special=True, normalized=False) for text in SPECIALS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXTS, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token_id": BOS, "eos_token_id": EOS}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder
