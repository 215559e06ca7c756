"""The reference: the same functions under jax_fused_topk.reference, and its memory."""

import functools

import inputs
import jax
import jax.numpy as jnp
import jaxprs
import numpy as np
import oracles
import pytest

import jax_fused_topk
from jax_fused_topk import reference

GIB = 1 << 30


def shapes(queries, keys, heads, dim):
    """Abstract operands of a scored operation."""
    return (
        jax.ShapeDtypeStruct((queries, heads, dim), jnp.float8_e4m3fn),
        jax.ShapeDtypeStruct((keys, dim), jnp.float8_e4m3fn),
        jax.ShapeDtypeStruct((queries, heads), jnp.float32),
    )


def test_public_functions_are_the_forced_implementation():
    import runners

    runner = runners.Runner("reference")
    x = inputs.with_ranges(inputs.random(1, 20, 300), 2)
    device = jax.tree.map(jnp.asarray, runner.put(x._asdict()))
    for order in ("index", "score", "any"):
        got = reference.index_topk(**device, topk=30, order=order, return_scores=True)
        expected = runner.index_topk(x, 30, order, return_scores=True)
        oracles.assert_same(got[0], expected[0])
        oracles.assert_same(got[1], expected[1])
        oracles.assert_same(reference.index_topk(**device, topk=30, order=order), expected[1])
    scores = runner.index_scores(x)
    oracles.assert_same(reference.index_scores(**device), scores)
    got = reference.top_k(jnp.asarray(scores), 30, starts=device["starts"], ends=device["ends"])
    expected = runner.top_k(scores, 30, x.starts, x.ends)
    oracles.assert_same(got[0], expected[0])
    oracles.assert_same(got[1], expected[1])


@pytest.mark.parametrize("keys", [8191, 8192, 8193, 16_385])
@pytest.mark.parametrize("queries", [63, 65])
def test_blocks_join_without_a_seam(keys, queries):
    """Sizes around its row and key blocks, with ties that straddle them."""
    import runners

    scores = inputs.adversarial("eight_values", keys)
    x = inputs.with_ranges(inputs.dial(scores, queries), 3)
    expected, values = oracles.choose(np.tile(scores, (queries, 1)), 70, x.starts, x.ends, "score")
    got = runners.Runner("reference").index_topk(x, 70, "score", return_scores=True)
    oracles.assert_same(got[1], expected)
    oracles.assert_same(got[0], values)


@pytest.mark.parametrize("function", ["index_topk", "index_scores"])
def test_never_holds_queries_by_heads_by_keys(function):
    """No value of the traced program has [Q, H, N] elements, nor index_topk's [Q, N]."""
    queries, keys, heads, dim = 130, 20_000, 16, 8
    call = getattr(reference, function)
    if function == "index_topk":
        call = functools.partial(call, topk=100, return_scores=True)
    operands = shapes(queries, keys, heads, dim)
    biggest = max(jaxprs.value_sizes(jax.make_jaxpr(call)(*operands)))
    compiled = jax.jit(call).lower(*operands).compile()
    in_hlo = max(jaxprs.hlo_value_sizes(compiled.as_text()))
    # The keys, padded to whole blocks and widened a block at a time, are allowed.
    limit = max(keys * dim * 2, reference.ROW_BLOCK * reference.KEY_BLOCK * 2)
    if function == "index_scores":
        limit = max(limit, 2 * queries * keys)  # its result
        assert biggest >= queries * keys, "the measure does not see the result"
    assert limit < queries * heads * keys
    assert biggest <= limit
    assert in_hlo <= limit
    if function == "index_topk":
        assert limit < queries * keys


def test_memory_at_full_size():
    """At Q = 128, H = 64, N = 131072 a [Q, H, N] float32 would take 4 GiB."""
    operands = shapes(128, 131_072, 64, 128)
    for call in (functools.partial(reference.index_topk, topk=2048), reference.index_scores):
        analysis = jax.jit(call).lower(*operands).compile().memory_analysis()
        assert analysis.temp_size_in_bytes < 2 * GIB
        assert analysis.argument_size_in_bytes >= 128 * 64 * 128 + 131_072 * 128


# Derivatives: those of the public functions


def scored(dtype="bf16"):
    return inputs.with_ranges(inputs.random(1, 12, 90, 3, 16, dtype), 2)


def gradients(function, x, **options):
    """Of the chosen scores, in q, k, weights and k_scale."""

    def loss(q, k, weights, k_scale):
        scores, indices = function(
            q, k, weights, topk=20, k_scale=k_scale, starts=x.starts, ends=x.ends,
            return_scores=True, **options,
        )  # fmt: skip
        slopes = np.random.default_rng(3).standard_normal(scores.shape).astype(np.float32)
        return jnp.sum(jnp.where(indices < 0, 0, scores) * slopes)

    return jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))(x.q, x.k, x.weights, x.k_scale)


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_gradient_of_index_topk(dtype):
    x = scored(dtype)
    got = gradients(reference.index_topk, x)
    expected = gradients(jax_fused_topk.index_topk, x, implementation="reference")
    moving = [bool(np.any(np.asarray(g, np.float32))) for g in got]
    assert moving == [dtype == "bf16"] * 2 + [True] * 2
    for g, e in zip(got, expected, strict=True):
        oracles.assert_same(g, e)


def test_indices_have_no_gradient():
    x = scored()
    f = lambda w: jnp.sum(w[:, :1] * reference.index_topk(x.q, x.k, w, topk=5))  # noqa: E731
    gradient = np.asarray(jax.grad(f)(x.weights))
    indices = np.asarray(reference.index_topk(x.q, x.k, x.weights, topk=5))
    oracles.assert_same(gradient[:, 0], indices.sum(1).astype(np.float32))
    assert not np.any(gradient[:, 1:])


@pytest.mark.parametrize("order", ["score", "index"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_gradient_of_top_k(dtype, order):
    """The public function's, and zero where a row is short."""
    rng = np.random.default_rng(4)
    x = jnp.asarray(rng.standard_normal((3, 20)), dtype)
    slopes = jnp.asarray(rng.standard_normal((3, 6)), dtype)
    ends = np.int32([20, 4, 0])

    def gradient(function):
        def loss(x):
            values, indices = function(x, 6, ends=ends, order=order)
            return jnp.sum(jnp.where(indices < 0, 0, values * slopes)), indices

        return jax.jit(jax.grad(loss, has_aux=True))(x)

    got, indices = gradient(reference.top_k)
    oracles.assert_same(got, gradient(jax_fused_topk.top_k)[0])
    expected = np.zeros((3, 20), np.float32)
    for row, place in zip(*np.nonzero(np.asarray(indices) >= 0), strict=True):
        expected[row, indices[row, place]] = slopes[row, place]
    oracles.assert_same(np.asarray(got, np.float32), expected)


def test_gradient_of_index_scores():
    """Where a sum or a dot is 0 too: a dot of 0 has slope 0, a sum of 0 its terms' slopes."""
    x = inputs.integer(5, 8, 40, 3, 16, "bf16")
    x.weights[0] = 0
    operands = (x.q, x.k, x.weights, np.ones(40, np.float32))
    slopes = np.random.default_rng(6).integers(-4, 5, (8, 40)).astype(np.float32)

    def plain(q, k, weights, k_scale):
        dots = jnp.einsum("qhd,kd->qkh", q, k, preferred_element_type=jnp.float32)
        return jnp.einsum("qkh,qh->qk", jax.nn.relu(dots), weights) * k_scale

    def gradient(function):
        loss = lambda *operands: jnp.sum(function(*operands) * slopes)  # noqa: E731
        return jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))(*operands)

    def scores(q, k, weights, k_scale):
        return reference.index_scores(q, k, weights, k_scale=k_scale)

    assert np.any(np.asarray(jax.jit(scores)(*operands))[1:] == 0)
    got, expected = gradient(scores), gradient(plain)
    assert np.any(np.asarray(got[2])[0])
    for g, e in zip(got, expected, strict=True):
        assert np.any(np.asarray(g, np.float32))
        # Whole numbers: only bfloat16 gradients are rounded, sum by sum.
        tolerance = 2.0**-6 * np.abs(np.asarray(e, np.float32)).max() if g.dtype == x.q.dtype else 0
        np.testing.assert_allclose(
            np.asarray(g, np.float32), np.asarray(e, np.float32), rtol=0, atol=tolerance
        )


def test_float8_is_constant_to_index_scores():
    x = scored("fp8")
    f = lambda q, w: jnp.sum(reference.index_scores(q, x.k, w))  # noqa: E731
    of_q, of_weights = jax.grad(f, argnums=(0, 1))(jnp.asarray(x.q), x.weights)
    assert not np.any(np.asarray(of_q, np.float32)) and np.any(of_weights)


def test_flags_are_those_of_the_public_function():
    x = scored()
    message = "index_topk: return_scores must be True or False, known at trace time, got 'no'"
    for function in (reference.index_topk, jax_fused_topk.index_topk):
        with pytest.raises(TypeError, match=message):
            function(x.q, x.k, x.weights, topk=5, return_scores="no")
