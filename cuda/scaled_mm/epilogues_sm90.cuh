// The epilogue of every sm_90 kernel, as one visitor tree: leaves that broadcast the scales, zero points and bias, and a
// root that combines them with the accumulator. Which vectors are present, their dtypes, and the dtype within the
// output's width are kernel arguments, so that one kernel serves them all.
#pragma once

#include <algorithm>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cutlass/epilogue/fusion/sm90_visitor_tma_warpspecialized.hpp"
#include "cutlass/epilogue/fusion/sm90_visitor_load_tma_warpspecialized.hpp"

#include "scaled_mm/epilogue.cuh"
#include "scaled_mm/scaled_mm.h"

namespace jax_qmm::sm90 {

using namespace cute;
namespace fusion = cutlass::epilogue::fusion;

// What nodes without workspace and without TMA loads have in common.
struct Node {
  struct SharedStorage {};
  template <class ProblemShape, class Arguments>
  static constexpr Arguments to_underlying_arguments(ProblemShape const&, Arguments const& args, void*) { return args; }
  template <class ProblemShape, class Arguments>
  static bool can_implement(ProblemShape const&, Arguments const&) { return true; }
  template <class ProblemShape, class Arguments>
  static size_t get_workspace_size(ProblemShape const&, Arguments const&) { return 0; }
  template <class ProblemShape, class Arguments>
  static cutlass::Status initialize_workspace(ProblemShape const&, Arguments const&, void*, cudaStream_t,
                                              cutlass::CudaHostAdapter* = nullptr) {
    return cutlass::Status::kSuccess;
  }
  CUTLASS_DEVICE bool is_producer_load_needed() const { return false; }
  CUTLASS_DEVICE bool is_C_load_needed() const { return false; }
  template <class... Args>
  CUTLASS_DEVICE auto get_producer_load_callbacks(fusion::ProducerLoadArgs<Args...> const&) {
    return fusion::EmptyProducerLoadCallbacks{};
  }
};

// The nodes are made at a kernel's start; CUTLASS has their constructors compile for the host, too.
template <class Arg>
CUTLASS_HOST_DEVICE void prefetch(Arg const& arg) {
#ifdef __CUDA_ARCH__
  arg.prefetch();
#endif
}

// A vector along the tile's columns: every thread needs most of it, so it goes through shared memory.
template <class T, class CtaTile>
struct RowVector : Node {
  using Arguments = VectorArg<T>;
  using Params = Arguments;
  struct SharedStorage {
    array_aligned<T, size<1>(CtaTile{})> values;
  };

  Params params;
  T* smem;

  CUTLASS_HOST_DEVICE RowVector() {}
  CUTLASS_HOST_DEVICE RowVector(Params const& params, SharedStorage const& storage)
      : params(params), smem(const_cast<T*>(storage.values.data())) {
    prefetch(params);
  }

  template <class SmemTensor, class RegTensor>
  struct Callbacks : fusion::EmptyConsumerStoreCallbacks {
    CUTLASS_DEVICE Callbacks(SmemTensor tSR_s, RegTensor tSR_r, Params const& params, T* smem, int l, int n_begin,
                             int n_end, int thread, int threads)
        : tSR_s(tSR_s), tSR_r(tSR_r), params(params), smem(smem), l(l), n_begin(n_begin), n_end(n_end), thread(thread),
          threads(threads) {}

    SmemTensor tSR_s;  // (CPY, CPY_M, CPY_N, EPI_M, EPI_N)
    RegTensor tSR_r;   // (CPY, CPY_M, CPY_N)
    Params const& params;
    T* smem;
    int l, n_begin, n_end, thread, threads;

    CUTLASS_DEVICE void begin() {
      for (int i = thread; i < size<1>(CtaTile{}); i += threads) {
        smem[i] = n_begin + i < n_end ? params.load(l, n_begin + i) : T(0);
      }
    }
    CUTLASS_DEVICE bool begin_sync_needed() const { return true; }

    CUTLASS_DEVICE void begin_loop(int epi_m, int epi_n) {
      if (epi_m == 0) {  // subtiles are visited along M first
        copy_aligned(filter_zeros(tSR_s(_, _, _, epi_m, epi_n)), filter(tSR_r));
      }
    }

    template <class Accumulator, int N>
    CUTLASS_DEVICE cutlass::Array<T, N> visit(cutlass::Array<Accumulator, N> const&, int epi_v, int, int) {
      cutlass::Array<T, N> values;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < N; ++i) {
        values[i] = tSR_r(epi_v * N + i);
      }
      return values;
    }
  };

  template <bool ReferenceSrc, class... Args>
  CUTLASS_DEVICE auto get_consumer_store_callbacks(fusion::ConsumerStoreArgs<Args...> const& args) {
    auto [m, n, k, l] = args.tile_coord_mnkl;
    Tensor s = make_tensor(make_smem_ptr(smem), take<0, 2>(CtaTile{}), make_stride(_0{}, _1{}));
    Tensor tSR_s = fusion::sm90_partition_for_epilogue<ReferenceSrc>(s, args.epi_tile, args.tiled_copy, args.thread_idx);
    Tensor tSR_r = make_tensor_like<T>(take<0, 3>(tSR_s));
    return Callbacks<decltype(tSR_s), decltype(tSR_r)>(
        tSR_s, tSR_r, params, smem, int(l), int(n) * size<1>(CtaTile{}), int(get<1>(args.problem_shape_mnkl)),
        args.thread_idx, int(size(args.tiled_copy)));
  }
};

// A vector along the tile's rows: a thread holds few rows, so it loads their values straight into registers.
template <class T>
struct ColVector : Node {
  using Arguments = VectorArg<T>;
  using Params = Arguments;

  Params params;

  CUTLASS_HOST_DEVICE ColVector() {}
  CUTLASS_HOST_DEVICE ColVector(Params const& params, SharedStorage const&) : params(params) { prefetch(params); }

  template <class RegTensor, class CoordTensor, class Residue>
  struct Callbacks : fusion::EmptyConsumerStoreCallbacks {
    CUTLASS_DEVICE Callbacks(RegTensor tC_r, CoordTensor tC_c, Residue residue, Params const& params, int l, int m_end)
        : tC_r(tC_r), tC_c(tC_c), residue(residue), params(params), l(l), m_end(m_end) {}

    RegTensor tC_r;    // (CPY, CPY_M, CPY_N, EPI_M, EPI_N)
    CoordTensor tC_c;  // the same shape, coordinates relative to the thread's first
    Residue residue;   // the matrix' end, likewise relative
    Params const& params;
    int l, m_end;

    CUTLASS_DEVICE void begin() {
      Tensor values = filter(tC_r);
      Tensor coords = filter_zeros(tC_c, tC_r.stride());
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < size(values); ++i) {
        int m = get<0>(coords(i));
        values(i) = m < get<0>(residue) ? params.load(l, m_end - int(get<0>(residue)) + m) : T(0);
      }
    }

    template <class Accumulator, int N>
    CUTLASS_DEVICE cutlass::Array<T, N> visit(cutlass::Array<Accumulator, N> const&, int epi_v, int epi_m, int epi_n) {
      cutlass::Array<T, N> values;
      Tensor tile = tC_r(_, _, _, epi_m, epi_n);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < N; ++i) {
        values[i] = tile(epi_v * N + i);
      }
      return values;
    }
  };

  template <bool ReferenceSrc, class... Args>
  CUTLASS_DEVICE auto get_consumer_store_callbacks(fusion::ConsumerStoreArgs<Args...> const& args) {
    auto [M, N, K, L] = args.problem_shape_mnkl;
    auto [m, n, k, l] = args.tile_coord_mnkl;
    Tensor column = make_tensor(make_gmem_ptr(static_cast<T const*>(nullptr)),
                                make_layout(make_shape(M, N, L), make_stride(_1{}, _0{}, _0{})));
    Tensor tC_g = fusion::sm90_partition_for_epilogue<ReferenceSrc>(
        column, args.tile_shape_mnk, args.tile_coord_mnkl, args.epi_tile, args.tiled_copy, args.thread_idx);
    Tensor tC_r = make_tensor_like<T>(tC_g);
    return Callbacks<decltype(tC_r), decltype(args.tCcD), decltype(args.residue_tCcD)>(
        tC_r, args.tCcD, args.residue_tCcD, params, int(l), int(M));
  }
};

// What the first tiles read of b first, brought into L2 while the kernel before this one ends: of all that CUTLASS' kernels
// do before they wait for it, making the nodes is what is open to us.
struct Weights {
  void const* data;
  unsigned rows, lines;
  int64_t row_stride;

  __device__ void prefetch() const { prefetch_l2(data, rows, lines, row_stride); }
};

// 2 MB, what memory delivers meanwhile: more delays the rest.
inline Weights weights(ScaledMm const& p, int sm_count) {
  constexpr int kBytes = 2 << 20, kRowsOfTile = 64;
  int const rows = std::min(p.n, kRowsOfTile * sm_count);
  return {p.b, unsigned(rows), unsigned(std::min(kBytes / rows, p.k) / kLine), p.k};
}

// The root: accumulator and vectors in, bit patterns of the output's width out.
template <class Bits>
struct Combine : Node {
  struct Arguments {
    OutputArg out;
    Weights weights;
  };
  using Params = Arguments;

  Params params;

  CUTLASS_HOST_DEVICE Combine() {}
  CUTLASS_HOST_DEVICE Combine(Params const& params, SharedStorage const&) : params(params) { prefetch(params.weights); }

  struct Callbacks : fusion::EmptyConsumerStoreCallbacks {
    Params const& params;
    CUTLASS_DEVICE Callbacks(Params const& params) : params(params) {}

    template <int N>
    CUTLASS_DEVICE cutlass::Array<Bits, N> visit(
        cutlass::Array<float, N> const& acc, int, int, int, cutlass::Array<float, N> const& scale_a,
        cutlass::Array<float, N> const& scale_b, cutlass::Array<float, N> const& bias) {
      cutlass::Array<float, N> values;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < N; ++i) {
        values[i] = combine(acc[i], scale_a[i], scale_b[i], bias[i]);
      }
      return params.out.template round<Bits, cutlass::Array<Bits, N>, N>(values, values);
    }

    template <int N>
    CUTLASS_DEVICE cutlass::Array<Bits, N> visit(
        cutlass::Array<int32_t, N> const& acc, int, int, int, cutlass::Array<float, N> const& scale_a,
        cutlass::Array<float, N> const& scale_b, cutlass::Array<float, N> const& bias,
        cutlass::Array<int32_t, N> const& azp, cutlass::Array<int32_t, N> const& azp_adj) {
      cutlass::Array<float, N> values;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < N; ++i) {
        values[i] = combine(subtract_zero_point(acc[i], azp[i], azp_adj[i]), scale_a[i], scale_b[i], bias[i]);
      }
      return params.out.template round<Bits, cutlass::Array<Bits, N>, N>(values, acc);
    }
  };

  template <bool ReferenceSrc, class... Args>
  CUTLASS_DEVICE auto get_consumer_store_callbacks(fusion::ConsumerStoreArgs<Args...> const&) {
    return Callbacks(params);
  }
};

// The kernel's rows are M of the product, or N when the operands are swapped.
template <bool Swap, class T, class CtaTile>
using AlongM = cute::conditional_t<Swap, RowVector<T, CtaTile>, ColVector<T>>;
template <bool Swap, class T, class CtaTile>
using AlongN = AlongM<!Swap, T, CtaTile>;

template <DType In, class Bits, bool Swap, class CtaTile>
struct Epilogue {
  using Tree = fusion::Sm90TreeVisitor<Combine<Bits>, AlongM<Swap, float, CtaTile>, AlongN<Swap, float, CtaTile>,
                                       AlongN<Swap, float, CtaTile>>;
  static typename Tree::Arguments arguments(ScaledMm const& p, int sm_count) {
    return {scale_arg(p.scale_a), scale_arg(p.scale_b), bias_arg(p.bias), {{p.out_dtype}, weights(p, sm_count)}};
  }
};

template <class Bits, bool Swap, class CtaTile>
struct Epilogue<DType::kS8, Bits, Swap, CtaTile> {
  using Tree = fusion::Sm90TreeVisitor<Combine<Bits>, AlongM<Swap, float, CtaTile>, AlongN<Swap, float, CtaTile>,
                                       AlongN<Swap, float, CtaTile>, AlongM<Swap, int32_t, CtaTile>,
                                       AlongN<Swap, int32_t, CtaTile>>;
  static typename Tree::Arguments arguments(ScaledMm const& p, int sm_count) {
    return {scale_arg(p.scale_a), scale_arg(p.scale_b), bias_arg(p.bias), azp_arg(p.azp), azp_adj_arg(p.azp_adj),
            {{p.out_dtype}, weights(p, sm_count)}};
  }
};

}  // namespace jax_qmm::sm90
