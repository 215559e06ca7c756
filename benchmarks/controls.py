"""Kernels that exist for attribution only: the Hopper indexer with parts left out.

- "tensor": loads, tensor-core products and barriers; no work on the products.
- "score": all of the scores, which are then dropped; no filter, no selection.

They are no part of the package: `hopper_library` compiles `controls.cu` the first time
that a control is asked for on a Hopper GPU.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import hopper_library
from jax_fused_topk import _ffi

KINDS = ("tensor", "score")
TARGET = "jax_fused_topk_benchmark_control"
SOURCES = ("benchmarks/controls.cu",)


def control_call(kind: str, data: dict[str, jax.Array]) -> Callable[..., Any] | None:
    """A function of `data` that runs one control, None where it cannot run.

    Args:
      kind: one of `KINDS`.
      data: the operands of `index_topk`, by name, without batch dimensions.

    Raises:
      ValueError: if there is no such kind.
      subprocess.CalledProcessError: if the compilation fails.
    """
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
    q = data["q"]
    if not hopper_library.available():
        return None
    if not _ffi.cuda_module().hopper_supported(q.dtype == jnp.float8_e4m3fn, *q.shape[-2:]):
        return None
    hopper_library.register(TARGET, "JftControl", SOURCES)
    call = jax.ffi.ffi_call(TARGET, jax.ShapeDtypeStruct((1,), jnp.float32), has_side_effect=True)

    def control(data: dict[str, jax.Array]) -> jax.Array:
        names = ("q", "k", "weights", "k_scale", "starts", "ends")
        operands = [data[name][None] for name in names]
        result: jax.Array = call(*operands, epilogue=np.int32(kind == "score"))
        return result

    return control
