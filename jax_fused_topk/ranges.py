"""Row ranges: which keys each query may choose."""

import jax
import jax.numpy as jnp


def causal_ends(num_queries: int, num_keys: int) -> jax.Array:
    """One past the last key of each causal row: the queries are the last of the keys.

    Args:
      num_queries: Q, the number of queries.
      num_keys: N, the number of keys; key s and query s - (N - Q) are one token.

    Returns:
      int32 [Q]: N - Q + t + 1 for query t, at least 0.

    Raises:
      ValueError: if a count is negative.
    """
    for name, value in (("num_queries", num_queries), ("num_keys", num_keys)):
        if value < 0:
            raise ValueError(f"causal_ends: {name} must be at least 0, got {value}")
    first = num_keys - num_queries + 1
    return jnp.maximum(jnp.arange(first, first + num_queries, dtype=jnp.int32), 0)
