"""The Hopper path on a GPU: FP8, D = 128, H of 32 or 64.

It has three ways: dense scores for short rows and for few queries, and otherwise
candidates above a sampled threshold.  `-m "gpu and small"` has one of each.
"""

import functools
import itertools
import types

import inputs
import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from runners import LONG, MANY, QUERIES

import jax_fused_topk
from jax_fused_topk import _ffi

pytestmark = pytest.mark.gpu


@functools.partial(jax.jit, static_argnames=("topk", "order"))
def _differing_rows(operands, topk, order):
    """The rows where index_topk is not the choice over index_scores, and their number."""
    cuda = {"implementation": "cuda"}
    scores = jax_fused_topk.index_scores(**operands, **cuda)
    ranges = {name: operands[name] for name in ("starts", "ends")}
    wanted_values, wanted = jax_fused_topk.top_k(scores, topk, **ranges, order=order, **cuda)
    values, got = jax_fused_topk.index_topk(
        **operands, topk=topk, order=order, return_scores=True, **cuda
    )
    alone = jax_fused_topk.index_topk(**operands, topk=topk, order=order, **cuda)
    bits = functools.partial(jax.lax.bitcast_convert_type, new_dtype=jnp.uint32)
    same = (got == wanted) & (alone == wanted) & (bits(values) == bits(wanted_values))
    return jnp.sum(~same.all(axis=-1))


def check_every_row(cuda, x, topk, order="index"):
    """Oracle 1 on the GPU: top_k over the kernel's own scores, which has tests of its own."""
    keys = x.k.shape[-2]
    rows = x.weights.shape[:-1]
    starts = np.zeros(rows, np.int32) if x.starts is None else x.starts
    ends = np.full(rows, keys, np.int32) if x.ends is None else x.ends
    operands = cuda.put(x._replace(starts=starts, ends=ends)._asdict())
    assert int(_differing_rows(operands, min(topk, keys), order)) == 0


def check_some_rows(cuda, x, topk, order="index"):
    """Oracle 1 in numpy, on a few rows."""
    rows = np.unique(np.linspace(0, x.q.shape[0] - 1, 7).astype(int))
    values, got = cuda.index_topk(x, topk, order, return_scores=True)
    few = x.rows(rows)
    own = cuda.index_scores(few)
    indices, wanted = oracles.choose(own, topk, few.starts, few.ends, order)
    oracles.assert_same(got[rows], indices, "indices")
    oracles.assert_same(values[rows], wanted, "scores")


def draw(seed, queries, keys, heads=32, batch=()):
    """Random inputs that are quick to make: FP8 of any bits below 2 in size."""
    rng = np.random.default_rng(seed)

    def fp8(*shape):
        return (rng.integers(0, 256, (*batch, *shape), np.uint8) & 0xBF).view(inputs.FP8)

    return inputs.Inputs(
        q=fp8(queries, heads, 128),
        k=fp8(keys, 128),
        weights=rng.standard_normal((*batch, queries, heads), np.float32),
        k_scale=rng.uniform(0.5, 2, (*batch, keys)).astype(np.float32),
    )


def causal(x):
    queries, keys = x.q.shape[0], x.k.shape[0]
    ends = np.asarray(jax_fused_topk.causal_ends(queries, keys))
    return x._replace(starts=np.zeros(queries, np.int32), ends=ends)


def plan(queries, keys, topk=2048, batch=1):
    """The way of a call: the tests that are of one way say so, for its bounds may move."""
    return types.SimpleNamespace(**_ffi.cuda_module().hopper_plan(batch, queries, keys, topk))


def sampled_keys(queries=QUERIES):
    """Those of LONG that are scored before the others."""
    way = plan(queries, LONG)
    assert not way.dense and (way.holes > 1) == (queries == MANY)
    groups = np.int32(_ffi.cuda_module().hopper_sampled_groups(LONG, way.cycle, way.holes))
    keys = (groups[:, None] + np.arange(8)).ravel()
    return keys[keys < LONG]  # the last window may end behind them


@pytest.mark.small
@pytest.mark.parametrize(
    ("queries", "keys", "topk"), [(3, 40, 16), (65, 337, 100), (5, 3000, 2048)]
)
def test_small_dense(cuda, queries, keys, topk):
    x = inputs.with_ranges(draw(1, queries, keys), 2)
    check_some_rows(cuda, x, topk)


@pytest.mark.small
def test_small_candidates(cuda):
    """Enough to leave the dense ways; ascending rows fill segments, so that they are cut."""
    x = inputs.with_ranges(draw(3, QUERIES, 33_000), 4)
    check_some_rows(cuda, x, 600)
    scores = inputs.adversarial("all_equal", 33_000)
    got = cuda.index_topk(inputs.dial(scores, QUERIES, 32, 128), 600)
    oracles.assert_same(got, np.tile(np.arange(600, dtype=np.int32), (QUERIES, 1)))


@pytest.mark.parametrize("heads", [32, 64])
@pytest.mark.parametrize("queries", [1, 3, 8, 48, 49, 63, 65, 131, QUERIES])
def test_query_counts(cuda, queries, heads):
    for keys in (5001, LONG):
        x = causal(draw(queries + keys, queries, keys, heads))
        check_every_row(cuda, x, 2048)
    check_some_rows(cuda, x, 2048, "score")


@pytest.mark.parametrize(
    ("queries", "keys"), [(QUERIES, 5001), (QUERIES, LONG), (MANY, LONG), (QUERIES, (1 << 19) + 5)]
)
def test_any_order_is_the_same_set_and_always_the_same_order(cuda, queries, keys):
    assert plan(queries, keys, 700).dense == (keys == 5001)
    x = causal(draw(keys, queries, keys))
    x = x._replace(starts=np.resize(np.int32([0, 7, 2000, 4900]), queries))
    values, indices = cuda.index_topk(x, 700, "index", return_scores=True)
    once = cuda.index_topk(x, 700, "any", return_scores=True)
    at = np.argsort(np.where(once[1] < 0, keys, once[1]), axis=-1, kind="stable")
    oracles.assert_same(np.take_along_axis(once[1], at, -1), indices, "indices")
    oracles.assert_same(np.take_along_axis(once[0], at, -1), values, "scores")
    again = cuda.index_topk(x, 700, "any", return_scores=True)
    oracles.assert_same(again[1], once[1], "indices again")
    oracles.assert_same(again[0], once[0], "scores again")
    oracles.assert_same(cuda.index_topk(x, 700, "any"), once[1], "indices alone")


@pytest.mark.parametrize("seed", range(200))
def test_random_shapes(cuda, seed):
    """Bit for bit, any sizes: a third of them too large for dense scores."""
    rng = np.random.default_rng([31, seed])
    if seed % 3 == 0:
        keys = int(rng.integers(32_769, 90_000))
        few = _ffi.cuda_module().HOPPER_MAX_FEW_BYTES // (4 * keys)
        queries = few + int(rng.integers(1, 200))
    else:
        queries, keys = int(2 ** rng.uniform(0, 8)), int(2 ** rng.uniform(0, 16))
    topk = int(2 ** rng.uniform(0, 12))
    batch = [(), (2,)][seed % 7 == 1]
    x = draw(seed, queries, keys, [32, 64][seed // 2 % 2], batch)
    if seed % 2:  # few different keys: ties decide
        which = rng.integers(0, min(50, keys), keys)
        x = x._replace(k=x.k[..., which, :], k_scale=x.k_scale[..., which])
    x = inputs.with_ranges(x, seed) if seed % 5 else x
    check_every_row(cuda, x, topk, ["index", "score"][seed // 4 % 2])


@pytest.mark.parametrize("keys", ["dense", "dense + 1", 32_768, 1 << 20])
def test_around_the_ways(cuda, keys):
    """Row lengths where another way begins, of few queries and of many."""
    if isinstance(keys, str):
        keys = _ffi.cuda_module().HOPPER_MAX_DENSE_KEYS + (keys == "dense + 1")
    few = _ffi.cuda_module().HOPPER_MAX_FEW_BYTES // (4 * keys)
    for queries in {few, few + 1, 65}:
        check_every_row(cuda, causal(draw(32, queries, keys)), 2048)


@pytest.mark.parametrize("keys", [49_152, 65_536])
@pytest.mark.parametrize(
    ("batch", "queries"), [((), 65), ((), 87), ((), 129), ((), 132), ((2,), 65)]
)
def test_rows_that_do_not_fill_their_blocks(cuda, batch, queries, keys):
    """Fewer rows than blocks hold: top_k cuts each into more parts, and needs more room."""
    check_every_row(cuda, draw(46, queries, keys, batch=batch), 2048)


def test_plateau_of_zeros_under_some_scores(cuda):
    """Fewer than K scores are positive, all others equal 0: the threshold is 0 itself."""
    scores = np.zeros(LONG, np.float32)
    scores[np.random.default_rng(47).choice(LONG, 900, replace=False)] = 1
    expected, _ = oracles.choose(scores, 2048)
    got = cuda.index_topk(inputs.dial(scores, QUERIES, 32, 128), 2048)
    oracles.assert_same(got, np.tile(expected, (QUERIES, 1)))


@pytest.mark.parametrize("topk", [1, 11, 12, 13, 2047, 2048, 4096])
def test_row_lengths_around_tiles_and_topk(cuda, topk):
    """Ranges that differ inside a block, with ends around every multiple of a tile."""
    tile = _ffi.cuda_module().HOPPER_TILE_KEYS
    window = _ffi.cuda_module().HOPPER_WINDOW_KEYS
    multiples = [n * j for n in (tile, window) for j in range(1, LONG // window)]
    lengths = [n + d for n in multiples for d in (-1, 0, 1)]
    lengths += [topk + d for d in (-1, 0, 1)] * 3
    lengths = np.resize(np.int32(lengths), MANY)
    assert plan(300, LONG, topk).dense and plan(MANY, LONG, topk).holes > 1
    starts = np.resize(np.int32([0, 1, 7, tile, 5 * tile + 3]), len(lengths))
    ends = starts + lengths
    for name in ("coarse_bin", "eight_values", "ascending"):
        scores = inputs.adversarial(name, LONG)
        x = inputs.dial(scores, len(lengths), 32, 128, starts=starts, ends=ends)
        few = np.arange(0, len(lengths), 22)
        expected, _ = oracles.choose(np.tile(scores, (len(few), 1)), topk, starts[few], ends[few])
        for part in (x, x.rows(slice(0, 300))):  # candidates, then dense scores
            got = cuda.index_topk(part, topk)
            inside = few[few < len(got)]
            oracles.assert_same(got[inside], expected[: len(inside)], name)


@pytest.mark.parametrize("queries", [25, QUERIES])
@pytest.mark.parametrize("name", inputs.ADVERSARIAL)
def test_adversarial(cuda, name, queries):
    assert plan(queries, LONG).dense == (queries == 25)
    scores = inputs.adversarial(name, LONG)
    which = np.resize([0, 1, 2], queries)
    row_weights = np.float32([1, -1, 2])
    x = inputs.dial(scores, queries, 64, 128, row_weights=row_weights[which])
    exact = oracles.dialled(scores, row_weights, "cuda")
    for order in ("index", "score"):
        indices, values = oracles.choose(exact, 2048, order=order)
        got_values, got = cuda.index_topk(x, 2048, order, return_scores=True)
        oracles.assert_same(got, indices[which], "indices")
        oracles.assert_same(got_values, values[which], "scores")


@pytest.mark.parametrize("count", [60, 100, 500, LONG])
@pytest.mark.parametrize("value", [np.nan, np.inf, 2, 0])
def test_sampled_keys_that_are_alike(cuda, count, value):
    """Some keys of the sample, or all, are equal, others of the row among them or not."""
    scores = np.random.default_rng(35).random(LONG).astype(np.float32)
    sampled = sampled_keys()[:count]
    scores[sampled] = value
    both = scores.copy()
    both[np.minimum(sampled + 8, LONG - 1)] = value
    for row in (scores, both):
        expected, _ = oracles.choose(row, 2048)
        got = cuda.index_topk(inputs.dial(row, QUERIES, 32, 128), 2048)
        oracles.assert_same(got, np.tile(expected, (QUERIES, 1)))


@pytest.mark.parametrize(("topk", "groups"), [(12, 1), (100, 2), (2048, 12)])
def test_few_nan_all_of_them_sampled(cuda, topk, groups):
    """The threshold is below NaN alone: other sampled keys must not go missing."""
    scores = np.random.default_rng(36).random(LONG).astype(np.float32)
    sampled = sampled_keys()
    scores[sampled[24 : 24 + 8 * groups]] = np.nan
    scores[sampled[8 * 40 + 2]] = 5
    expected, _ = oracles.choose(scores, topk)
    got = cuda.index_topk(inputs.dial(scores, QUERIES, 32, 128), topk)
    oracles.assert_same(got, np.tile(expected, (QUERIES, 1)))


@pytest.mark.parametrize("queries", [QUERIES, MANY])
@pytest.mark.parametrize("high", [True, False])
@pytest.mark.parametrize("topk", [100, 2048])
def test_samples_that_mislead(cuda, topk, high, queries):
    """All sampled keys far above the others, or far below: a threshold that is far off.

    Too high a threshold leaves fewer than K candidates, and the block is scored again; too
    low a one fills the segments.  Half of the rows are led astray.
    """
    rng = np.random.default_rng(33)
    sampled = sampled_keys(queries)
    scores = rng.random(LONG).astype(np.float32)
    odd = scores.copy()
    odd[sampled] += 1 if high else -1
    x = inputs.dial(odd, queries, 64, 128, row_weights=[1, -1] * (queries // 2))
    for parity, sign in ((0, 1), (1, -1)):
        expected, _ = oracles.choose(sign * odd, topk)
        got = cuda.index_topk(x, topk)
        oracles.assert_same(got[parity::2], np.tile(expected, (queries // 2, 1)))


def test_keys_outside_the_ranges_do_not_matter(cuda):
    """Poison before, behind and between: any bytes, NaN among them."""
    x = draw(34, QUERIES, LONG, 64)
    starts = np.resize(np.int32([100, 1000, 5000]), QUERIES)
    ends = np.resize(np.int32([30_000, 20_001]), QUERIES)
    x = x._replace(starts=starts, ends=ends)
    k = x.k.copy()
    k[:100] = k[30_000:] = np.uint8(0x7F).view(inputs.FP8)  # NaN
    k_scale = x.k_scale.copy()
    k_scale[:100] = k_scale[30_000:] = np.nan
    for few in (slice(0, QUERIES), slice(5, 9)):
        clean = cuda.index_topk(x.rows(few), 2048, return_scores=True)
        poisoned = cuda.index_topk(
            x._replace(k=k, k_scale=k_scale).rows(few), 2048, return_scores=True
        )
        oracles.assert_same(poisoned[1], clean[1])
        oracles.assert_same(poisoned[0], clean[0])


def test_one_nan_row_among_good_ones(cuda):
    x = draw(35, QUERIES, LONG, 64)
    clean = cuda.index_topk(x, 2048)
    weights = x.weights.copy()
    weights[17] = np.nan
    got = cuda.index_topk(x._replace(weights=weights), 2048)
    rest = np.arange(QUERIES) != 17
    oracles.assert_same(got[rest], clean[rest])
    oracles.assert_same(got[17], np.arange(2048, dtype=np.int32))  # all equal: the first


def test_rows_do_not_depend_on_the_others(cuda):
    """The same bits in calls of every size, way and place, and again."""
    assert not plan(936, LONG, 1000).dense and plan(129, LONG, 1000).dense
    x = inputs.with_ranges(draw(36, 1000, LONG, 64), 37)
    values, indices = cuda.index_topk(x, 1000, return_scores=True)
    scores = cuda.index_scores(x)
    parts = (slice(0, 1000), slice(0, 1), slice(3, 20), slice(100, 229), slice(64, 1000))
    for part in parts:
        got_values, got = cuda.index_topk(x.rows(part), 1000, return_scores=True)
        oracles.assert_same(got, indices[part], f"rows {part}")
        oracles.assert_same(got_values, values[part], f"rows {part}")
        oracles.assert_same(cuda.index_scores(x.rows(part)), scores[part], f"rows {part}")


def test_scores_are_as_near_as_14_bits_allow(cuda):
    """Root mean square over many keys, where the bound of one score is loose."""
    x = inputs.random(38, 64, 4000, 64, 128)
    exact, _ = oracles.scores64(x.q, x.k, x.weights, x.k_scale)
    error = cuda.index_scores(x) - exact
    assert np.sqrt(np.mean(error**2)) < 1e-3 * np.std(exact)


def test_whole_numbers_agree_with_the_cpu(cuda, cpu):
    """Oracle 4 where candidates are held: exact sums, ties decide."""
    x = inputs.with_ranges(inputs.integer(39, QUERIES, 33_000, 32, 128), 40)
    got = cuda.index_topk(x, 700, return_scores=True)
    few = slice(0, QUERIES, 40)
    expected = cpu.index_topk(x.rows(few), 700, return_scores=True)
    oracles.assert_same(got[1][few], expected[1], "indices")
    oracles.assert_same(got[0][few], expected[0], "scores")


@pytest.mark.parametrize("keys", [8192, 16_384, 32_768, 65_536, 131_072, 163_840])
def test_every_row_of_the_replay_set(cuda, replay, keys):
    check_every_row(cuda, inputs.Inputs(**replay(4096, keys)), 2048)


def test_a_whole_causal_prefill(cuda):
    check_every_row(cuda, causal(draw(41, 16_384, 16_384)), 2048)


def test_workspaces_at_many_addresses(cuda):
    """Candidates are walked with the lower 32 bits of an address.

    More than 64 MiB of them at a time, each time further on by the 64 MiB that stay held: in
    5 GiB some lie across a multiple of 4 GiB.
    """
    operands = cuda.put(draw(48, QUERIES, LONG)._asdict())
    run = jax.jit(functools.partial(jax_fused_topk.index_topk, implementation="cuda"))
    hold = functools.partial(jnp.zeros, 2**26, jnp.uint8, device=cuda.device)
    expected, held = np.asarray(run(**operands)), []
    for _ in range(80):
        held.append(hold())
        oracles.assert_same(np.asarray(run(**operands)), expected)


def test_many_rows_come_in_chunks(cuda):
    """More than the workspace holds at a time, dense and not; batches of odd sizes."""
    for batch, queries, keys, topk in ((1, 9000, 20_000, 300), (300, 101, 5000, 300)):
        way = plan(queries, keys, topk, batch)
        assert way.dense and way.chunks > 1
        check_every_row(cuda, draw(42, queries, keys, batch=(batch,)), topk)
    way = plan(4500, 33_000, 2100)
    assert not way.dense and way.chunks > 1
    check_every_row(cuda, draw(43, 4500, 33_000), 2100)


def test_batches(cuda):
    for queries, keys in itertools.product((1, 70), (3000, 70_000)):
        x = inputs.with_ranges(draw(44, queries, keys, 64, (9,)), 45)
        check_every_row(cuda, x, 2048)
