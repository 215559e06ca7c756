"""Loads the compiled modules and registers their handlers with XLA."""

import functools
import importlib
import importlib.metadata
from typing import Any

import jax
from jax import export

_NO_CPU_MODULE = (
    "jax_fused_topk's compiled module _cpu was not found beside {folder}. If that is a source "
    "checkout, install it first (`make install`, or `pip install -e .`) and use that "
    "interpreter; running Python from the checkout with a plain install picks the sources up "
    "instead of the installed package."
)


def _load(name: str) -> tuple[Any, str | None]:
    """Returns the module jax_fused_topk.<name>, or None and why it did not load."""
    try:
        return importlib.import_module(f"jax_fused_topk.{name}"), None
    except ImportError as error:
        return None, str(error)


_cpu, _cpu_error = _load("_cpu")
if _cpu is None:
    raise ImportError(f"{_NO_CPU_MODULE.format(folder=__file__)} ({_cpu_error})")
_cuda, _cuda_error = _load("_cuda")

ORDERS: dict[str, int] = _cpu.ORDERS
"""Order name -> the FFI attribute's value, from ffi/contract.h."""


def _register(module: Any, platform: str) -> list[str]:
    """Registers a module's handlers for a platform and returns their names."""
    handlers: dict[str, Any] = module.handlers() if module else {}
    for target, capsule in handlers.items():
        jax.ffi.register_ffi_target(target, capsule, platform=platform)
    return sorted(handlers)


_registered = {"cpu": _register(_cpu, "cpu"), "CUDA": _register(_cuda, "CUDA")}


def target(operation: str) -> str:
    """The custom-call target of "index_topk", "index_scores" or "top_k"."""
    return f"jax_fused_topk_{operation}_{_cpu.TARGET_VERSION}"


def cuda_module() -> Any:
    """The module _cuda.

    Raises:
      RuntimeError: if it was not built or does not load, saying why.
    """
    if _cuda is None:
        raise RuntimeError(
            "jax_fused_topk: the CUDA kernels are not available "
            f"({_cuda_error}). Install again where nvcc is found; see the README's "
            '"Build for a GPU".'
        )
    return _cuda


def has_cuda() -> bool:
    """Whether the CUDA kernels were built and load."""
    return _cuda is not None


@functools.cache
def cuda_index_limit(heads: int, dim: int, topk: int) -> str | None:
    """Why no CUDA kernel serves a scored call of this shape, or None if one does."""
    cuda = cuda_module()
    for name, size in (("H", heads), ("D", dim)):
        if export.is_symbolic_dim(size):
            return f"{name} must be fixed, got {size}"
    if not 1 <= heads <= cuda.MAX_HEADS:
        return f"H must be 1 to {cuda.MAX_HEADS}, got {heads}"
    if dim % cuda.DIM_MULTIPLE or not cuda.DIM_MULTIPLE <= dim <= cuda.MAX_DIM:
        return f"D must be a multiple of {cuda.DIM_MULTIPLE} up to {cuda.MAX_DIM}, got {dim}"
    if topk > cuda.MAX_INDEX_TOPK:
        return f"topk must be at most {cuda.MAX_INDEX_TOPK}, got {topk}"
    return None


def cuda_top_k_limit(k: int, order: str) -> str | None:
    """Why no CUDA kernel serves a `top_k` call, or None if one does."""
    most = cuda_module().MAX_SORTED_K
    if order == "score" and k > most:
        return f'k must be at most {most} for order="score", got {k}'
    return None


def build_info() -> dict[str, Any]:
    """What was built, against what, and what is registered: for bug reports.

    Returns:
      A dict of plain values: "version", "jax", "jaxlib", "target_version",
      "ffi_header_version" (major, minor), "cpu_isa", "cuda" (whether the kernels
      load), "cuda_error", "cuda_toolkit" (major, minor), "cuda_architectures" (as CMake
      names them: "90a-real"), "registered" (platform -> custom-call targets).
    """
    return {
        "version": importlib.metadata.version("jax_fused_topk"),
        "jax": jax.__version__,
        "jaxlib": importlib.metadata.version("jaxlib"),
        "target_version": _cpu.TARGET_VERSION,
        "ffi_header_version": tuple(_cpu.FFI_HEADER_VERSION),
        "cpu_isa": _cpu.dispatched_isa(),
        "cuda": _cuda is not None,
        "cuda_error": _cuda_error,
        "cuda_toolkit": tuple(_cuda.TOOLKIT_VERSION) if _cuda else None,
        "cuda_architectures": tuple(_cuda.ARCHITECTURES.split(",")) if _cuda else None,
        "registered": {platform: list(names) for platform, names in _registered.items()},
    }
