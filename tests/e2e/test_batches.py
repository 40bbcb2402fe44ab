"""What a request gives depends on its prompt and its seed; not on its neighbours, not on speculation, not on the hand-off."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

import dspark
from tests.support.asking import Ask, ask_all, engine_sampling, exactly
from tests.support.questions import Question
from tests.support.solo import Job, Solo
from tests.support.system import System

pytestmark = pytest.mark.e2e

SAMPLINGS = (
    dspark.SamplingParams(temperature=0.0),
    dspark.SamplingParams(temperature=0.8, seed=1),
    dspark.SamplingParams(temperature=1.0, seed=2, top_k=20),
    dspark.SamplingParams(temperature=0.9, seed=3, top_p=0.9),
    dspark.SamplingParams(temperature=1.3, seed=4, top_k=50, top_p=0.95),
    dspark.SamplingParams(temperature=0.7, seed=2**63 - 1, logprobs=3),
)
NUM_REQUESTS = 16


def mixed_asks(questions: tuple[Question, ...]) -> list[Ask]:
    """Sixteen requests, no two alike in length and sampling; short and long prompts, 16 to 61 tokens."""
    step = len(questions) // NUM_REQUESTS
    return [
        Ask(
            prompt=questions[i * step].token_ids,
            sampling=SAMPLINGS[i % len(SAMPLINGS)],
            stop=exactly(16 + 3 * i),
        )
        for i in range(NUM_REQUESTS)
    ]


def job_of(ask: Ask) -> Job:
    assert ask.stop.max_tokens is not None
    return Job(
        prompt=ask.prompt,
        num_tokens=ask.stop.max_tokens,
        sampling=engine_sampling(ask.sampling),
    )


def test_sixteen_different_requests_at_once_each_equal_their_own_solo_run(
    system: System, speculating: Solo, questions: tuple[Question, ...]
) -> None:
    asks = mixed_asks(questions)
    answers = ask_all(system.address, asks)
    alone = speculating.alone([job_of(ask) for ask in asks])
    for ask, answer, output in zip(asks, answers, alone, strict=True):
        assert answer.token_ids == output.token_ids, ask


def test_seeded_requests_give_the_same_tokens_with_and_without_speculation(
    system: System, plain: Solo, questions: tuple[Question, ...]
) -> None:
    asks = [
        Ask(
            prompt=question.token_ids,
            sampling=dspark.SamplingParams(temperature=0.8, seed=seed),
            stop=exactly(64),
        )
        for seed, question in enumerate(questions[::4])
    ]
    answers = ask_all(system.address, asks)
    outputs = plain.together([job_of(ask) for ask in asks])
    assert [answer.token_ids for answer in answers] == [output.token_ids for output in outputs]
    # A seed matters: otherwise the comparison would say little.
    other = [
        replace(ask, sampling=replace(ask.sampling, seed=1000 + i)) for i, ask in enumerate(asks)
    ]
    again = ask_all(system.address, other)
    assert (
        sum(a.token_ids != b.token_ids for a, b in zip(answers, again, strict=True))
        > len(asks) // 2
    )


def test_unseeded_requests_beside_others_are_whole_and_plausible(
    system: System, questions: tuple[Question, ...]
) -> None:
    """Rejection sampling: no two runs need to agree, so only what must hold of every run is checked."""
    asks = [
        Ask(
            prompt=question.token_ids,
            sampling=dspark.SamplingParams(temperature=1.0, logprobs=0),
            stop=exactly(40),
        )
        for question in questions[::5]
    ]
    info = _model_info(system)
    for answer in ask_all(system.address, asks):
        assert len(answer.token_ids) == 40
        assert all(0 <= token < info.vocab_size for token in answer.token_ids)
        logprobs = answer.completion.logprobs
        assert tuple(entry.token_id for entry in logprobs) == answer.token_ids
        assert all(-30.0 < entry.logprob <= 0.0 for entry in logprobs)
        # A drawn token is about as surprising as the distribution says; never like one drawn at random.
        mean = sum(entry.logprob for entry in logprobs) / len(logprobs)
        assert mean > -math.log(info.vocab_size)


def test_logprobs_are_those_of_plain_decoding_whatever_the_rounds(
    system: System, questions: tuple[Question, ...]
) -> None:
    """The first token's come from prefill, the others from verification rounds of any width."""
    sampling = dspark.SamplingParams(temperature=0.0, logprobs=4)
    (answer,) = ask_all(
        system.address, [Ask(prompt=questions[0].token_ids, sampling=sampling, stop=exactly(24))]
    )
    logprobs = answer.completion.logprobs
    assert [entry.token_id for entry in logprobs] == list(answer.token_ids)
    for entry in logprobs:
        assert len(entry.top) == 4
        assert entry.top[0].token_id == entry.token_id
        assert entry.top[0].logprob == pytest.approx(entry.logprob, abs=1e-5)
        assert sum(math.exp(top.logprob) for top in entry.top) <= 1.0 + 1e-4


def _model_info(system: System) -> dspark.ModelInfo:
    with dspark.Client(system.address) as client:
        return client.model_info()
