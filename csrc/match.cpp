#include "match.h"

#include <algorithm>
#include <cstring>
#include <numeric>

namespace kvoffload {

constexpr std::uint8_t kVisible = kCodeHost | kCodeDisk;

Matcher::Matcher(const Index& index) : index_(&index), codes_(index.groups()) {
    step_ = index.base_tokens();
    for (std::uint32_t g = 0; g < index.groups(); ++g) {
        if (index.group(g).kind != kTransient) step_ = std::lcm(step_, tokens(g));
    }
}

bool Matcher::extends(const Chain& chain) const {
    return chain.blocks >= blocks_ &&
           (blocks_ == 0 || std::memcmp(chain.keys + (blocks_ - 1) * 16, last_, 16) == 0);
}

MatchResult Matcher::update(const Chain& chain, std::uint64_t computed) {
    bool dirty = computed != computed_ || chain.blocks != blocks_;
    const ChangeLog& log = index_->log();
    if (!extends(chain) || !log.covers(stamp_) || log.stamp() - stamp_ > 1024 + chain.blocks / 2) {
        for (auto& codes : codes_) codes.clear();
        dirty = true;
    } else {
        dirty |= apply_changes(chain);
    }
    dirty |= probe_new(chain);
    stamp_ = log.stamp();
    computed_ = computed;
    blocks_ = chain.blocks;
    if (blocks_ > 0) std::memcpy(last_, chain.keys + (blocks_ - 1) * 16, 16);
    if (!dirty) return result_;
    result_ = MatchResult{};
    result_.boundary = std::max(computed, solve(kVisible, nullptr));
    result_.pending = std::max(result_.boundary, solve(kVisible | kCodePending, nullptr));
    count_tiers(result_);
    result_.loading = is_loading(result_.pending);
    return result_;
}

// A record concerns the chain if the chain has its key at its depth.
bool Matcher::apply_changes(const Chain& chain) {
    bool dirty = false;
    for (std::uint64_t s = stamp_; s < index_->log().stamp(); ++s) {
        const Change& c = index_->log().at(s);
        std::vector<std::uint8_t>& codes = codes_[c.group];
        const auto depth = static_cast<std::uint32_t>(c.depth);
        if (depth >= codes.size()) continue;
        if (std::memcmp(chain.at(index_->group(c.group).multiple, depth), c.key, 16) != 0) continue;
        dirty |= codes[depth] != c.code;
        codes[depth] = c.code;
    }
    return dirty;
}

bool Matcher::probe_new(const Chain& chain) {
    bool any = false;
    for (std::uint32_t g = 0; g < index_->groups(); ++g) {
        const auto begin = static_cast<std::uint32_t>(codes_[g].size());
        const auto end = static_cast<std::uint32_t>(chain.blocks / index_->group(g).multiple);
        if (begin >= end) continue;
        any = true;
        codes_[g].resize(end);
        index_->probe(chain, g, begin, end, codes_[g].data() + begin);
    }
    return any;
}

// The blocks of one group seen from candidates in increasing order: how many before `next` are there without
// a gap.
struct Matcher::Window {
    std::uint64_t next = 0;
    std::uint64_t run = 0;
};

// The last boundary in tokens, with all of them in `all`; what `mask` has counts as there. One pass over the
// chain.
std::uint64_t Matcher::solve(std::uint8_t mask, std::vector<std::int32_t>* all) const {
    std::vector<Window> windows(codes_.size());
    std::uint64_t best = 0;
    for (std::uint64_t b = step_; b <= blocks_ * index_->base_tokens(); b += step_) {
        bool good = true;
        for (std::uint32_t g = 0; g < codes_.size(); ++g) {
            Window& w = windows[g];
            const std::uint64_t end = b / tokens(g);
            for (; w.next < end; ++w.next) w.run = present(g, w.next, mask) ? w.run + 1 : 0;
            const GroupSpec& spec = index_->group(g);
            if (spec.kind == kTransient) continue;
            const std::uint64_t first = b > spec.lookback ? (b - spec.lookback) / tokens(g) : 0;
            const std::uint64_t need = spec.kind == kFull ? end : spec.kind == kState ? 1 : end - first;
            if (spec.kind == kFull && w.run < need) return best;
            good &= w.run >= need;
        }
        if (!good) continue;
        best = b;
        if (all != nullptr) all->push_back(static_cast<std::int32_t>(b));
    }
    return best;
}

std::vector<std::int32_t> Matcher::boundaries() const {
    std::vector<std::int32_t> all;
    solve(kVisible, &all);
    return all;
}

// Counts the blocks that the first full group, else the first group, would take for the boundary; a block
// that `computed` cuts counts from there on.
void Matcher::count_tiers(MatchResult& result) const {
    std::uint32_t g = 0;
    while (g < codes_.size() && index_->group(g).kind != kFull) ++g;
    if (g == codes_.size()) {
        g = 0;
        while (g + 1 < codes_.size() && index_->group(g).kind == kTransient) ++g;
    }
    const GroupSpec& spec = index_->group(g);
    std::uint64_t from = computed_;
    if (spec.kind == kSliding && result.boundary > spec.lookback) {
        from = std::max(from, (result.boundary - spec.lookback) / tokens(g) * tokens(g));
    }
    if (spec.kind == kState && result.boundary > computed_)
        from = std::max(from, result.boundary - tokens(g));
    for (std::uint64_t block = from / tokens(g); (block + 1) * tokens(g) <= result.boundary; ++block) {
        const std::uint64_t start = std::max(block * tokens(g), from);
        const std::uint64_t base = ((block + 1) * tokens(g) - start) / index_->base_tokens();
        const std::uint8_t code = codes_[g][block];
        if (code & kCodeHost) {
            result.host += base;
        } else if (code & kCodeDisk) {
            result.disk += base;
        }
    }
}

bool Matcher::is_loading(std::uint64_t end) const {
    for (std::uint32_t g = 0; g < codes_.size(); ++g) {
        const auto first = codes_[g].begin() + static_cast<std::ptrdiff_t>(std::min<std::uint64_t>(
                                                   computed_ / tokens(g), codes_[g].size()));
        const auto last = codes_[g].begin() + static_cast<std::ptrdiff_t>(
                                                  std::min<std::uint64_t>(end / tokens(g), codes_[g].size()));
        if (first < last &&
            std::any_of(first, last, [](std::uint8_t c) { return (c & kCodeLoading) != 0; })) {
            return true;
        }
    }
    return false;
}

}  // namespace kvoffload
