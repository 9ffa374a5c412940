#include "kernel_source.h"

// The assembler reads the headers themselves, from the root of the tree, where every build of it runs.
__asm__(
    ".section .rodata\n"
    ".globl kvoffload_kernels_text\n"
    ".hidden kvoffload_kernels_text\n"
    "kvoffload_kernels_text:\n"
    ".incbin \"csrc/kernels.h\"\n"
    ".byte 0\n"
    ".globl kvoffload_compat_text\n"
    ".hidden kvoffload_compat_text\n"
    "kvoffload_compat_text:\n"
    ".incbin \"csrc/compat.h\"\n"
    ".byte 0\n"
    ".text\n");

extern "C" {
extern const char kvoffload_kernels_text[];
extern const char kvoffload_compat_text[];
}

namespace kvoffload {

const char* kernels_text() { return kvoffload_kernels_text; }
const char* compat_text() { return kvoffload_compat_text; }

}  // namespace kvoffload
