"""The JAX primitives: abstract evaluation, lowering, batching and derivatives.

Operands have one batch axis (`_checks` flattens the others):

    index_topk_p    q [B, Q, H, D], k [B, N, D], weights [B, Q, H], k_scale [B, N],
                    starts [B, Q], ends [B, Q] -> [scores [B, Q, K],] indices [B, Q, K]
    index_scores_p  the same -> scores [B, Q, N]
    top_k_p         operand [R, N], starts [R], ends [R] -> values [R, k], indices [R, k]

Each lowers to one FFI custom call on a CPU and on CUDA, and to the reference on
every other platform and for shapes that no kernel serves.  In a module that XLA
partitions, `_partition` wraps the call so that each device serves its own rows.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import ManualAxisType

from jax_fused_topk import _checks, _ffi, _partition, _warn, _workspace, derivatives, reference

index_topk_p = Primitive("jax_fused_topk_index_topk")
index_scores_p = Primitive("jax_fused_topk_index_scores")
top_k_p = Primitive("jax_fused_topk_top_k")

Lowering = Callable[..., Sequence[Any]]

_INDEX_DIMENSIONS = {
    "q": "b q h d", "k": "b n d", "weights": "b q h", "k_scale": "b n",
    "starts": "b q", "ends": "b q",
}  # fmt: skip
_INDEX_TOPK_RULE = _partition.Rule(_INDEX_DIMENSIONS, "b q t", split="b q")
_INDEX_SCORES_RULE = _partition.Rule(_INDEX_DIMENSIONS, "b q n", split="b q")
_TOP_K_RULE = _partition.Rule({"operand": "r n", "starts": "r", "ends": "r"}, "r t", split="r")


# What serves a call


def check_implementation(
    function: str, implementation: str | None, operands: _checks.IndexOperands, topk: int
) -> None:
    """Raises if the forced implementation cannot serve a scored call of this shape."""
    _checks.check_choice(function, "implementation", implementation, _checks.IMPLEMENTATIONS)
    if implementation == "cuda":
        _, _, heads, dim = operands.q.shape
        limit = _ffi.cuda_index_limit(heads, dim, topk)
        if limit is not None:
            raise ValueError(f'{function}: implementation="cuda" cannot serve this call: {limit}')


def check_top_k_implementation(implementation: str | None, k: int, order: str) -> None:
    """Raises if the forced implementation cannot serve a `top_k` call."""
    _checks.check_choice("top_k", "implementation", implementation, _checks.IMPLEMENTATIONS)
    if implementation == "cuda":
        limit = _ffi.cuda_top_k_limit(k, order)
        if limit is not None:
            raise ValueError(f'top_k: implementation="cuda" cannot serve this call: {limit}')


_NO_CUDA = "this installation has no CUDA kernels; build_info()['cuda_error'] says why"


def _warn_plain(operation: str, reason: str) -> None:
    _warn.warn_user(
        f"jax_fused_topk.{operation} runs on a GPU as plain jnp, far slower than its kernel: "
        f"{reason}"
    )


# Abstract evaluation


def _result_avals(
    operation: str,
    rule: _partition.Rule,
    avals: Sequence[Any],
    *results: tuple[tuple[int, ...], Any],
) -> list[Any]:
    """Arrays of the given (shape, dtype).

    They vary over every manual axis an input varies over, and are sharded over explicit
    axes as `rule` has it.
    """
    varying = frozenset[str]().union(*(a.manual_axis_type.varying for a in avals))
    first = avals[0]
    sharding = next((a.sharding for a in avals if not a.sharding.mesh.empty), first.sharding)
    spec = rule.result_spec(operation, avals)
    return [
        first.update(
            shape=shape,
            dtype=jnp.dtype(dtype),
            weak_type=False,
            sharding=sharding.update(spec=spec),
            manual_axis_type=ManualAxisType(varying=varying),
        )
        for shape, dtype in results
    ]


def _index_topk_abstract(
    *avals: Any, topk: int, order: str, return_scores: bool, implementation: str | None
) -> list[Any]:
    shape = (*avals[0].shape[:2], topk)
    results = [(shape, jnp.float32)] * bool(return_scores) + [(shape, jnp.int32)]
    return _result_avals("index_topk", _INDEX_TOPK_RULE, avals, *results)


def _index_scores_abstract(*avals: Any, implementation: str | None) -> list[Any]:
    shape = (*avals[0].shape[:2], avals[1].shape[1])
    return _result_avals("index_scores", _INDEX_SCORES_RULE, avals, (shape, jnp.float32))


def _top_k_abstract(*avals: Any, k: int, order: str, implementation: str | None) -> list[Any]:
    shape = (avals[0].shape[0], k)
    results = (shape, avals[0].dtype), (shape, jnp.int32)
    return _result_avals("top_k", _TOP_K_RULE, avals, *results)


# Lowering


def _call_target(
    ctx: Any, operands: Sequence[Any], target: str, avals_out: Sequence[Any], **attributes: Any
) -> Sequence[Any]:
    """Emits one FFI custom call whose results are `avals_out`."""
    rule = jax.ffi.ffi_lowering(_ffi.target(target))
    return rule(ctx.replace(avals_out=list(avals_out)), *operands, **attributes)


def _scratch(size: int) -> Any:
    """Scratch memory as one more result: XLA owns it, so a CUDA graph can be replayed."""
    return jax.core.ShapedArray((size,), jnp.dtype(jnp.uint8))


def _order_attribute(order: str) -> np.int32:
    return np.int32(_ffi.ORDERS[order])


def _lower_index_topk(platform: str, ctx: Any, *operands: Any, **params: Any) -> Sequence[Any]:
    q, k = ctx.avals_in[:2]
    topk, return_scores = params["topk"], params["return_scores"]
    scores = jax.core.ShapedArray(
        (*q.shape[:2], topk if return_scores else 0), jnp.dtype(jnp.float32)
    )
    results = [scores, ctx.avals_out[-1]]
    order = _order_attribute(params["order"])
    if platform == "cuda":
        size = _workspace.index_topk_bytes(q, k.shape[1], topk, int(order), return_scores)
        results.append(_scratch(size))
    scores, indices, *_ = _call_target(ctx, operands, "index_topk", results, order=order)
    return [scores, indices] if return_scores else [indices]


def _lower_index_scores(platform: str, ctx: Any, *operands: Any, **params: Any) -> Sequence[Any]:
    return _call_target(ctx, operands, "index_scores", ctx.avals_out)


def _lower_top_k(platform: str, ctx: Any, *operands: Any, **params: Any) -> Sequence[Any]:
    order = _order_attribute(params["order"])
    results = list(ctx.avals_out)
    if platform == "cuda":
        rows, keys = ctx.avals_in[0].shape
        results.append(_scratch(_workspace.top_k_bytes(rows, keys, params["k"], int(order))))
    return _call_target(ctx, operands, "top_k", results, order=order)[:2]


def _reference_index_topk(*operands: jax.Array, **params: Any) -> list[jax.Array]:
    scores, indices = reference.flat_index_topk(
        *operands, topk=params["topk"], order=params["order"]
    )
    return [scores, indices] if params["return_scores"] else [indices]


def _reference_index_scores(*operands: jax.Array, **params: Any) -> list[jax.Array]:
    return [reference.flat_index_scores(*operands)]


def _reference_top_k(*operands: jax.Array, **params: Any) -> list[jax.Array]:
    return list(reference.flat_top_k(*operands, k=params["k"], order=params["order"]))


def _index_limit(ctx: Any, params: dict[str, Any]) -> str | None:
    _, _, heads, dim = ctx.avals_in[0].shape
    return _ffi.cuda_index_limit(heads, dim, params.get("topk", 1))


def _top_k_limit(ctx: Any, params: dict[str, Any]) -> str | None:
    return _ffi.cuda_top_k_limit(params["k"], params["order"])


def _is_empty(ctx: Any) -> bool:
    """Whether a call has nothing to do, which the reference does without a kernel."""
    return any(a.size == 0 for a in (*ctx.avals_in, *ctx.avals_out))


def _register_lowerings(
    primitive: Primitive,
    operation: str,
    call: Lowering,
    fallback: Callable[..., list[jax.Array]],
    cuda_limit: Callable[[Any, dict[str, Any]], str | None],
    sharding: _partition.Rule,
) -> None:
    """One rule a platform; the forced implementation is honoured or refused."""
    lower_reference = mlir.lower_fun(fallback, multiple_results=True)

    def rule(platform: str | None, ctx: Any, *operands: Any, **params: Any) -> Sequence[Any]:
        forced = params["implementation"]
        if forced not in (None, "reference", platform):
            raise NotImplementedError(
                f"jax_fused_topk.{operation}: implementation={forced!r} does not run on platform "
                f"{platform or 'other than cpu and cuda'!r}; leave it None to pick by platform"
            )
        use_kernel = platform is not None and forced != "reference" and not _is_empty(ctx)
        if use_kernel and platform == "cuda" and forced is None:
            reason = cuda_limit(ctx, params) if _ffi.has_cuda() else _NO_CUDA
            if reason is not None:
                _warn_plain(operation, reason)
                use_kernel = False
        if use_kernel and _partition.applies(ctx):
            return _partition.lower(primitive, sharding, ctx, *operands, **params)
        if use_kernel:
            return call(platform, ctx, *operands, **params)
        return lower_reference(ctx, *operands, **params)

    mlir.register_lowering(primitive, functools.partial(rule, None))
    for platform in ("cpu", "cuda"):
        mlir.register_lowering(primitive, functools.partial(rule, platform), platform=platform)


# Batching: one bind whatever is mapped


def _to_front(x: jax.Array, axis: int | None, size: int) -> jax.Array:
    """Moves the mapped axis to the front; an unmapped operand is repeated."""
    if axis is None:
        return jnp.broadcast_to(x, (size, *x.shape))
    return jnp.moveaxis(x, axis, 0)


def _mapped_size(operands: Sequence[jax.Array], axes: Sequence[int | None]) -> int:
    return next(x.shape[a] for x, a in zip(operands, axes, strict=True) if a is not None)


def _merge(x: jax.Array, axis: int) -> jax.Array:
    """Merges axes `axis` and `axis + 1`."""
    return x.reshape(*x.shape[:axis], x.shape[axis] * x.shape[axis + 1], *x.shape[axis + 2 :])


def _split(x: jax.Array, axis: int, size: int, each: int) -> jax.Array:
    """Splits `axis` into `size` and `each`."""
    return x.reshape(*x.shape[:axis], size, each, *x.shape[axis + 1 :])


def _unmapped_shape(x: jax.Array, axis: int | None) -> tuple[int, ...]:
    return x.shape if axis is None else (*x.shape[:axis], *x.shape[axis + 1 :])


def _batch_index(
    primitive: Primitive, operands: Sequence[jax.Array], axes: Sequence[int | None], **params: Any
) -> tuple[list[jax.Array], list[int]]:
    """Folds the mapped axis into the queries where the keys are shared, else into the batch."""
    size = _mapped_size(operands, axes)
    shared_keys = axes[1] is None and axes[3] is None
    into = 1 if shared_keys else 0

    def fold(name: str, x: jax.Array, axis: int | None) -> jax.Array:
        if shared_keys and name in ("k", "k_scale"):
            return x
        return _merge(jnp.moveaxis(_to_front(x, axis, size), 0, into), into)

    names = _checks.IndexOperands._fields
    folded = [fold(n, x, a) for n, x, a in zip(names, operands, axes, strict=True)]
    out = primitive.bind(*folded, **params)
    each = _unmapped_shape(operands[0], axes[0])[into]
    return [_split(x, into, size, each) for x in out], [into] * len(out)


def _batch_top_k(
    operands: Sequence[jax.Array], axes: Sequence[int | None], **params: Any
) -> tuple[list[jax.Array], list[int]]:
    """Folds the mapped axis into the rows."""
    size = _mapped_size(operands, axes)
    folded = [_merge(_to_front(x, a, size), 0) for x, a in zip(operands, axes, strict=True)]
    out = top_k_p.bind(*folded, **params)
    each = _unmapped_shape(operands[0], axes[0])[0]
    return [_split(x, 0, size, each) for x in out], [0] * len(out)


# Derivatives: none through indices


def _no_tangent(x: Any) -> Any:
    return ad.Zero(jax.typeof(x).to_tangent_aval())


def _refuse(operation: str, advice: str) -> None:
    raise NotImplementedError(
        f"jax_fused_topk.{operation}: the scores cannot be differentiated. {advice}, or wrap "
        "the inputs in jax.lax.stop_gradient."
    )


def _index_topk_jvp(
    primals: Sequence[Any], tangents: Sequence[Any], **params: Any
) -> tuple[list[Any], list[Any]]:
    # The public function stops the tangents and lays its own rule over the scores.
    if params["return_scores"] and not all(type(t) is ad.Zero for t in tangents):
        _refuse("index_topk's primitive", "Pass them through derivatives.differentiable_scores")
    out = index_topk_p.bind(*primals, **params)
    return out, [_no_tangent(x) for x in out]


def _index_scores_jvp(
    primals: Sequence[Any], tangents: Sequence[Any], **params: Any
) -> tuple[list[Any], list[Any]]:
    if not all(type(t) is ad.Zero for t in tangents):
        _refuse("index_scores", "Differentiate the scores of index_topk(..., return_scores=True)")
    out = index_scores_p.bind(*primals, **params)
    return out, [_no_tangent(x) for x in out]


def _top_k_jvp(
    primals: Sequence[Any], tangents: Sequence[Any], **params: Any
) -> tuple[list[Any], list[Any]]:
    values, indices = top_k_p.bind(*primals, **params)
    if type(tangents[0]) is ad.Zero:
        values_dot = _no_tangent(values)
    else:
        values_dot = derivatives.values_tangent(tangents[0], indices)
    return [values, indices], [values_dot, _no_tangent(indices)]


# Registration


def _define(
    primitive: Primitive,
    *,
    abstract: Callable[..., list[Any]],
    jvp: Callable[..., tuple[list[Any], list[Any]]],
    batch: Callable[..., tuple[list[jax.Array], list[int]]],
) -> None:
    primitive.multiple_results = True
    primitive.def_abstract_eval(abstract)
    ad.primitive_jvps[primitive] = jvp
    batching.primitive_batchers[primitive] = batch

    @functools.cache
    def compiled(params: tuple[tuple[str, Any], ...]) -> Callable[..., list[jax.Array]]:
        return jax.jit(functools.partial(primitive.bind, **dict(params)))

    # A call outside jit is a jitted call: compiled once for each shape and option.
    def impl(*operands: Any, **params: Any) -> list[jax.Array]:
        with jax.disable_jit(False):  # under disable_jit, jit would bind again, for ever
            return compiled(tuple(params.items()))(*operands)

    primitive.def_impl(impl)


_define(
    index_topk_p,
    abstract=_index_topk_abstract,
    jvp=_index_topk_jvp,
    batch=functools.partial(_batch_index, index_topk_p),
)
_define(
    index_scores_p,
    abstract=_index_scores_abstract,
    jvp=_index_scores_jvp,
    batch=functools.partial(_batch_index, index_scores_p),
)
_define(top_k_p, abstract=_top_k_abstract, jvp=_top_k_jvp, batch=_batch_top_k)

_register_lowerings(
    index_topk_p,
    "index_topk",
    _lower_index_topk,
    _reference_index_topk,
    _index_limit,
    _INDEX_TOPK_RULE,
)
_register_lowerings(
    index_scores_p,
    "index_scores",
    _lower_index_scores,
    _reference_index_scores,
    _index_limit,
    _INDEX_SCORES_RULE,
)
_register_lowerings(
    top_k_p,
    "top_k",
    _lower_top_k,
    _reference_top_k,
    _top_k_limit,
    _TOP_K_RULE,
)
