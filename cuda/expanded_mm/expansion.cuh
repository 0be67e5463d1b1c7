// How int4 becomes int8.
#pragma once

#include "core/async_copy.cuh"
#include "expanded_mm/expanded_mm.h"

namespace jax_qmm::expanded {

// What makes four int8 of four nibbles, each plus 8: with these in the bytes of a word, `nibbles * multiple + shift`
// has 128 more than the int8 in each byte. That is 0 to 255, so whatever bytes borrow in between, none is left.
struct Expansion {
  uint32_t multiple = 0, shift = 0x80808080;

  Expansion() = default;
  __device__ Expansion(int multiple, int zero_point)
      : multiple(multiple), shift(0x80808080 - uint32_t(multiple * (8 + zero_point)) * 0x01010101) {}

  __device__ uint32_t operator()(uint32_t nibbles) const { return nibbles * multiple + shift ^ 0x80808080; }

  // The int8 of the eight values of a word: the even ones, then the odd ones.
  __device__ void make(uint32_t word, uint32_t& even, uint32_t& odd) const {
    uint32_t const bits = word ^ 0x88888888;  // plus 8
    even = (*this)(bits & 0x0f0f0f0f);
    odd = (*this)(bits >> 4 & 0x0f0f0f0f);
  }

  // In their order: the first four, then the others.
  __device__ void make_in_order(uint32_t word, uint32_t& first, uint32_t& last) const {
    uint32_t even, odd;
    make(word, even, odd);
    first = __byte_perm(even, odd, 0x5140), last = __byte_perm(even, odd, 0x7362);
  }
};

// What a kernel is told of the blocks of w.
struct Blocks {
  int8_t const *multiple, *zero_point;
  int64_t multiple_batch_stride, zero_point_batch_stride;
  int block, groups;

  explicit Blocks(ExpandedMm const& p)
      : multiple(p.multiple),
        zero_point(p.zero_point),
        multiple_batch_stride(p.multiple_batch_stride),
        zero_point_batch_stride(p.zero_point_batch_stride),
        block(p.block),
        groups(p.groups()) {}
};

// The multiple and the zero point of a block, as loads that nothing waits for yet.
struct OfBlock {
  int multiple = 0, zero_point = 0;

  OfBlock() = default;
  __device__ OfBlock(Blocks const& blocks, int l, int n, int group) {
    int64_t const at = int64_t(n) * blocks.groups + group;
    multiple = blocks.multiple[l * blocks.multiple_batch_stride + at];
    if (blocks.zero_point != nullptr) zero_point = blocks.zero_point[l * blocks.zero_point_batch_stride + at];
  }

  __device__ Expansion expansion() const { return {multiple, zero_point}; }
};

// Some rows of w on their way to a tile of int8 in shared memory, by some threads. A thread copies 16 bytes of every
// few rows to where the first half of their 32 int8 will be, and makes those in place when the copies are there: nobody
// else needs to know of either. Steps of K come one after another.
template <int TileN, int TileK, int Threads>
class Expanding {
 public:
  __device__ Expanding(uint8_t const* w, Blocks const& blocks, int l, int first_n, int n, int k, int thread)
      : blocks_(blocks), l_(l), first_n_(first_n + thread / kChunks), n_(n), k_(k), chunk_(thread % kChunks) {
    at_ = swizzled<TileK>(thread / kChunks, 2 * chunk_);
#pragma unroll
    for (int i = 0; i < kCopies; ++i) from_[i] = w + (int64_t(row(i)) * k + ExpandedMm::kColumns * chunk_) / 2;
  }

  // Starts the copies of a step of K to a tile. Behind K come zeros.
  __device__ void copy(uint32_t tile, int k_begin) const {
    bool const there = k_begin + ExpandedMm::kColumns * chunk_ < k_;
#pragma unroll
    for (int i = 0; i < kCopies; ++i) copy_async<16>(tile + at_ + i * kApart, from_[i] + k_begin / 2, there);
  }

  // Makes int8 of them, with the blocks that were loaded last.
  __device__ void make(uint32_t tile) const {
    uint32_t words[kCopies][4];  // all are loaded before the first is used
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(words[i][0]), "=r"(words[i][1]), "=r"(words[i][2]), "=r"(words[i][3])
                   : "r"(tile + at_ + i * kApart)
                   : "memory");
    }
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      uint32_t const first = tile + at_ + i * kApart;
      uint32_t out[8];
      Expansion const expansion = of_blocks_[i].expansion();
#pragma unroll
      for (int word = 0; word < 4; ++word) {
        expansion.make_in_order(words[i][word], out[2 * word], out[2 * word + 1]);
      }
      store(first, out);
      store(first ^ 16, out + 4);
    }
  }

  // Of a step of K that becomes int8 next.
  __device__ void load_blocks(int k_begin) {
    int const column = k_begin + ExpandedMm::kColumns * chunk_;
    if (column >= k_) return;
    int const group = column / blocks_.block;
#pragma unroll
    for (int i = 0; i < kCopies; ++i) of_blocks_[i] = OfBlock(blocks_, l_, row(i), group);
  }

 private:
  static constexpr int kChunks = TileK / ExpandedMm::kColumns, kRowsAtOnce = Threads / kChunks;
  static constexpr int kCopies = TileN / kRowsAtOnce, kApart = kRowsAtOnce * TileK;
  static_assert(kRowsAtOnce % 8 == 0 && TileN % kRowsAtOnce == 0, "the threads have whole groups of 8 rows");

  // Rows beyond the matrix repeat its last one.
  __device__ int row(int i) const { return min(first_n_ + i * kRowsAtOnce, n_ - 1); }

  __device__ static void store(uint32_t to, uint32_t const* words) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(words[0]), "r"(words[1]), "r"(words[2]),
                 "r"(words[3])
                 : "memory");
  }

  Blocks const& blocks_;
  int l_, first_n_, n_, k_, chunk_;
  uint32_t at_;
  uint8_t const* from_[kCopies];
  OfBlock of_blocks_[kCopies];  // of the step that becomes int8 next
};

}  // namespace jax_qmm::expanded
