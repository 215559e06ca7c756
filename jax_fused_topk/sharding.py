"""Context parallelism: the keys of `index_topk` shared out over devices.

Sharded batches and queries need nothing from here: `jit` and `shard_map` split the
calls by themselves.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_fused_topk import _checks, api, derivatives, primitives
from jax_fused_topk._vary import vary_like

_NAME = "index_topk_sharded_keys"

# The bits of a float32 that `top_k` ranks below every score: a negative NaN.
_UNUSED = np.int32(-1)


def index_topk_sharded_keys(
    q: jax.Array,  # [*B, Q, H, D] float8_e4m3fn | bfloat16
    k: jax.Array,  # [*B, N / devices, D] q's dtype
    weights: jax.Array,  # [*B, Q, H] float32
    *,
    axis_name: str | Sequence[str],
    topk: int = 2048,
    k_scale: jax.Array | None = None,  # [*B, N / devices] float32
    starts: jax.Array | None = None,  # [*B, Q] int32
    ends: jax.Array | None = None,  # [*B, Q] int32
    order: api.Order = "index",
    return_scores: bool = False,
    implementation: api.Implementation = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """`index_topk` inside `jax.shard_map` over keys that lie on several devices.

    Device i along `axis_name` holds keys [i N/devices, (i + 1) N/devices).  It chooses
    its own best, one all-gather brings K (score, index) pairs a row and device together,
    and every device merges them.  The result is `index_topk`'s over all keys, bit for bit.

    Args:
      q: queries, [*B, Q, H, D], float8_e4m3fn or bfloat16, the same along `axis_name`.
      k: this device's keys, [*B, N / devices, D], of q's dtype.
      weights: [*B, Q, H] float32, the same along `axis_name`.
      axis_name: the mesh axis, or axes (major first), that the keys are sharded over.
      topk: K, at least 1, static.  It may exceed the keys of one device, and N.
      k_scale: this device's scales, [*B, N / devices] float32; 1 if None.
      starts: [*B, Q] int32, first valid key of each row among all N; 0 if None.
      ends: [*B, Q] int32, one past the last among all N; N if None.
      order: as for `index_topk`.
      return_scores: also return the chosen keys' scores, differentiable as those of
        `index_topk`.
      implementation: as for `index_topk`.

    Returns:
      indices int32 [*B, Q, topk] among all N keys, equal on every device of `axis_name`
      and typed so; with `return_scores`, (scores float32, indices).

    Raises:
      NameError: if `axis_name` names what is no axis of a surrounding `jax.shard_map`.
      ValueError: if the devices hold 2**31 keys or more together, a name of `axis_name` comes
        twice, or q, weights, starts or ends vary along it (as far as `jax.shard_map` checks
        that: not with check_vma=False).
      TypeError, ValueError, RuntimeError, NotImplementedError: as `index_topk`; TypeError also
        if `axis_name` is not made of names.
    """
    topk = _checks.check_count(_NAME, "topk", topk, 1)
    _checks.check_choice(_NAME, "order", order, _checks.ORDER_NAMES)
    return_scores = _checks.check_flag(_NAME, "return_scores", return_scores)
    axis_names, devices = _check_axes(axis_name)
    batch, operands = _checks.check_index(_NAME, q, k, weights, k_scale, starts, ends)
    _check_rows(operands, axis_names)
    held = operands.k.shape[1]
    topk_held = min(topk, max(held, 1))
    primitives.check_implementation(_NAME, implementation, operands, topk_held)
    if devices * held > _checks.MAX_KEYS:
        wanted = f"{_NAME}: k must have at most 2**31 - 1 keys on all {devices} devices together"
        raise ValueError(f"{wanted}, got {devices} * {held}")

    first = lax.axis_index(axis_names) * held
    rows = (*batch, operands.q.shape[1])
    limit = np.int32(devices * held)
    begin = jnp.clip(operands.starts.reshape(rows), 0, limit)
    end = jnp.full(rows, limit)
    if ends is not None:
        end = jnp.clip(operands.ends.reshape(rows), 0, limit)
    # Ascending indices: the gathered pairs of a row then ascend as a whole.
    # They carry no derivative: the merged scores get theirs below.
    values = lax.stop_gradient((q, k, weights))
    scores, indices = api.index_topk(
        *values, topk=topk_held, k_scale=lax.stop_gradient(k_scale),
        starts=begin - first, ends=end - first,
        order="index", return_scores=True, implementation=implementation,
    )  # fmt: skip
    scores, indices = _gather(scores, jnp.where(indices < 0, -1, indices + first), axis_names)
    scores, indices = _merge(scores, indices, topk, order, implementation)
    if not return_scores:
        return indices
    return _differentiable(scores, indices - first, held, operands, axis_names), indices


def _check_axes(axis_name: Any) -> tuple[tuple[str, ...], int]:
    """Returns the axes' names and how many devices they have together."""
    names = (axis_name,) if isinstance(axis_name, str) else axis_name
    if not isinstance(names, Sequence) or not names or not all(isinstance(n, str) for n in names):
        wanted = "be the name of a mesh axis or a sequence of names"
        raise TypeError(f"{_NAME}: axis_name must {wanted}, got {axis_name!r}")
    if len(set(names)) < len(names):
        raise ValueError(f"{_NAME}: axis_name must not name an axis twice, got {axis_name!r}")
    try:
        return tuple(names), int(lax.axis_size(tuple(names)))
    except NameError as error:
        wanted = "name mesh axes of a surrounding jax.shard_map"
        raise NameError(f"{_NAME}: axis_name must {wanted}, got {axis_name!r}") from error


def _check_rows(operands: _checks.IndexOperands, axis_names: tuple[str, ...]) -> None:
    """Refuses rows that lie along the keys' axes: each device has other keys for them."""
    for name in ("q", "weights", "starts", "ends"):
        varying = jax.typeof(getattr(operands, name)).manual_axis_type.varying
        both = [axis for axis in axis_names if axis in varying]
        if both:
            wanted = f"{name} must be the same on all devices of axis_name {axis_names}"
            advice = "shard rows along another axis, or gather them first"
            raise ValueError(f"{_NAME}: {wanted}, got one that varies along {both}: {advice}")


def _differentiable(
    scores: jax.Array,  # [*B, Q, K], of all devices
    indices: jax.Array,  # [*B, Q, K], counted from this device's first key
    held: int,
    operands: _checks.IndexOperands,
    axis_names: tuple[str, ...],
) -> jax.Array:
    """`scores` with the derivative of `derivatives`: the sum of each device's own part."""
    mine = jnp.where((indices >= 0) & (indices < held), indices, -1)
    mine = mine.reshape(operands.q.shape[0], *mine.shape[-2:])
    zero = vary_like(jnp.zeros(mine.shape), (mine, operands))
    zero = derivatives.differentiable_scores(zero, mine, *operands[:4])
    return _with_tangent_of(scores, lax.psum(zero, axis_names).reshape(scores.shape))


# Not a sum, which could change bits: a CPU flushes denormals.
_with_tangent_of = jax.custom_jvp(lambda scores, zero: scores)
_with_tangent_of.defjvps(None, lambda tangent, out, scores, zero: tangent)


def _gather(
    scores: jax.Array, indices: jax.Array, axis_names: tuple[str, ...]
) -> tuple[jax.Array, jax.Array]:
    """[..., k] of each device -> [..., devices * k], in the devices' order, in one all-gather."""
    bits = jnp.where(indices < 0, _UNUSED, lax.bitcast_convert_type(scores, jnp.int32))
    pairs = jnp.stack([bits, indices])
    pairs = lax.all_gather(pairs, axis_names, axis=pairs.ndim - 1, tiled=True, to="invarying")
    return lax.bitcast_convert_type(pairs[0], jnp.float32), pairs[1]


def _merge(
    scores: jax.Array,
    indices: jax.Array,
    topk: int,
    order: api.Order,
    implementation: api.Implementation,
) -> tuple[jax.Array, jax.Array]:
    """The best `topk` of ascending candidates [..., C]; unused ones are -NaN and -1.

    `top_k` gives ties to the lower position, which is the lower index.
    """
    best = min(topk, scores.shape[-1])
    scores, places = api.top_k(scores, best, order="score", implementation=implementation)
    indices = jnp.take_along_axis(indices, places, axis=-1)
    if order == "index":
        # Ascending indices, the unused places last.
        place = jnp.where(indices < 0, np.int32(_checks.MAX_KEYS), indices)
        _, scores, indices = lax.sort((place, scores, indices), num_keys=1)
    scores = jnp.where(indices < 0, -jnp.inf, scores)
    pad = [(0, 0)] * (scores.ndim - 1) + [(0, topk - best)]
    return (
        jnp.pad(scores, pad, constant_values=-jnp.inf),
        jnp.pad(indices, pad, constant_values=-1),
    )
