"""Multi-head latent attention over chosen keys, and over all keys as its check."""

import jax
import jax.numpy as jnp
from jax import lax

import jax_fused_topk as jft
from dsa.config import Config

QUERY_BLOCK = 64
"""Queries whose chosen keys are gathered at once: at DeepSeek-V3.2's dimensions 151 MB."""

Params = dict[str, jax.Array]


@jax.named_scope("attention")
def attend_selected(
    params: Params,
    config: Config,
    q_nope: jax.Array,  # [T, heads, nope_dim]
    q_rope: jax.Array,  # [T, heads, rope_dim]
    latents: jax.Array,  # [N, latent_dim]
    indices: jax.Array,  # [T, K] int32, -1 for none
) -> jax.Array:
    """Attention of each query over its chosen keys, in the absorbed form.

    q . (c W_k) = (q W_k^T) . c: the keys' up-projection goes to the queries and the values'
    to the result, so that all heads share one gathered row a key (DeepSeek-V2, section 2.1).

    Returns:
      [T, heads, value_dim].  Every query must have a key, as causal ones do.
    """
    q = jnp.concatenate([jnp.einsum("thd,rhd->thr", q_nope, params["k_up"]), q_rope], axis=-1)

    def one(row: tuple[jax.Array, jax.Array]) -> jax.Array:
        q, indices = row  # [heads, latent_dim], [K]
        chosen = jft.gather_selected(latents, indices[None])[0]
        logits = jnp.einsum("hr,kr->hk", q, chosen, preferred_element_type=jnp.float32)
        logits = jnp.where(indices >= 0, logits * config.softmax_scale, -jnp.inf)
        shares = jax.nn.softmax(logits, axis=-1).astype(chosen.dtype)
        return jnp.einsum("hk,kr->hr", shares, chosen[:, : config.kv_rank])

    out = lax.map(one, (q, indices), batch_size=min(QUERY_BLOCK, len(q)))
    return jnp.einsum("thr,rhd->thd", out, params["v_up"])


def attend_all(
    params: Params,
    config: Config,
    q_nope: jax.Array,  # [T, heads, nope_dim]
    q_rope: jax.Array,  # [T, heads, rope_dim]
    latents: jax.Array,  # [N, latent_dim]
    ends: jax.Array,  # [T] int32
) -> jax.Array:
    """Dense causal attention with every head's keys and values written out: the check.

    Returns:
      [T, heads, value_dim].
    """
    shares = dense_shares(params, config, q_nope, q_rope, latents, ends)
    values = jnp.einsum("nr,rhd->nhd", latents[:, : config.kv_rank], params["v_up"])
    return jnp.einsum("htn,nhd->thd", shares.astype(values.dtype), values)


def dense_shares(
    params: Params,
    config: Config,
    q_nope: jax.Array,
    q_rope: jax.Array,
    latents: jax.Array,
    ends: jax.Array,
) -> jax.Array:
    """The softmax of `attend_all`, float32 [heads, T, N]; arguments as there."""
    latent, k_rope = latents[:, : config.kv_rank], latents[:, config.kv_rank :]
    k_nope = jnp.einsum("nr,rhd->nhd", latent, params["k_up"])
    logits = jnp.einsum("thd,nhd->htn", q_nope, k_nope, preferred_element_type=jnp.float32)
    logits += jnp.einsum("thd,nd->htn", q_rope, k_rope, preferred_element_type=jnp.float32)
    valid = jnp.arange(len(latents)) < ends[:, None]
    return jax.nn.softmax(jnp.where(valid, logits * config.softmax_scale, -jnp.inf), axis=-1)
