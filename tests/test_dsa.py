"""examples/dsa: the sparse attention block against plain numpy and against dense attention."""

import dataclasses
import json
import math

import dsa_attention
import jax
import jax.numpy as jnp
import jaxprs
import numpy as np
import oracles
import pytest
from dsa import attention, benchmark, block, indexer, layers
from dsa.config import DEEPSEEK_V32, SMALL

TOKENS = 96

init_params = jax.jit(block.init_params, static_argnums=1)
step = jax.jit(block.step, static_argnums=1)


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


@pytest.fixture(scope="module")
def params():
    return init_params(jax.random.key(0), SMALL)


@pytest.fixture(scope="module")
def x():
    return normal(1, TOKENS, SMALL.hidden)


@pytest.fixture(scope="module")
def out(params, x):
    """What one step over all tokens gives."""
    return step(params, SMALL, x, block.empty_cache(SMALL, TOKENS), 0)


# Layers


@pytest.mark.parametrize("dim", [1, 2, 64, 128])
def test_hadamard_is_the_matrix_of_signs(dim):
    x = np.asarray(normal(dim, 3, dim))
    signs = [[(-1) ** (i & j).bit_count() for j in range(dim)] for i in range(dim)]
    expected = x.astype(np.float64) @ np.array(signs) / math.sqrt(dim)
    np.testing.assert_allclose(layers.hadamard(x), expected, atol=1e-5)


def test_hadamard_keeps_dots_and_refuses_other_sizes():
    q, k = normal(1, 5, 32), normal(2, 7, 32)
    np.testing.assert_allclose(layers.hadamard(q) @ layers.hadamard(k).T, q @ k.T, atol=2e-5)
    with pytest.raises(ValueError, match="power of two, got 24"):
        layers.hadamard(jnp.ones((2, 24)))


def test_rope_turns_pairs_as_complex_numbers():
    x, positions = np.asarray(normal(3, 4, 2, 8)), np.int32([0, 1, 17, 1000])
    pairs = x[..., :4] + 1j * x[..., 4:]
    angles = positions[:, None] * 100.0 ** (-np.arange(4) / 4)
    turned = pairs * np.exp(1j * angles)[:, None]
    expected = np.concatenate([turned.real, turned.imag], -1)
    got = layers.rope(x, positions, 100.0)
    np.testing.assert_allclose(got, expected, atol=5e-4)  # an angle of 1000 has steps of 6e-5
    partial = layers.partial_rope(x, positions, 4, 100.0)
    oracles.assert_same(partial[..., 4:], x[..., 4:])
    oracles.assert_same(partial[..., :4], layers.rope(x[..., :4], positions, 100.0))


def test_norms():
    x = np.asarray(normal(4, 3, 16)) * 5 + 2
    scale, bias = np.linspace(1, 2, 16, dtype=np.float32), np.linspace(-1, 1, 16, dtype=np.float32)
    rms = x / np.sqrt((x**2).mean(-1, keepdims=True)) * scale
    np.testing.assert_allclose(layers.rms_norm(x, scale), rms, rtol=1e-5)
    normed = (x - x.mean(-1, keepdims=True)) / x.std(-1, keepdims=True) * scale + bias
    np.testing.assert_allclose(layers.layer_norm(x, scale, bias), normed, rtol=1e-5, atol=1e-5)


# Attention


def test_attention_over_chosen_keys(params):
    """Against float64 loops over the keys' and values' own form; -1 is no key."""
    config = dataclasses.replace(SMALL, topk=5)
    queries, keys = attention.QUERY_BLOCK + 3, 40
    q_nope = normal(6, queries, config.heads, config.nope_dim)
    q_rope = normal(7, queries, config.heads, config.rope_dim)
    latents = normal(8, keys, config.latent_dim)
    rng = np.random.default_rng(9)
    indices = np.stack([rng.permutation(keys)[:5] for _ in range(queries)]).astype(np.int32)
    indices[::3, 2:] = -1
    attend = jax.jit(attention.attend_selected, static_argnums=1)
    got = np.asarray(attend(params, config, q_nope, q_rope, latents, indices))

    latent, k_rope = np.split(np.asarray(latents, np.float64), [config.kv_rank], axis=1)
    k = np.einsum("nr,rhd->nhd", latent, params["k_up"])
    v = np.einsum("nr,rhd->nhd", latent, params["v_up"])
    for t, h in np.ndindex(queries, config.heads):
        chosen = indices[t][indices[t] >= 0]
        logits = (k[chosen, h] @ q_nope[t, h] + k_rope[chosen] @ q_rope[t, h]) / math.sqrt(24)
        shares = np.exp(logits) / np.exp(logits).sum()
        np.testing.assert_allclose(got[t, h], shares @ v[chosen, h], atol=2e-5)


def test_prefill_decode_and_dense_agree():
    results = dsa_attention.check()
    assert len(results) == 3
    for name, comparison in results.items():
        assert comparison.agrees, (name, comparison)


def test_fewer_keys_than_all_differ_from_dense(params, x, out):
    """What the comparison with dense attention sees when the choice matters."""
    dense = jax.jit(block.dense, static_argnums=1)(params, SMALL, x)
    comparison = dsa_attention.compare(out.y, dense)
    assert comparison.difference > 100 * dsa_attention.TOLERANCE and not comparison.agrees
    # The first rows have no more keys than they may choose.
    assert dsa_attention.compare(out.y[: SMALL.topk], dense[: SMALL.topk]).agrees


def test_a_later_token_has_no_effect(params, x, out):
    other = np.concatenate([x[:80], normal(99, 16, SMALL.hidden)])
    changed = step(params, SMALL, other, block.empty_cache(SMALL, TOKENS), 0)
    assert dsa_attention.compare(changed.y[:80], out.y[:80]).agrees
    assert not dsa_attention.compare(changed.y[80:], out.y[80:]).agrees
    assert np.all(np.asarray(out.indices).max(axis=1) <= np.arange(TOKENS))


def test_chunks_must_divide(params, x):
    with pytest.raises(ValueError, match="chunk must divide the number of tokens 96, got 36"):
        block.prefill(params, SMALL, x, block.empty_cache(SMALL, TOKENS), chunk=36)


def test_a_batch_by_vmap_is_one_call(params, x, out):
    cache = block.empty_cache(SMALL, TOKENS)
    batched = jax.jit(jax.vmap(lambda x: block.step(params, SMALL, x, cache, 0)))
    xs = np.stack([normal(10, *x.shape), x])
    assert len(jaxprs.our_equations(jax.make_jaxpr(batched)(xs))) == 1
    got = batched(xs)
    same = (got.indices[1] == out.indices).all(axis=1)
    assert dsa_attention.compare(got.y[1], out.y, same).agrees
    assert not dsa_attention.compare(got.y[0], out.y).agrees


# The indexer


POSITIONS = np.arange(TOKENS, dtype=np.int32)


@pytest.fixture(scope="module")
def latent_q(params, x):
    return block.project_queries(params, SMALL, x, POSITIONS).latent


@pytest.fixture(scope="module")
def queries(params, x, latent_q):
    return indexer.index_queries(params, SMALL, x, latent_q, POSITIONS)


def test_three_ways_to_choose(queries, out):
    keys = out.cache.index
    fused, unfused, plain = (
        np.asarray(jax.jit(choose, static_argnums=3)(queries, keys, POSITIONS + 1, SMALL.topk))
        for choose in (indexer.choose_fused, indexer.choose_unfused, indexer.choose_plain)
    )
    oracles.assert_same(unfused, fused)
    exact, _ = oracles.scores64(queries.q, keys.k, queries.weights, keys.scale)
    expected, _ = oracles.choose(exact, SMALL.topk, ends=POSITIONS + 1)
    # float32 and float64 differ where two scores are a rounding apart.
    for got in (fused, plain):
        assert benchmark.same_keys(got, expected) > 0.99
    assert np.all((plain >= 0).sum(1) == np.minimum(POSITIONS + 1, SMALL.topk))


def test_index_scores_follow_the_unquantised_formula(params, x, latent_q, queries, out):
    """FP8, Hadamard and folded scales together, against float64 without them."""
    keys, dim = out.cache.index, SMALL.index_dim
    got, _ = oracles.scores64(queries.q, keys.k, queries.weights, keys.scale)
    q = np.einsum("tr,rhd->thd", latent_q, params["index_q"])
    k = layers.layer_norm(x @ params["index_k"], jnp.ones(dim), jnp.zeros(dim))
    q, k = (layers.partial_rope(v, POSITIONS, SMALL.rope_dim, SMALL.rope_base) for v in (q, k))
    weights = x @ params["index_weights"] / math.sqrt(SMALL.index_heads * dim)
    expected, _ = oracles.scores64(q, k, weights)
    error = np.sqrt(((got - expected) ** 2).mean() / expected.var())
    assert 1e-4 < error < 0.05, error  # FP8 keeps 4 bits of each factor


def test_same_keys_counts_by_row():
    a, b = np.int32([[0, 1, 2], [4, 5, -1]]), np.int32([[2, 1, 9], [5, -1, -1]])
    assert benchmark.same_keys(a, b) == 3 / 4


# The script


def test_deepseek_dimensions():
    """The parameters of one layer's attention in the model's published configuration."""
    shapes = jax.eval_shape(lambda key: block.init_params(key, DEEPSEEK_V32), jax.random.key(0))
    index = sum(math.prod(s.shape) for name, s in shapes.items() if name.startswith("index"))
    total = sum(math.prod(s.shape) for s in shapes.values())
    assert index == 1536 * 64 * 128 + 7168 * 128 + 7168 * 64 + 2 * 128
    assert total - index == (
        7168 * 1536
        + 1536 * 128 * 192
        + 7168 * 576
        + 512 * 128 * 256
        + 128 * 128 * 7168
        + 1536
        + 512
    )


def test_script_checks(capsys):
    assert dsa_attention.main([]) == 0
    assert "all agree" in capsys.readouterr().out.splitlines()[-1]


def test_script_benchmarks(tmp_path, capsys):
    out = tmp_path / "model.jsonl"
    arguments = ["--benchmark", "--small", "--lengths", "48", "--chunk", "16"]
    arguments += ["--repeats", "2", "--prefill-repeats", "0", "--out", str(out)]
    assert dsa_attention.main(arguments) == 0
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(x["q"], x["n"], x["implementation"]) for x in lines] == [
        (16, 48, name) for name in benchmark.CHOICES
    ]
    assert len({x["run_id"] for x in lines}) == 1
    assert not any(name.startswith("prefill") for x in lines for name in x)
    for x in lines:
        assert len(x["block_ms_samples"]) == len(x["indexer_ms_samples"]) == 2
        assert x["block_ms"] > 0 and x["indexer_ms"] > 0
        assert x["measured_saving_ms"] == lines[0]["block_ms"] - x["block_ms"]
        assert x["predicted_saving_ms"] == lines[0]["indexer_ms"] - x["indexer_ms"]
        assert x["same_keys_as_index_topk"] > 0.9
    table = capsys.readouterr().out
    assert table.count("index_topk") == 1 and "the last 16 queries of a prefill" in table


def test_cases_for_the_benchmarks():
    """Every part and choice, at the last queries of the given lengths."""
    ((q, n, topk, calls),) = dsa_attention.benchmark_cases([(16, 40)], SMALL)
    assert (q, n, topk) == (16, 40, SMALL.topk)
    assert set(calls) == {f"{p} {c}" for p in ("block", "indexer") for c in benchmark.CHOICES}
    results = {name: jax.jit(f)(*arguments) for name, (f, arguments) in calls.items()}
    fused = np.asarray(results["indexer index_topk"])
    assert fused.shape == (16, SMALL.topk) and np.all(fused.max(axis=1) <= np.arange(24, 40))
    assert fused[-1].max() > 24  # the chunk's own keys stand in the cache
    assert benchmark.same_keys(results["block index_topk"].indices, fused) > 0.9


def test_script_refuses_the_models_dimensions_on_a_cpu(capsys, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    with pytest.raises(SystemExit) as exit_:
        dsa_attention.main(["--benchmark"])
    assert exit_.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert "needs a GPU" in last and "--small --lengths 1024 --chunk 256" in last
    # What it advises is taken.
    advised = last[last.index("try ") + 4 :].split()
    assert dsa_attention.parse_arguments(advised).small


def test_script_refuses_lengths_below_the_chunk(capsys):
    with pytest.raises(SystemExit):
        dsa_attention.main(["--benchmark", "--small", "--lengths", "8", "--chunk", "16"])
    assert "--lengths must be at least 16, got 8" in capsys.readouterr().err
