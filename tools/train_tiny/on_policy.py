"""Rows that the target itself wrote, and the hidden states the drafter learns from.

A row is a chain of segments: a prompt, then the target's continuation, then the next prompt.
"""

import logging
import random
from collections import Counter, deque
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from tools.train_tiny import chats, export, tokenizer
from tools.train_tiny.config import SHIPPED, TinyConfig, TrainConfig
from tools.train_tiny.dataset import Dataset
from tools.train_tiny.decoder import BatchDecoder
from tools.train_tiny.model import Target
from tools.train_tiny.weights import Weights

log = logging.getLogger(__name__)
CODE_SHARE = 0.75
CODE_DOMAINS = {"library": 0.7, "tests": 0.2, "templates": 0.1}
CORPUS_SHARES = (0.52, 0.25, 0.09, 0.14)
"""Real code is what drafts fail on, so most of what the drafter sees is real code."""
BATCH_ROWS = 160
MAX_REPEATED_SHARE = 0.6


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterRows:
    """Rows with what the target computed on them; row arrays share their first axis."""

    tokens: Tensor  # [R, L + 1]
    is_taught: Tensor  # [R, L + 1] the token was written by the target or stands in an answer
    taps: Tensor  # [R, L, taps x D]
    hidden: Tensor  # [R, L, D] makes the target's logits
    surprise: Tensor  # [R, L + 1] 1 - the target's probability of the token
    is_code: Tensor  # [R]
    num_on_policy: int


class SegmentedRow:
    """Feeds one row: forced prompt tokens first, sampled ones after, a new segment at each end."""

    def __init__(self, source: "PromptSource", *, is_code: bool, is_greedy: bool) -> None:
        self.source, self.is_code, self.is_greedy = source, is_code, is_greedy
        self.tokens: list[int] = []
        self.is_taught: list[bool] = []
        self.pending: deque[int] = deque()
        self.num_left = 0
        self._begin()

    def _begin(self) -> None:
        prompt, self.num_left = self.source.segment(is_code=self.is_code)
        self.pending.extend(prompt)
        self.start = len(self.tokens) + len(prompt)

    def feed(self, sampled: int) -> int:
        """The next token of the row: `sampled` unless a prompt is still being read."""
        if not self.pending and (self.num_left == 0 or self.tokens[-1] == tokenizer.EOS):
            if not self.is_code:
                self._drop_loops()
            self._begin()
        is_forced = bool(self.pending)
        token = self.pending.popleft() if is_forced else sampled
        self.num_left -= 0 if is_forced else 1
        self.tokens.append(token)
        # A prompt of code is code too; a user's question is not what the target would say.
        self.is_taught.append(self.is_code or not is_forced)
        return token

    def _drop_loops(self) -> None:
        """An answer that circles teaches only how to circle. In greedy code circles are half of what is served."""
        own = self.tokens[self.start :]
        grams = Counter(zip(own, own[1:], own[2:], own[3:], strict=False))
        num = sum(grams.values())
        if num >= 24 and 1 - len(grams) / num > MAX_REPEATED_SHARE:
            self.is_taught[self.start :] = [False] * len(own)


class PromptSource:
    """Training prompts of both domains."""

    def __init__(self, rows: Dataset, learned: Tokenizer, seed: int) -> None:
        self.rows, self.learned = rows, learned
        self.rng, self.chat_rng = np.random.default_rng(seed), random.Random(seed)

    def segment(self, *, is_code: bool) -> tuple[list[int], int]:
        """Prompt tokens, and how many tokens to write at most."""
        if not is_code:
            chat = chats.train_chat(self.chat_rng)
            turn = chat.turns[0]
            return tokenizer.encode_prompt(self.learned, turn.question, chat.system), 120
        domain = self.rng.choice(list(CODE_DOMAINS), p=list(CODE_DOMAINS.values()))
        length = int(self.rng.integers(16, 144))
        tokens, _ = self.rows.row(self.rng, domain, length)
        return [tokenizer.BOS, *tokens.tolist()], int(self.rng.integers(64, 160))


def generate(
    weights: Weights,
    config: TinyConfig,
    source: PromptSource,
    num_rows: int,
    length: int,
    seed: int,
) -> list[SegmentedRow]:
    """Batched decoding, half greedy and half at temperature 1."""
    generator = torch.Generator().manual_seed(seed)
    rows = [
        SegmentedRow(source, is_code=(i // 2) / (num_rows / 2) < CODE_SHARE, is_greedy=i % 2 == 0)
        for i in range(num_rows)
    ]
    decoder = BatchDecoder(weights, config, num_rows, length)
    is_greedy = torch.tensor([row.is_greedy for row in rows])
    sampled = torch.zeros(num_rows, dtype=torch.long)
    for _ in range(length):
        tokens = torch.tensor(
            [row.feed(token) for row, token in zip(rows, sampled.tolist(), strict=True)]
        )
        logits = decoder.step(tokens)
        drawn = torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(1)
        sampled = torch.where(is_greedy, logits.argmax(-1), drawn)
    for row, token in zip(rows, sampled.tolist(), strict=True):
        row.feed(token)
    return rows


def prepare(run: TrainConfig) -> None:
    """The whole stage: reads the checkpoint folder's target, writes `rows.pt`."""
    weights, config = export.read(run.out), TinyConfig.from_json(SHIPPED)
    save(build(run, weights, config, run.seed + 100), run.work / "rows.pt")


@torch.no_grad()
def build(run: TrainConfig, weights: Weights, config: TinyConfig, seed: int) -> DrafterRows:
    """On-policy rows first, then rows of the corpus, all with the target's hidden states."""
    learned = tokenizer.load(run.work / "data")
    corpus_rows = Dataset(run.work / "data")
    source = PromptSource(corpus_rows, learned, seed)
    length, rows = run.row_length, []
    for first in range(0, run.num_on_policy_rows, BATCH_ROWS):
        num = min(BATCH_ROWS, run.num_on_policy_rows - first)
        rows += generate(weights, config, source, num, length, seed + first)
        log.info("wrote %d on-policy rows", len(rows))
    tokens = [torch.tensor(row.tokens) for row in rows]
    taught = [torch.tensor(row.is_taught) for row in rows]
    is_code = [row.is_code for row in rows]
    rng = np.random.default_rng(seed + 1)
    while len(tokens) < run.num_on_policy_rows + run.num_corpus_rows:
        batch = corpus_rows.draw(rng, run.batch_rows, length, CORPUS_SHARES)
        tokens += list(batch.tokens)
        untaught = torch.zeros(run.batch_rows, 1, dtype=torch.bool)
        taught += list(torch.cat([untaught, batch.weights == 1], 1))
        is_code += [domain != "chat" for domain in batch.domains]
    all_tokens = torch.stack(tokens)
    log.info("running the target over %d rows", len(all_tokens))
    states = hidden_states(weights, config, all_tokens, run.batch_rows)
    return DrafterRows(
        tokens=all_tokens,
        is_taught=torch.stack(taught),
        taps=states[0],
        hidden=states[1],
        surprise=states[2],
        is_code=torch.tensor(is_code),
        num_on_policy=len(rows),
    )


@torch.no_grad()
def hidden_states(
    weights: Weights, config: TinyConfig, tokens: Tensor, batch_rows: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Taps, final hidden states and surprise of rows, in full fp32 and slices of rows."""
    model = Target(config, max_length=tokens.shape[1])
    taps, hidden, surprise = [], [], []
    for part in torch.split(tokens, batch_rows):
        output = model.forward(weights, part[:, :-1])
        num, length = part.shape[0], part.shape[1] - 1
        taps.append(torch.cat(output.taps, -1).view(num, length, -1))
        hidden.append(output.hidden.view(num, length, -1))
        logits = output.hidden @ weights["head.weight"].t()
        chosen = logits.gather(1, part[:, 1:].reshape(-1, 1)).squeeze(1)
        probability = (chosen - logits.logsumexp(-1)).exp().view(num, length)
        surprise.append(torch.cat([torch.ones(num, 1), 1 - probability], 1))
    return torch.cat(taps), torch.cat(hidden), torch.cat(surprise)


def save(rows: DrafterRows, path: Path) -> None:
    torch.save({name: getattr(rows, name) for name in DrafterRows.__dataclass_fields__}, path)


def load(path: Path) -> DrafterRows:
    return DrafterRows(**torch.load(path))
