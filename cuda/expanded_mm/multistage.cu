// Kernels of several stages (multistage.cuh) whose b becomes int8 in shared memory, among the products of the stage
// before it.
#include "core/launch.cuh"
#include "core/prepare.h"
#include "expanded_mm/expansion.cuh"
#include "expanded_mm/instances.h"
#include "scaled_mm/multistage.cuh"
#include "scaled_mm/write_tile.cuh"

namespace jax_qmm::expanded {
namespace {

struct Params {
  sm80::Params product;
  Blocks blocks;
};

template <int TileM, int TileN, int TileK, int WarpsM, int WarpsN, int Stages, int BlocksPerSm>
struct Config : sm80::Config<DType::kS8, Accum::kFull, TileM, TileN, TileK, WarpsM, WarpsN, 1, Stages> {
  static constexpr int kBlocksPerSm = BlocksPerSm;
};

// The rows of w of the block's tile, as sm80::Source has those of int8.
template <class C>
class Source : public Expanding<C::kTileN, C::kTileK, C::kThreads> {
  using Base = Expanding<C::kTileN, C::kTileK, C::kThreads>;

 public:
  static constexpr bool kMakes = true;

  __device__ Source(Params const& p, sm80::Place<C> const& at)
      : Base(p.product.b + at.l * p.product.b_batch_stride, p.blocks, at.l, at.first_n, p.product.n, p.product.k,
             threadIdx.x) {
    Base::load_blocks(0);
  }

  template <bool kWhole>
  __device__ void copy(uint32_t to, int k_begin, int) const {
    Base::copy(to, k_begin);
  }

  // Steps of K come one after another from the first on.
  __device__ void make(uint32_t tile, int k_begin) {
    Base::make(tile);
    Base::load_blocks(k_begin + C::kTileK);
  }
};

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kBlocksPerSm) multistage_kernel(Params p) {
  extern __shared__ __align__(128) uint8_t shared[];
  uint32_t const stages = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  sm80::Place<C> const at(p.product);
  begin();

  int32_t acc[C::kFragmentsM][C::kFragmentsN][4] = {};
  auto const nothing = [](int) {};
  sm80::sum_products<C>(p.product, at, stages, sm80::rows_of_a<C>(p.product, at), Source<C>(p, at), acc, nothing,
                        nothing);
  __syncthreads();  // the epilogue's terms take the place of the stages
  sm80::load_terms<C>(p.product, at, shared);
  __syncthreads();
  sm80::write_tile<C>(acc, p.product, at, shared);
}

template <class C>
cudaError_t prepare(bool& fits) {
  return prepare_kernel(reinterpret_cast<void const*>(multistage_kernel<C>), {{}, C::kThreads, C::kSharedBytes}, fits);
}

template <class C>
cudaError_t launch(ExpandedMm const& problem, Submit const& submit) {
  Params params{sm80::make_params<C>(problem, 1), Blocks(problem)};
  params.product.b_batch_stride /= 2;
  unsigned const blocks = params.product.tiles_m * params.product.tiles_n * unsigned(problem.batch);
  return jax_qmm::launch(submit, {blocks, C::kThreads, C::kSharedBytes}, multistage_kernel<C>, params);
}

template <class C>
Instance instance() {
  Instance i{"sm80 multistage " + words_of_tile(C::kTileM, C::kTileN, C::kTileK) + " int4", prepare<C>, launch<C>};
  i.tile_m = C::kTileM, i.tile_n = C::kTileN, i.tile_k = C::kTileK;
  i.blocks_per_sm = C::kBlocksPerSm, i.shared_bytes = C::kSharedBytes;
  return i;
}

}  // namespace

void add_multistage(std::vector<Instance>& to) {
  to.push_back(instance<Config<64, 64, 64, 2, 2, 4, 2>>());
  to.push_back(instance<Config<64, 64, 128, 2, 2, 4, 1>>());
  to.push_back(instance<Config<128, 128, 64, 2, 4, 4, 1>>());
}

}  // namespace jax_qmm::expanded
