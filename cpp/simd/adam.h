// One pass of Adam or AdamW over packed state: unscale, decay, moments, parameter, low-precision copy.
//
// With g the gradient widened to fp32 and the scalars of Coefficients, per element, each operation fp32 and correctly
// rounded:
//   g = g * grad_scale                      (coupled decay: g = fma(l2, p, g))
//   m = fma(lerp1, g - m, m)              (beta1 < 0.5: the last term is g)
//   v = fma(take2 * g, g, beta2 * v)
//   p = fma(minus_step_size, m / fma(sqrt(v), unbias2, eps), decay * p)
//   out = round(p)                          to nearest even, denormals kept
// which is torch.optim.AdamW (arXiv:1711.05101) or, coupled, torch.optim.Adam (arXiv:1412.6980), to a few ulp.
// A NaN that is written is 0x7fc00000. The bits depend on neither the instruction set, the number of threads, the
// alignment, nor how an array is split between calls. Denormals are kept: FTZ and DAZ must be off.
#pragma once

#include <cstddef>

#include "simd/dispatch.h"
#include "simd/dtype.h"
#include "simd/hyper.h"
#include "simd/thread_pool.h"

namespace offload {

// Arrays of n elements that do not overlap; any alignment. out may be null. An inactive hyper leaves the state alone
// and only writes out.
void adam_update(const Hyper& hyper, float* master, const void* grad, Dtype grad_dtype, float* exp_avg,
                 float* exp_avg_sq, void* out, Dtype out_dtype, std::size_t n, ThreadPool& pool,
                 Level level = current_level());

}  // namespace offload
