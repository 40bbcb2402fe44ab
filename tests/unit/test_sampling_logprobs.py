from __future__ import annotations

import torch

from common.sampling.logprobs import token_logprobs


def test_logprobs_are_those_of_the_softmax_at_temperature_one() -> None:
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(0)) * 4.0
    ids = torch.tensor([0, 7, 49, 3, 3, 20])
    expected = logits.log_softmax(-1)
    result = token_logprobs(logits, ids, 5)
    torch.testing.assert_close(result.logprobs, expected[torch.arange(6), ids])
    best = expected.sort(-1, descending=True)
    torch.testing.assert_close(result.top_logprobs, best.values[:, :5])
    assert torch.equal(result.top_ids, best.indices[:, :5])


def test_no_alternatives_are_reported_where_none_are_wanted() -> None:
    result = token_logprobs(torch.zeros(2, 4), torch.tensor([0, 1]), 0)
    assert result.top_ids.shape == result.top_logprobs.shape == (2, 0)


def test_a_small_vocabulary_has_fewer_alternatives() -> None:
    assert token_logprobs(torch.zeros(2, 4), torch.tensor([0, 1]), 20).top_ids.shape == (2, 4)
