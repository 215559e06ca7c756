"""top_k against jax.lax.top_k on a CPU, bit for bit, and against the numpy oracle with ranges."""

import functools

import inputs
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracles
import pytest

import jax_fused_topk

DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


def any_bits(seed, dtype, rows, keys, payloads=False):
    """Arbitrary bit patterns, and many equal values.

    XLA on a CPU rounds bfloat16 from float32, which leaves one NaN of each sign, in
    lax.top_k too: unless `payloads`, bfloat16 has no other NaN.
    """
    rng = np.random.default_rng(seed)
    dtype = np.dtype(dtype)
    unsigned = np.dtype(f"uint{8 * dtype.itemsize}")
    x = rng.integers(0, 2 ** (8 * dtype.itemsize), (rows, keys), dtype=unsigned).view(dtype)
    if dtype == ml_dtypes.bfloat16 and not payloads:
        is_nan = (x.view(unsigned) & 0x7FFF) > 0x7F80
        x = np.where(is_nan, (x.view(unsigned) & 0x8000) | 0x7FC0, x.view(unsigned)).view(dtype)
    ties = rng.choice(np.array([0.0, -0.0, 1.5, -2.0, np.inf, -np.inf, np.nan, -np.nan]), x.shape)
    return np.where(rng.random(x.shape) < 0.5, x, ties.astype(dtype))


@functools.partial(jax.jit, static_argnums=1)
def _lax_top_k(x, k):
    return jax.lax.top_k(x, k)


def lax_top_k(x, k):
    """lax.top_k on a CPU, whose total order the contract follows."""
    with jax.default_device(jax.devices("cpu")[0]):
        return [np.asarray(a) for a in _lax_top_k(x, k)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [0, 1, 7, 128, 332, 333])
def test_is_lax_top_k(implementation, dtype, k):
    x = any_bits(1, DTYPES[dtype], 5, 333)
    values, indices = implementation.top_k(x, k)
    expected_values, expected = lax_top_k(x, k)
    oracles.assert_same(indices, expected, "indices")
    oracles.assert_same(values, expected_values, "values")
    if k:
        oracles.assert_same(oracles.choose(x, k, order="score")[0], expected, "the numpy oracle")


@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels_keep_every_bit(kernel, dtype):
    """NaN of every payload, in total order and unchanged."""
    x = any_bits(9, DTYPES[dtype], 3, 60_000, payloads=True)
    expected, expected_values = oracles.choose(x, 5000, order="score")
    values, indices = kernel.top_k(x, 5000)
    oracles.assert_same(indices, expected, "indices")
    oracles.assert_same(values, expected_values, "values")


@pytest.mark.parametrize("keys", [1, 2, 31, 64, 513, 4097, 20_011])
def test_row_lengths(implementation, keys):
    x = any_bits(2, np.float32, 3, keys)
    k = min(keys, 300)
    expected, expected_values = oracles.choose(x, k, order="score")
    values, indices = implementation.top_k(x, k)
    oracles.assert_same(indices, expected, "indices")
    oracles.assert_same(values, expected_values, "values")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", ["index", "score", "any"])
def test_ranges_and_orders(implementation, dtype, order):
    keys, k = 500, 60
    x = any_bits(3, DTYPES[dtype], 64, keys)
    ranged = inputs.with_ranges(inputs.random(0, 64, keys, 1, 16), 4)
    values, indices = implementation.top_k(x, k, ranged.starts, ranged.ends, order)
    expected, expected_values = oracles.choose(x, k, ranged.starts, ranged.ends, order)
    if order == "any":
        place = np.argsort(indices.view(np.uint32), axis=1)
        indices = np.take_along_axis(indices, place, 1)
        values = np.take_along_axis(values, place, 1)
    oracles.assert_same(indices, expected, "indices")
    oracles.assert_same(values, expected_values, "values")


@pytest.mark.parametrize("name", inputs.ADVERSARIAL)
def test_adversarial(implementation, name):
    scores = inputs.adversarial(name, 20_011)
    with np.errstate(invalid="ignore"):
        x = np.stack([scores, -scores])
    expected, expected_values = oracles.choose(x, 2048, order="score")
    values, indices = implementation.top_k(x, 2048)
    oracles.assert_same(indices, expected, "indices")
    oracles.assert_same(values, expected_values, "values")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [1, 700, 4096])
def test_few_long_rows(kernel, dtype, k):
    """Rows that are cut into parts: arbitrary, a sorted one, few values, one value, a plateau."""
    keys = 150_001
    rng = np.random.default_rng(8)
    x = any_bits(8, DTYPES[dtype], 5, keys)
    x[1] = np.linspace(-1, 1, keys).astype(x.dtype)
    x[2] = rng.integers(0, 8, keys).astype(x.dtype)
    x[3] = 1
    x[4] = np.where(rng.random(keys) < 300 / keys, rng.uniform(1, 2, keys), 0).astype(x.dtype)
    starts = np.array([0, 3, 0, 1, 77_777], np.int32)
    ends = np.array([keys, keys, keys - 5, keys, keys], np.int32)
    for order in ("index", "score"):
        values, indices = kernel.top_k(x, k, starts, ends, order)
        expected, expected_values = oracles.choose(x, k, starts, ends, order)
        oracles.assert_same(indices, expected, "indices")
        oracles.assert_same(values, expected_values, "values")


@pytest.mark.parametrize("shape", [(9,), (2, 3, 9), (0, 9), (3, 0), (2, 0, 9)])
def test_last_axis_of_any_rank(implementation, shape):
    x = np.random.default_rng(5).standard_normal(shape).astype(np.float32)
    k = min(4, shape[-1])
    expected, expected_values = oracles.choose(x, k, order="score")
    values, indices = implementation.top_k(x, k)
    oracles.assert_same(indices, expected, "indices")
    oracles.assert_same(values, expected_values, "values")


def test_prefix_property_and_row_alone(implementation):
    """The first 5 of 50 are the 5, and a row in a batch is the row alone."""
    x = np.random.default_rng(6).integers(0, 9, (7, 1000)).astype(np.float32)
    _, fifty = implementation.top_k(x, 50)
    _, five = implementation.top_k(x, 5)
    oracles.assert_same(five, fifty[:, :5].copy())
    for row in range(0, 7, 3):
        _, alone = implementation.top_k(x[row], 50)
        oracles.assert_same(alone, fifty[row])


def test_is_a_drop_in_for_lax_top_k():
    """Positional k, a list of two results, the same dtypes and shapes."""
    x = jnp.asarray(np.random.default_rng(7).standard_normal((4, 50)), jnp.bfloat16)
    values, indices = jax_fused_topk.top_k(x, 3)
    expected = jax.lax.top_k(x, 3)
    assert (values.dtype, indices.dtype) == (expected[0].dtype, expected[1].dtype)
    assert values.shape == indices.shape == (4, 3)
    if jax.default_backend() == "cpu":
        oracles.assert_same(indices, expected[1])


def test_gradient_is_lax_top_ks(implementation):
    rng = np.random.default_rng(8)
    x = rng.permutation(60).reshape(3, 20).astype(np.float32)
    weights = rng.standard_normal((3, 5)).astype(np.float32)
    x, weights = implementation.put((x, weights))

    def loss(top_k, x):
        values, indices = top_k(x)
        return jnp.sum(weights * values**2) + 0.0 * jnp.sum(indices)

    ours = functools.partial(jax_fused_topk.top_k, k=5, implementation=implementation.name)
    theirs = functools.partial(jax.lax.top_k, k=5)
    got = jax.jit(jax.grad(functools.partial(loss, ours)))(x)
    expected = jax.jit(jax.grad(functools.partial(loss, theirs)))(x)
    oracles.assert_same(got, expected)
    assert np.count_nonzero(np.asarray(got)) >= 14  # a value may be zero

    tangent = implementation.put(rng.standard_normal((3, 20)).astype(np.float32))
    got = jax.jvp(lambda x: ours(x)[0], (x,), (tangent,))
    expected = jax.jvp(lambda x: theirs(x)[0], (x,), (tangent,))
    oracles.assert_same(got[1], expected[1])

    batched = jax.vmap(jax.grad(lambda x: jnp.sum(ours(x)[0] ** 3)))(x)
    expected = jax.vmap(jax.grad(lambda x: jnp.sum(theirs(x)[0] ** 3)))(x)
    oracles.assert_same(batched, expected)

    twice = jax.hessian(lambda x: jnp.sum(ours(x)[0] ** 3))(x[0])
    expected = jax.hessian(lambda x: jnp.sum(theirs(x)[0] ** 3))(x[0])
    oracles.assert_same(twice, expected)


@pytest.mark.parametrize("order", ["index", "score"])
def test_gradient_past_a_short_row_is_zero(implementation, order):
    x = implementation.put(np.float32([[5, 1, 4, 2, 3], [1, 2, 3, 4, 5]]))
    starts, ends = implementation.put((np.int32([1, 4]), np.int32([3, 2])))

    def loss(x):
        values, indices = jax_fused_topk.top_k(
            x, 4, starts=starts, ends=ends, order=order, implementation=implementation.name
        )
        return jnp.sum(jnp.where(indices < 0, 0, values * 10))

    oracles.assert_same(jax.grad(loss)(x), np.float32([[0, 10, 10, 0, 0], [0] * 5]))


def test_lax_top_k_puts_nan_first():
    """The rule that the package follows, as JAX's CPU has it."""
    values, indices = lax_top_k(np.float32([np.nan, -np.inf, np.inf, 0]), 3)
    assert list(indices) == [0, 2, 3]
    assert np.isnan(values[0])


@pytest.mark.parametrize("k", [1, 37, 2048])
def test_every_length(kernel, k):
    """Rows of 1, 2, ... 5000 valid keys, at offsets that cover every alignment."""
    longest = 5000 if kernel.name == "cuda" else 600
    lengths = np.arange(1, longest + 1, dtype=np.int32)
    x = any_bits(9, np.float32, 1, longest + 8)[0]
    x = np.broadcast_to(x, (longest, longest + 8))
    starts = lengths % 8
    k = min(k, longest)
    for order in ("index", "score"):
        values, indices = kernel.top_k(x, k, starts, starts + lengths, order)
        expected, expected_values = oracles.choose(x, k, starts, starts + lengths, order)
        oracles.assert_same(indices, expected, "indices")
        oracles.assert_same(values, expected_values, "values")


@pytest.mark.gpu
@pytest.mark.parametrize("keys", [1, 2, 3, 5, 31, 33, 127, 1000, 1025, 2047, 2049, 4097, 5000])
def test_cuda_is_lax_top_k_at_every_size(cuda, keys):
    x = any_bits(keys, np.float32, 9, keys)
    for k in sorted({1, keys // 2, keys - 1, keys} - {0}):
        values, indices = cuda.top_k(x, k)
        expected_values, expected = lax_top_k(x, k)
        oracles.assert_same(indices, expected, "indices")
        oracles.assert_same(values, expected_values, "values")


@pytest.mark.parametrize("axis", [0, 1, -2, 3])
def test_only_the_last_axis(axis):
    message = rf"top_k: axis must be the last one, -1 or 2; move it there .*, got {axis}"
    with pytest.raises(ValueError, match=message):
        jax_fused_topk.top_k(jnp.zeros((2, 3, 4)), 2, axis=axis)


def test_parameters_have_the_names_of_lax_top_k():
    """Of `operand` and `k`, in this order, here and in the reference."""
    x = jnp.arange(12.0).reshape(3, 4)
    expected = jax.lax.top_k(operand=x, k=2)
    for function in (jax_fused_topk.top_k, jax_fused_topk.reference.top_k):
        for got in (function(operand=x, k=2), function(x, 2)):
            for g, e in zip(got, expected, strict=True):
                oracles.assert_same(g, e)


def test_the_last_axis_by_number():
    x = jnp.arange(24.0).reshape(2, 3, 4)
    for axis in (-1, 2):
        values, indices = jax_fused_topk.top_k(x, 2, axis=axis)
        expected_values, expected = jax.lax.top_k(x, 2)
        oracles.assert_same(values, expected_values)
        oracles.assert_same(indices, expected)
