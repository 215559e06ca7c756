"""Derivatives of chosen scores, from the chosen pairs alone, and of chosen values.

With n the chosen index and d the tangents, dot[h] = q[t, h] . k[n]:

    d score[t, n] = d k_scale[n] * sum_h weights[t, h] * max(0, dot[h])
                  + k_scale[n] * sum_h (d weights[t, h] * max(0, dot[h])
                      + weights[t, h] * [dot[h] > 0] * (d q[t, h] . k[n] + q[t, h] . d k[n]))

the differential of DeepSeek-V3.2's index score, with max(0, .)'s slope 0 at 0, as
`jax.nn.relu` has it.  Only the K chosen pairs of a row are computed again, a chunk of
rows at a time, forwards and backwards: the [Q, K, H] dots never exist at once.  Written
in differentiable operations, so that JAX transposes it.  The dots are exact products
summed in float32; matrix products with a tangent or gradient follow
`jax_default_matmul_precision`.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from jax_fused_topk._explicit import over_auto_axes, spec_of
from jax_fused_topk.selection import gather_selected

CHECKPOINT_NAMES = ("jax_fused_topk_indices", "jax_fused_topk_scores")
"""The names that `index_topk` gives its results by `jax.ad_checkpoint.checkpoint_name`.

With `policy=jax.checkpoint_policies.save_only_these_names(*CHECKPOINT_NAMES)` a function
under `jax.checkpoint` keeps the choice, [Q, K], and does not run the kernel again on the way
back.  The first name is enough where the scores are not asked for.
"""

CHUNK_ELEMENTS = 1 << 24
"""About how many gathered key elements and dots a chunk of rows may hold at once."""


class _Values(NamedTuple):
    """The differentiable operands of one batch entry, or their tangents (None if zero)."""

    q: Any  # [Q, H, D]
    k: Any  # [N, D]
    weights: Any  # [Q, H]
    k_scale: Any  # [N]


def differentiable_scores(
    scores: jax.Array,  # [B, Q, K] float32
    indices: jax.Array,  # [B, Q, K] int32
    q: jax.Array,  # [B, Q, H, D]
    k: jax.Array,  # [B, N, D]
    weights: jax.Array,  # [B, Q, H]
    k_scale: jax.Array,  # [B, N]
) -> jax.Array:
    """`scores` as a differentiable function of the operands, at constant indices.

    float8 q and k are constants.
    """
    q, k = stop_float8(q, k)
    return _scores(scores, indices, q, k, weights, k_scale)


def stop_float8(q: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns q and k, constants if float8: their own dtype cannot hold a gradient."""
    return lax.stop_gradient((q, k)) if q.dtype == jnp.float8_e4m3fn else (q, k)


def differentiable_values(
    values: jax.Array,  # [R, K]
    indices: jax.Array,  # [R, K] int32
    operand: jax.Array,  # [R, N] values' dtype
) -> jax.Array:
    """`values` as a differentiable function of the operand of `top_k`, at constant indices."""
    return _values(values, indices, operand)


def values_tangent(
    tangent: jax.Array,  # [R, N], the operand's
    indices: jax.Array,  # [R, K] int32
) -> jax.Array:
    """The tangent of `top_k`'s values [R, K]: the operand's where chosen, 0 at a -1."""

    def take(tangent: jax.Array, indices: jax.Array) -> jax.Array:
        chosen = jnp.take_along_axis(tangent, jnp.maximum(indices, 0), axis=1)
        return jnp.where(indices < 0, jnp.zeros_like(chosen), chosen)

    return over_auto_axes(take, spec_of(indices))(tangent, indices)


_values = jax.custom_jvp(lambda values, indices, operand: values)
_values.defjvps(
    None, None, lambda tangent, out, values, indices, operand: values_tangent(tangent, indices)
)

_scores = jax.custom_jvp(lambda scores, indices, *values: scores)


def _scores_jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[jax.Array, jax.Array]:
    scores, indices, *values = primals
    dots = [None if type(t) is SymbolicZero else t for t in tangents[2:]]
    if all(t is None for t in dots):
        return scores, jnp.zeros_like(scores)

    def tangent(*operands: Any) -> jax.Array:
        return lax.map(lambda entry: _entry_tangent(*entry), operands)

    return scores, over_auto_axes(tangent, spec_of(scores))(
        indices, _Values(*values), _Values(*dots)
    )


_scores.defjvp(_scores_jvp, symbolic_zeros=True)


def _entry_tangent(indices: jax.Array, x: _Values, dx: _Values) -> jax.Array:
    """The tangent of one batch entry's scores [Q, K]."""
    queries, topk = indices.shape
    _, heads, dim = x.q.shape
    rows = max(CHUNK_ELEMENTS // max(topk * (heads + dim), 1), 1)
    chunks = max(-(-queries // rows), 1)
    rows = -(-queries // chunks)
    if dx.k is not None:
        # The transpose adds to a key once for each row that chose it: in float32.
        dx = dx._replace(k=dx.k.astype(jnp.float32))

    def split(x: jax.Array | None, fill: int = 0) -> jax.Array | None:
        """[Q, ...] -> [chunks, rows, ...]."""
        if x is None:
            return None
        pad = [(0, chunks * rows - queries)] + [(0, 0)] * (x.ndim - 1)
        return jnp.pad(x, pad, constant_values=fill).reshape(chunks, rows, *x.shape[1:])

    def chunk(per_row: tuple[Any, ...]) -> jax.Array:
        indices, q, weights, dq, dweights = per_row
        return _chunk_tangent(
            indices,
            x._replace(q=q, weights=weights),
            dx._replace(q=dq, weights=dweights),
        )

    per_row = (split(indices, -1), *map(split, (x.q, x.weights, dx.q, dx.weights)))
    # Recomputed on the way back, or the loop would keep every chunk's dots.
    out = lax.map(jax.checkpoint(chunk), per_row)
    return out.reshape(chunks * rows, topk)[:queries]


def _chunk_tangent(indices: jax.Array, x: _Values, dx: _Values) -> jax.Array:
    """The same for a chunk of rows; k and k_scale are whole."""

    def dots(q: jax.Array, keys: jax.Array) -> jax.Array:
        return jnp.einsum("rhd,rkd->rkh", q, keys, preferred_element_type=jnp.float32)

    def sum_heads(terms: jax.Array, weights: jax.Array) -> jax.Array:
        # Not a matrix product, whose float32 factors a GPU would cut to 11 bits.
        return jnp.sum(terms * weights[:, None, :], axis=-1)

    # bfloat16 holds every float8: exact products, and sums in float32.
    q = x.q.astype(jnp.bfloat16)
    keys = gather_selected(x.k, indices).astype(jnp.bfloat16)
    dot = dots(q, keys)
    relu = jnp.maximum(dot, 0)

    # A sum's tangent before k_scale.
    inner = jnp.zeros(indices.shape, jnp.float32)
    if dx.weights is not None:
        inner += sum_heads(relu, dx.weights)
    moved = []
    if dx.q is not None:
        moved.append(dots(dx.q.astype(jnp.float32), keys.astype(jnp.float32)))
    if dx.k is not None:
        moved.append(dots(q.astype(jnp.float32), gather_selected(dx.k, indices)))
    if moved:
        inner += sum_heads(jnp.where(dot > 0, sum(moved), 0), x.weights)

    tangent = gather_selected(x.k_scale, indices) * inner
    if dx.k_scale is not None:
        tangent += gather_selected(dx.k_scale, indices) * sum_heads(relu, x.weights)
    return jnp.where(indices < 0, 0, tangent)
