"""Random calls: shapes, ranges, K, orders and scores drawn by hypothesis."""

import hypothesis
import inputs
import numpy as np
import oracles
import pytest
import runners
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

# The same examples on every run.  Shapes come from small sets: each new one compiles.
SETTINGS = hypothesis.settings(deadline=None, derandomize=True, max_examples=150, database=None)

# Few levels make ties; the specials make everything else.
LEVELS = st.sampled_from(
    [0.0, -0.0, 1.0, -1.0, 2.0, 1e-40, 3e38, -3e38, np.inf, -np.inf, np.nan, -np.nan]
)
ANY_FLOAT = st.floats(width=32, allow_nan=True, allow_infinity=True, allow_subnormal=True)
SCORES = {
    keys: st.one_of(
        hnp.arrays(np.float32, keys, elements=LEVELS),
        hnp.arrays(np.float32, keys, elements=ANY_FLOAT),
    )
    for keys in (1, 2, 63, 64, 130)
}
ORDERS = st.sampled_from(["index", "score"])


@st.composite
def dialled_calls(draw, keys=tuple(SCORES), queries=(1, 3, 9), topk=(1, 2, 16, 64, 65)):
    """(scores [N], row weights [Q], starts, ends, topk, order, dtype)."""
    keys, queries, topk = (draw(st.sampled_from(choices)) for choices in (keys, queries, topk))
    edge = st.one_of(st.integers(-3, keys + 3), st.sampled_from([-(2**31), 2**31 - 1, 0, keys]))
    ranges = hnp.arrays(np.int32, queries, elements=edge)
    weights = hnp.arrays(np.float32, queries, elements=st.sampled_from([1.0, -1.0, 0.5, 4.0]))
    return (
        draw(SCORES[keys]),
        draw(weights),
        draw(ranges),
        draw(ranges),
        topk,
        draw(ORDERS),
        draw(st.sampled_from(sorted(inputs.DTYPES))),
    )


def check_dialled(runner, call):
    scores, row_weights, starts, ends, topk, order, dtype = call
    x = inputs.dial(
        scores, len(row_weights), dtype=dtype, row_weights=row_weights, starts=starts, ends=ends
    )
    exact = oracles.dialled(scores, row_weights, runner.name)
    indices, values = oracles.choose(exact, topk, starts, ends, order)
    got_values, got = runner.index_topk(x, topk, order, return_scores=True)
    oracles.assert_same(got, indices, "indices")
    oracles.assert_same(got_values, values, "scores")
    oracles.assert_same(runner.index_topk(x, topk, order), indices, "indices alone")


@hypothesis.given(dialled_calls())
@SETTINGS
def test_cpu_on_dialled_scores(call):
    check_dialled(runners.Runner("cpu"), call)


@pytest.mark.gpu
@hypothesis.given(dialled_calls())
@hypothesis.settings(SETTINGS, max_examples=60)
def test_cuda_on_dialled_scores(call):
    check_dialled(runners.Runner("cuda"), call)


@hypothesis.given(dialled_calls(keys=(1, 64, 130), queries=(3,), topk=(2, 65)))
@hypothesis.settings(SETTINGS, max_examples=60)
def test_reference_on_dialled_scores(call):
    check_dialled(runners.Runner("reference"), call)


@st.composite
def random_calls(draw):
    """Inputs of random shape, with their topk and order."""
    queries, keys = draw(st.integers(1, 20)), draw(st.integers(1, 400))
    heads, dim = draw(st.integers(1, 9)), draw(st.integers(1, 40))
    batch = draw(st.sampled_from([(), (1,), (3,), (2, 2)]))
    seed = draw(st.integers(0, 2**32 - 1))
    make = draw(st.sampled_from([inputs.random, inputs.integer]))
    x = make(seed, queries, keys, heads, dim, draw(st.sampled_from(sorted(inputs.DTYPES))), batch)
    if draw(st.booleans()):
        x = inputs.with_ranges(x, seed)
    if draw(st.booleans()):
        x = x._replace(k_scale=None)
    return x, draw(st.integers(1, 500)), draw(ORDERS)


@hypothesis.given(random_calls())
@hypothesis.settings(SETTINGS, max_examples=60)
def test_cpu_chooses_by_its_own_scores(call):
    x, topk, order = call
    runner = runners.Runner("cpu")
    own = runner.index_scores(x)
    indices, values = oracles.choose(own, topk, x.starts, x.ends, order)
    got_values, got = runner.index_topk(x, topk, order, return_scores=True)
    oracles.assert_same(got, indices, "indices")
    oracles.assert_same(got_values, values, "scores")
    exact, size = oracles.scores64(x.q, x.k, x.weights, x.k_scale)
    inside = np.isfinite(own)
    heads, dim = x.q.shape[-2:]
    assert np.all(
        np.abs(own - exact)[inside] <= oracles.score_bound(size, heads, dim, "cpu")[inside]
    )


@st.composite
def top_k_calls(draw):
    """(x [R, N], k, starts, ends, order)."""
    keys, rows = draw(st.sampled_from([1, 2, 65, 300])), draw(st.sampled_from([1, 4]))
    elements = draw(st.sampled_from([LEVELS, ANY_FLOAT]))
    ranges = hnp.arrays(np.int32, rows, elements=st.integers(-3, keys + 3))
    return (
        draw(hnp.arrays(np.float32, (rows, keys), elements=elements)),
        min(draw(st.sampled_from([0, 1, 2, 64, 300])), keys),
        draw(ranges),
        draw(ranges),
        draw(ORDERS),
    )


@hypothesis.given(top_k_calls())
@SETTINGS
def test_cpu_top_k(call):
    x, k, starts, ends, order = call
    values, indices = runners.Runner("cpu").top_k(x, k, starts, ends, order)
    expected, expected_values = oracles.choose(x, k, starts, ends, order)
    oracles.assert_same(indices, expected, "indices")
    oracles.assert_same(values, expected_values, "values")
