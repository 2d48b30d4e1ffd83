#include "simd/hyper.h"

#include <cmath>

namespace offload {
namespace {

std::uint64_t mixed(std::uint64_t x) {  // splitmix64
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
  x = (x ^ x >> 27) * 0x94d049bb133111ebu;
  return x ^ x >> 31;
}

// base^exponent by squaring. The library's pow() may differ in the last place from one machine to the next. This one's
// error, at most exponent units of 2^-53, moves 1 - base^exponent by less than 2^-53 / (1 - base) of itself.
double power(double base, std::int64_t exponent) {
  double result = 1.0;
  for (; exponent > 0; exponent >>= 1, base *= base)
    if (exponent & 1) result *= base;
  return result;
}

}  // namespace

Coefficients derive(const Hyper& h) {
  Coefficients c;
  c.coupled = !h.decoupled && h.weight_decay != 0.0;
  c.grad_scale = static_cast<float>(h.maximize ? -h.grad_scale : h.grad_scale);
  c.l2 = static_cast<float>(h.decoupled ? 0.0 : h.weight_decay);
  c.decay = static_cast<float>(h.decoupled ? 1.0 - h.lr * h.weight_decay : 1.0);
  c.from_grad = h.beta1 < 0.5;
  c.lerp1 = static_cast<float>(c.from_grad ? -h.beta1 : 1.0 - h.beta1);
  c.beta2 = static_cast<float>(h.beta2);
  c.take2 = static_cast<float>(1.0 - h.beta2);
  c.unbias2 = static_cast<float>(1.0 / std::sqrt(1.0 - power(h.beta2, h.step)));
  c.eps = static_cast<float>(h.eps);
  c.minus_step_size = static_cast<float>(-h.lr / (1.0 - power(h.beta1, h.step)));
  c.minus_lr = static_cast<float>(-h.lr);
  c.from_grad2 = h.beta2 < 0.5;
  c.lerp2 = static_cast<float>(c.from_grad2 ? -h.beta2 : 1.0 - h.beta2);
  c.rule = static_cast<Rule>(h.rule);
  c.key = mixed(mixed(h.seed) ^ static_cast<std::uint64_t>(h.step));
  return c;
}

}  // namespace offload
