"""The dimensions of a block."""

import dataclasses
from typing import Any

import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Config:
    """Dimensions of one block, DeepSeek-V3.2's by default.  Hashable: static under `jit`."""

    hidden: int = 7168
    heads: int = 128
    q_rank: int = 1536  # of the queries' low-rank projection
    kv_rank: int = 512  # of the latent that all heads' keys and values are made of
    nope_dim: int = 128  # of a query head, without positions
    rope_dim: int = 64  # with rotary positions; its key is shared by all heads
    value_dim: int = 128
    index_heads: int = 64
    index_dim: int = 128  # of which the first rope_dim carry positions
    topk: int = 2048
    rope_base: float = 10000.0
    dtype: Any = jnp.bfloat16

    @property
    def latent_dim(self) -> int:
        """What the cache holds of a token for the attention: latent, then rotary key."""
        return self.kv_rank + self.rope_dim

    @property
    def softmax_scale(self) -> float:
        """1 / sqrt of a query head's dimension."""
        return float((self.nope_dim + self.rope_dim) ** -0.5)


DEEPSEEK_V32 = Config()

SMALL = Config(
    hidden=64, heads=4, q_rank=32, kv_rank=24, nope_dim=16, rope_dim=8, value_dim=16,
    index_heads=4, index_dim=32, topk=16, dtype=jnp.float32,
)  # fmt: skip
"""Runs on a CPU in milliseconds; float32, so that two ways of one sum agree closely."""
