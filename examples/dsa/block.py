"""Parameters, cache, and the step that prefill and decoding share."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from dsa.attention import attend_all, attend_selected
from dsa.config import Config
from dsa.indexer import Choose, IndexKeys, Params, choose_fused, index_keys, index_queries
from dsa.layers import rms_norm, rope


class Cache(NamedTuple):
    """What is kept of every token; rows at and past the number of tokens mean nothing."""

    latents: jax.Array  # [N, latent_dim]: normed latent, then rotary key
    index: IndexKeys


class Output(NamedTuple):
    """What a step gives."""

    y: jax.Array  # [T, hidden]
    indices: jax.Array  # [T, topk] int32: the keys each token attended to
    cache: Cache  # with the tokens' entries


class Queries(NamedTuple):
    """The queries of T tokens."""

    latent: jax.Array  # [T, q_rank]
    nope: jax.Array  # [T, heads, nope_dim]
    rope: jax.Array  # [T, heads, rope_dim]


def init_params(key: jax.Array, config: Config) -> Params:
    """Normal draws of variance 1 / fan-in; norms start at 1 and 0."""
    c = config
    fans = {  # shape, and how many leading axes are summed over
        "q_down": ((c.hidden, c.q_rank), 1),
        "q_up": ((c.q_rank, c.heads, c.nope_dim + c.rope_dim), 1),
        "kv_down": ((c.hidden, c.latent_dim), 1),
        "k_up": ((c.kv_rank, c.heads, c.nope_dim), 1),
        "v_up": ((c.kv_rank, c.heads, c.value_dim), 1),
        "out": ((c.heads, c.value_dim, c.hidden), 2),
        "index_q": ((c.q_rank, c.index_heads, c.index_dim), 1),
        "index_k": ((c.hidden, c.index_dim), 1),
        "index_weights": ((c.hidden, c.index_heads), 1),
    }
    params = {}
    for name, (shape, summed) in fans.items():
        key, draw = jax.random.split(key)
        fan_in = 1
        for size in shape[:summed]:
            fan_in *= size
        params[name] = jax.random.normal(draw, shape, c.dtype) * c.dtype(fan_in**-0.5)
    ones = {"q_norm": c.q_rank, "kv_norm": c.kv_rank, "index_k_scale": c.index_dim}
    params |= {name: jnp.ones(size, jnp.float32) for name, size in ones.items()}
    params["index_k_bias"] = jnp.zeros(c.index_dim, jnp.float32)
    return params


def empty_cache(config: Config, tokens: int) -> Cache:
    """Room for N = `tokens`."""
    return Cache(
        jnp.zeros((tokens, config.latent_dim), config.dtype),
        IndexKeys(
            jnp.zeros((tokens, config.index_dim), jnp.float8_e4m3fn),
            jnp.zeros(tokens, jnp.float32),
        ),
    )


def append(
    params: Params,
    config: Config,
    x: jax.Array,  # [T, hidden]
    cache: Cache,
    start: jax.Array | int,  # int32: tokens the cache holds already
) -> Cache:
    """Writes the entries of T tokens at `start`; start + T must not exceed N."""
    positions = start + jnp.arange(len(x), dtype=jnp.int32)
    with jax.named_scope("projections"):
        down = x @ params["kv_down"]
        latent = rms_norm(down[:, : config.kv_rank], params["kv_norm"])
        k_rope = rope(down[:, config.kv_rank :], positions, config.rope_base)
        latents = jnp.concatenate([latent, k_rope], axis=-1)
    entries = Cache(latents, index_keys(params, config, x, positions))
    return jax.tree.map(
        lambda old, new: lax.dynamic_update_slice_in_dim(old, new, start, 0), cache, entries
    )


@jax.named_scope("projections")
def project_queries(params: Params, config: Config, x: jax.Array, positions: jax.Array) -> Queries:
    """Low-rank queries of x [T, hidden] at `positions` [T]."""
    latent = rms_norm(x @ params["q_down"], params["q_norm"])
    q = jnp.einsum("tr,rhd->thd", latent, params["q_up"])
    nope, turned = jnp.split(q, [config.nope_dim], axis=-1)
    return Queries(latent, nope, rope(turned, positions, config.rope_base))


@jax.named_scope("indexer")
def select(
    params: Params,
    config: Config,
    x: jax.Array,  # [T, hidden]
    latent_q: jax.Array,  # [T, q_rank]
    cache: Cache,
    start: jax.Array | int,
    choose: Choose = choose_fused,
) -> jax.Array:
    """The indexer step: int32 [T, topk], the keys that each token attends to."""
    positions = start + jnp.arange(len(x), dtype=jnp.int32)
    queries = index_queries(params, config, x, latent_q, positions)
    return choose(queries, cache.index, positions + 1, config.topk)


def step(
    params: Params,
    config: Config,
    x: jax.Array,  # [T, hidden]
    cache: Cache,
    start: jax.Array | int,  # int32: tokens the cache holds already
    choose: Choose = choose_fused,
) -> Output:
    """Attention of T more tokens over those before them and themselves.

    A chunk of a prefill has many tokens, a decode step one.
    """
    cache = append(params, config, x, cache, start)
    positions = start + jnp.arange(len(x), dtype=jnp.int32)
    q = project_queries(params, config, x, positions)
    indices = select(params, config, x, q.latent, cache, start, choose)
    out = attend_selected(params, config, q.nope, q.rope, cache.latents, indices)
    with jax.named_scope("projections"):
        y = jnp.einsum("thd,hdm->tm", out, params["out"])
    return Output(y, indices, cache)


def prefill(
    params: Params,
    config: Config,
    x: jax.Array,  # [T, hidden]
    cache: Cache,
    chunk: int,
) -> Output:
    """`step` over T tokens from the start of a cache, `chunk` at a time; T a multiple of it."""
    if len(x) % chunk:
        raise ValueError(f"prefill: chunk must divide the number of tokens {len(x)}, got {chunk}")

    def body(state: tuple[Cache, jax.Array], x: jax.Array) -> tuple[Any, Any]:
        cache, start = state
        y, indices, cache = step(params, config, x, cache, start)
        return (cache, start + chunk), (y, indices)

    chunks = x.reshape(-1, chunk, x.shape[-1])
    (cache, _), (y, indices) = lax.scan(body, (cache, jnp.int32(0)), chunks)
    return Output(y.reshape(x.shape), indices.reshape(len(x), -1), cache)


def dense(params: Params, config: Config, x: jax.Array) -> jax.Array:
    """The block with dense attention over x [T, hidden]: what all keys chosen must give."""
    cache = append(params, config, x, empty_cache(config, len(x)), 0)
    positions = jnp.arange(len(x), dtype=jnp.int32)
    q = project_queries(params, config, x, positions)
    out = attend_all(params, config, q.nope, q.rope, cache.latents, positions + 1)
    return jnp.einsum("thd,hdm->tm", out, params["out"])
