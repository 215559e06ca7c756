"""Times a step of the block and a whole prefill, with three ways to choose keys.

A step is the last chunk of a prefill: `chunk` queries at the end of `length` tokens.  The
prefill runs the step's program over all chunks from the first.  The indexer alone (index
queries, scores, choice) is timed in the same rounds for both, so that the saving predicted
from it stands beside the one measured on the whole block.
"""

import functools
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import records
from wall_time import LONG_MS, interleaved_ms

from dsa import block, chunks
from dsa.config import Config
from dsa.indexer import Params, choose_fused, choose_plain, choose_unfused

BASELINE, UNFUSED, FUSED = "jnp+lax.top_k", "index_scores+top_k", "index_topk"
CHOICES = {BASELINE: choose_plain, UNFUSED: choose_unfused, FUSED: choose_fused}
BLOCK, INDEXER = "block", "indexer"  # of a step
PREFILL, PREFILL_INDEXER = "prefill", "prefill indexer"  # of all chunks

Call = tuple[Callable[..., Any], tuple[Any, ...]]
"""A function to jit, or jitted, and its arguments."""

Samples = Mapping[tuple[str, str], Sequence[float]]
"""(part, key of CHOICES) -> times in ms."""


def make_params(config: Config) -> Params:
    """Random parameters, drawn on the device."""
    return jax.jit(block.init_params, static_argnames="config")(jax.random.key(0), config)


def hidden_states(config: Config, tokens: int, seed: int) -> jax.Array:
    """Normal draws [tokens, hidden]."""
    return jax.random.normal(jax.random.key(seed), (tokens, config.hidden), config.dtype)


@functools.partial(jax.jit, static_argnames="config")
def latent_queries(params: Params, config: Config, x: jax.Array) -> jax.Array:
    """The low-rank queries [T, q_rank] of x [T, hidden], which positions leave alone."""
    positions = jnp.arange(len(x), dtype=jnp.int32)
    return block.project_queries(params, config, x, positions).latent


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
    latent_q = latent_queries(params, config, x)

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


def make_prompt(params: Params, config: Config, length: int, chunk: int) -> list[chunks.Chunk]:
    """The tokens of `filled_cache`, chunk by chunk.

    Raises:
      ValueError: if `chunk` does not divide `length`.
    """
    if length % chunk:
        raise ValueError(f"make_prompt: chunk must divide length {length}, got {chunk}")
    prompt = []
    for start in range(0, length, chunk):
        x = hidden_states(config, chunk, seed=start)
        prompt.append(chunks.Chunk(x, latent_queries(params, config, x), jnp.int32(start)))
    return prompt


def prefill_calls(
    programs: Mapping[tuple[str, str], Call], prompt: list[chunks.Chunk]
) -> dict[tuple[str, str], Callable[[], Any]]:
    """Calls of the whole prefill from the jitted `calls` of the same length.

    Returns:
      (PREFILL or PREFILL_INDEXER, key of CHOICES) -> the call, which compiles nothing that a
      step has not.
    """
    out: dict[tuple[str, str], Callable[[], Any]] = {}
    for name in CHOICES:
        select, _ = programs[INDEXER, name]
        # The filled cache; the prefill writes every entry of its own again.
        step, (params, _, cache, _) = programs[BLOCK, name]
        out[PREFILL_INDEXER, name] = functools.partial(
            chunks.select_all, select, params, prompt, cache
        )
        out[PREFILL, name] = functools.partial(chunks.prefill, step, params, prompt, cache)
    return out


def same_keys(a: jax.Array, b: jax.Array) -> float:
    """The share of chosen keys, int32 [T, K] each, that two ways have in common in 64 rows."""
    rows = np.linspace(0, len(a) - 1, min(len(a), 64)).astype(int)
    a, b = np.asarray(a[rows]), np.asarray(b[rows])
    common = sum(len(np.intersect1d(x[x >= 0], y[y >= 0])) for x, y in zip(a, b, strict=True))
    return common / max(int((b >= 0).sum()), 1)


def time_fields(samples: Samples, name: str, prefix: str = "") -> dict[str, Any]:
    """The fields of a line that say how long the choice `name` took.

    Args:
      samples: of all choices.
      name: key of CHOICES.
      prefix: "" for the step, "prefill_" for the whole prefill; the fields' names begin so.
    """
    block, indexer = (PREFILL, PREFILL_INDEXER) if prefix else (BLOCK, INDEXER)
    ms = {key: statistics.median(times) for key, times in samples.items()}
    return {
        f"{block}_ms": ms[block, name],
        f"{prefix}indexer_ms": ms[indexer, name],
        f"{prefix}indexer_share": ms[indexer, name] / ms[block, name],
        f"{prefix}measured_saving_ms": ms[block, BASELINE] - ms[block, name],
        f"{prefix}predicted_saving_ms": ms[indexer, BASELINE] - ms[indexer, name],
        f"{block}_ms_samples": samples[block, name],
        f"{prefix}indexer_ms_samples": samples[indexer, name],
    }


def time_length(
    params: Params, config: Config, length: int, chunk: int, repeats: int, prefill_repeats: int
) -> list[dict[str, Any]]:
    """Times all ways at one length; one dict for each, ready for a JSON line.

    Args:
      params: of the block.
      config: its dimensions.
      length: tokens in the cache; a multiple of `chunk` if `prefill_repeats` is not 0.
      chunk: queries of a step.
      repeats: timed rounds of the step.
      prefill_repeats: timed rounds of the whole prefill; if 0 the lines are without it.

    Raises:
      AssertionError: if the fused and the unfused choice differ in a bit.
    """
    programs = {
        key: (jax.jit(f), arguments)
        for key, (f, arguments) in calls(params, config, length, chunk).items()
    }
    steps = {key: functools.partial(f, *arguments) for key, (f, arguments) in programs.items()}
    indices = {name: steps[INDEXER, name]() for name in CHOICES}
    if not bool(jnp.array_equal(indices[UNFUSED], indices[FUSED])):
        raise AssertionError(f"{FUSED} and {UNFUSED} choose differently at length {length}")
    prefills = {}
    if prefill_repeats:
        prefills = prefill_calls(programs, make_prompt(params, config, length, chunk))
    samples = interleaved_ms(steps, repeats, prefills, prefill_repeats)
    return [
        {
            "implementation": name,
            "q": chunk,
            "n": length,
            **time_fields(samples, name),
            **(time_fields(samples, name, "prefill_") if prefills else {}),
            "same_keys_as_index_topk": same_keys(indices[name], indices[FUSED]),
        }
        for name in CHOICES
    ]


def table_rows(line: Mapping[str, Any]) -> list[str]:
    """A line's row of the printed table for the step, and one for the prefill if it has that."""
    rows = []
    for timed, whole, prefix in (("step", "block_ms", ""), ("prefill", "prefill_ms", "prefill_")):
        if whole not in line:
            continue
        share = f"{100 * line[f'{prefix}indexer_share']:.1f} %"
        rows.append(
            f"{line['n']:>7}  {line['implementation']:<20}{timed:<8}{line[whole]:>10.2f}"
            f"{line[f'{prefix}indexer_ms']:>10.2f}{share:>8}"
            f"{line[f'{prefix}measured_saving_ms']:>10.2f}"
            f"{line[f'{prefix}predicted_saving_ms']:>11.2f}"
        )
    rows[0] += f"{100 * line['same_keys_as_index_topk']:>9.2f} %"
    return rows


def run(
    config: Config,
    lengths: Sequence[int],
    chunk: int,
    repeats: int,
    prefill_repeats: int,
    out: Path | None,
) -> list[dict[str, Any]]:
    """Times all lengths, prints a table, writes JSON lines to `out`; returns the lines.

    Arguments as `time_length`'s.
    """
    common = records.describe("model", jax.devices()[0]) | {
        "timed": f"one block, the last {chunk} queries of a prefill, batch 1, wall time",
        "hidden": config.hidden,
        "heads": config.heads,
        "h": config.index_heads,
        "d": config.index_dim,
        "topk": config.topk,
    }
    print(f"{common['timed']}; {common['card']}, jax {common['jax']}, medians of {repeats} in ms")
    if prefill_repeats:
        print(
            f"prefill: all chunks of {chunk} from the first, medians of {prefill_repeats}, "
            f"once where it takes more than {LONG_MS / 1e3:.0f} s"
        )
    print(
        f"{'length':>7}  {'choice':<20}{'timed':<8}{'block':>10}{'indexer':>10}{'share':>8}"
        f"{'saving':>10}{'predicted':>11}{'same keys':>11}"
    )
    params = make_params(config)
    lines = []
    for length in lengths:
        for line in time_length(params, config, length, chunk, repeats, prefill_repeats):
            lines.append(common | line)
            print("\n".join(table_rows(line)), flush=True)
        if out is not None:  # after each length: a run cut short leaves what it has
            records.write(out, lines)
    return lines
