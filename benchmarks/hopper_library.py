"""Compiles kernels that only the benchmarks need, for Hopper, and registers their handlers."""

import ctypes
import os
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path

import jax

from benchmarks.inputs import ROOT


def available() -> bool:
    """Whether JAX runs on GPUs of compute capability 9, and there is an nvcc."""
    device = jax.devices()[0]
    hopper = device.platform == "gpu" and str(device.compute_capability).startswith("9.")
    return hopper and find_nvcc() is not None


def find_nvcc() -> Path | None:
    """CUDACXX, the nvcc on the path, or that of NVIDIA's wheels."""
    given = os.environ.get("CUDACXX")
    if given:
        return Path(given) if Path(given).exists() else None
    return find_program("nvcc")


def find_program(name: str) -> Path | None:
    """A program of the CUDA toolkit: that on the path, or of NVIDIA's wheels."""
    wheel = Path(sysconfig.get_path("purelib")) / "nvidia" / "cu13" / "bin" / name
    found = Path(shutil.which(name) or wheel)
    return found if found.exists() else None


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
