// The ISA kernels for whatever the compiler targets by default (SSE2 on x86-64).

#define JFT_KERNELS kIsaKernelsBaseline
#define JFT_ISA "baseline"
#define JFT_VECTOR_BYTES 16
#define JFT_PANEL_VECTORS 2
#define JFT_HEAD_BLOCK 4
#include "cpu/isa_kernels.inc"
