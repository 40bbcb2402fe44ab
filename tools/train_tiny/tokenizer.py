"""The tokenizer: byte-level BPE with DeepSeek-V4's special tokens, and its chat format."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

BOS, EOS, USER, ASSISTANT, THINK, END_THINK, DSML, NOISE = range(8)
SPECIALS = (
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<think>",
    "</think>",
    "｜DSML｜",
    "<｜dspark▁noise｜>",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One question and its answer."""

    question: str
    answer: str


def train(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Learn merges from `texts`; digits stay single tokens so that numbers are read digit by digit."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(text, special=True, normalized=False) for text in SPECIALS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=20,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    assert tokenizer.get_vocab_size() == vocab_size, f"{tokenizer.get_vocab_size()=}"
    assert all(tokenizer.token_to_id(text) == i for i, text in enumerate(SPECIALS))
    return tokenizer


def load(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def encode_chat(
    tokenizer: Tokenizer, system: str, turns: list[Turn]
) -> tuple[list[int], list[bool]]:
    """Tokens of a chat and, for each, whether the assistant wrote it.

    The format is DeepSeek-V4's for answers without thinking: `</think>` directly follows the role.
    """
    tokens, is_answer = [BOS], [False]

    def extend(ids: list[int], answer: bool) -> None:
        tokens.extend(ids)
        is_answer.extend([answer] * len(ids))

    extend(encode(tokenizer, system), False)
    for turn in turns:
        extend([USER, *encode(tokenizer, turn.question), ASSISTANT, END_THINK], False)
        extend([*encode(tokenizer, turn.answer), EOS], True)
    return tokens, is_answer


def encode_prompt(tokenizer: Tokenizer, question: str, system: str = "") -> list[int]:
    """Tokens up to where the answer begins."""
    question_ids = encode(tokenizer, question)
    return [BOS, *encode(tokenizer, system), USER, *question_ids, ASSISTANT, END_THINK]


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids
