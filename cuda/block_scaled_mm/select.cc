// Choosing a kernel by its predicted time, preparing all of them, and launching one.
#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "block_scaled_mm/instances.h"
#include "core/archs.h"
#include "core/prepare.h"

namespace jax_qmm {
namespace block_scaled {
namespace {

constexpr int kOldest = 80;  // compute capability 8.0, the first with tensor cores for bfloat16

std::vector<Instance> const& instances() {
  static std::vector<Instance> const all = [] {
    std::vector<Instance> found;
    add_instances<DType::kBF16, 4>(found);
    add_instances<DType::kBF16, 8>(found);
    add_instances<DType::kF16, 4>(found);
    add_instances<DType::kF16, 8>(found);
    add_f32_instances(found);
#ifdef JAX_QMM_SM90
    add_wgmma_instances(found);
#endif
    return found;
  }();
  return all;
}

std::string& wanted() {
  static std::string words;
  return words;
}

bool runs(Instance const& i, Gpu const& gpu) { return !i.wgmma || gpu.arch == 90; }

bool serves(Instance const& i, BlockScaledMm const& p) {
  // Rows of x that TMA can load.
  if (i.wgmma && (p.k == 0 || p.k % 8 != 0 || reinterpret_cast<uintptr_t>(p.x) % 16 != 0)) return false;
  if (i.in != p.in || i.bits != p.bits || (p.block < p.k && p.block % i.unit != 0)) return false;
  return i.in == DType::kF32 ? p.m <= i.tile_m : i.float_zero_points == p.float_zero_points();
}

// Seconds, as predicted from the description of the GPU.
double estimate_time(Instance const& i, int split, BlockScaledMm const& p, Gpu const& gpu) {
  constexpr double kRoundTrip = 1e-6;  // from asking memory for a step's weights to having them
  constexpr double kL2 = 40;           // bytes of L2 that an SM gets in a cycle
  constexpr double kSecond = 2.5e-6;   // of the kernel that adds parts
  double const tiles_m = double(ceil_div(p.m, i.tile_m)), tiles_n = double(ceil_div(p.n, i.rows));
  int const parts = count_parts(p, i.step, split);
  double const blocks = tiles_m * tiles_n * p.batch * parts;
  double const cycles = std::min<double>(gpu.sm_count, blocks) * gpu.clock;  // of the SMs that have a block
  double const waves = std::ceil(blocks / (gpu.sm_count * i.blocks_per_sm));
  double const turns = waves * double(ceil_div(ceil_div(p.k, i.step), parts)) * kRoundTrip;
  // Memory has the weights to read once, and L2 what every block reads.
  double const weights = double(p.batch) * p.n * p.row_bytes(), x = double(p.batch) * p.m * p.k * bytes_of(p.in);
  double const reading =
      std::max(weights / gpu.copy_rate, (weights * tiles_m + x * tiles_n / i.share) / (kL2 * cycles));
  // Instructions of a lane for each of its weights, within a tenth of what benchmarks/block_scaled_mm/README.md counts:
  // to dequantize it, and to multiply it and to scale sums for each row of x. An SM has 128 lanes. On an H200 the
  // kernels of 16 to 256 rows took 2.5 to 3 times as long as that (int4 in blocks of 128, 28672 x 8192).
  constexpr double kIssued = 0.37;
  double const to_float = p.in == DType::kF32 ? 3 : p.bits == 4 ? 3.3 : p.in == DType::kF16 ? 4.2 : 5.7;
  double const of_row = p.in == DType::kF32 ? 1 : 4.0 / i.unit;
  // With wgmma the tensor cores' products come beside those instructions: predicted, not measured.
  double const tiles = tiles_m * tiles_n * i.rows * double(p.k) * p.batch;  // of one weight by all rows of x of a tile
  double const scaling = i.scale_weights ? 1 : i.tile_m / 128.0;
  double const issued = i.wgmma ? (p.bits == 4 ? 2.6 : 4) + scaling : to_float + of_row * i.tile_m;
  double const issuing = tiles * issued / (kIssued * 128 * cycles);
  double const rate = 0.7 * gpu.peak / 2 * cycles / (gpu.sm_count * gpu.clock);
  double const multiplying = i.wgmma ? 2 * tiles * i.tile_m / rate : 0;
  auto const cube = [](double seconds) { return seconds * seconds * seconds; };
  double const adding = parts > 1 && i.wgmma ? 0.5e-6
                        : parts > 1 ? kSecond + 4.0 * parts * sums_of_part(p) / (kL2 * gpu.sm_count * gpu.clock)
                                    : 0;
  return std::cbrt(cube(turns) + cube(reading) + cube(issuing) + cube(multiplying)) + adding;
}

// Seconds of XLA's operations: one that dequantizes, and a product of x's dtype. On an H200 that product reaches 0.7 of
// the tensor cores' rate from some hundreds of rows on.
double estimate_dequantized(BlockScaledMm const& p, Gpu const& gpu) {
  constexpr double kLaunches = 6e-6;  // of the kernels, whose times are added, with what they wait for memory
  double const weights = double(p.batch) * p.n * p.k, size = bytes_of(p.in);
  double const x = double(p.batch) * p.m * p.k * size, out = double(p.batch) * p.m * p.n * bytes_of(p.out_dtype);
  double const dequantizing = (double(p.batch) * p.n * p.row_bytes() + weights * size) / gpu.copy_rate;
  double const reading = (weights * size + x + out) / gpu.copy_rate;
  double const rate = p.in == DType::kF32 ? gpu.peak / 32 : gpu.peak / 2;  // of the peak of 8 bits
  return kLaunches + dequantizing + std::max(reading, 2 * weights * p.m / (0.7 * rate));
}

struct Fastest {
  std::optional<BlockScaledMmChoice> choice;
  double seconds = std::numeric_limits<double>::infinity();
};

Fastest fastest(BlockScaledMm const& p, Gpu const& gpu) {
  Fastest best;
  for (BlockScaledMmChoice const choice : block_scaled_mm_choices(p, gpu)) {
    double const seconds = estimate_time(instances()[choice.instance], choice.split, p, gpu);
    if (!best.choice || seconds < best.seconds) best = {choice, seconds};
  }
  return best;
}

}  // namespace
}  // namespace block_scaled

using namespace block_scaled;

std::vector<BlockScaledMmChoice> block_scaled_mm_choices(BlockScaledMm const& p, Gpu const& gpu) {
  std::vector<BlockScaledMmChoice> found;
  if (compiled_for(gpu.arch) < kOldest) return found;
  for (int i = 0; i < int(instances().size()); ++i) {
    if (!runs(instances()[i], gpu) || !serves(instances()[i], p)) continue;
    for (int split : {1, 2, 4, 8}) {
      Instance const& one = instances()[i];
      bool const splits = one.in != DType::kF32 && one.share == 1 && !one.scale_weights;
      if (split > 1 && (!splits || workspace_of(p, {i, split}) > p.workspace_bytes)) break;
      if (!wanted().empty() && describe_block_scaled_mm({i, split}).find(wanted()) == std::string::npos) continue;
      found.push_back({i, split});
    }
  }
  return found;
}

std::optional<BlockScaledMmChoice> select_block_scaled_mm(BlockScaledMm const& p, Gpu const& gpu) {
  return fastest(p, gpu).choice;
}

bool dequantizes_once(BlockScaledMm const& p, Gpu const& gpu) {
  return wanted().empty() && estimate_dequantized(p, gpu) < fastest(p, gpu).seconds;
}

void restrict_block_scaled_mm(std::string words) { wanted() = std::move(words); }

int64_t workspace_of(BlockScaledMm const& p, BlockScaledMmChoice choice) {
  Instance const& i = instances().at(choice.instance);
  int const parts = count_parts(p, i.step, choice.split);
  return parts > 1 && !i.wgmma ? parts * sums_of_part(p) * int64_t(sizeof(float)) : 0;
}

std::string describe_block_scaled_mm(BlockScaledMmChoice choice) {
  Instance const& i = instances().at(choice.instance);
  auto const text = [](int number) { return std::to_string(number); };
  std::string const words = (i.wgmma ? "sm90 wgmma " : "sm80 ") + text(i.tile_m) + "x" + text(i.rows) + "x" +
                            text(i.step) + (i.share > 1 ? " cluster " + text(i.share) : "") +
                            (choice.split > 1 ? " split-K " + text(choice.split) : "") + " int" + text(i.bits);
  if (i.in == DType::kF32) return words + " weights by float32";
  return words + (i.scale_weights ? " weights scaled each " : " weights, sums scaled each ") + text(i.unit) +
         (i.float_zero_points ? ", float zero points" : "");
}

cudaError_t prepare_block_scaled_mm() {
  static OncePerDevice once;
  return once([] {
    Gpu const* gpu;
    if (cudaError_t const error = current_gpu(gpu)) return error;
    if (compiled_for(gpu->arch) < kOldest) return cudaSuccess;
    for (Instance const& i : instances()) {
      if (!runs(i, *gpu)) continue;
      bool fits;
      if (cudaError_t const error = i.prepare(fits)) return error;
    }
    if (cudaError_t const error = prepare_dequantize_weights()) return error;
    return prepare_add_parts();
  });
}

cudaError_t launch_block_scaled_mm(BlockScaledMm const& p, BlockScaledMmChoice choice, Submit const& submit) {
  if (p.m == 0 || p.n == 0 || p.batch == 0) return cudaSuccess;
  return instances()[choice.instance].launch(p, choice.split, submit);
}

}  // namespace jax_qmm
