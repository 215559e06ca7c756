// PTX wrappers: one small function per instruction, named after it.

#ifndef JAX_FUSED_TOPK_CUDA_PTX_CUH_
#define JAX_FUSED_TOPK_CUDA_PTX_CUH_

#include <cstdint>

namespace jax_fused_topk::ptx {

__device__ __forceinline__ uint32_t smem_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Special registers, not to be kept in a register or hoisted with what depends on
// them.
__device__ __forceinline__ uint32_t tid_x() {
  uint32_t d;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(d));
  return d;
}
__device__ __forceinline__ uint32_t ctaid_x() {
  uint32_t d;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(d));
  return d;
}

// Copies the first `bytes` (0 or 16) of 16 bytes and fills the rest with zeros.
__device__ __forceinline__ void cp_async_16(uint32_t destination, const void* source, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(destination), "l"(source),
               "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void cp_async_commit_group() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

template <int kPending>
__device__ __forceinline__ void cp_async_wait_group() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

__device__ __forceinline__ uint4 ld_shared_v4(uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

// d += A (16 x 16, row-major) * B (16 x 8, column-major).  With g = lane / 4 and
// t = lane % 4, a lane holds
//   a[0]: row g, k 2t, 2t+1      a[1]: row g+8, the same k
//   a[2]: row g, k 2t+8, 2t+9    a[3]: row g+8, the same k
//   b0: k 2t, 2t+1, column g     b1: k 2t+8, 2t+9, column g
//   d[0], d[1]: row g, columns 2t, 2t+1     d[2], d[3]: row g+8, the same columns
__device__ __forceinline__ void mma_m16n8k16_f16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                                 uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void mma_m16n8k16_bf16(float (&d)[4], const uint32_t (&a)[4],
                                                  uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// max(x, y), NaN if either is.
__device__ __forceinline__ float max_nan(float x, float y) {
  float d;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(d) : "f"(x), "f"(y));
  return d;
}

// Exact: the f16 type holds every e4m3 value.
#if __CUDA_ARCH__ >= 890
__device__ __forceinline__ uint32_t cvt_f16x2_e4m3x2(uint16_t pair) {
  uint32_t d;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(d) : "h"(pair));
  return d;
}
#endif

__device__ __forceinline__ uint32_t prmt(uint32_t a, uint32_t b, uint32_t selector) {
  uint32_t d;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(selector));
  return d;
}

__device__ __forceinline__ uint32_t mul_f16x2(uint32_t a, uint32_t b) {
  uint32_t d;
  asm("mul.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

}  // namespace jax_fused_topk::ptx

#endif  // JAX_FUSED_TOPK_CUDA_PTX_CUH_
