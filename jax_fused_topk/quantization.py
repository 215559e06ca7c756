"""Quantisation to FP8 as ahead of an indexer: one scale for each vector."""

import operator
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_fused_topk._checks import check_array

FP8_MAX = 448.0  # the largest float8_e4m3fn


def quantize_fp8(
    x: jax.Array,
    *,
    axis: int = -1,
    scale: Literal["float32", "power_of_two"] = "float32",
) -> tuple[jax.Array, jax.Array]:
    """Quantises vectors to float8_e4m3fn with one float32 scale each.

    scale = max |x| / 448 along `axis` (DeepSeek-V3.2's act_quant), with
    "power_of_two" rounded up to a power of two (UE8M0).  x / scale is clipped to
    +-448 before the cast, which in JAX turns larger values into NaN: finite input
    never gives a NaN.

    Both results are constants under differentiation: float8 cannot hold a gradient, and one
    through the scale alone would be wrong.  So `weights * scale` trains the weights and not
    x; to train what makes q and k, keep them in bfloat16.

    Args:
      x: [..., D, ...] floating point, D at least 1.
      axis: the axis that shares a scale, one int.
      scale: "float32" or "power_of_two".

    Returns:
      (float8_e4m3fn of x's shape, float32 scales of x's shape without `axis`);
      x is close to values * scale.

    Raises:
      TypeError: if x is no floating-point array or `axis` is not an int.
      ValueError: if x has no such axis or nothing along it, or `scale` is neither of the two.
    """
    largest = np.finfo(np.float32).max
    if isinstance(x, float | list | tuple | np.ndarray) and np.asarray(x).dtype == np.float64:
        x = np.asarray(x)  # before JAX narrows it to float32, where it may overflow
        x = np.where(np.isfinite(x), np.clip(x, -largest, largest), x)
    x = check_array("quantize_fp8", "x", x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"quantize_fp8: x must be floating point, got {x.dtype}")
    axis = _check_axis(x, axis)
    if scale not in ("float32", "power_of_two"):
        raise ValueError(f'quantize_fp8: scale must be "float32" or "power_of_two", got {scale!r}')
    x = lax.stop_gradient(x)
    if x.dtype == jnp.float64:
        x = jnp.where(jnp.isfinite(x), jnp.clip(x, -largest, largest), x)
    x = x.astype(jnp.float32)
    # The floor keeps the scale a normal number for tiny and for all-zero vectors.
    amax = jnp.maximum(jnp.max(jnp.abs(x), axis=axis, keepdims=True), np.float32(2.0**-100))
    scales = amax / np.float32(FP8_MAX)
    if scale == "power_of_two":
        mantissa, exponent = jnp.frexp(scales)
        exponent = jnp.where(mantissa == 0.5, exponent - 1, exponent)
        scales = jnp.ldexp(np.float32(1.0), exponent)
    values = jnp.clip(x / scales, -FP8_MAX, FP8_MAX).astype(jnp.float8_e4m3fn)
    return values, jnp.squeeze(scales, axis)


def _check_axis(x: jax.Array, axis: Any) -> int:
    """Returns `axis` as an int if x has it and a maximum along it."""
    if x.ndim < 1:
        raise ValueError("quantize_fp8: x must have at least one dimension, got []")
    try:
        axis = operator.index(axis)
    except TypeError as error:
        raise TypeError(f"quantize_fp8: axis must be a Python int, got {axis!r}") from error
    if not -x.ndim <= axis < x.ndim:
        wanted = f"be from {-x.ndim} to {x.ndim - 1} as x has shape {list(x.shape)}"
        raise ValueError(f"quantize_fp8: axis must {wanted}, got {axis}")
    if x.shape[axis] == 0:
        wanted = f"have at least one element along axis {axis}"
        raise ValueError(f"quantize_fp8: x must {wanted}, got shape {list(x.shape)}")
    return axis
