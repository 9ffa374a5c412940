// A yardstick for `kvoffload bench index`: the plainest open-addressing map from 16-byte keys to a counter, measured in
// the same run on the same keys. No part of the index.
#pragma once

#include <cstdint>
#include <vector>

namespace kvoffload {

// Nanoseconds per key, one number per repetition.
struct PlainTableTimes {
    std::vector<double> insert;  // into a table that has room for all
    std::vector<double> find;
    std::vector<double> pin;  // find and count up, find and count down
};

// REQUIRES: n distinct keys of 16 bytes.
PlainTableTimes time_plain_table(const std::uint8_t* keys, std::size_t n, int repeats);

}  // namespace kvoffload
