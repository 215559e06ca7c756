"""Exact top-k for sparse attention in JAX: scoring and selection in one call.

What lives where:

- `api`: the public functions and their checks.
- `primitives`: the JAX primitives behind them, with lowering, batching and jvp.
- `reference`: pure jnp, the oracle and the path for every other platform.
- `quantization`, `ranges`: FP8 quantisation and row ranges.
- `_ffi`: loads the compiled modules `_cpu` and `_cuda` and registers their handlers.
"""

from jax_fused_topk import reference
from jax_fused_topk._ffi import build_info
from jax_fused_topk.api import index_scores, index_topk, top_k
from jax_fused_topk.quantization import quantize_fp8
from jax_fused_topk.ranges import causal_ends

__all__ = [
    "build_info",
    "causal_ends",
    "index_scores",
    "index_topk",
    "quantize_fp8",
    "reference",
    "top_k",
]
