"""The shipped weights in this engine: transformers' logits, exact speculation, and drafts that are mostly right."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from common.checkpoint.loader import load_model
from common.checkpoint.reader import CheckpointReader
from common.model.dspark import DSparkModel
from tests.support.drafter_bench import draft
from tests.support.engine_bench import EngineBench, Wanted
from tests.support.peer import Peer
from tests.support.questions import own_questions
from tests.support.slow_drafter import SlowDrafter
from tests.support.target_bench import Rows, TargetBench
from tests.support.tiny_checkpoint import Tensors


@pytest.fixture(scope="module")
def model(shipped_checkpoint: Path) -> DSparkModel:
    return load_model(shipped_checkpoint, dtype=torch.float32, device=torch.device("cpu"))


@pytest.fixture(scope="module")
def prompts(shipped_checkpoint: Path) -> list[tuple[int, ...]]:
    """Some of the project's own prompts, of every domain."""
    questions = own_questions(shipped_checkpoint)
    domains = sorted({question.domain for question in questions})
    return [
        question.token_ids
        for domain in domains
        for question in [q for q in questions if q.domain == domain][:2]
    ]


@pytest.fixture(scope="module")
def tensors(shipped_checkpoint: Path) -> Tensors:
    """In float32, in which the references compute."""
    with CheckpointReader(shipped_checkpoint) as reader:
        return {n: t.float() if t.is_floating_point() else t for n, t in reader.items()}


@pytest.fixture(scope="module")
def text(prompts: list[tuple[int, ...]]) -> list[int]:
    """Real tokens beyond the second page border."""
    return [token for prompt in prompts * 300 for token in prompt][:300]


def test_its_logits_and_taps_are_those_of_transformers(
    model: DSparkModel, tensors: Tensors, text: list[int], shipped_checkpoint: Path
) -> None:
    values = json.loads((shipped_checkpoint / "config.json").read_text())
    values["torch_dtype"] = "float32"
    expected = Peer(values, model.config, tensors).run(text)
    found = TargetBench(model).run(Rows(0, 0, text))[0]
    for ours, theirs in ((found.logits, expected.logits), (found.taps, expected.taps)):
        scale = theirs.abs().max() / 5
        torch.testing.assert_close(ours / scale, theirs / scale, atol=1e-4, rtol=0)


def test_its_drafts_are_those_of_the_slow_reference(
    model: DSparkModel, tensors: Tensors, text: list[int]
) -> None:
    bench = TargetBench(model)
    taps = bench.run(Rows(0, 0, text[:200]))[0].taps
    expected = SlowDrafter(model.config, tensors).draft(taps, text[200], 7)
    scale = float(max(expected.base_logits.abs().max(), expected.hidden.abs().max())) / 5
    ours = draft(bench, [0], [200], [text[200]], 7)
    ours.require_equal(0, expected, tolerance=1e-4 * max(1.0, scale))


def test_its_drafts_are_accepted_and_change_nothing(
    model: DSparkModel, prompts: list[tuple[int, ...]]
) -> None:
    wanted = [Wanted(prompt=prompt, max_length=len(prompt) + 48) for prompt in prompts]
    plain = EngineBench(model, draft_length=0).run(*wanted)
    speculative = EngineBench(model, draft_length=7).run(*wanted)
    for ours, theirs in zip(speculative, plain, strict=True):
        ours.require_equal(theirs)
    rounds = [result for output in speculative for result in output.rounds[1:]]
    mean_accepted_length = sum(len(result.token_ids) for result in rounds) / len(rounds)
    # Far below what it reaches; small mistakes of the drafter are the business of the test above.
    assert mean_accepted_length > 2.0
