#include "scaled_mm/measure.h"

#include <algorithm>
#include <memory>
#include <numeric>
#include <random>
#include <stdexcept>

namespace jax_qmm {
namespace {

void check(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(std::string("measuring: ") + cudaGetErrorString(error));
}

struct Buffer {
  explicit Buffer(size_t bytes) { check(cudaMalloc(&data, bytes)); }
  Buffer(Buffer const&) = delete;
  ~Buffer() { cudaFree(data); }
  void* data = nullptr;
};

// Repeats the pattern from `offset` on, so that no two buffers are alike.
void fill(void* data, size_t bytes, std::string const& pattern, size_t offset) {
  for (size_t done = 0; done < bytes;) {
    size_t const begin = (offset + done) % pattern.size();
    size_t const count = std::min(bytes - done, pattern.size() - begin);
    check(cudaMemcpy(static_cast<char*>(data) + done, pattern.data() + begin, count, cudaMemcpyHostToDevice));
    done += count;
  }
}

}  // namespace

std::vector<double> measure_scaled_mm(ScaledMm const& shape, std::vector<ScaledMmChoice> const& choices,
                                      std::string const& pattern, int rounds) {
  size_t const a_bytes = size_t(shape.m) * shape.k, b_bytes = size_t(shape.n) * shape.k;
  size_t const out_bytes = size_t(shape.m) * shape.n * (shape.out_dtype == DType::kF32 || shape.out_dtype == DType::kS32 ? 4 : 2);
  size_t const set_bytes = a_bytes + b_bytes + out_bytes;
  int const sets = std::clamp<int>(400'000'000 / set_bytes + 1, 2, 24);

  int device, sm_count;
  check(cudaGetDevice(&device));
  check(cudaDeviceGetAttribute(&sm_count, cudaDevAttrMultiProcessorCount, device));
  check(prepare_scaled_mm());
  std::vector<std::unique_ptr<Buffer>> buffers;
  auto allocate = [&](size_t bytes) {
    buffers.push_back(std::make_unique<Buffer>(bytes));
    return buffers.back()->data;
  };
  std::vector<float> const scales(shape.m + shape.n, 0.01f);
  std::vector<ScaledMm> problems(sets, shape);
  for (ScaledMm& problem : problems) {
    problem.batch = 1;
    problem.a = allocate(a_bytes);
    problem.b = allocate(b_bytes);
    problem.out = allocate(out_bytes);
    fill(const_cast<void*>(problem.a), a_bytes, pattern, buffers.size() * 4099);
    fill(const_cast<void*>(problem.b), b_bytes, pattern, buffers.size() * 8209);
    float* const device_scales = static_cast<float*>(allocate(scales.size() * sizeof(float)));
    check(cudaMemcpy(device_scales, scales.data(), scales.size() * sizeof(float), cudaMemcpyHostToDevice));
    problem.scale_a = {device_scales, DType::kF32, 1, 0, int64_t(shape.m * sizeof(float))};
    problem.scale_b = {device_scales + shape.m, DType::kF32, 1, 0, int64_t(shape.n * sizeof(float))};
  }

  cudaStream_t stream;
  cudaEvent_t begin, end;
  check(cudaStreamCreate(&stream));
  check(cudaEventCreate(&begin));
  check(cudaEventCreate(&end));
  std::vector<cudaGraphExec_t> graphs;
  std::vector<int> repeats;
  for (ScaledMmChoice choice : choices) {
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    auto launch_all = [&] {
      for (ScaledMm const& problem : problems) check(launch_scaled_mm(problem, choice, sm_count, on_stream(stream)));
    };
    // As many launches as make the graph's own start small beside them.
    float milliseconds;
    launch_all();
    check(cudaEventRecord(begin, stream));
    launch_all();
    check(cudaEventRecord(end, stream));
    check(cudaEventSynchronize(end));
    check(cudaEventElapsedTime(&milliseconds, begin, end));
    repeats.push_back(std::clamp<int>(3 / milliseconds, 1, std::max(1, 200 / sets)));
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed));
    for (int i = 0; i < repeats.back(); ++i) launch_all();
    check(cudaStreamEndCapture(stream, &graph));
    check(cudaGraphInstantiate(&executable, graph, 0));
    check(cudaGraphDestroy(graph));
    graphs.push_back(executable);
  }
  std::vector<std::vector<double>> times(choices.size());
  std::vector<size_t> order(choices.size());
  std::iota(order.begin(), order.end(), 0);
  std::mt19937 random;                             // the same orders every time
  for (int round = 0; round <= rounds; ++round) {  // the first one warms up
    // Shuffled, so that no choice always follows the one that draws the most power and lowers the clock.
    std::shuffle(order.begin(), order.end(), random);
    for (size_t i : order) {
      float milliseconds;
      check(cudaEventRecord(begin, stream));
      check(cudaGraphLaunch(graphs[i], stream));
      check(cudaEventRecord(end, stream));
      check(cudaEventSynchronize(end));
      check(cudaEventElapsedTime(&milliseconds, begin, end));
      if (round > 0) times[i].push_back(milliseconds * 1e3 / sets / repeats[i]);
    }
  }
  std::vector<double> medians;
  for (std::vector<double>& t : times) {
    std::nth_element(t.begin(), t.begin() + t.size() / 2, t.end());
    medians.push_back(t[t.size() / 2]);
  }
  for (cudaGraphExec_t graph : graphs) cudaGraphExecDestroy(graph);
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  cudaStreamDestroy(stream);
  return medians;
}

}  // namespace jax_qmm
