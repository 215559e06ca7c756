"""jit, vmap, scan, shard_map, checkpoint, derivatives and x64 around the operations."""

import functools

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

TOPK = 20


@pytest.fixture
def x():
    """A batch of three sets of queries, keys and ranges, with whole-number scores."""
    return inputs.with_ranges(inputs.integer(1, 6, 130, heads=3, dim=16, batch=(3,)), 2)


def operation(name, implementation):
    """A positional function of Inputs' fields that returns a list of arrays."""
    if name == "index_topk":
        call = functools.partial(
            jax_fused_topk.index_topk, topk=TOPK, order="score", return_scores=True
        )
    else:
        call = jax_fused_topk.index_scores

    def run(q, k, weights, k_scale, starts, ends):
        out = call(
            q, k, weights, k_scale=k_scale, starts=starts, ends=ends,
            implementation=implementation.name,
        )  # fmt: skip
        return jax.tree.leaves(out)

    return run


def assert_one_bind(f, operands, expected_q=None, expected_k=None):
    """One equation of the package and no loop: nothing is called once per entry."""
    jaxpr = jax.make_jaxpr(f)(*operands)
    names = jaxprs.primitive_names(jaxpr)
    assert "scan" not in names and "while" not in names
    (ours,) = jaxprs.our_equations(jaxpr)
    if expected_q:
        assert ours.invars[0].aval.shape == expected_q
        assert ours.invars[1].aval.shape == expected_k


MAPS = {
    # Mapped fields, and the shapes of q and k that must reach the primitive: queries
    # that share their keys become more queries, others more batch entries.
    "q": (("q", "weights", "starts", "ends"), (1, 18, 3, 16), (1, 130, 16)),
    "q_alone": (("q",), (1, 18, 3, 16), (1, 130, 16)),
    "ends_alone": (("ends",), (1, 18, 3, 16), (1, 130, 16)),
    "k": (("k", "k_scale"), (3, 6, 3, 16), (3, 130, 16)),
    "k_scale_alone": (("k_scale",), (3, 6, 3, 16), (3, 130, 16)),
    "both": (inputs.Inputs._fields, (3, 6, 3, 16), (3, 130, 16)),
}


@pytest.mark.parametrize("name", ["index_topk", "index_scores"])
@pytest.mark.parametrize("mapped", MAPS)
def test_vmap(implementation, x, name, mapped):
    fields, q_shape, k_shape = MAPS[mapped]
    run = operation(name, implementation)
    axes = tuple(0 if f in fields else None for f in x._fields)
    operands = implementation.put(
        tuple(a if axis == 0 else a[0] for a, axis in zip(x, axes, strict=True))
    )
    batched = jax.vmap(run, in_axes=axes)
    assert_one_bind(batched, operands, q_shape, k_shape)
    got = jax.jit(batched)(*operands)
    alone = jax.jit(run)
    for entry in range(3):
        expected = alone(
            *(a[entry] if axis == 0 else a for a, axis in zip(operands, axes, strict=True))
        )
        for g, e in zip(got, expected, strict=True):
            oracles.assert_same(g[entry], e, f"entry {entry}")


def test_vmap_of_other_axes_and_nested(implementation, x):
    run = operation("index_topk", implementation)
    operands = implementation.put(tuple(x))
    expected = jax.jit(jax.vmap(run))(*operands)
    moved = [jnp.moveaxis(a, 0, a.ndim - 1) for a in operands]
    last = jax.vmap(run, in_axes=tuple(a.ndim - 1 for a in operands), out_axes=-1)
    assert_one_bind(last, moved)
    for g, e in zip(jax.jit(last)(*moved), expected, strict=True):
        oracles.assert_same(np.moveaxis(np.asarray(g), -1, 0), e)

    # Keys over the outer axis, queries over both.
    q, k, weights, k_scale, starts, ends = operands
    pairs = [jnp.stack([a, a[::-1]]) for a in (q, weights, starts, ends)]
    inner = jax.vmap(run, in_axes=(0, None, 0, None, 0, 0))
    nested = jax.vmap(inner, in_axes=(0, 0, 0, 0, 0, 0))
    two = (pairs[0], k[:2], pairs[1], k_scale[:2], pairs[2], pairs[3])
    assert_one_bind(nested, two, (2, 18, 3, 16), (2, 130, 16))
    got = jax.jit(nested)(*two)
    one = jax.jit(run)(pairs[0][1, 2], k[1], pairs[1][1, 2], k_scale[1], pairs[2][1, 2],
                       pairs[3][1, 2])  # fmt: skip
    for g, e in zip(got, one, strict=True):
        oracles.assert_same(g[1, 2], e)


def test_vmap_with_no_scale_and_no_ranges(implementation):
    """Absent operands stay absent for the caller: bfloat16 without scales."""
    x = inputs.integer(3, 6, 130, heads=3, dim=16, dtype="bf16", batch=(3,))
    run = functools.partial(
        jax_fused_topk.index_topk, topk=TOPK, implementation=implementation.name
    )
    q, k, weights = implementation.put((x.q, x.k, x.weights))
    assert_one_bind(jax.vmap(run), (q, k, weights))
    got = jax.vmap(run)(q, k, weights)
    oracles.assert_same(got, run(q, k, weights))


def test_vmap_keeps_batch_entries_apart(implementation):
    """Huge scores of one entry's keys stay with that entry."""
    x = inputs.random(4, 5, 100, batch=(3,))
    x.k_scale[1, :10] = 1e30
    run = functools.partial(
        jax_fused_topk.index_topk, topk=TOPK, implementation=implementation.name
    )
    operands = implementation.put((x.q, x.k, x.weights, x.k_scale))
    got = np.asarray(jax.vmap(lambda q, k, w, s: run(q, k, w, k_scale=s))(*operands))
    assert got.min() >= 0 and got.max() < 100
    for entry in range(3):
        q, k, weights, k_scale = (a[entry] for a in operands)
        oracles.assert_same(got[entry], run(q, k, weights, k_scale=k_scale))


def test_vmap_of_top_k(implementation):
    x = np.random.default_rng(5).integers(0, 9, (3, 4, 50)).astype(np.float32)
    ends = np.int32([[5, 50, 3, 20]] * 3)
    run = functools.partial(jax_fused_topk.top_k, k=7, implementation=implementation.name)
    put_x, put_ends = implementation.put((x, ends))
    batched = jax.vmap(lambda x, e: run(x, ends=e), in_axes=(1, 1), out_axes=1)
    assert_one_bind(batched, (put_x, put_ends))
    values, indices = batched(put_x, put_ends)
    expected, expected_values = oracles.choose(x, 7, None, ends, "score")
    oracles.assert_same(indices, expected)
    oracles.assert_same(values, expected_values)
    # Ranges mapped, values shared.
    got = jax.vmap(lambda e: run(put_x[0, 0], ends=e)[1])(put_ends[0])
    oracles.assert_same(got, oracles.choose(np.tile(x[0, 0], (4, 1)), 7, None, ends[0], "score")[0])


def test_jit_and_eager_agree_and_eval_shape_tells_the_result(implementation, x):
    run = operation("index_topk", implementation)
    operands = implementation.put(tuple(x))
    eager, jitted = run(*operands), jax.jit(run)(*operands)
    shapes = jax.eval_shape(run, *x)
    for e, j, s in zip(eager, jitted, shapes, strict=True):
        oracles.assert_same(e, j)
        assert (e.shape, e.dtype) == (s.shape, s.dtype)
    values, indices = shapes
    assert (values.shape, values.dtype) == ((3, 6, TOPK), jnp.float32)
    assert (indices.shape, indices.dtype) == ((3, 6, TOPK), jnp.int32)
    (scores,) = jax.eval_shape(operation("index_scores", implementation), *x)
    assert (scores.shape, scores.dtype) == ((3, 6, 130), jnp.float32)


def test_static_options_under_jit(implementation, x):
    """Topk from a closure or static; each value is its own program."""
    one = implementation.put(tuple(a[0] for a in x))

    @functools.partial(jax.jit, static_argnums=2)
    def f(q, operands, topk):
        k, weights, k_scale, starts, ends = operands
        return jax_fused_topk.index_topk(
            q, k, weights, topk=topk, k_scale=k_scale, starts=starts, ends=ends,
            order="score", implementation=implementation.name,
        )  # fmt: skip

    ten, five = f(one[0], one[1:], 10), f(one[0], one[1:], 5)
    oracles.assert_same(five, np.asarray(ten)[:, :5].copy())


def test_keys_that_arrive_transposed(implementation):
    """The handlers take dense row-major arrays only; XLA brings others into that shape."""
    x = inputs.integer(6, 6, 130, heads=3, dim=16)
    run = functools.partial(
        jax_fused_topk.index_topk, topk=TOPK, implementation=implementation.name
    )
    q, k, k_t, weights = implementation.put((x.q, x.k, np.ascontiguousarray(x.k.T), x.weights))
    got = jax.jit(lambda q, k_t, w: run(q, k_t.T, w))(q, k_t, weights)
    oracles.assert_same(got, run(q, k, weights))
    # A slice of a larger buffer.
    wide = jnp.concatenate([k, k], axis=1)
    got = jax.jit(lambda q, wide, w: run(q, wide[:, 16:], w))(q, wide, weights)
    oracles.assert_same(got, run(q, k, weights))


def test_scan_while_and_cond(implementation, x):
    run = operation("index_topk", implementation)
    operands = implementation.put(tuple(x))
    expected = jax.jit(jax.vmap(run))(*operands)

    def body(carry, operands):
        values, indices = run(*operands)
        return indices, (values, indices, carry)

    first = jnp.zeros((6, TOPK), jnp.int32)
    last, (values, indices, carried) = jax.jit(lambda ops: jax.lax.scan(body, first, ops))(operands)
    oracles.assert_same(values, expected[0])
    oracles.assert_same(indices, expected[1])
    oracles.assert_same(last, np.asarray(expected[1])[2])
    oracles.assert_same(np.asarray(carried)[1], np.asarray(expected[1])[0])

    @jax.jit
    def loop(trips, flag, operands):
        def step(state):
            i, total = state
            indices = run(*(a[i % 3] for a in operands))[1]
            return i + 1, total + jnp.where(indices < 0, 0, indices)

        _, total = jax.lax.while_loop(
            lambda s: s[0] < trips, step, (0, jnp.zeros((6, TOPK), jnp.int32))
        )
        branch = jax.lax.cond(
            flag, lambda: run(*(a[0] for a in operands))[1], lambda: jnp.full_like(total, -7)
        )
        return total, branch

    chosen = np.maximum(np.asarray(expected[1]), 0)
    total, branch = loop(5, True, operands)
    oracles.assert_same(total, chosen.sum(0, dtype=np.int32) + chosen[0] + chosen[1])
    oracles.assert_same(branch, np.asarray(expected[1])[0])
    total, branch = loop(0, False, operands)
    assert not np.asarray(total).any() and np.all(np.asarray(branch) == -7)


# Several devices


def cpu_mesh(count=4):
    return Mesh(np.array(jax.devices("cpu")[:count]), ("x",))


def varying(x):
    """The mesh axes that a value inside shard_map varies over."""
    return jax.typeof(x).manual_axis_type.varying


def place(mesh, operands, specs):
    return [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(operands, specs, strict=True)]


QUERY_SPECS = (P("x"), P(), P("x"), P(), P("x"), P("x"))


def sharded_inputs():
    return inputs.with_ranges(inputs.integer(7, 24, 130, heads=3, dim=16), 8)


@pytest.fixture(params=["cpu", "reference"])
def host(request):
    """The implementations that run on a CPU, which can show several devices."""
    import runners

    return runners.Runner(request.param)


@pytest.mark.parametrize("devices", [1, 2, 3, 4])
@pytest.mark.parametrize("name", ["index_topk", "index_scores"])
def test_shard_map_over_queries(host, devices, name):
    """Typed (check_vma) sharding over queries: each device serves its rows, nothing is gathered."""
    x, mesh = sharded_inputs(), cpu_mesh(devices)
    run = operation(name, host)
    mapped = jax.jit(
        jax.shard_map(run, mesh=mesh, in_specs=QUERY_SPECS, out_specs=P("x"), check_vma=True)
    )
    operands = place(mesh, x, QUERY_SPECS)
    got, expected = mapped(*operands), jax.jit(run)(*host.put(tuple(x)))
    for g, e in zip(got, expected, strict=True):
        oracles.assert_same(g, e)
        assert g.sharding.is_equivalent_to(NamedSharding(mesh, P("x")), g.ndim)
    text = mapped.lower(*operands).compile().as_text()
    assert "all-gather" not in text and "all-reduce" not in text


@pytest.mark.parametrize("name", ["index_topk", "index_scores"])
def test_shard_map_over_the_batch(host, name):
    x = inputs.with_ranges(inputs.integer(9, 6, 130, heads=3, dim=16, batch=(4,)), 10)
    run, mesh = operation(name, host), cpu_mesh()
    mapped = jax.shard_map(run, mesh=mesh, in_specs=(P("x"),) * 6, out_specs=P("x"))
    got = jax.jit(mapped)(*place(mesh, x, (P("x"),) * 6))
    for g, e in zip(got, jax.jit(run)(*host.put(tuple(x))), strict=True):
        oracles.assert_same(g, e)


def test_shard_map_types_vary_as_the_inputs_do(host):
    """A scan's carry of indices keeps its type, and a result of replicated inputs is replicated."""
    x, mesh = sharded_inputs(), cpu_mesh()
    run = operation("index_topk", host)

    def body(q, k, weights, k_scale, starts, ends):
        values, indices = run(q, k, weights, k_scale, starts, ends)
        assert varying(indices) == varying(values) == {"x"}

        def step(carry, _):
            _, again = run(q, k, weights, k_scale, starts, ends)
            return again, carry

        last, carried = jax.lax.scan(step, indices, None, length=3)
        return last, carried[-1]

    mapped = jax.shard_map(body, mesh=mesh, in_specs=QUERY_SPECS, out_specs=P("x"), check_vma=True)
    got = jax.jit(mapped)(*place(mesh, x, QUERY_SPECS))
    expected = jax.jit(run)(*host.put(tuple(x)))[1]
    oracles.assert_same(got[0], expected)
    oracles.assert_same(got[1], expected)

    def replicated(*operands):
        _, indices = run(*operands)
        assert varying(indices) == frozenset()
        return indices

    # out_specs=P() is refused by check_vma unless the result is known to be the same.
    mapped = jax.shard_map(replicated, mesh=mesh, in_specs=(P(),) * 6, out_specs=P())
    got = jax.jit(mapped)(*place(mesh, x, (P(),) * 6))
    oracles.assert_same(got, expected)
    for shard in got.addressable_shards:
        oracles.assert_same(shard.data, expected)


def test_shard_map_of_top_k(host):
    mesh = cpu_mesh()
    x = np.random.default_rng(11).integers(0, 9, (8, 60)).astype(np.float32)
    run = functools.partial(jax_fused_topk.top_k, k=9, implementation=host.name)
    mapped = jax.shard_map(run, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    values, indices = jax.jit(mapped)(*place(mesh, [x], [P("x")]))
    expected, expected_values = oracles.choose(x, 9, order="score")
    oracles.assert_same(indices, expected)
    oracles.assert_same(values, expected_values)


def test_plain_jit_of_sharded_arrays_is_right(host):
    """Without shard_map the kernels split (test_sharding) and the reference may gather."""
    x, mesh = sharded_inputs(), cpu_mesh()
    run = operation("index_topk", host)
    got = jax.jit(run)(*place(mesh, x, QUERY_SPECS))
    for g, e in zip(got, jax.jit(run)(*host.put(tuple(x))), strict=True):
        oracles.assert_same(g, e)


# Derivatives


def bf16_operands(implementation):
    # Positive whole numbers, whose scores are all above zero.
    x = inputs.integer(12, 6, 40, heads=3, dim=16, dtype="bf16")
    x = x._replace(q=abs(x.q), k=abs(x.k), weights=abs(x.weights))
    return implementation.put((x.q, x.k, x.weights, x.k_scale))


def test_no_derivative_through_indices(implementation):
    """A loss that gathers with the indices has the gradient that constant indices give."""
    operands = bf16_operands(implementation)
    choose = functools.partial(
        jax_fused_topk.index_topk, topk=9, implementation=implementation.name
    )

    def loss(indices, q, k, weights, k_scale):
        picked = jnp.take(k.astype(jnp.float32) * k_scale[:, None], indices, axis=0)
        return jnp.sum(jnp.einsum("qhd,qkd->qhk", q.astype(jnp.float32), picked) ** 2 / 64
                       * weights[..., None])  # fmt: skip

    def through(q, k, weights, k_scale):
        return loss(choose(q, k, weights, k_scale=k_scale), q, k, weights, k_scale)

    constant = choose(*operands[:3], k_scale=operands[3])
    got = jax.jit(jax.grad(through, argnums=(0, 1, 2, 3)))(*operands)
    expected = jax.jit(jax.grad(functools.partial(loss, constant), argnums=(0, 1, 2, 3)))(*operands)
    for g, e in zip(got, expected, strict=True):
        np.testing.assert_allclose(np.asarray(g, np.float32), np.asarray(e, np.float32), rtol=2**-6)
        assert np.any(np.asarray(g, np.float32))

    tangents = tuple(jnp.ones_like(a) for a in operands)
    indices, tangent = jax.jvp(lambda q, k, w, s: choose(q, k, w, k_scale=s), operands, tangents)
    oracles.assert_same(indices, constant)
    assert tangent.dtype == jax.dtypes.float0 and tangent.shape == indices.shape


def test_index_scores_cannot_be_differentiated(implementation):
    q, k, weights, _ = bf16_operands(implementation)

    def scores(weights, stop=False):
        return jnp.sum(jax_fused_topk.index_scores(
            q, k, jax.lax.stop_gradient(weights) if stop else weights,
            implementation=implementation.name))  # fmt: skip

    with pytest.raises(NotImplementedError, match=r"index_scores.*index_topk\(.*stop_gradient"):
        jax.grad(scores)(weights)
    assert not np.any(np.asarray(jax.grad(functools.partial(scores, stop=True))(weights)))


def test_checkpoint_grad_and_plain_choose_alike(implementation):
    """Recomputed under jax.checkpoint, under grad and plain: the same tied keys."""
    scores = inputs.adversarial("zero_plateau", 2000)
    x = inputs.dial(scores, 4, dtype="bf16", row_weights=[1, 2, 4, 8])
    q, k, weights, k_scale = implementation.put((x.q, x.k, x.weights, x.k_scale))

    def forward(weights):
        indices = jax_fused_topk.index_topk(
            q, k, weights, topk=700, k_scale=k_scale, implementation=implementation.name
        )
        return jnp.sum(jnp.sin(weights[..., :1] * indices[:, None, :])), indices

    plain = jax.jit(forward)(weights)[1]
    (_, under_grad), gradient = jax.jit(jax.value_and_grad(forward, has_aux=True))(weights)
    (_, recomputed), gradient_of_recomputed = jax.jit(
        jax.value_and_grad(jax.checkpoint(forward), has_aux=True)
    )(weights)
    oracles.assert_same(under_grad, plain)
    oracles.assert_same(recomputed, plain)
    np.testing.assert_allclose(gradient, gradient_of_recomputed, rtol=1e-4, atol=1e-2)
    expected, _ = oracles.choose(np.tile(scores, (4, 1)), 700)
    oracles.assert_same(plain, expected)


# Types


def test_x64_changes_nothing(implementation, x):
    run = operation("index_topk", implementation)
    expected = jax.jit(run)(*implementation.put(tuple(x)))
    values = np.random.default_rng(13).standard_normal((3, 50)).astype(np.float32)
    top = implementation.top_k(values, 7)
    with jax.enable_x64(True):
        assert jnp.arange(3).dtype == jnp.int64
        got = jax.jit(run)(*implementation.put(tuple(x)))
        assert [a.dtype for a in got] == [jnp.float32, jnp.int32]
        for g, e in zip(got, expected, strict=True):
            oracles.assert_same(g, e)
        q, k, weights = implementation.put((x.q, x.k, x.weights))
        plain = jax_fused_topk.index_topk(
            q, k, weights, topk=TOPK, implementation=implementation.name
        )
        assert plain.dtype == jnp.int32
        again = implementation.top_k(values, 7)
        oracles.assert_same(again[0], top[0])
        oracles.assert_same(again[1], top[1])
        assert jax_fused_topk.causal_ends(3, 5).dtype == jnp.int32
        values, scales = jax_fused_topk.quantize_fp8(jnp.ones((2, 4), jnp.float64))
        assert scales.dtype == jnp.float32
        # vmap and scan make their own constants.
        mapped = jax.jit(jax.vmap(run))(*implementation.put(tuple(x)))
        assert mapped[1].dtype == jnp.int32
        oracles.assert_same(mapped[1], expected[1])


def test_without_jit():
    x = jnp.arange(5.0)
    with jax.disable_jit():
        values, indices = jax_fused_topk.top_k(x, 2)
    oracles.assert_same(indices, np.int32([4, 3]))
    oracles.assert_same(values, np.float32([4, 3]))


@pytest.mark.parametrize("implementation", ["cpu", "reference"])
def test_vmap_over_nothing(implementation):
    """An axis of size 0 gives empty results of the right shape."""
    x = inputs.random(1, 3, 20, 2, 16)
    run = functools.partial(
        jax_fused_topk.index_topk, topk=4, return_scores=True, implementation=implementation
    )
    none = jnp.zeros((0, *x.q.shape), x.q.dtype)
    for keys, axis in ((x.k, None), (jnp.zeros((0, *x.k.shape), x.k.dtype), 0)):
        scores, indices = jax.vmap(run, in_axes=(0, axis, None))(none, keys, x.weights)
        assert scores.shape == indices.shape == (0, 3, 4)
    top_k = functools.partial(jax_fused_topk.top_k, k=2, implementation=implementation)
    assert jax.vmap(top_k)(jnp.zeros((0, 5, 7)))[1].shape == (0, 5, 2)
