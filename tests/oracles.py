"""What the results must be, in plain numpy: no JAX, no code of the package.

- `choose`: the exact choice over ready-made values, by a stable sort.
- `scores64`: scores in float64 with the magnitude that `score_bound` needs.
- `check_selection`: the properties of a right choice, for rows too long to sort.
- `assert_same`: equality of bits.
"""

import numpy as np

# Rounding unit of one float32 addition.  CUDA's tensor cores cut products and
# accumulator toward zero at a shared exponent instead of rounding: each of the 17
# terms of a k16 step loses up to 2**-23 of the largest, so a step costs at most
# what 17 additions of unit 2**-23 do; one bit more is left as a margin.
# Hopper's FP8 tensor cores cut in the same way, but at 2**-13 of the largest, in steps
# of 32 products.
UNIT = {"cpu": 2.0**-24, "reference": 2.0**-24, "cuda": 2.0**-22, "hopper": 2.0**-13}

POSITIVE_NAN = np.uint32(0x7FC00000)
TINY = np.float32(2.0**-126)  # the smallest normal float32


def _integer(dtype):
    return np.dtype(f"uint{8 * np.dtype(dtype).itemsize}")


def order_key(x):
    """Floats -> unsigned integers in IEEE total order: -NaN < -inf < -0 < +0 < inf < +NaN."""
    unsigned = _integer(x.dtype)
    bits = np.ascontiguousarray(x).view(unsigned)
    sign = unsigned.type(1 << (8 * unsigned.itemsize - 1))
    return np.where(bits & sign, ~bits, bits | sign)


def canonical(scores):
    """One positive NaN for every NaN, +0 for -0."""
    scores = np.where(scores == 0, np.float32(0), scores.astype(np.float32))
    return np.where(np.isnan(scores), POSITIVE_NAN.view(np.float32), scores)


def flush(scores):
    """Denormals to zero, as XLA's own arithmetic on a CPU reads and writes them."""
    return np.where(np.abs(scores) < TINY, np.float32(0), scores)


def dialled(scores, row_weights, implementation):
    """The scores of `inputs.dial`, float32 [rows, N], as an implementation must give them."""
    scores, row_weights = np.float32(scores), np.float32(row_weights)
    flushed = implementation == "reference"
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        products = np.outer(row_weights, flush(scores) if flushed else scores)
    return canonical(flush(products) if flushed else products)


def clamp(start, end, keys):
    """A row's range as the contract reads it; empty is (0, 0)."""
    start, end = max(int(start), 0), min(int(end), keys)
    return (start, end) if start < end else (0, 0)


def _rows(values, starts, ends):
    """Yields (row index, start, end) of an array whose last axis holds the keys."""
    *batch, keys = values.shape
    for row in np.ndindex(*batch):
        start = 0 if starts is None else starts[row]
        end = keys if ends is None else ends[row]
        yield row, *clamp(start, end, keys)


def choose(values, k, starts=None, ends=None, order="index"):
    """The k best of each row's range.

    Returns (indices int32, values), each [..., k]; -1 and -inf past a short row's end.
    """
    shape = (*values.shape[:-1], k)
    indices = np.full(shape, -1, np.int32)
    chosen = np.full(shape, -np.inf, values.dtype)
    for row, start, end in _rows(values, starts, ends):
        best = np.argsort(~order_key(values[row][start:end]), kind="stable")[:k]
        if order != "score":
            best = np.sort(best)
        indices[row][: len(best)] = best + start
        chosen[row][: len(best)] = values[row][start:end][best]
    return indices, chosen


def check_selection(scores, indices, starts=None, ends=None):
    """Asserts that ascending `indices` are a right choice over `scores`, without sorting."""
    k = indices.shape[-1]
    for row, start, end in _rows(scores, starts, ends):
        count = min(k, end - start)
        got = indices[row][:count].astype(np.int64)
        assert np.all(indices[row][count:] == -1), f"row {row}: no -1 after {count} keys"
        if count == 0:
            continue
        assert got.min() >= start and got.max() < end, f"row {row}: out of [{start}, {end})"
        assert np.all(np.diff(got) > 0), f"row {row}: not strictly ascending"
        keys = order_key(scores[row][start:end])
        taken = np.zeros(end - start, bool)
        taken[got - start] = True
        if taken.all():
            continue
        worst, best_left = keys[taken].min(), keys[~taken].max()
        assert worst >= best_left, f"row {row}: a larger score was left out"
        if worst == best_left:
            last_taken = np.flatnonzero(taken & (keys == worst)).max()
            first_left = np.flatnonzero(~taken & (keys == worst)).min()
            assert last_taken < first_left, f"row {row}: a tie went to the higher index"


def scores64(q, k, weights, k_scale=None):
    """Scores in float64, without ranges, and the sum of the magnitudes behind each.

    q [..., Q, H, D], k [..., N, D], weights [..., Q, H], k_scale [..., N]
    -> two float64 [..., Q, N].
    """
    q, k, weights = (np.asarray(x).astype(np.float64) for x in (q, k, weights))
    with np.errstate(invalid="ignore", over="ignore"):
        dots = np.einsum("...qhd,...nd->...qhn", q, k)
        sizes = np.einsum("...qhd,...nd->...qhn", np.abs(q), np.abs(k))
        total = np.einsum("...qh,...qhn->...qn", weights, np.maximum(dots, 0))
        size = np.einsum("...qh,...qhn->...qn", np.abs(weights), sizes)
        if k_scale is not None:
            scale = np.asarray(k_scale).astype(np.float64)[..., None, :]
            total, size = total * scale, size * np.abs(scale)
    return total, size


def score_bound(size, heads, dim, implementation):
    """How far a float32 score may lie from `scores64`'s, given the sum of magnitudes.

    A sum of n rounded terms in any order is off by at most n u / (1 - n u) times the
    sum of their magnitudes.  A product passes D additions (or a fused chain of D),
    the weight's product, H additions and the scale's product: n = D + H + 2.
    """
    n = (dim + heads + 2) * UNIT[implementation]
    return n / (1 - n) * size + (dim + 1) * heads * float(TINY)


def assert_same(got, expected, what="result"):
    """Asserts equal shape, dtype and bits."""
    got, expected = np.asarray(got), np.asarray(expected)
    assert got.dtype == expected.dtype, f"{what}: dtype {got.dtype}, expected {expected.dtype}"
    assert got.shape == expected.shape, f"{what}: shape {got.shape}, expected {expected.shape}"
    unsigned = _integer(got.dtype)
    wrong = np.argwhere(
        np.ascontiguousarray(got).view(unsigned) != np.ascontiguousarray(expected).view(unsigned)
    )
    if len(wrong):
        at = tuple(int(i) for i in wrong[0])
        raise AssertionError(
            f"{what}: {len(wrong)} of {got.size} differ, first at {at}: "
            f"got {got[at]}, expected {expected[at]}"
        )
