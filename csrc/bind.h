// Entry points of the binding files; only bind_*.cpp include pybind11 or this.
#pragma once

#include <pybind11/pybind11.h>

namespace kvoffload {

void bind_index(pybind11::module_& m);
void bind_copy(pybind11::module_& m);
void bind_disk(pybind11::module_& m);
void bind_bench(pybind11::module_& m);

}  // namespace kvoffload
