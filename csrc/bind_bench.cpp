// What `kvoffload bench` measures the index against.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <memory>

#include "bench_table.h"
#include "bind.h"

namespace py = pybind11;

namespace kvoffload {

namespace {

using Keys = py::array_t<std::uint8_t, py::array::c_style>;

std::size_t count(const Keys& keys) {
    if (keys.ndim() != 2 || keys.shape(1) != 16)
        throw py::value_error("keys is not an array of (n, 16) uint8");
    return static_cast<std::size_t>(keys.shape(0));
}

}  // namespace

void bind_bench(py::module_& m) {
    using namespace py::literals;
    py::class_<PlainTable>(m, "PlainTable")
        .def(
            py::init([](const Keys& keys) { return std::make_unique<PlainTable>(keys.data(), count(keys)); }),
            "keys"_a)
        .def(
            "find", [](const PlainTable& t, const Keys& keys) { return t.find(keys.data(), count(keys)); },
            "keys"_a)
        .def(
            "pin_unpin",
            [](PlainTable& t, const Keys& keys) { return t.pin_unpin(keys.data(), count(keys)); }, "keys"_a);
}

}  // namespace kvoffload
