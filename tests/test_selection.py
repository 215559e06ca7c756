"""gather_selected and scatter_selected: values, transposes, transformations, errors."""

import functools

import inputs
import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_fused_topk
from jax_fused_topk import gather_selected, scatter_selected

KEYS = 7
# Repeated within and across rows, none at all, a first and a last row.
INDICES = np.int32([[0, 2, 6, -1], [-1, -1, -1, -1], [3, 3, 2, 6], [6, 0, 5, 2], [1, -1, -1, -1]])


def gathered(x, indices):
    """What gather_selected must return, row by row."""
    batch = indices.shape[:-2]
    out = np.zeros((*indices.shape, *x.shape[len(batch) + 1 :]), x.dtype)
    for at in np.ndindex(*indices.shape):
        if 0 <= indices[at] < x.shape[len(batch)]:
            out[at] = x[at[:-2]][indices[at]]
    return out


def scattered(updates, indices, keys):
    """What scatter_selected must return, row by row."""
    batch = indices.shape[:-2]
    out = np.zeros((*batch, keys, *updates.shape[indices.ndim :]), updates.dtype)
    for at in np.ndindex(*indices.shape):
        if 0 <= indices[at] < keys:
            out[at[:-2]][indices[at]] += updates[at]
    return out


def whole(*shape, dtype=np.float32):
    """Different whole numbers from 1 on: sums are exact."""
    return np.arange(1, np.prod(shape, dtype=int) + 1).reshape(shape).astype(dtype)


@pytest.mark.parametrize("trailing", [(), (3,), (2, 3)], ids=str)
@pytest.mark.parametrize("batch", [(), (2,), (2, 3)], ids=str)
def test_values(batch, trailing):
    indices = np.random.default_rng(1).integers(-1, KEYS, (*batch, 5, 4)).astype(np.int32)
    x = whole(*batch, KEYS, *trailing)
    updates = whole(*batch, 5, 4, *trailing)
    for run in (lambda f: f, jax.jit):
        got = run(gather_selected)(x, indices)
        oracles.assert_same(got, gathered(x, indices))
        got = run(functools.partial(scatter_selected, num_keys=KEYS))(updates, indices)
        oracles.assert_same(got, scattered(updates, indices, KEYS))


@pytest.mark.parametrize("dtype", ["int32", "int8", "bfloat16", "float8_e4m3fn", "bool"])
def test_types(dtype):
    x = jnp.asarray(whole(KEYS, 2)).astype(dtype)
    got = gather_selected(x, INDICES)
    assert (got.dtype, got.shape) == (jnp.dtype(dtype), (5, 4, 2))
    oracles.assert_same(got.astype(np.float32), gathered(np.asarray(x, np.float32), INDICES))


def test_indices_out_of_range_are_none():
    indices = np.int32([[KEYS, -2, 2**31 - 1, -(2**31), KEYS - 1]])
    x, updates = whole(KEYS, 2), whole(1, 5, 2)
    oracles.assert_same(gather_selected(x, indices), gathered(x, indices))
    got = scatter_selected(updates, indices, KEYS)
    oracles.assert_same(got, scattered(updates, indices, KEYS))
    assert np.count_nonzero(got) == 2


def test_nothing_to_select():
    """No keys, no queries, no places."""
    none = np.full((5, 4), -1, np.int32)
    oracles.assert_same(gather_selected(whole(0, 2), none), np.zeros((5, 4, 2), np.float32))
    got = scatter_selected(whole(5, 4, 2), none, 0)
    oracles.assert_same(got, np.zeros((0, 2), np.float32))
    for shape in ((0, 4), (5, 0)):
        empty = np.zeros(shape, np.int32)
        assert gather_selected(whole(KEYS, 2), empty).shape == (*shape, 2)
        got = scatter_selected(np.zeros((*shape, 2), np.float32), empty, KEYS)
        oracles.assert_same(got, np.zeros((KEYS, 2), np.float32))


def test_each_is_the_others_transpose():
    x, updates = whole(KEYS, 2), whole(5, 4, 2)
    gather = functools.partial(gather_selected, indices=INDICES)
    scatter = functools.partial(scatter_selected, indices=INDICES, num_keys=KEYS)
    value, pull = jax.vjp(gather, x)
    oracles.assert_same(value, gathered(x, INDICES))
    oracles.assert_same(pull(updates)[0], scattered(updates, INDICES, KEYS))
    value, pull = jax.vjp(scatter, updates)
    oracles.assert_same(value, scattered(updates, INDICES, KEYS))
    oracles.assert_same(pull(x)[0], gathered(x, INDICES))
    # Tangents go forward as values do.
    oracles.assert_same(jax.jvp(gather, (x,), (2 * x,))[1], gathered(2 * x, INDICES))


def test_gradient_past_a_short_row_leaves_the_last_key_alone():
    gradient = jax.jit(jax.grad(lambda x: jnp.sum(gather_selected(x, np.int32([[2, -1, -1]])))))
    oracles.assert_same(gradient(whole(KEYS)), np.float32([0, 0, 1, 0, 0, 0, 0]))


def test_vmap():
    x = whole(2, KEYS, 3)
    indices = np.stack([INDICES, INDICES[::-1]])
    oracles.assert_same(jax.vmap(gather_selected)(x, indices), gathered(x, indices))
    shared = jax.vmap(gather_selected, in_axes=(None, 0))(x[0], indices)
    oracles.assert_same(shared, gathered(np.stack([x[0], x[0]]), indices))
    wide = jax.vmap(gather_selected, in_axes=(2, None), out_axes=-1)(x, indices)
    oracles.assert_same(wide, gathered(x, indices))
    updates = whole(2, 5, 4, 3)
    scatter = functools.partial(scatter_selected, num_keys=KEYS)
    oracles.assert_same(jax.vmap(scatter)(updates, indices), scattered(updates, indices, KEYS))


def test_shard_map_over_queries():
    """Replicated values, sharded rows; the transpose adds over the devices."""
    mesh = Mesh(np.array(jax.devices("cpu")[:4]), ("x",))
    indices = np.random.default_rng(2).integers(-1, KEYS, (8, 4)).astype(np.int32)
    x, updates = whole(KEYS, 2), whole(8, 4, 2)
    gather = jax.shard_map(gather_selected, mesh=mesh, in_specs=(P(), P("x")), out_specs=P("x"))
    put = jax.device_put(indices, NamedSharding(mesh, P("x")))
    value, pull = jax.vjp(jax.jit(lambda x: gather(x, put)), x)
    oracles.assert_same(value, gathered(x, indices))
    oracles.assert_same(pull(updates)[0], scattered(updates, indices, KEYS))


def test_with_the_choice(implementation):
    """Values of the chosen keys: short and empty rows give zeros."""
    x = inputs.with_ranges(inputs.integer(3, 6, 130, heads=3, dim=16, batch=(2,)), 4)
    indices = implementation.index_topk(x, 20)
    assert (indices < 0).any() and (indices >= 0).any()
    values = whole(2, 130, 5)
    oracles.assert_same(gather_selected(values, indices), gathered(values, indices))


def test_x64_changes_nothing():
    with jax.enable_x64(True):
        got = gather_selected(whole(KEYS, 2), INDICES)
        oracles.assert_same(got, gathered(whole(KEYS, 2), INDICES))
        got = scatter_selected(whole(5, 4), INDICES, KEYS)
        oracles.assert_same(got, scattered(whole(5, 4), INDICES, KEYS))


@pytest.mark.parametrize(
    ("x", "indices", "error", "message"),
    [
        (whole(7), INDICES.astype(np.int64), TypeError, "indices must have dtype int32, got int64"),
        (whole(7), INDICES.astype(np.float32), TypeError, "indices must have dtype int32, got flo"),
        (whole(7), INDICES[0], ValueError, r"indices must have shape \[\*B, Q, K\], got \[4\]"),
        (whole(3, 7), INDICES[None], ValueError,
         r"x must have shape \[\*B, N, ...\] as indices \[1, 5, 4\] has, got \[3, 7\]"),
        (np.float32(1), INDICES, ValueError, r"x must have shape .*, got \[\]"),
        (None, INDICES, TypeError, "x must be an array, got NoneType"),
        (whole(7), None, TypeError, "indices must be an array, got NoneType"),
    ],
)  # fmt: skip
def test_gather_errors(x, indices, error, message):
    with jax.enable_x64(True), pytest.raises(error, match=f"^gather_selected: {message}"):
        gather_selected(x, indices)


@pytest.mark.parametrize(
    ("updates", "keys", "error", "message"),
    [
        (whole(5, 3), 7, ValueError,
         r"updates must have shape \[\*B, Q, K, ...\] as indices \[5, 4\] has, got \[5, 3\]"),
        (whole(5), 7, ValueError, r"updates must have shape .*, got \[5\]"),
        (whole(5, 4) > 0, 7, TypeError, "updates must have a numeric dtype, got bool"),
        (whole(5, 4), -1, ValueError, "num_keys must be at least 0, got -1"),
        (whole(5, 4), 7.0, TypeError, "num_keys must be a Python int, got 7.0"),
    ],
)  # fmt: skip
def test_scatter_errors(updates, keys, error, message):
    with pytest.raises(error, match=f"^scatter_selected: {message}"):
        scatter_selected(updates, INDICES, keys)


def test_reading_with_plain_indexing_differs():
    """The reason for the helper: -1 is the last row to plain indexing."""
    x = jnp.asarray(whole(KEYS))
    assert float(x[jnp.int32(-1)]) == KEYS
    assert float(gather_selected(x, np.int32([[-1]]))[0, 0]) == 0
    assert jax_fused_topk.gather_selected is gather_selected
