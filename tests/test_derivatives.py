"""The gradient of the chosen scores, against plain jnp at the same indices."""

import functools
import re

import inputs
import jax
import jax.numpy as jnp
import jaxprs
import numpy as np
import oracles
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_fused_topk
from jax_fused_topk import derivatives, primitives

TOPK = 20
QUERIES, KEYS, HEADS, DIM = 12, 90, 3, 16
NAMES = ("q", "k", "weights", "k_scale")


@pytest.fixture(autouse=True)
def several_chunks(monkeypatch):
    """Five rows a chunk: the last chunk of 12 rows is padded."""
    monkeypatch.setattr(derivatives, "CHUNK_ELEMENTS", 5 * TOPK * (HEADS + DIM))


def make(dtype="bf16", batch=(), seed=1, kind=inputs.random):
    """Inputs with full, short, single-key and empty rows."""
    return inputs.with_ranges(kind(seed, QUERIES, KEYS, HEADS, DIM, dtype, batch), seed + 1)


def differentiable(x):
    return tuple(getattr(x, name) for name in NAMES)


def chooser(x, implementation="cpu", topk=TOPK, **options):
    """A function of q, k, weights and k_scale that returns (scores, indices)."""

    def run(q, k, weights, k_scale):
        return jax_fused_topk.index_topk(
            q, k, weights, topk=topk, k_scale=k_scale, starts=x.starts, ends=x.ends,
            return_scores=True, implementation=implementation, **options,
        )  # fmt: skip

    return run


def plain(q, k, weights, k_scale, indices):
    """The scores at given indices, 0 where there is none: no loops, no code of the package."""
    if k.ndim > 2:
        return jax.vmap(plain)(q, k, weights, k_scale, indices)
    keys = k[jnp.maximum(indices, 0)].astype(jnp.float32)  # [Q, K, D]
    dots = jnp.einsum("qhd,qkd->qkh", q.astype(jnp.float32), keys, precision="highest")
    sums = jnp.einsum("qkh,qh->qk", jax.nn.relu(dots), weights, precision="highest")
    return jnp.where(indices < 0, 0, sums * k_scale[jnp.maximum(indices, 0)])


@pytest.fixture(autouse=True)
def full_products():
    """On a GPU float32 products are TF32's unless JAX is told otherwise."""
    with jax.default_matmul_precision("highest"):
        yield


def factors(shape):
    """What a loss multiplies each score by: of both signs, exact in few bits."""
    return jnp.asarray(np.random.default_rng(7).integers(-4, 5, shape), jnp.float32)


def gradients(run, operands):
    """Of the sum of the scores times `factors`, in all four operands; and the indices."""

    def loss(*operands):
        scores, indices = run(*operands)
        used = jnp.where(indices < 0, 0, scores)
        return jnp.sum(used * factors(scores.shape)), indices

    return jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3), has_aux=True))(*operands)


def expected_gradients(operands, indices):
    """The same of `plain`, on float32 copies: nothing is rounded on the way."""
    wide = [jnp.asarray(np.asarray(a, np.float32)) for a in operands]
    return gradients(lambda *wide: (plain(*wide, indices), indices), wide)[0]


def assert_close(got, expected, name=""):
    """Within the rounding of got's dtype and of float32 sums."""
    got_32, expected = np.asarray(got, np.float32), np.asarray(expected, np.float32)
    assert np.isfinite(expected).all()
    rtol = 2.0**-7 if got.dtype == jnp.bfloat16 else 1e-5
    np.testing.assert_allclose(
        got_32, expected, rtol=rtol, atol=1e-5 * np.abs(expected).max(), err_msg=name
    )


@pytest.mark.parametrize(("batch", "order"), [((), "index"), ((2,), "score")], ids=str)
def test_gradient(implementation, batch, order):
    x = make(batch=batch)
    operands = implementation.put(differentiable(x))
    got, indices = gradients(chooser(x, implementation.name, order=order), operands)
    assert (np.asarray(indices) < 0).any(axis=-1).any() and (np.asarray(indices) >= 0).any()
    expected = expected_gradients(operands, indices)
    for name, operand, g, e in zip(NAMES, operands, got, expected, strict=True):
        assert (g.shape, g.dtype) == (operand.shape, operand.dtype), name
        assert np.any(np.asarray(e)), name
        assert_close(g, e, name)


def test_gradient_of_float8(implementation):
    """Weights and k_scale have gradients; q and k are constants."""
    x = make("fp8")
    operands = implementation.put(differentiable(x))
    got, indices = gradients(chooser(x, implementation.name), operands)
    expected = expected_gradients(operands, indices)
    for g, operand in zip(got[:2], operands[:2], strict=True):
        assert (g.shape, g.dtype) == (operand.shape, operand.dtype)
        assert not np.any(np.asarray(g, np.float32))
    for name, g, e in zip(NAMES[2:], got[2:], expected[2:], strict=True):
        assert_close(g, e, name)


def test_whole_numbers_exactly():
    """Every sum is exact, and a dot of 0 has slope 0, as jax.nn.relu's."""
    x = make(kind=inputs.integer)
    operands = differentiable(x)
    dots = np.einsum("qhd,kd->qkh", *(np.asarray(a, np.float64) for a in (x.q, x.k)))
    assert (dots == 0).any()
    got, indices = gradients(chooser(x), operands)
    for g, e in zip(got, expected_gradients(operands, indices), strict=True):
        oracles.assert_same(g, e.astype(g.dtype))


def test_scores_stay_what_they_are(implementation):
    """Bit for bit those of a call without derivatives, and -inf in the tail."""
    x = make()
    operands = implementation.put(differentiable(x))
    run = chooser(x, implementation.name)
    expected, expected_indices = jax.jit(run)(*operands)
    (scores, indices), _ = jax.jit(lambda *a: jax.jvp(run, a, a))(*operands)
    oracles.assert_same(scores, expected)
    oracles.assert_same(indices, expected_indices)
    assert np.isneginf(np.asarray(scores)[np.asarray(indices) < 0]).all()


@pytest.mark.parametrize("moving", [*((name,) for name in NAMES), NAMES], ids="+".join)
def test_tangents_alone_and_together(moving):
    x = make(seed=4)
    operands = tuple(jnp.asarray(a) for a in differentiable(x))
    rng = np.random.default_rng(5)
    tangents = tuple(jnp.asarray(rng.standard_normal(a.shape), a.dtype) for a in operands)
    at = [NAMES.index(name) for name in moving]

    def tangent(run, operands, tangents):
        def moved(*some):
            whole = list(operands)
            for i, value in zip(at, some, strict=True):
                whole[i] = value
            return run(*whole)

        return jax.jvp(moved, [operands[i] for i in at], [tangents[i] for i in at])[1]

    got, of_indices = tangent(chooser(x), operands, tangents)
    indices = chooser(x)(*operands)[1]
    wide = [[a.astype(jnp.float32) for a in arrays] for arrays in (operands, tangents)]
    expected = tangent(lambda *a: plain(*a, indices), *wide)
    assert_close(got, expected)
    assert not np.any(np.asarray(got)[np.asarray(indices) < 0])
    assert of_indices.dtype == jax.dtypes.float0


def test_operands_left_out():
    """No k_scale, no ranges: the other operands' gradients are those of a scale of 1."""
    x = inputs.random(6, QUERIES, KEYS, HEADS, DIM, "bf16")
    operands = (x.q, x.k, x.weights, np.ones(KEYS, np.float32))
    got, indices = gradients(
        lambda q, k, w, _: jax_fused_topk.index_topk(q, k, w, topk=TOPK, return_scores=True),
        operands,
    )
    expected = expected_gradients(operands, indices)
    for name, g, e in zip(NAMES[:3], got[:3], expected[:3], strict=True):
        assert_close(g, e, name)


def test_second_derivative():
    """Weights and k_scale meet in a product: the gradient has a gradient."""
    x = make()
    q, k, weights, k_scale = (jnp.asarray(a) for a in differentiable(x))
    indices = chooser(x)(q, k, weights, k_scale)[1]

    def mixed(run):
        def loss(weights, k_scale):
            scores = run(weights, k_scale)
            return jnp.sum(jnp.where(indices < 0, 0, scores) * factors(scores.shape))

        inner = jax.grad(loss)
        return jax.jit(jax.grad(lambda w, s: jnp.sum(jnp.sin(inner(w, s))), 1))(weights, k_scale)

    got = mixed(lambda w, s: chooser(x)(q, k, w, s)[0])
    assert_close(got, mixed(lambda w, s: plain(q, k, w, s, indices)))
    assert np.any(np.asarray(got))


@pytest.mark.parametrize("shared_keys", [False, True], ids=["own_keys", "shared_keys"])
def test_vmap(shared_keys):
    x = make(batch=(3,))
    if shared_keys:
        x = x._replace(k=x.k[0], k_scale=x.k_scale[0])
    keys = None if shared_keys else 0

    def loss(q, k, weights, k_scale, starts, ends):
        row_ranges = x._replace(starts=starts, ends=ends)
        scores, indices = chooser(row_ranges)(q, k, weights, k_scale)
        return jnp.sum(jnp.where(indices < 0, 0, scores) * factors(scores.shape))

    gradient = jax.grad(loss, argnums=(0, 1, 2, 3))
    mapped = jax.vmap(gradient, in_axes=(0, keys, 0, keys, 0, 0))
    operands = (*differentiable(x), x.starts, x.ends)
    assert len(jaxprs.our_equations(jax.make_jaxpr(mapped)(*operands))) == 1
    got = jax.jit(mapped)(*operands)
    alone = jax.jit(gradient)
    for entry in range(3):
        one = [a if shared_keys and i in (1, 3) else a[entry] for i, a in enumerate(operands)]
        for name, g, e in zip(NAMES, got, alone(*one), strict=True):
            assert_close(g[entry], e, name)


@pytest.mark.parametrize("wrong", ["key", "query"])
def test_nan_stays_with_its_key_and_query(wrong):
    """A NaN outside the ranges has no effect; a query's own NaN reaches no other query."""
    x = inputs.random(8, QUERIES, KEYS, HEADS, DIM, "bf16")
    x = x._replace(starts=np.zeros(QUERIES, np.int32), ends=np.full(QUERIES, 50, np.int32))
    clean, _ = gradients(chooser(x), differentiable(x))
    if wrong == "key":
        x.k[60] = np.nan
        x.k_scale[70] = np.nan
    else:
        x.weights[3] = np.nan
    got, _ = gradients(chooser(x), differentiable(x))
    rows = np.arange(QUERIES) != (3 if wrong == "query" else -1)
    for i in (0, 2):
        oracles.assert_same(np.asarray(got[i])[rows], np.asarray(clean[i])[rows])
    if wrong == "key":
        for i in (1, 3):
            oracles.assert_same(got[i], clean[i])


def test_tail_has_no_tangent_whatever_the_query():
    """Also where weights are NaN or infinite and 0 times them would not be 0."""
    x = make()
    operands = tuple(jnp.asarray(a) for a in differentiable(x))
    q, k, weights, k_scale = operands
    operands = (q, k, weights.at[1].set(jnp.nan).at[2].set(jnp.inf), k_scale)
    (_, indices), (tangent, _) = jax.jvp(chooser(x), operands, operands)
    tail = np.asarray(indices) < 0
    assert tail[1:3].any(axis=1).all()
    assert not np.any(np.asarray(tangent)[tail])


def test_the_primitive_alone_refuses():
    """Whoever binds it must lay the rule over its scores: no gradient is lost in silence."""
    q, k, weights, k_scale = (jnp.asarray(a) for a in differentiable(make()))
    starts, ends = jnp.zeros((1, QUERIES), jnp.int32), jnp.full((1, QUERIES), KEYS, jnp.int32)

    def loss(weights):
        scores, _ = primitives.index_topk_p.bind(
            q[None], k[None], weights[None], k_scale[None], starts, ends,
            topk=TOPK, order="index", return_scores=True, implementation=None,
        )  # fmt: skip
        return jnp.sum(scores)

    with pytest.raises(NotImplementedError, match=r"primitive.*differentiable_scores"):
        jax.grad(loss)(weights)


# Rematerialisation


POLICIES = {
    "indices": jax.checkpoint_policies.save_only_these_names("jax_fused_topk_indices"),
    "both": jax.checkpoint_policies.save_only_these_names(*jax_fused_topk.CHECKPOINT_NAMES),
}


@pytest.mark.parametrize(
    ("case", "policy", "kernels"),
    [
        # A loss linear in the scores needs their indices only, another needs them too.
        ("linear", None, 2),
        ("linear", "indices", 1),
        ("nonlinear", None, 2),
        ("nonlinear", "indices", 2),
        ("nonlinear", "both", 1),
        ("gathered", None, 2),
        ("gathered", "indices", 1),
    ],
)
def test_checkpoint_policies(case, policy, kernels):
    """The named results are kept, so that the kernel runs once; the gradient is the same."""
    x = make()
    q, *rest = (jnp.asarray(a) for a in differentiable(x))
    values = jnp.asarray(np.random.default_rng(9).standard_normal((KEYS, 4)), jnp.float32)

    def loss(q, k, weights, k_scale, values):
        if case == "gathered":
            indices = jax_fused_topk.index_topk(
                q, k, weights, topk=TOPK, k_scale=k_scale, starts=x.starts, ends=x.ends
            )
            return jnp.sum(jnp.sin(jax_fused_topk.gather_selected(values, indices)))
        scores, indices = chooser(x)(q, k, weights, k_scale)
        used = jnp.where(indices < 0, 0, scores)
        return jnp.sum(used * factors(scores.shape) if case == "linear" else jnp.sin(used))

    remat = jax.checkpoint(loss, policy=POLICIES.get(policy))
    operands = (q, *rest, values)
    gradient, gradient_of_remat = (jax.grad(f, argnums=(0, 1, 2, 3, 4)) for f in (loss, remat))
    assert len(jaxprs.our_equations(jax.make_jaxpr(gradient)(*operands))) == 1
    assert len(jaxprs.our_equations(jax.make_jaxpr(gradient_of_remat)(*operands))) == kernels
    if kernels == 1:
        text = jax.jit(gradient_of_remat).lower(*operands).compile().as_text()
        assert len(re.findall(r'custom_call_target="jax_fused_topk_index_topk_', text)) == 1
    got, expected = jax.jit(gradient_of_remat)(*operands), jax.jit(gradient)(*operands)
    for g, e in zip(got, expected, strict=True):
        assert_close(g, e)


def test_scan_over_checkpointed_layers_keeps_one_copy():
    """What a layer of a scan keeps is one [Q, K] of indices and one of scores."""
    x = make()
    q, k, weights, k_scale = (jnp.asarray(a) for a in differentiable(x))

    @functools.partial(jax.checkpoint, policy=POLICIES["both"])
    def layer(total, weights):
        scores, indices = chooser(x)(q, k, weights, k_scale)
        picked = jax_fused_topk.gather_selected(k_scale, indices)
        return total + jnp.sum(jnp.where(indices < 0, 0, jnp.sin(scores) * picked)), None

    def loss(weights):
        return jax.lax.scan(layer, jnp.float32(0), weights)[0]

    layers = jnp.stack([weights] * 3)
    jaxpr = jax.make_jaxpr(jax.grad(loss))(layers)
    assert len(jaxprs.our_equations(jaxpr)) == 1
    forward = next(e for e in jaxprs.equations(jaxpr) if e.primitive.name == "scan")
    kept = [v.aval for v in forward.outvars if v.aval.shape[-2:] == (QUERIES, TOPK)]
    assert sorted(a.dtype.name for a in kept) == ["float32", "int32"]


# Memory


def test_no_array_of_all_pairs_and_heads(monkeypatch):
    """Neither [Q, K, H] nor [Q, K, D] exists in the compiled gradient, only a chunk of it."""
    x = inputs.random(10, 256, 128, 16, 16, "bf16")

    def largest(chunk_elements):
        monkeypatch.setattr(derivatives, "CHUNK_ELEMENTS", chunk_elements)

        def loss(*operands):
            return jnp.sum(jnp.sin(chooser(x, topk=32)(*operands)[0]))

        gradient = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))
        text = gradient.lower(*differentiable(x)).compile().as_text()
        return max(jaxprs.hlo_value_sizes(text))

    q_size, pairs = 256 * 16 * 16, 256 * 32 * 16
    assert largest(8 * 32 * (16 + 16)) <= q_size < pairs
    # The search does see such an array where one chunk holds all rows.
    assert largest(1 << 24) >= pairs


def test_keys_gradient_adds_in_float32():
    """4096 rows add 1 to one key's gradient: bfloat16 sums would stop at 256."""
    rows = 4096
    q = jnp.zeros((rows, 1, 16), jnp.bfloat16).at[:, 0, 0].set(1)
    k = jnp.zeros((3, 16), jnp.bfloat16).at[1, 0].set(1)

    def loss(k):
        scores, _ = jax_fused_topk.index_topk(q, k, jnp.ones((rows, 1)), topk=1, return_scores=True)
        return jnp.sum(scores)

    gradient = np.asarray(jax.jit(jax.grad(loss))(k), np.float32)
    assert gradient[1, 0] == rows and np.count_nonzero(gradient) == 1


# Several devices and types


def test_shard_map_over_queries():
    """Keys' gradients add over the devices, rows' stay where they are."""
    mesh = Mesh(np.array(jax.devices("cpu")[:4]), ("x",))
    x = make(seed=11)
    specs = (P("x"), P(), P("x"), P(), P("x"), P("x"))

    def body(q, k, weights, k_scale, starts, ends):
        return chooser(x._replace(starts=starts, ends=ends))(q, k, weights, k_scale)

    mapped = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P("x"), check_vma=True)
    put = [
        jax.device_put(a, NamedSharding(mesh, s))
        for a, s in zip((*differentiable(x), x.starts, x.ends), specs, strict=True)
    ]
    got, indices = gradients(lambda *a: mapped(*a, *put[4:]), put[:4])
    expected, expected_indices = gradients(chooser(x), differentiable(x))
    oracles.assert_same(indices, expected_indices)
    for name, g, e in zip(NAMES, got, expected, strict=True):
        assert_close(g, e, name)


def test_x64_changes_nothing():
    x = make()
    expected, _ = gradients(chooser(x), differentiable(x))
    with jax.enable_x64(True):
        got, _ = gradients(chooser(x), differentiable(x))
    for g, e in zip(got, expected, strict=True):
        oracles.assert_same(g, e)


@pytest.mark.parametrize(("queries", "keys"), [(0, 5), (5, 0)])
def test_nothing_to_choose(queries, keys):
    x = inputs.random(12, queries, keys, HEADS, DIM, "bf16")
    got, indices = gradients(chooser(x), differentiable(x))
    assert np.all(np.asarray(indices) == -1)
    for g, operand in zip(got, differentiable(x), strict=True):
        assert g.shape == operand.shape and not np.any(np.asarray(g, np.float32))
