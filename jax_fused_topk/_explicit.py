"""Explicit mesh axes around operations of JAX's own that cannot tell their result's sharding.

The kernels' primitives can by themselves: see _partition.py.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec


def over_auto_axes(
    function: Callable[..., jax.Array], spec: Sequence[Any]
) -> Callable[..., jax.Array]:
    """`function` with its operands' explicit mesh axes as automatic ones, its result by `spec`.

    Args:
      function: of arrays or trees of them.
      spec: the mesh axes of each dimension of the result, as in a `PartitionSpec`.
    """

    def call(*operands: Any) -> jax.Array:
        meshes = (jax.typeof(x).sharding.mesh for x in jax.tree.leaves(operands))
        mesh = next((m for m in meshes if m.explicit_axes), None)
        if mesh is None:
            return function(*operands)
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        result: jax.Array = jax.sharding.auto_axes(function)(*operands, out_sharding=sharding)
        return result

    return call


def spec_of(x: jax.Array) -> tuple[Any, ...]:
    """The mesh axes of each dimension of x."""
    return tuple(jax.typeof(x).sharding.spec)


def either_spec(a: jax.Array, b: jax.Array, dims: int) -> tuple[Any, ...]:
    """The mesh axes that one or the other has at each of the first dimensions."""
    return tuple(i or j for i, j in zip(spec_of(a)[:dims], spec_of(b)[:dims], strict=True))
