// Linear layers with bf16 weights: a unit of its own, so that the types compile side by side.
#include "linear_float.h"

namespace headrace {

void linear_bf16(const LinearArgs& args, const Step& step, int thread, int num_threads) {
  run_linear<FloatKernel<WeightType::kBF16>>(args, step, thread, num_threads);
}

}  // namespace headrace
