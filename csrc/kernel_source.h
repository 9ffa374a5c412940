// The text of the copy kernel, as libraries that compile at run time take it.
#pragma once

namespace kvoffload {

const char* kernels_text();  // kernels.h
const char* compat_text();   // compat.h

}  // namespace kvoffload
