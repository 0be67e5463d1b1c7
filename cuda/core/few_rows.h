// What the choice of a kernel knows of those for few rows, whose blocks read weights and share SMs.
#pragma once

#include <cmath>

namespace jax_qmm {

// In cycles: of a tile, of a step of K at least, and of a step for each tile that an SM has at a time.
struct FewRowsCycles {
  int tile, step, busy;

  // Of so many tiles with so many steps and `more` cycles of an SM each, of which blocks_per_sm share an SM.
  double of(double tiles, double steps, double more, int blocks_per_sm, int sm_count) const {
    auto const wave = [&](double of_sm) {
      return tile + steps * std::cbrt(std::pow(step, 3) + std::pow(of_sm * busy, 3)) + of_sm * more;
    };
    double const slots = double(sm_count) * blocks_per_sm, full = std::floor(tiles / slots),
                 rest = tiles - full * slots;
    return full * wave(blocks_per_sm) + (rest > 0 ? wave(std::ceil(rest / sm_count)) : 0);
  }
};

}  // namespace jax_qmm
