// cuda/ffi/device.cc against a stand-in for the CUDA runtime.
#include "ffi/device.h"

#include <string>

#include "check.h"
#include "core/archs.h"

using namespace jax_qmm;

int driver = CUDART_VERSION, capability = 90;

cudaError_t cudaDriverGetVersion(int* version) {
  *version = driver;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = 3;
  return driver >= CUDART_VERSION / 1000 * 1000 ? cudaSuccess : cudaErrorInsufficientDriver;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrComputeCapabilityMajor ? capability / 10 : capability % 10;
  return cudaSuccess;
}
char const* cudaGetErrorString(cudaError_t) { return "a CUDA error"; }

bool contains(std::string const& text, char const* part) { return text.find(part) != std::string::npos; }

void fit_devices_begin_calls() {
  CHECK(begin_call().success());
  driver = CUDART_VERSION + 1000;
  CHECK(begin_call().success());
}

void unfit_devices_are_named() {
  capability = 75;
  std::string const why = begin_call().message();
  CHECK(contains(why, "GPU 3 has compute capability 7.5; this build has kernels for 80, 89, 90a, 100, and later ones"));
}

void old_drivers_are_named() {
  driver = CUDART_VERSION / 1000 * 1000 - 10;
  CHECK(contains(begin_call().message(), "install a driver for CUDA"));
}

// With the definitions JAX_QMM_ARCHS="80", "89", "90a", "100" and JAX_QMM_PTX=100.
void machine_code_runs_on_later_minor_versions() {
  for (int fit : {80, 86, 87, 89, 90, 100, 103}) CHECK(why_unfit_gpu("", fit).empty());
  for (int unfit : {70, 75, 91}) CHECK(!why_unfit_gpu("", unfit).empty());
  CHECK(compiled_for(86) == 80 && compiled_for(89) == 89 && compiled_for(90) == 90 && compiled_for(103) == 100);
}

void ptx_runs_on_all_later_versions() {
  for (int fit : {110, 120, 130}) CHECK(why_unfit_gpu("", fit).empty() && compiled_for(fit) == 100);
}

void what_comes_before_the_first_kernel_comes_once() {
  int calls = 0;
  call_before_first_kernel([&] { ++calls; });
  CHECK(calls == 0 && begin_call().success() && calls == 1);
  CHECK(begin_call().success() && calls == 1);
}

int main(int, char** arguments) {
  run_case(arguments, {
                          CASE(fit_devices_begin_calls),
                          CASE(unfit_devices_are_named),
                          CASE(old_drivers_are_named),
                          CASE(machine_code_runs_on_later_minor_versions),
                          CASE(ptx_runs_on_all_later_versions),
                          CASE(what_comes_before_the_first_kernel_comes_once),
                      });
}
