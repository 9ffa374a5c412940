// How soon blocks of a class are used again, learned from what happened, and what they are worth by age.
//
// Classes: kind x pace x finish. Ages are wall clock, in bins of half an octave from 0.5 s. Per class and bin
// the weights (blocks over the mean blocks of a prompt) at risk, reused and censored; finish "unknown" learns
// from all finishes. Hazard of a bin = (reused + 20 parent) / (at risk - censored / 2 + 20); parent = (kind,
// finish) over all paces, with the prior min(0.5, 0.5 w / (age + w + 5 s)), w = width of the bin, of
// weight 1, scaled by (reused + 1) / (reused by the prior + 1) over the younger bins, each of which counts
// 0.7 of the one after it. Value of a class at an age (Gittins): over all later moments to stop, the best
// ratio of the chance of reuse until then to the expected time held, in 1/s. Only arithmetic that IEEE 754
// fixes, so the same everywhere. Thread: owned by a Policy.
#pragma once

#include <array>
#include <cstdint>

#include "policy.h"

namespace kvoffload {

class Hazards {
  public:
    static constexpr int kBins = 48;  // the last begins at 67 days and is open
    static constexpr int kPaces = 4, kFinishes = 3, kClasses = 3 * kPaces * kFinishes;

    static int class_of(Kind kind, Pace pace, int finish) {
        return (static_cast<int>(kind) * kPaces + static_cast<int>(pace)) * kFinishes + finish;
    }
    // The bin after `bin` begins at this age; beyond all ages for the last one.
    double next_begins(int bin) const { return next_[at(bin)]; }

    Hazards();

    void add_at_risk(int c, int bin, double weight) { risk_[at(c)][at(bin)] += weight; }
    void add_reused(int c, int bin, double weight) { reused_[at(c)][at(bin)] += weight; }
    void add_censored(int c, int bin, double weight) { censored_[at(c)][at(bin)] += weight; }
    void decay(double factor);
    // Weights that are in a bin now, for the next rebuild: half of it lies before them.
    void add_passing(int c, int bin, double weight) { passing_[at(c)][at(bin)] += weight; }
    // `value` answers from what is known now.
    void rebuild();
    double value(int c, int bin) const { return value_[at(c)][at(bin)]; }
    // Sums over all bins.
    double at_risk(int c) const { return sum(risk_[at(c)]); }
    double reused(int c) const { return sum(reused_[at(c)]); }
    double censored(int c) const { return sum(censored_[at(c)]); }

  private:
    using Row = std::array<double, kBins>;
    using Rows = std::array<Row, kClasses>;

    struct Sums {
        Row reused{}, exposed{};  // exposed = at risk - (censored + passing) / 2
    };

    static std::size_t at(int i) { return static_cast<std::size_t>(i); }
    static double sum(const Row& row);
    Sums pooled(int kind, int pace, int finish) const;
    Row parent_of(const Sums& all) const;
    void solve(const Row& hazard, Row& value) const;

    Rows risk_{}, reused_{}, censored_{}, passing_{}, value_{};
    Row low_{}, width_{}, next_{};
};

}  // namespace kvoffload
