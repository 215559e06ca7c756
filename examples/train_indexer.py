"""Trains a small indexer to choose the keys that a frozen dense attention looks at.

    python examples/train_indexer.py

Two stages, as in DeepSeek-V3.2's continued pre-training (its report, section 2.1.1).  p[t, s]
is the attention summed over heads and L1-normalised, I[t, s] the index score, S[t] the chosen
keys:

    warm-up    loss = mean over t of KL(p[t, :]    || softmax(I[t, :]))
    sparse     loss = mean over t of KL(p[t, S[t]] || softmax(I[t, S[t]])), p normalised over S[t]

Only the indexer's parameters learn; hidden states and attention are constants.  Both losses
are one function of `index_topk(..., return_scores=True)`: with topk = T every key is chosen.
"""

import argparse
import dataclasses
import functools
import sys
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from dsa import block
from dsa.attention import dense_shares
from dsa.config import SMALL, Config
from dsa.indexer import Params
from dsa.layers import layer_norm, partial_rope

import jax_fused_topk as jft

BATCH, TOKENS, VOCABULARY = 4, 128, 32
WARM_UP, SPARSE = "warm-up", "sparse"


class Batch(NamedTuple):
    """Sequences and what the frozen attention makes of them."""

    x: jax.Array  # [B, T, hidden] hidden states
    latent_q: jax.Array  # [B, T, q_rank] the attention's low-rank queries
    target: jax.Array  # [B, T, T] float32: p, rows sum to 1, 0 past the diagonal


class Adam(NamedTuple):
    """Adam's state (Kingma and Ba, 2015, algorithm 1)."""

    count: jax.Array  # float32: steps taken
    mean: Params
    square: Params


# Data: a frozen attention over sequences of few kinds of token.


@functools.partial(jax.jit, static_argnames="config")
def frozen_attention(key: jax.Array, config: Config) -> Params:
    """Random parameters whose attention is peaked: its logits have a deviation of about 3."""
    params = block.init_params(key, config)
    return params | {"q_up": 3 * params["q_up"]}


@functools.partial(jax.jit, static_argnames="config")
def make_batch(key: jax.Array, config: Config, frozen: Params) -> Batch:
    """Draws sequences; a token is one of a few random vectors and some noise."""
    kinds, noise = jax.random.split(key)
    vocabulary = jax.random.normal(jax.random.key(0), (VOCABULARY, config.hidden))
    x = vocabulary[jax.random.randint(kinds, (BATCH, TOKENS), 0, VOCABULARY)]
    x += 0.1 * jax.random.normal(noise, x.shape)
    positions = jnp.arange(TOKENS, dtype=jnp.int32)

    def one(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        cache = block.append(frozen, config, x, block.empty_cache(config, TOKENS), 0)
        q = block.project_queries(frozen, config, x, positions)
        shares = dense_shares(frozen, config, q.nope, q.rope, cache.latents, positions + 1)
        return q.latent, shares.mean(axis=0)  # heads' rows each sum to 1

    return Batch(x, *jax.vmap(one)(x))


# The loss.


def choose(params: Params, config: Config, batch: Batch, topk: int) -> tuple[jax.Array, jax.Array]:
    """Index scores and indices of the chosen keys, each [B, T, topk].

    In bfloat16: float8 queries and keys pass no gradient.  The Hadamard transform, which
    changes no dot product, is left out.
    """
    positions = jnp.arange(batch.x.shape[1], dtype=jnp.int32)
    turn = jax.vmap(lambda v: partial_rope(v, positions, config.rope_dim, config.rope_base))
    q = turn(jnp.einsum("btr,rhd->bthd", batch.latent_q, params["index_q"]))
    k = layer_norm(batch.x @ params["index_k"], params["index_k_scale"], params["index_k_bias"])
    factor = (config.index_heads * config.index_dim) ** -0.5
    return jft.index_topk(
        q.astype(jnp.bfloat16),
        turn(k).astype(jnp.bfloat16),
        (batch.x @ params["index_weights"]).astype(jnp.float32) * factor,
        topk=topk,
        ends=jnp.broadcast_to(positions + 1, batch.x.shape[:2]),
        return_scores=True,
    )


def target_of(batch: Batch, indices: jax.Array) -> jax.Array:
    """P at the chosen keys, float32 [B, T, topk]; 0 where the index is -1."""
    chosen = jnp.take_along_axis(batch.target, jnp.maximum(indices, 0), axis=-1)
    return jnp.where(indices >= 0, chosen, 0)


def kl_loss(params: Params, config: Config, batch: Batch, topk: int) -> jax.Array:
    """The mean over tokens of KL(p || softmax(I)) over the chosen keys, in nats."""
    scores, indices = choose(params, config, batch, topk)
    p = target_of(batch, indices)
    p /= jnp.maximum(p.sum(axis=-1, keepdims=True), 1e-20)
    log_q = jnp.where(p > 0, jax.nn.log_softmax(scores, axis=-1), 0)  # -inf past a short row
    return (jax.scipy.special.xlogy(p, p) - p * log_q).sum(axis=-1).mean()


def chosen_mass(params: Params, config: Config, batch: Batch) -> jax.Array:
    """The share of the dense attention that falls on the topk chosen keys."""
    _, indices = choose(params, config, batch, config.topk)
    return target_of(batch, indices).sum(axis=-1).mean()


# Training.


def init_adam(params: Params) -> Adam:
    """No steps taken."""
    zeros = jax.tree.map(jnp.zeros_like, params)
    return Adam(jnp.float32(0), zeros, zeros)


@functools.partial(jax.jit, static_argnames=("config", "topk"))
def train_step(
    params: Params, adam: Adam, config: Config, batch: Batch, topk: int, rate: float
) -> tuple[Params, Adam, jax.Array]:
    """One step of Adam; returns the loss before it."""
    loss, gradient = jax.value_and_grad(kl_loss)(params, config, batch, topk)
    count = adam.count + 1
    mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, adam.mean, gradient)
    square = jax.tree.map(lambda s, g: 0.99 * s + 0.01 * g * g, adam.square, gradient)
    size = rate * jnp.sqrt(1 - 0.99**count) / (1 - 0.9**count)
    params = jax.tree.map(lambda p, m, s: p - size * m / (jnp.sqrt(s) + 1e-8), params, mean, square)
    return params, Adam(count, mean, square), loss


class Result(NamedTuple):
    """What the training gave."""

    params: Params
    losses: dict[str, tuple[float, float]]  # of each stage on held-out sequences: before, after
    mass: dict[str, float]  # `chosen_mass` of those, at the start and after each stage


def train(
    config: Config = SMALL, steps: int = 60, rate: float = 1e-2, report: int | None = None
) -> Result:
    """Runs both stages, `steps` each, on fresh sequences in every step.

    Args:
      config: dimensions; its topk is what the sparse stage chooses of `TOKENS` keys.
      steps: of each stage.
      rate: Adam's step size in the warm-up; the sparse stage takes a fifth.
      report: print a loss every so many steps.
    """
    keys = jax.random.split(jax.random.key(0), 3)
    frozen = frozen_attention(keys[0], config)
    drawn = jax.jit(block.init_params, static_argnames="config")(keys[1], config)
    params = {name: p for name, p in drawn.items() if name.startswith("index")}
    held_out = make_batch(keys[2], config, frozen)
    mass = jax.jit(chosen_mass, static_argnames="config")
    loss_of = jax.jit(kl_loss, static_argnames=("config", "topk"))
    losses, masses = {}, {"start": float(mass(params, config, held_out))}
    stages = ((WARM_UP, TOKENS, rate), (SPARSE, config.topk, rate / 5))
    for number, (stage, topk, step_size) in enumerate(stages):
        before = float(loss_of(params, config, held_out, topk))
        adam = init_adam(params)
        for i in range(steps):
            batch = make_batch(jax.random.fold_in(keys[2], number * steps + i), config, frozen)
            params, adam, loss = train_step(params, adam, config, batch, topk, step_size)
            if report and i % report == 0:
                print(f"{stage:<8} step {i:>4}   loss {loss:.4f} nats", flush=True)
        losses[stage] = before, float(loss_of(params, config, held_out, topk))
        masses[stage] = float(mass(params, config, held_out))
    return Result(params, losses, masses)


def main(argv: Sequence[str] | None = None) -> int:
    """Trains and prints; returns 0 if both stages' losses fell."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=60, help="of each stage (%(default)s)")
    parser.add_argument("--topk", type=int, default=SMALL.topk, help="chosen keys (%(default)s)")
    args = parser.parse_args(argv)
    if args.steps < 1:
        parser.error(f"--steps must be at least 1, got {args.steps}")
    if not 1 <= args.topk <= TOKENS:
        parser.error(f"--topk must be 1 to {TOKENS}, got {args.topk}")
    config = dataclasses.replace(SMALL, topk=args.topk)
    result = train(config, args.steps, report=max(args.steps // 6, 1))
    for stage, (before, after) in result.losses.items():
        print(f"{stage:<8} held-out loss {before:.4f} -> {after:.4f} nats")
    for when, mass in result.mass.items():
        print(f"{when:<8} {100 * mass:.1f} % of the attention on {args.topk} of {TOKENS} keys")
    return 0 if all(after < before for before, after in result.losses.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
