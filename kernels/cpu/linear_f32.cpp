// Linear layers with fp32 weights: a unit of its own, so that the types compile side by side.
#include "linear_float.h"

namespace headrace {

void linear_f32(const LinearArgs& args, const Step& step, int thread, int num_threads) {
  run_linear<FloatKernel<WeightType::kF32>>(args, step, thread, num_threads);
}

}  // namespace headrace
