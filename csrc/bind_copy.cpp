#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <string>
#include <tuple>
#include <vector>

#include "bench_io.h"
#include "bind.h"
#include "bind_records.h"
#include "chunks.h"
#include "copy_cpu.h"
#include "prefault.h"

namespace kvoffload {
namespace py = pybind11;
namespace {

using RegionTuple = std::tuple<std::uintptr_t, std::int64_t, std::int64_t, std::int64_t>;

std::vector<std::vector<PageRegion>> page_regions(const std::vector<std::vector<RegionTuple>>& pools) {
    std::vector<std::vector<PageRegion>> regions;
    for (const auto& pool : pools) {
        auto& group = regions.emplace_back();
        for (const auto& [base, stride, page_bytes, pages] : pool)
            group.push_back({base, stride, page_bytes, pages});
    }
    return regions;
}

}  // namespace

void bind_copy(py::module_& m) {
    py::class_<SlotSpace>(m, "SlotSpace")
        .def(py::init<std::int64_t, std::int64_t, std::vector<std::int64_t>>(), py::arg("slab_bytes"),
             py::arg("slabs"), py::arg("slot_bytes"))
        .def("offset", &SlotSpace::offset, py::arg("group"), py::arg("slot"));

    py::class_<CpuCopier> copier(m, "CpuCopier");
    copier
        .def(py::init([](std::uintptr_t base, const SlotSpace& host,
                         const std::vector<std::vector<RegionTuple>>& pools, int threads) {
                 if (static_cast<std::int64_t>(pools.size()) != host.groups()) {
                     throw py::value_error("pools must have one entry per group");
                 }
                 return std::make_unique<CpuCopier>(base, host, page_regions(pools), threads);
             }),
             py::arg("base"), py::arg("host"), py::arg("pools"), py::arg("threads"))
        .def(
            "submit",
            [](CpuCopier& copier, const py::array& copies, bool to_device) {
                return copier.submit(copy_records(copies), copies.shape(0), to_device);
            },
            py::arg("copies"), py::arg("to_device"))
        .def("close", &CpuCopier::close, py::call_guard<py::gil_scoped_release>());
    bind_handles<CpuCopier>(copier);

    m.def(
        "load_chunks",
        [](const py::array& copies, std::int64_t size) {
            if (size < 1) throw py::value_error("chunks of " + std::to_string(size) + " copies: at least 1");
            return load_chunks(copy_records(copies), copies.shape(0), size);
        },
        py::arg("copies"), py::arg("size"));
    m.def(
        "share_slots",
        [](const py::array& a, const py::array& b) {
            return share_slots(copy_records(a), a.shape(0), copy_records(b), b.shape(0));
        },
        py::arg("a"), py::arg("b"));
    m.def("memcpy_loop", &memcpy_loop, py::arg("target"), py::arg("source"), py::arg("bytes"),
          py::arg("count"), py::arg("threads"), py::call_guard<py::gil_scoped_release>());
    m.def("prefault", &prefault, py::arg("base"), py::arg("bytes"), py::arg("threads"),
          py::call_guard<py::gil_scoped_release>());
}

}  // namespace kvoffload
