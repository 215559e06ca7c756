"""What the installed package says of itself, and how it fails to import."""

import os
import pathlib
import shutil
import subprocess
import sys

import gpu_jobs
import jax
import numpy as np
import pytest

import jax_fused_topk

TESTS = pathlib.Path(__file__).resolve().parent
ROOT = TESTS.parent


def python(code, cwd, **environment):
    """Runs code in a fresh interpreter that finds this folder's modules."""
    path = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": path} | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_public_names():
    assert jax_fused_topk.__all__ == [
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
    for name in jax_fused_topk.__all__:
        value = getattr(jax_fused_topk, name)
        assert value.__doc__, f"{name} has no docstring"


def test_build_info():
    info = jax_fused_topk.build_info()
    assert set(info) == {
        "version", "jax", "jaxlib", "target_version", "ffi_header_version", "cpu_isa", "cuda",
        "cuda_error", "cuda_toolkit", "cuda_architectures", "registered",
    }  # fmt: skip
    assert (info["jax"], info["jaxlib"]) == (jax.__version__, jax.lib.__version__)
    assert info["version"].count(".") >= 1
    assert jax_fused_topk.__version__ == info["version"]
    assert info["target_version"].startswith("v")
    # A handler registers only where its headers are not newer than the runtime's 0.3.
    assert info["ffi_header_version"][0] == 0 and info["ffi_header_version"][1] >= 3
    assert info["cpu_isa"] in ("avx512", "avx2", "baseline")
    targets = sorted(
        f"jax_fused_topk_{name}_{info['target_version']}"
        for name in ("index_topk", "index_scores", "top_k")
    )
    assert info["registered"]["cpu"] == targets
    assert info["registered"]["CUDA"] == (targets if info["cuda"] else [])
    assert info["cuda"] == (info["cuda_error"] is None)
    assert (info["cuda_toolkit"] is not None) == info["cuda"]
    if info["cuda"]:
        architectures = info["cuda_architectures"]
        assert isinstance(architectures, tuple) and len(architectures) > 1
        assert all(a[:2].isdigit() for a in architectures)
    else:
        assert info["cuda_architectures"] is None
    # Plain values, made anew: a caller's change does not come back.
    info["registered"]["cpu"].clear()
    assert jax_fused_topk.build_info()["registered"]["cpu"] == targets


@pytest.mark.parametrize("isa", ["baseline", "avx2", "avx512"])
def test_every_instruction_set_chooses_alike(isa, tmp_path):
    """Whole-number inputs through each scoring kernel that this machine has."""
    code = """
import numpy as np, jax, jax_fused_topk as j, inputs, runners
x = inputs.with_ranges(inputs.integer(1, 20, 1001, 13, 40), 2)
got = runners.Runner("cpu").index_topk(x, 50, "score", return_scores=True)
np.savez("out.npz", scores=got[0], indices=got[1], isa=j.build_info()["cpu_isa"])
"""
    done = python(
        code, tmp_path, JAX_FUSED_TOPK_CPU_ISA=isa,
        JAX_PLATFORMS="cpu",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    out = np.load(tmp_path / "out.npz")
    if out["isa"] != isa:
        pytest.skip(f"this machine does not run {isa}; it took {out['isa']}")
    import inputs
    import oracles

    x = inputs.with_ranges(inputs.integer(1, 20, 1001, 13, 40), 2)
    scores, _ = oracles.scores64(x.q, x.k, x.weights, x.k_scale)
    indices, values = oracles.choose(oracles.canonical(scores), 50, x.starts, x.ends, "score")
    oracles.assert_same(out["indices"], indices)
    oracles.assert_same(out["scores"], values)


def test_two_processes_give_the_same_bits(tmp_path):
    code = """
import hashlib, inputs, runners
x = inputs.with_ranges(inputs.random(3, 30, 9000, 8, 64), 4)
scores, indices = runners.Runner("cpu").index_topk(x, 100, return_scores=True)
print(hashlib.sha256(scores.tobytes() + indices.tobytes()).hexdigest())
"""
    runs = [
        python(code, tmp_path, JAX_PLATFORMS="cpu", XLA_FLAGS=flags)
        for flags in ("", "--xla_cpu_multi_thread_eigen=false")
    ]
    assert all(r.returncode == 0 for r in runs), runs[0].stderr + runs[1].stderr
    assert runs[0].stdout == runs[1].stdout != ""


def test_a_source_folder_without_its_compiled_part(tmp_path):
    """Importing the sources says what is missing and what to do."""
    shutil.copytree(
        ROOT / "jax_fused_topk", tmp_path / "jax_fused_topk",
        ignore=shutil.ignore_patterns("*.so", "__pycache__"),
    )  # fmt: skip
    # An editable install's finder would step in before the current folder.
    code = """
import sys
sys.meta_path[:] = [f for f in sys.meta_path if "editable" not in type(f).__module__.lower()
                    and "editable" not in type(f).__name__.lower()
                    and "Redirecting" not in type(f).__name__]
sys.path.insert(0, "")
import jax_fused_topk
"""
    done = python(code, tmp_path)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(
        "ImportError: jax_fused_topk's compiled module _cpu was not found beside"
    )
    assert str(tmp_path) in last
    assert "pip install -e ." in last and "make install" in last


def test_import_starts_no_backend():
    """Importing costs no device and no GPU memory."""
    code = """
import jax_fused_topk
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized()
"""
    done = python(code, TESTS)
    assert done.returncode == 0, done.stderr


def test_memory_of_the_cpu_kernel(tmp_path):
    """The CPU kernel's own buffers stay far below the rows' scores."""
    code = """
import resource, jax, numpy as np, inputs, runners
x = inputs.dial(np.random.default_rng(0).standard_normal(131072), 128,
                starts=[0] * 128, ends=[0] * 128)
cpu = runners.Runner("cpu")
cpu.index_topk(x, 2048)  # all that compiling and the operands take
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
cpu.index_topk(x._replace(ends=np.full(128, 131072, np.int32)), 2048)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    done = python(code, tmp_path, JAX_PLATFORMS="cpu")
    assert done.returncode == 0, done.stderr
    grown = int(done.stdout) * 1024
    assert grown < 32 << 20, f"grew by {grown} bytes; the scores would take {128 * 131072 * 4}"


def test_receipts_of_parts_add_up():
    part = {"card": "x", "selection": "gpu", "counts": {"passed": 3}}
    other = {**part, "counts": {"passed": 4, "failed": 1}}
    assert gpu_jobs.merge([part, other]) == {**part, "counts": {"passed": 7, "failed": 1}}
    with pytest.raises(ValueError, match="must agree but for their counts"):
        gpu_jobs.merge([part, {**other, "card": "y"}])
