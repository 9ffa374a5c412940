// The module of a device runtime: _cuda, _hip or _sim, named by KVOFFLOAD_MODULE. Integers only: addresses,
// strides, streams and events as the caller's library gives them.
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bind_records.h"
#include "gpu.h"
#include "gpu_copier.h"

#if defined(KVOFFLOAD_SIM)
#include "sim_runtime.h"
#endif

namespace kvoffload {
namespace py = pybind11;
namespace {

using RegionTuple = std::tuple<std::uintptr_t, std::int64_t, std::int64_t, std::int64_t>;
using Pools = std::vector<std::vector<RegionTuple>>;
using Space = std::tuple<std::int64_t, std::int64_t, std::vector<std::int64_t>>;

void require(int code) {
    if (code != gpu::kOkay) throw std::runtime_error(gpu::error_text(code));
}

// What `make` writes; raises where it fails.
template <class Make>
std::uintptr_t created(const Make& make) {
    std::uintptr_t handle = 0;
    require(make(&handle));
    return handle;
}

std::unique_ptr<GpuCopier> make_copier(std::uintptr_t base, const Space& space, const Pools& pools,
                                       const std::vector<std::pair<int, int>>& modes,
                                       const py::kwargs& options) {
    CopierOptions chosen;
    for (const auto& [name, value] : options) {
        const auto key = name.cast<std::string>();
        if (key == "device")
            chosen.device = value.cast<int>();
        else if (key == "chunk")
            chosen.chunk = value.cast<std::int64_t>();
        else if (key == "store_staging")
            chosen.store_staging = value.cast<std::int64_t>();
        else if (key == "load_staging")
            chosen.load_staging = value.cast<std::int64_t>();
        else if (key == "gather_blocks")
            chosen.gather_blocks = value.cast<int>();
        else if (key == "side_blocks")
            chosen.side_blocks = value.cast<int>();
        else if (key == "batch_limit")
            chosen.batch_limit = value.cast<std::int64_t>();
        else if (key == "batch")
            chosen.batch = value.cast<bool>();
        else
            throw py::value_error("a copier has no option " + key);
    }
    std::vector<std::vector<PageRegion>> regions;
    for (const auto& pool : pools) {
        auto& group = regions.emplace_back();
        for (const auto& [at, stride, page_bytes, pages] : pool)
            group.push_back({at, stride, page_bytes, pages});
    }
    std::vector<std::pair<CopyMode, CopyMode>> by_group;
    for (const auto& [store, load] : modes) {
        by_group.emplace_back(static_cast<CopyMode>(store), static_cast<CopyMode>(load));
    }
    const auto& [slab_bytes, slabs, slot_bytes] = space;
    const SlotSpace host(slab_bytes, slabs, slot_bytes);
    py::gil_scoped_release released;
    return std::make_unique<GpuCopier>(chosen, base, host, regions, by_group);
}

void require_known(const GpuCopier& copier, std::int64_t handle) {
    if (!copier.known(handle)) throw py::key_error("no copy has the handle " + std::to_string(handle));
}

void require_event(std::uintptr_t event) {
    if (event == 0) throw py::value_error("a device copy needs the event after which it may start, not 0");
}

void bind_copier(py::module_& m) {
    py::class_<GpuCopier> bound(m, "GpuCopier", py::module_local());
    bound.def(py::init(&make_copier), py::arg("base"), py::arg("space"), py::arg("pools"), py::arg("modes"))
        .def("add_pinned", &GpuCopier::add_pinned, py::arg("base"), py::arg("bytes"))
        .def("withdraw_pinned", &GpuCopier::withdraw_pinned, py::call_guard<py::gil_scoped_release>())
        .def("forget_pinned", &GpuCopier::forget_pinned, py::call_guard<py::gil_scoped_release>())
        .def(
            "submit",
            [](GpuCopier& copier, const py::array& copies, bool to_device, std::uintptr_t event,
               std::uintptr_t stream) {
                require_event(event);
                const BlockCopy* records = copy_records(copies);
                const py::ssize_t count = copies.shape(0);
                py::gil_scoped_release released;
                return copier.submit(records, count, to_device, event, stream);
            },
            py::arg("copies"), py::arg("to_device"), py::arg("event"), py::arg("stream"))
        .def(
            "submit_layers",
            [](GpuCopier& copier, const py::array& copies, std::uintptr_t event,
               const std::vector<int>& layers) {
                require_event(event);
                const BlockCopy* records = copy_records(copies);
                const py::ssize_t count = copies.shape(0);
                py::gil_scoped_release released;
                return copier.submit_layers(records, count, event, layers);
            },
            py::arg("copies"), py::arg("event"), py::arg("layers"))
        .def(
            "wait_layer",
            [](GpuCopier& copier, std::int64_t handle, int layer, std::uintptr_t stream) {
                require_known(copier, handle);
                py::gil_scoped_release released;
                require(copier.wait_layer(handle, layer, stream));
            },
            py::arg("handle"), py::arg("layer"), py::arg("stream"))
        .def("close", &GpuCopier::close, py::call_guard<py::gil_scoped_release>())
        .def("counters", &GpuCopier::counters)
        .def("message", &GpuCopier::message);
    bind_handles<GpuCopier>(bound);
}

void bind_runtime(py::module_& m) {
    m.def("device_count", [] {
        std::string reason;
        const int count = gpu::device_count(&reason);
        return py::make_tuple(count, reason);
    });
    m.def("device_info", [](int device) {
        gpu::DeviceInfo info;
        require(gpu::device_info(device, &info));
        return py::make_tuple(info.name, info.pci, info.driver, info.runtime);
    });
    m.def(
        "stream_create",
        [](bool low_priority) {
            return created([=](std::uintptr_t* stream) { return gpu::stream_create(stream, low_priority); });
        },
        py::arg("low_priority") = false);
    m.def(
        "stream_destroy", [](std::uintptr_t stream) { require(gpu::stream_destroy(stream)); },
        py::call_guard<py::gil_scoped_release>());
    m.def("stream_wait",
          [](std::uintptr_t stream, std::uintptr_t event) { require(gpu::stream_wait(stream, event)); });
    m.def(
        "stream_synchronize", [](std::uintptr_t stream) { require(gpu::stream_synchronize(stream)); },
        py::call_guard<py::gil_scoped_release>());
    m.def("event_create", [] { return created(&gpu::event_create); });
    m.def("event_destroy", [](std::uintptr_t event) { require(gpu::event_destroy(event)); });
    m.def("event_record",
          [](std::uintptr_t event, std::uintptr_t stream) { require(gpu::event_record(event, stream)); });
    m.def("memory_allocate", [](std::int64_t bytes) {
        return created([=](std::uintptr_t* address) { return gpu::memory_allocate(address, bytes); });
    });
    m.def("memory_free", [](std::uintptr_t address) { require(gpu::memory_free(address)); });
    m.def("fill", [](std::uintptr_t address, int value, std::int64_t bytes, std::uintptr_t stream) {
        require(gpu::fill(address, value, bytes, stream));
    });
    m.def(
        "copy",
        [](std::uintptr_t to, std::uintptr_t from, std::int64_t bytes, bool to_device,
           std::uintptr_t stream) { require(gpu::copy(to, from, bytes, to_device, stream)); },
        py::call_guard<py::gil_scoped_release>());
    m.def(
        "host_register",
        [](std::uintptr_t base, std::int64_t bytes, int device) {
            const gpu::DeviceScope scope(device);
            const int code = gpu::host_register(base, bytes);
            return code == gpu::kOkay ? std::string() : gpu::error_text(code);
        },
        py::arg("base"), py::arg("nbytes"), py::arg("device"), py::call_guard<py::gil_scoped_release>());
    m.def(
        "host_unregister", [](std::uintptr_t base) { require(gpu::host_unregister(base)); },
        py::call_guard<py::gil_scoped_release>());
}

#if defined(KVOFFLOAD_SIM)

void bind_simulation(py::module_& m) {
    m.def("operations", [] {
        py::list list;
        for (const sim::Operation& o : sim::operations()) {
            list.append(
                py::make_tuple(o.kind, o.stream, o.event, o.bytes, o.count, o.thread, o.blocked, o.strict));
        }
        return list;
    });
    m.def("forget_operations", &sim::forget_operations);
    m.def("plant", &sim::plant, py::arg("name"), py::arg("value"));
    m.def("clear_plants", &sim::clear_plants);
    m.def("number", &sim::number, py::arg("handle"));
}

#endif

}  // namespace
}  // namespace kvoffload

PYBIND11_MODULE(KVOFFLOAD_MODULE, m) {
    m.doc() = "kvoffload's copies between device pages and host slots";
    kvoffload::bind_copier(m);
    kvoffload::bind_runtime(m);
#if defined(KVOFFLOAD_SIM)
    kvoffload::bind_simulation(m);
#endif
}
