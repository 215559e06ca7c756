"""index_topk: the exact choice over the implementation's own scores."""

import inputs
import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest

ORDERS = ("index", "score", "any")


def check_against_own_scores(implementation, x, topk, order, return_scores=True):
    """Oracle 1: the choice over index_scores of the same implementation, bit for bit."""
    own = implementation.index_scores(x)
    indices, values = oracles.choose(own, topk, x.starts, x.ends, order)
    if not return_scores:
        got = implementation.index_topk(x, topk, order)
        if order == "any":
            got = np.sort(got.view(np.uint32), axis=-1).view(np.int32)  # -1 last
        oracles.assert_same(got, indices, "indices")
        return
    got_values, got = implementation.index_topk(x, topk, order, return_scores=True)
    if order == "any":
        place = np.argsort(got.view(np.uint32), axis=-1)
        got = np.take_along_axis(got, place, -1)
        got_values = np.take_along_axis(got_values, place, -1)
    oracles.assert_same(got, indices, "indices")
    oracles.assert_same(got_values, values, "scores")


@pytest.mark.parametrize("dtype", inputs.DTYPES)
@pytest.mark.parametrize("topk", [1, 40, 299, 300, 450])
def test_is_lax_top_k_of_index_scores(implementation, dtype, topk):
    x = inputs.with_ranges(inputs.random(1, 20, 300, dtype=dtype), 2)
    own = implementation.index_scores(x)
    k = min(topk, 300)
    with jax.default_device(jax.devices("cpu")[0]):
        values, indices = (np.asarray(a) for a in jax.lax.top_k(own, k))
    # lax.top_k knows no ranges: what it takes at -inf past a row's keys is -1 here.
    count = [np.subtract(*oracles.clamp(*r, 300)[::-1]) for r in zip(x.starts, x.ends, strict=True)]
    short = np.arange(topk) >= np.array(count)[:, None]
    pad = [(0, 0), (0, topk - k)]
    indices = np.where(short, np.int32(-1), np.pad(indices, pad))
    values = np.where(short, np.float32(-np.inf), np.pad(values, pad))
    got_values, got = implementation.index_topk(x, topk, "score", return_scores=True)
    oracles.assert_same(got, indices, "indices")
    oracles.assert_same(got_values, values, "scores")
    # The numpy oracle of the other tests agrees.
    oracles.assert_same(oracles.choose(own, topk, x.starts, x.ends, "score")[0], indices)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("return_scores", [False, True])
def test_orders(implementation, order, return_scores):
    x = inputs.with_ranges(inputs.integer(3, 20, 300), 4)
    check_against_own_scores(implementation, x, 40, order, return_scores)


# Heads that are no multiple of a block, and dimensions of every alignment of 16.
@pytest.mark.parametrize(
    ("heads", "dim"), [(1, 16), (3, 48), (5, 64), (7, 112), (32, 128), (64, 128), (65, 240)]
)
@pytest.mark.parametrize("dtype", inputs.DTYPES)
def test_heads_and_dims(kernel, heads, dim, dtype):
    x = inputs.with_ranges(inputs.random(5, 9, 333, heads, dim, dtype), 6)
    check_against_own_scores(kernel, x, 50, "index")


@pytest.mark.parametrize(("heads", "dim"), [(1, 1), (3, 7), (5, 33), (2, 300)])
@pytest.mark.parametrize("dtype", inputs.DTYPES)
def test_dims_of_no_alignment(cpu, heads, dim, dtype):
    x = inputs.with_ranges(inputs.random(7, 9, 333, heads, dim, dtype), 8)
    check_against_own_scores(cpu, x, 50, "index")


ADVERSARIAL_ROWS = (1.0, -1.0, 0.5, -4.0)


@pytest.mark.parametrize("name", inputs.ADVERSARIAL)
@pytest.mark.parametrize("order", ["index", "score"])
def test_adversarial(implementation, name, order):
    """Dialled scores, where the expected result needs no scoring by the package."""
    keys, topk = 20_011, 512
    scores = inputs.adversarial(name, keys)
    starts, ends = [0, 0, 1, 4097], [keys, keys - 1, keys, keys]
    x = inputs.dial(scores, 4, row_weights=ADVERSARIAL_ROWS, starts=starts, ends=ends)
    exact = oracles.dialled(scores, ADVERSARIAL_ROWS, implementation.name)
    indices, values = oracles.choose(exact, topk, x.starts, x.ends, order)
    got_values, got = implementation.index_topk(x, topk, order, return_scores=True)
    oracles.assert_same(got, indices, "indices")
    oracles.assert_same(got_values, values, "scores")
    if order == "index":
        oracles.check_selection(exact, got, x.starts, x.ends)
        oracles.assert_same(implementation.index_topk(x, topk, order), indices, "indices alone")


def test_every_short_length(implementation):
    """N = 0 .. 2K + 1 valid keys, from places of every alignment."""
    topk, keys = 33, 200
    lengths = np.arange(2 * topk + 2)
    starts = (lengths * 5 % 64).astype(np.int32)
    scores = np.random.default_rng(9).permutation(keys).astype(np.float32)
    x = inputs.dial(scores, len(lengths), starts=starts, ends=starts + lengths)
    expected, values = oracles.choose(np.tile(scores, (len(lengths), 1)), topk, x.starts, x.ends)
    got_values, got = implementation.index_topk(x, topk, return_scores=True)
    oracles.assert_same(got, expected, "indices")
    oracles.assert_same(got_values, values, "scores")
    oracles.assert_same(implementation.index_topk(x, topk), expected, "indices alone")


def test_row_lengths_around_tile_and_buffer_sizes(implementation):
    """N and N around every multiple of 256 up to 6400: tiles, splits and capacities."""
    keys, topk = 6400, 300
    ends = [256 * j + d for j in range(1, 26) for d in (-1, 0, 1)][:-1]
    scores = inputs.adversarial("eight_values", keys)
    x = inputs.dial(scores, len(ends), starts=[0] * len(ends), ends=ends)
    expected, _ = oracles.choose(np.tile(scores, (len(ends), 1)), topk, x.starts, x.ends)
    oracles.assert_same(implementation.index_topk(x, topk), expected)


@pytest.mark.parametrize("queries", [1, 7, 8, 9, 17, 65, 300])
def test_query_counts(kernel, queries):
    """Counts around the row blocks; a row's result is that of the row alone."""
    x = inputs.with_ranges(inputs.random(10, 300, 9001, heads=2, dim=16), 11)
    whole = kernel.index_topk(x, 64)
    part = x.rows(slice(0, queries))
    oracles.assert_same(kernel.index_topk(part, 64), whole[:queries])
    check_against_own_scores(kernel, part, 64, "score")


def test_batch_dimensions(implementation):
    x = inputs.with_ranges(inputs.random(12, 5, 130, batch=(2, 3)), 13)
    check_against_own_scores(implementation, x, 20, "index")
    whole = implementation.index_topk(x, 20)
    for b in np.ndindex(2, 3):
        one = inputs.Inputs(*(a[b] for a in x))
        oracles.assert_same(implementation.index_topk(one, 20), whole[b], f"batch entry {b}")


@pytest.mark.parametrize(
    ("batch", "queries", "keys"), [((), 0, 10), ((), 3, 0), ((0,), 3, 10), ((2, 0), 0, 0)]
)
def test_empty_operands(implementation, batch, queries, keys):
    x = inputs.random(14, queries, keys, batch=batch)
    scores, indices = implementation.index_topk(x, 4, return_scores=True)
    oracles.assert_same(indices, np.full((*batch, queries, 4), -1, np.int32))
    oracles.assert_same(scores, np.full((*batch, queries, 4), -np.inf, np.float32))
    assert implementation.index_scores(x).shape == (*batch, queries, keys)


def test_bytes_outside_the_ranges_have_no_effect(implementation):
    x = inputs.random(15, 6, 500)
    starts = np.array([100, 120, 257, 300, 128, 255], np.int32)
    ends = np.array([380, 399, 384, 300, 129, 385], np.int32)
    x = x._replace(starts=starts, ends=ends)
    k, k_scale = x.k.copy(), x.k_scale.copy()
    outside = np.r_[0:100, 399:500]
    k.view(np.uint8)[outside] = np.random.default_rng(0).choice([0x7F, 0xFF, 0x7E], (201, 32))
    k_scale[outside] = np.resize(np.float32([np.nan, np.inf, -np.inf, 3e38]), 201)
    poisoned = x._replace(k=k, k_scale=k_scale)
    for got, expected in zip(
        implementation.index_topk(poisoned, 64, return_scores=True),
        implementation.index_topk(x, 64, return_scores=True),
        strict=True,
    ):
        oracles.assert_same(got, expected)
    scores = implementation.index_scores(poisoned)
    assert np.all(scores[:, outside] == -np.inf)
    oracles.assert_same(scores, implementation.index_scores(x))


def test_defaults_are_all_keys_and_unit_scales(implementation):
    x = inputs.random(16, 5, 300)
    spelled = x._replace(
        k_scale=np.ones(300, np.float32),
        starts=np.zeros(5, np.int32),
        ends=np.full(5, 300, np.int32),
    )
    plain = x._replace(k_scale=None)
    oracles.assert_same(
        implementation.index_topk(plain, 64), implementation.index_topk(spelled, 64)
    )
    oracles.assert_same(implementation.index_scores(plain), implementation.index_scores(spelled))


def test_default_topk_order_and_implementation():
    """Called plainly, outside jit, with JAX arrays: 2048 ascending indices."""
    import jax_fused_topk

    x = inputs.integer(17, 3, 2500, heads=2, dim=16)
    got = jax_fused_topk.index_topk(
        jnp.asarray(x.q), jnp.asarray(x.k), jnp.asarray(x.weights), k_scale=jnp.asarray(x.k_scale)
    )
    scores, _ = oracles.scores64(x.q, x.k, x.weights, x.k_scale)
    assert isinstance(got, jax.Array)
    oracles.assert_same(got, oracles.choose(scores.astype(np.float32), 2048)[0])


def test_repeats_give_the_same_bits(implementation):
    x = inputs.with_ranges(inputs.random(18, 12, 9000, heads=8, dim=64), 19)
    first = implementation.index_topk(x, 200, "score", return_scores=True)
    for _ in range(10):
        again = implementation.index_topk(x, 200, "score", return_scores=True)
        oracles.assert_same(again[1], first[1])
        oracles.assert_same(again[0], first[0])


def test_implementations_agree_on_whole_numbers(kernel):
    """Oracle 4: where every sum is exact, kernel, reference and float64 agree in every bit."""
    import runners

    reference = runners.Runner("reference")
    for dtype in inputs.DTYPES:
        x = inputs.with_ranges(inputs.integer(20, 20, 3001, 64, 128, dtype), 21)
        exact, _ = oracles.scores64(x.q, x.k, x.weights, x.k_scale)
        for order in ("index", "score"):
            got = kernel.index_topk(x, 100, order, return_scores=True)
            expected = reference.index_topk(x, 100, order, return_scores=True)
            oracles.assert_same(got[1], expected[1], "indices")
            oracles.assert_same(got[0], expected[0], "scores")
            indices, values = oracles.choose(oracles.canonical(exact), 100, x.starts, x.ends, order)
            oracles.assert_same(got[1], indices, "indices")
            oracles.assert_same(got[0], values, "scores")


def test_random_choice_lies_in_the_band_of_float64(implementation):
    """Against float64 the choice may differ only where scores are closer than the bound."""
    x = inputs.random(22, 16, 3000, 32, 128)
    exact, size = oracles.scores64(x.q, x.k, x.weights, x.k_scale)
    bound = oracles.score_bound(size, 32, 128, implementation.arithmetic(x)).max(axis=1)
    indices = implementation.index_topk(x, 500)
    kth = np.sort(exact, axis=1)[:, -500]
    for row, chosen in enumerate(indices):
        taken = np.zeros(3000, bool)
        taken[chosen] = True
        assert taken.sum() == 500
        assert exact[row][taken].min() >= kth[row] - 2 * bound[row]
        assert exact[row][~taken].max() <= kth[row] + 2 * bound[row]


@pytest.mark.parametrize("keys", [32_767, 65_537, 262_145])
def test_planted_winners_are_found(implementation, keys):
    """Sizes at which reductions and buffers elsewhere were seen to fail."""
    rng = np.random.default_rng(keys)
    winners = np.sort(rng.choice(keys, 100, replace=False))
    scores = rng.uniform(0, 1, keys).astype(np.float32)
    scores[winners] += 2
    got = implementation.index_topk(inputs.dial(scores, 2), 100)
    oracles.assert_same(got, np.tile(winners.astype(np.int32), (2, 1)))


def test_a_million_keys(kernel):
    keys, topk = 1 << 20, 2048
    scores = np.random.default_rng(23).standard_normal(keys).astype(np.float32)
    got = kernel.index_topk(inputs.dial(scores, 2), topk)
    oracles.assert_same(got, np.tile(oracles.choose(scores, topk)[0], (2, 1)))
    oracles.check_selection(np.tile(scores, (2, 1)), got)


@pytest.mark.parametrize("topk", [2049, 4096, 5000])
def test_large_topk(implementation, topk):
    """Beyond the usual 2048, and past what the CUDA kernel serves."""
    if implementation.name == "cuda" and topk > 4096:
        x = inputs.dial(np.zeros(16, np.float32))
        with pytest.raises(ValueError, match=r'implementation="cuda" cannot serve.*topk'):
            implementation.index_topk(x, topk)
        return
    scores = np.random.default_rng(24).integers(0, 5000, 6000).astype(np.float32)
    got = implementation.index_topk(inputs.dial(scores, 3), topk)
    oracles.assert_same(got, np.tile(oracles.choose(scores, topk)[0], (3, 1)))
