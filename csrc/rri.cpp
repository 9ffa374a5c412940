#include "rri.h"

#include <algorithm>
#include <chrono>
#include <functional>

#include "entry_pool.h"

namespace kvoffload {

namespace {

constexpr double kDecay = 0.98;
constexpr std::uint64_t kDecayPeriod = 128;  // requests
constexpr std::uint64_t kSteps = 64;         // rebuilt when a 64th more is known,
constexpr std::uint64_t kLongest = 32;       // or after so many requests
constexpr std::uint64_t kMeanOver = 1000;    // requests

// Finish reasons of the planner that say something: 1 tool call, 2 end of turn.
int finish_of(int reason) { return reason == 1 || reason == 2 ? reason : 0; }

}  // namespace

void RriPolicy::on_open(std::uint32_t segment, std::uint64_t order, double now) {
    seen(now);
    if (segment >= records_.size()) {
        records_.resize(segment + 1);
        ranks_.resize(segment + 1, 0);
    }
    Record r;
    r.order = order;
    r.origin = now;
    r.used = r.open = true;
    records_[segment] = r;
}

void RriPolicy::on_touch(std::uint32_t segment, std::uint64_t order, double now, std::uint32_t) {
    seen(now);
    Record& r = records_[segment];
    advance(r, now);
    r.order = order;
    restart(r, now);
}

void RriPolicy::on_close(std::uint32_t segment, int reason, double now) {
    seen(now);
    Record& r = records_[segment];
    advance(r, now);
    const int before = class_of(r);
    r.finish = static_cast<std::uint8_t>(finish_of(reason));
    r.open = false;
    if (class_of(r) == before) return;
    for (int b = 0; b <= r.bin;
         ++b) {  // what it has lived through counts for the finish that it came to have
        hazards_.add_at_risk(before, b, -weight(r.blocks));
        hazards_.add_at_risk(class_of(r), b, weight(r.blocks));
    }
}

void RriPolicy::on_resident(std::uint32_t segment, bool resident) {
    Record& r = records_[segment];
    r.resident = resident;
    if (resident) {
        r.place = static_cast<std::uint32_t>(residents_.size());
        residents_.push_back(segment);
        return;
    }
    residents_[r.place] = residents_.back();
    records_[residents_.back()].place = r.place;
    residents_.pop_back();
}

void RriPolicy::on_erase(std::uint32_t segment) { records_[segment].used = false; }

void RriPolicy::on_request(std::uint64_t blocks, double now) {
    seen(now);
    if (requests_ - rebuilt_ >= std::clamp(requests_ / kSteps, std::uint64_t{1}, kLongest)) rebuild(now);
    if (++requests_ % kDecayPeriod == 0) hazards_.decay(kDecay);
    const double n = static_cast<double>(std::min(requests_, kMeanOver));
    mean_blocks_ += (static_cast<double>(blocks) - mean_blocks_) / n;
}

void RriPolicy::on_class(std::uint32_t segment, Kind kind, Pace pace, double now) {
    Record& r = records_[segment];
    if (kind == Kind::kLeft && r.kind != kind) {
        advance(r, now);
        hazards_.add_censored(class_of(r), r.bin, weight(r.blocks));
        r.kind = kind;
        restart(r, now);
    }
    r.kind = kind;
    r.pace = pace;
}

void RriPolicy::on_use(std::uint32_t from, std::uint32_t to, std::uint32_t blocks, double now) {
    if (from != kNone) {
        Record& r = records_[from];
        advance(r, now);
        hazards_.add_reused(class_of(r), r.bin, weight(blocks));
        r.blocks -= std::min(blocks, r.blocks);
    }
    Record& t = records_[to];
    advance(t, now);
    t.blocks += blocks;
    hazards_.add_at_risk(class_of(t), t.bin, weight(blocks));
}

void RriPolicy::on_forget(std::uint32_t segment, std::uint32_t blocks, double now) {
    Record& r = records_[segment];
    advance(r, now);
    hazards_.add_censored(class_of(r), r.bin, weight(blocks));
    r.blocks -= std::min(blocks, r.blocks);
}

double RriPolicy::weight(std::uint32_t blocks) const { return mean_blocks_ > 0 ? blocks / mean_blocks_ : 0; }

// Counts the bins that the segment has entered.
void RriPolicy::advance(Record& r, double now) {
    const int bin = Hazards::bin_of(now - r.origin);
    for (; r.bin < bin; ++r.bin) hazards_.add_at_risk(class_of(r), r.bin + 1, weight(r.blocks));
}

void RriPolicy::restart(Record& r, double now) {
    r.origin = now;
    r.bin = 0;
    hazards_.add_at_risk(class_of(r), 0, weight(r.blocks));
}

void RriPolicy::rebuild(double now) {
    const auto begin = std::chrono::steady_clock::now();
    for (Record& r : records_) {
        if (!r.used || r.blocks == 0) continue;
        advance(r, now);
        hazards_.add_passing(class_of(r), r.bin, weight(r.blocks));
    }
    hazards_.rebuild();
    rebuilt_ = requests_;
    ++rebuilds_;
    rebuild_seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

double RriPolicy::value(const Record& r) const {
    return hazards_.value(class_of(r), Hazards::bin_of(now_ - r.origin));
}

RriPolicy::Rank RriPolicy::rank_of(std::uint32_t segment) const {
    const Record& r = records_[segment];
    return Rank{keeps_ && r.open, value(r), r.order, segment};
}

bool RriPolicy::displaces(std::uint32_t newcomer, std::uint32_t victim) const {
    return keeps_ || rank_of(newcomer) > rank_of(victim);
}

// Ranks no more than is asked for: most batches need few victims.
std::uint32_t RriPolicy::next_victim(std::uint32_t after) const {
    std::uint32_t next = 0;
    const auto rank_one = [&] {
        std::pop_heap(heap_.begin(), heap_.end(), std::greater<>());
        ranked_.push_back(heap_.back().segment);
        heap_.pop_back();
        ranks_[ranked_.back()] = static_cast<std::uint32_t>(ranked_.size() - 1);
    };
    if (after == kNone) {
        ranked_.clear();
        heap_.clear();
        for (const std::uint32_t s : residents_) heap_.push_back(rank_of(s));
        std::make_heap(heap_.begin(), heap_.end(), std::greater<>());
    } else {
        // Another group's scan may have ranked anew since `after` was named: find its place in this ranking.
        while (ranks_[after] >= ranked_.size() || ranked_[ranks_[after]] != after) {
            if (heap_.empty()) return kNone;
            rank_one();
        }
        next = ranks_[after] + 1;
    }
    for (;; ++next) {
        if (next == ranked_.size()) {
            if (heap_.empty()) return kNone;
            rank_one();
        }
        if (records_[ranked_[next]].resident) return ranked_[next];
    }
}

std::size_t RriPolicy::memory_bytes() const {
    return sizeof(*this) + records_.capacity() * sizeof(Record) + heap_.capacity() * sizeof(Rank) +
           (residents_.capacity() + ranked_.capacity() + ranks_.capacity()) * sizeof(std::uint32_t);
}

PolicyTable RriPolicy::table() const {
    PolicyTable out;
    std::uint32_t resident[Hazards::kClasses] = {};
    for (const std::uint32_t s : residents_) ++resident[class_of(records_[s])];
    for (int k = 0; k < 3; ++k) {
        for (int p = 0; p < Hazards::kPaces; ++p) {
            for (int f = 0; f < Hazards::kFinishes; ++f) {
                const Kind kind = static_cast<Kind>(k);
                const Pace pace = static_cast<Pace>(p);
                const int c = Hazards::class_of(kind, pace, f);
                out.rows.push_back(PolicyRow{kind, pace, f, hazards_.at_risk(c), hazards_.reused(c),
                                             hazards_.censored(c), hazards_.value(c, 0), resident[c]});
            }
        }
    }
    out.requests = requests_;
    out.rebuilds = rebuilds_;
    out.rebuild_seconds = rebuild_seconds_;
    return out;
}

}  // namespace kvoffload
