// Index and Matcher for Python: checks arrays, hands over results; no rule of the index lives here.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bind.h"
#include "index.h"
#include "match.h"

namespace py = pybind11;

namespace kvoffload {

namespace {

// Structured dtypes live where their Python users look for them; loaded at first use, kept for the process.
py::dtype dtype_of(const char* module, const char* name) {
    return py::dtype::from_args(py::module_::import(module).attr(name));
}

const py::dtype& copy_dtype() {
    static const auto* const dtype = new py::dtype(dtype_of("kvoffload.messages", "COPY_DTYPE"));
    return *dtype;
}

// The argument as a C-contiguous array; ValueError naming it otherwise.
py::array as_array(const py::object& value, const char* name) {
    py::array a = py::isinstance<py::array>(value) ? py::reinterpret_borrow<py::array>(value)
                                                   : py::array::ensure(py::memoryview(value));
    if (!a || (a.flags() & py::array::c_style) == 0) {
        throw py::value_error(std::string(name) + " is not a C-contiguous array");
    }
    return a;
}

py::array typed(const py::object& value, const char* name, char kind, py::ssize_t itemsize) {
    py::array a = as_array(value, name);
    if (a.ndim() != 1 || a.dtype().kind() != kind || a.itemsize() != itemsize) {
        throw py::value_error(std::string(name) + " is not a one-dimensional array of " + kind +
                              std::to_string(itemsize));
    }
    return a;
}

// REQUIRES: the array outlives the chain.
Chain chain_of(const py::array& keys) {
    if (keys.ndim() != 2 || keys.shape(1) != 16 || keys.dtype().kind() != 'u' || keys.itemsize() != 1) {
        throw py::value_error("keys is not an array of (n, 16) uint8");
    }
    return Chain{static_cast<const std::uint8_t*>(keys.data()), static_cast<std::uint64_t>(keys.shape(0))};
}

// Spans of all groups. The pages' arrays are kept alive here.
struct Spans {
    std::vector<Span> spans;
    std::vector<py::array> held;

    Spans(const std::vector<std::uint32_t>& begins, const std::vector<std::uint32_t>& ends,
          const py::object& pages) {
        if (begins.size() != ends.size()) throw py::value_error("begins and ends differ in length");
        for (std::size_t g = 0; g < begins.size(); ++g) spans.push_back(Span{begins[g], ends[g], nullptr, 0});
        if (pages.is_none()) return;
        std::size_t g = 0;
        for (const py::handle p : pages) {
            if (g == spans.size()) throw py::value_error("pages has more groups than begins");
            held.push_back(typed(py::reinterpret_borrow<py::object>(p), "pages", 'i', 4));
            spans[g].pages = static_cast<const std::int32_t*>(held.back().data());
            spans[g++].count = static_cast<std::uint64_t>(held.back().shape(0));
        }
        if (g != spans.size()) throw py::value_error("pages has fewer groups than begins");
    }
};

template <class T>
py::array rows(std::unique_ptr<T[]> data, std::size_t n, const py::dtype& dtype) {
    if (n == 0) return py::array(dtype, std::vector<py::ssize_t>{0});
    T* const p = data.get();
    const py::capsule owner(data.release(), [](void* q) { delete[] static_cast<T*>(q); });
    return py::array(dtype, {static_cast<py::ssize_t>(n)}, {static_cast<py::ssize_t>(sizeof(T))}, p, owner);
}

py::array to_python(CopyList copies) { return rows(std::move(copies.data), copies.size, copy_dtype()); }

struct CopiesIn {
    py::array held;
    BlockCopy* data = nullptr;
    std::size_t size = 0;

    explicit CopiesIn(const py::object& copies) : held(as_array(copies, "copies")) {
        if (held.ndim() != 1 || !held.dtype().is(copy_dtype())) {
            if (held.ndim() != 1 || !held.dtype().equal(copy_dtype())) {
                throw py::value_error("copies is not a one-dimensional array of COPY_DTYPE");
            }
        }
        data = static_cast<BlockCopy*>(const_cast<void*>(held.data()));
        size = static_cast<std::size_t>(held.shape(0));
    }
};

using Completion = void (Index::*)(const BlockCopy*, std::size_t, const std::uint8_t*);

void complete(Index& index, Completion how, const py::object& copies, const py::object& status) {
    const CopiesIn in(copies);
    if (status.is_none()) return (index.*how)(in.data, in.size, nullptr);
    const py::array s = typed(status, "status", 'u', 1);
    if (static_cast<std::size_t>(s.shape(0)) != in.size) {
        throw py::value_error("status has " + std::to_string(s.shape(0)) + " rows, copies has " +
                              std::to_string(in.size));
    }
    (index.*how)(in.data, in.size, static_cast<const std::uint8_t*>(s.data()));
}

template <Completion how>
void completion(Index& index, const py::object& copies, const py::object& status) {
    complete(index, how, copies, status);
}

int tier_of(int tier) {
    if (tier != kHost && tier != kDisk)
        throw py::value_error("tier is " + std::to_string(tier) + ", not 0 or 1");
    return tier;
}

py::dict usage(const Index& index, int tier) {
    py::dict out;
    py::list groups;
    for (std::uint32_t g = 0; g < index.groups(); ++g) {
        const TierUsage u = index.usage(tier_of(tier), g);
        py::dict row;
        row["capacity_slots"] = u.capacity;
        row["used"] = u.used;
        row["pinned"] = u.pinned;
        row["pending"] = u.pending;
        row["free"] = u.free;
        row["slabs"] = u.slabs_owned;
        groups.append(row);
    }
    out["groups"] = groups;
    out["slabs_unowned"] = index.slabs_unowned(tier);
    return out;
}

py::dict counters(const Index& index) {
    const Counters& c = index.counters();
    py::dict out;
    out["evicted_host"] = c.evicted[kHost];
    out["evicted_disk"] = c.evicted[kDisk];
    out["stored_host"] = c.stored[kHost];
    out["stored_disk"] = c.stored[kDisk];
    out["promoted"] = c.promoted;
    out["dropped_disk_backlog"] = c.dropped_disk_backlog;
    out["dropped_disk_full"] = c.dropped_disk_full;
    out["store_failed"] = c.store_failed;
    out["write_failed"] = c.write_failed;
    out["read_failed"] = c.read_failed;
    out["slabs_moved"] = c.slabs_moved;
    out["orphaned"] = c.orphaned;
    return out;
}

// What the policy of a tier has learned; without rows where it learns nothing.
py::dict policy(const Index& index, int tier) {
    static const char* const kinds[] = {"own", "left", "shared"};
    static const char* const paces[] = {"unknown", "quick", "middle", "slow"};
    static const char* const finishes[] = {"unknown", "tool_use", "end_turn"};
    const PolicyTable table = index.policy_table(tier_of(tier));
    py::list rows;
    for (const PolicyRow& r : table.rows) {
        py::dict row;
        row["kind"] = kinds[static_cast<int>(r.kind)];
        row["pace"] = paces[static_cast<int>(r.pace)];
        row["finish"] = finishes[r.finish];
        row["at_risk"] = r.at_risk;
        row["reused"] = r.reused;
        row["censored"] = r.censored;
        row["index"] = r.index;
        row["resident_segments"] = r.resident;
        row["index_by_age"] = r.by_age;
        rows.append(row);
    }
    py::dict out;
    out["classes"] = rows;
    out["requests"] = table.requests;
    out["rebuilds"] = table.rebuilds;
    out["rebuild_seconds"] = table.rebuild_seconds;
    out["held_blocks"] = table.held;
    out["lru_blocks"] = table.lru;
    out["fallbacks"] = table.fallbacks;
    out["lru_requests"] = table.lru_requests;
    out["ghost_blocks"] = table.rows.empty() ? 0 : index.lineage()->ghost_blocks();
    out["streams"] = table.rows.empty() ? 0 : index.lineage()->streams();
    out["memory_bytes"] = index.policy_memory_bytes(tier);
    return out;
}

py::tuple changes(const Index& index, std::uint64_t stamp) {
    const ChangeLog& log = index.log();
    if (!log.covers(stamp)) return py::make_tuple(log.stamp(), py::none());
    const std::size_t n = log.stamp() - stamp;
    std::unique_ptr<Change[]> out(new Change[n]);
    for (std::size_t i = 0; i < n; ++i) out[i] = log.at(stamp + i);
    return py::make_tuple(log.stamp(), rows(std::move(out), n, dtype_of("kvoffload.index", "CHANGE_DTYPE")));
}

py::array entries(const Index& index) {
    const std::vector<EntryView> all = index.entries();
    std::unique_ptr<EntryView[]> out(new EntryView[all.size()]);
    std::copy(all.begin(), all.end(), out.get());
    return rows(std::move(out), all.size(), dtype_of("kvoffload.index", "ENTRY_DTYPE"));
}

std::uint64_t restore(Index& index, const py::object& records) {
    const py::array a = as_array(records, "records");
    if (a.ndim() != 1 || !a.dtype().equal(dtype_of("kvoffload.messages", "RECORD_DTYPE"))) {
        throw py::value_error("records is not a one-dimensional array of RECORD_DTYPE");
    }
    return index.restore(static_cast<const Record*>(a.data()), static_cast<std::size_t>(a.shape(0)));
}

std::unique_ptr<Index> make_index(const std::vector<std::tuple<int, std::uint32_t, std::uint32_t>>& groups,
                                  std::uint32_t base_tokens, const std::vector<std::uint32_t>& slots_per_slab,
                                  std::uint32_t host_slabs, std::uint32_t transit_slabs,
                                  std::uint32_t disk_slabs, const py::kwargs& options) {
    IndexOptions o;
    for (const auto& [kind, multiple, lookback] : groups)
        o.groups.push_back(GroupSpec{kind, multiple, lookback});
    o.base_tokens = base_tokens;
    o.slots_per_slab = slots_per_slab;
    o.host_slabs = host_slabs;
    o.transit_slabs = transit_slabs;
    o.disk_slabs = disk_slabs;
    for (const auto& [name, value] : options) {
        const auto key = name.cast<std::string>();
        if (key == "host_slots")
            o.host_slots = value.cast<std::int64_t>();
        else if (key == "transit_slots")
            o.transit_slots = value.cast<std::int64_t>();
        else if (key == "disk_slots")
            o.disk_slots = value.cast<std::int64_t>();
        else if (key == "host_policy")
            o.host_policy = value.cast<std::string>();
        else if (key == "disk_policy")
            o.disk_policy = value.cast<std::string>();
        else if (key == "disk_admission")
            o.disk_admission = value.cast<std::uint32_t>();
        else if (key == "max_pending_writes")
            o.max_pending_writes = value.cast<std::int64_t>();
        else
            throw py::type_error("Index has no argument '" + key + "'");
    }
    return std::make_unique<Index>(std::move(o));
}

using Numbers = std::vector<std::uint32_t>;

py::tuple offer(Index& index, std::uint32_t segment, const py::object& keys, const Numbers& begins,
                const Numbers& ends, const py::object& pages) {
    const py::array k = as_array(keys, "keys");
    const Spans spans(begins, ends, pages);
    OfferResult r = index.offer(segment, chain_of(k), spans.spans);
    return py::make_tuple(to_python(std::move(r.copies)), r.cursors, r.resident, r.in_flight, r.refused);
}

py::tuple begin_load(Index& index, std::uint32_t segment, const py::object& keys, const Numbers& begins,
                     const Numbers& ends, const py::object& pages, std::uint32_t max_transit) {
    const py::array k = as_array(keys, "keys");
    const Spans spans(begins, ends, pages);
    LoadResult r = index.begin_load(segment, chain_of(k), spans.spans, max_transit);
    return py::make_tuple(to_python(std::move(r.copies)), r.ends);
}

py::array begin_read(Index& index, std::uint32_t segment, const py::object& keys, const Numbers& begins,
                     const Numbers& ends) {
    const py::array k = as_array(keys, "keys");
    const Spans spans(begins, ends, py::none());
    return to_python(index.begin_read(segment, chain_of(k), spans.spans));
}

template <std::uint64_t (Index::*call)(std::uint32_t, const Chain&, const std::vector<Span>&)>
std::uint64_t blocks_of(Index& index, std::uint32_t segment, const py::object& keys, const Numbers& begins,
                        const Numbers& ends) {
    const py::array k = as_array(keys, "keys");
    const Spans spans(begins, ends, py::none());
    return (index.*call)(segment, chain_of(k), spans.spans);
}

bool ready(Index& index, const py::object& copies) {
    const CopiesIn in(copies);
    if (!in.held.writeable()) throw py::value_error("copies is read-only");
    return index.ready(in.data, in.size);
}

py::tuple update(Matcher& matcher, const py::object& keys, std::uint64_t computed) {
    const py::array k = as_array(keys, "keys");
    const MatchResult r = matcher.update(chain_of(k), computed);
    return py::make_tuple(r.boundary, r.pending, r.host, r.disk, r.loading);
}

template <class T>
py::array_t<T> vector_array(const std::vector<T>& v) {
    return py::array_t<T>(static_cast<py::ssize_t>(v.size()), v.data());
}

void bind_index_class(py::module_& m) {
    using namespace py::literals;
    py::class_<Index>(m, "Index")
        .def(py::init(&make_index), "groups"_a, "base_tokens"_a, "slots_per_slab"_a, "host_slabs"_a,
             "transit_slabs"_a, "disk_slabs"_a)
        .def("open_segment", &Index::open_segment, "now"_a, "stream"_a = 0)
        .def("close_segment", &Index::close_segment, "segment"_a, "reason"_a, "now"_a)
        .def("offer", &offer, "segment"_a, "keys"_a, "begins"_a, "ends"_a, "pages"_a)
        .def("complete_store", &completion<&Index::complete_store>, "copies"_a, "status"_a)
        .def(
            "next_writes", [](Index& i, std::uint64_t limit) { return to_python(i.next_writes(limit)); },
            "limit"_a)
        .def("complete_write", &completion<&Index::complete_write>, "copies"_a, "status"_a)
        .def("begin_load", &begin_load, "segment"_a, "keys"_a, "begins"_a, "ends"_a, "pages"_a,
             "max_transit"_a)
        .def("begin_read", &begin_read, "segment"_a, "keys"_a, "begins"_a, "ends"_a)
        .def("retire", &blocks_of<&Index::retire>, "segment"_a, "keys"_a, "begins"_a, "ends"_a)
        .def("supersede", &blocks_of<&Index::supersede>, "segment"_a, "keys"_a, "begins"_a, "ends"_a)
        .def("complete_load", &completion<&Index::complete_load>, "copies"_a, "status"_a)
        .def("ready", &ready, "copies"_a)
        .def(
            "expire",
            [](Index& i, const py::object& copies) {
                const CopiesIn in(copies);
                i.expire(in.data, in.size);
            },
            "copies"_a)
        .def("restore", &restore, "records"_a)
        .def(
            "reset", [](Index& i, int tier) { i.reset(tier_of(tier)); }, "tier"_a)
        .def(
            "set_online",
            [](Index& i, int tier, bool online) {
                if (tier != kDisk) throw py::value_error("only the disk tier, 1, can be switched off and on");
                i.set_disk_online(online);
            },
            "tier"_a, "online"_a)
        .def("set_direct_writes", &Index::set_direct_writes, "allowed"_a)
        .def("usage", &usage, "tier"_a)
        .def("transit_free", &Index::transit_free)
        .def("pending_writes",
             [](const Index& i) { return py::make_tuple(i.queued_writes(), i.pinned_writes()); })
        .def("counters", &counters)
        .def("policy", &policy, "tier"_a)
        .def("changes", &changes, "stamp"_a)
        .def("memory_bytes", &Index::memory_bytes)
        .def("check_integrity", &Index::check_integrity)
        .def("entries", &entries);
}

}  // namespace

void bind_index(py::module_& m) {
    using namespace py::literals;
    bind_index_class(m);
    py::class_<Matcher>(m, "Matcher")
        .def(py::init<const Index&>(), "index"_a, py::keep_alive<1, 2>())
        .def("update", &update, "keys"_a, "computed"_a)
        .def("boundaries", [](const Matcher& x) { return vector_array(x.boundaries()); })
        .def(
            "codes",
            [](const Matcher& x, std::uint32_t group) {
                if (group >= x.groups()) throw py::value_error("no group " + std::to_string(group));
                return vector_array(x.codes(group));
            },
            "group"_a);
}

}  // namespace kvoffload
