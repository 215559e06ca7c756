"""jax.export: the ready-made checks, and programs that another process loads and runs."""

import functools
import inspect
import itertools
import subprocess
import sys
import warnings

import inputs
import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from jax import export

import jax_fused_topk
from jax_fused_topk import _ffi, _workspace

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
with open("program", "rb") as file:
    exported = export.deserialize(bytearray(file.read()))
call = jax.jit(exported.call)
for operands, results in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
    x = np.load(operands)
    np.savez(results, *call(*(x[name] for name in x.files)))
"""


def run_in_a_new_process(exported, all_operands, folder):
    """Serialises a program and has another process run it on each dict of operands."""
    (folder / "program").write_bytes(exported.serialize())
    names = []
    for i, operands in enumerate(all_operands):
        names += [f"operands{i}.npz", f"results{i}.npz"]
        np.savez(folder / names[-2], **operands)
    done = subprocess.run(
        [sys.executable, "-c", LOAD, *names],
        cwd=folder, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for name in names[1::2]:
        with np.load(folder / name) as results:
            yield [results[part] for part in results.files]


def operands_of(seed, queries, keys, batch=()):
    x = inputs.with_ranges(inputs.integer(seed, queries, keys, 4, 16, batch=batch), seed + 1)
    return {
        "q": x.q.astype(np.float32), "k": x.k.astype(np.float32), "weights": x.weights,
        "k_scale": x.k_scale, "ends": x.ends,
    }  # fmt: skip


def assert_same_results(got, operands):
    """Against the jitted function in this process, bit for bit."""
    expected = jax.jit(every_operation)(*operands.values())
    assert len(got) == len(expected) == 6
    for g, e in zip(got, expected, strict=True):
        oracles.assert_same(g, e)


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
    operands = operands_of(1, 8, 500)
    exported = export.export(
        jax.jit(every_operation),
        platforms=platforms,
        disabled_checks=jax_fused_topk.EXPORT_CHECKS,
    )(*operands.values())
    assert exported.platforms == platforms
    (got,) = run_in_a_new_process(exported, [operands], tmp_path)
    assert_same_results(got, operands)


@pytest.mark.parametrize("platforms", PLATFORMS)
@pytest.mark.parametrize("sizes", ["b, 8, 300", "b, q, n"])
def test_symbolic_sizes(sizes, platforms, tmp_path):
    """One program for every batch, and for every number of queries and keys besides."""
    pytest.importorskip("flatbuffers", reason="jax.export serialises with flatbuffers")
    b, q, n = export.symbolic_shape(sizes)
    shapes = {"q": (b, q, 4, 16), "k": (b, n, 16), "weights": (b, q, 4), "k_scale": (b, n)}
    arguments = [jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes.values()]
    exported = export.export(
        jax.jit(every_operation),
        platforms=platforms,
        disabled_checks=jax_fused_topk.EXPORT_CHECKS,
    )(*arguments, jax.ShapeDtypeStruct((b, q), np.int32))
    called = [operands_of(2, 8, 300, (1,)), operands_of(3, 8, 300, (5,))]
    if sizes == "b, q, n":
        called.append(operands_of(4, 70, 1000, (2,)))
    results = list(run_in_a_new_process(exported, called, tmp_path))
    assert len(results) == len(called)
    for got, operands in zip(results, called, strict=True):
        assert_same_results(got, operands)


def causal(q, k, weights):
    """Causal choices, how often each key was chosen, and the chosen keys' first element."""
    k = k.astype(jnp.bfloat16)
    ends = jax_fused_topk.causal_ends(q.shape[1], k.shape[1])
    ends = jnp.broadcast_to(ends, q.shape[:2])
    indices = jax_fused_topk.index_topk(q.astype(jnp.bfloat16), k, weights, topk=20, ends=ends)
    times = jax_fused_topk.scatter_selected(jnp.ones(indices.shape, jnp.int32), indices, k.shape[1])
    return indices, times, jax_fused_topk.gather_selected(k[..., 0], indices)


@pytest.mark.parametrize("platforms", PLATFORMS)
def test_symbolic_sizes_of_a_causal_call(platforms):
    """causal_ends and scatter_selected take the sizes that the program does not know."""
    b, q, n = export.symbolic_shape("b, q, n")
    arguments = [
        jax.ShapeDtypeStruct(shape, np.float32) for shape in ((b, q, 4, 16), (b, n, 16), (b, q, 4))
    ]
    exported = export.export(
        jax.jit(causal), platforms=platforms, disabled_checks=jax_fused_topk.EXPORT_CHECKS
    )(*arguments)
    with jax.default_device(jax.devices("cpu")[0]):
        for batch, queries, keys in ((1, 8, 300), (3, 70, 70), (2, 9, 5)):
            x = inputs.integer(6, queries, keys, 4, 16, batch=(batch,))
            operands = (x.q.astype(np.float32), x.k.astype(np.float32), x.weights)
            got = jax.jit(exported.call)(*operands)
            for g, e in zip(got, jax.jit(causal)(*operands), strict=True):
                oracles.assert_same(g, e)
            ends = np.maximum(np.arange(queries) + 1 + keys - queries, 0)
            used = np.asarray(got[0]) >= 0
            assert np.all(used.sum(-1) == np.minimum(ends, 20))
            assert np.all(np.asarray(got[0]).max(-1) < np.maximum(ends, 1))
            assert np.asarray(got[1]).sum() == used.sum()


@pytest.mark.gpu
def test_symbolic_sizes_on_a_gpu(cuda):
    shapes = ("b, q, 4, 16", "b, n, 16", "b, q, 4", "b, n", "b, q")
    scope = export.SymbolicScope()
    arguments = [
        jax.ShapeDtypeStruct(export.symbolic_shape(shape, scope=scope), dtype)
        for shape, dtype in zip(shapes, [np.float32] * 4 + [np.int32], strict=True)
    ]
    exported = export.export(
        jax.jit(every_operation),
        platforms=("cpu", "cuda"),
        disabled_checks=jax_fused_topk.EXPORT_CHECKS,
    )(*arguments)
    for queries, keys, batch in ((8, 300, 1), (70, 9000, 3), (1, 70_000, 2)):
        operands = operands_of(5, queries, keys, (batch,))
        on_gpu = {name: cuda.put(x) for name, x in operands.items()}
        assert_same_results(jax.jit(exported.call)(*on_gpu.values()), on_gpu)


@pytest.mark.skipif(not jax_fused_topk.build_info()["cuda"], reason="built without CUDA kernels")
def test_symbolic_sizes_get_enough_workspace():
    """As much as the kernels ask for at any sizes: their handlers refuse less."""
    b, q, n = export.symbolic_shape("b, q, n")
    sizes = [1, 2, 15, 17, 63, 65, 131, 132, 264, 319, 320, 321, 1025, 5000, 70_000]
    all_keys = [1, 300, 511, 513, 4095, 49_152, 131_072, 2**31 - 1]
    kinds = itertools.product(
        (jnp.float8_e4m3fn, jnp.bfloat16), (64, 7), (1, 20, 2048, 4096), _ffi.ORDERS.values()
    )
    for dtype, heads, topk, order in kinds:

        def size(batch, queries, keys, dtype=dtype, heads=heads, topk=topk, order=order):
            q = jax.core.ShapedArray((batch, queries, heads, 128), dtype)
            return _workspace.index_topk_bytes(q, keys, topk, order, return_scores=False)

        enough = size(b, q, n)
        assert enough < 2**29 + 2**25  # dense scores, and top_k's workspace
        for keys in all_keys:
            fixed_keys = size(b, q, keys)
            assert fixed_keys <= enough
            for batch, queries in [(1, s) for s in sizes] + [(s, 1) for s in sizes] + [(7, 99)]:
                exact = size(batch, queries, keys)
                assert exact <= size(b, queries, keys) == fixed_keys
                assert exact <= size(batch, q, keys)
    for k in (1, 11, 2048, 4096, 9000, 65_536):
        for order in _ffi.ORDERS.values():
            for keys in all_keys:
                enough = _workspace.top_k_bytes(q, keys, k, order)
                assert enough <= _workspace.top_k_bytes(q, n, k, order) < 2**29
                for rows in sizes:
                    assert _workspace.top_k_bytes(rows, keys, k, order) <= enough


@pytest.mark.skipif(not jax_fused_topk.build_info()["cuda"], reason="built without CUDA kernels")
def test_symbolic_sizes_hold_the_workspace_that_is_documented():
    """Of K = 2048, to the nearest 10 MiB."""
    b, q, n = export.symbolic_shape("b, q, n")
    most = {True: set(), False: set()}
    for dtype, heads, dim in itertools.product(
        (jnp.float8_e4m3fn, jnp.bfloat16), (1, 16, 32, 64, 128), (64, 128, 256)
    ):
        aval = jax.core.ShapedArray((b, q, heads, dim), dtype)
        size = max(
            _workspace.index_topk_bytes(aval, n, 2048, order, return_scores)
            for order in _ffi.ORDERS.values()
            for return_scores in (False, True)
        )
        fp8 = dtype == jnp.float8_e4m3fn
        hopper = _ffi.cuda_module().hopper_supported(fp8, heads, dim)
        most[hopper].add(round(size / 2**20, -1))
    assert most == {True: {520}, False: {160}}
    text = inspect.getsource(jax_fused_topk.exporting)
    assert "at 2048, 520 MiB for\nfloat8 with D = 128 and H of 32 or 64, and 160 MiB for" in text


@pytest.mark.skipif(not jax_fused_topk.build_info()["cuda"], reason="built without CUDA kernels")
@pytest.mark.parametrize("size", ["H", "D"])
def test_a_symbolic_size_that_kernels_need_fixed_runs_as_plain_jnp(size):
    """With the reason, for "cuda"; a CPU kernel serves any."""
    (symbol,) = export.symbolic_shape("x")
    heads, dim = (symbol, 32) if size == "H" else (2, symbol)
    x = [
        jax.ShapeDtypeStruct((4, heads, dim), jnp.bfloat16),
        jax.ShapeDtypeStruct((60, dim), jnp.bfloat16),
        jax.ShapeDtypeStruct((4, heads), jnp.float32),
    ]
    f = jax.jit(functools.partial(jax_fused_topk.index_topk, topk=5))
    checks = jax_fused_topk.EXPORT_CHECKS
    with pytest.warns(UserWarning, match=f"as plain jnp, .*: {size} must be fixed, got x$"):
        program = export.export(f, platforms=["cuda"], disabled_checks=checks)(*x)
    assert "@jax_fused_topk_index_topk" not in program.mlir_module()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        program = export.export(f, platforms=["cpu"], disabled_checks=checks)(*x)
    assert "@jax_fused_topk_index_topk" in program.mlir_module()


def test_without_the_checks_export_refuses():
    x = inputs.integer(3, 4, 60, 2, 16)
    f = jax.jit(functools.partial(jax_fused_topk.index_topk, topk=5))
    with pytest.raises(ValueError, match="jax_fused_topk_index_topk_v"):
        export.export(f, platforms=["cpu"])(x.q, x.k, x.weights)
