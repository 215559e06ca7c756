"""Times one step of the block, with three ways to choose keys.

A step is the last chunk of a prefill: `chunk` queries at the end of `length` tokens.  The
indexer alone (index queries, scores, choice) is timed in the same rounds, so that the saving
predicted from it stands beside the one measured on the whole block.
"""

import functools
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import records
from wall_time import interleaved_ms

from dsa import block
from dsa.config import Config
from dsa.indexer import Params, choose_fused, choose_plain, choose_unfused

BASELINE, UNFUSED, FUSED = "jnp+lax.top_k", "index_scores+top_k", "index_topk"
CHOICES = {BASELINE: choose_plain, UNFUSED: choose_unfused, FUSED: choose_fused}
BLOCK, INDEXER = "block", "indexer"

Call = tuple[Callable[..., Any], tuple[Any, ...]]
"""A function to jit, and its arguments."""


def make_params(config: Config) -> Params:
    """Random parameters, drawn on the device."""
    return jax.jit(block.init_params, static_argnames="config")(jax.random.key(0), config)


def hidden_states(config: Config, tokens: int, seed: int) -> jax.Array:
    """Normal draws [tokens, hidden]."""
    return jax.random.normal(jax.random.key(seed), (tokens, config.hidden), config.dtype)


def filled_cache(params: Params, config: Config, length: int, chunk: int) -> block.Cache:
    """A cache of `length` tokens with random hidden states, written a chunk at a time."""
    add = jax.jit(functools.partial(block.append, config=config), donate_argnames="cache")
    cache = block.empty_cache(config, length)
    # Chunks of one size, the last over the one before it: one program to compile.
    for start in (*range(0, length - chunk, chunk), length - chunk):
        x = hidden_states(config, chunk, seed=start)
        cache = add(params, x=x, cache=cache, start=jnp.int32(start))
    return cache


def calls(params: Params, config: Config, length: int, chunk: int) -> dict[tuple[str, str], Call]:
    """(BLOCK or INDEXER, key of CHOICES) -> the call, at one length."""
    cache = filled_cache(params, config, length, chunk)
    # The last tokens of the cache, which a step writes again.
    x, start = hidden_states(config, chunk, seed=length - chunk), jnp.int32(length - chunk)
    positions = start + jnp.arange(chunk, dtype=jnp.int32)
    project = jax.jit(functools.partial(block.project_queries, config=config))
    latent_q = project(params, x=x, positions=positions).latent

    def indexer(choose: Any) -> Callable[..., jax.Array]:
        return lambda params, x, latent_q, cache, start: block.select(
            params, config, x, latent_q, cache, start, choose
        )

    def whole(choose: Any) -> Callable[..., block.Output]:
        return lambda params, x, cache, start: block.step(params, config, x, cache, start, choose)

    out: dict[tuple[str, str], Call] = {}
    for name, choose in CHOICES.items():
        out[INDEXER, name] = indexer(choose), (params, x, latent_q, cache, start)
        out[BLOCK, name] = whole(choose), (params, x, cache, start)
    return out


def same_keys(a: jax.Array, b: jax.Array) -> float:
    """The share of chosen keys, int32 [T, K] each, that two ways have in common in 64 rows."""
    rows = np.linspace(0, len(a) - 1, min(len(a), 64)).astype(int)
    a, b = np.asarray(a[rows]), np.asarray(b[rows])
    common = sum(len(np.intersect1d(x[x >= 0], y[y >= 0])) for x, y in zip(a, b, strict=True))
    return common / max(int((b >= 0).sum()), 1)


def time_length(
    params: Params, config: Config, length: int, chunk: int, repeats: int
) -> list[dict[str, Any]]:
    """Times all ways at one length; one dict for each, ready for a JSON line.

    Raises:
      AssertionError: if the fused and the unfused choice differ in a bit.
    """
    jitted = {
        key: functools.partial(jax.jit(f), *arguments)
        for key, (f, arguments) in calls(params, config, length, chunk).items()
    }
    indices = {name: jitted[INDEXER, name]() for name in CHOICES}
    if not bool(jnp.array_equal(indices[UNFUSED], indices[FUSED])):
        raise AssertionError(f"{FUSED} and {UNFUSED} choose differently at length {length}")
    samples = interleaved_ms(jitted, repeats)
    ms = {key: statistics.median(times) for key, times in samples.items()}
    return [
        {
            "implementation": name,
            "q": chunk,
            "n": length,
            "block_ms": ms[BLOCK, name],
            "indexer_ms": ms[INDEXER, name],
            "indexer_share": ms[INDEXER, name] / ms[BLOCK, name],
            "measured_saving_ms": ms[BLOCK, BASELINE] - ms[BLOCK, name],
            "predicted_saving_ms": ms[INDEXER, BASELINE] - ms[INDEXER, name],
            "same_keys_as_index_topk": same_keys(indices[name], indices[FUSED]),
            "block_ms_samples": samples[BLOCK, name],
            "indexer_ms_samples": samples[INDEXER, name],
        }
        for name in CHOICES
    ]


def run(
    config: Config, lengths: Sequence[int], chunk: int, repeats: int, out: Path | None
) -> list[dict[str, Any]]:
    """Times all lengths, prints a table, writes JSON lines to `out`; returns the lines."""
    common = records.describe("model", jax.devices()[0]) | {
        "timed": f"one block, the last {chunk} queries of a prefill, batch 1, wall time",
        "hidden": config.hidden,
        "heads": config.heads,
        "h": config.index_heads,
        "d": config.index_dim,
        "topk": config.topk,
    }
    print(f"{common['timed']}; {common['card']}, jax {common['jax']}, medians of {repeats} in ms")
    print(
        f"{'length':>7}  {'choice':<20}{'block':>10}{'indexer':>10}{'share':>8}"
        f"{'saving':>10}{'predicted':>11}{'same keys':>11}"
    )
    params = make_params(config)
    lines = []
    for length in lengths:
        for line in time_length(params, config, length, chunk, repeats):
            lines.append(common | line)
            print(
                f"{length:>7}  {line['implementation']:<20}{line['block_ms']:>10.2f}"
                f"{line['indexer_ms']:>10.2f}{100 * line['indexer_share']:>6.1f} %"
                f"{line['measured_saving_ms']:>10.2f}{line['predicted_saving_ms']:>11.2f}"
                f"{100 * line['same_keys_as_index_topk']:>9.2f} %",
                flush=True,
            )
        if out is not None:  # after each length: a run cut short leaves what it has
            records.write(out, lines)
    return lines
