#include "streams.h"

#include <algorithm>
#include <cmath>

namespace kvoffload {

namespace {

constexpr double kShortestGap = 0.25;  // seconds
constexpr double kNewGap = 0.25;       // weight of a gap, once there are 1 / kNewGap
constexpr double kPopulation = 8192;   // gaps after which older ones count half

// log2 with straight lines between powers of two: IEEE arithmetic only, the same everywhere.
double log2_linear(double x) {
    int e = 0;
    const double m = std::frexp(x, &e);
    return e + 2 * m - 2;
}

}  // namespace

std::uint32_t Streams::get(std::uint64_t name) {
    if (name != 0) {
        const auto found = names_.find(name);
        if (found != names_.end()) return found->second;
    }
    if (free_.empty() && streams_.size() >= kMost) forget_oldest();
    std::uint32_t id = static_cast<std::uint32_t>(streams_.size());
    if (free_.empty()) {
        streams_.emplace_back();
    } else {
        id = free_.back();
        free_.pop_back();
        streams_[id] = Stream{};
    }
    streams_[id].name = name;
    if (name != 0) names_.emplace(name, id);
    return id;
}

void Streams::forget_oldest() {
    std::vector<std::uint32_t> ids(streams_.size());
    for (std::uint32_t i = 0; i < ids.size(); ++i) ids[i] = i;
    std::sort(ids.begin(), ids.end(), [&](std::uint32_t a, std::uint32_t b) {
        return streams_[a].last != streams_[b].last ? streams_[a].last < streams_[b].last : a < b;
    });
    ids.resize(ids.size() / 8);
    for (const std::uint32_t id : ids) {
        if (streams_[id].name != 0) names_.erase(streams_[id].name);
        free_.push_back(id);
    }
}

void Streams::begin(std::uint32_t stream, std::uint64_t blocks, double now) {
    Stream& s = streams_[stream];
    if (s.begun) {
        const double gap = log2_linear(std::max(now - s.last, kShortestGap));
        ++s.gaps;
        s.mean += (gap - s.mean) * std::max(1.0 / s.gaps, kNewGap);
        count_ += 1;
        sum_ += gap;
        squares_ += gap * gap;
        if (count_ >= kPopulation) {
            count_ /= 2;
            sum_ /= 2;
            squares_ /= 2;
        }
    }
    s.begun = true;
    s.last = now;
    s.blocks = blocks;
}

Pace Streams::pace(std::uint32_t stream) const {
    const Stream& s = streams_[stream];
    if (s.gaps == 0 || count_ < 2) return Pace::kUnknown;
    const double mean = sum_ / count_;
    const double half = 0.5 * std::sqrt(std::max(squares_ / count_ - mean * mean, 0.0));
    if (s.mean < mean - half) return Pace::kQuick;
    return s.mean > mean + half ? Pace::kSlow : Pace::kMiddle;
}

std::size_t Streams::memory_bytes() const {
    return streams_.capacity() * sizeof(Stream) + free_.capacity() * sizeof(std::uint32_t) +
           names_.size() * 40 + names_.bucket_count() * sizeof(void*);
}

}  // namespace kvoffload
