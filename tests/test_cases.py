"""Cases distilled from public reports on kernels of this kind: cases.jsonl, one a line.

A case holds `runs` (dialled scores and the right result), names of `tests` here or in
other files that show it, and `left`, what of it does not apply or is not tested yet.
"""

import concurrent.futures
import json
import pathlib
import re

import conftest
import inputs
import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_fused_topk

HERE = pathlib.Path(__file__).parent
CASES = [json.loads(line) for line in (HERE / "cases.jsonl").read_text().splitlines()]


def runs(kernels_only):
    return [
        pytest.param(run, id=f"{case['id']}-{number}")
        for case in CASES
        for number, run in enumerate(case.get("runs", []))
        if run.get("kernels_only", False) == kernels_only
    ]


def numbers(items, dtype):
    """Numbers, "nan", "inf", "0x<bits>", {"ramp": [first, step, count]}, {"repeat": [x, n]}."""
    parts = []
    for item in items:
        if isinstance(item, dict) and "ramp" in item:
            first, step, count = item["ramp"]
            parts.append((first + step * np.arange(count)).astype(dtype))
        elif isinstance(item, dict):
            value, count = item["repeat"]
            parts.append(np.resize(numbers([value], dtype), count))
        elif isinstance(item, str) and item.startswith("0x"):
            parts.append(np.array([int(item, 16)], np.uint32).view(dtype))
        else:
            parts.append(np.array([float(item)]).astype(dtype))
    return np.concatenate(parts)


def check_run(implementation, run, dtype):
    expected = np.stack([numbers(row, np.int32) for row in run["indices"]])
    x = inputs.dial(
        numbers(run["scores"], np.float32),
        len(expected),
        dtype=dtype,
        starts=run.get("starts"),
        ends=run.get("ends"),
    )
    topk, order = run["topk"], run["order"]
    values, indices = implementation.index_topk(x, topk, order, return_scores=True)
    oracles.assert_same(indices, expected)
    if "values" in run:
        wanted = np.stack([numbers(row, np.float32) for row in run["values"]])
        oracles.assert_same(values, oracles.canonical(wanted))
    if implementation.name != "reference":  # whose program is the same
        oracles.assert_same(implementation.index_topk(x, topk, order), expected)


@pytest.mark.parametrize("run", runs(kernels_only=False))
def test_run(implementation, run):
    check_run(implementation, run, "fp8")


@pytest.mark.parametrize("run", runs(kernels_only=False))
def test_run_in_bfloat16(kernel, run):
    check_run(kernel, run, "bf16")


@pytest.mark.parametrize("run", runs(kernels_only=True))
@pytest.mark.parametrize("dtype", inputs.DTYPES)
def test_run_with_denormals(kernel, run, dtype):
    """XLA on a CPU, and the reference with it, flushes denormals; the kernels keep them."""
    check_run(kernel, run, dtype)


def test_every_case_is_accounted_for():
    """Each has runs, tests or a reason, and each test it names exists."""
    ids = [case["id"] for case in CASES]
    assert len(ids) == len(set(ids)) == 99
    for case in CASES:
        assert case["title"] and case["checks"]
        assert set(case) <= {"id", "title", "checks", "runs", "tests", "left"}
        assert {"runs", "tests", "left"} & set(case), f"{case['id']} says nothing"
        for name in case.get("tests", []):
            file, function = name.split("::")
            source = (HERE / file).read_text()
            assert re.search(rf"^def {function}\(", source, re.M), f"{case['id']}: no {name}"


def test_the_ids_are_those_of_the_reports():
    reports = conftest.SHARED / "cases" / "reports.jsonl"
    if not reports.exists():
        pytest.skip(f"the reports are not here: no {reports}")
    theirs = [json.loads(line)["id"] for line in reports.read_text().splitlines()]
    assert [case["id"] for case in CASES] == theirs


def dialled(rng, keys, queries, **options):
    """Normal scores for every row -> (inputs, scores)."""
    scores = rng.standard_normal(keys).astype(np.float32)
    return inputs.dial(scores, queries, **options), scores


def expect(scores, x, topk, order="index"):
    """The right indices where all rows have the same scores."""
    return oracles.choose(np.tile(scores, (len(x.q), 1)), topk, x.starts, x.ends, order)[0]


def test_slices_of_the_queries(implementation):
    x = inputs.with_ranges(inputs.random(1, 64, 4097, 8, 32), 2)
    whole = implementation.index_topk(x, 128, "score", return_scores=True)
    for first in range(0, 64, 16):
        part = slice(first, first + 16)
        got = implementation.index_topk(x.rows(part), 128, "score", return_scores=True)
        oracles.assert_same(got[1], whole[1][part])
        oracles.assert_same(got[0], whole[0][part])


def test_sizes_around_powers_of_two(kernel):
    x = inputs.random(3, 65, 4097, 4, 16)
    for queries in (31, 33, 64, 65):
        for keys in (4095, 4096, 4097):
            part = x.rows(slice(0, queries))._replace(k=x.k[:keys], k_scale=x.k_scale[:keys])
            own = kernel.index_scores(part)
            oracles.assert_same(own[:31], kernel.index_scores(x.rows(slice(0, 31)))[:, :keys])
            oracles.assert_same(kernel.index_topk(part, 64), oracles.choose(own, 64)[0])


@pytest.mark.parametrize("queries", [65_535, 65_536, 70_000])
def test_more_than_65535_rows(kernel, queries):
    rng = np.random.default_rng(4)
    starts = rng.integers(0, 60, queries)
    scores = rng.permutation(64).astype(np.float32)
    x = inputs.dial(scores, queries, starts=starts, ends=starts + rng.integers(0, 9, queries))
    oracles.assert_same(kernel.index_topk(x, 4), expect(scores, x, 4))


@pytest.mark.parametrize("topk", [1, 3, 7, 127, 1023, 2047])
def test_odd_topk(implementation, topk):
    x, scores = dialled(np.random.default_rng(5), 4099, 3)
    oracles.assert_same(implementation.index_topk(x, topk), expect(scores, x, topk))


def test_starts_of_long_and_short_rows(implementation):
    starts = np.repeat([0, 1, 4095, 4097, 20_000], 4)
    lengths = np.tile([100, 4096, 4097, 30_000], 5)
    x, scores = dialled(np.random.default_rng(6), 60_000, 20, starts=starts, ends=starts + lengths)
    oracles.assert_same(implementation.index_topk(x, 2048), expect(scores, x, 2048))


def test_a_range_is_the_keys_cut_out(implementation):
    x = inputs.random(7, 4, 300)
    ranged = x._replace(starts=np.full(4, 70, np.int32), ends=np.full(4, 170, np.int32))
    cut = x._replace(k=x.k[70:170], k_scale=x.k_scale[70:170])
    for topk in (30, 120):  # fewer and more than the range's 100 keys
        relative = implementation.index_topk(cut, topk, "score")
        absolute = implementation.index_topk(ranged, topk, "score")
        oracles.assert_same(absolute, np.where(relative < 0, np.int32(-1), relative + 70))


def test_padding_rows_leave_the_others_alone(implementation):
    x = inputs.random(8, 8, 500)
    ends = np.int32([500, 400, 300, 31, 0, 0, 0, 0])
    x = x._replace(starts=np.zeros(8, np.int32), ends=ends)
    got = implementation.index_topk(x, 40)
    oracles.assert_same(got[:4], implementation.index_topk(x.rows(slice(0, 4)), 40))
    assert np.all(got[4:] == -1)


def test_scores_rounded_to_bfloat16(implementation):
    keys, topk = 131_072, 2048
    scores = np.random.default_rng(9).standard_normal(keys).astype(inputs.BF16).astype(np.float32)
    expected, values = oracles.choose(scores, topk)
    worst = values.min()
    assert np.sum(scores == worst) > np.sum(values == worst) > 5, "no ties at the boundary"
    got = implementation.index_topk(inputs.dial(scores, 2, row_weights=[1, 2]), topk)
    oracles.assert_same(got, np.stack([expected, expected]))


def test_winners_over_a_plateau_of_zeros(implementation):
    scores = np.zeros(8320, np.float32)
    winners = 8319 - 80 * np.arange(100)
    scores[winners] = 1 + np.arange(100)
    zeros = np.flatnonzero(scores == 0)[:1948]
    expected = np.sort(np.concatenate([winners, zeros])).astype(np.int32)
    got = implementation.index_topk(inputs.dial(scores, 3), 2048)
    oracles.assert_same(got, np.tile(expected, (3, 1)))


def test_nan_by_every_route_ranks_first(implementation):
    nan, inf = np.float32(np.nan), np.float32(np.inf)
    fp8_nan = np.uint8(0x7F).view(inputs.FP8)
    x, scores = dialled(np.random.default_rng(10), 200, 2, starts=[0, 9], ends=[200, 200])
    finite = expect(scores, x, 5, "score")

    def changed(**change):
        new = x._replace(**{n: getattr(x, n).copy() for n in change})
        for name, (place, value) in change.items():
            getattr(new, name)[place] = value
        return implementation.index_topk(new, 5, "score")

    for change in (
        {"k": ((50, 3), fp8_nan)},
        {"k_scale": (50, nan)},
        {"k_scale": (50, inf), "k": (50, 0)},  # inf * 0
    ):
        got = changed(**change)
        assert np.all(got[:, 0] == 50)
        for row, best in enumerate(finite):
            assert list(got[row, 1:]) == [i for i in best if i != 50][:4]
    for change in (
        {"q": ((slice(None), 0, 5), fp8_nan)},
        {"weights": ((slice(None), 0), nan)},
        {"weights": ((slice(None),), [inf, -inf]), "k": (slice(None), 1)},  # inf - inf
    ):
        oracles.assert_same(changed(**change), np.int32([range(5), range(9, 14)]))


def test_a_nan_row_at_any_batch_size(kernel):
    rng = np.random.default_rng(11)
    weights = rng.choice(np.float32([1, -1, 2]), 513)
    weights[0] = np.nan
    scores = rng.standard_normal(700).astype(np.float32)
    for queries in (1, 511, 512, 513):
        x = inputs.dial(scores, queries, row_weights=weights[:queries])
        expected, _ = oracles.choose(oracles.dialled(scores, weights[:queries], kernel.name), 64)
        assert list(expected[0]) == list(range(64))
        oracles.assert_same(kernel.index_topk(x, 64), expected)


def test_nan_at_every_place(implementation):
    others = np.random.default_rng(12).permutation(19).astype(np.float32)
    rows = np.stack([np.insert(others, place, np.nan) for place in range(20)])
    x = inputs.Inputs(*(a if a is None else np.stack([a] * 20) for a in inputs.dial(rows[0])))
    x = x._replace(k_scale=rows, k=np.broadcast_to(x.k[:, :1], x.k.shape).copy())
    values, indices = implementation.index_topk(x, 5, "score", return_scores=True)
    for place in range(20):
        assert indices[place, 0, 0] == place
        oracles.assert_same(values[place], values[0])


@pytest.mark.parametrize("keys", [5, 300, 5000, 40_000])
def test_mostly_minus_infinity_at_every_size(implementation, keys):
    scores = np.full(keys, -np.inf, np.float32)
    places = np.sort(np.random.default_rng(keys).choice(keys, 3, replace=False))
    scores[places] = [2, 3, 1]
    x = inputs.dial(scores, 2)
    values, indices = implementation.index_topk(x, 64, "score", return_scores=True)
    expected, expected_values = oracles.choose(scores, 64, order="score")
    assert list(expected[:3]) == [places[1], places[0], places[2]]
    oracles.assert_same(indices, np.stack([expected] * 2))
    oracles.assert_same(values, np.stack([expected_values] * 2))


def test_work_after_a_nan_row(implementation):
    weights = np.ones(64, np.float32)
    weights[17] = np.nan
    x = inputs.dial(np.arange(3000), 64, row_weights=weights)
    got = implementation.index_topk(x, 16)
    assert list(got[17]) == list(range(16)) and list(got[18]) == list(range(2984, 3000))
    later = jax.jit(lambda a: a @ a)(implementation.put(np.ones((64, 64), np.float32)))
    assert np.all(np.asarray(later) == 64)


def test_plateau_repeats(kernel):
    scores = inputs.adversarial("zero_plateau", 16_384)
    x = inputs.dial(scores, 8)
    expected = expect(scores, x, 2048)
    for _ in range(25):
        oracles.assert_same(kernel.index_topk(x, 2048), expected)


def test_the_count_of_a_row(implementation):
    """The entries that are not -1 come first, ascending, as int32, and number n or K."""
    x = inputs.with_ranges(inputs.integer(13, 30, 200), 14)
    indices = implementation.index_topk(x, 64)
    assert indices.dtype == np.int32 and indices.flags.c_contiguous
    for row in range(30):
        start, end = oracles.clamp(x.starts[row], x.ends[row], 200)
        count = int(np.sum(indices[row] >= 0))
        assert count == min(end - start, 64)
        assert np.all(np.diff(indices[row, :count]) > 0)
        assert np.all(indices[row, count:] == -1)


def test_lengths_beyond_topk(implementation):
    topk = 64
    x = inputs.random(15, 3, 10 * topk, 8, 32)
    x = x._replace(starts=np.zeros(3, np.int32), ends=np.int32([topk + 1, 2 * topk, 10 * topk]))
    own = implementation.index_scores(x)
    expected, _ = oracles.choose(own, topk, x.starts, x.ends)
    assert np.any(np.diff(expected, axis=1) > 1, axis=1).all(), "a prefix would do"
    oracles.assert_same(implementation.index_topk(x, topk), expected)


def test_two_threads(kernel):
    """Two threads call programs of different K at once."""
    x, scores = dialled(np.random.default_rng(16), 9000, 4)
    expected = {topk: expect(scores, x, topk) for topk in (16, 2048)}

    def work(topk):
        for _ in range(50):
            oracles.assert_same(kernel.index_topk(x, topk), expected[topk])
        return True

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        assert list(pool.map(work, expected)) == [True, True]


def test_explicit_sharding():
    """Over an Explicit mesh: right where the operands are whole, and sharded by shard_map."""
    mesh = jax.make_mesh(
        (4,), ("x",), axis_types=(AxisType.Explicit,), devices=jax.devices("cpu")[:4]
    )
    x = inputs.integer(17, 8, 130, 3, 16)
    run = jax.jit(lambda q, k, w: jax_fused_topk.index_topk(q, k, w, topk=20, implementation="cpu"))
    scores, _ = oracles.scores64(x.q, x.k, x.weights)
    expected, _ = oracles.choose(oracles.canonical(scores), 20)
    specs = (P("x"), P(), P("x"))
    with jax.set_mesh(mesh):
        whole = [jax.device_put(a, NamedSharding(mesh, P())) for a in x[:3]]
        oracles.assert_same(run(*whole), expected)
        split = [
            jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(x[:3], specs, strict=True)
        ]
        mapped = jax.shard_map(run, in_specs=specs, out_specs=P("x"))
        oracles.assert_same(jax.jit(mapped)(*map(jnp.asarray, split)), expected)
