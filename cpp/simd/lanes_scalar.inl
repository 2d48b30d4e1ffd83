// Sixteen lanes in plain C++: what every CPU can run, and the reading of what the other lanes_*.inl do.
// Included inside an unnamed namespace; see [Note: per-target code].

struct Floats {
  float x[kLanes];
};
struct Ints {
  std::uint32_t x[kLanes];
};
struct Words {
  std::uint16_t x[kPair];
};
struct TwoInts {
  Ints even, odd;
};
struct Two {
  Floats even, odd;
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
// size, made negative where sign is.
inline Floats negative_as(const Floats& size, const Ints& sign) {
  OFFLOAD_EACH_LANE(float_of(bits_of(size.x[i]) ^ (sign.x[i] & 0x80000000u)));
}
// A NaN without a sign is kept.
inline Floats at_least_zero(const Floats& a) { OFFLOAD_EACH_LANE(bits_of(a.x[i]) >> 31 ? 0.0f : a.x[i]); }
// -1, 0 or 1; NaN stays.
inline Floats sign_of(const Floats& a) {
  OFFLOAD_EACH_LANE(a.x[i] == 0 || a.x[i] != a.x[i] ? a.x[i] : float_of(0x3f800000u | (bits_of(a.x[i]) & 0x80000000u)));
}
inline Floats as_floats(const Ints& a) { OFFLOAD_EACH_LANE(float_of(a.x[i])); }
#undef OFFLOAD_EACH_LANE

#define OFFLOAD_EACH_LANE(EXPRESSION)                   \
  Ints r;                                               \
  for (int i = 0; i < kLanes; ++i) r.x[i] = EXPRESSION; \
  return r
inline Ints ints(std::uint32_t value) { OFFLOAD_EACH_LANE(value); }
inline Ints lane_numbers() { OFFLOAD_EACH_LANE(static_cast<std::uint32_t>(i)); }
inline Ints as_ints(const Floats& a) { OFFLOAD_EACH_LANE(bits_of(a.x[i])); }
inline Ints add(const Ints& a, const Ints& b) { OFFLOAD_EACH_LANE(a.x[i] + b.x[i]); }
inline Ints mul(const Ints& a, const Ints& b) { OFFLOAD_EACH_LANE(a.x[i] * b.x[i]); }
inline Ints operator&(const Ints& a, const Ints& b) { OFFLOAD_EACH_LANE(a.x[i] & b.x[i]); }
template <unsigned kBits>
inline Ints right(const Ints& a) {
  OFFLOAD_EACH_LANE(a.x[i] >> kBits);
}
inline Ints larger(const Ints& a, const Ints& b) { OFFLOAD_EACH_LANE(a.x[i] > b.x[i] ? a.x[i] : b.x[i]); }
#undef OFFLOAD_EACH_LANE
inline std::uint32_t largest(const Ints& a) {
  std::uint32_t most = 0;
  for (const std::uint32_t x : a.x) most = x > most ? x : most;
  return most;
}

#define OFFLOAD_EACH_WORD(EXPRESSION)                                              \
  Words r;                                                                         \
  for (int i = 0; i < kPair; ++i) r.x[i] = static_cast<std::uint16_t>(EXPRESSION); \
  return r
inline std::int16_t with_sign(std::uint16_t a) { return static_cast<std::int16_t>(a); }
inline Words words(std::uint16_t value) { OFFLOAD_EACH_WORD(value); }
inline Words add(const Words& a, const Words& b) { OFFLOAD_EACH_WORD(a.x[i] + b.x[i]); }
inline Words operator&(const Words& a, const Words& b) { OFFLOAD_EACH_WORD(a.x[i] & b.x[i]); }
inline Words larger(const Words& a, const Words& b) {
  OFFLOAD_EACH_WORD(with_sign(a.x[i]) > with_sign(b.x[i]) ? a.x[i] : b.x[i]);
}
// a's bits where mask has them, else b's.
inline Words chosen(const Words& mask, const Words& a, const Words& b) {
  OFFLOAD_EACH_WORD((mask.x[i] & a.x[i]) | (~mask.x[i] & b.x[i]));
}
template <unsigned kBits>
inline Words left(const Words& a) {
  OFFLOAD_EACH_WORD(a.x[i] << kBits);
}
template <unsigned kBits>
inline Words right(const Words& a) {
  OFFLOAD_EACH_WORD(a.x[i] >> kBits);
}
inline Words sign_mask(const Words& a) { OFFLOAD_EACH_WORD(with_sign(a.x[i]) < 0 ? 0xffff : 0); }
// The low bytes, and those of words of which they are the value.
inline void store_bytes(void* p, const Words& a) {
  std::uint8_t raw[kPair];
  for (int i = 0; i < kPair; ++i) raw[i] = static_cast<std::uint8_t>(a.x[i]);
  __builtin_memcpy(p, raw, sizeof raw);
}
template <bool kSigned>
inline Words load_bytes(const void* p) {
  std::uint8_t raw[kPair];
  __builtin_memcpy(raw, p, sizeof raw);
  OFFLOAD_EACH_WORD(kSigned ? static_cast<std::int8_t>(raw[i]) : raw[i]);
}
inline Words upper_words(const TwoInts& a) { OFFLOAD_EACH_WORD((i % 2 ? a.odd : a.even).x[i / 2] >> 16); }
inline Words lower_words(const TwoInts& a) { OFFLOAD_EACH_WORD((i % 2 ? a.odd : a.even).x[i / 2]); }
#undef OFFLOAD_EACH_WORD
inline Words load_words(const void* p) {
  Words r;
  __builtin_memcpy(r.x, p, sizeof r.x);
  return r;
}
inline void store_words(void* p, const Words& a) { __builtin_memcpy(p, a.x, sizeof a.x); }
// 32 elements as the 16 even ones and the 16 odd: words become the upper and lower halves without being moved.
inline TwoInts joined(const Words& upper, const Words& lower) {
  TwoInts r;
  for (int i = 0; i < kPair; ++i)
    (i % 2 ? r.odd : r.even).x[i / 2] = static_cast<std::uint32_t>(upper.x[i]) << 16 | lower.x[i];
  return r;
}
inline TwoInts joined(const Words& upper) { return joined(upper, words(0)); }
inline Two load_two(const float* p) {
  float raw[kPair];
  __builtin_memcpy(raw, p, sizeof raw);
  Two r;
  for (int i = 0; i < kPair; ++i) (i % 2 ? r.odd : r.even).x[i / 2] = raw[i];
  return r;
}
inline void store_two(float* p, const Two& a) {
  float raw[kPair];
  for (int i = 0; i < kPair; ++i) raw[i] = (i % 2 ? a.odd : a.even).x[i / 2];
  __builtin_memcpy(p, raw, sizeof raw);
}

inline Doubles no_squares() { return Doubles{}; }
inline void add_squares(Doubles& sums, const Floats& a) {
  for (int i = 0; i < kLanes; ++i) sums.x[i] += static_cast<double>(a.x[i]) * a.x[i];
}
inline void spill(double* to, const Doubles& a) { __builtin_memcpy(to, a.x, sizeof a.x); }

inline void stream(char* to, const char* from) { __builtin_memcpy(to, from, kLine); }
inline void stream_end() {}
