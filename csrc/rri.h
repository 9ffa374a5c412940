// The reuse-rate index: keep what is likely to be used again soon, per block and second held.
//
// Every segment, also one of which nothing is resident any more, belongs to a class (hazard.h) and has an
// age, from its last touch or from the moment its stream left it. Its value is that of class and age; the
// least goes first, ties from the older request. A newcomer displaces only segments of less value (rri-keep:
// all). While a request runs its finish is unknown: the mixture over finishes counts. Learning: on_use says
// what was reused at which age, on_forget and on_class what was seen no further.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "hazard.h"
#include "policy.h"

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
    void on_class(std::uint32_t segment, Kind kind, Pace pace, double now) override;
    void on_use(std::uint32_t from, std::uint32_t to, std::uint32_t blocks, double now) override;
    void on_forget(std::uint32_t segment, std::uint32_t blocks, double now) override;
    bool displaces(std::uint32_t newcomer, std::uint32_t victim) const override;
    PolicyTable table() const override;

  private:
    struct Record {
        std::uint64_t order = 0;
        double origin = 0;                 // the age counts from here
        std::uint32_t blocks = 0;          // resident or not
        std::uint32_t place = 0;           // in residents_
        std::uint8_t finish = 0, bin = 0;  // bins up to `bin` are counted as at risk
        Kind kind = Kind::kOwn;
        Pace pace = Pace::kUnknown;
        bool used = false, open = false, resident = false;
    };
    // The worst first: newcomers that must not be refused come last.
    struct Rank {
        bool kept;
        double value;
        std::uint64_t order;
        std::uint32_t segment;

        bool operator>(const Rank& o) const {
            if (kept != o.kept) return kept;
            return value != o.value ? value > o.value : order > o.order;
        }
    };

    int class_of(const Record& r) const { return Hazards::class_of(r.kind, r.pace, r.finish); }
    double value(const Record& r) const;
    Rank rank_of(std::uint32_t segment) const;
    void advance(Record& r, double now);
    void restart(Record& r, double now);
    double weight(std::uint32_t blocks) const;
    void rebuild(double now);
    void seen(double now) { now_ = now > now_ ? now : now_; }

    const bool keeps_;
    Hazards hazards_;
    std::vector<Record> records_;  // by segment
    std::vector<std::uint32_t> residents_;
    double now_ = 0;
    double mean_blocks_ = 0;  // of a prompt
    std::uint64_t requests_ = 0, rebuilds_ = 0, rebuilt_ = 0;
    double rebuild_seconds_ = 0;

    // The ranking of the running batch: `ranked_` in order, then a heap of the rest.
    mutable std::vector<std::uint32_t> ranked_;
    mutable std::vector<Rank> heap_;
    mutable std::vector<std::uint32_t> ranks_;  // by segment: place in ranked_ of the last ranking
};

}  // namespace kvoffload
