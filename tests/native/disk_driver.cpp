// Disk I/O under the sanitizers: writers and readers side by side on slots of their own, runs of adjacent
// slots, a slab that changes its group, a truncated file, a scan. Argument: a folder. Exits 0 if every byte
// is right.
#include <fcntl.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "disk_io.h"

using namespace kvoffload;

namespace {

constexpr std::int64_t kSlab = 1 << 18, kSlabs = 3, kBlock = 5000, kThreads = 3, kEach = 16;

void require(bool condition, const char* what) {
    if (condition) return;
    std::fprintf(stderr, "failed: %s\n", what);
    std::exit(1);
}

int open_file(const std::string& path, std::int64_t bytes) {
    const int file = ::open(path.c_str(), O_RDWR | O_CREAT | O_TRUNC, 0600);
    require(file >= 0 && ::ftruncate(file, bytes) == 0, "open");
    return file;
}

std::uint8_t content(std::int64_t key, std::int64_t byte) {
    return static_cast<std::uint8_t>(key * 13 + byte * 3);
}

struct World {
    SlotSpace space{kSlab, kSlabs, {8192, 4096}};
    std::unique_ptr<std::uint8_t, decltype(&std::free)> host{
        static_cast<std::uint8_t*>(std::aligned_alloc(4096, kSlab* kSlabs)), &std::free};
    std::uintptr_t base() const { return reinterpret_cast<std::uintptr_t>(host.get()); }
};

std::vector<BlockCopy> make_copies(std::int64_t worker, std::int64_t turn) {
    std::vector<BlockCopy> copies(kEach);
    for (std::int64_t i = 0; i < kEach; ++i) {
        const std::int64_t slot = worker << 16 | i;  // a slab each
        std::memcpy(copies[i].key, &turn, sizeof turn);
        copies[i].key[15] = static_cast<std::uint8_t>(worker * kEach + i);
        copies[i].host = copies[i].disk = static_cast<std::int32_t>(slot);
        copies[i].seq = static_cast<std::uint64_t>(turn * 1000 + i);
    }
    return copies;
}

void work(DiskIO& disk, World& world, std::int64_t worker) {
    std::vector<std::uint8_t> status(kEach);
    for (std::int64_t turn = 0; turn < 6; ++turn) {
        const auto copies = make_copies(worker, turn);
        for (std::int64_t i = 0; i < kEach; ++i) {
            std::uint8_t* slot = world.host.get() + world.space.offset(0, copies[i].host);
            for (std::int64_t b = 0; b < kBlock; ++b) slot[b] = content(turn * 100 + i, b);
        }
        disk.write(copies.data(), kEach, world.base(), world.space, status.data());
        for (const auto s : status) require(s == kOk, "write");
        for (const auto& copy : copies)
            std::memset(world.host.get() + world.space.offset(0, copy.host), 0, 8192);
        disk.read(copies.data(), kEach, world.base(), world.space, status.data());
        for (std::int64_t i = 0; i < kEach; ++i) {
            require(status[i] == kOk, "read");
            const std::uint8_t* slot = world.host.get() + world.space.offset(0, copies[i].host);
            for (std::int64_t b = 0; b < kBlock; ++b)
                require(slot[b] == content(turn * 100 + i, b), "content");
        }
    }
}

}  // namespace

int main(int, char** arguments) {
    const std::string folder = arguments[1];
    World world;
    std::memset(world.host.get(), 0, kSlab * kSlabs);
    const int slots = open_file(folder + "/slots", kSlab * kSlabs + 4096);
    const int table = open_file(folder + "/table", (kSlabs * (kSlab / 4096) + 1) * 64);
    const DiskIO::Files files{slots, table};
    const DiskIO::Options options{77, true, 4, 3};
    {
        DiskIO disk(files, world.space, {kBlock, 100}, options);
        require(disk.scan(kSlab * kSlabs).empty(), "empty at first");
        std::vector<std::thread> workers;
        for (std::int64_t w = 0; w < kThreads; ++w) workers.emplace_back([&, w] { work(disk, world, w); });
        for (auto& worker : workers) worker.join();
        require(disk.probe() && disk.healthy(), "probe");
    }
    DiskIO disk(files, world.space, {kBlock, 100}, options);
    require(disk.scan(kSlab * kSlabs).size() == kThreads * kEach, "the scan finds every block");

    auto copies = make_copies(0, 9);
    std::vector<std::uint8_t> status(kEach);
    for (auto& copy : copies) copy.group = 1;
    disk.write(copies.data(), kEach, world.base(), world.space, status.data());
    require(status[0] == kOk, "a slab of another group");
    require(disk.scan(kSlab * kSlabs).size() == kThreads * kEach, "which forgot the group before");

    require(::ftruncate(slots, kSlab + 100) == 0, "truncate");
    auto gone = make_copies(1, 5);
    disk.read(gone.data(), kEach, world.base(), world.space, status.data());
    for (const auto s : status) require(s == kReadFailed, "a short file is a miss");
    require(!disk.healthy(), "failures in a row are noticed");
    disk.close();
    disk.read(gone.data(), kEach, world.base(), world.space, status.data());
    require(status[0] == kNotDone, "after close nothing is done");
    ::close(slots);
    ::close(table);
    return 0;
}
