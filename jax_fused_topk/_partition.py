"""How XLA splits a call over the devices of a sharded `jit`.

A module for one device, an exported one and the body of `shard_map` hold the plain
custom call.  In a module for several devices that XLA partitions, a call lowers
through `jax.experimental.custom_partitioning` instead: a Shardy rule carries the
sharding of batch and query axes from operands to results, and each device binds the
same primitive over its own rows.  Keys, heads and results along K stay whole.

The lowering rule does this, not the traced program, so that vmap, scan and the
derivatives see one primitive and the lowering depends on no devices.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import PartitionSpec


class Rule:
    """The factors of a primitive's dimensions, in Shardy's notation.

    Equal letters are equal sizes.  `split` names the factors that devices may share
    out among them; every other one stays whole.
    """

    def __init__(self, operands: dict[str, str], result: str, split: str) -> None:
        """`operands` maps names to factors as in "b q h", `result` holds those of each result."""
        self.names = tuple(operands)
        self.operands = tuple(tuple(dims.split()) for dims in operands.values())
        self.result = tuple(result.split())
        self.split = tuple(split.split())

    @property
    def whole(self) -> tuple[str, ...]:
        """The factors that stay whole, in order of their appearance."""
        seen = dict.fromkeys(f for dims in (*self.operands, self.result) for f in dims)
        return tuple(f for f in seen if f not in self.split)

    def text(self, results: int) -> str:
        """The rule as `def_partition` takes it."""
        operands = ", ".join(" ".join(o) for o in self.operands)
        return f"{operands} -> {', '.join([' '.join(self.result)] * results)}"

    def result_spec(self, operation: str, avals: Sequence[Any]) -> PartitionSpec:
        """The results' sharding over explicit mesh axes, from the operands' types.

        Raises:
          ValueError: if an operand is sharded along an axis that must stay whole, or
            two disagree.
        """
        found: dict[str, tuple[Any, str]] = {}
        for name, dims, aval in zip(self.names, self.operands, avals, strict=True):
            spec = aval.sharding.spec
            for factor, axes in zip(dims, (*spec, *[None] * len(dims)), strict=False):
                if axes is None:
                    continue
                if factor not in self.split:
                    raise ValueError(
                        f"{operation}: {name} [{', '.join(dims)}] must not be sharded along "
                        f"{factor} over an explicit mesh axis, got {spec}; jax.sharding.reshard "
                        "it first"
                    )
                known, by = found.setdefault(factor, (axes, name))
                if known != axes:
                    raise ValueError(
                        f"{operation}: {name} must be sharded along {factor} as {by} is, over "
                        f"{known!r}, or not at all, got {axes!r}"
                    )
        return PartitionSpec(*(found[f][0] if f in found else None for f in self.result))


def applies(ctx: Any) -> bool:
    """Whether XLA will partition the module that `ctx` lowers into."""
    module = ctx.module_context
    # Sharding contexts know a number of devices; those of shard_map know manual axes.
    count = getattr(module.axis_context, "num_devices", 1)
    return (
        count > 1
        and not module.lowering_parameters.for_export
        and jax.config.jax_use_shardy_partitioner
        and _devices(module, count) is not None
    )


def lower(
    primitive: Primitive, rule: Rule, ctx: Any, *operands: Any, **params: Any
) -> Sequence[Any]:
    """Lowers a bind of `primitive` so that XLA splits it by `rule`."""
    module = ctx.module_context
    devices = _devices(module, module.axis_context.num_devices)
    # custom_partitioning only counts the devices here: its shardings are of places.
    context = type(module.axis_context)(len(devices or ()), devices)
    call = _partitioned(primitive, rule, tuple(params.items()))
    return mlir.lower_fun(call, multiple_results=True)(
        ctx.replace(module_context=module.replace(axis_context=context)), *operands
    )


def _devices(module: Any, count: int) -> tuple[Any, ...] | None:
    """Any `count` devices of the module's platform, or None where there are fewer."""
    try:
        devices = jax.devices(module.platforms[0])
    except RuntimeError:
        return None
    return tuple(devices[:count]) if len(devices) >= count else None


@functools.cache
def _partitioned(
    primitive: Primitive, rule: Rule, params: tuple[tuple[str, Any], ...]
) -> Callable[..., Sequence[Any]]:
    """A bind of `primitive` under custom_partitioning."""

    def call(*operands: jax.Array) -> list[jax.Array]:
        return primitive.bind(*operands, **dict(params))

    def partition(
        mesh: Any, operands: Sequence[Any], results: Sequence[Any]
    ) -> tuple[Any, Callable[..., Any], Any, Any]:
        """Operands and results all split as the last result is, else as the first operand."""
        split = _tiles(rule, rule.result, results[-1].sharding)
        if split is None:
            split = _tiles(rule, rule.operands[0], operands[0].sharding)
        like = results[-1].sharding
        arguments = tuple(_sharding(rule, dims, split, like) for dims in rule.operands)
        out = [_sharding(rule, rule.result, split, like) for _ in results]
        return mesh, call, out, arguments

    @functools.cache
    def wrapped(results: int) -> Any:
        wrapped = custom_partitioning(call)
        wrapped.def_partition(
            partition,
            sharding_rule=rule.text(results),
            need_replication_factors=rule.whole,
            # Shardings as XLA has them: what mesh they came from is not known here.
            decode_shardings=False,
        )
        return wrapped

    def bind(*operands: jax.Array) -> Sequence[Any]:
        results = len(jax.eval_shape(call, *operands))
        return wrapped(results)(*operands)

    # The parameters stand in a function's name, as nothing else in the module tells them:
    # a key of the persistent compilation cache may leave the callback out.
    bind.__name__ = "_".join((primitive.name, *(f"{n}_{v}" for n, v in params)))
    return jax.jit(bind)


def _tiles(rule: Rule, dims: Sequence[str], sharding: Any) -> np.ndarray | None:
    """Which devices hold which part of the split factors.

    Returns:
      Device numbers [parts of each split factor..., copies], or None if whole.
    """
    hlo = sharding._hlo_sharding
    if not hlo.is_tiled():
        return None
    shape = list(hlo.tile_assignment_dimensions())
    devices = np.asarray(hlo.tile_assignment_devices()).reshape(shape)
    order = [dims.index(f) for f in rule.split]
    rest = [axis for axis in range(len(shape)) if axis not in order]
    return devices.transpose(order + rest).reshape(*(shape[a] for a in order), -1)


def _sharding(rule: Rule, dims: Sequence[str], tiles: np.ndarray | None, like: Any) -> Any:
    """The sharding of an array whose dimensions are `dims`, of the type of `like`."""
    kind: Any = type(like)
    make = functools.partial(kind, like._devices)
    hlo: Any = type(like._hlo_sharding)
    if tiles is None:
        return make(hlo.replicate())
    kept = [i for i, f in enumerate(rule.split) if f in dims]
    kept.sort(key=lambda i: dims.index(rule.split[i]))
    copies = [i for i in range(tiles.ndim) if i not in kept]
    parts = [tiles.shape[rule.split.index(f)] if f in rule.split else 1 for f in dims]
    devices = tiles.transpose(kept + copies).reshape(*parts, -1)
    if devices.size == devices.shape[-1]:
        return make(hlo.replicate())
    proto = like._hlo_sharding.to_proto().clone()
    proto.type = type(proto).Type.OTHER
    proto.tile_assignment_dimensions = list(devices.shape)
    proto.tile_assignment_devices = devices.ravel().tolist()
    proto.iota_reshape_dims, proto.iota_transpose_perm = [], []
    proto.last_tile_dims = []
    proto.replicate_on_last_tile_dim = True
    return make(hlo.from_proto(proto))
