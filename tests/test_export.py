"""jax.export: the ready-made checks, and programs that another process loads and runs."""

import functools
import subprocess
import sys

import inputs
import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from jax import export

import jax_fused_topk

PLATFORMS = [
    pytest.param(("cpu",), id="cpu"),
    pytest.param(
        ("cpu", "cuda"),
        id="cpu-cuda",
        marks=pytest.mark.skipif(
            not jax_fused_topk.build_info()["cuda"], reason="built without CUDA kernels"
        ),
    ),
]

LOAD = """
import sys
import jax, numpy as np
import jax_fused_topk
from jax import export
program, operands, results = sys.argv[1:]
with open(program, "rb") as file:
    exported = export.deserialize(bytearray(file.read()))
x = np.load(operands)
out = jax.jit(exported.call)(*(x[name] for name in x.files))
np.savez(results, *out)
"""


def every_operation(q, k, weights, k_scale, ends):
    """index_topk with and without scores, index_scores and top_k of one set of operands.

    q and k arrive as float32, which an npz file can hold.
    """
    q, k = (x.astype(jnp.float8_e4m3fn) for x in (q, k))
    call = functools.partial(jax_fused_topk.index_topk, q, k, weights, k_scale=k_scale, ends=ends)
    scores = jax_fused_topk.index_scores(q, k, weights, k_scale=k_scale, ends=ends)
    return (
        call(topk=20),
        *call(topk=9, order="score", return_scores=True),
        scores,
        *jax_fused_topk.top_k(scores, 11),
    )


def test_every_registered_target_is_named():
    targets = jax_fused_topk.build_info()["registered"]["cpu"]
    assert len(jax_fused_topk.EXPORT_CHECKS) == len(targets) == 3
    for target in targets:
        assert export.DisabledSafetyCheck.custom_call(target) in jax_fused_topk.EXPORT_CHECKS


@pytest.mark.parametrize("platforms", PLATFORMS)
def test_a_new_process_runs_the_program(platforms, tmp_path):
    pytest.importorskip("flatbuffers", reason="jax.export serialises with flatbuffers")
    x = inputs.with_ranges(inputs.integer(1, 8, 500, 4, 16), 2)
    operands = {
        "q": x.q.astype(np.float32), "k": x.k.astype(np.float32), "weights": x.weights,
        "k_scale": x.k_scale, "ends": x.ends,
    }  # fmt: skip
    exported = export.export(
        jax.jit(every_operation),
        platforms=platforms,
        disabled_checks=jax_fused_topk.EXPORT_CHECKS,
    )(*operands.values())
    assert exported.platforms == platforms
    (tmp_path / "program").write_bytes(exported.serialize())
    np.savez(tmp_path / "operands.npz", **operands)
    done = subprocess.run(
        [sys.executable, "-c", LOAD, "program", "operands.npz", "results.npz"],
        cwd=tmp_path, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    results = np.load(tmp_path / "results.npz")
    expected = jax.jit(every_operation)(*operands.values())
    assert len(results.files) == len(expected) == 6
    for name, e in zip(results.files, expected, strict=True):
        oracles.assert_same(results[name], e, name)


def test_without_the_checks_export_refuses():
    x = inputs.integer(3, 4, 60, 2, 16)
    f = jax.jit(functools.partial(jax_fused_topk.index_topk, topk=5))
    with pytest.raises(ValueError, match="jax_fused_topk_index_topk_v"):
        export.export(f, platforms=["cpu"])(x.q, x.k, x.weights)
