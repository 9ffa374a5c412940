#include "rri.h"

#include <algorithm>
#include <chrono>
#include <limits>

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
    if (segment >= records_.size()) records_.resize(segment + 1);
    Record r;
    r.order = order;
    r.origin = now;
    r.used = r.open = true;
    records_[segment] = r;
    lru_.on_open(segment, order, now);
}

void RriPolicy::on_touch(std::uint32_t segment, std::uint64_t order, double now, std::uint32_t blocks) {
    seen(now);
    lru_.on_touch(segment, order, now, blocks);
    Record& r = records_[segment];
    if (r.resident) unlink(segment);
    advance(r, now);
    r.order = order;
    restart(r, now);
    if (r.resident) link(segment);
}

void RriPolicy::on_close(std::uint32_t segment, int reason, double now) {
    seen(now);
    Record& r = records_[segment];
    advance(r, now);
    const int before = class_of(r);
    r.finish = static_cast<std::uint8_t>(finish_of(reason));
    r.open = false;
    // What it has lived through counts for the finish that it came to have.
    for (int b = 0; class_of(r) != before && b <= r.bin; ++b) {
        hazards_.add_at_risk(before, b, -weight(r.blocks));
        hazards_.add_at_risk(class_of(r), b, weight(r.blocks));
    }
    settle(segment);
}

void RriPolicy::on_resident(std::uint32_t segment, bool resident) {
    Record& r = records_[segment];
    lru_.on_resident(segment, resident);
    if (!resident) unlink(segment);
    r.resident = resident;
    if (!resident) return;
    advance(r, now_);
    link(segment);
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
    advance(r, now);
    if (kind == Kind::kLeft && r.kind != kind) {
        hazards_.add_censored(class_of(r), r.bin, weight(r.blocks));
        if (r.resident) unlink(segment);
        r.kind = kind;
        r.pace = pace;
        restart(r, now);
        if (r.resident) link(segment);
        return;
    }
    r.kind = kind;
    r.pace = pace;
    settle(segment);
}

void RriPolicy::on_use(std::uint32_t from, std::uint32_t to, std::uint32_t blocks, double now) {
    if (from != kNone) {
        Record& r = records_[from];
        advance(r, now);
        hazards_.add_reused(class_of(r), r.bin, weight(blocks));
        r.blocks -= std::min(blocks, r.blocks);
        settle(from);
    }
    Record& t = records_[to];
    advance(t, now);
    t.blocks += blocks;
    hazards_.add_at_risk(class_of(t), t.bin, weight(blocks));
    settle(to);
}

void RriPolicy::on_forget(std::uint32_t segment, std::uint32_t blocks, double now) {
    Record& r = records_[segment];
    advance(r, now);
    hazards_.add_censored(class_of(r), r.bin, weight(blocks));
    r.blocks -= std::min(blocks, r.blocks);
    settle(segment);
}

double RriPolicy::weight(std::uint32_t blocks) const { return mean_blocks_ > 0 ? blocks / mean_blocks_ : 0; }

// Counts the bins that the segment has entered.
void RriPolicy::advance(Record& r, double now) {
    for (; now - r.origin >= hazards_.next_begins(r.bin); ++r.bin) {
        hazards_.add_at_risk(class_of(r), r.bin + 1, weight(r.blocks));
    }
}

void RriPolicy::restart(Record& r, double now) {
    r.origin = now;
    r.bin = 0;
    hazards_.add_at_risk(class_of(r), 0, weight(r.blocks));
}

void RriPolicy::rebuild(double now) {
    const auto begin = std::chrono::steady_clock::now();
    for (std::uint32_t s = 0; s < records_.size(); ++s) {
        Record& r = records_[s];
        if (!r.used || r.blocks == 0) continue;
        advance(r, now);
        settle(s);
        hazards_.add_passing(class_of(r), r.bin, weight(r.blocks));
    }
    hazards_.rebuild();
    rebuilt_ = requests_;
    ++rebuilds_;
    rebuild_seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// ---- the resident ones by value

std::uint16_t RriPolicy::bucket_of(const Record& r) const {
    if (keeps_ && r.open) return kOpen;
    return static_cast<std::uint16_t>((Hazards::kBins - 1 - r.bin) * Hazards::kClasses + class_of(r));
}

double RriPolicy::value(std::uint16_t bucket) const {
    if (bucket == kOpen) return std::numeric_limits<double>::infinity();
    return hazards_.value(bucket % Hazards::kClasses, Hazards::kBins - 1 - bucket / Hazards::kClasses);
}

// Into the list of its bucket; nearly always at the end.
void RriPolicy::link(std::uint32_t segment) {
    Record& r = records_[segment];
    r.bucket = bucket_of(r);
    Bucket& b = buckets_[r.bucket];
    if (b.tail == kNone) {
        b.place = static_cast<std::uint32_t>(filled_.size());
        filled_.push_back(r.bucket);
    }
    r.prev = b.tail;
    while (r.prev != kNone && older(r, records_[r.prev])) r.prev = records_[r.prev].prev;
    r.next = r.prev == kNone ? b.head : records_[r.prev].next;
    (r.prev == kNone ? b.head : records_[r.prev].next) = segment;
    (r.next == kNone ? b.tail : records_[r.next].prev) = segment;
    if (r.prev == kNone) due_ = std::min(due_, r.origin + hazards_.next_begins(r.bin));
}

void RriPolicy::unlink(std::uint32_t segment) {
    const Record& r = records_[segment];
    Bucket& b = buckets_[r.bucket];
    (r.prev == kNone ? b.head : records_[r.prev].next) = r.next;
    (r.next == kNone ? b.tail : records_[r.next].prev) = r.prev;
    if (b.head != kNone) return;
    filled_[b.place] = filled_.back();
    buckets_[filled_.back()].place = b.place;
    filled_.pop_back();
}

// Its class or bin may have changed, its origin has not.
void RriPolicy::settle(std::uint32_t segment) {
    const Record& r = records_[segment];
    if (!r.resident || r.bucket == bucket_of(r)) return;
    unlink(segment);
    link(segment);
}

void RriPolicy::seen(double now) {
    if (now <= now_) return;
    now_ = now;
    if (now >= due_) age();
}

// Those that have entered another bin change lists, the oldest first, so that each joins its list at the end.
void RriPolicy::age() {
    std::vector<std::uint16_t> buckets = filled_;
    std::sort(buckets.begin(), buckets.end());
    due_ = std::numeric_limits<double>::infinity();
    for (const std::uint16_t b : buckets) {
        while (buckets_[b].head != kNone) {
            const std::uint32_t first = buckets_[b].head;
            Record& r = records_[first];
            advance(r, now_);
            settle(first);
            due_ = std::min(due_, r.origin + hazards_.next_begins(r.bin));
            if (buckets_[b].head == first) break;
        }
    }
}

// The first segment of the bucket that follows; buckets of one value in their order.
std::uint32_t RriPolicy::best_after(double least, int bucket) const {
    double best = 0;
    int found = -1;
    for (const std::uint16_t b : filled_) {
        const double v = value(b);
        if (v < least || (v == least && b <= bucket)) continue;
        if (found >= 0 && (v > best || (v == best && b > found))) continue;
        best = v;
        found = b;
    }
    return found < 0 ? kNone : buckets_[static_cast<std::size_t>(found)].head;
}

std::uint32_t RriPolicy::next_victim(std::uint32_t after) const {
    if (regret_.lost()) return lru_.next_victim(after);
    if (after == kNone) return best_after(0, -1);
    const Record& r = records_[after];
    return r.next != kNone ? r.next : best_after(value(r.bucket), r.bucket);
}

bool RriPolicy::displaces(std::uint32_t newcomer, std::uint32_t victim) const {
    if (keeps_) return true;
    const Record &n = records_[newcomer], &v = records_[victim];
    if (regret_.lost()) return n.order > v.order;
    const double mine = value(bucket_of(n)), its = value(v.bucket);
    return mine != its ? mine > its : n.order > v.order;
}

std::size_t RriPolicy::memory_bytes() const {
    return sizeof(*this) + records_.capacity() * sizeof(Record) + buckets_.capacity() * sizeof(Bucket) +
           filled_.capacity() * sizeof(std::uint16_t) + lru_.memory_bytes();
}

PolicyTable RriPolicy::table() const {
    PolicyTable out;
    std::uint32_t resident[Hazards::kClasses] = {};
    for (const Record& r : records_) resident[class_of(r)] += r.used && r.resident ? 1 : 0;
    for (int k = 0; k < 3; ++k) {
        for (int p = 0; p < Hazards::kPaces; ++p) {
            for (int f = 0; f < Hazards::kFinishes; ++f) {
                const Kind kind = static_cast<Kind>(k);
                const Pace pace = static_cast<Pace>(p);
                const int c = Hazards::class_of(kind, pace, f);
                out.rows.push_back(PolicyRow{kind,
                                             pace,
                                             f,
                                             hazards_.at_risk(c),
                                             hazards_.reused(c),
                                             hazards_.censored(c),
                                             hazards_.value(c, 0),
                                             resident[c],
                                             {}});
                for (int b = 0; b < Hazards::kBins; ++b)
                    out.rows.back().by_age.push_back(hazards_.value(c, b));
            }
        }
    }
    out.requests = requests_;
    out.rebuilds = rebuilds_;
    out.held = regret_.own();
    out.lru = regret_.lru();
    out.fallbacks = regret_.times();
    out.lru_requests = regret_.waited();
    out.rebuild_seconds = rebuild_seconds_;
    return out;
}

}  // namespace kvoffload
