// What the parts of the CUDA runtime's API share.
#pragma once

#include <cuda_runtime_api.h>

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "machine.h"

namespace emu {

struct Fatbin {
  std::vector<std::string> ptx;
  Module* module = nullptr;
  std::string error;
};

struct Function {
  Fatbin* fatbin = nullptr;
  std::string name;
  Kernel* kernel = nullptr;
  int max_dynamic_shared = 48 << 10;
  bool nonportable_cluster = false;
};

struct State {
  std::recursive_mutex mutex;
  std::map<void const*, Function> functions;
  std::map<void const*, std::pair<Fatbin*, std::string>> variables;
  std::vector<std::unique_ptr<Module>> modules;
  std::map<void*, std::pair<void*, size_t>> allocations;  // what malloc gave, and the size
  cudaError_t last = cudaSuccess;
  std::vector<std::string> stats;
  uint64_t total_lane_instructions = 0;

  ~State();  // writes the statistics
};

State& state();
cudaError_t fail(cudaError_t e);  // keeps an error for cudaGetLastError
int capability();                 // such as 90
int attribute(cudaDeviceAttr a);
// The address of a __device__ or __constant__ variable; null where there is none.
void* symbol_address(void const* symbol, size_t* size = nullptr);
Module* module_of(Fatbin& f);  // null where it has none that can be read

}  // namespace emu
