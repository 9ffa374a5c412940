#include "file_io.h"

#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

namespace kvoffload {

int transfer(Way way, int file, void* data, std::int64_t bytes, std::int64_t offset) {
    auto* p = static_cast<std::uint8_t*>(data);
    while (bytes > 0) {
        const ssize_t moved =
            way == Way::kWrite ? ::pwrite(file, p, bytes, offset) : ::pread(file, p, bytes, offset);
        if (moved < 0 && errno == EINTR) continue;
        if (moved <= 0) return moved < 0 ? errno : kShort;
        p += moved;
        bytes -= moved;
        offset += moved;
    }
    return kWhole;
}

void transfer_parts(Way way, int file, const std::vector<Part>& parts, std::int64_t offset, int* errors) {
    if (parts.size() > 1) {
        std::vector<iovec> vectors;
        vectors.reserve(parts.size());
        std::int64_t bytes = 0;
        for (const Part& part : parts) {
            vectors.push_back({part.data, static_cast<std::size_t>(part.bytes)});
            bytes += part.bytes;
        }
        const int count = static_cast<int>(vectors.size());
        const ssize_t moved = way == Way::kWrite ? ::pwritev(file, vectors.data(), count, offset)
                                                 : ::preadv(file, vectors.data(), count, offset);
        if (moved == bytes) {
            std::fill_n(errors, count, kWhole);
            return;
        }
    }
    for (const Part& part : parts) {
        *errors++ = transfer(way, file, part.data, part.bytes, offset);
        offset += part.bytes;
    }
}

}  // namespace kvoffload
