"""Exact top-k for sparse attention in JAX: scoring and selection in one call.

What lives where:

- `api`: the public functions; `_checks`: the checks of their arguments.
- `primitives`: the JAX primitives behind them, with lowering, batching and jvp.
- `derivatives`: the gradients of the chosen scores and values.
- `selection`: gather and scatter at chosen indices.
- `exporting`: what `jax.export` must be told.
- `sharding`: context parallelism, the keys shared out over devices.
- `_partition`: how XLA splits a call over the devices of a sharded `jit`.
- `_workspace`: scratch memory of the CUDA kernels.
- `reference`: pure jnp, the oracle and the path for every other platform.
- `quantization`, `ranges`: FP8 quantisation and row ranges.
- `_vary`: types under `shard_map`.
- `_warn`: warnings at the user's line.
- `_ffi`: loads the compiled modules `_cpu` and `_cuda` and registers their handlers.
"""

from jax_fused_topk import reference
from jax_fused_topk._ffi import build_info
from jax_fused_topk.api import index_scores, index_topk, top_k
from jax_fused_topk.derivatives import CHECKPOINT_NAMES
from jax_fused_topk.exporting import EXPORT_CHECKS
from jax_fused_topk.quantization import quantize_fp8
from jax_fused_topk.ranges import causal_ends
from jax_fused_topk.selection import gather_selected, scatter_selected
from jax_fused_topk.sharding import index_topk_sharded_keys

__version__: str = build_info()["version"]

__all__ = [
    "CHECKPOINT_NAMES",
    "EXPORT_CHECKS",
    "build_info",
    "causal_ends",
    "gather_selected",
    "index_scores",
    "index_topk",
    "index_topk_sharded_keys",
    "quantize_fp8",
    "reference",
    "scatter_selected",
    "top_k",
]
