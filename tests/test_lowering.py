"""What the calls become: custom calls per platform, no large values, bounded memory."""

import contextlib
import functools
import inspect
import re
import warnings

import inputs
import jax
import jax.numpy as jnp
import jaxprs
import numpy as np
import oracles
import pytest
import runners
from jax import export

import jax_fused_topk
from jax_fused_topk import _ffi, _partition, _warn

MIB = 1 << 20


def shapes(queries, keys, heads=4, dim=16, dtype=jnp.float8_e4m3fn):
    return (
        jax.ShapeDtypeStruct((queries, heads, dim), dtype),
        jax.ShapeDtypeStruct((keys, dim), dtype),
        jax.ShapeDtypeStruct((queries, heads), jnp.float32),
        jax.ShapeDtypeStruct((queries,), jnp.int32),
    )


def index_topk(q, k, weights, ends, **options):
    return jax_fused_topk.index_topk(q, k, weights, ends=ends, **options)


def index_scores(q, k, weights, ends, **options):
    return jax_fused_topk.index_scores(q, k, weights, ends=ends, **options)


def on_device(runner, f, *operands):
    """Compiles for the runner's device."""
    sharding = jax.sharding.SingleDeviceSharding(runner.device)
    placed = [jax.ShapeDtypeStruct(o.shape, o.dtype, sharding=sharding) for o in operands]
    return jax.jit(f).lower(*placed).compile()


def lowered_for(platform, f, *operands):
    # A new function each time: JAX keeps what it has lowered, and the warnings would not recur.
    return (
        jax.jit(lambda *a: f(*a)).trace(*operands).lower(lowering_platforms=(platform,)).as_text()
    )


def targets(text):
    """The package's custom-call targets in a lowered or compiled program."""
    return re.findall(r"jax_fused_topk_(\w+)_v\d+", text)


@pytest.mark.parametrize("return_scores", [False, True])
@pytest.mark.parametrize("order", ["index", "score", "any"])
def test_compiled_index_topk_has_no_queries_by_keys_value(kernel, return_scores, order):
    queries, keys = 48, 5003
    f = functools.partial(
        index_topk, topk=100, order=order, return_scores=return_scores, implementation=kernel.name
    )
    compiled = on_device(kernel, f, *shapes(queries, keys))
    text = compiled.as_text()
    assert set(targets(text)) == {"index_topk"}
    assert not re.search(rf"\b{queries},(\d+,)*{keys}\b|\b{keys},(\d+,)*{queries}\b", text)
    # No value of that many elements under another shape either, but for the workspace in bytes.
    sizes = sorted(jaxprs.hlo_value_sizes(re.sub(r"\bu8\[\d+\]", "", text)))
    assert sizes[-1] < queries * keys // 2
    # The measure sees the scores where there are some.
    scores = functools.partial(index_scores, implementation=kernel.name)
    seen = on_device(kernel, scores, *shapes(queries, keys)).as_text()
    assert re.search(rf"\b{queries},{keys}\]", seen)
    assert max(jaxprs.hlo_value_sizes(seen)) == queries * keys


def test_temporary_memory_of_a_call(kernel):
    f = functools.partial(index_topk, topk=2048, implementation=kernel.name)
    analysis = on_device(kernel, f, *shapes(64, 32_768, 64, 128)).memory_analysis()
    limit = 64 * MIB if kernel.name == "cpu" else 256 * MIB
    assert analysis.temp_size_in_bytes < limit


def test_temporary_memory_of_a_long_context(kernel):
    """Q = 4096 and N = 372224, whose scores would take 6.1 GB."""
    f = functools.partial(index_topk, topk=2048, implementation=kernel.name)
    analysis = on_device(kernel, f, *shapes(4096, 372_224, 64, 128)).memory_analysis()
    assert analysis.temp_size_in_bytes < 256 * MIB
    assert analysis.output_size_in_bytes == 4096 * 2048 * 4


@pytest.mark.parametrize("unroll", [False, True])
def test_temporary_memory_does_not_grow_with_layers(kernel, unroll):
    queries, keys = 1024, 65_536  # whose scores would take 256 MiB a layer
    operands = shapes(queries, keys)

    def layers(count):
        def f(q, k, weights, ends):
            def layer(q, _):
                indices = index_topk(q, k, weights, ends, topk=64, implementation=kernel.name)
                sums = jnp.sum(indices, axis=1).astype(jnp.float32)
                return (q.astype(jnp.float32) + sums[:, None, None]).astype(q.dtype), None

            if unroll:
                for _ in range(count):
                    q, _ = layer(q, None)
                return q
            return jax.lax.scan(layer, q, None, length=count)[0]

        return on_device(kernel, f, *operands)

    few, many = layers(2), layers(11)
    grown = many.memory_analysis().temp_size_in_bytes - few.memory_analysis().temp_size_in_bytes
    assert grown < MIB
    assert max(jaxprs.hlo_value_sizes(re.sub(r"\bu8\[\d+\]", "", many.as_text()))) < queries * keys


OPERATIONS = {
    "index_topk": (functools.partial(index_topk, topk=100), shapes(8, 500)),
    "index_scores": (index_scores, shapes(8, 500)),
    "top_k": (
        lambda x: jax_fused_topk.top_k(x, 100),
        (jax.ShapeDtypeStruct((8, 500), jnp.float32),),
    ),
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_lowers_for_a_cpu_to_one_custom_call(operation):
    f, operands = OPERATIONS[operation]
    assert targets(lowered_for("cpu", f, *operands)) == [operation]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_lowers_for_cuda_on_any_machine(operation):
    """Where CUDA was compiled: one custom call.  Else: plain operations, and a warning."""
    f, operands = OPERATIONS[operation]
    if jax_fused_topk.build_info()["cuda"]:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            text = lowered_for("cuda", f, *operands)
        assert targets(text) == [operation]
    else:
        with pytest.warns(
            UserWarning, match=rf"{operation} runs on a GPU as plain jnp.*cuda_error"
        ):
            text = lowered_for("cuda", f, *operands)
        assert targets(text) == [] and "stablehlo" in text


@pytest.mark.parametrize("operation", OPERATIONS)
def test_without_cuda_kernels_a_gpu_gets_the_reference(monkeypatch, operation):
    monkeypatch.setattr(_ffi, "_cuda", None)
    f, operands = OPERATIONS[operation]
    with pytest.warns(UserWarning, match="this installation has no CUDA kernels") as seen:
        text = lowered_for("cuda", f, *operands)
    assert targets(text) == []
    assert_here(seen)


def assert_here(seen):
    """One warning, at the line of this file that lowers."""
    lines, first = inspect.getsourcelines(lowered_for)
    (warning,) = seen
    assert warning.filename == __file__
    assert first <= warning.lineno < first + len(lines)


OUTSIDE = {
    "index_topk": (
        functools.partial(index_topk, topk=10),
        shapes(8, 500, dim=20),
        r"index_topk runs on a GPU as plain jnp, .*: D must be a multiple of 16 up to 256, got 20$",
    ),
    "index_scores": (
        index_scores,
        shapes(8, 500, heads=257),
        r"index_scores runs on a GPU as plain jnp, .*: H must be 1 to 256, got 257$",
    ),
    "top_k": (
        lambda x: jax_fused_topk.top_k(x, 70_000),
        (jax.ShapeDtypeStruct((1, 80_000), jnp.float32),),
        r'top_k runs on a GPU as plain jnp, .*: k must be at most 65536 for order="score", got',
    ),
}


@pytest.mark.parametrize("operation", OUTSIDE)
def test_a_call_that_no_cuda_kernel_serves_warns_with_the_reason(monkeypatch, operation):
    """Once, at the user's line, whether CUDA was compiled here or not."""
    if not _ffi.has_cuda():
        monkeypatch.setattr(_ffi, "_cuda", runners.CUDA_LIMITS)
    _ffi.cuda_index_limit.cache_clear()
    f, operands, message = OUTSIDE[operation]
    with pytest.warns(UserWarning, match=message) as seen:
        text = lowered_for("cuda", f, *operands)
    assert targets(text) == []
    assert_here(seen)
    with warnings.catch_warnings():  # on a CPU it is served
        warnings.simplefilter("error")
        assert targets(lowered_for("cpu", f, *operands)) == [operation]
    _ffi.cuda_index_limit.cache_clear()


def test_a_warning_repeats_at_no_line(monkeypatch):
    """Two compilations at one line, with Python's own filter."""
    monkeypatch.setattr(_ffi, "_cuda", None)
    f, operands = OPERATIONS["index_topk"]
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("default")
        for _ in range(2):
            lowered_for("cuda", f, *operands)
    assert len(seen) == 1


@pytest.mark.parametrize("transform", ["eager", "jit", "scan", "vmap"])
def test_a_warning_skips_the_frames_of_jax(monkeypatch, transform):
    """However many lie between the call and the user's line."""
    # A warning on a CPU, from what looks like a line of the package.
    names = {"warn_user": _warn.warn_user}
    exec(compile("def applies(ctx): warn_user('while lowering')", _warn.__file__, "exec"), names)
    monkeypatch.setattr(_partition, "applies", names["applies"])
    x = jnp.arange(24.0).reshape(2, 12)
    top_k = functools.partial(jax_fused_topk.top_k, k=5)
    run = {
        "eager": top_k,
        "jit": jax.jit(lambda x: top_k(x)),
        "scan": functools.partial(jax.lax.scan, lambda c, row: (c, top_k(row)), None),
        "vmap": jax.vmap(top_k),
    }[transform]
    jax.clear_caches()  # what other tests have lowered
    with pytest.warns(UserWarning, match="^while lowering$") as seen:
        run(x)
        here = inspect.currentframe().f_lineno - 1
    places = {(warning.filename, warning.lineno) for warning in seen}
    assert places == {(__file__, here)}


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("platform", ["tpu", "rocm"])
def test_other_platforms_get_the_reference(operation, platform):
    f, operands = OPERATIONS[operation]
    text = lowered_for(platform, f, *operands)
    assert targets(text) == [] and "stablehlo" in text


@pytest.mark.parametrize("operation", OPERATIONS)
def test_forced_reference_has_no_custom_call_of_ours(operation):
    f, operands = OPERATIONS[operation]
    forced = {
        "index_topk": functools.partial(index_topk, topk=100, implementation="reference"),
        "index_scores": functools.partial(index_scores, implementation="reference"),
        "top_k": lambda x: jax_fused_topk.top_k(x, 100, implementation="reference"),
    }[operation]
    assert targets(lowered_for("cpu", forced, *operands)) == []
    assert targets(lowered_for("cpu", f, *operands)) == [operation]


@pytest.mark.parametrize("topk", [1, 512, 1000, 1024, 2048, 4096])
@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_no_topk_falls_back_in_silence(platform, topk):
    """Every K of the served range is a kernel's; past it the reference serves."""
    f = functools.partial(index_topk, topk=topk)
    no_kernels = platform == "cuda" and not jax_fused_topk.build_info()["cuda"]
    with pytest.warns(UserWarning) if no_kernels else contextlib.nullcontext():
        text = lowered_for(platform, f, *shapes(8, 5000))
    assert targets(text) == ([] if no_kernels else ["index_topk"])


@pytest.mark.parametrize(
    ("heads", "dim", "topk", "served"),
    [
        (1, 16, 1, True),
        (256, 256, 4096, True),
        (64, 128, 4097, False),
        (257, 128, 64, False),
        (64, 120, 64, False),
        (64, 272, 64, False),
    ],
)
def test_the_box_that_cuda_serves(heads, dim, topk, served):
    """Inside it a custom call, outside it the reference, through the same call."""
    if not jax_fused_topk.build_info()["cuda"]:
        pytest.skip(f"no CUDA kernels: {jax_fused_topk.build_info()['cuda_error']}")
    f = functools.partial(index_topk, topk=topk)
    with contextlib.nullcontext() if served else pytest.warns(UserWarning, match=r"must be .* got"):
        text = lowered_for("cuda", f, *shapes(8, 500, heads, dim))
    assert targets(text) == (["index_topk"] if served else [])


def test_attributes_are_scalar_int32_and_the_target_has_a_version():
    for order, number in _ffi.ORDERS.items():
        f = functools.partial(index_topk, topk=100, order=order)
        text = lowered_for("cpu", f, *shapes(8, 500))
        config = re.search(r"backend_config = \{([^}]*)\}", text)
        assert config is not None
        assert config[1].strip() == f"order = {number} : i32"
        assert f"@jax_fused_topk_index_topk_{jax_fused_topk.build_info()['target_version']}" in text


@pytest.mark.parametrize(
    ("queries", "keys", "heads", "dim", "topk"),
    [(1, 1, 1, 1, 1), (70_000, 64, 2, 16, 4), (300_000, 2048, 64, 128, 2048), (3, 9, 5, 7, 20)],
)
def test_the_shapes_asked_for_reach_the_primitive(queries, keys, heads, dim, topk):
    """Also where Q * H * D or Q * topk passes 2**31: sizes are counted in 64 bits."""
    f = functools.partial(index_topk, topk=topk, order="score")
    jaxpr = jax.make_jaxpr(f)(*shapes(queries, keys, heads, dim))
    (ours,) = jaxprs.our_equations(jaxpr)
    assert [v.aval.shape for v in ours.invars[:3]] == [
        (1, queries, heads, dim),
        (1, keys, dim),
        (1, queries, heads),
    ]
    assert ours.outvars[0].aval.shape == (1, queries, topk)
    assert (ours.params["topk"], ours.params["order"]) == (topk, "score")
    text = lowered_for("cpu", f, *shapes(queries, keys, heads, dim))
    assert f"tensor<1x{queries}x{topk}xi32>" in text


def test_workspace_is_bounded_whatever_the_shape():
    if not jax_fused_topk.build_info()["cuda"]:
        pytest.skip(f"no CUDA kernels: {jax_fused_topk.build_info()['cuda_error']}")

    def size(batch, queries, keys, topk, heads=64, fp8=True, order="any", return_scores=False):
        return _ffi.cuda_module().index_topk_workspace_bytes(
            fp8, batch, queries, heads, 128, keys, topk, _ffi.ORDERS[order], return_scores
        )

    for fp8 in (False, True):
        assert 0 < size(1, 1, 1, 1, fp8=fp8) <= size(1, 64, 32_768, 2048, fp8=fp8) <= 256 * MIB
    for keys in [*range(1000, 200_000, 997), 16_384, 32_768, 2**20, 2**31 - 1]:
        for order in _ffi.ORDERS:
            assert size(1, 4096, keys, 2048, order=order) <= 256 * MIB, (keys, order)
    assert size(1, 300_000, 2**31 - 1, 2048) <= 512 * MIB
    assert size(2**20, 2**20, 2**31 - 1, 4096) <= 512 * MIB
    assert size(2**20, 2**20, 2**31 - 1, 4096, fp8=False) <= 512 * MIB


def test_export_with_the_target_allowed(kernel):
    """jax.export takes the call once its target is named, and the exported program runs."""
    f = jax.jit(functools.partial(index_topk, topk=10, order="score"))
    operands = shapes(8, 500)
    with pytest.raises(ValueError, match=_ffi.target("index_topk")):
        export.export(f, platforms=[kernel.name])(*operands)
    check = export.DisabledSafetyCheck.custom_call(_ffi.target("index_topk"))
    exported = export.export(f, platforms=[kernel.name], disabled_checks=[check])(*operands)
    assert targets(exported.mlir_module()) == ["index_topk"]
    x = inputs.integer(1, 8, 500, 4, 16)
    arrays = kernel.put((x.q, x.k, x.weights, np.full(8, 500, np.int32)))
    scores, _ = oracles.scores64(x.q, x.k, x.weights)
    expected, _ = oracles.choose(oracles.canonical(scores), 10, order="score")
    oracles.assert_same(exported.call(*arrays), expected)
