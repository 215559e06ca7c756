"""Device time by `jax.named_scope`: which scope each kernel works for.

The text of a compiled module gives an instruction the op_name of the operation it came from,
which holds the scopes around it; an event of a trace names its instruction.
"""

import re
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence

from benchmarks import trace

# Parts of an op_name that JAX writes for control flow and calls, not the user.
_STRUCTURE = re.compile(
    r"while|body|cond|branch_\d+_fun|scan|closed_call|core_call|eval_jaxpr|pjit|shard_map"
    r"|checkpoint|remat|rematted_computation|custom_(jvp|vjp)_call"
)
_WRAPPED = re.compile(r"(\w+)\((.*)\)")
_INSTRUCTION = re.compile(
    r'^\s*(?:ROOT )?%?([\w.-]+) = .*\bmetadata=\{[^}]*?op_name="([^"]*)"', re.MULTILINE
)


def of_op_name(op_name: str) -> str:
    """The named scopes in an op_name, outermost first, joined by "/".

    "jit(f)/indexer/jit(g)/inner/sin" gives "indexer/inner": without the jitted functions, the
    primitive at the end, control flow and einsum's formulas.  Of a transformed scope, such as
    "transpose(jvp(indexer))", the scope itself counts, and one inside itself counts once: both
    happen in a gradient.  Of several op_names, joined by ";", the first counts.
    """
    found: list[str] = []
    if not op_name.startswith(("jit(", "pjit(")):  # a parameter's, whose name may hold a "/"
        return ""
    for part in op_name.split(";")[0].split("/")[:-1]:
        scope = _unwrapped(part)
        if scope and scope not in found[-1:]:
            found.append(scope)
    return "/".join(found)


def _unwrapped(part: str) -> str:
    while wrapped := _WRAPPED.fullmatch(part):
        part = "" if wrapped[1] in ("jit", "pjit") else wrapped[2]
    return "" if _STRUCTURE.fullmatch(part) or "->" in part else part


def by_instruction(module: str) -> dict[str, str]:
    """Instruction -> its scope, of those that have one.

    Args:
      module: `jax.jit(f).lower(...).compile().as_text()`.
    """
    named = {name: of_op_name(op_name) for name, op_name in _INSTRUCTION.findall(module)}
    return {name: scope for name, scope in named.items() if scope}


def scope_ms(
    calls: Sequence[Sequence[trace.Interval]], scopes: Mapping[str, str]
) -> dict[str, float]:
    """Scope -> the median over the calls of how long at least one of its kernels ran, in ms.

    Scopes come in order of their first start; "" holds what has none: kernels inside a CUDA
    graph, without an instruction, or of an instruction without a scope.

    Args:
      calls: the device work of each call.
      scopes: of `by_instruction`; if it is empty there is nothing to tell apart.

    Returns:
      An empty dict if `scopes` is.
    """
    if not scopes:
        return {}
    work: dict[str, list[list[trace.Interval]]] = defaultdict(lambda: [[] for _ in calls])
    for number, call in enumerate(calls):
        for interval in call:
            work[scopes.get(interval.hlo_op, "")][number].append(interval)
    return {
        scope: statistics.median(trace.union_ms(part) for part in parts)
        for scope, parts in work.items()
    }
