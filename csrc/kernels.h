// The copy kernel: pages <-> slots, for slots in a staging buffer or in mapped host memory.
//
// The body is a template over an index provider, so that the same arithmetic runs on CUDA, HIP, under NVRTC
// and on CPU threads. No shared memory, no barriers: each unit of work is done by one team of lanes alone.
#pragma once

#include "compat.h"

namespace kvoffload {

constexpr int32_t kTeam = 32;        // lanes that share a piece; half a wavefront on HIP
constexpr int32_t kUnroll = 4;       // independent 16-byte loads in flight per lane
constexpr int32_t kSlotPage = 4096;  // slots begin at multiples of this (SLOT_ALIGN)
constexpr int32_t kMaxItems = 448;   // by value in the 4 KiB of kernel parameters

// A part of a region's page, at most kMaxPiece bytes. Page p of it lies at `page_base + p * page_stride`, and
// within a slot it lies at `slot_offset`.
struct Piece {
    uint64_t page_base;
    int64_t page_stride;
    int64_t slot_offset;
    int32_t bytes;
    int32_t word;  // 16, 8, 4 or 1: divides page_base, page_stride and slot_offset
};

// One block: device page and the slot's place in units of kSlotPage from `slot_base`.
struct CopyItem {
    int32_t page;
    uint32_t slot;
};

struct CopyTask {
    const Piece* pieces;  // device memory: the pieces of one group
    int32_t first_piece, piece_count;
    int32_t item_count;
    int32_t to_pages;  // 0: page -> slot, else slot -> page
    uint64_t slot_base;
};

struct CopyArgs {
    CopyTask task;
    CopyItem items[kMaxItems];
};

template <class Word>
KVOFFLOAD_HD Word load_word(const Word* p) {
    return *p;
}
template <class Word>
KVOFFLOAD_HD void store_word(Word* p, Word v) {
    *p = v;
}
KVOFFLOAD_HD Word16 load_word(const Word16* p) { return load16(p); }
KVOFFLOAD_HD void store_word(Word16* p, Word16 v) { store16(p, v); }

// Copies bytes [0, bytes) by lanes `lane`, `lane + kTeam`, ...; the part behind the last whole word by bytes.
// REQUIRES: both addresses are multiples of sizeof(Word).
template <class Word>
KVOFFLOAD_HD void copy_words(uint64_t to, uint64_t from, int32_t bytes, int32_t lane) {
    const auto* source = reinterpret_cast<const Word*>(from);
    auto* target = reinterpret_cast<Word*>(to);
    const int32_t words = bytes / static_cast<int32_t>(sizeof(Word));
    int32_t i = lane;
    for (; i < words - (kUnroll - 1) * kTeam; i += kUnroll * kTeam) {
        const Word a = load_word(source + i);
        const Word b = load_word(source + i + kTeam);
        const Word c = load_word(source + i + 2 * kTeam);
        const Word d = load_word(source + i + 3 * kTeam);
        store_word(target + i, a);
        store_word(target + i + kTeam, b);
        store_word(target + i + 2 * kTeam, c);
        store_word(target + i + 3 * kTeam, d);
    }
    for (; i < words; i += kTeam) store_word(target + i, load_word(source + i));
    const auto* source_bytes = reinterpret_cast<const uint8_t*>(from);
    auto* target_bytes = reinterpret_cast<uint8_t*>(to);
    for (int32_t b = words * static_cast<int32_t>(sizeof(Word)) + lane; b < bytes; b += kTeam) {
        target_bytes[b] = source_bytes[b];
    }
}

// Teams take the (item, piece) pairs in turn; neighbouring teams take neighbouring pieces of one slot.
template <class Index>
KVOFFLOAD_HD void copy_body(const Index& index, const CopyTask& task, const CopyItem* items) {
    const int32_t teams = index.threads() / kTeam;
    const int32_t lane = index.thread() % kTeam;
    const int64_t units = static_cast<int64_t>(task.item_count) * task.piece_count;
    const int64_t first = index.block() * teams + index.thread() / kTeam;
    for (int64_t unit = first; unit < units; unit += index.blocks() * teams) {
        const CopyItem item = items[unit / task.piece_count];
        const Piece piece = task.pieces[task.first_piece + unit % task.piece_count];
        const uint64_t page = piece.page_base + static_cast<uint64_t>(item.page * piece.page_stride);
        const uint64_t slot = task.slot_base + static_cast<uint64_t>(item.slot) * kSlotPage +
                              static_cast<uint64_t>(piece.slot_offset);
        const uint64_t to = task.to_pages ? page : slot;
        const uint64_t from = task.to_pages ? slot : page;
        switch (piece.word) {
            case 16:
                copy_words<Word16>(to, from, piece.bytes, lane);
                break;
            case 8:
                copy_words<uint64_t>(to, from, piece.bytes, lane);
                break;
            case 4:
                copy_words<uint32_t>(to, from, piece.bytes, lane);
                break;
            default:
                copy_words<uint8_t>(to, from, piece.bytes, lane);
                break;
        }
    }
}

}  // namespace kvoffload
