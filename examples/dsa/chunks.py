"""A prompt in chunks, and loops of one jitted program over all of them.

The start is an argument of the programs, so that the one of a step serves every chunk.  JAX
runs ahead of the device: a loop costs what its programs cost, and nothing waits in between.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax

from dsa.block import Cache, Output
from dsa.indexer import Params

Step = Callable[[Params, jax.Array, Cache, jax.Array], Output]
"""(params, x [T, hidden], cache, start) -> what `block.step` gives."""

Select = Callable[[Params, jax.Array, jax.Array, Cache, jax.Array], jax.Array]
"""(params, x [T, hidden], latent_q [T, q_rank], cache, start) -> what `block.select` gives."""


class Chunk(NamedTuple):
    """T tokens of a prompt."""

    x: jax.Array  # [T, hidden]
    latent_q: jax.Array  # [T, q_rank]
    start: jax.Array  # int32: tokens before them


class Prefilled(NamedTuple):
    """What a whole prefill leaves."""

    y: list[jax.Array]  # [T, hidden] of each chunk
    cache: Cache


def prefill(step: Step, params: Params, prompt: list[Chunk], cache: Cache) -> Prefilled:
    """`step` over all chunks; `cache` may hold anything.

    Each step leaves a cache of its own, for `step` donates nothing: at 131072 tokens of
    DeepSeek-V3.2's dimensions a copy of 168 MB a chunk.
    """
    y = []
    for chunk in prompt:
        out = step(params, chunk.x, cache, chunk.start)
        cache = out.cache
        y.append(out.y)
    return Prefilled(y, cache)


def select_all(
    select: Select, params: Params, prompt: list[Chunk], cache: Cache
) -> list[jax.Array]:
    """The indexer alone over all chunks, `cache` filled: int32 [T, topk] of each."""
    return [select(params, c.x, c.latent_q, cache, c.start) for c in prompt]
