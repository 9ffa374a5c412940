// The device copier on the simulated runtime, without Python: every mode, odd sizes, ids out of range, rings
// that go round, loads by layers, several threads at once, failing launches, and close with copies under way.
#include <sys/mman.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <thread>
#include <vector>

#include "gpu.h"
#include "gpu_copier.h"
#include "sim_runtime.h"

namespace {

using namespace kvoffload;

#define CHECK(what)                                                \
    do {                                                           \
        if (!(what)) {                                             \
            std::printf("%s:%d: %s\n", __FILE__, __LINE__, #what); \
            std::exit(1);                                          \
        }                                                          \
    } while (false)

constexpr std::int64_t kSlab = 1 << 20;
constexpr std::int64_t kSlabs = 2;
constexpr int kPages = 40;

// Pages in allocations of exactly their size, so that a byte too far is seen; slots in a mapping.
struct World {
    std::vector<std::int64_t> sizes;
    std::vector<std::unique_ptr<std::uint8_t[]>> memory;
    std::int64_t block = 0, slot = 0;
    std::uint8_t* host;
    std::unique_ptr<GpuCopier> copier;
    std::uintptr_t stream = 0, event = 0;

    World(std::vector<std::int64_t> page_bytes, CopyMode mode, bool pinned, std::int64_t staging = 512 << 10)
        : sizes(std::move(page_bytes)) {
        std::vector<PageRegion> regions;
        for (const std::int64_t size : sizes) {
            memory.emplace_back(new std::uint8_t[size * kPages]);
            regions.push_back({reinterpret_cast<std::uintptr_t>(memory.back().get()), size, size, kPages});
            block += size;
        }
        slot = (block + kSlotAlign - 1) / kSlotAlign * kSlotAlign;
        host = static_cast<std::uint8_t*>(
            mmap(nullptr, kSlab * kSlabs, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
        CopierOptions options;
        options.chunk = 64 << 10;
        options.store_staging = staging;
        options.load_staging = 128 << 10;
        options.batch_limit = 5;
        const auto base = reinterpret_cast<std::uintptr_t>(host);
        copier = std::make_unique<GpuCopier>(options, base, SlotSpace(kSlab, kSlabs, {slot}),
                                             std::vector<std::vector<PageRegion>>{regions},
                                             std::vector<std::pair<CopyMode, CopyMode>>{{mode, mode}});
        for (std::int64_t slab = 0; slab < kSlabs && pinned; ++slab) {
            CHECK(gpu::host_register(base + slab * kSlab, kSlab) == gpu::kOkay);
            copier->add_pinned(base + slab * kSlab, kSlab);
        }
        CHECK(gpu::stream_create(&stream, false) == gpu::kOkay);
        CHECK(gpu::event_create(&event) == gpu::kOkay);
        mark();
    }

    ~World() {
        copier->close();
        CHECK(gpu::stream_synchronize(stream) == gpu::kOkay);
        gpu::event_destroy(event);
        gpu::stream_destroy(stream);
        const auto base = reinterpret_cast<std::uintptr_t>(host);
        for (std::int64_t slab = 0; slab < kSlabs; ++slab) gpu::host_unregister(base + slab * kSlab);
        munmap(host, kSlab * kSlabs);
    }

    // As after a failed lock of a later slab: everything is unlocked, under no copy.
    void unlock() {
        copier->withdraw_pinned();
        const auto base = reinterpret_cast<std::uintptr_t>(host);
        for (std::int64_t slab = 0; slab < kSlabs; ++slab) {
            CHECK(gpu::host_unregister(base + slab * kSlab) == gpu::kOkay);
        }
        copier->forget_pinned();
    }

    void mark() { CHECK(gpu::event_record(event, stream) == gpu::kOkay); }

    static std::uint8_t oracle(int number, std::int64_t byte) {
        return static_cast<std::uint8_t>(number * 131 + byte * 7 + (byte >> 8) * 13 + 1);
    }

    std::uint8_t* at(std::int64_t place) const { return host + place * slot; }

    void paint(int page, int number) {
        std::int64_t byte = 0;
        for (std::size_t r = 0; r < sizes.size(); ++r) {
            for (std::int64_t i = 0; i < sizes[r]; ++i)
                memory[r][page * sizes[r] + i] = oracle(number, byte++);
        }
    }

    bool page_is(int page, int number) const {
        std::int64_t byte = 0;
        for (std::size_t r = 0; r < sizes.size(); ++r) {
            for (std::int64_t i = 0; i < sizes[r]; ++i) {
                if (memory[r][page * sizes[r] + i] != oracle(number, byte++)) return false;
            }
        }
        return true;
    }

    void fill_slot(int place, int number) const {
        for (std::int64_t i = 0; i < block; ++i) at(place)[i] = oracle(number, i);
    }

    bool slot_is(int place, int number) const {
        for (std::int64_t i = 0; i < block; ++i) {
            if (at(place)[i] != oracle(number, i)) return false;
        }
        return true;
    }

    std::vector<std::uint8_t> end(std::int64_t handle) const {
        CHECK(copier->wait(handle, 60.0));
        std::vector<std::uint8_t> status;
        CHECK(copier->query(handle, &status));
        CHECK(!copier->known(handle));
        return status;
    }

    std::vector<std::uint8_t> run(const std::vector<BlockCopy>& copies, bool to_device) {
        mark();
        return end(copier->submit(copies.data(), static_cast<std::int64_t>(copies.size()), to_device, event,
                                  stream));
    }
};

BlockCopy copy_of(int page, int place) {
    BlockCopy copy{};
    copy.page = page;
    copy.host = place;
    return copy;
}

bool all_ok(const std::vector<std::uint8_t>& status) {
    for (const std::uint8_t s : status) {
        if (s != kOk) return false;
    }
    return true;
}

// Pages in falling order into every third slot and back into other pages.
void round_trip(World& world) {
    std::vector<BlockCopy> out, in;
    for (int i = 0; i < 10; ++i) {
        const int page = kPages - 1 - 3 * i;
        world.paint(page, i);
        out.push_back(copy_of(page, (7 * i) % 11));
        in.push_back(copy_of(2 * i, (7 * i) % 11));
    }
    CHECK(all_ok(world.run(out, false)));
    for (int i = 0; i < 10; ++i) CHECK(world.slot_is((7 * i) % 11, i));
    CHECK(all_ok(world.run(in, true)));
    for (int i = 0; i < 10; ++i) CHECK(world.page_is(2 * i, i));
}

void test_bad_ids(World& world) {
    std::vector<BlockCopy> copies{copy_of(0, 0),         copy_of(-1, 1),         copy_of(kPages, 2),
                                  copy_of(1, -1),        copy_of(1, 0x7FFFFFFF), copy_of(2, 0),
                                  copy_of(kPages - 1, 3)};
    copies[0].flags = kCopyWait;
    for (const bool to_device : {false, true}) {
        const std::vector<std::uint8_t> status = world.run(copies, to_device);
        for (std::size_t i = 0; i < 5; ++i) CHECK(status[i] == kCopyFailed);
        CHECK(status[5] == kOk && status[6] == kOk);
    }
}

// The second of two equal destinations is not copied: it would race with the first.
void test_equal_destinations(World& world) {
    world.paint(3, 33);
    world.fill_slot(4, 44);
    CHECK((world.run({copy_of(3, 1), copy_of(9, 1), copy_of(9, 2)}, false) ==
           std::vector<std::uint8_t>{kOk, kCopyFailed, kOk}));
    CHECK(world.slot_is(1, 33));
    CHECK((world.run({copy_of(7, 4), copy_of(7, 2)}, true) == std::vector<std::uint8_t>{kOk, kCopyFailed}));
    CHECK(world.page_is(7, 44));
}

void test_layers(World& world) {
    const std::vector<BlockCopy> copies{copy_of(5, 1), copy_of(6, 2)};
    world.fill_slot(1, 21);
    world.fill_slot(2, 22);
    std::vector<int> layers;
    for (std::size_t r = 0; r < world.sizes.size(); ++r) layers.push_back(static_cast<int>(r / 2));
    world.mark();
    const std::int64_t handle = world.copier->submit_layers(copies.data(), 2, world.event, layers);
    for (int layer = 0; layer <= layers.back(); ++layer) {
        CHECK(world.copier->wait_layer(handle, layer, world.stream) == gpu::kOkay);
    }
    CHECK(gpu::stream_synchronize(world.stream) == gpu::kOkay);
    CHECK(world.page_is(5, 21) && world.page_is(6, 22));
    CHECK(all_ok(world.end(handle)));
}

// A store keeps what its pages held, though the stream writes them again right behind it.
void test_overwritten_pages(World& world) {
    for (int turn = 0; turn < 6; ++turn) {
        std::vector<BlockCopy> copies;
        for (int i = 0; i < 4; ++i) {
            world.paint(i, turn * 10 + i);
            copies.push_back(copy_of(i, i));
        }
        world.mark();
        const std::int64_t handle = world.copier->submit(copies.data(), 4, false, world.event, world.stream);
        for (std::size_t r = 0; r < world.sizes.size(); ++r) {
            const auto base = reinterpret_cast<std::uintptr_t>(world.memory[r].get());
            CHECK(gpu::fill(base, 0xEE, 4 * world.sizes[r], world.stream) == gpu::kOkay);
        }
        CHECK(all_ok(world.end(handle)));
        for (int i = 0; i < 4; ++i) CHECK(world.slot_is(i, turn * 10 + i));
        CHECK(gpu::stream_synchronize(world.stream) == gpu::kOkay);
    }
}

// Four threads store and load blocks of their own at the same time, through one copier and small rings.
void test_threads(World& world) {
    for (int page = 0; page < kPages; ++page) world.paint(page, page);
    world.mark();
    std::atomic<int> stored{0};
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; ++t) {
        threads.emplace_back([&world, &stored, t] {
            std::uintptr_t event = 0, stream = 0;
            CHECK(gpu::stream_create(&stream, false) == gpu::kOkay &&
                  gpu::event_create(&event) == gpu::kOkay);
            CHECK(gpu::event_record(event, stream) == gpu::kOkay);
            for (int turn = 0; turn < 8; ++turn) {
                const std::vector<BlockCopy> copies{copy_of(t * 5, t * 2), copy_of(t * 5 + 1, t * 2 + 1)};
                const std::vector<BlockCopy> back{copy_of(t * 5 + 2, t * 2), copy_of(t * 5 + 3, t * 2 + 1)};
                auto status = world.end(world.copier->submit(copies.data(), 2, false, event, stream));
                if (!all_ok(status)) continue;
                ++stored;
                CHECK(all_ok(world.end(world.copier->submit(back.data(), 2, true, event, stream))));
                CHECK(world.page_is(t * 5 + 2, t * 5) && world.page_is(t * 5 + 3, t * 5 + 1));
            }
            CHECK(gpu::stream_synchronize(stream) == gpu::kOkay);
            gpu::event_destroy(event);
            gpu::stream_destroy(stream);
        });
    }
    world.unlock();
    for (std::thread& thread : threads) thread.join();
    CHECK(stored > 0);
}

void test_failures(World& world) {
    for (const char* plant : {"launch_at", "copy_at"}) {
        for (const bool to_device : {false, true}) {
            sim::plant(plant, 1);
            world.run({copy_of(1, 1), copy_of(2, 4)}, to_device);
            sim::clear_plants();
            world.paint(1, 77);
            CHECK(all_ok(world.run({copy_of(1, 1)}, false)));
            CHECK(world.slot_is(1, 77));
        }
    }
    sim::plant("batch_error", 801);
    round_trip(world);
    sim::clear_plants();
}

void test_close(World& world) {
    sim::plant("copy_delay_us", 300);
    std::vector<std::int64_t> handles;
    for (int i = 0; i < 6; ++i) {
        const std::vector<BlockCopy> copies{copy_of(i, i), copy_of(i + 10, i + 6)};
        handles.push_back(world.copier->submit(copies.data(), 2, i % 2 == 1, world.event, world.stream));
    }
    world.copier->close();
    for (const std::int64_t handle : handles) {
        for (const std::uint8_t status : world.end(handle)) CHECK(status == kOk || status == kNotDone);
    }
    sim::clear_plants();
}

// Memory that is registered while a copy of it runs is not held by that copy.
void test_registered_meanwhile() {
    std::vector<std::uint8_t> pages(4096, 7), slots(4096);
    simStream_t stream;
    CHECK(simStreamCreateWithPriority(&stream, 0, 0) == simSuccess);
    sim::plant("copy_delay_us", 20'000);
    void* const to = slots.data();
    const void* const from = pages.data();
    const std::size_t bytes = slots.size(), first = 0;
    const int order = simMemcpySrcAccessOrderStream;
    CHECK(simMemcpyBatchAsync(&to, &from, &bytes, 1, &order, &first, 1, stream) == simSuccess);
    CHECK(simHostRegister(to, bytes, 0) == simSuccess);
    CHECK(simStreamSynchronize(stream) == simSuccess);
    CHECK(simHostUnregister(to) == simSuccess);
    CHECK(slots == pages);
    CHECK(simStreamDestroy(stream) == simSuccess);
    sim::clear_plants();
}

}  // namespace

int main() {
    test_registered_meanwhile();
    const std::vector<std::vector<std::int64_t>> layouts{
        {4096, 4096}, {7, 656, 1, 33}, {1}, {40000}, {16384, 16400}};
    for (const auto& sizes : layouts) {
        for (const CopyMode mode : {CopyMode::kStaged, CopyMode::kDma, CopyMode::kKernel}) {
            for (const bool pinned : {true, false}) {
                for (const int workers : {1, 2, 3}) {
                    sim::plant("workers", workers);
                    World world(sizes, mode, pinned);
                    round_trip(world);
                    test_bad_ids(world);
                    test_equal_destinations(world);
                    test_layers(world);
                    test_overwritten_pages(world);
                    test_failures(world);
                    sim::forget_operations();
                }
            }
            World world(sizes, mode, true, 128 << 10);
            test_threads(world);
            test_close(world);
        }
    }
    std::printf("gpu_sim: ok\n");
    return 0;
}
