#include "disk_io.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <utility>

#include "file_io.h"

namespace kvoffload {
namespace {

constexpr std::int64_t kRunBytes = 1 << 20;  // one system call moves at most this, or one slot
constexpr std::int64_t kRunSlots = 512;      // below IOV_MAX
constexpr int kNotBegun = -2;                // beside the values of transfer()

struct PageDeleter {
    void operator()(std::uint8_t* page) const { std::free(page); }
};

std::unique_ptr<std::uint8_t, PageDeleter> aligned_page() {
    return std::unique_ptr<std::uint8_t, PageDeleter>(
        static_cast<std::uint8_t*>(std::aligned_alloc(kSlotAlign, kSlotAlign)));
}

}  // namespace

struct DiskIO::Call {
    const BlockCopy* copies;
    std::int64_t count;
    std::uintptr_t host_base;
    const SlotSpace& host;
    std::uint8_t* status;
};

DiskIO::DiskIO(Files files, SlotSpace space, std::vector<std::int64_t> block_bytes, Options options)
    : files_(files),
      space_(std::move(space)),
      block_bytes_(std::move(block_bytes)),
      records_per_slab_(space_.most_slots_per_slab()),
      checksum_(options.checksum),
      error_limit_(options.error_limit),
      epoch_(options.epoch),
      owner_(space_.slabs(), kNobody),
      readers_(options.threads),
      writers_(options.threads) {}

DiskIO::~DiskIO() { close(); }

void DiskIO::close() {
    readers_.shutdown();
    writers_.shutdown();
}

void DiskIO::read(const BlockCopy* copies, std::int64_t count, std::uintptr_t host_base,
                  const SlotSpace& host, std::uint8_t* status) {
    std::fill_n(status, count, kReadFailed);
    const Call call{copies, count, host_base, host, status};
    const std::vector<Item> items = resolve(call);
    const std::vector<Run> runs = split(items);
    for (const Item& item : items) status[item.copy] = kNotDone;
    const auto batch =
        readers_.start(static_cast<std::int64_t>(runs.size()), 1, [&](std::int64_t begin, std::int64_t end) {
            for (std::int64_t i = begin; i < end; ++i) read_run(call, items, runs[i]);
        });
    readers_.wait(batch, -1);
}

void DiskIO::write(const BlockCopy* copies, std::int64_t count, std::uintptr_t host_base,
                   const SlotSpace& host, std::uint8_t* status) {
    std::fill_n(status, count, kCopyFailed);
    const Call call{copies, count, host_base, host, status};
    std::vector<Item> items = resolve(call);
    items.erase(std::remove_if(items.begin(), items.end(),
                               [&](const Item& item) { return !claim(item, copies[item.copy].group); }),
                items.end());
    const std::vector<Run> runs = split(items);
    std::vector<DiskRecord> records(items.size());
    std::vector<int> errors(items.size(), kNotBegun);
    const auto batch =
        writers_.start(static_cast<std::int64_t>(runs.size()), 1, [&](std::int64_t begin, std::int64_t end) {
            for (std::int64_t i = begin; i < end; ++i)
                write_run(call, items, runs[i], records.data(), errors.data());
        });
    writers_.wait(batch, -1);
    write_records(items, records, errors.data());
    for (std::size_t i = 0; i < items.size(); ++i) finish_write(call, items[i], errors[i]);
}

void DiskIO::finish_write(const Call& call, const Item& item, int error) {
    if (error == kNotBegun) {
        call.status[item.copy] = kNotDone;
        return;
    }
    note(error);
    if (error != kWhole) return;
    call.status[item.copy] = kOk;
    ++counters_.blocks_written;
    counters_.bytes_written += block_bytes_[call.copies[item.copy].group];
}

// The copies that name an existing disk and host slot, in disk order.
std::vector<DiskIO::Item> DiskIO::resolve(const Call& call) const {
    std::vector<Item> items;
    items.reserve(call.count);
    for (std::int64_t i = 0; i < call.count; ++i) {
        const BlockCopy& copy = call.copies[i];
        const std::int64_t disk = space_.offset(copy.group, copy.disk);
        const std::int64_t host = call.host.offset(copy.group, copy.host);
        if (disk < 0 || host < 0) continue;
        const std::int64_t record = (copy.disk >> 16) * records_per_slab_ + (copy.disk & 0xFFFF);
        items.push_back({i, disk, record, space_.slot_bytes(copy.group),
                         reinterpret_cast<std::uint8_t*>(call.host_base + host)});
    }
    std::sort(items.begin(), items.end(), [](const Item& a, const Item& b) { return a.disk < b.disk; });
    return items;
}

std::vector<DiskIO::Run> DiskIO::split(const std::vector<Item>& items) {
    std::vector<Run> runs;
    std::int64_t bytes = 0;
    for (std::int64_t i = 0; i < static_cast<std::int64_t>(items.size()); ++i) {
        const Item& item = items[i];
        const bool joins = !runs.empty() && items[i - 1].disk + items[i - 1].bytes == item.disk &&
                           items[i - 1].record + 1 == item.record && bytes + item.bytes <= kRunBytes &&
                           i - runs.back().begin < kRunSlots;
        if (joins) {
            runs.back().end = i + 1;
        } else {
            runs.push_back({i, i + 1});
            bytes = 0;
        }
        bytes += item.bytes;
    }
    return runs;
}

void DiskIO::read_run(const Call& call, const std::vector<Item>& items, Run run) {
    const std::int64_t count = run.end - run.begin;
    std::vector<DiskRecord> records(count);
    std::vector<int> errors(count, transfer(Way::kRead, files_.table, records.data(), count * kRecordBytes,
                                            items[run.begin].record * kRecordBytes));
    if (errors[0] == kWhole)
        transfer_parts(Way::kRead, files_.slots, parts(items, run), items[run.begin].disk, errors.data());
    for (std::int64_t i = 0; i < count; ++i) {
        const Item& item = items[run.begin + i];
        const BlockCopy& copy = call.copies[item.copy];
        note(errors[i]);
        const bool good = errors[i] == kWhole && matches(records[i], copy, item.host);
        if (errors[i] == kWhole && !good) ++counters_.mismatches;
        if (good) {
            ++counters_.blocks_read;
            counters_.bytes_read += block_bytes_[copy.group];
        }
        call.status[item.copy] = good ? kOk : kReadFailed;
    }
}

void DiskIO::write_run(const Call& call, const std::vector<Item>& items, Run run, DiskRecord* records,
                       int* errors) {
    for (std::int64_t i = run.begin; i < run.end; ++i) {
        const BlockCopy& copy = call.copies[items[i].copy];
        const std::int64_t length = block_bytes_[copy.group];
        const Checksum sum = checksum_ ? checksum(items[i].host, length) : Checksum{};
        records[i] = make_record(copy, static_cast<std::uint32_t>(length), sum, epoch_);
    }
    transfer_parts(Way::kWrite, files_.slots, parts(items, run), items[run.begin].disk, errors + run.begin);
}

// Puts the records of the payloads that are on disk into the table, adjacent ones together. errors: per item,
// in: of the payload, out: of both.
void DiskIO::write_records(const std::vector<Item>& items, std::vector<DiskRecord>& records, int* errors) {
    const auto count = static_cast<std::int64_t>(items.size());
    for (std::int64_t begin = 0, end = 0; begin < count; begin = end) {
        end = begin + 1;
        if (errors[begin] != kWhole) continue;
        while (end < count && errors[end] == kWhole && items[end - 1].record + 1 == items[end].record) ++end;
        const int error = transfer(Way::kWrite, files_.table, &records[begin], (end - begin) * kRecordBytes,
                                   items[begin].record * kRecordBytes);
        std::fill(errors + begin, errors + end, error);
    }
}

std::vector<Part> DiskIO::parts(const std::vector<Item>& items, Run run) {
    std::vector<Part> parts;
    parts.reserve(run.end - run.begin);
    for (std::int64_t i = run.begin; i < run.end; ++i) parts.push_back({items[i].host, items[i].bytes});
    return parts;
}

// Counts how the transfer of one slot ended.
void DiskIO::note(int error) {
    if (error == kWhole) {
        if (failures_in_a_row_.load(std::memory_order_relaxed) != 0) failures_in_a_row_ = 0;
        return;
    }
    ++counters_.io_errors;
    counters_.last_errno = std::max(error, 0);
    if (++failures_in_a_row_ >= error_limit_) healthy_ = false;
}

// Makes the slab's part of the table the group's own: records of the group that had the slab before go first,
// since their payloads are about to be overwritten at other borders. False where the table cannot be written.
bool DiskIO::claim(const Item& item, std::int32_t group) {
    const std::int64_t slab = item.disk / space_.slab_bytes();
    std::lock_guard<std::mutex> lock(claims_);
    if (owner_[slab] == group) return true;
    if (owner_[slab] != kNobody) {
        std::vector<std::uint8_t> zeros(records_per_slab_ * kRecordBytes, 0);
        const auto bytes = static_cast<std::int64_t>(zeros.size());
        const int error = transfer(Way::kWrite, files_.table, zeros.data(), bytes, slab * bytes);
        if (error != kWhole) {
            note(error);
            return false;
        }
    }
    owner_[slab] = group;
    return true;
}

bool DiskIO::matches(const DiskRecord& record, const BlockCopy& copy, const std::uint8_t* data) const {
    const std::int64_t length = block_bytes_[copy.group];
    if (!record_valid(record, epoch_) || record.group != copy.group || record.length != length ||
        std::memcmp(record.key, copy.key, sizeof record.key) != 0) {
        return false;
    }
    if (!checksum_) return true;
    const Checksum sum = checksum(data, length);
    return std::memcmp(&sum, &record.payload, sizeof sum) == 0;
}

std::vector<FoundBlock> DiskIO::scan(std::int64_t slot_file_bytes) {
    std::vector<FoundBlock> found;
    std::vector<DiskRecord> records(records_per_slab_);
    const std::int64_t bytes = records_per_slab_ * kRecordBytes;
    for (std::int64_t slab = 0; slab < space_.slabs() && bytes > 0; ++slab) {
        if (transfer(Way::kRead, files_.table, records.data(), bytes, slab * bytes) != kWhole) break;
        const std::size_t first = found.size();
        for (std::int64_t index = 0; index < records_per_slab_; ++index) {
            const auto slot = static_cast<std::int32_t>(slab << 16 | index);
            const DiskRecord& record = records[index];
            if (!stands(record, slot, slot_file_bytes)) continue;
            if (owner_[slab] == kNobody) owner_[slab] = record.group;
            if (owner_[slab] != record.group) owner_[slab] = kSeveral;
            found.push_back(found_block(record, slot));
        }
        if (owner_[slab] == kSeveral) found.resize(first);
    }
    return found;
}

// True where the record names a block that may lie in this slot.
bool DiskIO::stands(const DiskRecord& record, std::int32_t slot, std::int64_t slot_file_bytes) const {
    if (record.magic != kRecordMagic) return false;
    const std::int64_t offset = space_.offset(record.group, slot);
    return offset >= 0 && offset + space_.slot_bytes(record.group) <= slot_file_bytes &&
           record.length == block_bytes_[record.group] && record_valid(record, epoch_);
}

void DiskIO::reset(std::uint64_t epoch) {
    epoch_ = epoch;
    std::lock_guard<std::mutex> lock(claims_);
    std::fill(owner_.begin(), owner_.end(), kNobody);
}

bool DiskIO::probe() {
    const auto page = aligned_page(), back = aligned_page();
    if (!page || !back) return false;
    std::memset(page.get(), 0x5A, kSlotAlign);
    DiskRecord record{}, again{};
    const std::int64_t at = slots_bytes() - kSlotAlign, last = table_bytes() - kRecordBytes;
    const bool good = transfer(Way::kWrite, files_.slots, page.get(), kSlotAlign, at) == kWhole &&
                      transfer(Way::kRead, files_.slots, back.get(), kSlotAlign, at) == kWhole &&
                      std::memcmp(page.get(), back.get(), kSlotAlign) == 0 &&
                      transfer(Way::kWrite, files_.table, &record, kRecordBytes, last) == kWhole &&
                      transfer(Way::kRead, files_.table, &again, kRecordBytes, last) == kWhole;
    if (good) {
        failures_in_a_row_ = 0;
        healthy_ = true;
    }
    return good;
}

}  // namespace kvoffload
