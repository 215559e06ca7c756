"""Row ranges: which keys each query may choose."""

import jax
import jax.numpy as jnp

from jax_fused_topk._checks import check_size


def causal_ends(num_queries: int, num_keys: int) -> jax.Array:
    """One past the last key of each causal row: the queries are the last of the keys.

    Args:
      num_queries: Q, the number of queries.
      num_keys: N, the number of keys; key s and query s - (N - Q) are one token.
        Under `jax.export` both may be symbolic.

    Returns:
      int32 [Q]: N - Q + t + 1 for query t, at least 0.

    Raises:
      TypeError: if a count is neither an int known at trace time nor symbolic.
      ValueError: if a count is negative or above 2**31 - 1.
    """
    num_queries = check_size("causal_ends", "num_queries", num_queries)
    num_keys = check_size("causal_ends", "num_keys", num_keys)
    first = jnp.asarray(num_keys - num_queries + 1, jnp.int32)
    return jnp.maximum(first + jnp.arange(num_queries, dtype=jnp.int32), 0)
