"""Times one step of the block, with three ways to choose keys.

A step is the last chunk of a prefill: `chunk` queries at the end of `length` tokens.  The
indexer step alone (index queries, scores, choice) is timed in the same rounds, so that the
saving predicted from it stands beside the one measured on the whole block.
"""

import datetime
import functools
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from wall_time import interleaved_ms

import jax_fused_topk as jft
from dsa import block
from dsa.config import Config
from dsa.indexer import Params, choose_fused, choose_plain, choose_unfused

BASELINE, FUSED = "jnp+lax.top_k", "index_topk"
CHOICES = {
    BASELINE: choose_plain,
    "index_scores+top_k": choose_unfused,
    FUSED: choose_fused,
}


def filled_cache(params: Params, config: Config, length: int, chunk: int) -> block.Cache:
    """A cache of `length` tokens with random hidden states, written a chunk at a time."""
    add = jax.jit(functools.partial(block.append, config=config), donate_argnames="cache")
    cache = block.empty_cache(config, length)
    for start in range(0, length, chunk):
        x = hidden_states(config, min(chunk, length - start), seed=start)
        cache = add(params, x=x, cache=cache, start=jnp.int32(start))
    return cache


def hidden_states(config: Config, tokens: int, seed: int) -> jax.Array:
    """Normal draws [tokens, hidden]."""
    return jax.random.normal(jax.random.key(seed), (tokens, config.hidden), config.dtype)


def same_keys(a: jax.Array, b: jax.Array) -> float:
    """The share of chosen keys, int32 [T, K] each, that two ways have in common in 64 rows."""
    rows = np.linspace(0, len(a) - 1, min(len(a), 64)).astype(int)
    a, b = np.asarray(a[rows]), np.asarray(b[rows])
    common = sum(len(np.intersect1d(x[x >= 0], y[y >= 0])) for x, y in zip(a, b, strict=True))
    return common / max(int((b >= 0).sum()), 1)


def time_length(
    params: Params, config: Config, length: int, chunk: int, repeats: int
) -> list[dict[str, Any]]:
    """Times all ways at one length; one dict for each, ready for a JSON line."""
    cache = filled_cache(params, config, length, chunk)
    x = hidden_states(config, chunk, seed=1)
    start = jnp.int32(length - chunk)
    positions = start + jnp.arange(chunk, dtype=jnp.int32)
    latent_q = jax.jit(functools.partial(block.project_queries, config=config))(
        params, x=x, positions=positions
    ).latent
    calls, indices = {}, {}
    for name, choose in CHOICES.items():
        indexer = jax.jit(functools.partial(block.select, config=config, choose=choose))
        whole = jax.jit(functools.partial(block.step, config=config, choose=choose))
        run_indexer = functools.partial(
            indexer, params, x=x, latent_q=latent_q, cache=cache, start=start
        )
        calls[name, "indexer"] = run_indexer
        calls[name, "block"] = functools.partial(whole, params, x=x, cache=cache, start=start)
        indices[name] = run_indexer()
    if not bool(jnp.array_equal(indices["index_scores+top_k"], indices[FUSED])):
        raise AssertionError(f"index_topk and index_scores+top_k choose differently at {length}")
    samples = interleaved_ms(calls, repeats)
    ms = {call: statistics.median(times) for call, times in samples.items()}
    return [
        {
            "implementation": name,
            "length": length,
            "chunk": chunk,
            "block_ms": ms[name, "block"],
            "indexer_ms": ms[name, "indexer"],
            "indexer_share": ms[name, "indexer"] / ms[name, "block"],
            "measured_saving_ms": ms[BASELINE, "block"] - ms[name, "block"],
            "predicted_saving_ms": ms[BASELINE, "indexer"] - ms[name, "indexer"],
            "same_keys_as_index_topk": same_keys(indices[name], indices[FUSED]),
            "block_ms_samples": samples[name, "block"],
            "indexer_ms_samples": samples[name, "indexer"],
        }
        for name in CHOICES
    ]


def run(
    config: Config, lengths: Sequence[int], chunk: int, repeats: int, out: Path | None
) -> list[dict[str, Any]]:
    """Times all lengths, prints a table, appends to JSON lines in `out`; returns the lines."""
    device = jax.devices()[0]
    common = {
        "run_id": datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%SZ"),
        "card": device.device_kind,
        **{name: jft.build_info()[name] for name in ("version", "jax", "cuda_toolkit")},
        "suite": "model",
        "timed": f"one block, the last {chunk} queries of a prefill, batch 1, wall time",
        "hidden": config.hidden,
        "heads": config.heads,
        "index_heads": config.index_heads,
        "topk": config.topk,
    }
    print(f"{common['timed']}; {common['card']}, jax {common['jax']}, medians in ms")
    print(
        f"{'length':>7}  {'choice':<20}{'block':>10}{'indexer':>10}{'share':>8}"
        f"{'saving':>10}{'predicted':>11}{'same keys':>11}"
    )
    params = jax.jit(block.init_params, static_argnames="config")(jax.random.key(0), config)
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
            if out is not None:
                out.parent.mkdir(parents=True, exist_ok=True)
                out.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return lines
