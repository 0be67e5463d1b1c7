// How the quantizers are cut into launches of their kernels.
#include <algorithm>

#include "core/launch.cuh"
#include "core/prepare.h"
#include "quantize/kernels.cuh"
#include "quantize/quantize.h"

namespace jax_qmm {
namespace quantize {
namespace {

constexpr int64_t kWarp = 32;

int64_t warps(int64_t threads) { return std::max(kWarp, ceil_div(threads, kWarp) * kWarp); }

// Rows that take up to one warp go four to a block.
dim3 block_of(int64_t threads) { return dim3(threads, threads == kWarp ? 4 : 1); }

// Launches of the kernels for one pair of input dtype and kind of output, with or without sums.
template <class In, Kind kind, bool kSums>
struct Launches {
  static constexpr int kVector = 16 / sizeof(In);
  static constexpr int kScalars = 16;  // single elements of each thread where rows are unaligned

  static bool aligned(In const* x, uint8_t* q) {
    return reinterpret_cast<uintptr_t>(x) % 16 == 0 && reinterpret_cast<uintptr_t>(q) % kVector == 0;
  }

  static Sums<kSums> sums(Quantize const& p) {
    if constexpr (kSums) {
      return {p.sums};
    } else {
      return {};
    }
  }

  // Before the kernels that add to them piece by piece.
  static cudaError_t clear_all_sums(Quantize const& p, Submit const& submit) {
    int64_t const rows = p.per_tensor ? 1 : p.rows;
    if (!kSums || rows == 0) return cudaSuccess;
    return launch(submit, {dim3(ceil_div(rows, kPieceThreads)), kPieceThreads}, clear_sums, p.sums, rows);
  }

  template <int V, int N>
  static cudaError_t rows(Quantize const& p, Submit const& submit) {
    // A row that doesn't fit the largest block comes in pieces of a block that leaves room for a second one.
    int64_t const threads = warps(ceil_div(p.cols, V * N));
    dim3 const block = block_of(threads <= kRowThreads<V, N> ? threads : 512);
    return launch(submit, {dim3(ceil_div(p.rows, block.y)), block}, quantize_rows<In, kind, V, N, kSums>,
                  static_cast<In const*>(p.x), static_cast<uint8_t*>(p.q), p.rows, p.cols, p.scale, p.zero_point,
                  sums(p));
  }

  template <int kOfThread>
  static cudaError_t short_rows(Quantize const& p, int chunks, Submit const& submit) {
    int log2_lanes = 0;
    while (kOfThread << log2_lanes < chunks) ++log2_lanes;
    int64_t const blocks = ceil_div(p.rows * chunks, kShortThreads * kShortChunks);
    return launch(submit, {dim3(blocks), kShortThreads}, quantize_short_rows<In, kind, kOfThread, kSums>,
                  static_cast<In const*>(p.x), static_cast<uint8_t*>(p.q), p.rows, log2_lanes, p.scale, p.zero_point,
                  sums(p));
  }

  template <int V, int N>
  static cudaError_t range(In const* x, int64_t size, uint32_t* words, Submit const& submit) {
    if (size == 0) return cudaSuccess;
    int64_t const blocks = std::min<int64_t>(ceil_div(size, kPieceThreads * V * N), 4096);
    return launch(submit, {dim3(blocks), kPieceThreads}, find_range<In, kind, V, N>, x, size, words);
  }

  template <int V, int N>
  static cudaError_t given(Quantize const& p, In const* x, uint8_t* q, int64_t rows, int64_t cols,
                           uint32_t const* words, Submit const& submit) {
    if (cols == 0) return cudaSuccess;
    dim3 const block = block_of(std::min<int64_t>(kPieceThreads, warps(ceil_div(cols, V * N))));
    dim3 const grid(ceil_div(cols, block.x * V * N), std::min<int64_t>(ceil_div(rows, block.y), 65535));
    return launch(submit, {grid, block}, quantize_given<In, kind, V, N, kSums>, x, q, rows, cols, p.scale, p.zero_point,
                  p.per_tensor ? 0 : 1, words, sums(p));
  }

  // The tensor as one row: all that fits in vectors, then the rest.
  static cudaError_t tensor(Quantize const& p, uint32_t const* words, Submit const& submit) {
    In const* const x = static_cast<In const*>(p.x);
    uint8_t* const q = static_cast<uint8_t*>(p.q);
    int64_t const size = p.rows * p.cols, vectors = aligned(x, q) ? size / kVector * kVector : 0;
    if (cudaError_t const error = given<kVector, 4>(p, x, q, 1, vectors, words, submit)) return error;
    return given<1, 8>(p, x + vectors, q + vectors, 1, size - vectors, words, submit);
  }

  static cudaError_t dynamic(Quantize p, uint32_t* workspace, Submit const& submit) {
    In const* const x = static_cast<In const*>(p.x);
    bool vectors = aligned(x, static_cast<uint8_t*>(p.q));
    if (p.per_tensor) {
      p.cols *= p.rows;
      p.rows = 1;
    }
    int64_t const whole = p.cols / kVector * kVector;
    if (p.rows == 1 && p.cols > 1024 * (vectors ? 8 * kVector : kScalars)) {
      p.per_tensor = true;
      int64_t const first = vectors ? whole : 0;
      if (cudaError_t const error = clear_all_sums(p, submit)) return error;
      if (cudaError_t const error = launch(submit, {1, 2}, clear, workspace)) return error;
      if (cudaError_t const error = range<kVector, 8>(x, first, workspace, submit)) return error;
      if (cudaError_t const error = range<1, kScalars>(x + first, p.cols - first, workspace, submit)) return error;
      return tensor(p, workspace, submit);
    }
    vectors = vectors && whole == p.cols;
    int64_t const chunks = ceil_div(p.cols, kVector);
    if (p.rows == 0) return cudaSuccess;
    if (!vectors) return rows<1, kScalars>(p, submit);
    if (chunks > 0 && chunks <= kWarp && (chunks & (chunks - 1)) == 0) {
      // As measured on an H200: of so many chunks in a row a thread has so many.
      if (chunks >= 16) return short_rows<4>(p, int(chunks), submit);
      return chunks >= 4 ? short_rows<2>(p, int(chunks), submit) : short_rows<1>(p, int(chunks), submit);
    }
    // Where SMs have a row each at most, many threads with few chunks take the least time; else few of many.
    Gpu const* gpu;
    if (cudaError_t const error = current_gpu(gpu)) return error;
    bool const few = p.rows <= gpu->sm_count;
    int64_t const threads = few ? kRowThreads<kVector, 1> : kWarp;
    if (chunks <= threads) return rows<kVector, 1>(p, submit);
    if (chunks <= 2 * threads) return rows<kVector, 2>(p, submit);
    if (chunks <= 4 * (few ? threads : kPieceThreads)) return rows<kVector, 4>(p, submit);
    return rows<kVector, 8>(p, submit);
  }

  static cudaError_t given_scales(Quantize const& p, Submit const& submit) {
    In const* const x = static_cast<In const*>(p.x);
    uint8_t* const q = static_cast<uint8_t*>(p.q);
    if (cudaError_t const error = clear_all_sums(p, submit)) return error;
    if (p.rows == 0 || p.cols == 0) return cudaSuccess;
    if (p.per_tensor || p.rows == 1) return tensor(p, nullptr, submit);
    if (aligned(x, q) && p.cols % kVector == 0) return given<kVector, 4>(p, x, q, p.rows, p.cols, nullptr, submit);
    return given<1, 8>(p, x, q, p.rows, p.cols, nullptr, submit);
  }

  static cudaError_t prepare() {
    void const* const kernels[] = {
        reinterpret_cast<void const*>(quantize_rows<In, kind, 1, kScalars, kSums>),
        reinterpret_cast<void const*>(quantize_rows<In, kind, kVector, 1, kSums>),
        reinterpret_cast<void const*>(quantize_rows<In, kind, kVector, 2, kSums>),
        reinterpret_cast<void const*>(quantize_rows<In, kind, kVector, 4, kSums>),
        reinterpret_cast<void const*>(quantize_rows<In, kind, kVector, 8, kSums>),
        reinterpret_cast<void const*>(quantize_short_rows<In, kind, 1, kSums>),
        reinterpret_cast<void const*>(quantize_short_rows<In, kind, 2, kSums>),
        reinterpret_cast<void const*>(quantize_short_rows<In, kind, 4, kSums>),
        reinterpret_cast<void const*>(clear),
        reinterpret_cast<void const*>(clear_sums),
        reinterpret_cast<void const*>(find_range<In, kind, 1, kScalars>),
        reinterpret_cast<void const*>(find_range<In, kind, kVector, 8>),
        reinterpret_cast<void const*>(quantize_given<In, kind, 1, 8, kSums>),
        reinterpret_cast<void const*>(quantize_given<In, kind, kVector, 4, kSums>),
    };
    for (void const* kernel : kernels) {
      bool fits;
      if (cudaError_t const error = prepare_kernel(kernel, {}, fits)) return error;
    }
    return cudaSuccess;
  }
};

// Calls f with the Launches for one dtype and kind, with or without sums, which fp8 has none of.
template <class In, class F>
cudaError_t with_kind(Kind kind, bool sums, F f) {
  switch (kind) {
    case Kind::kInt8:
      return sums ? f(Launches<In, Kind::kInt8, true>{}) : f(Launches<In, Kind::kInt8, false>{});
    case Kind::kInt8ZeroPoint:
      return sums ? f(Launches<In, Kind::kInt8ZeroPoint, true>{}) : f(Launches<In, Kind::kInt8ZeroPoint, false>{});
    case Kind::kFp8:
      return sums ? cudaErrorInvalidValue : f(Launches<In, Kind::kFp8, false>{});
  }
  return cudaErrorInvalidValue;
}

template <class F>
cudaError_t with_launches(DType in, Kind kind, bool sums, F f) {
  switch (in) {
    case DType::kF32:
      return with_kind<float>(kind, sums, f);
    case DType::kBF16:
      return with_kind<__nv_bfloat16>(kind, sums, f);
    case DType::kF16:
      return with_kind<__half>(kind, sums, f);
    default:
      return cudaErrorInvalidValue;
  }
}

template <class F>
cudaError_t with_launches(Quantize const& p, F f) {
  Kind const kind = p.out == DType::kF8E4M3 ? Kind::kFp8 : p.zero_point == nullptr ? Kind::kInt8 : Kind::kInt8ZeroPoint;
  return with_launches(p.in, kind, p.sums != nullptr, f);
}

}  // namespace
}  // namespace quantize

cudaError_t prepare_quantize() {
  static OncePerDevice once;
  return once([] {
    for (DType in : {DType::kF32, DType::kBF16, DType::kF16}) {
      for (auto kind : {quantize::Kind::kInt8, quantize::Kind::kInt8ZeroPoint, quantize::Kind::kFp8}) {
        for (bool sums : {false, true}) {
          if (sums && kind == quantize::Kind::kFp8) continue;
          auto const prepare = [](auto launches) { return launches.prepare(); };
          if (cudaError_t const error = quantize::with_launches(in, kind, sums, prepare)) return error;
        }
      }
    }
    return cudaSuccess;
  });
}

cudaError_t quantize_static(Quantize const& problem, Submit const& submit) {
  return quantize::with_launches(problem, [&](auto launches) { return launches.given_scales(problem, submit); });
}

cudaError_t quantize_dynamic(Quantize const& problem, uint32_t* workspace, Submit const& submit) {
  return quantize::with_launches(problem, [&](auto launches) { return launches.dynamic(problem, workspace, submit); });
}

}  // namespace jax_qmm
