"""What runs side by side: functions of one input set, by name.

A name of the form `module:callable` is imported and called as the operation it stands
beside: `callable(q=, k=, weights=, k_scale=, starts=, ends=, topk=)` in the indexer's
suites, `callable(x, k)` in top-k's.  JAX must be able to trace it.
"""

import importlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jax_fused_topk as jft
from benchmarks.controls import control_call
from benchmarks.inputs import Operands
from benchmarks.scopes import by_instruction
from benchmarks.timing import Call

INDEX = ("index_topk", "index_scores", "index_scores+top_k", "jnp", "reference")
CONTROLS = ("control:tensor", "control:score")
STANDALONE = ("top_k", "lax.top_k", "torch.topk", "flashinfer.top_k")
NAMES = (*INDEX, *CONTROLS, *STANDALONE)

# Rows of plain jnp's [rows, H, N] float32 intermediate are scored together up to this size.
PLAIN_BYTES = 4 << 30


def check_names(names: Sequence[str]) -> Sequence[str]:
    """Returns the names.

    Raises:
      ValueError: if one is neither an implementation's nor of the form `module:callable`, or
        that cannot be imported.
    """
    for name in names:
        if name in NAMES:
            continue
        if ":" not in name:
            known = ", ".join(NAMES)
            raise ValueError(f"implementations must be of {known} or module:callable, got {name!r}")
        try:
            _import(name)
        except (ImportError, AttributeError) as error:
            raise ValueError(f"implementations: {name!r} cannot be imported: {error}") from error
    return names


InputSets = dict[str, list[tuple[Any, ...]]]


class Variant(NamedTuple):
    """One order of an implementation."""

    order: str | None
    function: Callable[..., Any]  # traced by JAX, or `external`
    exact: bool = False  # chooses exactly the oracle's keys
    external: bool = False  # runs as it is, waits for its result


def calls(
    names: Sequence[str], make: Callable[[str], Iterator[Variant]], sets: InputSets
) -> list[Call]:
    """The variants of `names` on every kind of input, each compiled once.

    Args:
      names: implementations.
      make: name -> its variants, as `index_variants` or `top_k_variants` give them.
      sets: kind of input -> the arguments of each of its sets, all of the same shapes.
    """
    made = []
    some = next(iter(sets.values()))[0]
    for name in names:
        for variant in make(name):
            function, temp_bytes, named = variant.function, None, {}
            if not variant.external:
                function = jax.jit(function).lower(*some).compile()
                temp_bytes = int(function.memory_analysis().temp_size_in_bytes)
                named = by_instruction(function.as_text())
            for kind, turns in sets.items():
                order, exact = variant.order, variant.exact
                made.append(Call(name, function, turns, order, kind, exact, temp_bytes, named))
    return made


def index_variants(name: str, data: Operands, topk: int) -> Iterator[Variant]:
    """The variants of an indexer; each is a function of the operands `data`.

    A control that is not built has none.
    """
    if name == "index_topk":
        for order in ("any", "index", "score"):
            yield Variant(order, _index_topk(order, topk), exact=True)
    elif name == "index_scores":
        yield Variant(None, lambda d: jft.index_scores(**d))
    elif name == "index_scores+top_k":
        yield Variant("any", unfused(topk, "any"), exact=True)
    elif name == "jnp":
        yield Variant("score", plain(topk))
    elif name == "reference":
        yield Variant("index", lambda d: jft.reference.index_topk(**d, topk=topk))
    elif name in CONTROLS:
        function = control_call(name.removeprefix("control:"), data)
        if function is not None:
            yield Variant(None, function)
    else:
        given = _import(name)
        yield Variant(None, lambda d: given(**d, topk=topk))


def top_k_variants(name: str, sets: InputSets, topk: int) -> Iterator[Variant]:
    """The variants of a standalone top-k; each is a function of x [rows, N].

    torch and flashinfer, where they are importable and JAX runs on a GPU, read the arrays
    of `sets` in place.
    """
    if name == "top_k":
        for order in ("any", "score"):
            yield Variant(order, _top_k(order, topk), exact=True)
    elif name == "lax.top_k":
        yield Variant("score", lambda x: lax.top_k(x, topk))
    elif name in ("torch.topk", "flashinfer.top_k"):
        yield from _torch_variants(name, sets, topk)
    else:
        given = _import(name)
        yield Variant(None, lambda x: given(x, topk))


def unfused(topk: int, order: Any) -> Callable[[Operands], Any]:
    """index_scores, then top_k over its rows: (values, indices)."""

    def run(data: Operands) -> Any:
        scores = jft.index_scores(**data)
        return jft.top_k(scores, topk, starts=data["starts"], ends=data["ends"], order=order)

    return run


def plain(topk: int) -> Callable[[Operands], Any]:
    """What users write today: all scores to memory, then lax.top_k."""

    def run(data: Operands) -> Any:
        keys = data["k"].astype(jnp.float32)
        column = jnp.arange(keys.shape[0])

        def row(operands: tuple[jax.Array, ...]) -> jax.Array:
            q, weights, start, end = operands
            dots = jnp.einsum("hd,nd->hn", q.astype(jnp.float32), keys)
            scores = jnp.einsum("hn,h->n", jax.nn.relu(dots), weights) * data["k_scale"]
            return jnp.where((column >= start) & (column < end), scores, -jnp.inf)

        rows, heads, _ = data["q"].shape
        batch = max(1, min(rows, PLAIN_BYTES // (4 * heads * keys.shape[0])))
        operands = (data["q"], data["weights"], data["starts"], data["ends"])
        return lax.top_k(lax.map(row, operands, batch_size=batch), topk)

    return run


def chosen(result: Any) -> np.ndarray | jax.Array | None:
    """The indices [rows, K] in a result, None if it has none."""
    last = result[-1] if isinstance(result, tuple | list) else result
    if hasattr(last, "cpu"):
        last = last.cpu().numpy().astype(np.int32)
    is_indices = hasattr(last, "dtype") and jnp.issubdtype(last.dtype, jnp.integer)
    return last if is_indices and last.ndim == 2 else None


def agreement(indices: jax.Array, oracle: jax.Array) -> jax.Array:
    """The share of the oracle's keys that `indices` has too.

    Args:
      indices: int32 [rows, K], each row without repeats, -1 past its end.
      oracle: the same.

    Returns:
      float32, 1 if the oracle has no keys.
    """
    both = jnp.sort(jnp.concatenate([indices, oracle], axis=1), axis=1)
    shared = jnp.sum((both[:, 1:] == both[:, :-1]) & (both[:, 1:] >= 0))
    wanted = jnp.sum(oracle >= 0)
    return jnp.where(shared == wanted, 1.0, shared / wanted)


def _index_topk(order: Any, topk: int) -> Callable[[Operands], jax.Array]:
    return lambda d: jft.index_topk(**d, topk=topk, order=order)


def _top_k(order: Any, topk: int) -> Callable[[jax.Array], tuple[jax.Array, jax.Array]]:
    return lambda x: jft.top_k(x, topk, order=order)


def _torch_variants(name: str, sets: InputSets, topk: int) -> Iterator[Variant]:
    module = name.split(".")[0]
    missing = any(importlib.util.find_spec(m) is None for m in ("torch", module))
    if missing or jax.default_backend() != "gpu":
        return
    torch = importlib.import_module("torch")
    seen = {id(x): torch.from_dlpack(x) for turns in sets.values() for (x,) in turns}

    def select(x: Any) -> Any:
        if module == "torch":
            return torch.topk(x, topk, sorted=False)
        return importlib.import_module(module).top_k(x, topk)

    def run(x: jax.Array) -> Any:
        result = select(seen[id(x)])
        torch.cuda.synchronize()
        return tuple(result)

    yield Variant("any", run, external=True)


def _import(name: str) -> Callable[..., Any]:
    """The callable that `module:callable` names.

    Raises:
      ImportError, AttributeError: if it is not there.
    """
    module, _, attribute = name.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
    return function
