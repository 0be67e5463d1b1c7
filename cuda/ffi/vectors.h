// Vectors along the rows or the columns of a product. Those that an op takes stand in a table of its file, a line each.
#pragma once

#include <algorithm>
#include <string_view>

#include "ffi/buffers.h"

namespace jax_qmm {

enum class Values { kFloat, kInt32 };

// A vector of an op whose operands are read into a `Problem`.
template <class Problem, class Vector>
struct NamedVector {
  char const* name;
  Values values;
  int Problem::* length;  // of the dimension that it goes along; null for one value
  Vector Problem::* to;

  // Reads a buffer of shape (1 | batch, 1 | length).
  ffi::Error read(ffi::AnyBuffer const& buffer, Problem& problem) const {
    JAX_QMM_RETURN_IF_ERROR(values == Values::kInt32
                                ? check_dtype(buffer, name, {DType::kS32})
                                : check_dtype(buffer, name, {DType::kF32, DType::kBF16, DType::kF16}));
    JAX_QMM_RETURN_IF_ERROR(check_rank(buffer, name, 2));
    auto const dims = buffer.dimensions();
    int64_t const batch = problem.batch, most = length ? problem.*length : 1;
    if ((dims[0] != 1 && dims[0] != batch) || (dims[1] != 1 && dims[1] != most)) {
      return ffi::Error::InvalidArgument(std::string(name) + " has shape " + to_string(dims) + "; it needs 1 or " +
                                         std::to_string(batch) + " rows of 1 or " + std::to_string(most) + " values");
    }
    problem.*to = {buffer.untyped_data(), *dtype_of(buffer), dims[1] == 1 ? 0 : 1, dims[0] == 1 ? 0 : dims[1],
                   static_cast<int64_t>(buffer.size_bytes())};
    return ffi::Error::Success();
  }
};

// An operand of any other form.
template <class Problem>
struct NamedOperand {
  char const* name;
  ffi::Error (*read)(ffi::AnyBuffer const& buffer, Problem& problem);
};

// Reads the buffers that `names` names in their order, separated by spaces, as the table's entry of that name does; all
// that this depends on of `problem` is known.
template <class Problem, class Named, size_t count>
ffi::Error read_vectors(ffi::RemainingArgs buffers, std::string_view names, Named const (&table)[count],
                        Problem& problem) {
  for (size_t i = 0; i < buffers.size(); ++i) {
    ffi::ErrorOr<ffi::AnyBuffer> const buffer = buffers.get<ffi::AnyBuffer>(i);
    if (!buffer.has_value()) return buffer.error();
    std::string_view const name = names.substr(0, names.find(' '));
    names.remove_prefix(std::min(names.size(), name.size() + 1));
    auto const named = std::find_if(table, table + count, [&](auto const& vector) { return vector.name == name; });
    if (named == table + count) {
      return ffi::Error::InvalidArgument("operand " + std::to_string(i) + " of the vectors has the name \"" +
                                         std::string(name) + "\", which is none of this op's");
    }
    JAX_QMM_RETURN_IF_ERROR(named->read(*buffer, problem));
  }
  if (!names.empty()) return ffi::Error::InvalidArgument("names has more names than there are vectors");
  return ffi::Error::Success();
}

}  // namespace jax_qmm
