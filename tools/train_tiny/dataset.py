"""Training rows: corpus and chats as token arrays, drawn at random."""

import json
import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from tools.train_tiny import chats, corpus, templates, tokenizer

USER_WEIGHT = 0.15
NUM_TEMPLATE_MODULES = 2500
NUM_CHATS = 60_000
DOMAINS = ("library", "tests", "templates", "chat")
EARLY_SHARES = (0.30, 0.12, 0.20, 0.38)
LATE_SHARES = (0.44, 0.16, 0.14, 0.26)
"""Chats and templates are learned first; the library is what the rest of the time is for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """A batch; position t predicts `tokens[:, t + 1]`."""

    tokens: Tensor  # [rows, length + 1] int64
    weights: Tensor  # [rows, length] loss weight of the predicted token
    domains: list[str]


class Dataset:
    """Token streams by domain; chat rows start where a chat starts."""

    def __init__(self, folder: Path) -> None:
        self.streams = {d: np.load(folder / f"{d}.npy") for d in DOMAINS}
        self.chat_answer = np.load(folder / "chat_answer.npy")
        self.chat_starts = np.flatnonzero(self.streams["chat"] == tokenizer.BOS)

    def draw(
        self,
        rng: np.random.Generator,
        num_rows: int,
        length: int,
        shares: tuple[float, ...] = EARLY_SHARES,
    ) -> Rows:
        """Rows in fixed shares: every batch holds the same number of each domain, up to rounding."""
        edges = np.cumsum(shares)
        points = (np.arange(num_rows) + rng.random()) / num_rows
        domains = [DOMAINS[min(int(np.searchsorted(edges, p)), len(DOMAINS) - 1)] for p in points]
        pairs = [self.row(rng, domain, length) for domain in domains]
        tokens = torch.from_numpy(np.stack([t for t, _ in pairs]).astype(np.int64))
        weights = torch.from_numpy(np.stack([w for _, w in pairs]))
        return Rows(tokens=tokens, weights=weights, domains=domains)

    def row(
        self, rng: np.random.Generator, domain: str, length: int
    ) -> tuple[np.ndarray, np.ndarray]:
        stream = self.streams[domain]
        if domain == "chat":
            last = np.searchsorted(self.chat_starts, len(stream) - length - 1)
            start = int(self.chat_starts[rng.integers(last)])
            is_answer = self.chat_answer[start + 1 : start + length + 1]
            weights = np.where(is_answer, 1.0, USER_WEIGHT).astype(np.float32)
        else:
            start = int(rng.integers(len(stream) - length - 1))
            weights = np.ones(length, np.float32)
        return stream[start : start + length + 1], weights


def build(folder: Path, vocab_size: int, seed: int) -> Tokenizer:
    """Write token streams, held-out code and `tokenizer.json` to `folder`; a second call only loads."""
    if (folder / "tokenizer.json").exists():
        return tokenizer.load(folder)
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    files = corpus.read_code()
    modules = [templates.module(rng, held_out=False) for _ in range(NUM_TEMPLATE_MODULES)]
    talks = [chats.train_chat(rng) for _ in range(NUM_CHATS)]
    trained = [f for f in files if not f.is_held_out]
    texts = {
        "library": [f.text for f in trained if not f.is_test],
        "tests": [f.text for f in trained if f.is_test] or modules,
        "templates": modules,
    }
    learned = tokenizer.train(
        texts["library"]
        + texts["tests"][::3]
        + modules[:300]
        + [f"{turn.question}\n{turn.answer}" for talk in talks[:6000] for turn in talk.turns],
        vocab_size,
    )
    for domain, parts in texts.items():
        ids = [learned.encode(text, add_special_tokens=False).ids for text in parts]
        rng.shuffle(ids)
        flat = [token for document in ids for token in (tokenizer.BOS, *document, tokenizer.EOS)]
        np.save(folder / f"{domain}.npy", np.array(flat, np.uint16))
    pairs = [tokenizer.encode_chat(learned, talk.system, talk.turns) for talk in talks]
    np.save(folder / "chat.npy", np.array([t for ids, _ in pairs for t in ids], np.uint16))
    np.save(folder / "chat_answer.npy", np.array([a for _, own in pairs for a in own], bool))
    held_out = {
        "library": [f.text for f in files if f.is_held_out and not f.is_test],
        "tests": [f.text for f in files if f.is_held_out and f.is_test],
        "templates": [templates.module(rng, held_out=True) for _ in range(40)],
    }
    (folder / "held_out.json").write_text(json.dumps(held_out))
    learned.save(str(folder / "tokenizer.json"))
    return learned


def held_out_code(folder: Path, learned: Tokenizer) -> dict[str, list[list[int]]]:
    """Tokens of every held-out file, by domain."""
    texts = json.loads((folder / "held_out.json").read_text())
    return {
        domain: [[tokenizer.BOS, *tokenizer.encode(learned, text)] for text in parts]
        for domain, parts in texts.items()
    }
