// An update's hyper-parameters as Python hands them over, and the fp32 scalars the kernels use.
#pragma once

#include <cstdint>

#include "simd/form.h"

namespace offload {

// 64 bytes, the same layout as offload.ops.HYPER.
struct Hyper {
  double lr;
  double beta1;
  double beta2;
  double eps;
  double weight_decay;
  double grad_scale;       // the gradient is multiplied by it before anything else
  std::int64_t step;       // this update's number, from 1
  std::uint8_t active;     // 0: the state stays as it is, only the low-precision copy is written
  std::uint8_t decoupled;  // 1: AdamW (decay of the parameter), 0: Adam (decay added to the gradient)
  std::uint8_t maximize;
  std::uint8_t rule;   // a Rule: 0 is Adam
  std::uint32_t seed;  // of the stochastic rounding of moments; one for each parameter
};
static_assert(sizeof(Hyper) == 64, "the layout is shared with Python");

// Each is computed once in double and rounded once to fp32.
struct Coefficients {
  float grad_scale;    // negative when maximizing
  float l2;            // weight_decay, coupled form only
  float decay;         // 1 - lr * weight_decay, decoupled form; else 1
  float lerp1;         // 1 - beta1, or -beta1 where that is smaller
  float beta2, take2;  // take2 = 1 - beta2
  float unbias2;       // 1 / sqrt(1 - beta2^step)
  float eps;
  float minus_step_size;  // -lr / (1 - beta1^step)
  float minus_lr;         // Lion and Adagrad correct no bias
  float lerp2;            // as lerp1, of beta2, for Lion
  bool coupled;
  bool from_grad;  // beta1 < 0.5: the average starts from the gradient, as in torch.lerp
  bool from_grad2;
  Rule rule;
  std::uint64_t key;  // of the stochastic rounding, from seed and step
};

Coefficients derive(const Hyper& hyper);

}  // namespace offload
