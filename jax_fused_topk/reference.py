"""The operations in plain jnp, blocked over rows and keys: the oracle.

These functions state the contract in the fewest words.  They also serve every
platform and shape that no compiled kernel serves.  Scores are taken in blocks of
`ROW_BLOCK` rows and about `KEY_BLOCK` keys, one head after the other, so neither
[Q, H, N] nor (in `index_topk`) [Q, N] ever exists.

Denormal scores follow the backend's own rule: XLA on a CPU flushes them to zero.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_fused_topk import _checks, derivatives
from jax_fused_topk._vary import vary_like

ROW_BLOCK = 64
KEY_BLOCK = 8192

# Below the key of every score: what a choice takes last.
_INVALID = np.int32(np.iinfo(np.int32).min)


_T = TypeVar("_T")


class _Rows(NamedTuple):
    """One block of rows of one batch entry."""

    q: jax.Array  # [R, H, D]
    weights: jax.Array  # [R, H]
    starts: jax.Array  # [R]
    ends: jax.Array  # [R]


class _Keys(NamedTuple):
    """Key blocks of one batch entry, or one of them without its first axis."""

    k: jax.Array  # [blocks, S, D]
    k_scale: jax.Array  # [blocks, S]
    columns: jax.Array  # [blocks, S], each key's index


def index_topk(
    q: jax.Array,
    k: jax.Array,
    weights: jax.Array,
    *,
    topk: int = 2048,
    k_scale: jax.Array | None = None,
    starts: jax.Array | None = None,
    ends: jax.Array | None = None,
    order: Literal["index", "score", "any"] = "index",
    return_scores: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """`jax_fused_topk.index_topk` in plain jnp; the same arguments, results and derivative."""
    topk = _checks.check_count("index_topk", "topk", topk, 1)
    _checks.check_choice("index_topk", "order", order, _checks.ORDER_NAMES)
    return_scores = _checks.check_flag("index_topk", "return_scores", return_scores)
    batch, operands = _checks.check_index("index_topk", q, k, weights, k_scale, starts, ends)
    scores, indices = flat_index_topk(*lax.stop_gradient(operands), topk=topk, order=order)
    rows = (*batch, operands.q.shape[1], topk)
    if not return_scores:
        return indices.reshape(rows)
    scores = derivatives.differentiable_scores(scores, indices, *operands[:4])
    return scores.reshape(rows), indices.reshape(rows)


def index_scores(
    q: jax.Array,
    k: jax.Array,
    weights: jax.Array,
    *,
    k_scale: jax.Array | None = None,
    starts: jax.Array | None = None,
    ends: jax.Array | None = None,
) -> jax.Array:
    """`jax_fused_topk.index_scores` in plain jnp; the same arguments and results.

    Unlike that one it is differentiable in q, k, weights and k_scale (float8 q and k are
    constants), for small sizes: the way back holds [Q, H, N], and a NaN outside a row's range
    reaches the row's gradient.
    """
    batch, operands = _checks.check_index("index_scores", q, k, weights, k_scale, starts, ends)
    q, k = derivatives.stop_float8(operands.q, operands.k)
    operands = operands._replace(q=q, k=k)
    scores = flat_index_scores(*operands)
    return scores.reshape(*batch, *scores.shape[1:])


def top_k(
    operand: jax.Array,
    k: int,
    *,
    axis: int = -1,
    starts: jax.Array | None = None,
    ends: jax.Array | None = None,
    order: Literal["index", "score", "any"] = "score",
) -> tuple[jax.Array, jax.Array]:
    """`jax_fused_topk.top_k` in plain jnp; the same arguments, results and derivative."""
    k = _checks.check_count("top_k", "k", k, 0)
    _checks.check_choice("top_k", "order", order, _checks.ORDER_NAMES)
    batch, operands = _checks.check_top_k("top_k", operand, k, axis, starts, ends)
    values, indices = flat_top_k(*lax.stop_gradient(operands), k=k, order=order)
    values = derivatives.differentiable_values(values, indices, operands.operand)
    return values.reshape(*batch, k), indices.reshape(*batch, k)


def flat_index_topk(
    q: jax.Array,  # [B, Q, H, D]
    k: jax.Array,  # [B, N, D]
    weights: jax.Array,  # [B, Q, H]
    k_scale: jax.Array,  # [B, N]
    starts: jax.Array,  # [B, Q]
    ends: jax.Array,  # [B, Q]
    *,
    topk: int,
    order: str,
) -> tuple[jax.Array, jax.Array]:
    """Returns (scores float32, indices int32), each [B, Q, topk]."""

    def choose(rows: _Rows, keys: _Keys) -> tuple[jax.Array, jax.Array]:
        """One pass over the key blocks that keeps the best so far.

        lax.top_k's ties go to the lower position, and what is kept stands before what
        is new: the lower index.
        """

        def step(best: tuple[jax.Array, jax.Array], block: _Keys) -> tuple[Any, None]:
            scores, valid = _block_scores(rows, block)
            columns = jnp.broadcast_to(block.columns, scores.shape)
            new = jnp.where(valid, _order_key(scores), _INVALID)
            keys_, position = lax.top_k(jnp.concatenate([best[0], new], 1), topk)
            columns = jnp.concatenate([best[1], columns], 1)
            return (keys_, jnp.take_along_axis(columns, position, 1)), None

        shape = (rows.q.shape[0], topk)
        none = jnp.full(shape, _INVALID), jnp.full(shape, -1, jnp.int32)
        (best, columns), _ = lax.scan(step, vary_like(none, (rows, keys)), keys)
        return best, columns

    best, columns = _over_row_blocks(choose, q, k, weights, k_scale, starts, ends)
    if order != "score":
        # Ascending columns, the unused places last.
        place = jnp.where(best == _INVALID, np.int32(_checks.MAX_KEYS), columns)
        _, best, columns = lax.sort((place, best, columns), num_keys=1)
    used = best != _INVALID
    scores = jnp.where(used, _from_order_key(best), -jnp.inf)
    return scores, jnp.where(used, columns, -1)


def flat_index_scores(
    q: jax.Array,
    k: jax.Array,
    weights: jax.Array,
    k_scale: jax.Array,
    starts: jax.Array,
    ends: jax.Array,
) -> jax.Array:
    """Returns float32 [B, Q, N]; operands as `flat_index_topk` takes them."""

    def score(rows: _Rows, keys: _Keys) -> jax.Array:
        def step(_: None, block: _Keys) -> tuple[None, jax.Array]:
            scores, valid = _block_scores(rows, block)
            return None, jnp.where(valid, scores, -jnp.inf)

        _, blocks = lax.scan(step, None, keys)  # [key blocks, rows, keys]
        return jnp.swapaxes(blocks, 0, 1).reshape(rows.q.shape[0], keys.columns.size)

    return _over_row_blocks(score, q, k, weights, k_scale, starts, ends)[..., : k.shape[1]]


def flat_top_k(
    x: jax.Array,  # [R, N]
    starts: jax.Array,  # [R]
    ends: jax.Array,  # [R]
    *,
    k: int,
    order: str,
) -> tuple[jax.Array, jax.Array]:
    """Returns (values of x's dtype, indices int32), each [R, k]."""
    columns = lax.broadcasted_iota(jnp.int32, x.shape, 1)
    outside = (columns < starts[:, None]) | (columns >= ends[:, None])
    # ~key reverses the order of the keys; the sort is stable, so ties keep theirs.
    descending = ~_order_key(x)
    operands = (outside, descending, columns)
    outside, descending, columns = (a[:, :k] for a in lax.sort(operands, num_keys=2))
    columns = jnp.where(outside, -1, columns)
    if order != "score":
        place = jnp.where(outside, np.int32(_checks.MAX_KEYS), columns)
        _, outside, descending, columns = lax.sort(
            (place, outside, descending, columns), num_keys=1
        )
    # From the keys, which keep NaN payloads that a sort of floats would not.
    values = _from_order_key(~descending, x.dtype)
    return jnp.where(outside, jnp.array(-jnp.inf, x.dtype), values), columns


def _over_row_blocks(
    function: Callable[[_Rows, _Keys], _T],
    q: jax.Array,
    k: jax.Array,
    weights: jax.Array,
    k_scale: jax.Array,
    starts: jax.Array,
    ends: jax.Array,
) -> _T:
    """Maps `function` over the row blocks of each batch entry.

    `function` returns arrays [R, ...]; the results are [B, Q, ...].
    """
    queries, keys = q.shape[1], k.shape[1]
    row_blocks = max(-(-queries // ROW_BLOCK), 1)
    rows_each = -(-queries // row_blocks)
    key_blocks = max(-(-keys // KEY_BLOCK), 1)
    keys_each = -(-keys // key_blocks)
    columns = jnp.arange(key_blocks * keys_each, dtype=jnp.int32).reshape(key_blocks, keys_each)

    def one(entry: tuple[jax.Array, ...]) -> _T:
        q, k, weights, k_scale, starts, ends = entry
        rows = _Rows(*(_blocks(x, row_blocks, rows_each) for x in (q, weights, starts, ends)))
        # Padded keys stand at or past N, and every range ends at N at the latest.
        rows = rows._replace(ends=jnp.minimum(rows.ends, keys))
        blocks = _Keys(
            _blocks(k, key_blocks, keys_each), _blocks(k_scale, key_blocks, keys_each), columns
        )
        blocks = vary_like(blocks, entry)
        out = lax.map(lambda row: function(row, blocks), rows)
        return jax.tree.map(
            lambda x: x.reshape(row_blocks * rows_each, *x.shape[2:])[:queries], out
        )

    return lax.map(one, (q, k, weights, k_scale, starts, ends))


def _blocks(x: jax.Array, count: int, each: int) -> jax.Array:
    """[n, ...] -> [count, each, ...], padded with zeros."""
    pad = [(0, count * each - x.shape[0])] + [(0, 0)] * (x.ndim - 1)
    return jnp.pad(x, pad).reshape(count, each, *x.shape[1:])


def _block_scores(rows: _Rows, keys: _Keys) -> tuple[jax.Array, jax.Array]:
    """Scores of one row block and one key block -> (float32 [R, S], valid bool [R, S]).

    The sum over heads runs h = 0, 1, ..., as in the kernels.
    """
    wide = keys.k.astype(jnp.float32)

    def add_head(total: jax.Array, head: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        q, weight = head  # [R, D], [R]
        dots = lax.dot_general(
            q.astype(jnp.float32),
            wide,
            (((1,), (1,)), ((), ())),
            precision=lax.Precision.HIGHEST,
            preferred_element_type=jnp.float32,
        )
        return total + weight[:, None] * jax.nn.relu(dots), None  # NaN stays NaN

    zero = jnp.zeros((rows.q.shape[0], keys.k.shape[0]), jnp.float32)
    heads = (jnp.swapaxes(rows.q, 0, 1), rows.weights.T)
    total, _ = lax.scan(add_head, vary_like(zero, (rows, keys)), heads)
    scores = _canonical(total * keys.k_scale)
    valid = (keys.columns >= rows.starts[:, None]) & (keys.columns < rows.ends[:, None])
    return scores, valid


def _canonical(scores: jax.Array) -> jax.Array:
    """Every NaN becomes one positive NaN, -0 becomes +0."""
    canonical = jnp.where(scores == 0, 0, scores)
    canonical = jnp.where(jnp.isnan(scores), jnp.nan, canonical)
    return _with_tangent_of(canonical, scores)


# A score of zero has its sum's gradient, which `where` would drop.
_with_tangent_of = jax.custom_jvp(lambda canonical, scores: canonical)
_with_tangent_of.defjvps(None, lambda tangent, out, canonical, scores: tangent)


def _order_key(x: jax.Array) -> jax.Array:
    """Floats -> integers of their width in IEEE total order, which lax.top_k sorts by.

    Comparing integers keeps clear of the platforms' own ways with NaN and zero.
    """
    dtype = jnp.dtype(f"int{8 * x.dtype.itemsize}")
    bits = lax.bitcast_convert_type(x, dtype)
    return jnp.where(bits < 0, bits ^ jnp.array(jnp.iinfo(dtype).max, dtype), bits)


def _from_order_key(key: jax.Array, dtype: Any = jnp.float32) -> jax.Array:
    """The inverse of `_order_key`, which is its own inverse on the bits."""
    bits = jnp.where(key < 0, key ^ jnp.array(jnp.iinfo(key.dtype).max, key.dtype), key)
    return lax.bitcast_convert_type(bits, dtype)
