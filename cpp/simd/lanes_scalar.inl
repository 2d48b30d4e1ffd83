// Sixteen lanes in plain C++: what every CPU can run, and the reading of what the other lanes_*.inl do.
// Included inside an unnamed namespace; see [Note: per-target code].

struct Floats {
  float x[kLanes];
};
struct Doubles {
  double x[kLanes];
};

inline std::uint32_t bits_of(float value) {
  std::uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof bits);
  return bits;
}
inline float float_of(std::uint32_t bits) {
  float value;
  __builtin_memcpy(&value, &bits, sizeof value);
  return value;
}

inline float widen(float value) { return value; }
inline float widen(Bf16 value) { return float_of(static_cast<std::uint32_t>(value.bits) << 16); }
inline float widen(Half value) {
  const std::uint32_t sign = (value.bits & 0x8000u) << 16, exponent = value.bits >> 10 & 31,
                      fraction = value.bits & 1023;
  if (exponent == 31) return float_of(sign | 0x7f800000u | fraction << 13 | (fraction ? 0x400000u : 0));
  if (exponent == 0) return float_of(sign | bits_of(static_cast<float>(fraction) * 0x1p-24f));
  return float_of(sign | (exponent + 112) << 23 | fraction << 13);
}

inline void narrow(float* to, float value) { *to = value; }
inline void narrow(Bf16* to, float value) {
  const std::uint32_t bits = bits_of(value);
  to->bits = static_cast<std::uint16_t>(value != value ? 0x7fc0u : (bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}
inline void narrow(Half* to, float value) {
  const std::uint32_t bits = bits_of(value), sign = bits >> 16 & 0x8000u, size = bits & 0x7fffffffu;
  std::uint32_t half;
  if (size > 0x7f800000u)
    half = 0x7e00u | (size >> 13 & 1023);
  else if (size >= 0x47800000u)
    half = 0x7c00u;
  else if (size < 0x38800000u)  // denormal: 0.5 has halves of its last place at 2^-24, so the sum rounds there
    half = bits_of(float_of(size) + 0.5f) - 0x3f000000u;
  else
    half = (size - (112u << 23) + 0xfffu + (size >> 13 & 1)) >> 13;
  to->bits = static_cast<std::uint16_t>(sign | half);
}

template <class T>
inline Floats load(const T* p) {
  T raw[kLanes];  // by memcpy: p may not be aligned to its elements
  __builtin_memcpy(raw, p, sizeof raw);
  Floats r;
  for (int i = 0; i < kLanes; ++i) r.x[i] = widen(raw[i]);
  return r;
}
template <class T>
inline void store(T* p, const Floats& a) {
  T raw[kLanes];
  for (int i = 0; i < kLanes; ++i) narrow(raw + i, a.x[i]);
  __builtin_memcpy(p, raw, sizeof raw);
}

#define OFFLOAD_EACH_LANE(EXPRESSION)                   \
  Floats r;                                             \
  for (int i = 0; i < kLanes; ++i) r.x[i] = EXPRESSION; \
  return r
inline Floats all(float value) { OFFLOAD_EACH_LANE(value); }
inline Floats add(const Floats& a, const Floats& b) { OFFLOAD_EACH_LANE(a.x[i] + b.x[i]); }
inline Floats sub(const Floats& a, const Floats& b) { OFFLOAD_EACH_LANE(a.x[i] - b.x[i]); }
inline Floats mul(const Floats& a, const Floats& b) { OFFLOAD_EACH_LANE(a.x[i] * b.x[i]); }
inline Floats div(const Floats& a, const Floats& b) { OFFLOAD_EACH_LANE(a.x[i] / b.x[i]); }
inline Floats root(const Floats& a) { OFFLOAD_EACH_LANE(__builtin_sqrtf(a.x[i])); }
inline Floats fma(const Floats& a, const Floats& b, const Floats& c) {
  OFFLOAD_EACH_LANE(__builtin_fmaf(a.x[i], b.x[i], c.x[i]));
}
inline Floats canonical(const Floats& a) { OFFLOAD_EACH_LANE(a.x[i] != a.x[i] ? float_of(kNaN) : a.x[i]); }
#undef OFFLOAD_EACH_LANE

inline Doubles no_squares() { return Doubles{}; }
inline void add_squares(Doubles& sums, const Floats& a) {
  for (int i = 0; i < kLanes; ++i) sums.x[i] += static_cast<double>(a.x[i]) * a.x[i];
}
inline void spill(double* to, const Doubles& a) { __builtin_memcpy(to, a.x, sizeof a.x); }

inline void stream(char* to, const char* from) { __builtin_memcpy(to, from, kLine); }
inline void stream_end() {}
