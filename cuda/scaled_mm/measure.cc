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

template <auto destroy>
struct Destroy {
  template <class T>
  void operator()(T* made) const {
    destroy(made);
  }
};
using Buffer = std::unique_ptr<void, Destroy<cudaFree>>;
using Stream = std::unique_ptr<CUstream_st, Destroy<cudaStreamDestroy>>;
using Event = std::unique_ptr<CUevent_st, Destroy<cudaEventDestroy>>;
using Graph = std::unique_ptr<CUgraph_st, Destroy<cudaGraphDestroy>>;
using GraphExec = std::unique_ptr<CUgraphExec_st, Destroy<cudaGraphExecDestroy>>;

template <class Owner, class Create, class... Args>
Owner make(Create create, Args... args) {
  typename Owner::pointer made;
  check(create(&made, args...));
  return Owner(made);
}

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

std::vector<double> measure_scaled_mm(ScaledMm const& shape, std::vector<ScaledMmChoice> const& choices, Gpu const& gpu,
                                      std::string const& pattern, int rounds) {
  if (pattern.empty() || rounds < 1) throw std::invalid_argument("measuring needs a pattern and a round");
  auto check_choices = [&] {
    for (ScaledMmChoice choice : choices) check_scaled_mm_choice(shape, choice, gpu);
  };
  check_choices();  // without a GPU as well
  OnDevice const on_device(gpu);
  check(prepare_scaled_mm());
  check_choices();  // now that it is known which kernels fit
  size_t const a_bytes = size_t(shape.m) * shape.k, b_bytes = size_t(shape.n) * shape.k;
  size_t const out_bytes = size_t(shape.m) * shape.n * bytes_of(shape.out_dtype);
  int64_t workspace_bytes = 0;
  for (ScaledMmChoice choice : choices) workspace_bytes = std::max(workspace_bytes, workspace_of(shape, choice));
  size_t const set_bytes = a_bytes + b_bytes + out_bytes;
  int const sets = std::clamp<int>(400'000'000 / set_bytes + 1, 2, 24);

  std::vector<Buffer> buffers;
  auto allocate = [&](size_t bytes) {
    buffers.push_back(make<Buffer>(cudaMalloc, bytes));
    return buffers.back().get();
  };
  std::vector<float> const scales(shape.m + shape.n, 0.01f);
  void* const workspace = workspace_bytes > 0 ? allocate(workspace_bytes) : nullptr;
  std::vector<ScaledMm> problems(sets, shape);
  for (ScaledMm& problem : problems) {
    problem.batch = 1;
    problem.workspace = workspace;
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

  Stream const stream = make<Stream>(cudaStreamCreate);
  Event const begin = make<Event>(cudaEventCreate), end = make<Event>(cudaEventCreate);
  auto milliseconds = [&](auto work) {
    float elapsed;
    check(cudaEventRecord(begin.get(), stream.get()));
    work();
    check(cudaEventRecord(end.get(), stream.get()));
    check(cudaEventSynchronize(end.get()));
    check(cudaEventElapsedTime(&elapsed, begin.get(), end.get()));
    return elapsed;
  };
  std::vector<GraphExec> graphs;
  std::vector<int> repeats;
  for (ScaledMmChoice choice : choices) {
    auto launch_all = [&] {
      for (ScaledMm const& problem : problems) check(launch_scaled_mm(problem, choice, gpu, on_stream(stream.get())));
    };
    // As many launches as make the graph's own start small beside them.
    launch_all();
    repeats.push_back(std::clamp<int>(3 / milliseconds(launch_all), 1, std::max(1, 200 / sets)));
    check(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeRelaxed));
    for (int i = 0; i < repeats.back(); ++i) launch_all();
    Graph const graph = make<Graph>([&](cudaGraph_t* made) { return cudaStreamEndCapture(stream.get(), made); });
    graphs.push_back(make<GraphExec>(cudaGraphInstantiate, graph.get(), 0));
  }
  std::vector<std::vector<double>> times(choices.size());
  std::vector<size_t> order(choices.size());
  std::iota(order.begin(), order.end(), 0);
  std::mt19937 random;                             // the same orders every time
  for (int round = 0; round <= rounds; ++round) {  // the first one warms up
    // Shuffled, so that no choice always follows the one that draws the most power and lowers the clock.
    std::shuffle(order.begin(), order.end(), random);
    for (size_t i : order) {
      double const us = milliseconds([&] { check(cudaGraphLaunch(graphs[i].get(), stream.get())); }) * 1e3;
      if (round > 0) times[i].push_back(us / sets / repeats[i]);
    }
  }
  std::vector<double> medians;
  for (std::vector<double>& t : times) {
    std::nth_element(t.begin(), t.begin() + t.size() / 2, t.end());
    medians.push_back(t[t.size() / 2]);
  }
  return medians;
}

}  // namespace jax_qmm
