#include "simd/update.h"

#include <algorithm>
#include <cstring>

#include "simd/land.h"

namespace offload {
namespace {

void* at(void* base, std::size_t bytes) { return base ? static_cast<char*>(base) + bytes : nullptr; }
const void* at(const void* base, std::size_t bytes) { return base ? static_cast<const char*>(base) + bytes : nullptr; }

Arrays shifted(const Form& form, const Arrays& a, std::size_t n) {
  const std::size_t moments = n * bytes_of(form.moments), scales = n / kGroup * sizeof(float);
  return {at(a.master, n * bytes_of(form.master)),
          at(a.low, 2 * n),
          at(a.grad, n * bytes_of(form.grad)),
          at(a.exp_avg, moments),
          at(a.exp_avg_scale, scales),
          at(a.exp_avg_sq, moments),
          at(a.exp_avg_sq_scale, scales),
          at(a.out, n * bytes_of(form.out))};
}

std::size_t grain(const ThreadPool& pool, std::size_t n) { return pool.grain(n, 8 * kBlock, 32 * kBlock); }

// out from the state as it is.
void refresh(const Form& form, const Arrays& a, std::size_t n, ThreadPool& pool, Level level) {
  if (!a.out) return;
  if (form.master == Master::f32) return convert(a.out, form.out, a.master, Dtype::f32, n, pool, level);
  const Kernels& kernels = kernels_of(level);
  pool.for_ranges(n, grain(pool, n), [&](std::size_t begin, std::size_t count) {
    float joined[kGroup];
    for (std::size_t done = 0; done < count; done += kGroup) {
      const Arrays here = shifted(form, a, begin + done);
      const std::size_t some = std::min(kGroup, count - done);
      kernels.join(joined, here.master, here.low, some);
      if (form.out == Dtype::f32)
        std::memcpy(here.out, joined, some * sizeof *joined);
      else
        kernels.convert(here.out, form.out, joined, Dtype::f32, some);
    }
  });
}

}  // namespace

void update(const Hyper& hyper, const Form& form, const Arrays& arrays, std::uint64_t first, std::size_t n,
            ThreadPool& pool, Level level) {
  if (!hyper.active) return refresh(form, arrays, n, pool, level);
  const Coefficients c = derive(hyper);
  const Kernels& kernels = kernels_of(level);
  const bool plain = c.rule == Rule::adam && form.master == Master::f32 && form.moments == Moments::f32;
  pool.for_ranges(n, grain(pool, n), [&](std::size_t begin, std::size_t count) {
    const Arrays a = shifted(form, arrays, begin);
    if (plain)
      kernels.adam(c, static_cast<float*>(a.master), a.grad, form.grad, static_cast<float*>(a.exp_avg),
                   static_cast<float*>(a.exp_avg_sq), a.out, form.out, count);
    else
      kernels.update(c, form, a, first + begin, count);
  });
}

void split(void* high, void* low, const float* src, std::size_t n, ThreadPool& pool, Level level) {
  const Kernels& kernels = kernels_of(level);
  pool.for_ranges(n, grain(pool, n), [&](std::size_t begin, std::size_t count) {
    kernels.split(at(high, 2 * begin), at(low, 2 * begin), src + begin, count);
  });
}

void join(float* dst, const void* high, const void* low, std::size_t n, ThreadPool& pool, Level level) {
  const Kernels& kernels = kernels_of(level);
  pool.for_ranges(n, grain(pool, n), [&](std::size_t begin, std::size_t count) {
    kernels.join(dst + begin, at(high, 2 * begin), at(low, 2 * begin), count);
  });
}

void encode(void* codes, void* scales, const float* src, bool with_sign, std::size_t n, ThreadPool& pool, Level level) {
  const Kernels& kernels = kernels_of(level);
  pool.for_ranges(n, grain(pool, n), [&](std::size_t begin, std::size_t count) {
    kernels.encode(at(codes, begin), at(scales, begin / kGroup * sizeof(float)), src + begin, with_sign, count);
  });
}

void decode(float* dst, const void* codes, const void* scales, bool with_sign, std::size_t n, ThreadPool& pool,
            Level level) {
  const Kernels& kernels = kernels_of(level);
  pool.for_ranges(n, grain(pool, n), [&](std::size_t begin, std::size_t count) {
    kernels.decode(dst + begin, at(codes, begin), at(scales, begin / kGroup * sizeof(float)), with_sign, count);
  });
}

}  // namespace offload
