"""Types under `jax.shard_map`: which mesh axes a value varies over."""

from typing import Any, TypeVar

import jax
from jax import lax

_T = TypeVar("_T")


def vary_like(tree: _T, like: Any) -> _T:
    """Under shard_map, marks `tree` as varying over every axis that `like` varies over.

    A loop's carry must vary as its body's results do.
    """
    axes = frozenset[str]().union(
        *(jax.typeof(x).manual_axis_type.varying for x in jax.tree.leaves(like))
    )

    def vary(x: jax.Array) -> jax.Array:
        missing = tuple(axes - jax.typeof(x).manual_axis_type.varying)
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(vary, tree)
