#include "hazard.h"

#include <algorithm>
#include <limits>

namespace kvoffload {

namespace {

constexpr double kFirst = 0.5;  // seconds
constexpr double kHalfOctave = 1.4142135623730951;
constexpr double kParentWeight = 20;
constexpr double kSlack = 5;  // seconds
constexpr double kPriorWeight = 1;
constexpr double kCarry = 0.7;  // of a bin's experience, to the prior of the next one

}  // namespace

Hazards::Hazards() {
    double edge = kFirst;
    for (int b = 1; b < kBins; ++b) {
        low_[at(b)] = b % 2 == 1 ? edge : edge * kHalfOctave;
        if (b % 2 == 0) edge *= 2;
    }
    for (int b = 0; b + 1 < kBins; ++b) width_[at(b)] = low_[at(b + 1)] - low_[at(b)];
    width_[kBins - 1] = low_[kBins - 1];
    for (int b = 0; b + 1 < kBins; ++b) next_[at(b)] = low_[at(b + 1)];
    next_[kBins - 1] = std::numeric_limits<double>::infinity();
    rebuild();
}

double Hazards::sum(const Row& row) {
    double total = 0;
    for (const double v : row) total += v;
    return total;
}

void Hazards::decay(double factor) {
    for (Rows* rows : {&risk_, &reused_, &censored_}) {
        for (Row& row : *rows) {
            for (double& v : row) v *= factor;
        }
    }
}

// pace -1 = all; finish 0 = all.
Hazards::Sums Hazards::pooled(int kind, int pace, int finish) const {
    Sums out;
    for (int p = std::max(pace, 0); p < (pace < 0 ? kPaces : pace + 1); ++p) {
        for (int f = finish; f < (finish == 0 ? kFinishes : finish + 1); ++f) {
            const std::size_t c = at(class_of(static_cast<Kind>(kind), static_cast<Pace>(p), f));
            for (std::size_t b = 0; b < kBins; ++b) {
                out.reused[b] += reused_[c][b];
                out.exposed[b] += risk_[c][b] - (censored_[c][b] + passing_[c][b]) / 2;
            }
        }
    }
    return out;
}

// Ages that nobody has lived through yet are as the ages before them: what those saw, against what was
// expected of them, scales the prior.
Hazards::Row Hazards::parent_of(const Sums& all) const {
    Row parent{};
    double seen = 0, expected = 0;
    for (std::size_t b = 0; b < kBins; ++b) {
        const double prior = std::min(0.5, 0.5 * width_[b] / (low_[b] + width_[b] + kSlack));
        const double level = std::min(0.5, prior * (seen + 1) / (expected + 1));
        const double exposed = std::max(all.exposed[b], 0.0);
        parent[b] = (all.reused[b] + kPriorWeight * level) / (exposed + kPriorWeight);
        seen = kCarry * seen + all.reused[b];
        expected = kCarry * expected + exposed * prior;
    }
    return parent;
}

void Hazards::rebuild() {
    for (int k = 0; k < 3; ++k) {
        for (int f = 0; f < kFinishes; ++f) {
            const Row parent = parent_of(pooled(k, -1, f));
            Row hazard{};
            for (int p = 0; p < kPaces; ++p) {
                const Sums own = pooled(k, p, f);
                for (std::size_t b = 0; b < kBins; ++b) {
                    const double exposed = std::max(own.exposed[b], 0.0) + kParentWeight;
                    hazard[b] = std::min((own.reused[b] + kParentWeight * parent[b]) / exposed, 1.0);
                }
                solve(hazard, value_[at(class_of(static_cast<Kind>(k), static_cast<Pace>(p), f))]);
            }
        }
    }
    for (Row& row : passing_) row.fill(0);
}

void Hazards::solve(const Row& hazard, Row& value) const {
    for (std::size_t first = 0; first < kBins; ++first) {
        double alive = 1, used = 0, held = 0, best = 0;
        for (std::size_t b = first; b < kBins; ++b) {
            const double now = alive * hazard[b];
            used += now;
            held += alive * width_[b] * (1 - hazard[b] / 2);
            alive -= now;
            if (used > best * held) best = used / held;
        }
        value[first] = best;
    }
}

}  // namespace kvoffload
