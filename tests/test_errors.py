"""Wrong calls: each error names the function, the argument, what was expected and what came."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import runners

import jax_fused_topk
from jax_fused_topk import _ffi

GOOD = {
    "q": jax.ShapeDtypeStruct((5, 3, 16), jnp.float8_e4m3fn),
    "k": jax.ShapeDtypeStruct((40, 16), jnp.float8_e4m3fn),
    "weights": jax.ShapeDtypeStruct((5, 3), jnp.float32),
    "k_scale": jax.ShapeDtypeStruct((40,), jnp.float32),
    "starts": jax.ShapeDtypeStruct((5,), jnp.int32),
    "ends": jax.ShapeDtypeStruct((5,), jnp.int32),
}
BATCHED = {n: jax.ShapeDtypeStruct((2, *s.shape), s.dtype) for n, s in GOOD.items()}


def array(shape, dtype):
    return jax.ShapeDtypeStruct(shape, dtype)


def trace(function, arrays, **options):
    """Traces without running: every check here is a trace-time check."""
    call = getattr(jax_fused_topk, function)
    return jax.eval_shape(lambda a: call(**a, **options), arrays)


FP8, BF16, F32 = jnp.float8_e4m3fn, jnp.bfloat16, jnp.float32

# Argument, what it is, the exception, and the message after "<function>: ".
OPERANDS = [
    ("q", array((5, 3, 16), F32), TypeError,
     r"q must have dtype float8_e4m3fn or bfloat16, got float32 \(see quantize_fp8\)"),
    ("q", array((5, 3, 16), jnp.float16), TypeError,
     r"q must have dtype float8_e4m3fn or bfloat16, got float16(?! \()"),
    ("q", array((5, 3, 16), jnp.float8_e5m2), TypeError, r"q must have dtype .* got float8_e5m2"),
    ("q", array((5, 3, 16), jnp.int8), TypeError, r"q must have dtype .* got int8"),
    ("q", array((5, 16), FP8), ValueError, r"q must have shape \[\*B, Q, H, D\], got \[5, 16\]"),
    ("k", array((40, 16), BF16), TypeError,
     r"k must have q's dtype, float8_e4m3fn, got bfloat16(?m:$)"),
    ("k", array((40, 17), FP8), ValueError,
     r"k must have shape \[\*B, N, D\] with \*B = \[\] and D = 16 as q has, got \[40, 17\]"),
    ("k", array((1, 40, 16), FP8), ValueError, r"k must have shape .* got \[1, 40, 16\]"),
    ("k", array((16,), FP8), ValueError, r"k must have shape .* got \[16\]"),
    ("weights", array((5, 3), BF16), TypeError,
     r"weights must have dtype float32, got bfloat16 \(\.astype\(jnp\.float32\)\)(?m:$)"),
    ("weights", array((5, 3), jnp.int32), TypeError,
     r"weights must have dtype float32, got int32(?m:$)"),
    ("weights", array((5, 4), F32), ValueError,
     r"weights must have shape \[\*B, Q, H\] = \[5, 3\], got \[5, 4\]"),
    ("weights", array((1, 3), F32), ValueError, r"weights must have shape .* got \[1, 3\]"),
    ("weights", array((3,), F32), ValueError, r"weights must have shape .* got \[3\]"),
    ("k_scale", array((41,), F32), ValueError,
     r"k_scale must have shape \[\*B, N\] = \[40\], got \[41\]"),
    ("k_scale", array((1,), F32), ValueError, r"k_scale must have shape .* got \[1\]"),
    ("k_scale", array((40,), jnp.int32), TypeError,
     r"k_scale must have dtype float32, got int32"),
    ("k_scale", array((40,), jnp.uint8), TypeError, r"k_scale must have dtype .* got uint8"),
    ("k_scale", array((40,), jnp.float8_e8m0fnu), TypeError, r"k_scale .* got float8_e8m0fnu"),
    ("k_scale", array((40,), BF16), TypeError, r"k_scale must have dtype .* got bfloat16"),
    ("starts", array((4,), jnp.int32), ValueError,
     r"starts must have shape \[\*B, Q\] = \[5\], got \[4\]"),
    ("starts", array((1,), jnp.int32), ValueError,
     r"starts must have shape .* got \[1\] \(jnp\.broadcast_to\)(?m:$)"),
    ("starts", array((), jnp.int32), ValueError, r"starts must have shape .* got \[\]"),
    ("starts", array((5,), jnp.uint32), TypeError, r"starts must have dtype int32, got uint32"),
    ("ends", array((6,), jnp.int32), ValueError,
     r"ends must have shape \[\*B, Q\] = \[5\], got \[6\](?m:$)"),
    ("ends", array((5,), F32), TypeError, r"ends must have dtype int32, got float32"),
]  # fmt: skip


@pytest.mark.parametrize("function", ["index_topk", "index_scores"])
@pytest.mark.parametrize(
    ("name", "value", "error", "message"), OPERANDS, ids=[f"{o[0]}-{o[1]}" for o in OPERANDS]
)
def test_operands(function, name, value, error, message):
    with pytest.raises(error, match=rf"^{function}: {message}"):
        trace(function, GOOD | {name: value})


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("k", (40, 16), r"k must have shape .* with \*B = \[2\] .* got \[40, 16\]"),
        ("k", (3, 40, 16), r"k must have shape .* got \[3, 40, 16\]"),
        ("weights", (5, 3), r"weights must have shape \[\*B, Q, H\] = \[2, 5, 3\], got \[5, 3\]"),
        ("k_scale", (40,), r"k_scale must have shape \[\*B, N\] = \[2, 40\], got \[40\]"),
        (
            "ends",
            (5,),
            r"ends must have shape \[\*B, Q\] = \[2, 5\], got \[5\] \(jnp\.broadcast_to\)(?m:$)",
        ),
    ],
)
def test_batch_dimensions_must_agree(name, shape, message):
    trace("index_topk", BATCHED)  # right as it is
    with pytest.raises(ValueError, match=f"^index_topk: {message}"):
        trace("index_topk", BATCHED | {name: array(shape, BATCHED[name].dtype)})


@pytest.mark.parametrize("shape", [(5, 0, 16), (5, 3, 0)])
def test_no_heads_or_dimensions(shape):
    arrays = GOOD | {
        "q": array(shape, FP8),
        "k": array((40, shape[2]), FP8),
        "weights": array(shape[:2], F32),
    }
    with pytest.raises(ValueError, match=r"q must have at least one head and dimension, got \[5,"):
        trace("index_topk", arrays)


def test_too_many_keys():
    with pytest.raises(ValueError, match=r"k must have at most 2\*\*31 - 1 keys, got 2147483648"):
        trace("index_topk", GOOD | {"k": array((2**31, 16), FP8), "k_scale": None})
    with pytest.raises(
        ValueError, match=r"operand must have at most 2\*\*31 - 1 keys, got 2147483648"
    ):
        jax.eval_shape(lambda x: jax_fused_topk.top_k(x, 5), array((2**31,), F32))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"topk": 0}, ValueError, r"topk must be at least 1, got 0"),
        ({"topk": -3}, ValueError, r"topk must be at least 1, got -3"),
        ({"topk": 2**31}, ValueError, r"topk must be at most 2\*\*31 - 1, got 2147483648"),
        ({"topk": 2.0}, TypeError, r"topk must be a Python int, got 2.0"),
        ({"topk": True}, TypeError, r"topk must be a Python int, got True"),
        ({"topk": None}, TypeError, r"topk must be a Python int, got None"),
        ({"order": "value"}, ValueError,
         r"order must be one of 'index', 'score', 'any', got 'value'"),
        ({"order": None}, ValueError, r"order must be one of .* got None"),
        ({"implementation": "gpu"}, ValueError,
         r"implementation must be one of None, 'cuda', 'cpu', 'reference', got 'gpu'"),
    ],
)  # fmt: skip
def test_options(options, error, message):
    with pytest.raises(error, match=f"^index_topk: {message}"):
        trace("index_topk", GOOD, **options)


def test_topk_must_be_static():
    q, k, weights = (jnp.zeros(GOOD[n].shape, GOOD[n].dtype) for n in ("q", "k", "weights"))
    with pytest.raises(TypeError, match=r"topk must be a Python int, .* mark it static under jit"):
        jax.jit(lambda topk: jax_fused_topk.index_topk(q, k, weights, topk=topk))(5)
    for topk in (np.int64(5), np.uint8(5)):
        assert jax_fused_topk.index_topk(q, k, weights, topk=topk).shape == (5, 5)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((array((4, 9), jnp.int32), 3), TypeError,
         r"operand must have dtype float32, bfloat16 or float16, got int32"),
        ((array((), F32), 0), ValueError, r"operand must have at least one dimension, got \[\]"),
        ((array((4, 9), F32), 10), ValueError,
         r"k must be at most operand's last dimension, 9, got 10"),
        ((array((4, 9), F32), -1), ValueError, r"k must be at least 0, got -1"),
        ((array((4, 9), F32), True), TypeError, r"k must be a Python int, got True"),
        ((array((4, 9), F32), 2.5), TypeError, r"k must be a Python int, got 2.5"),
    ],
)  # fmt: skip
def test_top_k_arguments(arguments, error, message):
    x, k = arguments
    with pytest.raises(error, match=f"^top_k: {message}"):
        jax.eval_shape(lambda x: jax_fused_topk.top_k(x, k), x)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"starts": np.zeros(3, np.int32)}, ValueError,
         r"starts must have shape \[\*B\] = \[4\], got \[3\]"),
        ({"ends": np.zeros(4, np.int16)}, TypeError, r"ends must have dtype int32, got int16"),
        ({"order": "descending"}, ValueError, r"order must be one of .* got 'descending'"),
        ({"implementation": "xla"}, ValueError, r"implementation must be one of .* got 'xla'"),
    ],
)  # fmt: skip
def test_top_k_options(options, error, message):
    with pytest.raises(error, match=f"^top_k: {message}"):
        jax_fused_topk.top_k(jnp.zeros((4, 9)), 3, **options)


def test_int64_ranges_are_refused_under_x64():
    with jax.enable_x64(True), pytest.raises(TypeError, match=r"ends .* int32, got int64"):
        jax_fused_topk.top_k(jnp.zeros((4, 9), F32), 3, ends=np.zeros(4, np.int64))


# Forcing an implementation

ON_CPU = {n: np.zeros(s.shape, s.dtype) for n, s in GOOD.items()}


def call(function, **options):
    with jax.default_device(jax.devices("cpu")[0]):
        if function == "top_k":
            return jax_fused_topk.top_k(np.zeros((4, 9), np.float32), 3, **options)
        return getattr(jax_fused_topk, function)(**ON_CPU, **options)


FUNCTIONS = ["index_topk", "index_scores", "top_k"]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_forced_cuda_without_its_kernels(monkeypatch, function):
    monkeypatch.setattr(_ffi, "_cuda", None)
    monkeypatch.setattr(_ffi, "_cuda_error", "reason of the test")
    _ffi.cuda_index_limit.cache_clear()
    with pytest.raises(RuntimeError, match=r"CUDA kernels are not available \(reason of the test"):
        call(function, implementation="cuda")
    _ffi.cuda_index_limit.cache_clear()


@pytest.mark.parametrize("function", FUNCTIONS)
def test_forced_for_another_platform(monkeypatch, function):
    """Refused while lowering, before anything compiles or runs."""
    if not _ffi.has_cuda():
        stand_in_for_cuda(monkeypatch)
    with pytest.raises(
        NotImplementedError,
        match=rf"{function}: implementation='cuda' does not run on platform 'cpu'; leave it None",
    ):
        call(function, implementation="cuda")
    f = jax.jit(lambda: call(function, implementation="cpu"))
    with pytest.raises(NotImplementedError, match="'cpu' does not run on platform 'cuda'"):
        f.trace().lower(lowering_platforms=("cuda",))
    with pytest.raises(NotImplementedError, match=r"'cpu' does not run on platform 'other than"):
        f.trace().lower(lowering_platforms=("tpu",))


def stand_in_for_cuda(monkeypatch):
    """Limits as the compiled module would give them, where it is not built."""
    monkeypatch.setattr(_ffi, "_cuda", runners.CUDA_LIMITS)
    _ffi.cuda_index_limit.cache_clear()


@pytest.mark.parametrize(
    ("q", "topk", "message"),
    [
        ((5, 257, 16), 10, r"H must be 1 to \d+, got 257"),
        ((5, 3, 24), 10, r"D must be a multiple of 16 up to \d+, got 24"),
        ((5, 3, 272), 10, r"D must be a multiple of 16 up to \d+, got 272"),
        ((5, 3, 16), 4097, r"topk must be at most 4096, got 4097"),
    ],
)
def test_forced_cuda_outside_what_it_serves(monkeypatch, q, topk, message):
    if not _ffi.has_cuda():
        stand_in_for_cuda(monkeypatch)
    arrays = {
        "q": array(q, FP8), "k": array((40, q[2]), FP8), "weights": array(q[:2], F32)
    }  # fmt: skip
    with pytest.raises(
        ValueError, match=rf'^index_topk: implementation="cuda" cannot serve this call: {message}'
    ):
        trace("index_topk", arrays, topk=topk, implementation="cuda")
    _ffi.cuda_index_limit.cache_clear()


def test_forced_cuda_top_k_outside_what_it_serves(monkeypatch):
    if not _ffi.has_cuda():
        stand_in_for_cuda(monkeypatch)
    most = _ffi.cuda_module().MAX_SORTED_K
    x = array((1, 2 * most), F32)

    def trace_top_k(k, order):
        return jax.eval_shape(
            lambda x: jax_fused_topk.top_k(x, k, order=order, implementation="cuda"), x
        )

    trace_top_k(most, "score")
    trace_top_k(most + 1, "index")
    with pytest.raises(ValueError, match=rf'k must be at most {most} for order="score", got'):
        trace_top_k(most + 1, "score")


def test_wide_ranges_on_the_host_are_clamped():
    """JAX without x64 would keep the lower 32 bits of an int64."""
    x = jnp.arange(6.0)[None]
    for end in (2**31, 2**32 + 2):
        _, indices = jax_fused_topk.top_k(x, 3, starts=np.array([-(2**40)]), ends=np.array([end]))
        assert np.asarray(indices).tolist() == [[5, 4, 3]]


@pytest.mark.parametrize("bad", [None, (jnp.zeros(3, jnp.int32), "x")])
def test_what_is_no_array(bad):
    with pytest.raises(TypeError, match="top_k: operand must be an array, got "):
        jax_fused_topk.top_k(bad, 1)


def test_flags_and_names_are_static():
    q, k, w = (
        jnp.zeros((2, 2, 16), jnp.bfloat16),
        jnp.zeros((5, 16), jnp.bfloat16),
        jnp.ones((2, 2)),
    )
    traced = jax.jit(lambda f: jax_fused_topk.index_topk(q, k, w, topk=2, return_scores=f))
    with pytest.raises(TypeError, match="return_scores must be True or False, known at trace time"):
        traced(True)
    with pytest.raises(ValueError, match="order must be one of 'index', 'score', 'any', got array"):
        jax_fused_topk.index_topk(q, k, w, topk=2, order=np.array(["index", "any"]))
    with pytest.raises(TypeError, match="num_keys must be a Python int, got a traced array"):
        jax.jit(lambda n: jax_fused_topk.causal_ends(2, n))(5)
    with pytest.raises(ValueError, match=r"num_keys must be at most 2\*\*31 - 1, got 2147483653"):
        jax_fused_topk.causal_ends(2, 2**31 + 5)
