#include "simd/adam.h"

#include <type_traits>

#include "simd/land.h"

namespace offload {
namespace {

template <class T>
T* shifted(T* base, Dtype dtype, std::size_t elements) {
  using Byte = std::conditional_t<std::is_const_v<T>, const char, char>;
  return base ? static_cast<Byte*>(base) + elements * bytes_of(dtype) : nullptr;
}

}  // namespace

void adam_update(const Hyper& hyper, float* master, const void* grad, Dtype grad_dtype, float* exp_avg,
                 float* exp_avg_sq, void* out, Dtype out_dtype, std::size_t n, ThreadPool& pool, Level level) {
  if (!hyper.active) {
    if (out) convert(out, out_dtype, master, Dtype::f32, n, pool, level);
    return;
  }
  const Coefficients c = derive(hyper);
  const Kernels& kernels = kernels_of(level);
  pool.for_ranges(n, pool.grain(n, 8 * kBlock, 32 * kBlock), [&](std::size_t at, std::size_t count) {
    kernels.adam(c, master + at, shifted(grad, grad_dtype, at), grad_dtype, exp_avg + at, exp_avg_sq + at,
                 shifted(out, out_dtype, at), out_dtype, count);
  });
}

}  // namespace offload
