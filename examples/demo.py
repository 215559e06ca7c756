"""Runs a jitted indexer on a slice of real-text replay, checks every row, draws the picks.

It uses the GPU when JAX has one, else the CPU.  The last line is `exact 64/64` when every
row is bit for bit what `lax.top_k(index_scores(...))` gives; the exit code is 0 only then,
and only if those scores also lie within `error_bound` of float64.
"""

import argparse
import functools
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from matplotlib.figure import Figure
from replay import load_slice
from tqdm import tqdm

from jax_fused_topk import build_info, index_scores, index_topk

ROWS_AT_A_TIME = 16  # of the plain pipeline: its [rows, H, N] float32 is then 64 MiB
BIN_KEYS = 64  # keys in one cell of the picture


# What runs.


@functools.partial(jax.jit, static_argnames=("topk", "order", "implementation"))
def indexer(
    q: jax.Array,  # [Q, H, D] float8_e4m3fn
    k: jax.Array,  # [N, D] float8_e4m3fn
    weights: jax.Array,  # [Q, H] float32
    k_scale: jax.Array,  # [N] float32
    starts: jax.Array,  # [Q] int32
    ends: jax.Array,  # [Q] int32
    *,
    topk: int,
    order: str = "index",
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Returns (scores float32, indices int32), each [Q, topk], in one call of this package."""
    return index_topk(
        q,
        k,
        weights,
        topk=topk,
        k_scale=k_scale,
        starts=starts,
        ends=ends,
        order=order,
        return_scores=True,
        implementation=implementation,
    )


@functools.partial(jax.jit, static_argnames=("topk",))
def plain_jnp(
    q: jax.Array,  # [Q, H, D]
    k: jax.Array,  # [N, D]
    weights: jax.Array,  # [Q, H]
    k_scale: jax.Array,  # [N]
    starts: jax.Array,  # [Q]
    ends: jax.Array,  # [Q]
    *,
    topk: int,
) -> tuple[jax.Array, jax.Array]:
    """Returns the same by the usual pipeline: all scores to memory, then `lax.top_k`."""
    wide_k = k.astype(jnp.float32)
    columns = jnp.arange(k.shape[0])

    def row_scores(row: tuple[jax.Array, ...]) -> jax.Array:
        """One query's ([H, D], [H], start, end) -> its scores, float32 [N]."""
        q, weights, start, end = row
        dots = jnp.einsum("hd,nd->hn", q.astype(jnp.float32), wide_k)
        scores = jnp.einsum("hn,h->n", jax.nn.relu(dots), weights) * k_scale
        return jnp.where((columns >= start) & (columns < end), scores, -jnp.inf)

    rows = (q, weights, starts, ends)
    scores = lax.map(row_scores, rows, batch_size=min(ROWS_AT_A_TIME, len(q)))
    return lax.top_k(scores, topk)


@functools.partial(jax.jit, static_argnames=("topk", "implementation"))
def unfused(
    data: dict[str, jax.Array], *, topk: int, implementation: str | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns index_scores, float32 [Q, N], and what `lax.top_k` picks from them."""
    scores = index_scores(**data, implementation=implementation)
    return scores, *lax.top_k(scores, topk)


# What is checked.


class Picks(NamedTuple):
    """The chosen keys of all rows."""

    scores: np.ndarray  # float32 [Q, topk]
    indices: np.ndarray  # int32 [Q, topk]


def expected_picks(best: Picks, data: dict[str, np.ndarray], order: str) -> Picks:
    """Returns `lax.top_k`'s picks as index_topk's contract puts them.

    A row of n < topk valid keys ends in -1, score -inf; "index" sorts the rest by index.
    """
    topk = best.indices.shape[1]
    keys = len(data["k"])
    valid = np.clip(data["ends"], 0, keys) - np.clip(data["starts"], 0, keys)
    unused = np.arange(topk) >= valid[:, None]
    scores = np.where(unused, np.float32(-np.inf), best.scores)
    indices = np.where(unused, np.int32(-1), best.indices)
    if order == "index":
        place = np.argsort(np.where(unused, keys, indices), axis=1, kind="stable")
        scores = np.take_along_axis(scores, place, 1)
        indices = np.take_along_axis(indices, place, 1)
    return Picks(scores, indices)


def equal_rows(a: Picks, b: Picks) -> np.ndarray:
    """Returns bool [Q]: the rows that agree in every bit of scores and indices."""
    same_scores = a.scores.view(np.int32) == b.scores.view(np.int32)
    return np.all(same_scores & (a.indices == b.indices), axis=1)


def error_bound(magnitude: np.ndarray, heads: int, dim: int) -> np.ndarray:
    """Returns the most that a score may differ from its exact value.

        bound = C 2**-23 k_scale sum_h |w_h| sum_d |q_hd k_d|,   C = 9/8 D + H + 2

    in units of 2**-23, one float32 step, of the sum of magnitudes:

    - 9/8 D for the dot products.  Products of FP8 values are exact.  A chain of float32
      FMAs (the CPU) rounds D times by half a step.  An MMA over k = 16 (the GPU) aligns 16
      products and the accumulator to the largest and may cut each by a step, and the
      result once more: 18 steps for each of D / 16 MMAs.
    - H for the sum over heads: two roundings of half a step each, product and addition,
      or one where they are fused.  relu adds nothing: it never widens a difference.
    - 1/2 for k_scale, and the rest for the products of these errors, which stay
      below 1 for D + H up to 2,000.

    Args:
      magnitude: k_scale sum_h |w_h| sum_d |q_hd k_d|, float64.
      heads: H.
      dim: D.
    """
    return (9 / 8 * dim + heads + 2) * 2.0**-23 * magnitude


def float64_scores(data: dict[str, np.ndarray], row: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns one row's scores and their magnitudes (see `error_bound`), float64 [N].

    Its own error is some 2**-46 of the magnitude: the dot products are exact.
    """
    q = data["q"][row].astype(np.float64)
    k = data["k"].astype(np.float64).T
    weights = data["weights"][row].astype(np.float64)
    k_scale = data["k_scale"].astype(np.float64)
    scores = k_scale * (weights @ np.maximum(q @ k, 0))
    magnitude = np.abs(k_scale) * (np.abs(weights) @ (np.abs(q) @ np.abs(k)))
    return scores, magnitude


class Accuracy(NamedTuple):
    """How index_scores compares with float64."""

    rows: int  # rows wholly within the bound
    error: float  # the largest difference
    share: float  # the largest difference / bound


def compare_with_float64(scores: np.ndarray, data: dict[str, np.ndarray]) -> Accuracy:
    """Compares index_scores, float32 [Q, N], with float64, in range and out of it."""
    queries, heads, dim = data["q"].shape
    columns = np.arange(len(data["k"]))
    rows, error, share = 0, 0.0, 0.0
    for row in tqdm(range(queries), desc="float64", leave=False, disable=None):
        exact, magnitude = float64_scores(data, row)
        valid = (columns >= data["starts"][row]) & (columns < data["ends"][row])
        difference = np.abs(scores[row] - exact)[valid]
        bound = error_bound(magnitude, heads, dim)[valid]
        rows += bool(np.all(difference <= bound) and np.all(scores[row, ~valid] == -np.inf))
        error = max(error, difference.max(initial=0.0))
        used = difference > 0  # where the bound is 0, so must the difference be
        share = max(share, (difference[used] / bound[used]).max(initial=0.0))
    return Accuracy(rows, error, share)


def same_sets(a: np.ndarray, b: np.ndarray) -> int:
    """Counts the rows of two int [Q, topk] arrays that hold the same indices."""
    return int(np.sum(np.all(np.sort(a, axis=1) == np.sort(b, axis=1), axis=1)))


def median_ms(calls: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Times calls by turns, after one of each to compile, and returns their medians in ms."""
    for call in calls.values():
        jax.block_until_ready(call())
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in tqdm(range(repeats), desc="timing", leave=False, disable=None):
        for name, call in calls.items():
            begin = time.perf_counter()
            jax.block_until_ready(call())
            samples[name].append((time.perf_counter() - begin) * 1e3)
    return {name: statistics.median(times) for name, times in samples.items()}


# What is drawn.


def bin_shares(data: dict[str, np.ndarray], indices: np.ndarray) -> np.ndarray:
    """Returns the share of each bin's valid keys that each query picks.

    Float64 [Q, bins]; NaN where a query may use no key of the bin.
    """
    queries, keys = len(indices), len(data["k"])
    columns = np.arange(keys)
    valid = (columns >= data["starts"][:, None]) & (columns < data["ends"][:, None])
    picked = np.zeros((queries, keys), bool)
    row, place = np.nonzero(indices >= 0)
    picked[row, indices[row, place]] = True
    edges = np.arange(0, keys, BIN_KEYS)
    picked_in_bin, valid_in_bin = (np.add.reduceat(x, edges, 1, int) for x in (picked, valid))
    empty = np.full(picked_in_bin.shape, np.nan)
    return np.divide(picked_in_bin, valid_in_bin, out=empty, where=valid_in_bin > 0)


def draw_picks(data: dict[str, np.ndarray], indices: np.ndarray, path: Path) -> None:
    """Draws which keys each query picks, summed up in bins, and writes it to `path`.

    Args:
      data: what `load_slice` returns.
      indices: int32 [Q, topk], -1 in unused places.
      path: the picture; its folder is made if need be.
    """
    shares = 100 * bin_shares(data, indices)
    queries, keys = len(indices), len(data["k"])
    edges = np.append(np.arange(0, keys, BIN_KEYS), keys)

    figure = Figure(figsize=(11, 6.5), layout="constrained")
    above, main = figure.subplots(2, 1, sharex=True, height_ratios=(1, 3))
    figure.suptitle(
        f"The {indices.shape[1]:,} keys that each of {queries} queries picks: "
        "in clusters, and densest just before the query"
    )

    even = 100 * np.mean(indices >= 0) * indices.shape[1] / keys
    above.stairs(np.nanmean(shares, axis=0), edges, fill=True, color="#31688e")
    above.axhline(even, color="black", linewidth=1, linestyle="--", label="if spread evenly")
    above.legend(loc="upper center", frameon=False)
    above.set_ylabel("picked, mean over\nqueries (%)")
    above.set_ylim(0, 100)

    image = main.pcolormesh(
        edges, np.arange(queries + 1) - 0.5, shares, cmap="viridis", vmin=0, vmax=100
    )
    main.invert_yaxis()
    main.set_yticks(np.arange(0, queries, 8))
    main.set_xticks(np.linspace(0, keys, 9))
    main.xaxis.set_major_formatter("{x:,.0f}")
    main.set_xlabel("key position (tokens)")
    main.set_ylabel(f"query, later ones below\n(tokens after position {keys - queries:,})")
    figure.colorbar(image, ax=main, pad=0.01, label=f"share of each {BIN_KEYS}-key bin picked (%)")

    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


# The program.


def pick_device(implementation: str | None) -> jax.Device:
    """Returns JAX's first device, or the first that a forced implementation runs on.

    Raises:
      SystemExit: if there is none.
    """
    platform = implementation if implementation in ("cpu", "cuda") else None
    try:
        return jax.devices(platform)[0]
    except RuntimeError as error:
        raise SystemExit(f"--implementation {platform}: JAX has no such device ({error})") from None


def device_name(device: jax.Device) -> str:
    """Returns a GPU's model, or a CPU's number of cores and the kernels' instruction set."""
    if device.platform != "cpu":
        return device.device_kind
    return f"CPU, {os.cpu_count()} cores, {build_info()['cpu_isa']}"


def parse_arguments(argv: Sequence[str] | None, keys: int) -> argparse.Namespace:
    """Parses the command line; `keys` is the largest K."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--out", type=Path, default=Path("demo_output/picks.png"), help="the picture (%(default)s)"
    )
    parser.add_argument(
        "--implementation",
        choices=("cuda", "cpu", "reference"),
        help="force one (default: by platform)",
    )
    parser.add_argument("--topk", type=int, default=2048, help="keys a query picks (%(default)s)")
    parser.add_argument("--repeats", type=int, default=7, help="timed runs (%(default)s)")
    args = parser.parse_args(argv)
    if not 1 <= args.topk <= keys:
        parser.error(f"--topk must be 1 to {keys}, got {args.topk}")
    if args.repeats < 1:
        parser.error(f"--repeats must be at least 1, got {args.repeats}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the demo; returns 0 if every row is exact and within the bound, else 1."""
    data = load_slice()
    queries, heads, dim = data["q"].shape
    keys = len(data["k"])
    args = parse_arguments(argv, keys)
    topk, implementation = args.topk, args.implementation

    device = pick_device(implementation)
    print(f"device  {device_name(device)} (jax {jax.__version__})")
    print(f"inputs  {queries} queries x {keys:,} keys of real text, {heads} heads x {dim}, FP8")
    on_device = jax.device_put(data, device)

    def fused(order: str = "index") -> tuple[jax.Array, jax.Array]:
        return indexer(**on_device, topk=topk, order=order, implementation=implementation)

    scores, *best = jax.device_get(unfused(on_device, topk=topk, implementation=implementation))
    picks = {order: Picks(*jax.device_get(fused(order))) for order in ("index", "score")}
    exact = np.ones(queries, bool)
    for order, got in picks.items():
        exact &= equal_rows(got, expected_picks(Picks(*best), data, order))
    accuracy = compare_with_float64(scores, data)

    plain_picks = Picks(*jax.device_get(plain_jnp(**on_device, topk=topk)))
    plain_picks = expected_picks(plain_picks, data, "index")
    plain_same = same_sets(plain_picks.indices, picks["index"].indices)
    ms = median_ms(
        {"index_topk": fused, "plain jnp": lambda: plain_jnp(**on_device, topk=topk)},
        args.repeats,
    )
    draw_picks(data, picks["index"].indices, args.out)

    print()
    print(f"{'topk ' + str(topk):<12}{'rows':>6}{'exact':>8}{'ms':>10}")
    print(f"{'index_topk':<12}{queries:>6}{exact.sum():>8}{ms['index_topk']:>10.2f}")
    print(f"{'plain jnp':<12}{queries:>6}{'-':>8}{ms['plain jnp']:>10.2f}")
    print()
    print(
        f"float64: {accuracy.rows}/{queries} rows within the bound, differences at most "
        f"{accuracy.error:.1e} and {100 * accuracy.share:.2f} % of the bound"
    )
    print(f"plain jnp rounds differently and picks the same keys in {plain_same} of {queries} rows")
    print(f"picture: {args.out}")
    print(f"exact {exact.sum()}/{queries}")
    return 0 if exact.all() and accuracy.rows == queries else 1


if __name__ == "__main__":
    sys.exit(main())
