// XLA FFI handlers of the CPU implementation: check, then run on XLA's threads.

#include "ffi/handlers_cpu.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

#include "cpu/kernels.h"
#include "ffi/checks.h"

namespace jax_fused_topk {
namespace {

// Items of one parallel loop, taken one at a time by whoever comes.
struct Loop {
  const std::function<void(int64_t)>* body;
  int64_t count;
  std::atomic<int64_t> next{0};
  std::mutex mutex;
  std::condition_variable all_done;
  int64_t done = 0;
  std::exception_ptr failure;

  void work() {
    for (int64_t i; (i = next.fetch_add(1)) < count;) {
      std::exception_ptr caught;
      try {
        (*body)(i);
      } catch (...) {
        caught = std::current_exception();
      }
      std::lock_guard<std::mutex> lock(mutex);
      if (caught && !failure) failure = caught;
      if (++done == count) all_done.notify_all();
    }
  }
};

// The caller works too and waits only for items that another thread has begun, so
// a pool whose threads are all busy (with us, perhaps) delays but never blocks.
// A task that starts late finds no item left; it shares the loop's state to see it.
cpu::ParallelFor parallel_on(ffi::ThreadPool& pool) {
  return [&pool](int64_t count, const std::function<void(int64_t)>& body) {
    if (count <= 0) return;
    auto loop = std::make_shared<Loop>();
    loop->body = &body;
    loop->count = count;
    const int64_t helpers = std::min(count, pool.num_threads()) - 1;
    for (int64_t i = 0; i < helpers; ++i) pool.Schedule([loop] { loop->work(); });
    loop->work();
    std::unique_lock<std::mutex> lock(loop->mutex);
    loop->all_done.wait(lock, [&] { return loop->done == loop->count; });
    if (loop->failure) std::rethrow_exception(loop->failure);
  };
}

// Memory is the one thing a CPU kernel can run out of.
template <typename Run>
ffi::Error guarded(Run run) {
  try {
    run();
  } catch (const std::exception& e) {
    return ffi::Error::Internal(std::string("jax_fused_topk: ") + e.what());
  }
  return ffi::Error::Success();
}

ffi::Error index_topk(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer k, F32x3 weights,
                      F32x2 k_scale, S32x2 starts, S32x2 ends, int32_t order,
                      ffi::Result<F32x3> scores, ffi::Result<S32x3> indices) {
  IndexTopkParams params;
  JFT_RETURN_IF_ERROR(
      read_index_topk({q, k, weights, k_scale, starts, ends}, order, scores, indices, &params));
  return guarded([&] { cpu::index_topk(params, parallel_on(pool)); });
}

ffi::Error index_scores(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer k, F32x3 weights,
                        F32x2 k_scale, S32x2 starts, S32x2 ends, ffi::Result<F32x3> scores) {
  IndexScoresParams params;
  JFT_RETURN_IF_ERROR(read_index_scores({q, k, weights, k_scale, starts, ends}, scores, &params));
  return guarded([&] { cpu::index_scores(params, parallel_on(pool)); });
}

ffi::Error top_k(ffi::ThreadPool pool, ffi::AnyBuffer x, S32x1 starts, S32x1 ends, int32_t order,
                 ffi::Result<ffi::AnyBuffer> values, ffi::Result<S32x2> indices) {
  TopkParams params;
  JFT_RETURN_IF_ERROR(read_top_k(x, starts, ends, order, values, indices, &params));
  return guarded([&] { cpu::top_k(params, parallel_on(pool)); });
}

}  // namespace
}  // namespace jax_fused_topk

using jax_fused_topk::F32x2, jax_fused_topk::F32x3, jax_fused_topk::S32x1, jax_fused_topk::S32x2,
    jax_fused_topk::S32x3;
namespace ffi = ::xla::ffi;

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    JftIndexTopkCpu, jax_fused_topk::index_topk,
    jax_fused_topk::bind_index_inputs(ffi::Ffi::Bind().Ctx<ffi::ThreadPool>())
        .Attr<int32_t>("order")
        .Ret<F32x3>()    // scores [B, Q, K or 0]
        .Ret<S32x3>());  // indices [B, Q, K]

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    JftIndexScoresCpu, jax_fused_topk::index_scores,
    jax_fused_topk::bind_index_inputs(ffi::Ffi::Bind().Ctx<ffi::ThreadPool>())
        .Ret<F32x3>());  // scores [B, Q, N]

XLA_FFI_DEFINE_HANDLER_SYMBOL(JftTopkCpu, jax_fused_topk::top_k,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()  // x [R, N]
                                  .Arg<S32x1>()           // starts [R]
                                  .Arg<S32x1>()           // ends [R]
                                  .Attr<int32_t>("order")
                                  .Ret<ffi::AnyBuffer>()  // values [R, k]
                                  .Ret<S32x2>());         // indices [R, k]
