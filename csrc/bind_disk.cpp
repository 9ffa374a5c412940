#include "bind.h"

namespace kvoffload {

void bind_disk(pybind11::module_& m) { (void)m; }

}  // namespace kvoffload
