"""`index_topk_sharded_keys`: bit for bit what one device chooses over all keys."""

import functools

import inputs
import jax
import numpy as np
import oracles
import pytest
import runners
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jax_fused_topk
from jax_fused_topk import _ffi, index_topk_sharded_keys


def mesh_of(shape=(4,), names=("x",)):
    devices = np.array(jax.devices("cpu")[: int(np.prod(shape))])
    return Mesh(devices.reshape(shape), names)


def on_devices(x, mesh, axis="x", rows=None, **options):
    """Runs over keys sharded along `axis`, queries along `rows`; x has no batch."""

    def run(operands):
        q, k, weights, rest = *operands[:3], operands[3:]
        named = {n: a for n, a in zip(x._fields[3:], rest, strict=True) if a is not None}
        return index_topk_sharded_keys(q, k, weights, axis_name=axis, **named, **options)

    layout = inputs.Inputs(P(rows), P(axis), P(rows), P(axis), P(rows), P(rows))
    layout = tuple(None if a is None else s for a, s in zip(x, layout, strict=True))
    mapped = jax.shard_map(run, mesh=mesh, in_specs=(layout,), out_specs=P(rows))
    return jax.jit(mapped), tuple(x)


def on_one(x, **options):
    named = {n: a for n, a in x._asdict().items() if a is not None}
    return jax.jit(functools.partial(jax_fused_topk.index_topk, **options))(**named)


def assert_as_one_device(x, mesh=None, axis="x", rows=None, **options):
    f, operands = on_devices(x, mesh or mesh_of(), axis, rows, return_scores=True, **options)
    got = f(operands)
    expected = on_one(x, return_scores=True, **options)
    if options.get("order") == "any":
        got, expected = (_sorted(*pair) for pair in (got, expected))
    for g, e in zip(got, expected, strict=True):
        oracles.assert_same(g, e)


def _sorted(scores, indices):
    scores, indices = np.asarray(scores), np.asarray(indices)
    # -1 stays last: the used places stand first in any order.
    place = np.argsort(indices.astype(np.uint32), axis=-1, kind="stable")
    assert np.all(np.diff((indices < 0).astype(int), axis=-1) >= 0)
    return np.take_along_axis(scores, place, -1), np.take_along_axis(indices, place, -1)


@pytest.mark.parametrize("implementation", ["cpu", "reference"])
@pytest.mark.parametrize("order", ["index", "score", "any"])
def test_every_order(order, implementation):
    """Ties everywhere, and rows that are short, empty, reversed or on one device only."""
    x = inputs.with_ranges(inputs.integer(1, 24, 128, heads=3, dim=16), 2)
    assert_as_one_device(x, topk=20, order=order, implementation=implementation)


@pytest.mark.parametrize("topk", [1, 7, 31, 32, 33, 127, 128, 129, 200])
def test_every_count(topk):
    """More than a device holds, and more than all hold."""
    x = inputs.with_ranges(inputs.integer(3, 16, 128, heads=2, dim=16), 4)
    assert_as_one_device(x, topk=topk)


@pytest.mark.parametrize(
    "name",
    ["all_equal", "all_zero", "zeros_of_both_signs", "non_finite", "all_nan", "all_nan_but_one",
     "mostly_nan", "all_minus_inf", "ascending", "descending", "denormals"],
)  # fmt: skip
def test_hard_scores(name):
    """NaN first, -inf above nothing, ties across devices to the lower index."""
    starts, ends = [0, 40, 30, 90, 5, 64], [128, 128, 34, 90, 3, 96]
    x = inputs.dial(inputs.adversarial(name, 128), 6, starts=starts, ends=ends)
    for order in ("index", "score"):
        assert_as_one_device(x, topk=40, order=order)


def test_minus_infinity_beats_an_unused_place_of_an_earlier_device():
    """Row 0's only keys are -inf and lie on the last device."""
    x = inputs.dial(np.full(128, -np.inf), 2, starts=[120, 0], ends=[128, 0])
    f, operands = on_devices(x, mesh_of(), topk=10, order="score", return_scores=True)
    scores, indices = f(operands)
    oracles.assert_same(indices[0], np.int32([*range(120, 128), -1, -1]))
    oracles.assert_same(indices[1], np.full(10, -1, np.int32))
    assert np.all(np.asarray(scores) == -np.inf)


def test_ranges_and_scales_may_be_absent():
    x = inputs.integer(5, 12, 128, heads=3, dim=16, dtype="bf16")._replace(k_scale=None)
    assert_as_one_device(x, topk=20)
    f, operands = on_devices(x, mesh_of(), topk=20)
    oracles.assert_same(f(operands), on_one(x, topk=20))


def test_ranges_may_be_lists():
    x = inputs.with_ranges(inputs.integer(12, 12, 128, heads=3, dim=16), 13)
    starts, ends = ([int(i) for i in a] for a in (x.starts, x.ends))
    listed = jax.shard_map(
        lambda q, k, w, s: index_topk_sharded_keys(
            q, k, w, axis_name="x", topk=20, k_scale=s, starts=starts, ends=ends
        ),
        mesh=mesh_of(), in_specs=(P(), P("x"), P(), P("x")), out_specs=P(),
    )  # fmt: skip
    oracles.assert_same(jax.jit(listed)(*x[:4]), on_one(x, topk=20))


def test_queries_over_a_second_axis_and_keys_over_two():
    x = inputs.with_ranges(inputs.random(6, 12, 128, heads=3, dim=16), 7)
    assert_as_one_device(x, mesh_of((2, 2), ("x", "y")), axis="x", rows="y", topk=20)
    assert_as_one_device(x, mesh_of((2, 2), ("x", "y")), axis=("y", "x"), topk=20)
    assert_as_one_device(x, mesh_of((1,)), topk=20)


def test_one_collective_and_no_gradient():
    """One all-gather of K pairs a row; indices pass no gradient to the scores' inputs."""
    x = inputs.integer(8, 12, 128, heads=3, dim=16)
    f, operands = on_devices(x, mesh_of(), topk=20)
    text = f.lower(operands).compile().as_text()
    assert text.count(" all-gather(") + text.count(" all-gather-start(") == 1
    assert "s32[2,12,80]" in text.replace("1,12", "12")
    assert "all-reduce" not in text and "all-to-all" not in text

    def loss(weights):
        indices = f((x.q, x.k, weights, *x[3:]))
        return (weights[:, :1] * indices).sum()

    gradient = jax.grad(loss)(x.weights)
    indices = np.asarray(on_one(x, topk=20))
    oracles.assert_same(gradient[:, 0], indices.sum(1).astype(np.float32))
    assert not np.any(gradient[:, 1:])


def test_a_batch_and_vmap():
    x = inputs.with_ranges(inputs.integer(9, 6, 64, heads=3, dim=16, batch=(3,)), 10)
    expected = on_one(x, topk=9)

    def run(q, k, weights, k_scale, starts, ends):
        return index_topk_sharded_keys(
            q, k, weights, axis_name="x", topk=9, k_scale=k_scale, starts=starts, ends=ends
        )

    keys = P(None, "x")
    for f in (run, jax.vmap(run)):
        mapped = jax.shard_map(
            f, mesh=mesh_of(), in_specs=(P(), keys, P(), keys, P(), P()), out_specs=P()
        )
        oracles.assert_same(jax.jit(mapped)(*x), expected)


def test_errors_name_the_function_and_the_argument(monkeypatch):
    x = inputs.integer(11, 4, 32, heads=2, dim=16)
    for axis in ("nowhere", ("nowhere",)):
        message = "^index_topk_sharded_keys: axis_name must name mesh axes .* got .*nowhere"
        with pytest.raises(NameError, match=message):
            index_topk_sharded_keys(x.q, x.k, x.weights, axis_name=axis)
    for axis in (0, None, (), ("x", 0)):
        message = r"^index_topk_sharded_keys: axis_name must be the name of .* got [0N(]"
        with pytest.raises(TypeError, match=message):
            index_topk_sharded_keys(x.q, x.k, x.weights, axis_name=axis)
    message = r"^index_topk_sharded_keys: axis_name must not name an axis twice, got .*'x', 'x'"
    with pytest.raises(ValueError, match=message):
        index_topk_sharded_keys(x.q, x.k, x.weights, axis_name=("x", "x"))
    f, operands = on_devices(x, mesh_of(), return_scores=2)
    with pytest.raises(TypeError, match=r"^index_topk_sharded_keys: return_scores must be True or"):
        f(operands)
    f, operands = on_devices(x, mesh_of(), implementation="gpu")
    with pytest.raises(ValueError, match=r"^index_topk_sharded_keys: implementation must be one"):
        f(operands)
    monkeypatch.setattr(_ffi, "_cuda", runners.CUDA_LIMITS)
    f, operands = on_devices(inputs.integer(14, 4, 32, dim=20), mesh_of(), implementation="cuda")
    with pytest.raises(ValueError, match=r'^index_topk_sharded_keys: implementation="cuda" cannot'):
        f(operands)
    f, operands = on_devices(x._replace(weights=x.weights[:, :1]), mesh_of())
    with pytest.raises(ValueError, match="index_topk_sharded_keys: weights must have shape"):
        f(operands)
    f, operands = on_devices(x, mesh_of(), topk=0)
    with pytest.raises(ValueError, match="index_topk_sharded_keys: topk must be at least 1"):
        f(operands)
    keys = jax.ShapeDtypeStruct((2**31 - 4, 16), x.k.dtype)
    mapped = jax.shard_map(
        lambda q, k, w: index_topk_sharded_keys(q, k, w, axis_name=("x", "y")),
        mesh=mesh_of((2, 2), ("x", "y")), in_specs=(P(), P("x"), P()), out_specs=P(),
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"at most 2\*\*31 - 1 keys on all 4 devices together"):
        jax.eval_shape(mapped, x.q, keys, x.weights)


@pytest.mark.parametrize("varying", ["q", "weights", "starts", "ends"])
def test_rows_along_the_axis_of_the_keys_are_refused(varying):
    """Each device would merge choices of different rows."""
    x = inputs.with_ranges(inputs.integer(12, 8, 32, heads=2, dim=16), 13)
    rows = ("q", "weights", "starts", "ends")
    layout = {name: P("x") if name == varying else P() for name in rows} | {"k": P("x")}
    operands = {name: getattr(x, name) for name in layout}
    short = operands | {name: a[:2] for name, a in operands.items() if name in rows}
    short[varying] = operands[varying]

    def run(x):
        return index_topk_sharded_keys(**x, axis_name="x", topk=5)

    mapped = jax.shard_map(run, mesh=mesh_of(), in_specs=(layout,), out_specs=P())
    message = rf"^index_topk_sharded_keys: {varying} must be the same on all .* along \['x'\]"
    with pytest.raises(ValueError, match=message):
        jax.jit(mapped)(short)


@pytest.mark.parametrize("rows", [None, "y"])
def test_gradients_are_those_of_one_device(rows):
    """In q, k, weights and k_scale, short rows and ranges included."""
    x = inputs.with_ranges(inputs.random(5, 6, 64, 4, 32, "bf16"), 6)
    slopes = np.random.default_rng(7).standard_normal((6, 9)).astype(np.float32)
    mesh = mesh_of((2, 2), ("x", "y"))
    many, operands = on_devices(x, mesh, rows=rows, topk=9, return_scores=True)

    def one(operands):
        named = dict(zip(x._fields, operands, strict=True))
        return jax_fused_topk.index_topk(**named, topk=9, return_scores=True)

    def gradients(run):
        def loss(values):
            scores, indices = run((*values, *operands[4:]))
            return jax.numpy.where(indices < 0, 0, scores * slopes).sum()

        return jax.jit(jax.grad(loss))(operands[:4])

    for got, expected in zip(gradients(many), gradients(one), strict=True):
        # Sums in another order, rounded to the operand's own type at the end.
        step = 2.0**-8 if got.dtype == x.q.dtype else 2.0**-20
        got, expected = (np.asarray(a, np.float32) for a in (got, expected))
        assert np.abs(expected).max() > 0.1
        np.testing.assert_allclose(got, expected, rtol=2 * step, atol=step * np.abs(expected).max())
