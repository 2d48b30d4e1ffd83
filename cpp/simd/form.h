// How an optimizer's state is stored, and where it is.
#pragma once

#include <cstddef>
#include <cstdint>

#include "simd/dtype.h"

namespace offload {

// The codes are part of the Python binding.
enum class Rule : int { adam = 0, lion = 1, adagrad = 2 };
enum class Master : int { f32 = 0, split = 1 };
enum class Moments : int { f32 = 0, bf16 = 1, i8 = 2 };

// Elements that share one scale, counted from the parameter's first; every range of a parameter that is updated by
// itself starts on a multiple of it.
constexpr std::size_t kGroup = 256;

struct Form {
  Master master = Master::f32;
  Moments moments = Moments::f32;
  Dtype grad = Dtype::f32;
  Dtype out = Dtype::f32;
};

// n elements; any alignment; none overlaps another. Null: `low` unless split, scales unless i8, a moment that the rule
// does not keep with its scale, and `out` where no copy is wanted.
struct Arrays {
  void* master;            // fp32; split: the bf16 parameter
  void* low;               // 16 bits an element
  const void* grad;        // form.grad
  void* exp_avg;           // fp32, bf16 or int8
  void* exp_avg_scale;     // fp32, one a group
  void* exp_avg_sq;        // fp32, bf16 or uint8; Adagrad's sum
  void* exp_avg_sq_scale;  // fp32, one a group
  void* out;               // form.out
};

constexpr bool keeps_exp_avg(Rule rule) { return rule != Rule::adagrad; }
constexpr bool keeps_exp_avg_sq(Rule rule) { return rule != Rule::lion; }
constexpr std::size_t bytes_of(Master master) { return master == Master::split ? 2 : 4; }
constexpr std::size_t bytes_of(Moments moments) {
  return moments == Moments::f32 ? 4 : moments == Moments::bf16 ? 2 : 1;
}
constexpr std::size_t groups_of(std::size_t n) { return n / kGroup + (n % kGroup != 0); }

}  // namespace offload
