"""What `jax.export` must be told about the package's custom calls."""

from jax import export

from jax_fused_topk import _ffi

EXPORT_CHECKS: tuple[export.DisabledSafetyCheck, ...] = tuple(
    export.DisabledSafetyCheck.custom_call(_ffi.target(operation))
    for operation in ("index_topk", "index_scores", "top_k")
)
"""The `disabled_checks` of `jax.export.export` for every custom call of this package.

    exported = jax.export.export(
        jax.jit(f), platforms=("cpu", "cuda"), disabled_checks=jax_fused_topk.EXPORT_CHECKS
    )(*arguments)

JAX promises nothing for custom calls that it does not know and refuses to export them
unless they are named.  A target's name carries the version of its interface, so a program
serialised with another version fails with the missing target's name when it is compiled.
The process that loads the program must `import jax_fused_topk`, which registers the
handlers; exporting for "cuda" needs `build_info()["cuda"]`, but no GPU.

B, Q and N may be symbolic (`jax.export.symbolic_shape`), H, D and topk may not.  For "cuda" a
program with a symbolic size holds the largest workspace of its topk: at 2048, 520 MiB for
float8 with D = 128 and H of 32 or 64, and 160 MiB for every other.
"""
