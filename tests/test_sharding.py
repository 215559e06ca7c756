"""Several devices under `jit`: no collectives, the inputs' sharding, unchanged programs for one."""

import functools
import re

import inputs
import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from jax import export
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_fused_topk
from jax_fused_topk import _ffi

TOPK = 20
COLLECTIVES = re.compile(r"all-gather|all-reduce|all-to-all|collective-permute")


def mesh_of(shape, names, axis_type=AxisType.Auto, order=None):
    devices = np.array(jax.devices("cpu")[: int(np.prod(shape))])
    devices = devices if order is None else devices[list(order)]
    return Mesh(devices.reshape(shape), names, axis_types=(axis_type,) * len(names))


def batched_inputs():
    return inputs.with_ranges(inputs.integer(7, 8, 130, heads=3, dim=16, batch=(4,)), 8)


def specs(batch, queries):
    """Specs of Inputs' fields where batch and query axes lie over the given mesh axes."""
    return (
        P(batch, queries), P(batch), P(batch, queries), P(batch), P(batch, queries),
        P(batch, queries),
    )  # fmt: skip


def place(mesh, operands, specs):
    return [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(operands, specs, strict=True)]


def index_topk(q, k, weights, k_scale, starts, ends, **options):
    return jax_fused_topk.index_topk(
        q, k, weights, topk=TOPK, k_scale=k_scale, starts=starts, ends=ends, order="score",
        return_scores=True, **options,
    )  # fmt: skip


def index_scores(q, k, weights, k_scale, starts, ends):
    return (jax_fused_topk.index_scores(q, k, weights, k_scale=k_scale, starts=starts, ends=ends),)


OPERATIONS = {"index_topk": index_topk, "index_scores": index_scores}


def compiled(f, operands):
    return jax.jit(f).lower(*operands).compile().as_text()


def assert_same_results(got, expected):
    for g, e in zip(got, expected, strict=True):
        oracles.assert_same(g, e)


LAYOUTS = {
    # Mesh shape, device order, mesh axes of the batch and of the queries.
    "batch": ((4,), None, "x", None),
    "queries": ((4,), None, None, "x"),
    "queries_of_shuffled_devices": ((4,), (2, 0, 3, 1), None, "x"),
    "batch_and_queries": ((2, 2), None, "x", "y"),
    "queries_over_the_major_axis": ((2, 2), None, "y", "x"),
    "queries_over_two_axes": ((2, 2), None, None, ("y", "x")),
    "queries_over_one_axis_of_two": ((2, 2), None, None, "y"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", OPERATIONS)
def test_jit_splits_batch_and_queries(name, layout):
    """Each device serves its own rows: no collective, results sharded as q is."""
    shape, order, batch, queries = LAYOUTS[layout]
    mesh = mesh_of(shape, ("x", "y")[: len(shape)], order=order)
    x, f = batched_inputs(), OPERATIONS[name]
    operands = place(mesh, x, specs(batch, queries))
    got = jax.jit(f)(*operands)
    assert_same_results(got, jax.jit(f)(*x))
    for g in got:
        assert g.sharding.is_equivalent_to(NamedSharding(mesh, P(batch, queries)), g.ndim)
    assert not COLLECTIVES.search(compiled(f, operands))


def test_jit_without_a_batch_or_ranges():
    mesh = mesh_of((4,), ("x",))
    x = inputs.integer(9, 24, 130, heads=3, dim=16, dtype="bf16")
    f = functools.partial(jax_fused_topk.index_topk, topk=TOPK)
    operands = place(mesh, x[:3], (P("x"), P(), P("x")))
    got = jax.jit(f)(*operands)
    oracles.assert_same(got, jax.jit(f)(*x[:3]))
    assert got.sharding.is_equivalent_to(NamedSharding(mesh, P("x")), got.ndim)
    assert not COLLECTIVES.search(compiled(f, operands))


def test_jit_splits_the_rows_of_top_k():
    mesh = mesh_of((4,), ("x",))
    x = np.random.default_rng(11).integers(0, 9, (8, 60)).astype(np.float32)
    ends = np.arange(8, dtype=np.int32)
    f = lambda x, ends: jax_fused_topk.top_k(x, 9, ends=ends)  # noqa: E731
    operands = place(mesh, (x, ends), (P("x"), P("x")))
    values, indices = jax.jit(f)(*operands)
    expected, expected_values = oracles.choose(x, 9, None, ends, "score")
    oracles.assert_same(indices, expected)
    oracles.assert_same(values, expected_values)
    assert values.sharding.is_equivalent_to(NamedSharding(mesh, P("x")), 2)
    assert not COLLECTIVES.search(compiled(f, operands))


def test_axes_that_stay_whole_are_gathered():
    """Sharded keys, heads and dimensions still give the right result."""
    mesh, x = mesh_of((2, 2), ("x", "y")), batched_inputs()
    x = x._replace(
        q=np.concatenate([x.q] * 2, 2), weights=np.concatenate([x.weights, -x.weights * 2], 2)
    )
    layouts = (P(None, "x", "y"), P(None, "x", "y"), P(None, "x"), P(None, "x"), P(), P())
    got = jax.jit(index_topk)(*place(mesh, x, layouts))
    assert_same_results(got, jax.jit(index_topk)(*x))


def test_other_operands_follow_where_only_one_is_sharded():
    """A sharded q decides; replicated weights and ranges are cut without a collective."""
    mesh, x = mesh_of((4,), ("x",)), batched_inputs()
    operands = place(mesh, x, (P(None, "x"), *[P()] * 5))
    got = jax.jit(index_topk)(*operands)
    assert_same_results(got, jax.jit(index_topk)(*x))
    assert got[1].sharding.is_equivalent_to(NamedSharding(mesh, P(None, "x")), 3)
    assert not COLLECTIVES.search(compiled(index_topk, operands))


def test_vmap_scan_and_grad_of_sharded_arrays():
    mesh, x = mesh_of((4,), ("x",)), batched_inputs()
    operands = place(mesh, x, specs("x", None))
    mapped = jax.vmap(index_topk)
    expected = jax.jit(index_topk)(*x)
    assert_same_results(jax.jit(mapped)(*operands), expected)
    assert not COLLECTIVES.search(compiled(mapped, operands))

    def scanned(*operands):
        return jax.lax.scan(lambda _, x: (None, index_topk(*x)), None, operands)[1]

    operands = place(mesh, x, specs(None, "x"))
    got = jax.jit(scanned)(*operands)
    assert_same_results(got, expected)
    assert got[1].sharding.is_equivalent_to(NamedSharding(mesh, P(None, "x")), 3)
    assert "all-gather" not in compiled(scanned, operands)

    @jax.checkpoint
    def loss(weights, q, k):
        indices = jax_fused_topk.index_topk(q, k, weights, topk=TOPK)
        return jnp.sum(jnp.sin(indices)[..., :3] * weights)

    got = jax.jit(jax.grad(loss))(operands[2], *operands[:2])
    want = jax.jit(jax.grad(loss))(x.weights, x.q, x.k)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    assert got.sharding.is_equivalent_to(NamedSharding(mesh, P(None, "x")), 3)


def test_programs_for_one_device_hold_the_plain_call():
    """No callback: not for one device, not inside shard_map, not in an export, not for CUDA."""
    x, mesh = batched_inputs(), mesh_of((4,), ("x",))
    call = f"@{_ffi.target('index_topk')}"
    sharded = place(mesh, x, specs("x", None))
    text = jax.jit(index_topk).lower(*sharded).as_text()
    # The options stand in the text too: a cache may key programs without the callback.
    assert "CustomSPMDPartitioning" in text and f"topk_{TOPK}_order_score" in text
    mapped = jax.jit(jax.shard_map(index_topk, mesh=mesh, in_specs=P("x"), out_specs=P("x")))
    check = export.DisabledSafetyCheck.custom_call(_ffi.target("index_topk"))
    exported = {
        name: export.export(jax.jit(index_topk), platforms=["cpu"], disabled_checks=[check])(*of)
        for name, of in (("one", x), ("four", sharded))
    }
    texts = {
        "one device": jax.jit(index_topk).lower(*x).as_text(),
        "a mesh of one": jax.jit(index_topk)
        .lower(*place(mesh_of((1,), ("x",)), x, specs("x", None)))
        .as_text(),
        "shard_map": mapped.lower(*sharded).as_text(),
        "exported": exported["one"].mlir_module(),
        "exported for four": exported["four"].mlir_module(),
    }
    for what, text in texts.items():
        assert call in text and "CustomSPMDPartitioning" not in text, what
    if jax_fused_topk.build_info()["cuda"]:
        text = jax.jit(index_topk).trace(*x).lower(lowering_platforms=("cuda",)).as_text()
        assert call in text and "CustomSPMDPartitioning" not in text
    assert_same_results(exported["one"].call(*x), jax.jit(index_topk)(*x))
    assert_same_results(exported["four"].call(*sharded), jax.jit(index_topk)(*x))


# Explicit mesh axes


EXPLICIT = {
    "batch": ((4,), ("x", None)),
    "queries": ((4,), (None, "x")),
    "both": ((4,), ("x", "y")),
    "alone": ((), ("x",)),
    "two_batch_axes": ((2, 2), ("x", "y", None)),
}


@pytest.mark.parametrize("layout", EXPLICIT)
@pytest.mark.parametrize("name", OPERATIONS)
def test_explicit_axes_reach_the_results_types(name, layout):
    batch, rows = EXPLICIT[layout]
    mesh = mesh_of((2, 2), ("x", "y"), AxisType.Explicit)
    x = inputs.with_ranges(inputs.integer(7, 8, 130, heads=3, dim=16, batch=batch), 8)
    leading = rows[: len(batch)]
    layouts = (P(*rows), P(*leading), P(*rows), P(*leading), P(*rows), P(*rows))
    f = OPERATIONS[name]

    def typed(*operands):
        out = f(*operands)
        for o in out:
            assert tuple(jax.typeof(o).sharding.spec) == (*rows, None)
        return out

    with jax.set_mesh(mesh):
        operands = place(mesh, x, layouts)
        got = jax.jit(typed)(*operands)
        assert not COLLECTIVES.search(compiled(typed, operands))
    assert_same_results(got, jax.jit(f)(*x))


@pytest.mark.parametrize("layout", EXPLICIT)
def test_derivatives_over_explicit_axes(layout):
    """Gradients have their operands' sharding, and one device's values: whole numbers."""
    batch, rows = EXPLICIT[layout]
    mesh = mesh_of((2, 2), ("x", "y"), AxisType.Explicit)
    x = inputs.with_ranges(inputs.integer(7, 8, 130, heads=3, dim=16, batch=batch), 8)
    x = [a.astype(jnp.bfloat16) if a.dtype == inputs.FP8 else a for a in x]
    leading = rows[: len(batch)]
    layouts = (P(*rows), P(*leading), P(*rows), P(*leading), P(*rows), P(*rows))

    def loss(*operands):
        scores, indices = index_topk(*operands)
        chosen = jax_fused_topk.gather_selected(operands[1], indices)
        keys = operands[1].shape[-2]
        counts = jax_fused_topk.scatter_selected(jnp.ones_like(scores), indices, keys)
        scores = jnp.where(indices < 0, 0, scores)
        return jnp.sum(scores) + jnp.sum(chosen.astype(jnp.float32)) + jnp.sum(counts)

    gradient = jax.jit(jax.grad(loss, (0, 1, 2, 3)))
    with jax.set_mesh(mesh):
        operands = place(mesh, x, layouts)
        got = gradient(*operands)
        for g, operand in zip(got, operands, strict=False):
            assert jax.typeof(g).sharding.spec == jax.typeof(operand).sharding.spec
    for g, wanted in zip(got, gradient(*x), strict=True):
        assert np.abs(wanted).max() > 0
        np.testing.assert_array_equal(np.asarray(g), np.asarray(wanted))


def test_derivative_of_top_k_over_an_explicit_axis():
    mesh = mesh_of((4,), ("x",), AxisType.Explicit)
    x = np.random.default_rng(9).standard_normal((8, 50), np.float32)
    gradient = jax.jit(jax.grad(lambda x: jnp.sum(jax_fused_topk.top_k(x, 7)[0] ** 2)))
    with jax.set_mesh(mesh):
        got = gradient(*place(mesh, [x], [P("x")]))
        assert tuple(jax.typeof(got).sharding.spec) == ("x", None)
    np.testing.assert_array_equal(np.asarray(got), np.asarray(gradient(x)))


def test_explicit_axes_that_cannot_work_are_refused():
    mesh, x = mesh_of((2, 2), ("x", "y"), AxisType.Explicit), batched_inputs()
    values = np.zeros((4, 8), np.float32)
    with jax.set_mesh(mesh):
        operands = place(mesh, x, (P(), P(None, "x"), *[P()] * 4))
        with pytest.raises(ValueError, match=r"index_topk: k \[b, n, d\] must not be sharded.*n"):
            jax.jit(index_topk)(*operands)
        operands = place(mesh, x, (P(None, "x"), P(), P(None, "y"), *[P()] * 3))
        with pytest.raises(ValueError, match="weights must be sharded along q as q is, over 'x'"):
            jax.jit(index_topk)(*operands)
        (values,) = place(mesh, [values], [P("x", "y")])
        with pytest.raises(
            ValueError, match=r"top_k: operand \[r, n\] must not be sharded along n"
        ):
            jax.jit(lambda x: jax_fused_topk.top_k(x, 3))(values)
        (values,) = place(mesh, [np.zeros((4, 8, 20), np.float32)], [P(None, "x")])
        with pytest.raises(ValueError, match="operand must be sharded along its first dimension"):
            jax_fused_topk.top_k(values, 3)
