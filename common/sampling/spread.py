"""How a token is drawn where each rank has a part of the vocabulary. Knows rows; knows no draft and no request.

Every rank ends with the ids and logits that one rank with the whole vocabulary would have, in every bit: temperature and
noise act on each logit by itself, and whatever sums over a row (top-p, probabilities) does so over the gathered row, in
the order of ids.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from common.parallel.vocabulary import Vocabulary
from common.sampling.noise import Purpose
from common.sampling.params import SamplingRows
from common.sampling.sampler import kept_logits, row_noise, scaled_logits


def spread_noise(
    rows: SamplingRows, purpose: Purpose | Tensor, vocabulary: Vocabulary
) -> Tensor | None:
    """This rank's part [N, P] of `row_noise`."""
    part = vocabulary.part
    return row_noise(rows, purpose, part.stop - part.start, vocab_offset=part.start)


def spread_winners(
    logits: Tensor, rows: SamplingRows, noise: Tensor | None, vocabulary: Vocabulary
) -> Tensor:
    """Token ids [N] drawn from parts [N, P] of rows without filters: each rank's winner travels, and no other logit."""
    assert not rows.any_filtered, "filters need more of a row than its winner"
    scaled = scaled_logits(logits, rows)
    return vocabulary.argmax(scaled if noise is None else scaled + noise)


def spread_filtered(
    logits: Tensor, rows: SamplingRows, top_k: Sequence[int], vocabulary: Vocabulary
) -> Tensor:
    """`filtered_logits` [N, V] of parts [N, P]; `top_k` is what `rows` has, known on the host.

    Of rows with a top-k only candidates travel: a filter after it looks at nothing else. Top-p alone sums the whole row.
    """
    # After the temperature: it can make equals of logits that differ, and the lowest ids of equals pass.
    return kept_logits(vocabulary.top(scaled_logits(logits, rows), top_k), rows)
