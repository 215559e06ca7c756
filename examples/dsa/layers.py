"""Norms, rotary positions and the Hadamard transform."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

EPSILON = 1e-6


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """X / rms(x) * scale over the last axis, computed in float32; x's dtype."""
    wide = x.astype(jnp.float32)
    mean = jnp.mean(wide * wide, axis=-1, keepdims=True)
    return (wide * lax.rsqrt(mean + EPSILON) * scale).astype(x.dtype)


def layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
    """(x - mean(x)) / std(x) * scale + bias over the last axis, in float32; x's dtype."""
    wide = x.astype(jnp.float32)
    wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
    variance = jnp.mean(wide * wide, axis=-1, keepdims=True)
    return (wide * lax.rsqrt(variance + EPSILON) * scale + bias).astype(x.dtype)


def rope(
    x: jax.Array,  # [T, ..., D], D even
    positions: jax.Array,  # [T] int32
    base: float,
) -> jax.Array:
    """Turns the pair (x[i], x[i + D/2]) by position * base**(-2 i / D) radians; x's dtype."""
    half = x.shape[-1] // 2
    frequencies = jnp.float32(base) ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = positions[:, None].astype(jnp.float32) * frequencies
    angles = angles.reshape(len(positions), *[1] * (x.ndim - 2), half)
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1).astype(x.dtype)


def partial_rope(x: jax.Array, positions: jax.Array, dims: int, base: float) -> jax.Array:
    """`rope` over the first `dims` of the last axis; the rest as it is."""
    return jnp.concatenate([rope(x[..., :dims], positions, base), x[..., dims:]], axis=-1)


def hadamard(x: jax.Array) -> jax.Array:
    """The orthonormal Hadamard transform of the last axis [..., D], float32.

    It leaves dot products as they are and spreads large elements over the vector, which
    costs FP8 less.  D must be a power of two.
    """
    dim = x.shape[-1]
    if dim & (dim - 1) or dim == 0:
        raise ValueError(f"hadamard: x's last axis must be a power of two, got {dim}")
    signs = np.ones((1, 1), np.float32)
    while len(signs) < dim:
        signs = np.block([[signs, signs], [signs, -signs]])
    # +-1 is exact in every dtype; the sums are float32.
    out = jnp.matmul(x, signs.astype(x.dtype), preferred_element_type=jnp.float32)
    return out * np.float32(dim**-0.5)
