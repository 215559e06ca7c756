"""The reference: the same functions under jax_fused_topk.reference, and its memory."""

import functools

import inputs
import jax
import jax.numpy as jnp
import jaxprs
import numpy as np
import oracles
import pytest

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
