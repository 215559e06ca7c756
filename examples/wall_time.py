"""Wall time of jitted calls, by turns."""

import time
from collections.abc import Callable, Mapping

import jax


def interleaved_ms(
    calls: Mapping[str, Callable[[], object]], repeats: int
) -> dict[str, list[float]]:
    """Times calls round and round, after two of each to compile and warm up.

    A GPU's clock follows its power: only times of one run, taken by turns, compare.

    Args:
      calls: name -> a function whose result is waited for.
      repeats: how many rounds.

    Returns:
      name -> a time in ms for each round.
    """
    for call in calls.values():
        jax.block_until_ready(call())
        jax.block_until_ready(call())
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            begin = time.perf_counter()
            jax.block_until_ready(call())
            samples[name].append((time.perf_counter() - begin) * 1e3)
    return samples
