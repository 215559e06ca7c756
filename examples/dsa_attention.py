"""A DeepSeek-V3.2-style attention block around `index_topk`: checked small, timed large.

    python examples/dsa_attention.py                checks the block at small dimensions
    python examples/dsa_attention.py --benchmark    times it at DeepSeek-V3.2's, on a GPU

On a CPU add `--small --lengths 1024 --chunk 256` to the second.

The model is in `dsa/`.
"""

import argparse
import dataclasses
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from dsa import benchmark, block
from dsa.config import DEEPSEEK_V32, SMALL, Config

TOKENS, CHUNK = 96, 32  # of the check
LENGTHS, CHUNK_QUERIES = (8192, 16384, 32768, 65536, 131072), 4096  # of the benchmark

TOLERANCE = 1e-4
"""The largest difference, as a share of the largest output: float32 sums of some hundred
terms in two orders, 2**-24 each, with room for their growth through two projections."""

MIN_SAME = 0.95
"""Rows that must choose the same keys.  Sums in another order differ in the last bit, which
may tip a rounding to FP8 and with it a close choice."""


class Comparison(NamedTuple):
    """Two ways to the same output [T, hidden]."""

    difference: float  # the largest over rows that chose the same keys / the largest output
    same: float  # the share of such rows

    @property
    def agrees(self) -> bool:
        """Whether both are within what `TOLERANCE` and `MIN_SAME` allow."""
        return self.difference <= TOLERANCE and self.same >= MIN_SAME


def compare(y: jax.Array, expected: jax.Array, same: jax.Array | None = None) -> Comparison:
    """Compares outputs [T, hidden] in the rows where bool `same` [T] holds, all if None."""
    y, expected = np.asarray(y, np.float64), np.asarray(expected, np.float64)
    rows = np.ones(len(y), bool) if same is None else np.asarray(same)
    difference = np.abs(y - expected)[rows].max(initial=0.0) / np.abs(expected).max()
    return Comparison(float(difference), float(rows.mean()))


def check(
    config: Config = SMALL, tokens: int = TOKENS, chunk: int = CHUNK
) -> dict[str, Comparison]:
    """Compares the block's ways to one output, on random parameters and hidden states.

    Args:
      config: dimensions; its topk is below `tokens`.
      tokens: T, a multiple of `chunk`.
      chunk: queries of a prefill step.
    """
    keys = jax.random.split(jax.random.key(0))
    params = jax.jit(block.init_params, static_argnames="config")(keys[0], config)
    x = jax.random.normal(keys[1], (tokens, config.hidden), config.dtype)
    everything = dataclasses.replace(config, topk=tokens)
    # A GPU would round float32 factors to 11 bits.
    with jax.default_matmul_precision("highest"):
        run = jax.jit(block.prefill, static_argnames=("config", "chunk"))
        step = jax.jit(block.step, static_argnames="config")
        empty = block.empty_cache(config, tokens)
        once = run(params, config, x, empty, chunk=tokens)
        chunked = run(params, config, x, empty, chunk=chunk)
        cache = run(params, config, x[:-1], empty, chunk=tokens - 1).cache
        decoded = step(params, config, x[-1:], cache, jnp.int32(tokens - 1))
        full = run(params, everything, x, empty, chunk=chunk)
        dense = jax.jit(block.dense, static_argnames="config")(params, config, x)
    same = (chunked.indices == once.indices).all(axis=1)
    same_last = (decoded.indices == once.indices[-1:]).all(axis=1)
    return {
        "all keys chosen = dense": compare(full.y, dense),
        f"prefill by {chunk} = at once": compare(chunked.y, once.y, same),
        "decode step = last row": compare(decoded.y, once.y[-1:], same_last),
    }


def benchmark_cases(
    shapes: Sequence[tuple[int, int]] | None = None, config: Config = DEEPSEEK_V32
) -> Iterator[tuple[int, int, int, dict[str, benchmark.Call]]]:
    """What `python -m benchmarks --suite model` times: (q, n, topk, {name: call}).

    Args:
      shapes: (queries of the last chunk, tokens) of each case; `CHUNK_QUERIES` and `LENGTHS`
        if None.
      config: dimensions.
    """
    params = benchmark.make_params(config)
    for chunk, length in shapes or [(CHUNK_QUERIES, length) for length in LENGTHS]:
        calls = benchmark.calls(params, config, length, chunk)
        yield chunk, length, config.topk, {" ".join(key): call for key, call in calls.items()}


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--benchmark", action="store_true", help="time instead of checking")
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=LENGTHS,
        help="tokens in the cache, the chunk's included (%(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--chunk", type=int, default=CHUNK_QUERIES,
        help="queries of a prefill step; the one timed alone is the last (%(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--repeats", type=int, default=5, help="timed rounds of the step (%(default)s)"
    )
    parser.add_argument(
        "--prefill-repeats", type=int, default=2,
        help="timed rounds of the whole prefill of each length, 0 for none (%(default)s)",
    )  # fmt: skip
    parser.add_argument("--small", action="store_true", help="time at the check's dimensions")
    parser.add_argument("--out", type=Path, help="file for JSON lines")
    args = parser.parse_args(argv)
    if args.chunk < 1:
        parser.error(f"--chunk must be at least 1, got {args.chunk}")
    if args.repeats < 1:
        parser.error(f"--repeats must be at least 1, got {args.repeats}")
    if args.prefill_repeats < 0:
        parser.error(f"--prefill-repeats must be at least 0, got {args.prefill_repeats}")
    if args.benchmark and not args.small and jax.default_backend() == "cpu":
        parser.error(
            "--benchmark needs a GPU at DeepSeek-V3.2's dimensions, and JAX found none; try "
            "--benchmark --small --lengths 1024 --chunk 256"
        )
    config = SMALL if args.small else DEEPSEEK_V32
    shortest = max(args.chunk, config.topk)
    if min(args.lengths) < shortest:
        parser.error(f"--lengths must be at least {shortest}, got {min(args.lengths)}")
    if args.prefill_repeats and any(length % args.chunk for length in args.lengths):
        parser.error(
            f"--lengths must be multiples of --chunk {args.chunk} for the whole prefill, got "
            f"{' '.join(map(str, args.lengths))}; --prefill-repeats 0 leaves it out"
        )
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Checks, or times; returns 0 if all comparisons agree."""
    args = parse_arguments(argv)
    if args.benchmark:
        config = SMALL if args.small else DEEPSEEK_V32
        benchmark.run(
            config, args.lengths, args.chunk, args.repeats, args.prefill_repeats, args.out
        )
        return 0
    results = check()
    for name, comparison in results.items():
        print(
            f"{name:<28} difference {comparison.difference:.1e} of the largest output, "
            f"{100 * comparison.same:.0f} % of the rows chose the same keys"
        )
    good = all(comparison.agrees for comparison in results.values())
    print(f"tolerance {TOLERANCE:.0e}: {'all agree' if good else 'NOT ALL AGREE'}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
