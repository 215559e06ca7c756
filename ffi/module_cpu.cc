// The Python module jax_fused_topk._cpu.

#include "cpu/kernels.h"
#include "ffi/handlers_cpu.h"
#include "ffi/module.h"

NB_MODULE(_cpu, m) {
  namespace jft = jax_fused_topk;
  m.doc() = "CPU handlers of jax_fused_topk.";
  jft::define_common(m);
  m.def("handlers",
        [] { return jft::handler_table(JftIndexTopkCpu, JftIndexScoresCpu, JftTopkCpu); });
  m.def("dispatched_isa", &jft::cpu::dispatched_isa);
}
