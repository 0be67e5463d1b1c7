// Which boxes of a tile's rows TMA loads.
#pragma once

namespace jax_qmm {

// TMA fills lines beyond a matrix with zeros at a third of the rate at which it loads others from L2. So boxes without
// rows are loaded once into each of the stages, and left out as long as what is there is zeros: not any values, for
// which tensor cores would draw power.
template <int kStages, int kBoxes>
class BoxesOfTile {
  int there_ = kBoxes, first_ = kBoxes;
  int stale_ = kBoxes;  // of some stage that may not be zeros

 public:
  // The next tile has rows in `there` boxes, and takes `steps` stages.
  __device__ void start(int there, int steps) {
    there_ = min(there, kBoxes), first_ = max(there_, stale_);
    stale_ = steps < kStages ? first_ : there_;
  }

  __device__ int count(int step) const { return kBoxes == 1 ? 1 : step < kStages ? first_ : there_; }
};

}  // namespace jax_qmm
