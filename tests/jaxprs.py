"""Reads traced and compiled programs: which primitives, and how large their values are."""

import math
import re

import jax

try:
    from jax.extend.core import ClosedJaxpr, Jaxpr
except ImportError:  # moved between supported versions
    from jax.core import ClosedJaxpr, Jaxpr


def equations(jaxpr):
    """Every equation, those of inner programs included."""
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jax.tree.leaves(
            list(eqn.params.values()), is_leaf=lambda x: isinstance(x, (Jaxpr, ClosedJaxpr))
        ):
            if isinstance(inner, (Jaxpr, ClosedJaxpr)):
                yield from equations(inner)


def primitive_names(jaxpr):
    """The names of all primitives, in order."""
    return [eqn.primitive.name for eqn in equations(jaxpr)]


def our_equations(jaxpr):
    """The package's own equations."""
    return [e for e in equations(jaxpr) if e.primitive.name.startswith("jax_fused_topk")]


def value_sizes(jaxpr):
    """The number of elements of every value that an equation makes."""
    return [math.prod(v.aval.shape) for eqn in equations(jaxpr) for v in eqn.outvars]


def hlo_value_sizes(text):
    """The number of elements of every array type in an HLO text."""
    shapes = re.findall(r"\b(?:pred|bf16|[suf]\d+\w*)\[([\d,]*)\]", text)
    return [math.prod(int(d) for d in shape.split(",") if d) for shape in shapes]
