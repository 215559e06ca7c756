// The ISA kernels for AVX2: 12 accumulators, 3 keys and a broadcast are its 16 registers.

#if defined(__x86_64__)
#if !defined(__AVX2__) || !defined(__FMA__)
#error "compile this file with -mavx2 -mfma"
#endif

#define JFT_KERNELS kIsaKernelsAvx2
#define JFT_ISA "avx2"
#define JFT_VECTOR_BYTES 32
#define JFT_PANEL_VECTORS 3
#define JFT_HEAD_BLOCK 4
#include "cpu/isa_kernels.inc"
#endif
