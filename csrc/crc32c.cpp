#include "crc32c.h"

#include <array>
#include <cstring>

namespace kvoffload {
namespace {

constexpr std::size_t kStripe = 32;  // bytes: one word of each lane

using Tables = std::array<std::array<std::uint32_t, 256>, 8>;

// tables[k][b]: the CRC of byte b followed by k zero bytes.
constexpr Tables make_tables() {
    Tables t{};
    for (std::uint32_t b = 0; b < 256; ++b) {
        std::uint32_t crc = b;
        for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) ? 0x82F63B78u : 0u);
        t[0][b] = crc;
    }
    for (std::uint32_t b = 0; b < 256; ++b) {
        for (std::size_t k = 1; k < 8; ++k) t[k][b] = (t[k - 1][b] >> 8) ^ t[0][t[k - 1][b] & 0xFF];
    }
    return t;
}

constexpr Tables kTables = make_tables();

std::uint32_t step_portable(std::uint32_t crc, std::uint64_t word) {
    word ^= crc;
    std::uint32_t out = 0;
    for (int k = 0; k < 8; ++k) out ^= kTables[7 - k][(word >> (8 * k)) & 0xFF];
    return out;
}

// Feeds `stripes` whole stripes into the lanes.
void run_portable(Checksum& sum, const unsigned char* p, std::size_t stripes) {
    for (; stripes > 0; --stripes, p += kStripe) {
        std::uint64_t words[4];
        std::memcpy(words, p, kStripe);
        for (int i = 0; i < 4; ++i) sum.lane[i] = step_portable(sum.lane[i], words[i]);
    }
}

#if defined(__x86_64__)
__attribute__((target("sse4.2"))) void run_instruction(Checksum& sum, const unsigned char* p,
                                                       std::size_t stripes) {
    std::uint64_t a = sum.lane[0], b = sum.lane[1], c = sum.lane[2], d = sum.lane[3];
    for (; stripes > 0; --stripes, p += kStripe) {
        std::uint64_t words[4];
        std::memcpy(words, p, kStripe);
        a = __builtin_ia32_crc32di(a, words[0]);
        b = __builtin_ia32_crc32di(b, words[1]);
        c = __builtin_ia32_crc32di(c, words[2]);
        d = __builtin_ia32_crc32di(d, words[3]);
    }
    sum = {{static_cast<std::uint32_t>(a), static_cast<std::uint32_t>(b), static_cast<std::uint32_t>(c),
            static_cast<std::uint32_t>(d)}};
}

bool has_instruction() { return __builtin_cpu_supports("sse4.2") != 0; }
#else
void run_instruction(Checksum& sum, const unsigned char* p, std::size_t stripes) {
    run_portable(sum, p, stripes);
}

bool has_instruction() { return false; }
#endif

using Run = void (*)(Checksum&, const unsigned char*, std::size_t);

Checksum compute(Run run, const void* data, std::size_t bytes) {
    Checksum sum{{~0u, ~0u, ~0u, ~0u}};
    const auto* p = static_cast<const unsigned char*>(data);
    run(sum, p, bytes / kStripe);
    if (const std::size_t rest = bytes % kStripe) {
        unsigned char last[kStripe] = {};
        std::memcpy(last, p + (bytes - rest), rest);
        run(sum, last, 1);
    }
    for (std::uint32_t& lane : sum.lane) lane = ~lane;
    return sum;
}

}  // namespace

bool checksum_has_instruction() {
    static const bool has = has_instruction();
    return has;
}

Checksum checksum(const void* data, std::size_t bytes) {
    return compute(checksum_has_instruction() ? run_instruction : run_portable, data, bytes);
}

Checksum checksum_portable(const void* data, std::size_t bytes) { return compute(run_portable, data, bytes); }

}  // namespace kvoffload
