// The activation of a product, from the attributes of its call.
#pragma once

#include <algorithm>
#include <iterator>
#include <string_view>
#include <utility>

#include "ffi/buffers.h"
#include "scaled_mm/problem.h"

namespace jax_qmm {

template <class Problem>
ffi::Error read_activation(std::string_view name, float low, float high, Problem& problem) {
  std::pair<char const*, Activation> constexpr kNames[] = {{"none", Activation::kNone},
                                                           {"clamp", Activation::kClamp},
                                                           {"gelu", Activation::kGelu},
                                                           {"silu", Activation::kSilu}};
  auto const found = std::find_if(std::begin(kNames), std::end(kNames), [&](auto pair) { return pair.first == name; });
  if (found == std::end(kNames)) {
    return ffi::Error::InvalidArgument("activation is \"" + std::string(name) +
                                       "\"; it needs to be none, clamp, gelu or silu");
  }
  problem.activation = found->second;
  problem.low = low, problem.high = high;
  if (problem.activation == Activation::kClamp && !(low <= high)) {
    return ffi::Error::InvalidArgument("low is " + std::to_string(low) + " and high is " + std::to_string(high) +
                                       "; clamp needs a low that is at most high");
  }
  return ffi::Error::Success();
}

}  // namespace jax_qmm
