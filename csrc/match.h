// What of one chain is restorable, kept up to date as the index changes.
//
// A boundary is a multiple b of every group's tokens per block, up to the chain's length, such that every
// full group has the blocks covering [0, b), every sliding group those that intersect [b - lookback, b)
// clipped at 0, every state group the block that ends at b; transient groups do not count. Blocks below
// `computed` count as there: the engine holds them. A first update probes every block. Later ones read the
// change log, probe only new blocks, and answer from memory when nothing that concerns the chain changed;
// they probe anew when the log no longer reaches back, or when the keys do not extend the last ones (a key
// names its whole prefix, so the last key is compared). Thread: that of the Index. Lifetime: the Index must
// outlive it.
#pragma once

#include <cstdint>
#include <vector>

#include "index.h"

namespace kvoffload {

struct MatchResult {
    std::uint64_t boundary = 0, pending = 0;  // tokens, >= computed
    std::uint64_t host = 0, disk = 0;         // base blocks of [computed, boundary), see Matcher::count_tiers
    bool loading = false;                     // some block of [computed, pending) is on its way to the device
};

class Matcher {
  public:
    explicit Matcher(const Index& index);

    MatchResult update(const Chain& chain, std::uint64_t computed);
    // All boundaries of the last update, increasing, without 0.
    std::vector<std::int32_t> boundaries() const;
    std::uint32_t groups() const { return static_cast<std::uint32_t>(codes_.size()); }
    const std::vector<std::uint8_t>& codes(std::uint32_t group) const { return codes_[group]; }

  private:
    struct Window;

    bool extends(const Chain& chain) const;
    bool apply_changes(const Chain& chain);
    bool probe_new(const Chain& chain);
    std::uint64_t solve(std::uint8_t mask, std::vector<std::int32_t>* all) const;
    void count_tiers(MatchResult& result) const;
    bool is_loading(std::uint64_t end) const;
    std::uint64_t tokens(std::uint32_t group) const {
        return std::uint64_t{index_->group(group).multiple} * index_->base_tokens();
    }
    bool present(std::uint32_t group, std::uint64_t block, std::uint8_t mask) const {
        return (codes_[group][block] & mask) != 0 || (block + 1) * tokens(group) <= computed_;
    }

    const Index* index_;
    std::uint64_t step_ = 1;  // tokens between candidates
    std::vector<std::vector<std::uint8_t>> codes_;
    std::uint64_t stamp_ = 0;
    std::uint64_t blocks_ = 0;  // base blocks of the last chain
    std::uint8_t last_[16] = {};
    std::uint64_t computed_ = 0;
    MatchResult result_;
};

}  // namespace kvoffload
