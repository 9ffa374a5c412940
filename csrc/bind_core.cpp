// The module kvoffload._C: one bind_*.cpp per area, each adding its classes.
#include <pybind11/pybind11.h>

#include "bind.h"
#include "kernel_source.h"

PYBIND11_MODULE(_C, m) {
    m.doc() = "kvoffload's native core";
    kvoffload::bind_index(m);
    kvoffload::bind_copy(m);
    kvoffload::bind_disk(m);
    kvoffload::bind_bench(m);
    m.def("kernels_text", &kvoffload::kernels_text);
    m.def("compat_text", &kvoffload::compat_text);
}
