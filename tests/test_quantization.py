"""quantize_fp8 against numpy and ml_dtypes, and causal_ends."""

import inputs
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracles
import pytest

import jax_fused_topk

FP8_MAX = np.float32(448)
FLOOR = np.float32(2.0**-100)


@pytest.fixture(autouse=True)
def on_the_cpu():
    with jax.default_device(jax.devices("cpu")[0]):
        yield


def expected_scales(x, axis, scale):
    """Scales rounded as numpy's float32 arithmetic does."""
    scales = np.maximum(np.abs(x.astype(np.float32)).max(axis=axis), FLOOR) / FP8_MAX
    if scale == "power_of_two":
        mantissa, exponent = np.frexp(scales)
        scales = np.ldexp(np.float32(1), exponent - (mantissa == 0.5))
    return scales.astype(np.float32)


def check(x, values, scales, axis, scale):
    """Scales within one unit in the last place, values exact for the scales that came.

    XLA may multiply by the reciprocal of 448 where numpy divides; a power of two
    has no such freedom.
    """
    assert (values.dtype, scales.dtype) == (jnp.float8_e4m3fn, jnp.float32)
    expected, scales = expected_scales(x, axis, scale), np.asarray(scales)
    assert scales.shape == expected.shape
    ulps = scales.view(np.int32) - expected.view(np.int32)
    assert np.abs(ulps).max() <= (0 if scale == "power_of_two" else 1)
    quotient = x.astype(np.float32) / np.expand_dims(scales, axis)
    clipped = np.clip(quotient, -FP8_MAX, FP8_MAX).astype(ml_dtypes.float8_e4m3fn)
    oracles.assert_same(values, clipped, "values")


def vectors():
    """Vectors of many sizes: ordinary, tiny, huge, zero, one spike, exact powers of two."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal((40, 3, 32)).astype(np.float32)
    x *= np.ldexp(np.float32(1), np.arange(-60, 60, 3))[:, None, None]
    x[0] = 0
    x[1, 0] = np.finfo(np.float32).max
    x[1, 1] = -np.finfo(np.float32).max
    x[1, 2] = np.finfo(np.float32).tiny
    x[2] = 0
    x[2, :, 5] = [1e-45, 1.0, -3e38]
    x[3] = 448
    x[4, :, 0] = 448 * 2.0**30
    return x


@pytest.mark.parametrize("scale", ["float32", "power_of_two"])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16])
def test_is_numpys(scale, dtype):
    x = vectors()
    if dtype == np.float16:
        x = np.clip(x, -65504, 65504)
    elif dtype == ml_dtypes.bfloat16:
        x = np.clip(x, -3e38, 3e38)
    x = x.astype(dtype)
    values, scales = jax_fused_topk.quantize_fp8(jnp.asarray(x), scale=scale)
    check(x, values, scales, -1, scale)
    jitted = jax.jit(lambda x: jax_fused_topk.quantize_fp8(x, scale=scale))(x)
    check(x, *jitted, -1, scale)


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_axis(axis):
    x = np.random.default_rng(2).standard_normal((6, 5, 7)).astype(np.float32)
    check(x, *jax_fused_topk.quantize_fp8(jnp.asarray(x), axis=axis), axis, "float32")


@pytest.mark.parametrize("scale", ["float32", "power_of_two"])
def test_error_is_that_of_fp8(scale):
    """Half a unit in the last place of three bits, or of the smallest FP8 number."""
    x = vectors()
    values, scales = jax_fused_topk.quantize_fp8(jnp.asarray(x), scale=scale)
    wide = np.asarray(values).astype(np.float64)
    scales = np.asarray(scales)[..., None].astype(np.float64)
    # The quotient's own rounding adds 2**-24 of it.
    bound = np.maximum(np.abs(x) * (2.0**-4 + 2.0**-23), scales * 2.0**-10)
    assert np.all(np.abs(wide * scales - x) <= bound)
    # Each vector uses the top of the range: its largest element is near 448, or a
    # half of it at least where the scale was rounded up.
    largest = np.abs(wide).max(axis=-1)[np.abs(x).max(axis=-1) > 1e-20]
    assert np.all(largest >= (448 if scale == "float32" else 208))


def test_powers_of_two_are_exact_and_the_smallest_that_fit():
    x = vectors()
    _, scales = jax_fused_topk.quantize_fp8(jnp.asarray(x), scale="power_of_two")
    scales = np.asarray(scales).astype(np.float64)
    assert np.all(np.frexp(scales)[0] == 0.5)
    wanted = np.maximum(np.abs(x).max(axis=-1), FLOOR) / FP8_MAX
    assert np.all(scales >= wanted)
    assert np.all(scales / 2 < wanted)
    # Where 448 itself comes up, nothing is rounded.
    _, exact = jax_fused_topk.quantize_fp8(jnp.full((1, 4), 448.0 * 8), scale="power_of_two")
    assert exact[0] == 8


@pytest.mark.parametrize("scale", ["float32", "power_of_two"])
def test_finite_input_never_gives_a_nan(scale):
    """Every float16, and float32 of every exponent, beside the largest of their vectors."""
    half = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    single = np.arange(0, 1 << 32, 65_521, dtype=np.uint64).astype(np.uint32).view(np.float32)
    for x in (half[np.isfinite(half)], single[np.isfinite(single)]):
        for width in (1, 16):
            rows = x[: len(x) // width * width].reshape(-1, width)
            values, scales = jax_fused_topk.quantize_fp8(jnp.asarray(rows), scale=scale)
            assert not np.isnan(np.asarray(values).astype(np.float32)).any()
            scales = np.asarray(scales)
            assert np.isfinite(scales).all() and (scales > 0).all()


def test_a_plain_cast_does_give_nan_and_such_a_key_ranks_first(implementation):
    """JAX's own cast turns 500 into NaN; a key that holds it comes first, as NaN scores do."""
    x = inputs.random(3, 2, 20, 2, 16)
    k = x.k.astype(np.float32)
    k[3, 4] = 500
    cast = np.asarray(jnp.asarray(k).astype(jnp.float8_e4m3fn))
    assert np.isnan(cast[3, 4].astype(np.float32))
    got = implementation.index_topk(x._replace(k=cast), 5, "score")
    assert np.all(got[:, 0] == 3)
    clipped, scales = jax_fused_topk.quantize_fp8(jnp.asarray(k))
    scores = implementation.index_scores(
        x._replace(k=np.asarray(clipped), k_scale=np.asarray(scales))
    )
    assert np.isfinite(scores).all()


def test_pipeline_from_float32(implementation):
    """Quantised inputs find nearly what float32 scores find, within FP8's error."""
    rng = np.random.default_rng(4)
    q = rng.standard_normal((8, 4, 64)).astype(np.float32)
    k = rng.standard_normal((600, 64)).astype(np.float32)
    weights = rng.uniform(0.1, 1, (8, 4)).astype(np.float32)
    exact, size = oracles.scores64(q, k, weights)
    q8, q_scale = jax_fused_topk.quantize_fp8(jnp.asarray(q))
    k8, k_scale = jax_fused_topk.quantize_fp8(jnp.asarray(k))
    x = inputs.Inputs(
        np.asarray(q8), np.asarray(k8), weights * np.asarray(q_scale), np.asarray(k_scale)
    )
    error = np.abs(implementation.index_scores(x) - exact)
    # Two elements of relative error 2**-4 (and tiny absolute ones): 2 * 2**-4 + 2**-8.
    assert np.all(error <= size * (2 * 2.0**-4 + 2.0**-7))
    assert np.median(error / size) < 2.0**-6


def test_errors():
    with pytest.raises(TypeError, match=r"^quantize_fp8: x must be floating point, got int32"):
        jax_fused_topk.quantize_fp8(jnp.arange(4))
    with pytest.raises(ValueError, match=r"^quantize_fp8: scale must be .* got 'ue8m0'"):
        jax_fused_topk.quantize_fp8(jnp.ones(4), scale="ue8m0")


@pytest.mark.parametrize(
    ("x", "axis", "error", "message"),
    [
        (None, -1, TypeError, "x must be an array, got NoneType"),
        (1.5, -1, ValueError, r"x must have at least one dimension, got \[\]"),
        (np.ones((2, 3)), 2, ValueError,
         r"axis must be from -2 to 1 as x has shape \[2, 3\], got 2"),
        (np.ones((2, 3)), -3, ValueError, r"axis must be from -2 to 1 .*, got -3"),
        (np.ones((2, 3)), None, TypeError, "axis must be a Python int, got None"),
        (np.ones((2, 3)), (0, 1), TypeError, r"axis must be a Python int, got \(0, 1\)"),
        (np.ones((2, 0)), -1, ValueError,
         r"x must have at least one element along axis -1, got shape \[2, 0\]"),
    ],
)  # fmt: skip
def test_errors_of_axes(x, axis, error, message):
    with pytest.raises(error, match=f"^quantize_fp8: {message}"):
        jax_fused_topk.quantize_fp8(x, axis=axis)


def test_no_vectors_to_quantise():
    values, scales = jax_fused_topk.quantize_fp8(jnp.ones((0, 3)))
    assert (values.shape, scales.shape) == ((0, 3), (0,))


@pytest.mark.parametrize("scale", ["float32", "power_of_two"])
def test_both_results_are_constants(scale):
    """Neither values nor scales carry a gradient: x's is 0, whatever is made of them."""
    x = np.random.default_rng(6).standard_normal((5, 8)).astype(np.float32)

    def dequantised(x):
        values, scales = jax_fused_topk.quantize_fp8(x, scale=scale)
        return values.astype(jnp.float32) * scales[:, None]

    got, tangent = jax.jvp(dequantised, (x,), (np.ones_like(x),))
    assert np.abs(got - x).max() < 0.2
    assert not np.any(tangent)
    assert not np.any(jax.grad(lambda x: jnp.sum(x * dequantised(x)))(x) - dequantised(x))


def test_scales_folded_into_weights_train_the_weights_alone():
    """README's example: q, quantised, gets no gradient through weights * q_scale."""
    rng = np.random.default_rng(7)
    q, k, weights = (
        jnp.asarray(rng.standard_normal(shape), jnp.float32)
        for shape in ((4, 2, 16), (9, 16), (4, 2))
    )

    def loss(q, k, weights):
        q8, q_scale = jax_fused_topk.quantize_fp8(q)
        k8, k_scale = jax_fused_topk.quantize_fp8(k)
        scores, _ = jax_fused_topk.index_topk(
            q8, k8, weights * q_scale, topk=5, k_scale=k_scale, return_scores=True
        )
        return jnp.sum(scores)

    of_q, of_k, of_weights = jax.grad(loss, argnums=(0, 1, 2))(q, k, weights)
    assert not np.any(of_q) and not np.any(of_k)
    # The scores are linear in the weights, so long as the choice stays.
    np.testing.assert_allclose(jnp.vdot(of_weights, weights), loss(q, k, weights), rtol=1e-5)


def test_scaling_all_keys_alike_keeps_the_choice(implementation):
    x = inputs.random(5, 6, 400)
    scaled = x._replace(k_scale=x.k_scale * 8)
    values, indices = implementation.index_topk(x, 50, return_scores=True)
    scaled_values, scaled_indices = implementation.index_topk(scaled, 50, return_scores=True)
    oracles.assert_same(scaled_indices, indices)
    oracles.assert_same(scaled_values, values * 8)


# causal_ends


@pytest.mark.parametrize(
    ("queries", "keys", "expected"),
    [
        (3, 3, [1, 2, 3]),
        (3, 10, [8, 9, 10]),
        (1, 1, [1]),
        (4, 2, [0, 0, 1, 2]),  # queries before the first key see none
        (0, 5, []),
        (2, 0, [0, 0]),
    ],
)
def test_causal_ends(queries, keys, expected):
    oracles.assert_same(jax_fused_topk.causal_ends(queries, keys), np.int32(expected))


def test_causal_ends_rejects_negative_counts():
    with pytest.raises(ValueError, match="causal_ends: num_queries must be at least 0, got -1"):
        jax_fused_topk.causal_ends(-1, 5)
    with pytest.raises(ValueError, match="causal_ends: num_keys must be at least 0, got -2"):
        jax_fused_topk.causal_ends(3, -2)


def test_causal_rows_shorter_than_topk(implementation):
    """100 causal rows of 100 keys with K = 2048: row t holds 0 .. t, then -1."""
    x = inputs.random(6, 100, 100)._replace(ends=np.asarray(jax_fused_topk.causal_ends(100, 100)))
    expected = np.full((100, 2048), -1, np.int32)
    for row in range(100):
        expected[row, : row + 1] = np.arange(row + 1)
    oracles.assert_same(implementation.index_topk(x, 2048), expected)


@pytest.mark.parametrize("scale", ["float32", "power_of_two"])
def test_float64_beyond_float32_gives_no_nan(scale):
    with jax.enable_x64(True):
        values, scales = jax_fused_topk.quantize_fp8(
            jnp.array([1e300, -1e300, 1.0], jnp.float64), scale=scale
        )
    assert np.isfinite(np.asarray(scales))
    got = np.asarray(values).astype(np.float32)
    assert got[0] == -got[1] > 200 and got[2] == 0


def test_host_float64_beyond_float32_gives_no_nan():
    """Without x64, JAX would narrow it to an infinity first."""
    for x in (np.array([1.0, 1e300]), [1.0, 1e39]):
        values, scales = jax_fused_topk.quantize_fp8(x)
        assert np.isfinite(np.asarray(values).astype(np.float32)).all()
        assert np.isfinite(np.asarray(scales))
