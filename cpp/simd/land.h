// What happens to a gradient between the device and its update, and the other passes over one array.
#pragma once

#include <cstddef>

#include "simd/dispatch.h"
#include "simd/dtype.h"
#include "simd/thread_pool.h"

namespace offload {

// Sums of squares are taken per block of kBlock elements from the start of the range, so there are ceil(n / kBlock);
// a caller that cuts an array starts each range on a block. Within a block: 16 double lanes by index modulo 16, then
// pairwise. Squares of fp32 values are exact in double. A non-finite element makes its block's sum non-finite.

// dst = round(float(src) * scale), bit by bit src where neither dtype nor value changes, or, accumulating, dst =
// round(float(dst) + float(src) * scale), fp32 arithmetic. block_sums, where not null, receives the sums of squares of
// the values then in dst. dst may be src of the same dtype.
void land(void* dst, Dtype dst_dtype, const void* src, Dtype src_dtype, std::size_t n, bool accumulate, float scale,
          double* block_sums, ThreadPool& pool, Level level = current_level());

void sumsq(const void* src, Dtype dtype, std::size_t n, double* block_sums, ThreadPool& pool,
           Level level = current_level());

// To nearest even, denormals kept; NaN stays NaN. The same dtype copies bits.
void convert(void* dst, Dtype dst_dtype, const void* src, Dtype src_dtype, std::size_t n, ThreadPool& pool,
             Level level = current_level());

// dst *= factor, in fp32, rounded to dtype.
void scale(void* dst, Dtype dtype, std::size_t n, float factor, ThreadPool& pool, Level level = current_level());

}  // namespace offload
