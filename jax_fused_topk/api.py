"""The public functions: checks, flattening of batch dimensions, one bind each."""

from typing import Literal

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jax_fused_topk import _checks, derivatives, primitives

Order = Literal["index", "score", "any"]
Implementation = Literal["cuda", "cpu", "reference"] | None


def index_topk(
    q: jax.Array,  # [*B, Q, H, D] float8_e4m3fn | bfloat16
    k: jax.Array,  # [*B, N, D] q's dtype
    weights: jax.Array,  # [*B, Q, H] float32
    *,
    topk: int = 2048,
    k_scale: jax.Array | None = None,  # [*B, N] float32
    starts: jax.Array | None = None,  # [*B, Q] int32
    ends: jax.Array | None = None,  # [*B, Q] int32
    order: Order = "index",
    return_scores: bool = False,
    implementation: Implementation = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Chooses each query's `topk` best keys by the lightning indexer's score.

        score[t, s] = k_scale[s] * sum_h weights[t, h] * max(0, q[t, h] . k[s])

    (DeepSeek-V3.2, the index score of DeepSeek Sparse Attention), accumulated in
    float32, h ascending, over the keys starts[t] <= s < ends[t].  The choice is
    exactly `jax.lax.top_k`'s over `index_scores` of the same implementation: NaN
    above +inf, larger first, equal scores by lower index.  Scratch memory is
    bounded, whatever Q and N are: no [Q, N] array of JAX's exists on the way.

    No gradient flows through the indices.  The scores of `return_scores` are
    differentiable in q, k, weights and k_scale at constant indices; float8 q and k are
    constants.  The derivative (`derivatives` has its formula) computes the K chosen
    pairs of a row again, a chunk of rows at a time; a -1 has none.  The results carry
    the names `CHECKPOINT_NAMES` for `jax.checkpoint` policies.

    Args:
      q: queries of H heads, [*B, Q, H, D], float8_e4m3fn or bfloat16.
      k: keys, one for all heads, [*B, N, D], of q's dtype.
      weights: [*B, Q, H] float32, with query scales and softmax factors folded in.
      topk: K, at least 1, static.  It may exceed N.
      k_scale: [*B, N] float32, one scale a key; 1 if None.
      starts: [*B, Q] int32, first valid key of each row, clamped to [0, N]; 0 if None.
      ends: [*B, Q] int32, one past the last, clamped likewise; N if None.  A row
        with starts >= ends is empty.  Keys outside a range have no effect, whatever
        bytes they hold.
      order: "index" for ascending indices, "score" for `lax.top_k`'s order, "any"
        for the same set in no stated order, the same in every run.
      return_scores: also return the chosen keys' scores.
      implementation: "cuda", "cpu" or "reference"; None picks by platform and shape.

    Returns:
      indices int32 [*B, Q, topk]; with `return_scores`, (scores float32, indices).
      A row with n < topk valid keys holds them all, then -1 (scores -inf).

    Raises:
      TypeError: if a dtype cannot work.
      ValueError: if a shape or option cannot work, or no kernel of the forced
        implementation serves the shape.
      RuntimeError: if implementation="cuda" and the CUDA kernels are not available.
      NotImplementedError: when lowering for a platform that the forced implementation
        does not run on.
    """
    topk = _checks.check_count("index_topk", "topk", topk, 1)
    _checks.check_choice("index_topk", "order", order, _checks.ORDER_NAMES)
    return_scores = _checks.check_flag("index_topk", "return_scores", return_scores)
    batch, operands = _checks.check_index("index_topk", q, k, weights, k_scale, starts, ends)
    primitives.check_implementation("index_topk", implementation, operands, topk)
    # The scores' derivative is a rule of its own, below.
    results = primitives.index_topk_p.bind(
        *(lax.stop_gradient(operands) if return_scores else operands),
        topk=topk,
        order=order,
        return_scores=return_scores,
        implementation=implementation,
    )
    shape = (*batch, operands.q.shape[1], topk)
    indices_name, scores_name = derivatives.CHECKPOINT_NAMES
    indices = checkpoint_name(results[-1], indices_name)
    if not return_scores:
        return indices.reshape(shape)
    scores = derivatives.differentiable_scores(
        checkpoint_name(results[0], scores_name), indices, *operands[:4]
    )
    return scores.reshape(shape), indices.reshape(shape)


def index_scores(
    q: jax.Array,  # [*B, Q, H, D] float8_e4m3fn | bfloat16
    k: jax.Array,  # [*B, N, D] q's dtype
    weights: jax.Array,  # [*B, Q, H] float32
    *,
    k_scale: jax.Array | None = None,  # [*B, N] float32
    starts: jax.Array | None = None,  # [*B, Q] int32
    ends: jax.Array | None = None,  # [*B, Q] int32
    implementation: Implementation = None,
) -> jax.Array:
    """The scores `index_topk` chooses by, bit for bit, as one array.

    Arguments and errors are those of `index_topk`.  Not differentiable: that raises
    NotImplementedError, with advice.

    Returns:
      float32 [*B, Q, N], -inf outside the row's range.  Every NaN is the same
      positive NaN and no zero is negative.
    """
    batch, operands = _checks.check_index("index_scores", q, k, weights, k_scale, starts, ends)
    primitives.check_implementation("index_scores", implementation, operands, 1)
    (scores,) = primitives.index_scores_p.bind(*operands, implementation=implementation)
    return scores.reshape(*batch, *scores.shape[1:])


def top_k(
    operand: jax.Array,  # [*B, N] float32 | bfloat16 | float16
    k: int,
    *,
    axis: int = -1,
    starts: jax.Array | None = None,  # [*B] int32
    ends: jax.Array | None = None,  # [*B] int32
    order: Order = "score",
    implementation: Implementation = None,
) -> tuple[jax.Array, jax.Array]:
    """A drop-in for `jax.lax.top_k` over the last axis, made for large k.

    IEEE total order of the values' bits, as `jax.lax.top_k` has it on a CPU: +NaN
    first, -NaN last, +0 before -0, equal values by lower index.  (XLA merges the
    payloads of bfloat16 NaNs; here they count and are returned as they came.)
    Differentiable in operand.

    Args:
      operand: [*B, N] float32, bfloat16 or float16.
      k: how many, 0 to N, static.
      axis: the last axis only, as -1 or its number.
      starts: [*B] int32, first valid key of each row, clamped to [0, N]; 0 if None.
      ends: [*B] int32, one past the last, clamped likewise; N if None.
      order: "score" for descending values, "index" for ascending indices, "any" for
        the same set in no stated order.
      implementation: "cuda", "cpu" or "reference"; None picks by platform and shape.

    Returns:
      (values of operand's dtype, indices int32), each [*B, k].  A row with n < k valid
      keys holds them all, then -inf and -1.

    Raises:
      TypeError, ValueError, RuntimeError, NotImplementedError: as `index_topk`.
    """
    k = _checks.check_count("top_k", "k", k, 0)
    _checks.check_choice("top_k", "order", order, _checks.ORDER_NAMES)
    batch, operands = _checks.check_top_k("top_k", operand, k, axis, starts, ends)
    primitives.check_top_k_implementation(implementation, k, order)
    values, indices = primitives.top_k_p.bind(
        *operands, k=k, order=order, implementation=implementation
    )
    return values.reshape(*batch, k), indices.reshape(*batch, k)
