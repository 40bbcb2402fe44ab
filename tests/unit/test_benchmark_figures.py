"""What the benchmark's figures mean, on runs whose times are made up."""

from __future__ import annotations

import pytest

from benchmarks.load import Run, Sample
from benchmarks.prompts import Prompt, load_prompts

CHAT = Prompt(id="a", domain="chat", is_unseen=True, content="x")
CODE = Prompt(id="b", domain="code", is_unseen=True, content="x")


def sample(prompt: Prompt, num_tokens: int, sent: float, first: float, last: float) -> Sample:
    return Sample(
        prompt=prompt,
        token_ids=tuple(range(num_tokens)),
        num_rounds=5,
        sent=sent,
        first=first,
        last=last,
    )


def test_decode_speed_counts_neither_first_tokens_nor_the_time_before_them() -> None:
    run = Run(samples=(sample(CHAT, 11, 0.0, 1.0, 2.0), sample(CODE, 21, 2.0, 5.0, 6.0)))
    assert run.decode_tokens_per_s == pytest.approx(30 / 2)
    assert run.total_tokens_per_s == pytest.approx(32 / 6)


def test_time_that_requests_share_is_counted_once() -> None:
    run = Run(samples=(sample(CHAT, 11, 0.0, 1.0, 3.0), sample(CODE, 31, 0.0, 2.0, 5.0)))
    assert run.decode_tokens_per_s == pytest.approx(40 / 4)


def test_accepted_length_is_tokens_per_round_of_a_domain() -> None:
    run = Run(samples=(sample(CHAT, 21, 0.0, 1.0, 2.0), sample(CODE, 11, 0.0, 1.0, 2.0)))
    assert run.of_domain("chat").mean_accepted_length == pytest.approx(4.0)
    assert run.of_domain("code").mean_accepted_length == pytest.approx(2.0)


def test_prompts_have_names_of_their_own_and_both_domains_count() -> None:
    prompts = load_prompts()
    assert len({prompt.id for prompt in prompts}) == len(prompts) >= 24
    unseen = [prompt.domain for prompt in prompts if prompt.is_unseen]
    assert min(unseen.count("chat"), unseen.count("code")) >= 12
