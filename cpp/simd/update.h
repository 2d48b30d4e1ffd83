// One pass of any optimizer over any form of its state: master fp32 or split, moments fp32, bf16 or int8.
//
// [Note: arithmetic of updates]
// Each operation is fp32 and correctly rounded; the scalars are those of Coefficients. Masters and moments are widened
// to fp32 exactly (int8: with one rounding), a step is taken, and they are rounded to their storage:
//   g = g * grad_scale                      (coupled decay: g = fma(l2, p, g))
//   Adam, AdamW  as in adam.h
//   Lion         d = g - m; u = sign(fma(lerp1, d, m)); m = fma(lerp2, d, m)      (a beta < 0.5: the last term is g)
//                p = fma(minus_lr, u, decay * p)                                  (arXiv:2302.06675)
//   Adagrad      v = fma(g, g, v); p = fma(minus_lr, g / (sqrt(v) + eps), decay * p)   (torch.optim.Adagrad; its
//                lr_decay is the caller's, in lr)
//   out = round(p)                          to nearest even, denormals kept
// A NaN that is written is 0x7fc00000. The bits depend on neither the instruction set, the number of threads, the
// alignment, nor where a parameter is split, at multiples of kGroup elements.
//
// [Note: split masters]
// low is the low half of the fp32 master's bits; the bf16 parameter is (bits + 0x8000) >> 16, the master rounded to
// nearest, ties away from zero. bits = (parameter << 16) + sign_extended(low) for every pattern but a NaN's: NaN is
// made 0x7fc00000 first. (To nearest even is not possible: an even parameter would have 65537 masters.)
//
// [Note: stochastic rounding]
// Moments in bf16 and int8 are rounded up or down at random so that their mean is exact to 2^-16 of a unit in the last
// place: changes that are small beside them, as of exp_avg_sq with beta2 = 0.999, add up instead of being lost. With
// mix splitmix64's function and bits = mix(mix(mix(seed) ^ step) ^ (i / 256)), the random word of element i of a
// parameter is
//   low32(bits) + high32(bits) * (i mod 256),
// of which the lowest 16 (int8: 19) bits are for exp_avg, the highest for exp_avg_sq. They are added before the lower
// 16 (19) bits of the float are dropped.
//
// [Note: moments in bytes]
// A group of kGroup elements shares an fp32 scale; a code is the offset logarithm of ITU-T G.711's mu-law, as the upper
// bits of a float: with f = |x| / scale + 2 (an fma with the scale's inverse), the lower bits of the exponent of f and
// 4 bits of fraction. exp_avg: a sign bit and 127 steps to 494 scales; exp_avg_sq: 255 steps to 126974. The scale is
// the group's largest magnitude over that, a little more for roundings, at least 2^-126; a value is fma(f, scale,
// -2 * scale). Neighbouring values are at most (|x| + 2 * scale) / 16 apart, so an error is below
//   |x| / 16 + largest / 3950 for exp_avg, x / 16 + largest / 1015000 for exp_avg_sq
// (scales of 2^-126: and below 2^-129); encode(), to nearest, makes half of it. In a group with anything above 0
// exp_avg_sq has no code 0, which might divide by eps: zeros read as the least value. A group with a value that is not
// finite has the scale NaN: it reads as NaN, whole. All bytes zero are zeros.
#pragma once

#include "simd/adam.h"
#include "simd/form.h"

namespace offload {

// n elements of one parameter, of which `first`, a multiple of kGroup, is the number of the first in the parameter. An
// inactive hyper leaves the state alone and only writes out.
void update(const Hyper& hyper, const Form& form, const Arrays& arrays, std::uint64_t first, std::size_t n,
            ThreadPool& pool, Level level = current_level());

void split(void* high, void* low, const float* src, std::size_t n, ThreadPool& pool, Level level = current_level());
void join(float* dst, const void* high, const void* low, std::size_t n, ThreadPool& pool,
          Level level = current_level());

// Moments from and to fp32 values, groups from the first element on; without a sign, what is negative is taken as 0.
void encode(void* codes, void* scales, const float* src, bool with_sign, std::size_t n, ThreadPool& pool,
            Level level = current_level());
void decode(float* dst, const void* codes, const void* scales, bool with_sign, std::size_t n, ThreadPool& pool,
            Level level = current_level());

}  // namespace offload
