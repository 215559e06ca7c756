// The Python module jax_fused_topk._cuda.  Importing it needs no GPU and no driver.

#include <cuda_runtime_api.h>
#include <nanobind/stl/vector.h>

#include <vector>

#include "cuda/limits.h"
#include "cuda/workspace.h"
#include "ffi/handlers_cuda.h"
#include "ffi/module.h"

NB_MODULE(_cuda, m) {
  namespace jft = jax_fused_topk;
  m.doc() = "CUDA handlers of jax_fused_topk.";
  jft::define_common(m);
  m.def("handlers",
        [] { return jft::handler_table(JftIndexTopkCuda, JftIndexScoresCuda, JftTopkCuda); });
  m.attr("TOOLKIT_VERSION") =
      nanobind::make_tuple(CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10);
  m.attr("ARCHITECTURES") = JFT_CUDA_ARCHITECTURES;
  m.attr("MAX_HEADS") = jft::kMaxHeads;
  m.attr("MAX_DIM") = jft::kMaxDim;
  m.attr("DIM_MULTIPLE") = jft::kDimMultiple;
  m.attr("MAX_INDEX_TOPK") = jft::kMaxIndexTopk;
  m.attr("MAX_SORTED_K") = jft::kMaxSortedTopk;
  m.attr("TOP_K_MAX_SHORT_KEYS") = jft::kMaxShortKeys;
  const auto element = [](bool fp8) { return fp8 ? jft::Element::kF8E4M3FN : jft::Element::kBF16; };
  m.def("index_topk_workspace_bytes",
        [element](bool fp8, int64_t batch, int64_t queries, int64_t heads, int64_t dim,
                  int64_t keys, int64_t topk, int order, bool return_scores) {
          return jft::workspace_bytes(element(fp8), batch, queries, heads, dim, keys, topk,
                                      static_cast<jft::Order>(order), !return_scores);
        });
  m.def("index_topk_workspace_bound", [element](bool fp8, int64_t heads, int64_t dim, int64_t keys,
                                                int64_t topk, int order, bool return_scores) {
    return jft::workspace_bound(element(fp8), heads, dim, keys, topk,
                                static_cast<jft::Order>(order), !return_scores);
  });
  // The way that the Hopper path serves a call.
  m.def("hopper_plan", [](int64_t batch, int64_t queries, int64_t keys, int64_t topk) {
    const jft::hopper::Plan plan = jft::hopper::make_plan(batch, queries, keys, topk, false);
    nanobind::dict way;
    way["dense"] = plan.dense;
    way["chunks"] = (plan.blocks + plan.chunk_blocks - 1) / plan.chunk_blocks;
    way["cycle"] = plan.windows.cycle;
    way["holes"] = plan.windows.holes;
    return way;
  });
  // The first keys of the groups of 8 that it samples of a row of N keys by such windows.
  m.def("hopper_sampled_groups", [](int64_t keys, int32_t cycle, int32_t holes) {
    const jft::hopper::Windows windows{cycle, holes};
    std::vector<int32_t> first;
    for (int32_t g = 0; g < windows.count_holes(static_cast<int32_t>(keys)); ++g) {
      first.push_back(windows.hole_key(g));
    }
    return first;
  });
  m.def("hopper_supported", [element](bool fp8, int64_t heads, int64_t dim) {
    return jft::hopper::supported(element(fp8), heads, dim);
  });
  m.attr("HOPPER_MAX_DENSE_KEYS") = jft::hopper::kMaxDenseKeys;
  m.attr("HOPPER_TILE_KEYS") = jft::hopper::kCtaKeys;
  m.attr("HOPPER_WINDOW_KEYS") = jft::hopper::kCtaKeys + jft::hopper::kGroupKeys;
  m.attr("HOPPER_MAX_SAMPLED_GROUPS") = jft::hopper::kMaxSampleTiles * jft::hopper::kCtaGroups;
  m.attr("HOPPER_MAX_FEW_BYTES") = jft::hopper::kMaxFewBytes;
  m.def("top_k_workspace_bytes", [](int64_t rows, int64_t keys, int64_t k, int order) {
    return jft::top_k_workspace_bytes(rows, keys, k, static_cast<jft::Order>(order));
  });
  m.def("top_k_workspace_bound", [](int64_t keys, int64_t k, int order) {
    return jft::top_k_workspace_bound(keys, k, static_cast<jft::Order>(order));
  });
}
