// Checked views of record arrays for the copy and disk bindings.
#pragma once

#include <pybind11/numpy.h>

#include <string>

#include "block_copy.h"

namespace kvoffload {

// The records of a COPY_DTYPE array. Raises ValueError for any other dtype, shape or layout. The pointer is
// valid as long as the array.
inline const BlockCopy* copy_records(const pybind11::array& copies) {
    const auto expected = pybind11::module_::import("kvoffload.messages").attr("COPY_DTYPE");
    if (copies.ndim() != 1 || !(copies.flags() & pybind11::array::c_style) ||
        !copies.dtype().equal(expected)) {
        throw pybind11::value_error("copies must be a contiguous one-dimensional array of COPY_DTYPE, not " +
                                    pybind11::repr(copies.dtype()).cast<std::string>());
    }
    return static_cast<const BlockCopy*>(copies.data());
}

inline pybind11::array_t<std::uint8_t> status_array(const std::vector<std::uint8_t>& status) {
    return pybind11::array_t<std::uint8_t>(static_cast<pybind11::ssize_t>(status.size()), status.data());
}

}  // namespace kvoffload
