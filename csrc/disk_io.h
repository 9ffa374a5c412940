// Slot file I/O of the disk tier: payloads, records and checksums, on its own threads.
//
// Payload first, record after; a record vouches for its payload by checksum, so that nothing needs an fsync
// and a torn, stale or rotted slot reads as a miss. Slots adjacent on disk move in one system call. Thread:
// `read` and `write` from any number of threads, never two on the same slot; the rest alone. Lifetime: the
// files stay open, and the host slots mapped, as long as a call runs. Files are not closed here.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <vector>

#include "block_copy.h"
#include "disk_table.h"
#include "file_io.h"
#include "slots.h"
#include "thread_pool.h"

namespace kvoffload {

struct DiskCounters {
    std::atomic<std::int64_t> blocks_read{0}, blocks_written{0}, bytes_read{0}, bytes_written{0};
    std::atomic<std::int64_t> mismatches{
        0};  // no valid record of the key, or a payload that is not the record's
    std::atomic<std::int64_t> io_errors{0};   // slots not moved, payload or record
    std::atomic<std::int64_t> last_errno{0};  // of the last such slot, 0 = the file was short
};

class DiskIO {
  public:
    struct Files {
        int slots;  // O_DIRECT or buffered, opened read-write
        int table;  // buffered, opened read-write
    };
    struct Options {
        std::uint64_t epoch;  // seeds every record check: records of another epoch are free slots
        bool checksum;        // false: payloads are not verified, and no record of an earlier process counts
        int threads;          // of each direction; the queue depth
        int error_limit;      // consecutive failed transfers after which healthy() is false
    };

    // block_bytes: by group, below 2^32. The slot file holds `space`, then one page for `probe`.
    DiskIO(Files files, SlotSpace space, std::vector<std::int64_t> block_bytes, Options options);
    ~DiskIO();

    // Bytes of the table file: a record per slot of the group with the smallest slots, and one for `probe`.
    std::int64_t table_bytes() const { return (space_.slabs() * records_per_slab_ + 1) * kRecordBytes; }

    // Bytes of the slot file.
    std::int64_t slots_bytes() const { return space_.slabs() * space_.slab_bytes() + kSlotAlign; }

    // Fills host slots; status kReadFailed where the bytes are not exactly the key's. Blocks the caller.
    // REQUIRES: host slots lie at multiples of kSlotAlign.
    void read(const BlockCopy* copies, std::int64_t count, std::uintptr_t host_base, const SlotSpace& host,
              std::uint8_t* status);

    // Stores host slots; status kCopyFailed where that did not happen. Blocks the caller.
    void write(const BlockCopy* copies, std::int64_t count, std::uintptr_t host_base, const SlotSpace& host,
               std::uint8_t* status);

    // All blocks with a valid record whose slot ends within the first `slot_file_bytes`. A slab with records
    // of several groups counts as free: a power failure may leave that, nothing else. Reads the table only.
    // REQUIRES: before any write.
    std::vector<FoundBlock> scan(std::int64_t slot_file_bytes);

    // Every record so far is invalid from now on.
    void reset(std::uint64_t epoch);

    // Writes and reads a page that belongs to no slot, and a record. True where both worked; then healthy()
    // is true.
    bool probe();

    // False after error_limit consecutive failed transfers, until `probe` succeeds.
    bool healthy() const { return healthy_.load(); }

    const DiskCounters& counters() const { return counters_; }

    // Ends running calls (what was not begun gets kNotDone) and joins the threads. Idempotent.
    void close();

  private:
    static constexpr std::int64_t kRecordBytes = sizeof(DiskRecord);
    static constexpr std::int32_t kNobody = -1, kSeveral = -2;  // owners that are no group

    // A slot of a batch with the places it was resolved to. `copy` is the position in the caller's array.
    struct Item {
        std::int64_t copy, disk, record, bytes;  // bytes: whole slots
        std::uint8_t* host;
    };
    // Items [begin, end) are adjacent on disk, in the table too.
    struct Run {
        std::int64_t begin, end;
    };
    struct Call;  // one read or write

    std::vector<Item> resolve(const Call& call) const;
    static std::vector<Run> split(const std::vector<Item>& items);
    static std::vector<Part> parts(const std::vector<Item>& items, Run run);
    void read_run(const Call& call, const std::vector<Item>& items, Run run);
    void write_run(const Call& call, const std::vector<Item>& items, Run run, DiskRecord* records,
                   int* errors);
    void write_records(const std::vector<Item>& items, std::vector<DiskRecord>& records, int* errors);
    void finish_write(const Call& call, const Item& item, int error);
    bool claim(const Item& item, std::int32_t group);
    bool matches(const DiskRecord& record, const BlockCopy& copy, const std::uint8_t* data) const;
    bool stands(const DiskRecord& record, std::int32_t slot, std::int64_t slot_file_bytes) const;
    void note(int error);

    // Constant after construction.
    const Files files_;
    const SlotSpace space_;
    const std::vector<std::int64_t> block_bytes_;
    const std::int64_t records_per_slab_;
    const bool checksum_;
    const int error_limit_;

    std::atomic<std::uint64_t> epoch_;  // changed by reset only, also while reads run

    std::mutex claims_;
    std::vector<std::int32_t> owner_;  // by slab: whose valid records lie in the table; protected by claims_

    std::atomic<std::int64_t> failures_in_a_row_{0};
    std::atomic<bool> healthy_{true};
    DiskCounters counters_;

    ThreadPool readers_, writers_;  // last: their threads end before anything they use
};

}  // namespace kvoffload
