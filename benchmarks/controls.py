"""Kernels that exist for attribution only: the indexer with a part of its work left out.

- "tensor": loads, tensor-core products and barriers; no epilogue, no selection.
- "score": scores and their filter; no selection.

They come from an FFI module that only a benchmark build compiles, so an ordinary
installation has none.
"""

import importlib
from collections.abc import Callable
from typing import Any

import jax

KINDS = ("tensor", "score")
MODULE = "jax_fused_topk._controls"


def control_call(kind: str, data: dict[str, jax.Array]) -> Callable[..., Any] | None:
    """A function of `data` that runs one control, None where it cannot run.

    The module `jax_fused_topk._controls` has `control(kind, data)`, which returns such a
    function, traceable by JAX, or None if it does not serve the shapes of `data`.

    Args:
      kind: one of `KINDS`.
      data: the operands of `index_topk`, by name.

    Raises:
      ValueError: if there is no such kind.
    """
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
    try:
        module = importlib.import_module(MODULE)
    except ModuleNotFoundError:
        return None
    function: Callable[..., Any] | None = module.control(kind, data)
    return function
