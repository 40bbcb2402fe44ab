"""What the checkpoint is worth on prompts it has never seen, and the model card that says so."""

import json
import logging
import time
from dataclasses import asdict, dataclass

import numpy as np
import torch
from tokenizers import Tokenizer

from tools.train_tiny import card, chats, dataset, export, metrics, prompts, tokenizer
from tools.train_tiny.calibrate import FILE_NAME
from tools.train_tiny.config import SHIPPED, TinyConfig, TrainConfig
from tools.train_tiny.model import Target
from tools.train_tiny.speculate import Round, Transcript, speculate
from tools.train_tiny.weights import Weights

log = logging.getLogger(__name__)
NUM_CHATS, NUM_LIBRARY, NUM_OTHER_CODE = 64, 24, 12
MAX_NEW = 96


@dataclass(frozen=True, slots=True, kw_only=True)
class SetResult:
    """One set of prompts at one temperature."""

    name: str
    temperature: float
    num_prompts: int
    num_rounds: int
    accepted_length: float
    accepted_length_untruncated: float
    acceptance: list[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfidenceResult:
    """How well the confidences rank and how true they are, over all sets at one temperature."""

    auc_first: float
    auc_prefix: float
    ece_raw: float
    ece_calibrated: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    seed: int
    block: int
    perplexity: dict[str, float]
    sets: list[SetResult]
    confidence: dict[str, ConfidenceResult]
    exact_answers: str
    demo: dict[str, str]


def evaluate(run: TrainConfig) -> Results:
    """Measure, and write `evaluation.json` and the model card next to the checkpoint."""
    config, weights = TinyConfig.from_json(SHIPPED), export.read(run.out)
    learned = tokenizer.load(run.out)
    turns = prompts.chat_turns("evaluate", NUM_CHATS, run.seed)
    sets = {"chat": [tokenizer.encode_prompt(learned, turn.question) for turn in turns]}
    for domain, num in (
        ("library", NUM_LIBRARY), ("tests", NUM_OTHER_CODE), ("templates", NUM_OTHER_CODE)
    ):  # fmt: skip
        found = prompts.code_prompts(run.work / "data", learned, domain, "evaluate", num, run.seed)
        if found:
            sets[domain] = found
    results, rounds_at, exact = [], {}, ""
    for temperature in (0.0, 1.0):
        by_set = {}
        for name, chosen in sets.items():
            start = time.monotonic()
            transcript = speculate(
                weights, config, chosen, temperature=temperature, max_new=MAX_NEW, seed=run.seed
            )
            by_set[name] = transcript.rounds
            results.append(_set_result(name, temperature, len(chosen), transcript.rounds, config))
            log.info("%.0f s %s", time.monotonic() - start, results[-1])
            if name == "chat" and temperature == 0:
                exact = _exact_answers(learned, turns, transcript)
        code = [r for name, rounds in by_set.items() if name != "chat" for r in rounds]
        num = sum(len(chosen) for name, chosen in sets.items() if name != "chat")
        results.append(_set_result("code mix", temperature, num, code, config))
        rounds_at[f"T={temperature:g}"] = [r for rounds in by_set.values() for r in rounds]
    temperatures = np.array(json.loads((run.out / FILE_NAME).read_text())["temperatures"])
    measured = Results(
        seed=run.seed,
        block=config.dspark_block_size,
        perplexity=perplexities(run, weights, config, learned),
        sets=results,
        confidence={k: confidence_result(r, temperatures) for k, r in rounds_at.items()},
        exact_answers=exact,
        demo=demo_answers(weights, config, learned),
    )
    (run.out / "evaluation.json").write_text(json.dumps(asdict(measured), indent=1) + "\n")
    (run.out / "README.md").write_text(card.render(measured))
    return measured


def confidence_result(rounds: list[Round], temperatures: np.ndarray) -> ConfidenceResult:
    block = len(temperatures)
    happened, judged = metrics.outcomes(rounds, block)
    raw = metrics.survival(rounds, np.ones(block))
    scaled = metrics.survival(rounds, temperatures)
    return ConfidenceResult(
        auc_first=metrics.area_under_curve(raw[:, 0], happened[:, 0]),
        auc_prefix=metrics.area_under_curve(raw[judged], happened[judged]),
        ece_raw=metrics.calibration_error(raw[judged], happened[judged]),
        ece_calibrated=metrics.calibration_error(scaled[judged], happened[judged]),
    )


@torch.no_grad()
def perplexities(
    run: TrainConfig, weights: Weights, config: TinyConfig, learned: Tokenizer
) -> dict[str, float]:
    """Of held-out code by domain (rows of 512 tokens), and of the answers to unseen questions."""
    model, length = Target(config, max_length=640), run.row_length
    found = {}
    for domain, documents in dataset.held_out_code(run.work / "data", learned).items():
        flat = [token for document in documents for token in document]
        num = min(24, (len(flat) - 1) // length)
        spread = np.linspace(0, len(flat) - length - 1, num) if num else np.empty(0)
        starts: list[int] = spread.astype(int).tolist()
        rows = [torch.tensor(flat[s : s + length + 1]) for s in starts]
        if rows:
            losses = [_losses(model, weights, row) for row in rows]
            found[domain] = float(torch.cat(losses).mean().exp())
    losses = []
    for turn in prompts.chat_turns("evaluate", NUM_CHATS, run.seed):
        tokens, is_answer = tokenizer.encode_chat(learned, "", [turn])
        losses.append(_losses(model, weights, torch.tensor(tokens))[torch.tensor(is_answer[1:])])
    return found | {"chat answers": float(torch.cat(losses).mean().exp())}


def _losses(model: Target, weights: Weights, tokens: torch.Tensor) -> torch.Tensor:
    hidden = model.forward(weights, tokens[None, :-1]).hidden
    logits = hidden @ weights["head.weight"].t()
    return torch.nn.functional.cross_entropy(logits, tokens[1:], reduction="none")


def demo_answers(weights: Weights, config: TinyConfig, learned: Tokenizer) -> dict[str, str]:
    """Greedy answers to the questions that the documentation shows."""
    asked = [tokenizer.encode_prompt(learned, q) for q in chats.DEMO_QUESTIONS]
    transcript = speculate(weights, config, asked, temperature=0.0, max_new=MAX_NEW, seed=0)
    answers = [learned.decode(answer) for answer in transcript.answers]
    for turn, answer in zip(chats.demo_turns(), answers, strict=True):
        if turn.answer != answer:
            log.warning("demo question %r is answered %r", turn.question, answer)
    return dict(zip(chats.DEMO_QUESTIONS, answers, strict=True))


def _exact_answers(learned: Tokenizer, turns: list[tokenizer.Turn], transcript: Transcript) -> str:
    answers = [learned.decode(answer) for answer in transcript.answers]
    num = sum(t.answer == a for t, a in zip(turns, answers, strict=True))
    for turn, answer in zip(turns[:12], answers, strict=False):
        log.info("%r -> %r", turn.question, answer)
    return f"{num}/{len(turns)}"


def _set_result(
    name: str, temperature: float, num_prompts: int, rounds: list[Round], config: TinyConfig
) -> SetResult:
    return SetResult(
        name=name,
        temperature=temperature,
        num_prompts=num_prompts,
        num_rounds=len(rounds),
        accepted_length=round(metrics.mean_length(rounds), 3),
        accepted_length_untruncated=round(metrics.full_length(rounds), 3),
        acceptance=[
            round(a, 3) for a in metrics.acceptance_by_position(rounds, config.dspark_block_size)
        ],
    )
