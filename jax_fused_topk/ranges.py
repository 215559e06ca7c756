"""Row ranges: which keys each query may choose."""

import jax
import jax.numpy as jnp

from jax_fused_topk._checks import check_count


def causal_ends(num_queries: int, num_keys: int) -> jax.Array:
    """One past the last key of each causal row: the queries are the last of the keys.

    Args:
      num_queries: Q, the number of queries.
      num_keys: N, the number of keys; key s and query s - (N - Q) are one token.

    Returns:
      int32 [Q]: N - Q + t + 1 for query t, at least 0.

    Raises:
      TypeError: if a count is not an int known at trace time.
      ValueError: if a count is negative or above 2**31 - 1.
    """
    num_queries = check_count("causal_ends", "num_queries", num_queries, 0)
    num_keys = check_count("causal_ends", "num_keys", num_keys, 0)
    first = num_keys - num_queries + 1
    return jnp.maximum(jnp.arange(first, first + num_queries, dtype=jnp.int32), 0)
