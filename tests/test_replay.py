"""The oracles on inputs of a trained indexer over real text (../shared/replay)."""

import inputs
import numpy as np
import oracles
import pytest


@pytest.fixture(scope="module")
def data(replay):
    """24 causal queries over 4096 keys, 64 heads of 128."""
    return inputs.Inputs(**replay(24, 4096))


@pytest.mark.parametrize("order", ["index", "score"])
def test_choice(implementation, data, order):
    own = implementation.index_scores(data)
    for topk in (512, 2048):
        indices, values = oracles.choose(own, topk, data.starts, data.ends, order)
        got_values, got = implementation.index_topk(data, topk, order, return_scores=True)
        oracles.assert_same(got, indices, "indices")
        oracles.assert_same(got_values, values, "scores")
        if order == "index":
            oracles.check_selection(own, got, data.starts, data.ends)


def test_scores(implementation, data):
    exact, size = oracles.scores64(data.q[:6], data.k, data.weights[:6], data.k_scale)
    own = implementation.index_scores(data)[:6]
    columns = np.arange(4096)
    inside = columns < data.ends[:6, None]
    bound = oracles.score_bound(size, 64, 128, implementation.arithmetic(data))
    assert np.all((np.abs(own - exact) <= bound)[inside])
    assert np.all(own[~inside] == -np.inf)


def test_top_k_of_its_scores(implementation, data):
    own = implementation.index_scores(data)
    expected, expected_values = oracles.choose(own, 2048, order="score")
    values, indices = implementation.top_k(own, 2048)
    oracles.assert_same(indices, expected)
    oracles.assert_same(values, expected_values)


def test_bfloat16(implementation, data):
    """The same numbers as bfloat16, which holds every FP8 number, with no scale."""
    wide = data._replace(q=data.q.astype(inputs.BF16), k=data.k.astype(inputs.BF16))
    if implementation.name == "cpu":  # float32 sums of the same products in the same order
        oracles.assert_same(implementation.index_scores(wide), implementation.index_scores(data))
    own = implementation.index_scores(wide._replace(k_scale=None))
    indices, _ = oracles.choose(own, 512, data.starts, data.ends)
    oracles.assert_same(implementation.index_topk(wide._replace(k_scale=None), 512), indices)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("queries", "keys"), [(4096, 8192), (512, 32_768), (64, 131_072), (8, 163_840)]
)
def test_full_length(cuda, replay, queries, keys):
    data = inputs.Inputs(**replay(queries, keys))
    rows = np.r_[0:8, queries // 2, queries - 8 : queries] if queries > 16 else np.arange(queries)
    got_values, got = cuda.index_topk(data, 2048, return_scores=True)
    few = data.rows(rows)
    own = cuda.index_scores(few)
    indices, values = oracles.choose(own, 2048, few.starts, few.ends)
    oracles.assert_same(got[rows], indices, "indices")
    oracles.assert_same(got_values[rows], values, "scores")
