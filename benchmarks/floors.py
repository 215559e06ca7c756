"""The least time that a card's arithmetic or memory allows, to draw beside the measured."""

from typing import NamedTuple

from benchmarks import inputs, nsight
from benchmarks.records import Line


class Card(NamedTuple):
    """What one card can do at most."""

    fp8_flop_per_clock: int  # dense, all SMs
    bytes_per_s: float


# H200 SXM datasheet: 4.8 TB/s, and 1979 TFLOP/s of dense FP8 at the 1830 MHz of its 132
# SMs, that is 8192 FLOP a clock each.
CARDS = {"NVIDIA H200": Card(132 * 8192, 4.8e12)}


def arithmetic_ms(line: Line) -> float | None:
    """The time of the products of causal rows at the FP8 peak of the measured clock.

    2 H D FLOP a valid (query, key) pair over FLOP a clock times the case's median SM clock;
    what follows the products is not in it.

    Args:
      line: of a case with causal rows: random or replay inputs of an indexer.

    Returns:
      ms, None where the card or its clock is not known.
    """
    card = CARDS.get(line["card"])
    if card is None or line["sm_mhz"] is None:
        return None
    return _flop(line) / (card.fp8_flop_per_clock * line["sm_mhz"] * 1e6) * 1e3


def peak_share(line: Line) -> float | None:
    """The products of causal rows over what the FP8 peak does in the cycles of a call.

    2 H D FLOP a valid pair over FLOP a clock times the cycles of all its launches, however
    fast the clock was.

    Args:
      line: of `counters`, random or replay inputs.

    Returns:
      1 at the peak, None where the card is not known.
    """
    card = CARDS.get(line["card"])
    if card is None:
        return None
    return _flop(line) / (card.fp8_flop_per_clock * nsight.total(line["launches"], nsight.CYCLES))


def moved_bytes(line: Line) -> int:
    """The bytes of each operand and result of an indexer's call, once.

    FP8 q [Q, H, D] and k [N, D]; four bytes each for weights [Q, H], k_scale [N], starts and
    ends [Q], and the results: indices [Q, K], of `index_scores` the scores [Q, N]; a control
    has none.

    Args:
      line: of `counters`.
    """
    q, n, h, d = (line[name] for name in "qnhd")
    columns = {"index_topk": line["topk"], "index_scores": n}.get(line["implementation"], 0)
    bytes_moved: int = q * h * d + n * d + 4 * (q * h + n + 2 * q + q * columns)
    return bytes_moved


def _flop(line: Line) -> int:
    """2 H D a valid pair of causal rows."""
    flop: int = 2 * line["h"] * line["d"] * inputs.causal_pairs(line["q"], line["n"])
    return flop


def reading_ms(line: Line) -> float | None:
    """The time of reading float32 [rows, N] once, None where the card is not known."""
    card = CARDS.get(line["card"])
    return None if card is None else 4 * line["q"] * line["n"] / card.bytes_per_s * 1e3
