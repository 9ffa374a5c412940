// Random calls on an Index with several groups and tiny tiers, every invariant checked after each: for
// sanitizers, which Python's allocator would blind. Usage: index_fuzz [seeds] [steps]; exits 1 with the seed
// that broke. Build: g++ -std=c++17 -O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all -Icsrc
//        tests/native/index_fuzz.cpp
//        csrc/{index*,order,policy,rri,hazard,lineage,branches,recency,ghosts,streams, slab_arena,match}.cpp
// A third of the seeds has keys that differ in their first bytes only, so that ghosts share names; chains
// change under their requests, and some name a key twice.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "index.h"
#include "match.h"

using namespace kvoffload;

namespace {

enum class Kind { kStore, kWrite, kLoad };

struct Job {
    Kind kind;
    std::vector<BlockCopy> copies;
};

class Fuzz {
  public:
    explicit Fuzz(unsigned seed) : random_(seed), index_(options()) {
        matcher_ = std::make_unique<Matcher>(index_);
        for (int i = 0; i < 4; ++i) segments_.push_back(index_.open_segment(0, 0));
    }

    void step() {
        switch (below(10)) {
            case 0:
            case 1:
            case 2:
                return offer();
            case 3:
            case 4:
                return load();
            case 5:
                return add(Kind::kWrite, index_.next_writes(below(6)));
            case 6:
            case 7:
            case 8:
                return jobs_.empty() ? offer() : end(below(static_cast<unsigned>(jobs_.size())));
            default:
                return seldom();
        }
    }

    void finish() {
        while (!jobs_.empty()) end(0);
        index_.check_integrity();
        for (int tier = 0; tier < kTiers; ++tier) {
            for (std::uint32_t g = 0; g < index_.groups(); ++g) {
                if (index_.usage(tier, g).pinned != 0) throw std::runtime_error("pinned at idle");
            }
        }
    }

    void check() const { index_.check_integrity(); }

  private:
    static constexpr std::uint32_t kBlocks = 24;

    unsigned below(unsigned n) { return static_cast<unsigned>(random_() % n); }

    IndexOptions options() {
        IndexOptions o;
        o.groups = {{kFull, 1, 0}, {kSliding, 2, 5}, {kState, 4, 0}};
        o.groups.resize(1 + below(3));
        for (std::size_t g = 0; g < o.groups.size(); ++g) o.slots_per_slab.push_back(1 + below(4));
        o.host_slabs = 1 + below(6);
        o.transit_slabs = below(4);
        o.disk_slabs = below(10);
        o.max_pending_writes = 1 + static_cast<int>(below(6));
        const char* const policies[] = {"lru", "rri", "rri-keep"};
        o.host_policy = policies[below(3)];
        o.disk_policy = policies[below(3)];
        alike_ = below(3) == 0;
        return o;
    }

    // A path of the prefix tree: the block at which it leaves the trunk decides all later keys.
    Chain chain() {
        keys_.assign(kBlocks * 16, 0);
        const unsigned leaves = below(4) * 6, branch = below(3);
        for (std::uint32_t i = 0; i < kBlocks; ++i) {
            keys_[i * 16] = static_cast<std::uint8_t>(i + 1);
            if (i >= leaves) keys_[i * 16 + 15] = static_cast<std::uint8_t>(1 + leaves * 3 + branch);
            if (!alike_) keys_[i * 16 + 8] = static_cast<std::uint8_t>(i);
        }
        if (below(20) == 0) {
            const std::uint8_t* const from = &keys_[below(kBlocks) * 16];
            std::copy(from, from + 16, &keys_[below(kBlocks) * 16]);
        }
        return Chain{keys_.data(), kBlocks};
    }

    std::vector<Span> spans() {
        std::vector<Span> out;
        pages_.assign(index_.groups(), {});
        for (std::uint32_t g = 0; g < index_.groups(); ++g) {
            const std::uint32_t end = below(kBlocks / index_.group(g).multiple + 1);
            for (std::uint32_t i = 0; i < end; ++i)
                pages_[g].push_back(below(8) == 0 ? -1 : static_cast<int>(i));
            out.push_back(Span{below(3) == 0 ? below(end + 1) : 0, end, pages_[g].data(), pages_[g].size()});
        }
        return out;
    }

    std::uint32_t segment() { return segments_[below(static_cast<unsigned>(segments_.size()))]; }

    void add(Kind kind, const CopyList& list) {
        if (list.size > 0) jobs_.push_back(Job{kind, {list.data.get(), list.data.get() + list.size}});
    }

    void offer() {
        const Chain c = chain();
        const std::vector<Span> s = spans();
        add(Kind::kStore, index_.offer(segment(), c, s).copies);
    }

    void load() {
        const Chain c = chain();
        const std::vector<Span> s = spans();
        if (below(3) == 0) return add(Kind::kLoad, index_.begin_read(segment(), c, s));
        add(Kind::kLoad, index_.begin_load(segment(), c, s, below(4)).copies);
        matcher_->update(c, below(kBlocks));
    }

    void end(unsigned which) {
        Job job = std::move(jobs_[which]);
        jobs_.erase(jobs_.begin() + which);
        std::vector<std::uint8_t> status(job.copies.size(), kOk);
        if (below(3) == 0) {
            for (std::uint8_t& s : status) s = static_cast<std::uint8_t>(below(4));
        }
        const BlockCopy* const copies = job.copies.data();
        if (job.kind == Kind::kWrite) return index_.complete_write(copies, status.size(), status.data());
        if (job.kind == Kind::kLoad) return index_.complete_load(copies, status.size(), status.data());
        index_.complete_store(copies, status.size(), status.data());
        Job next{Kind::kWrite, {}};
        for (std::size_t i = 0; i < status.size(); ++i) {
            if ((copies[i].flags & kCopyTransit) != 0 && status[i] == kOk) next.copies.push_back(copies[i]);
        }
        if (!next.copies.empty()) jobs_.push_back(std::move(next));
    }

    void seldom() {
        switch (below(8)) {
            case 5:
            case 6: {
                const Chain c = chain();
                const std::vector<Span> s = spans();
                index_.supersede(segment(), c, s);
                return;
            }
            case 7: {
                const Chain c = chain();
                const std::vector<Span> s = spans();
                index_.retire(segment(), c, s);
                return;
            }
            case 0:
                return index_.reset(static_cast<int>(below(2)));
            case 1:
                return index_.set_disk_online(below(3) != 0);
            case 2: {
                std::uint32_t& s = segments_[below(static_cast<unsigned>(segments_.size()))];
                now_ += below(100);
                index_.close_segment(s, static_cast<int>(below(4)), now_);
                s = index_.open_segment(now_, below(3));
                return;
            }
            case 3:
                for (Job& job : jobs_) {
                    if (job.kind == Kind::kLoad) index_.ready(job.copies.data(), job.copies.size());
                }
                return;
            default:
                if (!jobs_.empty()) index_.expire(jobs_[0].copies.data(), jobs_[0].copies.size());
        }
    }

    std::mt19937 random_;
    bool alike_ = false;
    double now_ = 0;
    Index index_;
    std::unique_ptr<Matcher> matcher_;
    std::vector<std::uint32_t> segments_;
    std::vector<std::uint8_t> keys_;
    std::vector<std::vector<std::int32_t>> pages_;
    std::vector<Job> jobs_;
};

}  // namespace

int main(int argc, char** argv) {
    // argv[1] is a folder, as for every driver.
    const int seeds = argc > 2 ? std::atoi(argv[2]) : 400, steps = argc > 3 ? std::atoi(argv[3]) : 500;
    for (int seed = 0; seed < seeds; ++seed) {
        try {
            Fuzz fuzz(static_cast<unsigned>(seed));
            for (int i = 0; i < steps; ++i) {
                fuzz.step();
                fuzz.check();
            }
            fuzz.finish();
        } catch (const std::exception& e) {
            std::fprintf(stderr, "seed %d: %s\n", seed, e.what());
            return 1;
        }
    }
    std::printf("%d seeds, %d steps each: every invariant held\n", seeds, steps);
    return 0;
}
