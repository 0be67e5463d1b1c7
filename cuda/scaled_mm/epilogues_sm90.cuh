// The epilogue of CUTLASS' kernels. A tile's part of each term (scales, zero points, bias) is copied to shared memory.
// In some kernels a warp of its own copies it while the tile is multiplied, so that the tile's end does not wait for
// memory. Kernel arguments say which terms are present, their dtypes, and which dtype of its width the output has, so
// that one kernel serves all of these.
#pragma once

#include <algorithm>
#include <type_traits>
#include <utility>

#include "core/async_copy.cuh"
#include "cutlass/epilogue/fusion/sm90_visitor_tma_warpspecialized.hpp"
#include "scaled_mm/epilogue.cuh"
#include "scaled_mm/problem.h"

namespace jax_qmm::sm90 {

using namespace cute;
namespace fusion = cutlass::epilogue::fusion;

// The beginning of some rows of b, which are prefetched to L2 while the kernel before this one ends.
struct PrefetchedRows {
  void const* data;
  unsigned rows, lines;
  int64_t row_stride;

  __device__ void prefetch(unsigned threads) const { prefetch_l2(data, rows, lines, row_stride, threads); }
};

// 64 rows for each SM, and 2 MB in all, which is what memory delivers in that time: more would delay what follows.
inline PrefetchedRows prefetched_rows(ScaledMm const& p, int sm_count) {
  constexpr int kBytes = 2 << 20, kRowsOfTile = 64;
  int const rows = std::min(p.n, kRowsOfTile * sm_count);
  return {p.b, unsigned(rows), unsigned(std::min(kBytes / rows, p.k) / kLine), p.k};
}

// `ByLoadWarp`: the terms are copied by the warp that CUTLASS has for the loads of an epilogue, one tile ahead of the
// math warps. This pays where a tile's end is short, though each subtile costs a barrier and shared memory holds the
// terms of two tiles. Otherwise the math warps copy the terms when they have multiplied the tile.
template <DType In, class Bits, bool Swap, bool ByLoadWarp, class CtaTile, bool kFull>
struct Epilogue {
  static constexpr bool kInt8 = In == DType::kS8;
  static constexpr int kSlots = ByLoadWarp ? 2 : 1;  // the tiles whose terms shared memory has
  // The kernel's rows are M of the product, or N when the operands are swapped.
  static constexpr int kM = size<Swap ? 1 : 0>(CtaTile{}), kN = size<Swap ? 0 : 1>(CtaTile{});

  struct Arguments : EpilogueArgs<kFull> {
    PrefetchedRows rows_of_b;
  };
  using Params = Arguments;

  template <class T, bool kAlongRows>
  struct OfTile {
    static constexpr bool kOfRow = kAlongRows;
    static constexpr int kSize =
        std::is_same_v<T, float> || kInt8 ? (kOfRow ? kM : kN) : 4;  // fp8 has no integer terms
    T values[kSize];
  };
  struct OutputTerms {
    float out_scale[1];
    int32_t out_zero_point[1];
  };
  struct None {};
  struct alignas(16) Slot : Terms<kFull, OfTile>, std::conditional_t<kFull, OutputTerms, None> {};
  struct SharedStorage {
    Slot slots[kSlots];
  };

  static Arguments arguments(ScaledMm const& p, int sm_count) {
    return {epilogue_args<kFull>(p), prefetched_rows(p, sm_count)};
  }

  template <class ProblemShape>
  static constexpr Params to_underlying_arguments(ProblemShape const&, Arguments const& args, void*) {
    return args;
  }
  template <class ProblemShape>
  static size_t get_workspace_size(ProblemShape const&, Arguments const&) {
    return 0;
  }

  template <class ProblemShape>
  static bool can_implement(ProblemShape const&, Arguments const&) {
    return true;
  }

  Params params;
  Slot* slots;

  // CUTLASS' kernels make their epilogue before they wait for the kernel before them, and nothing else of ours: so this
  // constructor is where to prefetch from. CUTLASS compiles it for the host, too.
  CUTLASS_HOST_DEVICE Epilogue() {}
  CUTLASS_HOST_DEVICE Epilogue(Params const& params, SharedStorage const& storage)
      : params(params), slots(const_cast<Slot*>(storage.slots)) {
#ifdef __CUDA_ARCH__
    params.prefetch(blockDim.x);
    params.rows_of_b.prefetch(blockDim.x);
#endif
  }

  CUTLASS_DEVICE bool is_producer_load_needed() const { return ByLoadWarp; }
  CUTLASS_DEVICE bool is_C_load_needed() const { return false; }

  // Where a tile's terms are in global memory.
  struct Source {
    Params const& params;
    int l, m, n, m_end, n_end;

    template <class Args>
    CUTLASS_DEVICE Source(Params const& params, Args const& args) : params(params) {
      auto [rows, columns, k, batch] = args.problem_shape_mnkl;
      auto [row, column, _, entry] = args.tile_coord_mnkl;
      l = entry;
      m = (Swap ? column : row) * kM, m_end = Swap ? columns : rows;
      n = (Swap ? row : column) * kN, n_end = Swap ? rows : columns;
    }

    // A term's values from `begin` on, of which those from `end` on are never used.
    template <int Threads, class T, int kSize, class From>
    CUTLASS_DEVICE void copy(T (&to)[kSize], From const& from, int begin, int end, int thread) const {
      constexpr int kEach = (kSize + Threads - 1) / Threads;
      auto const each = [&](auto set) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kEach; ++i) {
          int const at = Threads * i + thread;
          if (kSize % Threads == 0 || at < kSize) set(i, to[at]);
        }
      };
      if (from.data == nullptr) return each([&](int, T& value) { value = from.absent; });
      from.with_data([&](auto const* data) {
        auto const source = [&](int i) {
          int const at = cute::min(begin + Threads * i + thread, end - 1);
          return data + l * from.batch_stride + at * from.stride;
        };
        if constexpr (sizeof(*data) == sizeof(T)) {
          each([&](int i, T& value) {
            copy_async<sizeof(T)>(cast_smem_ptr_to_uint(&value), reinterpret_cast<uint8_t const*>(source(i)), true);
          });
        } else {  // all are loaded before the first is stored
          T values[kEach];
          CUTLASS_PRAGMA_UNROLL
          for (int i = 0; i < kEach; ++i) values[i] = T(*source(i));
          each([&](int i, T& value) { value = values[i]; });
        }
      });
    }

    // All terms are on their way at once.
    template <int Threads>
    CUTLASS_DEVICE void copy_terms(Slot& to, int thread) const {
      asm volatile("" ::: "memory");  // CUTLASS' wait for the kernel before this one does not keep loads after it
      auto const copy_term = [&](auto& of_tile, auto const& from) {
        copy<Threads>(of_tile.values, from, of_tile.kOfRow ? m : n, of_tile.kOfRow ? m_end : n_end, thread);
      };
      each_term<kInt8>(copy_term, to, params);
      if constexpr (kFull) {
        copy<Threads>(to.out_scale, params.output.scale, 0, 1, thread);
        copy<Threads>(to.out_zero_point, params.output.zero_point, 0, 1, thread);
      }
      commit_copies();
      wait_for_copies<0>();
    }
  };

  // CUTLASS cuts a tile into subtiles, and counts them from the kernel's first tile on, in the load warp and in the
  // math warps alike.
  template <class EpilogueTile>
  static constexpr int kSubtiles = size(shape_div(take<0, 2>(CtaTile{}), EpilogueTile{}));

  // Which of the slots has the terms of a subtile's tile: tiles take turns. When the load warp comes to tile t + 2, it
  // may overwrite tile t's slot: it passes CUTLASS' pipeline of subtiles first, whose stages are no more than a tile
  // has subtiles (gemm_sm90.cuh asserts this), so that the math warps have released all of tile t.
  template <class EpilogueTile>
  CUTLASS_DEVICE static int slot(int subtile) {
    return subtile / kSubtiles<EpilogueTile> % kSlots;
  }

  template <class EpilogueTile>
  struct Producer : fusion::EmptyProducerLoadCallbacks {
    Source source;
    Slot* slots;
    int lane;

    CUTLASS_DEVICE Producer(Source const& source, Slot* slots, int lane) : source(source), slots(slots), lane(lane) {}

    CUTLASS_DEVICE void step(uint64_t*, int epi_m, int epi_n, int subtile, bool) const {
      if (epi_m == 0 && epi_n == 0) source.template copy_terms<32>(slots[slot<EpilogueTile>(subtile)], lane);
    }
  };

  template <class... Args>
  CUTLASS_DEVICE auto get_producer_load_callbacks(fusion::ProducerLoadArgs<Args...> const& args) {
    return Producer<decltype(args.epi_tile)>(Source(params, args), slots, args.thread_idx);
  }

  // A thread's part of a term, for the fragments of a subtile. The full epilogue has no registers to keep it in, and
  // reads it from shared memory again for each fragment.
  template <class T, bool AlongRows, class SmemTensor, class RegTensor>
  struct Operand {
    SmemTensor smem;          // (CPY, CPY_M, CPY_N, EPI_M, EPI_N, slot)
    RegTensor values;         // (CPY, CPY_M, CPY_N)
    int of_m, of_n, of_slot;  // the subtile, and where its tile's terms are

    CUTLASS_DEVICE void load(int epi_m, int epi_n, int slot) {
      of_m = epi_m, of_n = epi_n, of_slot = slot;
      if (kFull) return;
      if (!AlongRows && epi_m > 0) return;  // subtiles are visited along M first
      copy_aligned(filter_zeros(smem(_, _, _, epi_m, epi_n, slot)), filter(values));
    }
    template <int N>
    CUTLASS_DEVICE cutlass::Array<T, N> fragment(int epi_v) const {
      cutlass::Array<T, N> part;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < N; ++i) {
        part[i] = kFull ? smem(_, _, _, of_m, of_n, of_slot)(epi_v * N + i) : values(epi_v * N + i);
      }
      return part;
    }
  };

  template <bool AlongM, bool ReferenceSrc, class T, class Args>
  CUTLASS_DEVICE static auto operand(T* first_slot, Args const& args) {
    constexpr bool kAlongRows = AlongM != Swap;
    auto const shape = append(take<0, 2>(CtaTile{}), Int<kSlots>{});
    Tensor vectors = make_tensor(make_smem_ptr(first_slot), shape,
                                 make_stride(Int<kAlongRows>{}, Int<!kAlongRows>{}, Int<sizeof(Slot) / sizeof(T)>{}));
    Tensor smem =
        fusion::sm90_partition_for_epilogue<ReferenceSrc>(vectors, args.epi_tile, args.tiled_copy, args.thread_idx);
    Tensor values = make_tensor_like<T>(take<0, 3>(smem));
    return Operand<T, kAlongRows, decltype(smem), decltype(values)>{smem, values};
  }

  template <bool ReferenceSrc, class Args>
  struct Operands {
    template <class T, bool kOfRow>
    using Of = decltype(operand<kOfRow, ReferenceSrc>(std::declval<T*>(), std::declval<Args const&>()));
  };
  template <int N>
  struct Fragment {
    template <class T, bool kOfRow>
    using Of = cutlass::Array<T, N>;
  };

  template <class EpilogueTile, int Threads, class OperandTerms>
  struct Consumer : fusion::EmptyConsumerStoreCallbacks {
    Source source;
    Slot* slots;
    int thread;
    OperandTerms operands;
    decltype(std::declval<Params const&>().output.of(1.0f, 0)) output;

    CUTLASS_DEVICE Consumer(Source const& source, Slot* slots, int thread, OperandTerms const& operands)
        : source(source), slots(slots), thread(thread), operands(operands), output(source.params.output.of(1.0f, 0)) {}

    CUTLASS_DEVICE void begin() {
      if constexpr (!ByLoadWarp) source.template copy_terms<Threads>(*slots, thread);
    }
    CUTLASS_DEVICE bool begin_sync_needed() const { return !ByLoadWarp; }

    CUTLASS_DEVICE void previsit(int epi_m, int epi_n, int subtile, bool) {
      int const at = slot<EpilogueTile>(subtile);
      each_term<kInt8>([&](auto& operand) { operand.load(epi_m, epi_n, at); }, operands);
      if constexpr (kFull) {
        if (epi_m > 0 || epi_n > 0) return;
        output = source.params.output.of(slots[at].out_scale[0], slots[at].out_zero_point[0]);
      }
    }

    template <class Accumulator, int N>
    CUTLASS_DEVICE cutlass::Array<Bits, N> visit(cutlass::Array<Accumulator, N> const& acc, int epi_v, int, int) {
      auto const terms = [&](auto with_integers) {
        Terms<kFull, Fragment<N>::template Of> fragments;
        each_term<with_integers>([&](auto& to, auto const& operand) { to = operand.template fragment<N>(epi_v); },
                                 fragments, operands);
        return [=](int i) { return map_terms<Value>([&](auto const& fragment) { return fragment[i]; }, fragments); };
      };
      auto sums = acc;
      if (!kFull || source.params.has_zero_points()) {
        auto const all = terms(bool_constant<kInt8>());
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < N; ++i) sums[i] = subtract_zero_points(sums[i], all(i));
      }
      auto const floats = terms(false_type());
      cutlass::Array<float, N> values;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < N; ++i) values[i] = scale(sums[i], floats(i));
      return output.template round<cutlass::Array<Bits, N>, N>(values, acc);
    }
  };

  template <bool ReferenceSrc, class... Args>
  CUTLASS_DEVICE auto get_consumer_store_callbacks(fusion::ConsumerStoreArgs<Args...> const& args) {
    using OperandTerms = Terms<kFull, Operands<ReferenceSrc, fusion::ConsumerStoreArgs<Args...>>::template Of>;
    auto const to_operand = [&](auto& of_tile) { return operand<of_tile.kOfRow, ReferenceSrc>(of_tile.values, args); };
    return Consumer<decltype(args.epi_tile), decltype(size(args.tiled_copy))::value, OperandTerms>(
        Source(params, args), slots, args.thread_idx,
        map_terms<Operands<ReferenceSrc, fusion::ConsumerStoreArgs<Args...>>::template Of>(to_operand, *slots));
  }
};

}  // namespace jax_qmm::sm90
