// The epilogue of CUTLASS' kernels. It has a tile's part of the scales, zero points and bias in shared memory: there a
// warp of its own may bring them while the tile is multiplied, so that its end does not wait for memory. Which vectors
// are present, their dtypes, and the dtype within the output's width are kernel arguments, so that one kernel serves
// them all.
#pragma once

#include <algorithm>

#include "cutlass/epilogue/fusion/sm90_visitor_tma_warpspecialized.hpp"
#include "scaled_mm/epilogue.cuh"
#include "scaled_mm/scaled_mm.h"

namespace jax_qmm::sm90 {

using namespace cute;
namespace fusion = cutlass::epilogue::fusion;

// The first lines of rows of b, brought into L2 while the kernel before this one ends.
struct Weights {
  void const* data;
  unsigned rows, lines;
  int64_t row_stride;

  __device__ void prefetch(unsigned threads) const { prefetch_l2(data, rows, lines, row_stride, threads); }
};

// Of 64 rows for each SM, up to 2 MB together, which is what memory delivers meanwhile: more delays the rest.
inline Weights weights(ScaledMm const& p, int sm_count) {
  constexpr int kBytes = 2 << 20, kRowsOfTile = 64;
  int const rows = std::min(p.n, kRowsOfTile * sm_count);
  return {p.b, unsigned(rows), unsigned(std::min(kBytes / rows, p.k) / kLine), p.k};
}

// `Ahead`: the vectors are brought by the warp that CUTLASS has for loads of an epilogue. It pays where a tile's end is
// short; each subtile costs a barrier, and shared memory holds the vectors of two tiles.
template <DType In, class Bits, bool Swap, bool Ahead, class CtaTile>
struct Epilogue {
  static constexpr bool kInt8 = In == DType::kS8;
  static constexpr int kSlots = Ahead ? 2 : 1;
  // The kernel's rows are M of the product, or N when the operands are swapped.
  static constexpr int kM = size<Swap ? 1 : 0>(CtaTile{}), kN = size<Swap ? 0 : 1>(CtaTile{});

  struct Arguments : EpilogueArgs {
    Weights weights;
  };
  using Params = Arguments;

  struct alignas(16) Vectors {
    float scale_a[kM], scale_b[kN], bias[kN];
    int32_t azp[kInt8 ? kM : 4], azp_adj[kInt8 ? kN : 4];  // unused of fp8
  };
  struct SharedStorage {
    Vectors slots[kSlots];
  };

  static Arguments arguments(ScaledMm const& p, int sm_count) { return {epilogue_args(p), weights(p, sm_count)}; }

  template <class ProblemShape>
  static constexpr Params to_underlying_arguments(ProblemShape const&, Arguments const& args, void*) {
    return args;
  }
  template <class ProblemShape>
  static size_t get_workspace_size(ProblemShape const&, Arguments const&) {
    return 0;
  }

  Params params;
  Vectors* slots;

  // Of all that CUTLASS' kernels do before they wait for the one before them, making this is what is open to us.
  // CUTLASS has it compile for the host, too.
  CUTLASS_HOST_DEVICE Epilogue() {}
  CUTLASS_HOST_DEVICE Epilogue(Params const& params, SharedStorage const& storage)
      : params(params), slots(const_cast<Vectors*>(storage.slots)) {
#ifdef __CUDA_ARCH__
    params.prefetch(blockDim.x);
    params.weights.prefetch(blockDim.x);
#endif
  }

  CUTLASS_DEVICE bool is_producer_load_needed() const { return Ahead; }
  CUTLASS_DEVICE bool is_C_load_needed() const { return false; }

  // Where a tile's vectors are, and what brings them.
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

    // All loads are on their way before the first is stored.
    template <int Threads, class T, int Size>
    CUTLASS_DEVICE void bring(T (&to)[Size], VectorArg<T> const& from, int begin, int end, int thread) const {
      constexpr int kEach = (Size + Threads - 1) / Threads;
      T values[kEach];
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kEach; ++i) values[i] = from.absent;
      from.with_data([&](auto const* data) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kEach; ++i) {
          int const at = begin + Threads * i + thread;
          if (at < end) values[i] = T(data[l * from.batch_stride + at * from.stride]);
        }
      });
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kEach; ++i) {
        if (Threads * i + thread < Size) to[Threads * i + thread] = values[i];
      }
    }

    template <int Threads>
    CUTLASS_DEVICE void bring_all(Vectors& to, int thread) const {
      bring<Threads>(to.scale_a, params.scale_a, m, m_end, thread);
      bring<Threads>(to.scale_b, params.scale_b, n, n_end, thread);
      bring<Threads>(to.bias, params.bias, n, n_end, thread);
      if constexpr (kInt8) {
        bring<Threads>(to.azp, params.azp, m, m_end, thread);
        bring<Threads>(to.azp_adj, params.azp_adj, n, n_end, thread);
      }
    }
  };

  // Both sides count a kernel's subtiles, and every tile has as many. A slot's next tile but one comes when the
  // pipeline, which has no more stages than a tile has subtiles, says that this one's are done.
  template <class EpilogueTile>
  CUTLASS_DEVICE static int slot(int subtile) {
    return subtile / int(size(shape_div(take<0, 2>(CtaTile{}), EpilogueTile{}))) % kSlots;
  }

  template <class EpilogueTile>
  struct Producer : fusion::EmptyProducerLoadCallbacks {
    Source source;
    Vectors* slots;
    int lane;

    CUTLASS_DEVICE Producer(Source const& source, Vectors* slots, int lane)
        : source(source), slots(slots), lane(lane) {}

    CUTLASS_DEVICE void step(uint64_t*, int epi_m, int epi_n, int subtile, bool) const {
      if (epi_m == 0 && epi_n == 0) source.template bring_all<32>(slots[slot<EpilogueTile>(subtile)], lane);
    }
  };

  template <class... Args>
  CUTLASS_DEVICE auto get_producer_load_callbacks(fusion::ProducerLoadArgs<Args...> const& args) {
    return Producer<decltype(args.epi_tile)>(Source(params, args), slots, args.thread_idx);
  }

  // A thread's part of a vector, for the fragments of a subtile.
  template <class T, bool AlongRows, class SmemTensor, class RegTensor>
  struct Operand {
    SmemTensor smem;   // (CPY, CPY_M, CPY_N, EPI_M, EPI_N, slot)
    RegTensor values;  // (CPY, CPY_M, CPY_N)

    CUTLASS_DEVICE void load(int epi_m, int epi_n, int slot) {
      if (!AlongRows && epi_m > 0) return;  // subtiles are visited along M first
      copy_aligned(filter_zeros(smem(_, _, _, epi_m, epi_n, slot)), filter(values));
    }
    template <int N>
    CUTLASS_DEVICE cutlass::Array<T, N> fragment(int epi_v) const {
      cutlass::Array<T, N> some;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < N; ++i) some[i] = values(epi_v * N + i);
      return some;
    }
  };

  template <bool AlongM, bool ReferenceSrc, class T, class Args>
  CUTLASS_DEVICE static auto operand(T* first_slot, Args const& args) {
    constexpr bool kAlongRows = AlongM != Swap;
    auto const shape = append(take<0, 2>(CtaTile{}), Int<kSlots>{});
    Tensor vectors =
        make_tensor(make_smem_ptr(first_slot), shape,
                    make_stride(Int<kAlongRows>{}, Int<!kAlongRows>{}, Int<sizeof(Vectors) / sizeof(T)>{}));
    Tensor smem =
        fusion::sm90_partition_for_epilogue<ReferenceSrc>(vectors, args.epi_tile, args.tiled_copy, args.thread_idx);
    Tensor values = make_tensor_like<T>(take<0, 3>(smem));
    return Operand<T, kAlongRows, decltype(smem), decltype(values)>{smem, values};
  }

  template <class EpilogueTile, int Threads, class ScaleA, class ScaleB, class Bias, class Azp, class AzpAdj>
  struct Consumer : fusion::EmptyConsumerStoreCallbacks {
    Source source;
    Vectors* slots;
    int thread;
    ScaleA scale_a;
    ScaleB scale_b;
    Bias bias;
    Azp azp;
    AzpAdj azp_adj;

    CUTLASS_DEVICE Consumer(Source const& source, Vectors* slots, int thread, ScaleA const& scale_a,
                            ScaleB const& scale_b, Bias const& bias, Azp const& azp, AzpAdj const& azp_adj)
        : source(source),
          slots(slots),
          thread(thread),
          scale_a(scale_a),
          scale_b(scale_b),
          bias(bias),
          azp(azp),
          azp_adj(azp_adj) {}

    CUTLASS_DEVICE void begin() {
      if constexpr (!Ahead) source.template bring_all<Threads>(*slots, thread);
    }
    CUTLASS_DEVICE bool begin_sync_needed() const { return !Ahead; }

    CUTLASS_DEVICE void previsit(int epi_m, int epi_n, int subtile, bool) {
      int const at = slot<EpilogueTile>(subtile);
      scale_a.load(epi_m, epi_n, at);
      scale_b.load(epi_m, epi_n, at);
      bias.load(epi_m, epi_n, at);
      if constexpr (kInt8) {
        azp.load(epi_m, epi_n, at);
        azp_adj.load(epi_m, epi_n, at);
      }
    }

    template <class Accumulator, int N>
    CUTLASS_DEVICE cutlass::Array<Bits, N> visit(cutlass::Array<Accumulator, N> const& acc, int epi_v, int, int) {
      auto const a = scale_a.template fragment<N>(epi_v), b = scale_b.template fragment<N>(epi_v);
      auto const c = bias.template fragment<N>(epi_v);
      cutlass::Array<int32_t, N> zero, adj;
      if constexpr (kInt8) zero = azp.template fragment<N>(epi_v), adj = azp_adj.template fragment<N>(epi_v);
      cutlass::Array<float, N> values;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < N; ++i) {
        values[i] = combine(subtract_zero_point(acc[i], zero[i], adj[i]), a[i], b[i], c[i]);
      }
      return source.params.output.template round<cutlass::Array<Bits, N>, N>(values, acc);
    }
  };

  template <bool ReferenceSrc, class... Args>
  CUTLASS_DEVICE auto get_consumer_store_callbacks(fusion::ConsumerStoreArgs<Args...> const& args) {
    auto scale_a = operand<true, ReferenceSrc>(slots->scale_a, args);
    auto scale_b = operand<false, ReferenceSrc>(slots->scale_b, args);
    auto bias = operand<false, ReferenceSrc>(slots->bias, args);
    auto azp = operand<true, ReferenceSrc>(slots->azp, args);
    auto azp_adj = operand<false, ReferenceSrc>(slots->azp_adj, args);
    return Consumer<decltype(args.epi_tile), decltype(size(args.tiled_copy))::value, decltype(scale_a),
                    decltype(scale_b), decltype(bias), decltype(azp), decltype(azp_adj)>(
        Source(params, args), slots, args.thread_idx, scale_a, scale_b, bias, azp, azp_adj);
  }
};

}  // namespace jax_qmm::sm90
