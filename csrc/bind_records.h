// Checked views of record arrays for the copy and disk bindings.
#pragma once

#include <pybind11/gil_safe_call_once.h>
#include <pybind11/numpy.h>

#include <string>
#include <vector>

#include "block_copy.h"

namespace kvoffload {

// The records of a COPY_DTYPE array. Raises ValueError for any other dtype, shape or layout. The pointer is
// valid as long as the array.
inline const BlockCopy* copy_records(const pybind11::array& copies) {
    PYBIND11_CONSTINIT static pybind11::gil_safe_call_once_and_store<pybind11::object> storage;
    const pybind11::object& expected = storage
                                           .call_once_and_store_result([] {
                                               return pybind11::module_::import("kvoffload.messages")
                                                   .attr("COPY_DTYPE")
                                                   .cast<pybind11::object>();
                                           })
                                           .get_stored();
    if (copies.ndim() != 1 || !(copies.flags() & pybind11::array::c_style) ||
        (!copies.dtype().is(expected) && !copies.dtype().equal(expected))) {
        throw pybind11::value_error("copies must be a contiguous one-dimensional array of COPY_DTYPE, not " +
                                    pybind11::repr(copies.dtype()).cast<std::string>());
    }
    return static_cast<const BlockCopy*>(copies.data());
}

inline pybind11::array_t<std::uint8_t> status_array(const std::vector<std::uint8_t>& status) {
    return pybind11::array_t<std::uint8_t>(static_cast<pybind11::ssize_t>(status.size()), status.data());
}

// `query` and `wait` of a copier's handles, the same for every copier.
template <class Copier, class Class>
void bind_handles(Class& bound) {
    const auto require_known = [](const Copier& copier, std::int64_t handle) {
        if (!copier.known(handle))
            throw pybind11::key_error("no copy has the handle " + std::to_string(handle));
    };
    bound.def(
        "query",
        [require_known](Copier& copier, std::int64_t handle) -> pybind11::object {
            require_known(copier, handle);
            std::vector<std::uint8_t> status;
            if (!copier.query(handle, &status)) return pybind11::none();
            return status_array(status);
        },
        pybind11::arg("handle"));
    bound.def(
        "wait",
        [require_known](Copier& copier, std::int64_t handle, double timeout) {
            require_known(copier, handle);
            pybind11::gil_scoped_release released;
            return copier.wait(handle, timeout);
        },
        pybind11::arg("handle"), pybind11::arg("timeout"));
}

}  // namespace kvoffload
