"""Sizes of the CUDA kernels' workspaces, for sizes known and symbolic.

Under `jax.export` B, Q and N may be symbolic; they get a workspace that serves all.
"""

from typing import Any

import jax.numpy as jnp

from jax_fused_topk import _checks, _ffi


def index_topk_bytes(q: Any, keys: Any, topk: int, order: int, return_scores: bool) -> int:
    """Bytes that `index_topk` needs.

    Args:
      q: the aval of q, [B, Q, H, D]; B and Q may be symbolic.
      keys: N, may be symbolic.
      topk: K.
      order: the FFI attribute.
      return_scores: whether scores are a result.
    """
    fp8 = q.dtype == jnp.float8_e4m3fn
    cuda = _ffi.cuda_module()
    if _concrete(*q.shape, keys):
        return int(cuda.index_topk_workspace_bytes(fp8, *q.shape, keys, topk, order, return_scores))
    keys = keys if _concrete(keys) else _checks.MAX_KEYS
    return int(cuda.index_topk_workspace_bound(fp8, *q.shape[2:], keys, topk, order, return_scores))


def top_k_bytes(rows: Any, keys: Any, k: int, order: int) -> int:
    """Bytes that `top_k` needs; R and N may be symbolic, `order` is the FFI attribute."""
    cuda = _ffi.cuda_module()
    if _concrete(rows, keys):
        return int(cuda.top_k_workspace_bytes(rows, keys, k, order))
    keys = keys if _concrete(keys) else _checks.MAX_KEYS
    return int(cuda.top_k_workspace_bound(keys, k, order))


def _concrete(*sizes: Any) -> bool:
    return all(isinstance(size, int) for size in sizes)
