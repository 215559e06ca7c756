"""Inputs for the scored operations, as numpy arrays.

`random` and `integer` fill every operand.  `dial` makes inputs whose scores are
given numbers, exactly: head 0 asks for e0, head 1 for e1, weights are +w and -w,
every key is e0 (score +w k_scale) or e1 (score -w k_scale).  `ADVERSARIAL` names
rows of scores to dial that are hard for a selection.
"""

from typing import NamedTuple

import ml_dtypes
import numpy as np

FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
BF16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = {"fp8": FP8, "bf16": BF16}


class Inputs(NamedTuple):
    """Operands of index_topk and index_scores."""

    q: np.ndarray  # [*B, Q, H, D]
    k: np.ndarray  # [*B, N, D]
    weights: np.ndarray  # [*B, Q, H]
    k_scale: np.ndarray | None = None  # [*B, N]
    starts: np.ndarray | None = None  # [*B, Q]
    ends: np.ndarray | None = None  # [*B, Q]

    def rows(self, which):
        """The same keys with the rows `which` of an input without batch dimensions."""
        per_row = {n: getattr(self, n) for n in ("q", "weights", "starts", "ends")}
        return self._replace(**{n: x if x is None else x[which] for n, x in per_row.items()})


def random(seed, queries, keys, heads=4, dim=32, dtype="fp8", batch=()):
    """Normal draws: q and k of about unit size, weights of both signs, positive scales."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return rng.standard_normal((*batch, *shape), np.float32)

    return Inputs(
        q=normal(queries, heads, dim).astype(DTYPES[dtype]),
        k=normal(keys, dim).astype(DTYPES[dtype]),
        weights=normal(queries, heads),
        k_scale=np.exp(normal(keys) / 4),
    )


def integer(seed, queries, keys, heads=4, dim=32, dtype="fp8", batch=()):
    """Small whole numbers: every sum is exact in float32, and many scores are equal.

    A dot is at most 9 D and a head adds at most 3 times as much; at H = 64, D = 256
    that stays below 2**24 with a scale of 4.
    """
    rng = np.random.default_rng(seed)

    def draw(low, high, *shape):
        return rng.integers(low, high + 1, (*batch, *shape)).astype(np.float32)

    return Inputs(
        q=draw(-3, 3, queries, heads, dim).astype(DTYPES[dtype]),
        k=draw(-3, 3, keys, dim).astype(DTYPES[dtype]),
        weights=draw(-3, 3, queries, heads),
        k_scale=2.0 ** draw(-2, 2, keys),
    )


def with_ranges(x, seed):
    """Adds ranges: all keys, one key, empty, reversed, outside [0, N], then random ones."""
    rng = np.random.default_rng(seed)
    shape, keys = x.weights.shape[:-1], x.k.shape[-2]
    starts = rng.integers(-keys // 4, keys, shape).astype(np.int32)
    ends = rng.integers(0, keys + keys // 4 + 2, shape).astype(np.int32)
    special = [
        (0, keys),
        (keys // 2, keys // 2 + 1),
        (keys // 3, keys // 3),
        (keys, 0),
        (-(2**31), 2**31 - 1),
        (2**31 - 1, -(2**31)),
    ]
    for row, (start, end) in zip(np.ndindex(*shape), special, strict=False):
        starts[row], ends[row] = start, end
    return x._replace(starts=starts, ends=ends)


def dial(scores, queries=1, heads=2, dim=16, dtype="fp8", row_weights=None, starts=None, ends=None):
    """Inputs whose scores are `scores` [N] in every row, times row_weights [Q] if given.

    Scores may be infinite, NaN of any payload and denormal; row weights that are
    powers of two keep the products exact.
    """
    scores = np.asarray(scores, np.float32)
    q = np.zeros((queries, heads, dim), np.float32)
    q[:, 0, 0] = q[:, 1, 1] = 1
    weights = np.zeros((queries, heads), np.float32)
    weights[:, 0] = 1 if row_weights is None else row_weights
    weights[:, 1] = -weights[:, 0]
    negative = np.signbit(scores) & ~np.isnan(scores)
    k = np.zeros((len(scores), dim), np.float32)
    k[~negative, 0] = 1
    k[negative, 1] = 1
    return Inputs(
        q=q.astype(DTYPES[dtype]),
        k=k.astype(DTYPES[dtype]),
        weights=weights,
        k_scale=np.where(negative, -scores, scores),
        starts=None if starts is None else np.asarray(starts, np.int32),
        ends=None if ends is None else np.asarray(ends, np.int32),
    )


def _spikes(step, on):
    """Large scores only at (or only off) every `step`-th position."""

    def make(rng, keys):
        scores = rng.uniform(0, 1, keys).astype(np.float32)
        hit = np.arange(keys) % step == 0
        scores[hit == on] += 100
        return scores

    return make


def _few_values(rng, keys):
    return rng.integers(0, 8, keys).astype(np.float32)


def _plateau(rng, keys):
    """300 winners over a plateau of exact zeros."""
    scores = np.zeros(keys, np.float32)
    places = rng.choice(keys, min(300, keys // 2), replace=False)
    scores[places] = rng.uniform(1, 2, len(places))
    return scores


def _mixed_signs_of_zero(rng, keys):
    return rng.choice(np.array([0.0, -0.0], np.float32), keys)


def _non_finite(rng, keys):
    """NaN of both signs, quiet and signalling, infinities, and a few numbers."""
    bits = np.array(
        [0x7FC00000, 0xFFC00000, 0x7F800001, 0xFF800001, 0x7F800000, 0xFF800000, 0x3F800000, 0],
        np.uint32,
    )
    share = np.array([1, 1, 1, 1, 2, 30, 30, 30]) / 96
    return rng.choice(bits, keys, p=share).view(np.float32)


def _denormals(rng, keys):
    return rng.integers(0, 1 << 23, keys).astype(np.uint32).view(np.float32)


def _last_bits(rng, keys):
    """Scores that differ in their last 10 bits only."""
    return (np.uint32(0x3F900000) | rng.integers(0, 1 << 10, keys).astype(np.uint32)).view(
        np.float32
    )


def _all_nan_but_one(rng, keys):
    scores = np.full(keys, np.nan, np.float32)
    scores[rng.integers(keys)] = 1
    return scores


def _mostly_nan(rng, keys):
    scores = rng.uniform(-1, 1, keys).astype(np.float32)
    scores[rng.random(keys) < 0.9] = np.nan
    return scores


def _uniform(low, high):
    return lambda rng, keys: rng.uniform(low, high, keys).astype(np.float32)


ADVERSARIAL = {
    "ascending": lambda rng, keys: np.arange(keys, dtype=np.float32),
    "descending": lambda rng, keys: np.arange(keys, 0, -1).astype(np.float32),
    "negative_ascending": lambda rng, keys: np.arange(-keys, 0).astype(np.float32),
    "all_equal": lambda rng, keys: np.full(keys, 1.5, np.float32),
    "all_zero": lambda rng, keys: np.zeros(keys, np.float32),
    "zeros_of_both_signs": _mixed_signs_of_zero,
    "zero_plateau": _plateau,
    "eight_values": _few_values,
    "spikes_on_8": _spikes(8, True),
    "spikes_off_8": _spikes(8, False),
    "spikes_on_64": _spikes(64, True),
    "spikes_off_64": _spikes(64, False),
    "narrow_band": _uniform(10.0, 10.2),
    "coarse_bin": _uniform(1.0, 1.245),
    "last_bits": _last_bits,
    "beyond_half_range": _uniform(1e5, 1e6),
    "below_half_range": _uniform(1e-9, 1e-8),
    "below_minus_half_range": lambda rng, keys: -(70000 + np.arange(keys, dtype=np.float32)),
    "non_finite": _non_finite,
    "all_nan": lambda rng, keys: np.full(keys, np.nan, np.float32),
    "all_nan_but_one": _all_nan_but_one,
    "mostly_nan": _mostly_nan,
    "all_minus_inf": lambda rng, keys: np.full(keys, -np.inf, np.float32),
    "denormals": _denormals,
}


def adversarial(name, keys, seed=0):
    """The scores of ADVERSARIAL[name], float32 [keys]."""
    return ADVERSARIAL[name](np.random.default_rng(seed), keys)
