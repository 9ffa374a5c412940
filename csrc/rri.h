// The reuse-rate index: keep what is likely to be used again soon, per block and second held.
//
// Every segment, also one of which nothing is resident any more, belongs to a class (hazard.h) and has an
// age, from its last touch or from the moment its stream left it. Its value is that of class and age; the
// least goes first, ties from the greater age. A newcomer displaces only segments of less value (rri-keep:
// all). Where it has lost against an LRU of the same size, LRU decides for a while (regret.h). While a
// request runs its finish is unknown: the mixture over finishes counts. Learning: on_use says what was reused
// at which age, on_forget and on_class what was seen no further.
#pragma once

#include <cstdint>
#include <vector>

#include "entry_pool.h"
#include "hazard.h"
#include "policy.h"
#include "regret.h"

namespace kvoffload {

class RriPolicy final : public Policy {
  public:
    explicit RriPolicy(bool keeps) : keeps_(keeps) {}

    void on_open(std::uint32_t segment, std::uint64_t order, double now) override;
    void on_touch(std::uint32_t segment, std::uint64_t order, double now, std::uint32_t blocks) override;
    void on_close(std::uint32_t segment, int reason, double now) override;
    void on_resident(std::uint32_t segment, bool resident) override;
    void on_erase(std::uint32_t segment) override;
    std::uint32_t next_victim(std::uint32_t after) const override;
    std::size_t memory_bytes() const override;

    bool learns() const override { return true; }
    void on_request(std::uint64_t blocks, double now) override;
    void on_compared(std::uint64_t own, std::uint64_t lru, std::uint64_t blocks) override {
        regret_.count(own, lru, blocks);
    }
    void on_class(std::uint32_t segment, Kind kind, Pace pace, double now) override;
    void on_use(std::uint32_t from, std::uint32_t to, std::uint32_t blocks, double now) override;
    void on_forget(std::uint32_t segment, std::uint32_t blocks, double now) override;
    bool displaces(std::uint32_t newcomer, std::uint32_t victim) const override;
    PolicyTable table() const override;

  private:
    // Resident segments of one class and bin are of one value; they form a list in order of their origin,
    // then of their last touch. Buckets count from the oldest bin; behind them lie the open ones of rri-keep.
    static constexpr std::uint16_t kOpen = Hazards::kBins * Hazards::kClasses, kBuckets = kOpen + 1;

    struct Record {
        std::uint64_t order = 0;
        double origin = 0;         // the age counts from here
        std::uint32_t blocks = 0;  // resident or not
        std::uint32_t prev = kNone, next = kNone;
        std::uint16_t bucket = 0;          // while resident
        std::uint8_t finish = 0, bin = 0;  // bins up to `bin` are counted as at risk
        Kind kind = Kind::kOwn;
        Pace pace = Pace::kUnknown;
        bool used = false, open = false, resident = false;
    };
    struct Bucket {
        std::uint32_t head = kNone, tail = kNone;
        std::uint32_t place = 0;  // in filled_
    };

    int class_of(const Record& r) const { return Hazards::class_of(r.kind, r.pace, r.finish); }
    std::uint16_t bucket_of(const Record& r) const;
    double value(std::uint16_t bucket) const;
    bool older(const Record& a, const Record& b) const {
        return a.origin != b.origin ? a.origin < b.origin : a.order < b.order;
    }
    std::uint32_t best_after(double value, int bucket) const;
    void link(std::uint32_t segment);
    void unlink(std::uint32_t segment);
    void settle(std::uint32_t segment);
    void advance(Record& r, double now);
    void restart(Record& r, double now);
    void seen(double now);
    void age();
    double weight(std::uint32_t blocks) const;
    void rebuild(double now);

    const bool keeps_;
    Hazards hazards_;
    Regret regret_;
    LruPolicy lru_;
    std::vector<Record> records_;  // by segment
    std::vector<Bucket> buckets_ = std::vector<Bucket>(kBuckets);
    std::vector<std::uint16_t> filled_;  // buckets that have segments
    double due_ = 0;                     // no resident segment enters its next bin before
    double now_ = 0;
    double mean_blocks_ = 0;  // of a prompt
    std::uint64_t requests_ = 0, rebuilds_ = 0, rebuilt_ = 0;
    double rebuild_seconds_ = 0;
};

}  // namespace kvoffload
