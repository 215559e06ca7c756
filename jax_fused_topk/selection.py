"""Reads and adds rows at chosen indices, where -1 means that there is none."""

import jax
import jax.numpy as jnp

from jax_fused_topk import _checks
from jax_fused_topk._explicit import either_spec, over_auto_axes, spec_of


def gather_selected(
    x: jax.Array,  # [*B, N, ...]
    indices: jax.Array,  # [*B, Q, K] int32
) -> jax.Array:
    """The rows of x that `index_topk` chose; zeros where the index is -1.

        out[t, j] = x[indices[t, j]] if 0 <= indices[t, j] < N else 0

    `x[indices]` would read the last row at -1, the mark of a row with fewer than K
    keys.  Differentiable in x: the transpose is `scatter_selected`, whose sums are
    in x's dtype.  To add gradients in float32, cast x before the call.

    Args:
      x: one row for each key, [*B, N, ...], of any dtype.
      indices: [*B, Q, K] int32.

    Returns:
      [*B, Q, K, ...] of x's dtype.

    Raises:
      TypeError: if x is no array or the indices are not int32.
      ValueError: if a shape cannot work.
    """
    x, indices = _checks.check_selected("gather_selected", "x", x, indices, indexed=1)

    def gather(x: jax.Array, indices: jax.Array) -> jax.Array:
        if x.shape[0] == 0:  # which JAX's gather refuses
            return jnp.zeros((*indices.shape, *x.shape[1:]), x.dtype)
        return x.at[_past_the_end(indices, x.shape[0])].get(mode="fill", fill_value=0)

    for _ in indices.shape[:-2]:
        gather = jax.vmap(gather)
    batch = indices.ndim - 2
    rows = (*either_spec(x, indices, batch), *spec_of(indices)[batch:])
    return over_auto_axes(gather, (*rows, *spec_of(x)[batch + 1 :]))(x, indices)


def scatter_selected(
    updates: jax.Array,  # [*B, Q, K, ...]
    indices: jax.Array,  # [*B, Q, K] int32
    num_keys: int,
) -> jax.Array:
    """Adds rows to the keys that `index_topk` chose; drops those whose index is -1.

        out[s] = sum of updates[t, j] over all t, j with indices[t, j] = s

    The transpose of `gather_selected`, and differentiable in turn.  Sums are in the
    dtype of the updates, in no stated order.

    Args:
      updates: one row for each choice, [*B, Q, K, ...], of any numeric dtype.
      indices: [*B, Q, K] int32; any outside [0, num_keys) is dropped.
      num_keys: N, at least 0, static; symbolic under `jax.export` if need be.

    Returns:
      [*B, N, ...] of the updates' dtype.

    Raises:
      TypeError: if the updates are no array or not numeric, the indices are not int32 or num_keys
        is not an int.
      ValueError: if a shape or num_keys cannot work.
    """
    keys = _checks.check_size("scatter_selected", "num_keys", num_keys)
    updates, indices = _checks.check_selected(
        "scatter_selected", "updates", updates, indices, indexed=2
    )

    if updates.dtype == jnp.bool_:
        raise TypeError("scatter_selected: updates must have a numeric dtype, got bool")

    def scatter(updates: jax.Array, indices: jax.Array) -> jax.Array:
        out = jnp.zeros((keys, *updates.shape[2:]), updates.dtype)
        return out.at[_past_the_end(indices, keys)].add(updates, mode="drop")

    for _ in indices.shape[:-2]:
        scatter = jax.vmap(scatter)
    batch = indices.ndim - 2
    keys_whole = (*either_spec(updates, indices, batch), None)
    return over_auto_axes(scatter, (*keys_whole, *spec_of(updates)[batch + 2 :]))(updates, indices)


def _past_the_end(indices: jax.Array, keys: int) -> jax.Array:
    """Negative indices become N: JAX counts those from the end, but fills or drops this one."""
    return jnp.where(indices < 0, jnp.asarray(keys, jnp.int32), indices)
