"""Wall time of jitted calls, by turns."""

import time
from collections.abc import Callable, Mapping
from typing import TypeVar

import jax

Key = TypeVar("Key")

LONG_MS = 5000.0
"""A long call that took more than this is not repeated."""


def interleaved_ms(
    calls: Mapping[Key, Callable[[], object]],
    repeats: int,
    long: Mapping[Key, Callable[[], object]] | None = None,
    long_repeats: int = 0,
) -> dict[Key, list[float]]:
    """Times calls round and round, after two of each to compile and warm up.

    A GPU's clock follows its power: only times of one run, taken by turns, compare.

    Args:
      calls: name -> a function whose result is waited for.
      repeats: how many rounds.
      long: the same, of long calls that only run what `calls` have compiled and warmed up:
        they have no warm-up, and no second round after a time above `LONG_MS`.
      long_repeats: how many rounds, the first ones, `long` takes part in.

    Returns:
      name -> a time in ms for each round the call took part in.
    """
    long = long or {}
    for call in calls.values():
        jax.block_until_ready(call())
        jax.block_until_ready(call())
    samples: dict[Key, list[float]] = {name: [] for name in (*calls, *long)}
    for turn in range(max(repeats, long_repeats)):
        if turn < repeats:
            for name, call in calls.items():
                samples[name].append(_ms(call))
        if turn < long_repeats:
            for name, call in long.items():
                if max(samples[name], default=0.0) <= LONG_MS:
                    samples[name].append(_ms(call))
    return samples


def _ms(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    jax.block_until_ready(call())
    return (time.perf_counter() - begin) * 1e3
