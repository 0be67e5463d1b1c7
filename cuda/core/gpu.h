// A GPU, as far as the choice of kernels depends on it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <map>
#include <string>
#include <utility>

namespace jax_qmm {

struct Gpu {
  std::string name;  // the driver's, which is JAX's device_kind: "NVIDIA H200"
  int sm_count = 0;
  int arch = 0;                    // compute capability: 90 is 9.0
  double copy_rate = 0;            // bytes a second that a copy reads and writes together
  double peak = 0;                 // dense operations on 8 bits a second
  int64_t l2_bytes = 0;            // of a matrix that stays in L2 from one reading to the next
  std::map<int, int> cluster_sms;  // by blocks of a cluster: SMs that make whole ones, where not all do
  double clock = 0;                // of the SMs, in Hz
  int shared_memory = 0;           // bytes that a block may have; all blocks of an SM share little more
  int device = -1;                 // of this process; -1 where this describes a GPU of another machine

  // All that are alike have the same measured costs and choices.
  std::pair<std::string, int> model() const { return {name, sm_count}; }

  // The SMs of a cluster are of one GPC, which often has some that make no whole cluster.
  int sms_in_clusters(int blocks) const {
    auto const found = cluster_sms.find(blocks);
    return found == cluster_sms.end() ? sm_count : found->second;
  }
};

// Makes known what GPUs of this model are like. Without cluster_sms they are those of the first of its architecture,
// scaled to its SMs.
void describe_gpu(Gpu gpu);

// A GPU of another machine: one that was described, or else like the first of its architecture that was, scaled to its
// SMs. Throws std::invalid_argument where there is none.
Gpu gpu_of_model(std::string const& name, int sm_count, int arch);

// A device of this process, as described, or else scaled with what the driver says of its memory, or else as the driver
// says. Asks the driver in the first call alone.
cudaError_t gpu_of_device(int device, Gpu const*& gpu);
cudaError_t current_gpu(Gpu const*& gpu);

// Makes a GPU of this process the current one of this thread while it lives. Throws std::runtime_error where CUDA
// fails.
class OnDevice {
 public:
  explicit OnDevice(Gpu const& gpu);
  ~OnDevice() { cudaSetDevice(before_); }
  OnDevice(OnDevice const&) = delete;

 private:
  int before_;
};

}  // namespace jax_qmm
