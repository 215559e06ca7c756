"""The CUDA kernels on a GPU: sizes, threads, graphs and amounts that a CPU suite has no time for.

The other files run with implementation="cuda" too; select everything with
`-m gpu`, and what a sanitizer can run in a minute with `-m "gpu and small"`.
"""

import concurrent.futures
import functools
import json
import os
import subprocess
import sys

import inputs
import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
import runners

import jax_fused_topk
from jax_fused_topk import _ffi

pytestmark = pytest.mark.gpu


def check_choice(cuda, x, topk, order="index", rows=None):
    """Oracle 1: against the choice over the kernel's own scores, on all rows or some."""
    values, got = cuda.index_topk(x, topk, order, return_scores=True)
    few = x if rows is None else x.rows(rows)
    own = cuda.index_scores(few)
    if rows is not None:
        values, got = values[rows], got[rows]
    indices, wanted = oracles.choose(own, topk, few.starts, few.ends, order)
    oracles.assert_same(got, indices, "indices")
    oracles.assert_same(values, wanted, "scores")
    if order == "index":
        oracles.check_selection(own, got, few.starts, few.ends)
    return own


SMALL = [
    # Q, N, H, D, dtype, topk
    (1, 1, 1, 16, "fp8", 1),
    (2, 65, 5, 16, "bf16", 64),
    (3, 300, 32, 64, "fp8", 299),
    (5, 257, 3, 48, "bf16", 300),
    (7, 1500, 64, 128, "fp8", 100),
    (17, 700, 2, 256, "fp8", 512),
    (33, 1025, 4, 128, "bf16", 16),
    (129, 600, 2, 32, "fp8", 64),
]


@pytest.mark.small
@pytest.mark.parametrize(("queries", "keys", "heads", "dim", "dtype", "topk"), SMALL)
def test_small(cuda, queries, keys, heads, dim, dtype, topk):
    x = inputs.with_ranges(inputs.random(1, queries, keys, heads, dim, dtype), 2)
    own = check_choice(cuda, x, topk)
    indices = cuda.index_topk(x, topk, "score")
    oracles.assert_same(indices, oracles.choose(own, topk, x.starts, x.ends, "score")[0])


@pytest.mark.small
def test_small_splits_and_buffers(cuda):
    """Long enough that rows are split among CTAs and candidate buffers fill up."""
    for name in ("ascending", "non_finite"):
        scores = inputs.adversarial(name, 5003)
        x = inputs.dial(scores, 3, row_weights=[1, -1, 2])
        exact = oracles.dialled(scores, [1, -1, 2], "cuda")
        for topk in (1, 600):
            oracles.assert_same(cuda.index_topk(x, topk), oracles.choose(exact, topk)[0])


@pytest.mark.small
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_small_top_k(cuda, dtype):
    x = np.random.default_rng(3).standard_normal((5, 3001)).astype(dtype)
    starts, ends = np.int32([0, 1, 7, 3001, 2000]), np.int32([3001, 3000, 9, 0, 2900])
    for k in (1, 333, 3001):
        for order in ("index", "score"):
            values, indices = cuda.top_k(x, k, starts, ends, order)
            expected, expected_values = oracles.choose(x, k, starts, ends, order)
            oracles.assert_same(indices, expected)
            oracles.assert_same(values, expected_values)


@pytest.mark.small
@pytest.mark.parametrize("keys", [9001, 60_001])
def test_small_top_k_of_long_rows(cuda, keys):
    """Rows that are filtered by a sample, and rows cut into parts."""
    rng = np.random.default_rng(4)
    x = np.stack([rng.standard_normal(keys), np.arange(keys), np.zeros(keys)]).astype(np.float32)
    starts, ends = np.int32([0, 1, 3]), np.int32([keys, keys - 1, keys])
    for order in ("index", "score"):
        values, indices = cuda.top_k(x, 700, starts, ends, order)
        expected, expected_values = oracles.choose(x, 700, starts, ends, order)
        oracles.assert_same(indices, expected)
        oracles.assert_same(values, expected_values)


MEDIUM = [
    (1, 131_072, 64, 128, "fp8", 2048),
    (8, 131_072, 64, 128, "bf16", 2048),
    (64, 32_768, 64, 128, "fp8", 2048),
    (131, 16_384, 32, 128, "fp8", 512),
    (131, 8192, 64, 256, "bf16", 1024),
    (16, 65_537, 1, 16, "fp8", 4096),
    (100, 40_001, 5, 80, "bf16", 1),
    (15, 131_071, 32, 64, "fp8", 4095),
    (48, 20_000, 256, 16, "fp8", 77),
]


@pytest.mark.parametrize(("queries", "keys", "heads", "dim", "dtype", "topk"), MEDIUM)
@pytest.mark.parametrize("order", ["index", "score"])
def test_medium(cuda, queries, keys, heads, dim, dtype, topk, order):
    x = inputs.random(4, queries, keys, heads, dim, dtype)
    ends = np.asarray(jax_fused_topk.causal_ends(queries, keys))
    rows = np.unique(np.r_[0, queries // 2, queries - 1, np.arange(0, queries, 9)])
    check_choice(cuda, x._replace(ends=ends), topk, order, rows)


@pytest.mark.parametrize("seed", range(60))
def test_random_shapes(cuda, seed):
    rng = np.random.default_rng([5, seed])
    queries, keys = int(rng.integers(1, 132)), int(2 ** rng.uniform(0, 14.3))
    heads, dim = int(rng.choice([1, 2, 5, 32, 64])), 16 * int(rng.integers(1, 17))
    topk = int(2 ** rng.uniform(0, 12))
    make = inputs.random if seed % 2 else inputs.integer
    batch = [(), (2,), (1, 3)][seed % 3]
    x = make(seed, queries, keys, heads, dim, ["fp8", "bf16"][seed // 2 % 2], batch)
    if seed % 5:
        x = inputs.with_ranges(x, seed)
    check_choice(cuda, x, topk, ["index", "score"][seed // 4 % 2])


@pytest.mark.parametrize("dtype", inputs.DTYPES)
@pytest.mark.parametrize("heads", [1, 5, 32, 64])
@pytest.mark.parametrize("dim", [16, 32, 64, 112, 128, 144, 256])
def test_scores_within_the_bound(cuda, heads, dim, dtype):
    """Oracle 2 over the served box."""
    x = inputs.random(6, 18, 300, heads, dim, dtype)
    exact, size = oracles.scores64(x.q, x.k, x.weights, x.k_scale)
    error = np.abs(cuda.index_scores(x) - exact)
    bound = oracles.score_bound(size, heads, dim, cuda.arithmetic(x))
    assert np.all(error <= bound), f"worst error / bound: {(error / bound).max()}"


@pytest.mark.parametrize("topk", [1, 512, 2048, 4096])
def test_key_counts_around_capacities(cuda, topk):
    """Row lengths around every multiple of 256, and N itself around powers of two."""
    keys = 20_480
    ends = [256 * j + d for j in range(1, 80) for d in (-1, 0, 1)]
    for name in ("coarse_bin", "ascending", "all_equal"):
        scores = inputs.adversarial(name, keys)
        x = inputs.dial(scores, len(ends), starts=[0] * len(ends), ends=ends)
        expected, _ = oracles.choose(np.tile(scores, (len(ends), 1)), topk, x.starts, x.ends)
        oracles.assert_same(cuda.index_topk(x, topk), expected, name)
    for count in (1024, 2048, 4096, 8192, 32_768, 65_536):
        for n in (count - 1, count, count + 1):
            scores = inputs.adversarial("coarse_bin", n, seed=n)
            got = cuda.index_topk(inputs.dial(scores, 33), topk)
            expected, _ = oracles.choose(scores, topk)
            oracles.assert_same(got, np.tile(expected, (33, 1)), f"N = {n}")


@pytest.mark.parametrize("name", inputs.ADVERSARIAL)
def test_adversarial_long(cuda, name):
    keys, topk = 131_072, 2048
    scores = inputs.adversarial(name, keys)
    row_weights = np.float32([1, -1] * 12 + [2])  # 25 rows: one row block and a half
    x = inputs.dial(scores, 25, row_weights=row_weights)
    exact = oracles.dialled(scores, [1, -1, 2], "cuda")
    indices, values = oracles.choose(exact, topk)
    got_values, got = cuda.index_topk(x, topk, return_scores=True)
    which = [0, 1] * 12 + [2]
    oracles.assert_same(got, indices[which], "indices")
    oracles.assert_same(got_values, values[which], "scores")


@pytest.mark.parametrize("dtype", inputs.DTYPES)
@pytest.mark.parametrize("order", ["index", "score"])
def test_whole_numbers_agree_with_the_cpu(cuda, cpu, dtype, order):
    """Oracle 4: exact sums, and scores at few levels, so that ties decide."""
    for queries, keys, heads, dim in ((50, 9000, 64, 128), (20, 4096, 32, 256), (3, 70_000, 5, 16)):
        x = inputs.with_ranges(inputs.integer(7, queries, keys, heads, dim, dtype), 8)
        oracles.assert_same(cuda.index_scores(x), cpu.index_scores(x))
        got = cuda.index_topk(x, 700, order, return_scores=True)
        expected = cpu.index_topk(x, 700, order, return_scores=True)
        oracles.assert_same(got[1], expected[1], "indices")
        oracles.assert_same(got[0], expected[0], "scores")


def test_rows_do_not_depend_on_the_others(cuda):
    """A row's bits are the same in calls of every size, split and place."""
    x = inputs.with_ranges(inputs.random(9, 4097, 16_384, 8, 64), 10)
    values, indices = cuda.index_topk(x, 512, return_scores=True)
    for part in (slice(0, 1), slice(3, 20), slice(1000, 1129), slice(4000, 4097)):
        got_values, got = cuda.index_topk(x.rows(part), 512, return_scores=True)
        oracles.assert_same(got, indices[part], f"rows {part}")
        oracles.assert_same(got_values, values[part], f"rows {part}")


# Large amounts


@pytest.mark.parametrize("keys", [262_144, 1 << 20])
def test_long_rows(cuda, keys):
    scores = np.random.default_rng(11).standard_normal(keys).astype(np.float32)
    x = inputs.dial(scores, 64, row_weights=[1, -1] * 32)
    got = cuda.index_topk(x, 2048)
    for parity, sign in ((0, 1), (1, -1)):
        expected, _ = oracles.choose(sign * scores, 2048)
        oracles.assert_same(got[parity::2], np.tile(expected, (32, 1)))


def test_seventy_thousand_rows(cuda):
    x = inputs.random(12, 70_000, 4096, 32, 32)
    rows = np.r_[0:3, 65_533:65_539, 69_997:70_000]
    check_choice(cuda, x, 16, "index", rows)
    # As many batch entries.
    rng = np.random.default_rng(13)
    x = inputs.integer(14, 1, 64, 2, 16, batch=(70_000,))
    got = cuda.index_topk(x, 4, "score")
    some = np.unique(np.r_[0, 65_534:65_538, 69_999, rng.integers(0, 70_000, 200)])
    exact, _ = oracles.scores64(x.q[some], x.k[some], x.weights[some], x.k_scale[some])
    oracles.assert_same(got[some], oracles.choose(oracles.canonical(exact), 4, order="score")[0])


def test_scores_past_2_31(cuda):
    """Q * N = 2.2e9: the choice, and the scores written out (8.9 GB)."""
    queries, keys, topk = 8192, 270_336, 64
    x = inputs.dial(np.arange(keys), queries, heads=32, dim=32)
    got = cuda.index_topk(x, topk)
    oracles.assert_same(got, np.tile(np.arange(keys - topk, keys, dtype=np.int32), (queries, 1)))
    operands = cuda.put((x.q, x.k, x.weights, x.k_scale))
    scores = jax.jit(
        lambda q, k, w, s: jax_fused_topk.index_scores(q, k, w, k_scale=s, implementation=cuda.name)
    )(*operands)
    expected = np.arange(keys, dtype=np.float32)
    for row in (0, 7942, 7943, 7944, 8191):  # row 7943 holds element 2**31
        oracles.assert_same(scores[row], expected)


def test_output_past_2_31_bytes(cuda):
    """270000 rows of 2048 indices are 2.2 GB: every one is written."""
    queries, keys = 270_000, 2048
    x = inputs.dial(np.zeros(keys), queries, heads=32, dim=32)
    operands = cuda.put((x.q, x.k, x.weights, x.k_scale))
    indices = jax.jit(
        lambda q, k, w, s: jax_fused_topk.index_topk(q, k, w, k_scale=s, implementation=cuda.name)
    )(*operands)
    assert indices.shape == (queries, keys)
    assert bool(jnp.all(indices == jnp.arange(keys)))


def test_a_large_flat_batch(cuda):
    batch, queries, keys = 4, 530, 500_000
    rng = np.random.default_rng(15)
    x = inputs.random(16, queries, keys, 32, 32, batch=(batch,))
    got = cuda.index_topk(x, 20)
    assert got.min() >= 0 and got.max() < keys
    for b, row in zip(range(batch), rng.integers(0, queries, batch), strict=True):
        one = inputs.Inputs(
            x.q[b, row : row + 1], x.k[b], x.weights[b, row : row + 1], x.k_scale[b]
        )
        oracles.assert_same(got[b, row], oracles.choose(cuda.index_scores(one), 20)[0][0])


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.float16])
@pytest.mark.parametrize(
    ("rows", "keys", "k"), [(64, 131_072, 2048), (3, 1 << 20, 65_536), (500, 5000, 5000), (1, 7, 7)]
)
def test_top_k(cuda, dtype, rows, keys, k):
    x = np.random.default_rng(17).standard_normal((rows, keys)).astype(dtype)
    for order in ("score", "index"):
        values, indices = cuda.top_k(x, k, order=order)
        some = np.unique(np.r_[0 : rows : max(rows // 8, 1), rows - 1])
        expected, expected_values = oracles.choose(x[some], k, order=order)
        oracles.assert_same(indices[some], expected, "indices")
        oracles.assert_same(values[some], expected_values, "values")


@pytest.mark.parametrize("name", inputs.ADVERSARIAL)
def test_top_k_around_short_rows(cuda, name):
    """Rows of up to a limit have code of their own, with room for fewer candidates."""
    most = _ffi.cuda_module().TOP_K_MAX_SHORT_KEYS
    for keys in (most - 1, most, most + 1):
        x = inputs.adversarial(name, keys)
        x = np.stack([x, -x, np.roll(x, 4099)])
        for k in (1, 2048, 4096):
            values, indices = cuda.top_k(x, k, order="index")
            expected, expected_values = oracles.choose(x, k)
            oracles.assert_same(indices, expected, "indices")
            oracles.assert_same(values, expected_values, "values")


def test_top_k_of_more_than_it_sorts(cuda):
    """Ascending indices have no limit on k; descending values past it are the reference's."""
    x = np.random.default_rng(18).standard_normal((2, 200_000)).astype(np.float32)
    k = 100_000
    values, indices = cuda.top_k(x, k, order="index")
    expected, expected_values = oracles.choose(x, k)
    oracles.assert_same(indices, expected)
    oracles.assert_same(values, expected_values)
    values, indices = jax_fused_topk.top_k(cuda.put(x), k)
    oracles.assert_same(indices, oracles.choose(x, k, order="score")[0])


@pytest.mark.parametrize(("heads", "dim", "topk"), [(4, 24, 64), (257, 16, 64), (4, 16, 5000)])
def test_outside_the_box(cuda, heads, dim, topk):
    """No kernel serves these: the same call, the same answer."""
    x = inputs.with_ranges(inputs.integer(19, 6, 6000, heads, dim), 20)
    operands = cuda.put(x._asdict())
    got = jax.jit(functools.partial(jax_fused_topk.index_topk, topk=topk))(**operands)
    exact, _ = oracles.scores64(x.q, x.k, x.weights, x.k_scale)
    expected, _ = oracles.choose(oracles.canonical(exact), topk, x.starts, x.ends)
    oracles.assert_same(got, expected)


def test_default_implementation_is_the_kernel(cuda):
    x = inputs.random(21, 20, 3000, 8, 64)
    operands = cuda.put((x.q, x.k, x.weights))
    f = jax.jit(functools.partial(jax_fused_topk.index_topk, topk=100))
    text = f.lower(*operands).compile().as_text()
    assert "jax_fused_topk_index_topk" in text
    oracles.assert_same(f(*operands), cuda.index_topk(x._replace(k_scale=None), 100))


# Concurrency and graphs


def test_two_threads_of_different_topk(cuda):
    calls = []
    for topk, keys, rows, heads, dim in ((16, 9000, 40, 2, 16), (2048, 40_000, 900, 32, 128)):
        scores = np.random.default_rng(topk).standard_normal(keys).astype(np.float32)
        x = inputs.dial(scores, rows, heads, dim)
        calls.append((x, topk, np.tile(oracles.choose(scores, topk)[0], (rows, 1))))

    def work(call):
        x, topk, expected = call
        for _ in range(100):
            oracles.assert_same(cuda.index_topk(x, topk), expected)
        return True

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        assert list(pool.map(work, calls)) == [True, True]


def test_many_calls_back_to_back(cuda):
    """All are under way before the first is looked at."""
    calls = []
    for queries in (1, 7, 16, 65, 300):
        scores = np.random.default_rng(queries).standard_normal(20_000).astype(np.float32)
        x = inputs.dial(scores, queries)
        f = jax.jit(
            functools.partial(jax_fused_topk.index_topk, topk=512, implementation=cuda.name)
        )
        operands = cuda.put({n: a for n, a in x._asdict().items() if a is not None})
        calls.append((f, operands, oracles.choose(scores, 512)[0]))
    results = [(f(**operands), expected) for _ in range(200) for f, operands, expected in calls]
    for got, expected in results:
        assert bool(jnp.all(got == expected))


BUSY = """
import sys, time, jax, jax.numpy as jnp
f = jax.jit(lambda a: jax.lax.fori_loop(0, 50, lambda _, b: (a @ b) * 1e-4, a))
a = jnp.ones((8192, 8192), jnp.bfloat16)
f(a).block_until_ready()
print("busy", flush=True)
end = time.monotonic() + 60
while time.monotonic() < end:
    f(a).block_until_ready()
"""


def test_repeats_beside_other_work(cuda):
    """100 runs while another process keeps the GPU busy with matrix products."""
    other = subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout.readline().strip() == "busy"
        scores = inputs.adversarial("zero_plateau", 16_384)
        x = inputs.dial(scores, 64)
        expected = np.tile(oracles.choose(scores, 2048)[0], (64, 1))
        for _ in range(100):
            oracles.assert_same(cuda.index_topk(x, 2048), expected)
        assert other.poll() is None, "the other work ended too early to matter"
    finally:
        other.kill()
        other.wait()


GRAPH = """
import glob, json, sys, tempfile
import jax, jax.numpy as jnp, numpy as np
import inputs, jax_fused_topk, oracles, runners

cuda = runners.Runner("cuda")
rows, keys, heads, dim = map(int, sys.argv[1:5])
kernels, topk = sys.argv[5:], 300

@jax.jit
def step(q, k, weights, k_scale, starts, ends):
    values, indices = jax_fused_topk.index_topk(
        q, k, weights, topk=topk, k_scale=k_scale, starts=starts, ends=ends,
        return_scores=True, implementation="cuda")
    scores = jax_fused_topk.index_scores(
        q, k, weights, k_scale=k_scale, starts=starts, ends=ends, implementation="cuda")
    again = jax_fused_topk.top_k(
        scores, topk, starts=starts, ends=ends, order="index", implementation="cuda")
    return values, indices, again

@jax.jit
def loop(trips, operands):
    def body(state):
        i, total = state
        return i + 1, total + step(*operands)[1]
    return jax.lax.while_loop(
        lambda s: s[0] < trips, body, (0, jnp.zeros((rows, topk), jnp.int32)))[1]

def make(seed):
    # Inputs and what is chosen.
    if keys <= 2000:
        x = inputs.with_ranges(inputs.integer(seed, rows, keys, heads, dim), seed)
        exact, _ = oracles.scores64(x.q, x.k, x.weights, x.k_scale)
        return x, *oracles.choose(oracles.canonical(exact), topk, x.starts, x.ends)
    scores = np.random.default_rng(seed).standard_normal(keys).astype(np.float32)
    starts, ends = np.full(rows, seed, np.int32), np.full(rows, keys - seed, np.int32)
    x = inputs.dial(scores, rows, heads, dim, starts=starts, ends=ends)
    chosen = oracles.choose(scores[None], topk, starts[:1], ends[:1])
    return x, *(np.tile(c, (rows, 1)) for c in chosen)

def check(seed):
    x, wanted, wanted_values = make(seed)
    operands = cuda.put(tuple(x))
    values, indices, again = step(*operands)
    oracles.assert_same(indices, wanted, "indices")
    oracles.assert_same(values, wanted_values, "scores")
    oracles.assert_same(again[1], wanted, "top_k")
    oracles.assert_same(again[0], wanted_values, "top_k's values")
    return operands, wanted

for seed in range(20):
    operands, wanted = check(seed)
    jnp.ones((100 + seed, 100)).sum().block_until_ready()  # other work and memory between
oracles.assert_same(loop(3, operands), 3 * wanted, "loop")
oracles.assert_same(loop(0, operands), 0 * wanted, "no trips")

with tempfile.TemporaryDirectory() as folder:
    with jax.profiler.trace(folder):
        check(3)
    (path,) = glob.glob(folder + "/**/*.xplane.pb", recursive=True)
    seen, graphs = set(), 0
    for plane in jax.profiler.ProfileData.from_file(path).planes:
        for line in plane.lines:
            for event in line.events:
                graphs += "graphlaunch" in event.name.lower()
                if plane.name.startswith("/device:GPU"):
                    graphs += any(n.startswith("cuda_graph") and v for n, v in event.stats)
                    seen |= {name for name in kernels if name in event.name}
print(json.dumps({"seen": sorted(seen), "graphs": graphs}))
"""


ANY_GPU = "index_topk_kernel index_scores_kernel top_k_filter_kernel"
HOPPER = "score_kernel threshold_kernel select_kernel top_k_filter_kernel"


@pytest.mark.parametrize("captured", [True, False])
@pytest.mark.parametrize(
    ("shape", "kernels"),
    [
        pytest.param("24 2000 8 64", ANY_GPU, id="2000"),
        pytest.param("24 40000 8 64", ANY_GPU, id="40000"),
        pytest.param("900 40000 64 128", HOPPER, id="hopper"),
        pytest.param("8 40000 64 128", "few_scores_kernel top_k_filter_kernel", id="few"),
    ],
)
def test_cuda_graph(cuda, shape, kernels, captured, tmp_path):
    """20 runs with changed inputs, captured into a graph and not: right each time."""
    # XLA runs without graphs while it profiles, unless told otherwise.
    flag = (
        "--xla_gpu_graph_min_graph_size=1 --xla_enable_command_buffers_during_profiling=true"
        if captured
        else "--xla_gpu_enable_command_buffer="
    )
    done = subprocess.run(
        [sys.executable, "-c", GRAPH, *shape.split(), *kernels.split()],
        env=os.environ
        | {
            "PYTHONPATH": os.pathsep.join(
                filter(
                    None, [os.path.dirname(os.path.abspath(__file__)), os.environ.get("PYTHONPATH")]
                )
            ),
            "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flag} --xla_dump_to={tmp_path}",
        },
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    # What tells of a graph: the profile (its kernels' statistics, or its launches), or
    # the command buffer among the thunks that XLA dumps.
    thunks = "".join(p.read_text() for p in tmp_path.glob("*thunk*"))
    if captured:
        assert told["graphs"] > 0 or "CommandBuffer" in thunks, (told, sorted(tmp_path.iterdir()))
    else:
        assert told["graphs"] == 0
        if cuda.device.compute_capability.startswith("9.") or kernels == ANY_GPU:
            assert told["seen"] == sorted(kernels.split()), "the profile shows other kernels"


def test_runs_after_every_kind_of_input(cuda):
    """No input leaves the context broken: arbitrary bytes in every operand, then a plain call."""
    rng = np.random.default_rng(22)
    for trial in range(20):
        x = inputs.random(trial, 19, 2003, 5, 48)
        words = {"q": np.uint8, "k": np.uint8, "weights": np.uint32, "k_scale": np.uint32}
        noise = {
            name: rng.integers(0, 2 ** (8 * np.dtype(word).itemsize), getattr(x, name).shape, word)
            .view(getattr(x, name).dtype)
            for name, word in words.items()
        }  # fmt: skip
        ranges = rng.integers(-(2**31), 2**31, (2, 19), np.int64).astype(np.int32)
        starts, ends = np.where(rng.random((2, 19)) < 0.5, ranges, ranges % 2500)
        x = x._replace(**noise, starts=starts, ends=ends)
        check_choice(cuda, x, 200)
    x = inputs.integer(23, 4, 500)
    oracles.assert_same(cuda.index_topk(x, 9), runners.Runner("cpu").index_topk(x, 9))
