"""What is timed: suites of shapes, each with its implementations side by side."""

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jax_fused_topk as jft
from benchmarks.timing import Call

TOPK = 2048
HEADS, DIM = 64, 128
TOP_K_SHAPES = [(4096, n) for n in (8192, 16384, 32768, 65536, 131072, 163840)]
TOP_K_SHAPES += [(64, 131072), (8, 131072), (1, 2**24)]
INDEX_SHAPES = [(4096, n) for n in (8192, 16384, 32768, 131072)]
INDEX_SHAPES += [(512, 131072), (64, 131072), (8, 131072)]
ADVERSARIAL_SHAPES = [(4096, 8192), (4096, 32768), (4096, 131072), (64, 131072), (1, 2**24)]
CPU_TOP_K_SHAPES = [(64, 32768)]
CPU_INDEX_SHAPES = [(64, 32768)]
STANDALONE = ("top_k", "lax.top_k", "torch.topk", "flashinfer.top_k")
PLAIN_MAX_KEYS = 16384  # plain jnp takes a quarter of a second past it

Case = tuple[tuple[int, int], list[Call]]


def top_k(shapes: list[tuple[int, int]]) -> Iterator[Case]:
    """Standalone top-k of float32 normal draws, against lax.top_k and those importable."""
    for rows, keys in shapes:
        x = jax.random.normal(jax.random.key(rows + keys), (rows, keys))
        ours = [Call("top_k", _top_k(order), (x,), order) for order in ("any", "score")]
        theirs = Call("lax.top_k", jax.jit(lambda x: lax.top_k(x, TOPK)), (x,), "score")
        _check_equal(ours[1], theirs)
        yield (rows, keys), [*ours, theirs, *_torch_calls(x)]


def adversarial(shapes: list[tuple[int, int]]) -> Iterator[Case]:
    """Standalone top-k of inputs that are unkind to a threshold, beside random ones."""
    for rows, keys in shapes:
        draws = jax.random.normal(jax.random.key(rows + keys), (rows, keys))
        kinds = {
            "random": draws,
            "ascending": jnp.sort(draws, axis=1),
            "descending": -jnp.sort(draws, axis=1),
            "constant": jnp.ones_like(draws),
            "two values": (draws > 0).astype(jnp.float32),
            "narrow band": 10 + 1e-6 * draws,
            "outlier": draws.at[:, keys // 3].set(1e30),
            "plateau": jnp.where(draws > 2.5, draws, 0),
        }
        calls = [
            Call("top_k", _top_k(order), (x,), order, inputs)
            for inputs, x in kinds.items()
            for order in ("any", "score")
        ]
        yield (rows, keys), calls


def index(shapes: list[tuple[int, int]], replay: Path | None) -> Iterator[Case]:
    """The indexer: fused, unfused and plain jnp; real text where `replay` is given."""
    for queries, keys in shapes:
        inputs, data = _index_inputs(queries, keys, replay)
        calls = [
            Call("index_topk", _index_topk(order), (data,), order, inputs)
            for order in ("any", "index", "score")
        ]
        scores = jax.jit(lambda d: jft.index_scores(**d))
        calls.append(Call("index_scores", scores, (data,), None, inputs))
        calls.append(Call("index_scores+top_k", jax.jit(_unfused), (data,), "any", inputs))
        if jax.default_backend() == "cpu":
            oracle = jax.jit(lambda d: jft.reference.index_topk(**d, topk=TOPK))
            calls.append(Call("reference", oracle, (data,), "index", inputs))
        if keys <= PLAIN_MAX_KEYS:
            calls.append(Call("jnp", jax.jit(_plain), (data,), "score", inputs))
        yield (queries, keys), calls


def _top_k(order: Any) -> Callable[..., Any]:
    return jax.jit(lambda x: jft.top_k(x, TOPK, order=order))


def _index_topk(order: Any) -> Callable[..., Any]:
    return jax.jit(lambda d: jft.index_topk(**d, topk=TOPK, order=order))


def _unfused(data: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    scores = jft.index_scores(**data)
    return jft.top_k(scores, TOPK, starts=data["starts"], ends=data["ends"], order="any")


def _plain(data: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """What users write today: all scores to memory, then lax.top_k."""
    wide = data["k"].astype(jnp.float32)
    columns = jnp.arange(wide.shape[0])

    def row(args: tuple[jax.Array, ...]) -> jax.Array:
        q, weights, start, end = args
        dots = jnp.einsum("hd,nd->hn", q.astype(jnp.float32), wide)
        scores = jnp.einsum("hn,h->n", jax.nn.relu(dots), weights) * data["k_scale"]
        return jnp.where((columns >= start) & (columns < end), scores, -jnp.inf)

    rows = (data["q"], data["weights"], data["starts"], data["ends"])
    return lax.top_k(lax.map(row, rows, batch_size=min(256, len(data["q"]))), TOPK)


def _index_inputs(queries: int, keys: int, replay: Path | None) -> tuple[str, dict[str, jax.Array]]:
    if replay is not None:
        spec = importlib.util.spec_from_file_location("replay_loader", replay / "replay.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.dont_write_bytecode = True  # nothing is left beside shared files
        spec.loader.exec_module(module)
        data = module.load(replay / "replay_layer2.npz", queries, keys)
        return "replay", {name: jnp.asarray(x) for name, x in data.items()}
    rng = np.random.default_rng(queries + keys)
    q, q_scale = jft.quantize_fp8(rng.standard_normal((queries, HEADS, DIM), np.float32))
    k, k_scale = jft.quantize_fp8(rng.standard_normal((keys, DIM), np.float32))
    return "random", {
        "q": q,
        "k": k,
        "weights": q_scale * rng.standard_normal((queries, HEADS), np.float32),
        "k_scale": k_scale,
        "starts": jnp.zeros(queries, jnp.int32),
        "ends": jft.causal_ends(queries, keys),
    }


def _check_equal(ours: Call, theirs: Call) -> None:
    """Raises unless values and indices are the same, bit for bit."""
    for a, b in zip(
        ours.function(*ours.arguments), theirs.function(*theirs.arguments), strict=True
    ):
        same = lax.bitcast_convert_type(a, jnp.int32) == lax.bitcast_convert_type(b, jnp.int32)
        if not bool(same.all()):
            raise AssertionError("top_k and lax.top_k differ")


def _torch_calls(x: jax.Array) -> list[Call]:
    """torch.topk and flashinfer.top_k on the same values, where they are importable."""
    if jax.default_backend() != "gpu" or importlib.util.find_spec("torch") is None:
        return []
    import torch

    values = torch.from_dlpack(x)
    functions: dict[str, Callable[[], Any]] = {
        "torch.topk": lambda: torch.topk(values, TOPK, sorted=False)
    }
    if importlib.util.find_spec("flashinfer") is not None:
        import flashinfer

        functions["flashinfer.top_k"] = lambda: flashinfer.top_k(values, TOPK)

    def timer(function: Callable[[], Any]) -> Callable[[], float]:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

        def run() -> float:
            begin.record()
            function()
            end.record()
            torch.cuda.synchronize()
            return begin.elapsed_time(end)

        return run

    def waiting(function: Callable[[], Any]) -> Callable[[], None]:
        def run() -> None:
            function()
            torch.cuda.synchronize()

        return run

    return [
        Call(name, waiting(f), order="any", device_timer=timer(f)) for name, f in functions.items()
    ]
