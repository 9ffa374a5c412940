#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <string>
#include <vector>

#include "bench_io.h"
#include "bind.h"
#include "bind_records.h"
#include "disk_io.h"

namespace kvoffload {
namespace py = pybind11;
namespace {

using Move = void (DiskIO::*)(const BlockCopy*, std::int64_t, std::uintptr_t, const SlotSpace&,
                              std::uint8_t*);

py::array_t<std::uint8_t> move(DiskIO& disk, Move method, const py::array& copies, std::uintptr_t base,
                               const SlotSpace& host) {
    if (base % kSlotAlign != 0) throw py::value_error("base must be a multiple of 4096");
    const BlockCopy* records = copy_records(copies);
    std::vector<std::uint8_t> status(copies.shape(0));
    {
        py::gil_scoped_release released;
        (disk.*method)(records, copies.shape(0), base, host, status.data());
    }
    return status_array(status);
}

py::array scan(DiskIO& disk, std::int64_t slot_file_bytes) {
    std::vector<FoundBlock> found;
    {
        py::gil_scoped_release released;
        found = disk.scan(slot_file_bytes);
    }
    const auto dtype = py::dtype::from_args(py::module_::import("kvoffload.messages").attr("RECORD_DTYPE"));
    return py::array(dtype, {static_cast<py::ssize_t>(found.size())}, {}, found.data());
}

py::dict counters(const DiskIO& disk) {
    const DiskCounters& c = disk.counters();
    py::dict out;
    out["blocks_read"] = c.blocks_read.load();
    out["blocks_written"] = c.blocks_written.load();
    out["bytes_read"] = c.bytes_read.load();
    out["bytes_written"] = c.bytes_written.load();
    out["mismatches"] = c.mismatches.load();
    out["io_errors"] = c.io_errors.load();
    out["last_errno"] = c.last_errno.load();
    return out;
}

py::bytes checksum_bytes(const py::buffer& data, bool portable) {
    const py::buffer_info info = data.request();
    const auto bytes = static_cast<std::size_t>(info.size * info.itemsize);
    const Checksum sum = portable ? checksum_portable(info.ptr, bytes) : checksum(info.ptr, bytes);
    return py::bytes(reinterpret_cast<const char*>(&sum), sizeof sum);
}

}  // namespace

void bind_disk(py::module_& m) {
    py::class_<DiskIO>(m, "DiskIO")
        .def(py::init([](int slots, int table, const SlotSpace& space, std::vector<std::int64_t> block_bytes,
                         std::uint64_t epoch, bool checksum, int threads, int error_limit) {
                 if (static_cast<std::int64_t>(block_bytes.size()) != space.groups()) {
                     throw py::value_error("block_bytes must have one entry per group");
                 }
                 return std::make_unique<DiskIO>(DiskIO::Files{slots, table}, space, std::move(block_bytes),
                                                 DiskIO::Options{epoch, checksum, threads, error_limit});
             }),
             py::arg("slots"), py::arg("table"), py::arg("space"), py::arg("block_bytes"), py::arg("epoch"),
             py::arg("checksum"), py::arg("threads"), py::arg("error_limit"))
        .def(
            "read",
            [](DiskIO& disk, const py::array& copies, std::uintptr_t base, const SlotSpace& host) {
                return move(disk, &DiskIO::read, copies, base, host);
            },
            py::arg("copies"), py::arg("base"), py::arg("host"))
        .def(
            "write",
            [](DiskIO& disk, const py::array& copies, std::uintptr_t base, const SlotSpace& host) {
                return move(disk, &DiskIO::write, copies, base, host);
            },
            py::arg("copies"), py::arg("base"), py::arg("host"))
        .def("scan", &scan, py::arg("slot_file_bytes"))
        .def("reset", &DiskIO::reset, py::arg("epoch"))
        .def("probe", &DiskIO::probe, py::call_guard<py::gil_scoped_release>())
        .def("counters", &counters)
        .def("close", &DiskIO::close, py::call_guard<py::gil_scoped_release>())
        .def_property_readonly("healthy", &DiskIO::healthy)
        .def_property_readonly("slots_bytes", &DiskIO::slots_bytes)
        .def_property_readonly("table_bytes", &DiskIO::table_bytes);

    m.def("raw_file_loop", &raw_file_loop, py::arg("file"), py::arg("write"), py::arg("base"),
          py::arg("bytes"), py::arg("offsets"), py::arg("threads"), py::call_guard<py::gil_scoped_release>());
    m.def("checksum", &checksum_bytes, py::arg("data"), py::arg("portable") = false);
    m.def("checksum_has_instruction", &checksum_has_instruction);
}

}  // namespace kvoffload
