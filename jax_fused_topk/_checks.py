"""Checks of public arguments, at trace time, and their flattening to one batch axis."""

import math
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

SCORED_DTYPES = (jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.bfloat16))
TOP_K_DTYPES = (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))
ORDER_NAMES = ("index", "score", "any")
IMPLEMENTATIONS = (None, "cuda", "cpu", "reference")
MAX_KEYS = 2**31 - 1


class IndexOperands(NamedTuple):
    """The operands of a scored operation with their batch dimensions flattened."""

    q: jax.Array  # [B, Q, H, D]
    k: jax.Array  # [B, N, D]
    weights: jax.Array  # [B, Q, H] float32
    k_scale: jax.Array  # [B, N] float32
    starts: jax.Array  # [B, Q] int32
    ends: jax.Array  # [B, Q] int32


def _wrong(function: str, name: str, expected: str, got: object) -> str:
    return f"{function}: {name} must {expected}, got {got}"


def _dtype_names(dtypes: tuple[np.dtype, ...]) -> str:
    *others, last = (d.name for d in dtypes)
    return f"{', '.join(others)} or {last}" if others else last


def _expect_dtype(
    function: str, name: str, x: jax.Array, dtypes: tuple[np.dtype, ...], hint: str = ""
) -> None:
    if x.dtype not in dtypes:
        got = f"{x.dtype.name}{hint}"
        raise TypeError(_wrong(function, name, f"have dtype {_dtype_names(dtypes)}", got))


def _expect_float32(function: str, name: str, x: jax.Array) -> None:
    hint = " (.astype(jnp.float32))" if jnp.issubdtype(x.dtype, jnp.floating) else ""
    _expect_dtype(function, name, x, (jnp.dtype(jnp.float32),), hint)


def _expect_shape(
    function: str, name: str, x: jax.Array, shape: tuple[int, ...], meaning: str, hint: str = ""
) -> None:
    if x.shape != shape:
        got = f"{list(x.shape)}{hint}"
        raise ValueError(_wrong(function, name, f"have shape {meaning} = {list(shape)}", got))


def _broadcasts(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
    """Whether `jnp.broadcast_to` would make `shape` of it."""
    ends = zip(reversed(shape), reversed(to), strict=False)
    return len(shape) <= len(to) and all(size in (1, whole) for size, whole in ends)


def check_array(function: str, name: str, value: Any) -> jax.Array:
    """Returns `value` as an array; raises TypeError, naming the argument, if it is none."""
    try:
        return jnp.asarray(value)
    except (TypeError, ValueError, OverflowError) as error:
        got = f"{type(value).__name__} ({error})"
        raise TypeError(_wrong(function, name, "be an array", got)) from error


def _expect_keys(function: str, name: str, keys: Any) -> None:
    # A symbolic size (jax.export) can be compared only when it is bound.
    if isinstance(keys, int) and keys > MAX_KEYS:
        raise ValueError(_wrong(function, name, "have at most 2**31 - 1 keys", keys))


def check_choice(function: str, name: str, value: Any, choices: tuple[Any, ...]) -> None:
    """Raises ValueError unless `value` is one of `choices`."""
    if not isinstance(value, str | None) or value not in choices:
        listed = ", ".join(repr(c) for c in choices)
        raise ValueError(_wrong(function, name, f"be one of {listed}", repr(value)))


def check_count(function: str, name: str, value: Any, lowest: int) -> int:
    """Returns `value` as an int of at least `lowest`.

    Raises:
      TypeError: if it is not an integer known at trace time.
      ValueError: if it is too small.
    """
    try:
        count = operator.index(value)
    except TypeError:
        count = None
    if count is None or isinstance(value, bool):  # a bool is an int to Python
        traced = "a traced array; mark it static under jit"
        got = traced if isinstance(value, jax.core.Tracer) else f"{value!r:.60}"
        raise TypeError(_wrong(function, name, "be a Python int", got))
    if count < lowest:
        raise ValueError(_wrong(function, name, f"be at least {lowest}", count))
    if count > MAX_KEYS:
        raise ValueError(_wrong(function, name, "be at most 2**31 - 1", count))
    return count


def check_size(function: str, name: str, value: Any) -> Any:
    """Returns an array's size: an int of at least 0, or a symbolic one of `jax.export`.

    Raises:
      TypeError: if it is neither.
      ValueError: if it is negative.
    """
    return value if export.is_symbolic_dim(value) else check_count(function, name, value, 0)


def check_flag(function: str, name: str, value: Any) -> bool:
    """Returns `value`; raises TypeError unless it is a bool known at trace time."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(
            _wrong(function, name, "be True or False, known at trace time", f"{value!r:.60}")
        )
    return bool(value)


def _range_or_default(
    function: str, name: str, value: Any, shape: tuple[int, ...], meaning: str, default: int
) -> jax.Array:
    """A row range's end as int32 of `shape`; `default` where it was not given."""
    if value is None:
        return jnp.full(shape, default, jnp.int32)
    wide = isinstance(value, np.ndarray) and value.dtype in (np.int64, np.uint64)
    if wide and not jax.config.jax_enable_x64:  # jnp.asarray would drop the upper bits
        limits = np.iinfo(np.int32)
        value = np.clip(value, limits.min, limits.max).astype(np.int32)
    x = check_array(function, name, value)
    _expect_dtype(function, name, x, (jnp.dtype(jnp.int32),))
    hint = " (jnp.broadcast_to)" if _broadcasts(x.shape, shape) else ""
    _expect_shape(function, name, x, shape, meaning, hint)
    return x


def check_index(
    function: str, q: Any, k: Any, weights: Any, k_scale: Any, starts: Any, ends: Any
) -> tuple[tuple[int, ...], IndexOperands]:
    """Checks the operands of a scored operation.

    Returns:
      The batch dimensions *B, and the operands with them flattened to one; an
      absent k_scale is 1, an absent range is all keys.

    Raises:
      TypeError, ValueError: naming the argument, what was expected and what came.
    """
    q, k, weights = (
        check_array(function, n, x) for n, x in (("q", q), ("k", k), ("weights", weights))
    )
    hint = "" if q.dtype != jnp.float32 else " (see quantize_fp8)"
    _expect_dtype(function, "q", q, SCORED_DTYPES, hint)
    if k.dtype != q.dtype:
        raise TypeError(_wrong(function, "k", f"have q's dtype, {q.dtype.name}", k.dtype.name))
    _expect_float32(function, "weights", weights)
    if q.ndim < 3:
        raise ValueError(_wrong(function, "q", "have shape [*B, Q, H, D]", list(q.shape)))
    *batch, queries, heads, dim = q.shape
    batch_shape = tuple(batch)
    if k.ndim != q.ndim - 1 or k.shape[:-2] != batch_shape or k.shape[-1] != dim:
        wanted = f"have shape [*B, N, D] with *B = {batch} and D = {dim} as q has"
        raise ValueError(_wrong(function, "k", wanted, list(k.shape)))
    if heads < 1 or dim < 1:
        raise ValueError(
            _wrong(function, "q", "have at least one head and dimension", list(q.shape))
        )
    keys = k.shape[-2]
    _expect_keys(function, "k", keys)
    _expect_shape(function, "weights", weights, (*batch, queries, heads), "[*B, Q, H]")
    if k_scale is None:
        k_scale = jnp.ones((*batch, keys), jnp.float32)
    else:
        k_scale = check_array(function, "k_scale", k_scale)
        _expect_float32(function, "k_scale", k_scale)
        _expect_shape(function, "k_scale", k_scale, (*batch, keys), "[*B, N]")
    rows = (*batch, queries)
    starts = _range_or_default(function, "starts", starts, rows, "[*B, Q]", 0)
    ends = _range_or_default(function, "ends", ends, rows, "[*B, Q]", keys)
    operands = (q, k, weights, k_scale, starts, ends)
    flat = math.prod(batch)
    return batch_shape, IndexOperands(*(x.reshape(flat, *x.shape[len(batch) :]) for x in operands))


class TopKOperands(NamedTuple):
    """The operands of `top_k` with their leading dimensions flattened."""

    operand: jax.Array  # [R, N]
    starts: jax.Array  # [R] int32
    ends: jax.Array  # [R] int32


def check_top_k(
    function: str, operand: Any, k: int, axis: Any, starts: Any, ends: Any
) -> tuple[tuple[int, ...], TopKOperands]:
    """Checks the arguments of `top_k`; returns *B and the operands flattened to rows.

    Raises:
      TypeError, ValueError: naming the argument, what was expected and what came.
    """
    x = check_array(function, "operand", operand)
    _expect_dtype(function, "operand", x, TOP_K_DTYPES)
    if x.ndim < 1:
        raise ValueError(_wrong(function, "operand", "have at least one dimension", list(x.shape)))
    if axis not in (-1, x.ndim - 1):
        wanted = f"be the last one, -1 or {x.ndim - 1}; move it there with jnp.moveaxis"
        raise ValueError(_wrong(function, "axis", wanted, repr(axis)))
    *batch, keys = x.shape
    _expect_keys(function, "operand", keys)
    if isinstance(keys, int) and k > keys:
        raise ValueError(_wrong(function, "k", f"be at most operand's last dimension, {keys}", k))
    starts = _range_or_default(function, "starts", starts, tuple(batch), "[*B]", 0)
    ends = _range_or_default(function, "ends", ends, tuple(batch), "[*B]", keys)
    rows = math.prod(batch)
    sharding = jax.typeof(x).sharding
    if sharding.mesh.explicit_axes and any(sharding.spec[1:-1]):
        # The rows of all batch dimensions become one dimension.
        wanted = "be sharded along its first dimension alone, over an explicit mesh axis"
        raise ValueError(_wrong(function, "operand", wanted, sharding.spec))
    return tuple(batch), TopKOperands(
        x.reshape(rows, keys), starts.reshape(rows), ends.reshape(rows)
    )


def check_selected(
    function: str, name: str, x: Any, indices: Any, indexed: int
) -> tuple[jax.Array, jax.Array]:
    """Checks indices [*B, Q, K] and what they select from or for; returns both as arrays.

    Args:
      function: the caller, for messages.
      name: the name of `x`, for messages.
      x: [*B, N, ...] if `indexed` is 1, [*B, Q, K, ...] if it is 2.
      indices: int32 [*B, Q, K].
      indexed: how many dimensions of `x` follow *B and belong to the indices.

    Raises:
      TypeError, ValueError: naming the argument, what was expected and what came.
    """
    x = check_array(function, name, x)
    indices = check_array(function, "indices", indices)
    _expect_dtype(function, "indices", indices, (jnp.dtype(jnp.int32),))
    if indices.ndim < 2:
        raise ValueError(_wrong(function, "indices", "have shape [*B, Q, K]", list(indices.shape)))
    batch = indices.shape[:-2]
    leading = batch if indexed == 1 else indices.shape
    if x.ndim < len(batch) + indexed or x.shape[: len(leading)] != leading:
        meaning = "[*B, N, ...]" if indexed == 1 else "[*B, Q, K, ...]"
        wanted = f"have shape {meaning} as indices {list(indices.shape)} has"
        raise ValueError(_wrong(function, name, wanted, list(x.shape)))
    if indexed == 1:
        _expect_keys(function, name, x.shape[len(batch)])
    return x, indices
