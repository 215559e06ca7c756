"""Kernels that exist for attribution only: the Hopper indexer with parts left out.

- "tensor": loads, tensor-core products and barriers; no work on the products.
- "score": all of the scores, which are then dropped; no filter, no selection.

They are no part of the package: `controls.cu` is compiled here, from the sources beside
it, the first time that a control is asked for on a Hopper GPU.
"""

import ctypes
import os
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

KINDS = ("tensor", "score")
TARGET = "jax_fused_topk_benchmark_control"
SOURCES = ("benchmarks/controls.cu",)
ROOT = Path(__file__).resolve().parent.parent


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
    served = q.dtype == jnp.float8_e4m3fn and q.shape[-2] in (32, 64) and q.shape[-1] == 128
    if not served or not on_hopper() or find_nvcc() is None:
        return None
    register(TARGET, "JftControl", SOURCES)
    call = jax.ffi.ffi_call(TARGET, jax.ShapeDtypeStruct((1,), jnp.float32), has_side_effect=True)

    def control(data: dict[str, jax.Array]) -> jax.Array:
        names = ("q", "k", "weights", "k_scale", "starts", "ends")
        operands = [data[name][None] for name in names]
        result: jax.Array = call(*operands, epilogue=np.int32(kind == "score"))
        return result

    return control


def on_hopper() -> bool:
    """Whether JAX runs on GPUs of compute capability 9."""
    device = jax.devices()[0]
    return device.platform == "gpu" and str(device.compute_capability).startswith("9.")


def find_nvcc() -> Path | None:
    """CUDACXX, the nvcc on the path, or that of NVIDIA's wheels."""
    wheel = Path(sysconfig.get_path("purelib")) / "nvidia" / "cu13" / "bin" / "nvcc"
    found = os.environ.get("CUDACXX") or shutil.which("nvcc") or wheel
    return Path(found) if Path(found).exists() else None


def compile_library(nvcc: Path, folder: Path, sources: Sequence[str]) -> Path:
    """Compiles sources, named from the root, for Hopper; returns the shared library."""
    library = folder / "library.so"
    command = [str(nvcc), "-std=c++17", "-O3", "-w", "-shared", "-Xcompiler=-fPIC", "--threads=0"]
    command += ["-cudart=static", "-gencode=arch=compute_90a,code=sm_90a"]
    command += [f"-I{ROOT}", f"-I{jax.ffi.include_dir()}"]
    command += [f"-L{nvcc.resolve().parent.parent / 'lib'}", "-o", str(library)]
    subprocess.run([*command, *(str(ROOT / source) for source in sources)], check=True)
    return library


def register(target: str, handler: str, sources: Sequence[str]) -> None:
    """Compiles sources and makes a handler in them known to XLA, once in a process."""
    if target in _registered:
        return
    nvcc = find_nvcc()
    assert nvcc is not None
    with tempfile.TemporaryDirectory() as folder:
        library = ctypes.cdll.LoadLibrary(str(compile_library(nvcc, Path(folder), sources)))
    jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(library[handler]), platform="CUDA")
    _registered.add(target)


_registered: set[str] = set()
