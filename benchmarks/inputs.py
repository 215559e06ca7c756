"""What the benchmarks run on: input sets made on the device.

An indexer's input set is a dict of `index_topk`'s operands: q [Q, H, D], k [N, D],
weights [Q, H], k_scale [N], starts and ends [Q].
"""

import functools
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_fused_topk as jft

HEADS, DIM = 64, 128
REPLAY_QUERIES, REPLAY_KEYS = 4096, 163840  # what the replay set holds
SETS = 2

ROOT = Path(__file__).resolve().parent.parent
_FOLDERS = [root / "shared" / "replay" for root in (ROOT.parent, ROOT)]
REPLAY = next((folder for folder in _FOLDERS if folder.exists()), None)
"""The replay set beside a checkout or inside it, None where there is none."""

Operands = dict[str, jax.Array]


@functools.partial(jax.jit, static_argnums=(1, 2))
def random(seed: int, queries: int, keys: int) -> Operands:
    """Normal draws quantised to FP8, causal rows: the last query sees every key."""
    q_key, k_key, weights_key = jax.random.split(jax.random.key(seed), 3)
    q, q_scale = jft.quantize_fp8(jax.random.normal(q_key, (queries, HEADS, DIM)))
    k, k_scale = jft.quantize_fp8(jax.random.normal(k_key, (keys, DIM)))
    return {
        "q": q,
        "k": k,
        "weights": q_scale * jax.random.normal(weights_key, (queries, HEADS)),
        "k_scale": k_scale,
        "starts": jnp.zeros(queries, jnp.int32),
        "ends": jft.causal_ends(queries, keys),
    }


def causal_pairs(queries: int, keys: int) -> int:
    """How many (query, key) pairs causal rows have: row t holds keys - queries + 1 + t."""
    first = keys - queries + 1
    return sum(max(0, first + t) for t in range(queries))


def replay_holds(queries: int, keys: int) -> bool:
    """Whether the replay set has a window of this shape."""
    return queries <= REPLAY_QUERIES and queries <= keys <= REPLAY_KEYS


def replay(folder: Path, turn: int, queries: int, keys: int) -> Operands:
    """A window of the replay set: real text, causal rows.

    Each turn's window ends `queries` tokens before the last one's, as far as the stored
    queries and keys reach; past that it is the same window in memory of its own.
    """
    stream = _stream(folder)
    room = min(REPLAY_QUERIES - queries, REPLAY_KEYS - keys)
    back = min(turn * queries, room)
    rows = slice(REPLAY_QUERIES - back - queries, REPLAY_QUERIES - back)
    columns = slice(REPLAY_KEYS - back - keys, REPLAY_KEYS - back)
    window: dict[str, Any] = {name: stream[name][rows] for name in ("q", "weights")}
    window |= {name: stream[name][columns] for name in ("k", "k_scale")}
    ends = np.arange(keys - queries + 1, keys + 1, dtype=np.int32)
    window |= {"starts": np.zeros(queries, np.int32), "ends": ends}
    return {name: jnp.array(x, copy=True) for name, x in window.items()}


@functools.cache
def _stream(folder: Path) -> dict[str, np.ndarray]:
    loader = load_module(folder / "replay.py")
    stream: dict[str, np.ndarray] = loader.load(folder / "replay_layer2.npz")
    return stream


def load_module(path: Path) -> ModuleType:
    """The module of a file that is not on the path, leaving nothing beside it."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python module")
    module = importlib.util.module_from_spec(spec)
    written, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        spec.loader.exec_module(module)
    finally:
        sys.dont_write_bytecode = written
    return module


@functools.partial(jax.jit, static_argnums=(1, 2))
def values(seed: int, rows: int, keys: int) -> jax.Array:
    """float32 [rows, keys] normal draws."""
    return jax.random.normal(jax.random.key(seed), (rows, keys))


ADVERSARIAL = (
    "random",
    "ascending",
    "descending",
    "constant",
    "two values",
    "narrow band",
    "outlier",
    "plateau",
    "spikes",
)
"""Kinds of rows that are unkind to a sampled threshold, beside random ones."""


@functools.partial(jax.jit, static_argnums=0)
def unkind(kind: str, draws: jax.Array) -> jax.Array:
    """float32 [..., N] values of an `ADVERSARIAL` kind, made from normal draws."""
    keys = draws.shape[-1]
    column = jnp.arange(keys)
    made = {
        "random": lambda: draws,
        "ascending": lambda: jnp.sort(draws, axis=-1),
        "descending": lambda: -jnp.sort(draws, axis=-1),
        "constant": lambda: jnp.ones_like(draws),
        "two values": lambda: (draws > 0).astype(jnp.float32),
        "narrow band": lambda: 10 + 1e-6 * draws,
        "outlier": lambda: jnp.where(column == keys // 3, 1e30, draws),
        "plateau": lambda: jnp.where(draws > 2.5, draws, 0),
        "spikes": lambda: draws + 100 * (column % 8 == 0),
    }
    return made[kind]()


@functools.partial(jax.jit, static_argnums=1)
def dial(scores: jax.Array, queries: int) -> Operands:
    """Operands whose scores are `scores` [N] in every row, exactly.

    Head 0 asks for e0 and head 1 for e1, with weights +1 and -1; a key is e0 (score
    +k_scale) or e1 (score -k_scale).
    """
    negative = jnp.signbit(scores)
    q = jnp.zeros((queries, HEADS, DIM)).at[:, 0, 0].set(1).at[:, 1, 1].set(1)
    k = jnp.zeros((len(scores), DIM)).at[:, 0].set(~negative).at[:, 1].set(negative)
    return {
        "q": q.astype(jnp.float8_e4m3fn),
        "k": k.astype(jnp.float8_e4m3fn),
        "weights": jnp.zeros((queries, HEADS)).at[:, 0].set(1).at[:, 1].set(-1),
        "k_scale": jnp.abs(scores),
        "starts": jnp.zeros(queries, jnp.int32),
        "ends": jnp.full(queries, len(scores), jnp.int32),
    }
