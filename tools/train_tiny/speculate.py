"""Speculative decoding for measurement: exact, batched over prompts, and without any cache.

Every round runs the target over whole sequences again. That is slow and has nothing to hide.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tools.train_tiny import tokenizer
from tools.train_tiny.config import TinyConfig
from tools.train_tiny.drafter import Draft, Drafter, propose
from tools.train_tiny.model import Target
from tools.train_tiny.weights import Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One verification of one prompt."""

    prompt_id: int
    num_accepted: int
    """Accepted drafts, whether or not an end of sequence lies among them."""
    num_emitted: int
    """Tokens of the round up to the end of sequence, correction or bonus included."""
    num_before_end: int
    """Drafts that do not follow an accepted end of sequence: the ones worth judging."""
    confidence_logits: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Transcript:
    rounds: list[Round]
    answers: list[list[int]]
    """New tokens per prompt."""


@torch.no_grad()
def speculate(
    weights: Weights,
    config: TinyConfig,
    prompts: list[list[int]],
    *,
    temperature: float,
    max_new: int,
    seed: int,
) -> Transcript:
    """Decode every prompt to its end of sequence or `max_new` tokens."""
    block = config.dspark_block_size
    longest = max(len(p) for p in prompts) + max_new + 2 * block + 64
    target, drafter = Target(config, max_length=longest), Drafter(config, max_length=longest)
    generator = torch.Generator().manual_seed(seed)
    sequences = [list(p) for p in prompts]
    head = weights["head.weight"]
    hidden, taps = _run(target, weights, sequences)
    for i, sequence in enumerate(sequences):
        row = _distribution(hidden[i, len(sequence) - 1] @ head.t(), temperature)
        sequence.append(_draw(row, generator))
    rounds: list[Round] = []
    active = list(range(len(prompts)))
    while active := [i for i in active if not _is_done(sequences[i], prompts[i], max_new)]:
        anchors = torch.tensor([len(sequences[i]) - 1 for i in active])
        tokens = torch.tensor([sequences[i][-1] for i in active])
        draft = propose(
            drafter, weights, weights, taps[active], anchors, tokens, temperature, generator
        )
        verified = [sequences[i] + draft.tokens[j].tolist() for j, i in enumerate(active)]
        hidden, fresh_taps = _run(target, weights, verified)
        grown = fresh_taps.new_zeros(len(prompts), *fresh_taps.shape[1:])
        grown[active] = fresh_taps
        taps = grown
        for j, i in enumerate(active):
            first = len(sequences[i]) - 1
            rows = hidden[j, first : first + block + 1]
            wanted = _distribution(rows @ head.t(), temperature)
            accepted, correction = verify(draft, j, wanted, generator)
            emitted = [*draft.tokens[j, :accepted].tolist(), correction]
            end = emitted.index(tokenizer.EOS) + 1 if tokenizer.EOS in emitted else len(emitted)
            drafts = draft.tokens[j].tolist()
            is_end_accepted = tokenizer.EOS in drafts[:accepted]
            rounds.append(
                Round(
                    prompt_id=i,
                    num_accepted=accepted,
                    num_emitted=end,
                    num_before_end=end if is_end_accepted else block,
                    confidence_logits=tuple(draft.confidence_logits[j].tolist()),
                )
            )
            sequences[i].extend(emitted[:end])
    answers = [s[len(p) :] for s, p in zip(sequences, prompts, strict=True)]
    return Transcript(rounds=rounds, answers=answers)


def verify(draft: Draft, row: int, wanted: Tensor, generator: torch.Generator) -> tuple[int, int]:
    """Accepted drafts and the token after them; `wanted` [K + 1, V] is the target's distribution."""
    tokens = draft.tokens[row].tolist()
    for k, token in enumerate(tokens):
        p, q = wanted[k], draft.probabilities[row, k]
        if torch.rand((), generator=generator) < p[token] / q[token]:
            continue
        residual = (p - q).clamp(min=0)
        return k, _draw(residual if residual.sum() > 1e-8 else p, generator)
    return len(tokens), _draw(wanted[-1], generator)


def _run(target: Target, weights: Weights, sequences: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Final hidden [B, L, D] and taps [B, L, taps x D]; past a sequence's end they mean nothing."""
    length = max(map(len, sequences))
    rows = torch.tensor([s + [tokenizer.EOS] * (length - len(s)) for s in sequences])
    hidden, taps = [], []
    for part in torch.split(rows, 16):
        output = target.forward(weights, part)
        hidden.append(output.hidden.view(part.shape[0], length, -1))
        taps.append(torch.cat(output.taps, -1).view(part.shape[0], length, -1))
    return torch.cat(hidden), torch.cat(taps)


def _distribution(logits: Tensor, temperature: float) -> Tensor:
    if temperature == 0:
        return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).float()
    return torch.softmax(logits / temperature, -1)


def _draw(distribution: Tensor, generator: torch.Generator) -> int:
    return int(torch.multinomial(distribution, 1, generator=generator))


def _is_done(sequence: list[int], prompt: list[int], max_new: int) -> bool:
    return sequence[-1] == tokenizer.EOS or len(sequence) - len(prompt) >= max_new
