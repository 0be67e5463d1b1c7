// Kernels of several stages (multistage.cuh) whose rows of a are windows on images: each 16 bytes of a tile are looked
// up as they are copied, and no image is ever spread out in memory.
#include "conv/instances.h"
#include "conv/residual.cuh"
#include "conv/window.cuh"
#include "core/launch.cuh"
#include "core/prepare.h"
#include "scaled_mm/multistage.cuh"
#include "scaled_mm/write_tile.cuh"

namespace jax_qmm::conv {
namespace {

struct Params {
  sm80::Params product;
  Window window;
  Columns columns;
  int columns_of_group, groups;
};

// Where the block's tile is: of the columns, in its group's.
template <class C>
struct Place : sm80::Place<C> {
  int group = blockIdx.z;

  __device__ explicit Place(Params const& p) : sm80::Place<C>(p.product) {
    this->first_n += group * p.columns_of_group;
    this->end_n = (group + 1) * p.columns_of_group;
  }
};

// What a thread copies of the windows of a tile's rows: 16 bytes of every few rows, as sm80::Source does.
template <class C>
class Windows {
 public:
  __device__ Windows(Params const& p, Place<C> const& at) : p_(p) {
    uint8_t const* const images = p.product.a + at.l * p.product.a_batch_stride + at.group * p.columns.channels.divisor;
    auto const& zero_point = p.product.epilogue.azp;
    has_zero_points_ = zero_point.data != nullptr;
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      int const row = at.first_m + threadIdx.x / kChunks + i * kRowsAtOnce;
      int const other = row & ((1 << (31 - __clz(p.product.m))) - 1);
      int const image = p.window.corner_of(row < p.product.m ? row : other, corner_[i]);
      images_[i] = images + image * p.window.image_stride;
      outside_[i] = has_zero_points_ ? 0x01010101 * uint8_t(zero_point.load(at.l, image)) : 0;
    }
  }

  // Starts the copies of the K bytes from k_begin on. Those from k_end on become zeros.
  template <bool kWhole>
  __device__ void copy(uint32_t to, int k_begin, int k_end) const {
    int const k = k_begin + 16 * int(threadIdx.x % kChunks);
    to += swizzled<C::kTileK>(threadIdx.x / kChunks, threadIdx.x % kChunks);
    if constexpr (kWhole) {
      copy_part<16>(to, k, k_end);
    } else if (p_.product.copied == 8) {
      copy_in_parts<8>(to, k, k_end);
    } else {
      copy_in_parts<4>(to, k, k_end);
    }
  }

 private:
  static constexpr int kChunks = C::kTileK / 16, kRowsAtOnce = C::kThreads / kChunks, kCopies = C::kTileM / kRowsAtOnce;
  static constexpr int kApart = kRowsAtOnce * C::kTileK;

  // Each may be of another tap; those behind the last one are not looked up.
  template <int Bytes>
  __device__ void copy_in_parts(uint32_t to, int k, int k_end) const {
#pragma unroll 1
    for (int part = 0; part < 16; part += Bytes) {
      if (k + part < k_end) {
        copy_part<Bytes>(to + part, k + part, k_end);
      } else {
#pragma unroll
        for (int i = 0; i < kCopies; ++i) store<Bytes>(to + part + i * kApart, 0);
      }
    }
  }

  template <int Bytes>
  __device__ void copy_part(uint32_t to, int k, int k_end) const {
    int channel = k, tap[kSpatial];
    p_.columns.find(channel, p_.window.dilation, tap);
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      unsigned byte;
      bool const inside = p_.window.finds(corner_[i][0] + tap[0], corner_[i][1] + tap[1], corner_[i][2] + tap[2], byte);
      if (inside || !has_zero_points_) {
        copy_async<Bytes>(to + i * kApart, images_[i] + (inside ? byte + channel : 0), inside && k < k_end);
      } else {
        store<Bytes>(to + i * kApart, outside_[i]);
      }
    }
  }

  // Where zeros come from memory's place, zero points come from a register: all SMs would read one line for them.
  template <int Bytes>
  __device__ static void store(uint32_t to, uint32_t word) {
#pragma unroll
    for (int at = 0; at < Bytes; at += 4) asm volatile("st.shared.u32 [%0], %1;" ::"r"(to + at), "r"(word) : "memory");
  }

  Params const& p_;
  int corner_[kCopies][kSpatial];  // where the window begins, maybe outside of the image
  uint8_t const* images_[kCopies];
  bool has_zero_points_;
  uint32_t outside_[kCopies];  // four times the zero point, which stands for what is not in the image
};

template <int TileM, int TileN, int TileK, int WarpsM, int WarpsN, int Stages, int BlocksPerSm>
struct Config : sm80::Config<DType::kS8, Accum::kFull, TileM, TileN, TileK, WarpsM, WarpsN, 1, Stages> {
  static constexpr int kBlocksPerSm = BlocksPerSm;
};

template <class C, class Added>
__global__ void __launch_bounds__(C::kThreads, C::kBlocksPerSm) conv_kernel(Params p, Added added) {
  extern __shared__ __align__(128) uint8_t shared[];
  uint32_t const stages = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  Place<C> const at(p);
  begin();

  int32_t acc[C::kFragmentsM][C::kFragmentsN][4] = {};
  auto const nothing = [](int) {};
  auto const weights = sm80::rows_of_b<C>(p.product, at);
  sm80::sum_products<C>(p.product, at, stages, Windows<C>(p, at), weights, acc, nothing, nothing);
  __syncthreads();  // the epilogue's terms take the place of the stages
  sm80::load_terms<C>(p.product, at, shared, [&](int m, Terms<true, Value>& terms) {
    int const image = p.window.image_of(m);
    auto const& from = p.product.epilogue;
    terms.scale_a = from.scale_a.load(at.l, image);
    terms.azp = from.azp.load(at.l, image);
    terms.sums_a = from.sums_a.load(at.l, m * p.groups + at.group);
  });
  __syncthreads();
  sm80::write_tile<C>(acc, p.product, at, shared, added.at(at.l));
}

template <class C>
cudaError_t prepare(bool& fits) {
  return prepare_all({reinterpret_cast<void const*>(conv_kernel<C, NoResidual>),
                      reinterpret_cast<void const*>(conv_kernel<C, ResidualArg>)},
                     {{}, C::kThreads, C::kSharedBytes}, fits);
}

template <class C>
cudaError_t launch(Conv const& problem, Submit const& submit) {
  sm80::Params product = sm80::make_params<C>(problem, 1);
  int const columns = problem.n / problem.groups;
  product.tiles_n = unsigned(ceil_div(columns, C::kTileN));
  auto const address = [](void const* pointer) { return reinterpret_cast<uintptr_t>(pointer); };
  uintptr_t const in = address(problem.a) | address(problem.b) | uintptr_t(problem.channels);
  product.copied = in % 16 == 0 ? 16 : in % 8 == 0 ? 8 : 4;
  product.stores_whole = (address(problem.out) | uintptr_t(columns) * bytes_of(problem.out_dtype)) % 16 == 0;
  Params const params{product, Window(problem), Columns(problem), columns, problem.groups};
  unsigned const blocks = product.tiles_m * product.tiles_n * unsigned(problem.batch);
  LaunchShape const shape{dim3(blocks, 1, problem.groups), C::kThreads, C::kSharedBytes};
  return with_residual(problem, columns, bytes_of(problem.out_dtype) == 4 ? 4 : 8, [&](auto added) {
    return jax_qmm::launch(submit, shape, conv_kernel<C, decltype(added)>, params, added);
  });
}

bool serves(Conv const& p) { return !p.is_depthwise(); }

template <class C>
Instance instance() {
  Instance i{"sm80 implicit GEMM " + words_of_tile(C::kTileM, C::kTileN, C::kTileK) + " int8", serves, prepare<C>,
             launch<C>, C::kSharedBytes};
  i.tile_m = C::kTileM, i.tile_n = C::kTileN, i.tile_k = C::kTileK, i.blocks_per_sm = C::kBlocksPerSm;
  return i;
}

}  // namespace

void add_implicit_gemm(std::vector<Instance>& to) {
  to.push_back(instance<Config<64, 64, 64, 2, 2, 4, 2>>());
  to.push_back(instance<Config<64, 64, 128, 2, 2, 4, 1>>());
  to.push_back(instance<Config<128, 64, 64, 4, 2, 4, 2>>());
  to.push_back(instance<Config<128, 128, 64, 2, 4, 4, 1>>());
}

}  // namespace jax_qmm::conv
