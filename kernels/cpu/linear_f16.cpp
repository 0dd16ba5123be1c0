// Linear layers with fp16 weights: a unit of its own, so that the types compile side by side.
#include "linear_float.h"

namespace headrace {

void linear_f16(const LinearArgs& args, const Step& step, int thread, int num_threads) {
  run_linear<FloatKernel<WeightType::kF16>>(args, step, thread, num_threads);
}

}  // namespace headrace
