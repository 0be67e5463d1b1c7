// Choosing a kernel by its predicted time, preparing all of them, and launching one.
#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "block_scaled_mm/instances.h"
#include "core/archs.h"
#include "core/prepare.h"
#include "core/prepared_kernels.h"

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
    add_wgmma_instances<DType::kBF16>(found);
    add_wgmma_instances<DType::kF16>(found);
    add_wgmma_instances<DType::kF8E4M3>(found);
    add_wgmma_windows(found);
#endif
    return found;
  }();
  return all;
}

std::string& wanted() {
  static std::string words;
  return words;
}

PreparedKernels prepared;

bool runs_on(Gpu const& gpu, int instance) {
  return (!instances()[instance].wgmma || gpu.arch == 90) && prepared.can_run(gpu, instance);
}

bool serves(Instance const& i, BlockScaledMm const& p) {
  if (i.windows != p.windows.has_value()) return false;
  constexpr int kChannels = 64;  // of a row of what TMA loads of images
  if (i.wgmma && i.windows && (p.windows->channels % kChannels != 0 || !has_im2col(*p.windows))) return false;
  // Rows of x that TMA can load.
  if (i.wgmma && (p.k == 0 || p.k * bytes_of(p.in) % 16 != 0 || reinterpret_cast<uintptr_t>(p.x) % 16 != 0))
    return false;
  if (i.in != p.in || i.bits != p.bits || (p.block < p.k && p.block % i.unit != 0)) return false;
  if (i.direct && p.m > i.tile_m) return false;
  if (i.persistent) {
    bool const has_boxes = p.n % 8 == 0 && reinterpret_cast<uintptr_t>(p.out) % 16 == 0;  // of results, for TMA
    if (bytes_of(p.out_dtype) != 2 || !has_boxes || count_tiles(i, p) * ceil_div(p.k, i.step) > INT32_MAX) return false;
  }
  return i.in == DType::kF32 ? p.m <= i.tile_m : i.float_zero_points == p.float_zero_points();
}

struct Costs {
  double launch, block;      // seconds, of a block beside its steps
  double neighbour;          // by how much each block more on an SM slows a step down
  double dequantizing, row;  // cycles of a lane for each of its weights: once, and for each row of x
  double l2;                 // bytes that an SM gets of it in a cycle
  double copying;            // of a copy's rate, at which weights come
  double adding = 2.6e-6;    // seconds, of a second kernel for the sums of parts beside reading them
  // Of persistent blocks, in seconds: from one tile to the next (not with gelu or silu), and to share tiles; and the
  // part by which steps take longer where blocks are at different columns of x.
  double next_tile = 0, sharing = 0, apart = 0;
  double rate = 0.89;  // of the tensor cores' peak
};

// Fitted to times of kernels on seven weights of int4 and int8 in blocks of 128 (what shorter blocks add to
// h200/w4a16_blocks.csv, windows to h200/weight_only_conv_kernels.csv): those of wgmma to 1310 on an H200, of
// direct kernels to 1580 on an H100 (benchmarks/block_scaled_mm/README.md), the others to an earlier H200 run.
Costs costs_of(Instance const& i) {
  bool const int4 = i.bits == 4;
  double const unit = i.unit;
  if (i.in == DType::kF32) return {2e-6, 1.9e-6, 0.33, 7.7, 2.6, 18.6, 1};
  if (i.in == DType::kF8E4M3 && i.persistent) return {1.5e-6, 2.4e-6, 0, 5.3, 3.1 / unit, 200, 1, 0, 2e-6, 2.6e-6};
  // Not fitted: by the instructions of the loop, beside those of float16.
  if (i.in == DType::kF8E4M3) return {2.4e-6, 3.0e-6, 0.7, 6.5, 3.25 / unit, 48, 1};
  if (i.persistent && i.scale_weights)
    return {1.5e-6, 1.8e-6, 0, int4 ? 4.6 : 7.6, 0.037, 200, 1, 0, 8e-9 * i.tile_m, 2.8e-6, 0.027};
  double const waits = 1.2 * (128 / unit - 1);  // for the sums of each unit of a step
  if (i.persistent && i.rows > 128) return {1.5e-6, 2.4e-6, 0, 3.5 + waits, 0.037, 200, 1, 0, 1.1e-6, 3.2e-6};
  if (i.persistent) return {1.5e-6, 2.4e-6, 0, (int4 ? 4.2 : 5.6) + waits, 0.037, 200, 1, 0, 1.1e-6, 2.8e-6};
  if (i.wgmma) return {2.9e-6, 3.4e-6, 0.7, int4 ? 4.9 : 6.7, 3.64 / 128, 48, 1, 0, 0, 0, 0, 0.79};
  if (i.direct) return {3.2e-6, 0.5e-6, 0.54, int4 ? 4.1 : 5.8, 22.4 / unit, 21.7, 1, 1.1e-6};
  return {2e-6, 1.9e-6, 0.33, int4 ? 8.4 : i.in == DType::kF16 ? 10.7 : 14.5, 10.2 / unit, 18.6, 1};
}

// Values of x that are read from memory: of windows, which share pixels, no more than the images have.
double values_of_x(BlockScaledMm const& p) {
  double const values = double(p.batch) * p.m * p.k;
  if (!p.windows) return values;
  double images = double(p.windows->images) * p.windows->channels;
  for (int const size : p.windows->image) images *= size;
  return std::min(values, images);
}

// Of what goes on at the same time, and is in its own way where both take as long.
double beside(double a, double b) { return std::cbrt(a * a * a + b * b * b); }

// Seconds, as predicted from the description of the GPU.
double estimate_time(Instance const& i, int split, BlockScaledMm const& p, Gpu const& gpu) {
  Costs const costs = costs_of(i);
  double const tiles_m = double(ceil_div(p.m, i.tile_m)), tiles_n = double(ceil_div(p.n, i.rows));
  int const parts = i.persistent ? 1 : count_parts(p, i.step, split);
  Streams const streams = i.persistent ? streams_of(i, p, split, gpu) : Streams{};
  double const blocks = i.persistent ? streams.blocks() : tiles_m * tiles_n * p.batch * parts;
  // Clusters of four find no place on the last SMs of some GPCs.
  double const slots = gpu.sm_count * i.blocks_per_sm * (i.wgmma && parts >= 4 ? 0.9 : 1.0);
  // The blocks of a cluster may all be on one SM while others have none.
  bool const packed = i.wgmma && parts > 1;
  double const resident =
      packed ? i.blocks_per_sm : std::min<double>(i.blocks_per_sm, std::ceil(blocks / gpu.sm_count));
  // An SM has 128 lanes. With wgmma the tensor cores' products come beside them.
  double const cycles = costs.dequantizing + costs.row * (i.scale_weights ? 128 : i.tile_m);
  double const issuing = double(i.rows) * i.step * cycles / (128 * gpu.clock) * (1 + costs.neighbour * (resident - 1));
  double const rate = costs.rate * gpu.peak / bytes_of(i.in) / gpu.sm_count;  // the peak is of 8 bits
  constexpr double kPixel = 3.5;  // cycles for each of a row of channels that TMA looks up: benchmarks/conv/README.md
  double const finding = i.windows && i.wgmma ? 2 * i.tile_m / i.share * kPixel / gpu.clock : 0;
  double const multiplying = i.wgmma ? std::max(2.0 * i.rows * i.step * i.tile_m * resident / rate, finding) : 0;
  double const steps = double(ceil_div(ceil_div(p.k, i.step), parts));
  double const sending = parts > 1 && i.wgmma ? 0.041e-6 * i.tile_m : 0;  // of sums to the blocks that share K
  double const waves = std::ceil(blocks / slots);
  double const step = beside(issuing, multiplying);
  double computing = waves * (steps * step + costs.block + sending);
  if (i.persistent) {
    double const tiles = std::ceil(double(streams.tiles) / streams.count);  // that a block ends, one after the other
    double const each = split > 1 ? double(streams.tiles) * streams.steps / streams.count : tiles * streams.steps;
    // Sums go to memory once from each block, and come from those that have the rest of a tile.
    double const sums = 1.7e-6 * (1 + std::ceil(double(streams.count) / streams.tiles)) * i.tile_m / 256;
    double const sharing = split > 1 ? costs.sharing + sums + costs.apart * each * step : 0;
    computing = each * step + costs.block + (tiles - 1) * costs.next_tile + sharing;
  }
  // Memory has the weights to read once, and L2 what every block reads.
  double const of_l2 = costs.l2 * std::min<double>(gpu.sm_count, blocks) * gpu.clock;
  double const weights = double(p.batch) * p.n * p.row_bytes(), x = double(p.batch) * p.m * p.k * bytes_of(p.in);
  double const all = weights + values_of_x(p) * bytes_of(p.in) + double(p.batch) * p.m * p.n * bytes_of(p.out_dtype);
  double const reading = std::max({weights / (costs.copying * gpu.copy_rate),
                                   (weights * tiles_m + x * tiles_n / i.share) / of_l2, all / gpu.copy_rate});
  double const adding =
      parts > 1 && !i.wgmma ? costs.adding + 4.0 * parts * sums_of_part(p) / (40 * gpu.sm_count * gpu.clock) : 0;
  return costs.launch + beside(computing, reading) + adding;
}

// Seconds of the kernel that dequantizes the weights and of XLA's product, whose times are added; fitted likewise, to
// convolutions of 22 layers with 1, 8 and 64 images on an H200. What XLA does not fuse is done to float32 sums that a
// product has written, and to rounded ones of a convolution.
double estimate_dequantized(BlockScaledMm const& p, Gpu const& gpu) {
  double const launches = p.windows ? 20e-6 : 9e-6;
  double const weights = double(p.batch) * p.n * p.k, size = bytes_of(p.in);
  double const x = values_of_x(p) * size, out = double(p.batch) * p.m * p.n * bytes_of(p.out_dtype);
  double const dequantizing = (double(p.batch) * p.n * p.row_bytes() + weights * size) / (0.7 * gpu.copy_rate);
  double const reading = (weights * size + x + out) / gpu.copy_rate;
  double const sums = p.windows ? 2 * out : double(p.batch) * p.m * p.n * 8;
  double const adding = p.bias.data == nullptr ? 0 : 5e-6 + sums / gpu.copy_rate;
  double const rate = p.in == DType::kF32 ? gpu.peak / 32 : gpu.peak / 2;  // of the peak of 8 bits
  return launches + dequantizing + beside(reading, 2 * weights * p.m / (0.8 * rate)) + adding;
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
    if (!runs_on(gpu, i) || !serves(instances()[i], p)) continue;
    for (int split : {1, 2, 4, 8}) {
      Instance const& one = instances()[i];
      int const most = one.in == DType::kF32 ? 1 : one.scale_weights || one.persistent ? 2 : 8;  // of those that gain
      if (split > most || (split > 1 && workspace_of(p, {i, split}, gpu) > p.workspace_bytes)) break;
      if (!wanted().empty() && describe_block_scaled_mm({i, split}).find(wanted()) == std::string::npos) continue;
      found.push_back({i, split});
    }
  }
  return found;
}

std::optional<BlockScaledMmChoice> select_block_scaled_mm(BlockScaledMm const& p, Gpu const& gpu) {
  return fastest(p, gpu).choice;
}

double predict_block_scaled_mm(BlockScaledMm const& p, Gpu const& gpu) { return fastest(p, gpu).seconds; }

bool dequantizes_once(BlockScaledMm const& p, Gpu const& gpu) {
  return wanted().empty() && estimate_dequantized(p, gpu) < fastest(p, gpu).seconds;
}

void restrict_block_scaled_mm(std::string words) { wanted() = std::move(words); }

int64_t workspace_of(BlockScaledMm const& p, BlockScaledMmChoice choice, Gpu const& gpu) {
  Instance const& i = instances().at(choice.instance);
  if (i.persistent) return streams_of(i, p, choice.split, gpu).bytes(i.tile_m * i.rows);
  int const parts = count_parts(p, i.step, choice.split);
  return parts > 1 && !i.wgmma ? parts * sums_of_part(p) * int64_t(sizeof(float)) : 0;
}

std::string describe_block_scaled_mm(BlockScaledMmChoice choice) {
  Instance const& i = instances().at(choice.instance);
  auto const text = [](int number) { return std::to_string(number); };
  std::string const words = std::string(i.windows ? "windows " : "") +
                            (i.wgmma    ? "sm90 wgmma "
                             : i.direct ? "sm80 direct "
                                        : "sm80 ") +
                            text(i.tile_m) + "x" + text(i.rows) + "x" + text(i.step) +
                            (i.share > 1 ? " cluster " + text(i.share) : "") +
                            (i.persistent       ? choice.split > 1 ? " stream-K" : " persistent"
                             : choice.split > 1 ? " split-K " + text(choice.split)
                                                : "") +
                            " int" + text(i.bits);
  if (i.in == DType::kF32) return words + " weights by float32";
  if (i.in == DType::kF8E4M3) return words + " weights by float8_e4m3fn, sums scaled each " + text(i.unit);
  return words + (i.scale_weights ? " weights scaled each " : " weights, sums scaled each ") + text(i.unit) +
         (i.float_zero_points ? ", float zero points" : "");
}

cudaError_t prepare_block_scaled_mm() {
  static OncePerDevice once;
  return once([] {
    Gpu const* gpu;
    if (cudaError_t const error = current_gpu(gpu)) return error;
    if (compiled_for(gpu->arch) < kOldest) return cudaSuccess;
    cudaError_t const error = prepared.prepare(*gpu, int(instances().size()), [&](int i, bool& fits) {
      return runs_on(*gpu, i) ? instances()[i].prepare(fits) : cudaSuccess;
    });
    if (error) return error;
    if (cudaError_t const error = prepare_dequantize_weights()) return error;
    return prepare_add_parts();
  });
}

cudaError_t launch_block_scaled_mm(BlockScaledMm const& p, BlockScaledMmChoice choice, Submit const& submit) {
  if (p.m == 0 || p.n == 0 || p.batch == 0) return cudaSuccess;
  return instances()[choice.instance].launch(p, choice.split, submit);
}

}  // namespace jax_qmm
