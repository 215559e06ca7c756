// The ISA kernels for AVX-512: 24 accumulators and 3 keys of its 32 registers.

#if defined(__x86_64__)
#if !defined(__AVX512F__) || !defined(__AVX512BW__) || !defined(__AVX512DQ__) || \
    !defined(__AVX512VL__)
#error "compile this file with -mavx512f -mavx512bw -mavx512dq -mavx512vl -mfma"
#endif

#define JFT_KERNELS kIsaKernelsAvx512
#define JFT_ISA "avx512"
#define JFT_VECTOR_BYTES 64
#define JFT_PANEL_VECTORS 3
#define JFT_HEAD_BLOCK 8
#include "cpu/isa_kernels.inc"
#endif
