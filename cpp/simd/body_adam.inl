// The Adam step over any lanes. Included inside an unnamed namespace; see [Note: per-target code].

struct Nothing {};  // no low-precision copy

struct AdamScalars {
  Floats grad_scale, l2, decay, lerp1, beta2, take2, unbias2, eps, minus_step_size;
  bool from_grad;
};
inline AdamScalars adam_scalars(const Coefficients& c) {
  return {all(c.grad_scale), all(c.l2),      all(c.decay), all(c.lerp1),           all(c.beta2),
          all(c.take2),      all(c.unbias2), all(c.eps),   all(c.minus_step_size), c.from_grad};
}

inline void adam_averages(const AdamScalars& s, const Floats& g, Floats& m, Floats& v) {
  m = fma(s.lerp1, sub(g, m), s.from_grad ? g : m);
  v = fma(mul(s.take2, g), g, mul(s.beta2, v));
}
inline void adam_move(const AdamScalars& s, Floats& p, const Floats& m, const Floats& v) {
  const Floats size = fma(root(v), s.unbias2, s.eps);
  p = canonical(fma(s.minus_step_size, div(m, size), mul(s.decay, p)));
}
template <bool kCoupled>
inline void adam_step(const AdamScalars& s, Floats& p, Floats g, Floats& m, Floats& v) {
  g = mul(g, s.grad_scale);
  if constexpr (kCoupled) g = fma(s.l2, p, g);
  adam_averages(s, g, m, v);
  m = canonical(m), v = canonical(v);
  adam_move(s, p, m, v);
}

// Lanes from element i on. `out` is the copy's own address.
template <bool kCoupled, class Grad, class Out>
inline void adam_lanes(const AdamScalars& s, float* master, const Grad* grad, float* exp_avg, float* exp_avg_sq,
                       Out* out, std::size_t i) {
  ahead(master + i);
  ahead(grad + i);
  ahead(exp_avg + i);
  ahead(exp_avg_sq + i);
  Floats p = load(master + i), m = load(exp_avg + i), v = load(exp_avg_sq + i);
  adam_step<kCoupled>(s, p, load(grad + i), m, v);
  store(exp_avg + i, m);
  store(exp_avg_sq + i, v);
  store(master + i, p);
  if constexpr (!is_same<Out, Nothing>) store(out, p);
}

template <bool kCoupled, class Grad, class Out>
void adam_range(const Coefficients& c, float* master, const Grad* grad, float* exp_avg, float* exp_avg_sq, Out* out,
                std::size_t n) {
  constexpr bool kCopies = !is_same<Out, Nothing>;
  const AdamScalars s = adam_scalars(c);
  std::size_t i = 0;
  if constexpr (kCopies) {
    // Whole lines past the caches: nothing reads the copy soon, and a line that is written whole need not be read.
    if (reinterpret_cast<__UINTPTR_TYPE__>(out) % kLine == 0) {
      alignas(64) Out copied[kGroup];
      for (; i + kGroup <= n; i += kGroup) {
        for (std::size_t j = 0; j < kGroup; j += kLanes)
          adam_lanes<kCoupled>(s, master, grad, exp_avg, exp_avg_sq, copied + j, i + j);
        for (std::size_t j = 0; j < kGroup; j += kLine / sizeof(Out))
          stream(reinterpret_cast<char*>(out + i + j), reinterpret_cast<const char*>(copied + j));
      }
      stream_end();
    }
  }
  for (; i + kLanes <= n; i += kLanes) {
    if constexpr (kCopies)
      adam_lanes<kCoupled>(s, master, grad, exp_avg, exp_avg_sq, out + i, i);
    else
      adam_lanes<kCoupled>(s, master, grad, exp_avg, exp_avg_sq, out, i);
  }
  if (const std::size_t rest = n - i) {
    Floats p = load_some(master + i, rest), m = load_some(exp_avg + i, rest), v = load_some(exp_avg_sq + i, rest);
    adam_step<kCoupled>(s, p, load_some(grad + i, rest), m, v);
    store_some(exp_avg + i, m, rest);
    store_some(exp_avg_sq + i, v, rest);
    store_some(master + i, p, rest);
    if constexpr (kCopies) store_some(out + i, p, rest);
  }
}

void adam(const Coefficients& c, float* master, const void* grad, Dtype grad_dtype, float* exp_avg, float* exp_avg_sq,
          void* out, Dtype out_dtype, std::size_t n) {
  typed(grad, grad_dtype, [&](const auto* g) {
    const auto with = [&](auto* o) {
      c.coupled ? adam_range<true>(c, master, g, exp_avg, exp_avg_sq, o, n)
                : adam_range<false>(c, master, g, exp_avg, exp_avg_sq, o, n);
    };
    out ? typed(out, out_dtype, with) : with(static_cast<Nothing*>(nullptr));
  });
}
