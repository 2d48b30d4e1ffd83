// The table of single-threaded kernels that each instruction set supplies.
//
// [Note: per-target code] The target_*.cpp files are compiled with instruction sets that the running CPU may lack.
// Whatever they define is in an unnamed namespace, and they include nothing with inline functions beyond intrinsics:
// the linker keeps one copy of an inline function, and it may be the one with AVX-512 in it.
#pragma once

#include <cstddef>

#include "simd/dtype.h"
#include "simd/form.h"
#include "simd/hyper.h"

namespace offload {

struct Kernels {
  // One Adam step over n elements, in place; see adam.h.
  void (*adam)(const Coefficients& c, float* master, const void* grad, Dtype grad_dtype, float* exp_avg,
               float* exp_avg_sq, void* out, Dtype out_dtype, std::size_t n);
  // One step of any rule and form, on elements of one parameter from its `first`, a multiple of kGroup; see update.h.
  void (*update)(const Coefficients& c, const Form& form, const Arrays& arrays, std::uint64_t first, std::size_t n);
  // Between storage and fp32 values; see update.h.
  void (*split)(void* high, void* low, const float* src, std::size_t n);
  void (*join)(float* dst, const void* high, const void* low, std::size_t n);
  void (*encode)(void* codes, void* scales, const float* src, bool with_sign, std::size_t n);
  void (*decode)(float* dst, const void* codes, const void* scales, bool with_sign, std::size_t n);
  // dst = src * scale, or dst += src * scale; block_sums may be null; see land.h.
  void (*land)(void* dst, Dtype dst_dtype, const void* src, Dtype src_dtype, std::size_t n, bool accumulate,
               float scale, double* block_sums);
  void (*sumsq)(const void* src, Dtype dtype, std::size_t n, double* block_sums);
  // Between different dtypes.
  void (*convert)(void* dst, Dtype dst_dtype, const void* src, Dtype src_dtype, std::size_t n);
  // Past the caches: for copies that are not read again soon.
  void (*stream_copy)(void* dst, const void* src, std::size_t nbytes);
};

extern const Kernels kernels_scalar;
extern const Kernels kernels_neon;
extern const Kernels kernels_avx2;
extern const Kernels kernels_avx512;

// Elements that one sum of squares covers; ranges given to different threads start on multiples of it.
constexpr std::size_t kBlock = 4096;

}  // namespace offload
