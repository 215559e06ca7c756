"""The suites: which shapes, which inputs, which implementations side by side.

A suite is a list of cases.  The calls of a case take turns, so that only their times may
be divided by one another.
"""

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
from jax import lax

from benchmarks import implementations, inputs, scopes
from benchmarks.timing import Call

Shape = tuple[int, int]

LENGTHS = (8192, 16384, 32768, 65536, 131072, 163840)
TOPK = 2048
PREFILL: list[Shape] = [*((4096, n) for n in LENGTHS), (8192, 131072), (32768, 32768)]
# Lengths around which index_topk takes another way, and between.
SWEEP = [2049, 3000, 4096, 6144, 8192, 12288, 16384, 16385, 20480, 24576, 32768, 32769]
SWEEP += [40960, 49152, 65536, 98304, 131072, 163840]
SMALL_Q: list[Shape] = [(2**i, 131072) for i in range(12)]
TOP_K: list[Shape] = [*((4096, n) for n in LENGTHS), (64, 131072), (8, 131072), (1, 2**24)]
UNKIND_TOP_K: list[Shape] = [(4096, 8192), (4096, 32768), (4096, 131072), (64, 131072), (1, 2**24)]
UNKIND_INDEX: list[Shape] = [(4096, 8192), (4096, 32768), (4096, 131072)]
CPU: list[Shape] = [(64, 32768)]

# Past it plain jnp takes longer than all the rest of a suite.
PLAIN_PAIRS = 4096 * 131072

INDEXERS = ("index_topk", "index_scores", "index_scores+top_k", "jnp", *implementations.CONTROLS)
ON_CPU = ("index_topk", "index_scores", "index_scores+top_k", "reference")
MODEL_SUITES = ("model", "scopes")
# XLA captures runs of at least so many kernels in a CUDA graph, whose kernels a trace gives
# no instruction: none with this.
NO_GRAPHS = {"xla_gpu_graph_min_graph_size": 2**31 - 1}
MODEL = Path(__file__).resolve().parent.parent / "examples" / "dsa_attention.py"


@dataclasses.dataclass(frozen=True)
class Options:
    """What the command line may change about a suite."""

    shapes: Sequence[Shape] | None = None
    inputs: Sequence[str] = ("random",)
    replay: Path | None = None
    implementations: Sequence[str] | None = None


@dataclasses.dataclass(frozen=True)
class Case:
    """Calls that take turns on one shape."""

    name: str
    q: int
    n: int
    topk: int
    calls: Sequence[Call]
    agreements: Sequence[float | None]
    scored: bool  # whether H and D mean anything

    @property
    def fields(self) -> dict[str, Any]:
        """The JSON line's fields that all calls share."""
        h, d = (inputs.HEADS, inputs.DIM) if self.scored else (None, None)
        return {"case": self.name, "q": self.q, "n": self.n, "h": h, "d": d, "topk": self.topk}


Make = Callable[[], Case]


def cases(suite: str, options: Options) -> Iterable[Make]:
    """The cases of a suite; each is made, and its inputs with it, when it is called.

    A list, but for `MODEL_SUITES`, whose cases come one after the other.

    Raises:
      ValueError: if the suite is unknown, or not available.
    """
    if suite not in SUITES:
        raise ValueError(f"suite must be one of {', '.join(SUITES)}, got {suite!r}")
    implementations.check_names(options.implementations or ())
    made = SUITES[suite](options)
    return made if suite in MODEL_SUITES else list(made)


def _prefill(options: Options) -> Iterator[Make]:
    return _index(options.shapes or PREFILL, options, INDEXERS)


def _small_q(options: Options) -> Iterator[Make]:
    return _index(options.shapes or SMALL_Q, options, INDEXERS)


def _lengths(options: Options) -> Iterator[Make]:
    shapes = options.shapes or [(4096, n) for n in SWEEP]
    return _index(shapes, options, ("index_topk", "control:tensor"))


def _top_k(options: Options) -> Iterator[Make]:
    return _standalone(options.shapes or TOP_K, options, implementations.STANDALONE)


def _adversarial(options: Options) -> Iterator[Make]:
    if names := _index_names(options, ("index_topk",)):
        for shape in options.shapes or UNKIND_INDEX:
            yield functools.partial(_unkind_index_case, shape, names)
    if names := _top_k_names(options, ("top_k",)):
        for shape in options.shapes or UNKIND_TOP_K:
            yield functools.partial(_unkind_top_k_case, shape, names)


def _cpu(options: Options) -> Iterator[Make]:
    shapes = options.shapes or CPU
    yield from _standalone(shapes, options, ("top_k", "lax.top_k"))
    yield from _index(shapes, options, ON_CPU)


def _model(options: Options, compiler: dict[str, Any] | None = None) -> Iterator[Make]:
    """Cases of the attention example, which says in `benchmark_cases` what they are.

    benchmark_cases(shapes or None) yields (q, n, topk, {name: (function, arguments)}).

    Args:
      options: of the command line.
      compiler: XLA options that differ from the defaults.
    """
    if not MODEL.exists():
        raise ValueError(f"suite model is not available: no {MODEL}")
    sys.path.append(str(MODEL.parent))  # the example's own modules
    module = inputs.load_module(MODEL)
    if not hasattr(module, "benchmark_cases"):
        raise ValueError(f"suite model is not available: {MODEL} has no benchmark_cases")
    return (
        functools.partial(_model_case, *case, compiler=compiler)
        for case in module.benchmark_cases(options.shapes)
    )


def _scopes(options: Options) -> Iterator[Make]:
    """The model suite with the kernels of every named scope to be seen."""
    return _model(options, NO_GRAPHS)


SUITES: dict[str, Callable[[Options], Iterable[Make]]] = {
    "prefill": _prefill,
    "small-q": _small_q,
    "lengths": _lengths,
    "topk": _top_k,
    "adversarial": _adversarial,
    "model": _model,
    "scopes": _scopes,
    "cpu": _cpu,
}


def chosen_count(keys: int) -> int:
    """K of a case: 2048, and a quarter of fewer than 8192 keys."""
    return min(TOPK, max(1, keys // 4))


def _index_names(options: Options, names: Sequence[str]) -> list[str]:
    """What of the implementations asked for scores keys; `names` if none was asked for."""
    asked = names if options.implementations is None else options.implementations
    return [name for name in asked if name not in implementations.STANDALONE]


def _top_k_names(options: Options, names: Sequence[str]) -> list[str]:
    """What of the implementations asked for does not; `names` if none was asked for."""
    asked = names if options.implementations is None else options.implementations
    scoring = (*implementations.INDEX, *implementations.CONTROLS)
    return [name for name in asked if name not in scoring]


def _index(shapes: Sequence[Shape], options: Options, names: Sequence[str]) -> Iterator[Make]:
    for kind in options.inputs:
        for queries, keys in shapes:
            if kind == "replay" and not inputs.replay_holds(queries, keys):
                print(f"no replay inputs of {queries} x {keys}: left out")
                continue
            plain = queries * keys <= PLAIN_PAIRS
            here = [n for n in _index_names(options, names) if plain or n != "jnp"]
            if here:
                yield functools.partial(_index_case, (queries, keys), kind, here, options.replay)


def _standalone(shapes: Sequence[Shape], options: Options, names: Sequence[str]) -> Iterator[Make]:
    if names := _top_k_names(options, names):
        for shape in shapes:
            yield functools.partial(_top_k_case, shape, names)


def _index_case(shape: Shape, kind: str, names: Sequence[str], replay: Path | None) -> Case:
    def operands(turn: int) -> inputs.Operands:
        if kind == "random":
            return inputs.random(turn, *shape)
        if replay is None:
            raise ValueError("inputs=replay needs --replay, the folder of the replay set")
        return inputs.replay(replay, turn, *shape)

    sets = {kind: [(operands(turn),) for turn in range(inputs.SETS)]}
    return _compare_indexers(f"indexer {_text(shape)} {kind}", shape, names, (), sets)


def _unkind_index_case(shape: Shape, names: Sequence[str]) -> Case:
    queries, keys = shape
    draws = [inputs.values(turn, 1, keys)[0] for turn in range(inputs.SETS)]
    sets = {
        kind: [(inputs.dial(inputs.unkind(kind, x), queries),) for x in draws]
        for kind in inputs.ADVERSARIAL
    }
    controls = ("index_scores", *implementations.CONTROLS)
    return _compare_indexers(f"unkind indexer {_text(shape)}", shape, names, controls, sets)


def _compare_indexers(
    name: str,
    shape: Shape,
    names: Sequence[str],
    controls: Sequence[str],
    sets: implementations.InputSets,
) -> Case:
    """A case of indexers on every kind of input, and of controls on the first kind."""
    topk = chosen_count(shape[1])
    first = next(iter(sets))
    data = sets[first][0][0]
    make = functools.partial(implementations.index_variants, data=data, topk=topk)
    calls = implementations.calls(names, make, sets)
    calls += implementations.calls(controls, make, {first: sets[first]})
    oracle = implementations.unfused(topk, "index")
    return _case(name, shape, topk, calls, oracle, scored=True)


def _top_k_case(shape: Shape, names: Sequence[str]) -> Case:
    draws = [inputs.values(turn, *shape) for turn in range(inputs.SETS)]
    return _compare_top_k(f"top-k {_text(shape)} random", shape, names, draws, ["random"])


def _unkind_top_k_case(shape: Shape, names: Sequence[str]) -> Case:
    draws = [inputs.values(turn, *shape) for turn in range(inputs.SETS)]
    kinds = inputs.ADVERSARIAL
    return _compare_top_k(f"unkind top-k {_text(shape)}", shape, names, draws, kinds, ["lax.top_k"])


def _compare_top_k(
    name: str,
    shape: Shape,
    names: Sequence[str],
    draws: Sequence[jax.Array],
    kinds: Sequence[str],
    controls: Sequence[str] = (),
) -> Case:
    """A case of standalone top-k on values of every kind, and of controls on the first."""
    topk = chosen_count(shape[1])
    sets = {kind: [(inputs.unkind(kind, x),) for x in draws] for kind in kinds}
    first = next(iter(sets))
    make = functools.partial(implementations.top_k_variants, sets=sets, topk=topk)
    calls = implementations.calls(names, make, sets)
    calls += implementations.calls(controls, make, {first: sets[first]})
    return _case(name, shape, topk, calls, lambda x: lax.top_k(x, topk))


def _model_case(
    q: int,
    n: int,
    topk: int,
    functions: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]],
    *,
    compiler: dict[str, Any] | None,
) -> Case:
    calls = []
    for name, (function, arguments) in functions.items():
        compiled = jax.jit(function).lower(*arguments).compile(compiler_options=compiler)
        memory = int(compiled.memory_analysis().temp_size_in_bytes)
        named = scopes.by_instruction(compiled.as_text())
        calls.append(Call(name, compiled, [arguments], temp_bytes=memory, scopes=named))
    none = [None] * len(calls)
    return Case(f"model {_text((q, n))}", q, n, topk, calls, none, scored=True)


def _case(
    name: str,
    shape: Shape,
    topk: int,
    calls: Sequence[Call],
    oracle: Callable[..., Any],
    scored: bool = False,
) -> Case:
    """A case whose calls were compared with the oracle on their first input set.

    Raises:
      RuntimeError: if an exact implementation chose other keys.
    """
    agreements: list[float | None] = []
    compiled = jax.jit(oracle)
    expected: dict[int, Any] = {}
    for call in calls:
        indices = implementations.chosen(call.run(0))
        if indices is None:
            agreements.append(None)
            continue
        arguments = call.arguments[0]
        if id(arguments) not in expected:
            expected[id(arguments)] = compiled(*arguments)[-1]
        share = float(implementations.agreement(indices, expected[id(arguments)]))
        if call.exact and share != 1:
            raise RuntimeError(
                f"{name}: {call.label} must choose the oracle's keys, it has {share:.6f} of them"
            )
        agreements.append(share)
    return Case(name, *shape, topk, calls, agreements, scored)


def _text(shape: Shape) -> str:
    return f"{shape[0]} x {shape[1]}"


def parse_shapes(text: str) -> list[Shape]:
    """Reads "4096x8192,1x16777216" as [(4096, 8192), (1, 16777216)].

    Raises:
      ValueError: if it has another form, or a size is not positive.
    """
    shapes = []
    for part in text.split(","):
        sizes = part.split("x")
        if len(sizes) != 2 or not all(s.isdecimal() and int(s) > 0 for s in sizes):
            raise ValueError(f"shapes must be like 4096x8192,512x131072, got {text!r}")
        shapes.append((int(sizes[0]), int(sizes[1])))
    return shapes
