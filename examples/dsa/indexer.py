"""The lightning indexer: FP8 queries and keys, and three ways to choose keys by them."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

import jax_fused_topk as jft
from dsa.config import Config
from dsa.layers import hadamard, layer_norm, partial_rope

Params = dict[str, jax.Array]

PLAIN_DOTS = 1 << 28
"""About how many dots `choose_plain` may hold at once, 4 bytes each."""


class IndexQueries(NamedTuple):
    """What a query brings to the indexer."""

    q: jax.Array  # [T, H, D] float8_e4m3fn
    weights: jax.Array  # [T, H] float32, q's scales folded in


class IndexKeys(NamedTuple):
    """What the cache holds of a token for the indexer."""

    k: jax.Array  # [N, D] float8_e4m3fn
    scale: jax.Array  # [N] float32


Choose = Callable[[IndexQueries, IndexKeys, jax.Array, int], jax.Array]
"""(queries, keys, ends int32 [T], topk) -> indices int32 [T, topk], -1 past a short row's end."""


def index_queries(
    params: Params,
    config: Config,
    x: jax.Array,  # [T, hidden]
    latent_q: jax.Array,  # [T, q_rank]
    positions: jax.Array,  # [T] int32
) -> IndexQueries:
    """Queries from the attention's own low-rank queries, weights from the hidden states."""
    q = jnp.einsum("tr,rhd->thd", latent_q, params["index_q"])
    q = hadamard(partial_rope(q, positions, config.rope_dim, config.rope_base))
    values, scale = jft.quantize_fp8(q)
    weights = jnp.matmul(x, params["index_weights"], preferred_element_type=jnp.float32)
    factor = (config.index_heads * config.index_dim) ** -0.5
    return IndexQueries(values, weights * factor * scale)


@jax.named_scope("indexer")
def index_keys(
    params: Params,
    config: Config,
    x: jax.Array,  # [T, hidden]
    positions: jax.Array,  # [T] int32
) -> IndexKeys:
    """One key a token for all index heads."""
    k = layer_norm(x @ params["index_k"], params["index_k_scale"], params["index_k_bias"])
    k = hadamard(partial_rope(k, positions, config.rope_dim, config.rope_base))
    return IndexKeys(*jft.quantize_fp8(k))


def choose_fused(queries: IndexQueries, keys: IndexKeys, ends: jax.Array, topk: int) -> jax.Array:
    """One call: no score reaches memory."""
    return jft.index_topk(
        queries.q, keys.k, queries.weights, topk=topk, k_scale=keys.scale, ends=ends
    )


def choose_unfused(queries: IndexQueries, keys: IndexKeys, ends: jax.Array, topk: int) -> jax.Array:
    """This package's scorer and its top-k, with the [T, N] scores in between.

    `topk` may exceed N only in `choose_fused`.
    """
    scores = jft.index_scores(queries.q, keys.k, queries.weights, k_scale=keys.scale, ends=ends)
    return jft.top_k(scores, topk, ends=ends, order="index")[1]


def choose_plain(queries: IndexQueries, keys: IndexKeys, ends: jax.Array, topk: int) -> jax.Array:
    """Scores in jnp, some rows at a time, then `jax.lax.top_k` over all of them."""
    heads, count = queries.q.shape[1], len(keys.k)
    # bfloat16 holds every float8: exact products.
    k = keys.k.astype(jnp.bfloat16)
    columns = jnp.arange(count)

    def row_scores(row: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        q, weights, end = row
        dots = jnp.einsum(
            "hd,nd->hn", q.astype(jnp.bfloat16), k, preferred_element_type=jnp.float32
        )
        scores = jnp.einsum("h,hn->n", weights, jax.nn.relu(dots)) * keys.scale
        return jnp.where(columns < end, scores, -jnp.inf)

    rows = max(min(PLAIN_DOTS // (heads * count), len(ends)), 1)
    scores = lax.map(row_scores, (*queries, ends), batch_size=rows)
    values, indices = lax.top_k(scores, topk)
    return jnp.where(values == -jnp.inf, -1, indices)
