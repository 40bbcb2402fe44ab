"""Numbers about rounds: accepted length, acceptance by position, and how honest confidences are."""

import numpy as np
from numpy.typing import NDArray

from tools.train_tiny.speculate import Round

Array = NDArray[np.float64]
NUM_BINS = 15


def mean_length(rounds: list[Round]) -> float:
    """Tokens per round, correction or bonus included, cut at the end of sequence."""
    return float(np.mean([r.num_emitted for r in rounds]))


def full_length(rounds: list[Round]) -> float:
    """Tokens per round as if the sequence went on after its end."""
    return float(np.mean([r.num_accepted + 1 for r in rounds]))


def acceptance_by_position(rounds: list[Round], block: int) -> list[float]:
    """Share of rounds that accept at least k drafts."""
    return [float(np.mean([r.num_accepted >= k for r in rounds])) for k in range(1, block + 1)]


def survival(rounds: list[Round], temperatures: Array) -> Array:
    """Predicted chance [R, K] that the first k drafts are all accepted."""
    logits = np.array([r.confidence_logits for r in rounds])
    return np.cumprod(1 / (1 + np.exp(-logits / temperatures)), 1, dtype=np.float64)


def outcomes(rounds: list[Round], block: int) -> tuple[Array, NDArray[np.bool_]]:
    """Whether k drafts were accepted [R, K], and where that is worth judging."""
    positions = np.arange(1, block + 1)
    accepted = np.array([r.num_accepted for r in rounds])[:, None] >= positions
    judged = np.array([r.num_before_end for r in rounds])[:, None] >= positions
    return accepted.astype(np.float64), judged


def calibration_error(predicted: Array, happened: Array) -> float:
    """ECE over equal bins of the prediction."""
    if not len(predicted):
        return 0.0
    bins = np.minimum((predicted * NUM_BINS).astype(int), NUM_BINS - 1)
    num = np.bincount(bins, minlength=NUM_BINS)
    gap = np.bincount(bins, weights=predicted - happened, minlength=NUM_BINS)
    return float(np.abs(gap).sum() / num.sum())


def area_under_curve(predicted: Array, happened: Array) -> float:
    """Chance that an accepted prefix was predicted above a rejected one; ties count half."""
    order = np.argsort(predicted, kind="stable")
    values, ranks = predicted[order], np.empty(len(predicted))
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    middle = np.cumsum(counts) - (counts - 1) / 2
    ranks[order] = middle[inverse]
    positive = happened > 0.5
    num, rest = int(positive.sum()), int((~positive).sum())
    if not num or not rest:
        return float("nan")
    return float((ranks[positive].sum() - num * (num + 1) / 2) / (num * rest))
