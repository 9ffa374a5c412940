#include "lineage.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

#include "order.h"

namespace kvoffload {

namespace {

constexpr std::uint64_t kTrimPeriod = 64;  // requests

}  // namespace

Lineage::Lineage(Order& order, std::vector<Policy*> learners, std::uint64_t most_ghosts)
    : order_(order), learners_(std::move(learners)), most_ghosts_(most_ghosts) {}

void Lineage::opened(std::uint32_t segment, std::uint64_t stream) {
    if (segment >= nodes_.size()) nodes_.resize(segment + 1);
    nodes_[segment] = Node{};
    branches_.open(segment);
    recency_.touch(segment);
    nodes_[segment].name = stream;
    nodes_[segment].serial = ++serial_;
}

void Lineage::begin(std::uint32_t segment, std::uint64_t blocks, std::uint64_t known, std::uint32_t last,
                    double now) {
    std::uint32_t stream = kNone;
    if (nodes_[segment].name == 0 && last != kNone && nodes_[last].stream != kNone) {
        const std::uint32_t s = nodes_[last].stream;
        const std::uint64_t before = streams_.blocks(s);
        if (2 * known >= before || known + 1 >= before) stream = s;
    }
    if (stream == kNone) stream = streams_.get(nodes_[segment].name);
    streams_.begin(stream, blocks, now);
    Node& n = nodes_[segment];
    n.begun = true;
    n.stream = stream;
    n.previous = streams_.tail(stream);
    n.previous_serial = n.previous == kNone ? 0 : nodes_[n.previous].serial;
    streams_.tail(stream) = segment;
    for (Policy* p : learners_) p->on_request(blocks, now);
    set_class(segment, Kind::kOwn, streams_.pace(stream), now);
    if (++requests_ % kTrimPeriod == 0) trim(now);
}

void Lineage::relate(std::uint32_t segment, const std::vector<Touched>& touched, double now) {
    if (touched.empty()) return;
    find_split(segment, touched, now);
    cuts_.clear();
    const std::size_t n = touched.size();
    for (std::size_t i = 0; i < n;) {
        const std::uint32_t from = from_[i], to = target(segment, touched[i].end);
        std::uint32_t blocks = 0;
        std::size_t j = i;
        for (; j < n && from_[j] == from && target(segment, touched[j].end) == to; ++j) {
            if (from != to && follow(touched[j], from, to)) ++blocks;
        }
        if (blocks > 0) use(from, to, touched[i], touched[j - 1].end, blocks, now);
        i = j;
    }
    rehang(segment);
    leave_previous(segment, touched.back().end, now);
    for (const Cut& c : cuts_) order_.erase_if_done(c.segment);
    if (ghosts_.size() > most_ghosts_) trim(now);
}

// The block's ghost, if it has one, moves from `from` to `to`; false if the chain named the block before.
bool Lineage::follow(const Touched& touched, std::uint32_t from, std::uint32_t to) {
    if (touched.segment != kNone) return true;
    const std::uint32_t ghost = ghosts_.find(touched.ghost);
    if (ghost == kNone) {
        ghosts_.add(touched.ghost, to, nodes_[to].ghosts);
        return true;
    }
    if (ghosts_.segment(ghost) != from) return false;
    ghosts_.move(ghost, nodes_[from].ghosts, to, nodes_[to].ghosts);
    return true;
}

bool Lineage::foreign(std::uint32_t segment, std::uint32_t mine) const {
    const Node& n = nodes_[segment];
    return n.kind == Kind::kShared || (n.stream != kNone && n.stream != nodes_[mine].stream);
}

// Where each block was, and up to where others have used the path.
void Lineage::find_split(std::uint32_t segment, const std::vector<Touched>& touched, double now) {
    from_.clear();
    std::uint32_t shared = 0;
    for (const Touched& t : touched) {
        const std::uint32_t from = t.segment != kNone ? t.segment : find(t.ghost);
        from_.push_back(from);
        if (from != kNone && from != segment && foreign(from, segment)) shared = t.end;
    }
    const bool grows = shared > nodes_[segment].split;
    if (!grows || (nodes_[segment].blocks > 0 && nodes_[segment].low < shared)) return;
    if (nodes_[segment].head == kNone) {
        const std::uint32_t head = order_.open_head(segment);
        nodes_[head].stream = nodes_[segment].stream;
        nodes_[segment].head = head;
        set_class(head, Kind::kShared, nodes_[segment].pace, now);
    }
    nodes_[segment].split = shared;
    branches_.detach(segment);
    branches_.attach(segment, nodes_[segment].head, shared);
}

void Lineage::use(std::uint32_t from, std::uint32_t to, const Touched& first, std::uint32_t end,
                  std::uint32_t blocks, double now) {
    for (Policy* p : learners_) p->on_use(from == kSuperseded ? kNone : from, to, blocks, now);
    Node& t = nodes_[to];
    t.low = t.blocks == 0 ? first.before : std::min(t.low, first.before);
    t.blocks += blocks;
    recency_.add(to, blocks);
    if (from == kNone) return;
    nodes_[from].blocks -= blocks;
    if (from == kSuperseded) return;
    recency_.add(from, -std::int64_t{blocks});
    nodes_[from].low = std::max(nodes_[from].low, end);
    cuts_.push_back(Cut{from, end});
}

// What hung on blocks that the request took hangs on its segments now, and so does what is left of the old
// ones.
void Lineage::rehang(std::uint32_t segment) {
    for (const Cut& c : cuts_) {
        branches_.move(c.segment, c.end, [&](std::uint32_t at) { return target(segment, at); });
        if (nodes_[c.segment].blocks == 0 || target(segment, c.end) == c.segment) continue;
        branches_.detach(c.segment);
        branches_.attach(c.segment, target(segment, c.end), c.end);
    }
}

// The stream's last end is left when the request went on elsewhere before its first remaining block ends.
void Lineage::leave_previous(std::uint32_t segment, std::uint32_t walked, double now) {
    const std::uint32_t p = nodes_[segment].previous;
    if (p == kNone || nodes_[p].serial != nodes_[segment].previous_serial) return;
    if (nodes_[p].blocks > 0 && nodes_[p].low >= walked) return;
    nodes_[segment].previous = kNone;
    if (nodes_[p].blocks > 0 && nodes_[p].kind == Kind::kOwn) set_class(p, Kind::kLeft, nodes_[p].pace, now);
}

void Lineage::set_class(std::uint32_t segment, Kind kind, Pace pace, double now) {
    nodes_[segment].kind = kind;
    nodes_[segment].pace = pace;
    for (Policy* p : learners_) p->on_class(segment, kind, pace, now);
}

void Lineage::closed(std::uint32_t segment, double now) { leave_previous(segment, kNone, now); }

void Lineage::erased(std::uint32_t segment) {
    const Node& n = nodes_[segment];
    branches_.erase(segment);
    recency_.erase(segment);
    if (n.stream != kNone && streams_.tail(n.stream) == segment) streams_.tail(n.stream) = kNone;
}

void Lineage::restored(std::uint32_t segment, std::uint32_t count, double now) {
    for (Policy* p : learners_) p->on_use(kNone, segment, count, now);
    nodes_[segment].blocks += count;
    recency_.add(segment, count);
}

void Lineage::forget_one(std::uint32_t segment, double now) {
    for (Policy* p : learners_) p->on_forget(segment, 1, now);
    --nodes_[segment].blocks;
    recency_.add(segment, -1);
}

void Lineage::buried(std::uint32_t segment, std::uint64_t ghost, double now) {
    if (ghosts_.find(ghost) != kNone) return forget_one(segment, now);
    ghosts_.add(ghost, segment, nodes_[segment].ghosts);
}

void Lineage::superseded(std::uint32_t segment, double now) {
    forget_one(segment, now);
    ++nodes_[kSuperseded].blocks;
}

void Lineage::left_superseded() { --nodes_[kSuperseded].blocks; }

// Without a ghost there, another block of its name was followed in its place.
void Lineage::revived(std::uint32_t segment, std::uint64_t ghost, double now) {
    const std::uint32_t id = ghosts_.find(ghost);
    if (id == kNone || ghosts_.segment(id) != segment) return restored(segment, 1, now);
    ghosts_.erase(id, nodes_[segment].ghosts);
}

std::uint32_t Lineage::find(std::uint64_t ghost) const {
    const std::uint32_t id = ghosts_.find(ghost);
    return id == kNone ? kNone : ghosts_.segment(id);
}

// Forgets the ghosts of the segments used longest ago, those without entries first, until the bounds hold.
void Lineage::trim(double now) {
    std::vector<std::uint32_t> empty, rest;
    std::uint64_t held = 0;
    for (std::uint32_t s = 0; s < nodes_.size(); ++s) {
        if (!order_.segment(s).live) continue;
        held += order_.segment(s).size > 0 ? 1 : 0;
        if (nodes_[s].ghosts.count > 0 && !order_.is_open(s))
            (order_.segment(s).size > 0 ? rest : empty).push_back(s);
    }
    const auto older = [&](std::uint32_t a, std::uint32_t b) {
        return order_.segment(a).order < order_.segment(b).order;
    };
    std::sort(empty.begin(), empty.end(), older);
    std::sort(rest.begin(), rest.end(), older);
    const std::uint64_t most = std::max<std::uint64_t>(kGhostSegments, 4 * held);
    std::uint64_t over = empty.size() > most ? empty.size() - most : 0;
    const std::uint64_t room = ghosts_.size() > most_ghosts_ ? most_ghosts_ - most_ghosts_ / 8 : most_ghosts_;
    for (const std::uint32_t s : empty) {
        if (over == 0 && ghosts_.size() <= room) break;
        over -= over > 0 ? 1 : 0;
        forget(s, now);
    }
    for (const std::uint32_t s : rest) {
        if (ghosts_.size() <= room) break;
        forget(s, now);
    }
}

void Lineage::forget(std::uint32_t segment, double now) {
    Node& n = nodes_[segment];
    for (Policy* p : learners_) p->on_forget(segment, n.ghosts.count, now);
    n.blocks -= n.ghosts.count;
    recency_.add(segment, -std::int64_t{n.ghosts.count});
    ghosts_.clear(n.ghosts);
    order_.erase_if_done(segment);
}

std::size_t Lineage::memory_bytes() const {
    return nodes_.capacity() * sizeof(Node) + ghosts_.memory_bytes() + streams_.memory_bytes() +
           branches_.memory_bytes() + recency_.memory_bytes() + from_.capacity() * sizeof(std::uint32_t) +
           cuts_.capacity() * sizeof(Cut);
}

void Lineage::check() const {
    std::uint64_t ghosts = 0;
    std::vector<std::uint32_t> live;
    for (std::uint32_t s = 0; s < nodes_.size(); ++s) {
        if (!order_.segment(s).live) continue;
        live.push_back(s);
        const Node& n = nodes_[s];
        ghosts += n.ghosts.count;
        const bool counted = n.blocks == n.ghosts.count + order_.segment(s).size;
        const std::uint32_t above = branches_.parent(s);
        const bool hangs = above == kNone || (order_.segment(above).live && s != kSuperseded);
        if (counted && hangs) continue;
        throw std::runtime_error("index: lineage of segment " + std::to_string(s) + " is wrong (" +
                                 std::to_string(n.blocks) + " blocks)");
    }
    branches_.check();
    if (ghosts != ghosts_.size()) throw std::runtime_error("index: ghosts without a segment");
    check_recency(std::move(live));
}

// Above each segment are the blocks of those that Order touched later, whoever has them.
void Lineage::check_recency(std::vector<std::uint32_t> live) const {
    std::sort(live.begin(), live.end(), [&](std::uint32_t a, std::uint32_t b) {
        const std::uint64_t x = order_.segment(a).order, y = order_.segment(b).order;
        return x != y ? x > y : a > b;
    });
    std::uint64_t above = 0;
    for (const std::uint32_t s : live) {
        if (recency_.above(s) != above) {
            throw std::runtime_error("index: " + std::to_string(recency_.above(s)) +
                                     " blocks are counted as more recent than segment " + std::to_string(s) +
                                     ", " + std::to_string(above) + " are");
        }
        above += s == kSuperseded ? 0 : nodes_[s].blocks;
    }
}

}  // namespace kvoffload
