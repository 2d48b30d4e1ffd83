// Sixteen lanes as four NEON registers. Included inside an unnamed namespace; see [Note: per-target code].
// Registers come from memory by memcpy: p may not be aligned to its elements.

constexpr int kRegisters = 4;

struct Floats {
  float32x4_t x[kRegisters];
};
struct Ints {
  uint32x4_t x[kRegisters];
};
struct Words {
  uint16x8_t x[kRegisters];
};
struct TwoInts {
  Ints even, odd;
};
struct Two {
  Floats even, odd;
};
struct Doubles {
  float64x2_t x[2 * kRegisters];
};

#define OFFLOAD_EACH(TYPE, EXPRESSION)                      \
  TYPE r;                                                   \
  for (int i = 0; i < kRegisters; ++i) r.x[i] = EXPRESSION; \
  return r

template <class Register>
inline Register read(const void* p) {
  Register x;
  __builtin_memcpy(&x, p, sizeof x);
  return x;
}
template <class Register>
inline void write(void* p, Register x) {
  __builtin_memcpy(p, &x, sizeof x);
}

inline float32x4_t floats_of(uint32x4_t a) { return vreinterpretq_f32_u32(a); }
inline uint32x4_t bits_of(float32x4_t a) { return vreinterpretq_u32_f32(a); }
// A NaN is not equal to itself.
inline uint32x4_t is_number(float32x4_t a) { return vceqq_f32(a, a); }

inline Floats load(const float* p) { OFFLOAD_EACH(Floats, read<float32x4_t>(p + 4 * i)); }
inline Floats load(const Bf16* p) { OFFLOAD_EACH(Floats, floats_of(vshll_n_u16(read<uint16x4_t>(p + 4 * i), 16))); }
inline Floats load(const Half* p) { OFFLOAD_EACH(Floats, vcvt_f32_f16(read<float16x4_t>(p + 4 * i))); }

inline void store(float* p, const Floats& a) {
  for (int i = 0; i < kRegisters; ++i) write(p + 4 * i, a.x[i]);
}
inline uint16x4_t round_bf16(float32x4_t x) {
  const uint32x4_t bits = bits_of(x), odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
  const uint32x4_t sum = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
  return vshrn_n_u32(vbslq_u32(is_number(x), sum, vdupq_n_u32(kNaN)), 16);
}
inline void store(Bf16* p, const Floats& a) {
  for (int i = 0; i < kRegisters; ++i) write(p + 4 * i, round_bf16(a.x[i]));
}
inline void store(Half* p, const Floats& a) {
  for (int i = 0; i < kRegisters; ++i) write(p + 4 * i, vcvt_f16_f32(a.x[i]));
}

inline Floats all(float value) { OFFLOAD_EACH(Floats, vdupq_n_f32(value)); }
inline Floats add(const Floats& a, const Floats& b) { OFFLOAD_EACH(Floats, vaddq_f32(a.x[i], b.x[i])); }
inline Floats sub(const Floats& a, const Floats& b) { OFFLOAD_EACH(Floats, vsubq_f32(a.x[i], b.x[i])); }
inline Floats mul(const Floats& a, const Floats& b) { OFFLOAD_EACH(Floats, vmulq_f32(a.x[i], b.x[i])); }
inline Floats div(const Floats& a, const Floats& b) { OFFLOAD_EACH(Floats, vdivq_f32(a.x[i], b.x[i])); }
inline Floats root(const Floats& a) { OFFLOAD_EACH(Floats, vsqrtq_f32(a.x[i])); }
inline Floats fma(const Floats& a, const Floats& b, const Floats& c) {
  OFFLOAD_EACH(Floats, vfmaq_f32(c.x[i], a.x[i], b.x[i]));
}
inline Floats canonical(const Floats& a) {
  OFFLOAD_EACH(Floats, vbslq_f32(is_number(a.x[i]), a.x[i], floats_of(vdupq_n_u32(kNaN))));
}

inline Ints ints(std::uint32_t value) { OFFLOAD_EACH(Ints, vdupq_n_u32(value)); }
inline Ints lane_numbers() {
  constexpr std::uint32_t kFirst[] = {0, 1, 2, 3};
  OFFLOAD_EACH(Ints, vaddq_u32(read<uint32x4_t>(kFirst), vdupq_n_u32(static_cast<std::uint32_t>(4 * i))));
}
inline Ints as_ints(const Floats& a) { OFFLOAD_EACH(Ints, bits_of(a.x[i])); }
inline Floats as_floats(const Ints& a) { OFFLOAD_EACH(Floats, floats_of(a.x[i])); }
inline Ints add(const Ints& a, const Ints& b) { OFFLOAD_EACH(Ints, vaddq_u32(a.x[i], b.x[i])); }
inline Ints mul(const Ints& a, const Ints& b) { OFFLOAD_EACH(Ints, vmulq_u32(a.x[i], b.x[i])); }
inline Ints operator&(const Ints& a, const Ints& b) { OFFLOAD_EACH(Ints, vandq_u32(a.x[i], b.x[i])); }
template <unsigned kBits>
inline Ints right(const Ints& a) {
  OFFLOAD_EACH(Ints, vshrq_n_u32(a.x[i], kBits));
}
inline Ints larger(const Ints& a, const Ints& b) { OFFLOAD_EACH(Ints, vmaxq_u32(a.x[i], b.x[i])); }
inline std::uint32_t largest(const Ints& a) {
  return vmaxvq_u32(vmaxq_u32(vmaxq_u32(a.x[0], a.x[1]), vmaxq_u32(a.x[2], a.x[3])));
}
inline uint32x4_t negative_as(float32x4_t size, uint32x4_t sign) {
  return veorq_u32(bits_of(size), vandq_u32(sign, vdupq_n_u32(0x80000000u)));
}
inline Floats negative_as(const Floats& size, const Ints& sign) {
  OFFLOAD_EACH(Floats, floats_of(negative_as(size.x[i], sign.x[i])));
}
// As integers: vmaxq_f32 would quieten a NaN, and make one of either operand's.
inline Floats at_least_zero(const Floats& a) {
  OFFLOAD_EACH(Floats, vreinterpretq_f32_s32(vmaxq_s32(vreinterpretq_s32_f32(a.x[i]), vdupq_n_s32(0))));
}
inline float32x4_t sign_of(float32x4_t a) {
  const float32x4_t one = floats_of(negative_as(vdupq_n_f32(1.0f), bits_of(a)));
  return vbslq_f32(vcagtq_f32(a, vdupq_n_f32(0.0f)), one, a);
}
inline Floats sign_of(const Floats& a) { OFFLOAD_EACH(Floats, sign_of(a.x[i])); }

inline Words words(std::uint16_t value) { OFFLOAD_EACH(Words, vdupq_n_u16(value)); }
inline Words load_words(const void* p) { OFFLOAD_EACH(Words, read<uint16x8_t>(static_cast<const char*>(p) + 16 * i)); }
inline void store_words(void* p, const Words& a) {
  for (int i = 0; i < kRegisters; ++i) write(static_cast<char*>(p) + 16 * i, a.x[i]);
}
template <bool kSigned>
inline uint16x8_t widen_bytes(uint8x8_t a) {
  return kSigned ? vreinterpretq_u16_s16(vmovl_s8(vreinterpret_s8_u8(a))) : vmovl_u8(a);
}
template <bool kSigned>
inline Words load_bytes(const void* p) {
  OFFLOAD_EACH(Words, widen_bytes<kSigned>(read<uint8x8_t>(static_cast<const char*>(p) + 8 * i)));
}
inline void store_bytes(void* p, const Words& a) {
  for (int i = 0; i < kRegisters; ++i) write(static_cast<char*>(p) + 8 * i, vmovn_u16(a.x[i]));
}
inline Words add(const Words& a, const Words& b) { OFFLOAD_EACH(Words, vaddq_u16(a.x[i], b.x[i])); }
inline Words operator&(const Words& a, const Words& b) { OFFLOAD_EACH(Words, vandq_u16(a.x[i], b.x[i])); }
inline int16x8_t with_sign(uint16x8_t a) { return vreinterpretq_s16_u16(a); }
inline Words larger(const Words& a, const Words& b) {
  OFFLOAD_EACH(Words, vreinterpretq_u16_s16(vmaxq_s16(with_sign(a.x[i]), with_sign(b.x[i]))));
}
inline Words chosen(const Words& mask, const Words& a, const Words& b) {
  OFFLOAD_EACH(Words, vbslq_u16(mask.x[i], a.x[i], b.x[i]));
}
template <unsigned kBits>
inline Words left(const Words& a) {
  OFFLOAD_EACH(Words, vshlq_n_u16(a.x[i], kBits));
}
template <unsigned kBits>
inline Words right(const Words& a) {
  OFFLOAD_EACH(Words, vshrq_n_u16(a.x[i], kBits));
}
inline Words sign_mask(const Words& a) { OFFLOAD_EACH(Words, vcltzq_s16(with_sign(a.x[i]))); }

// Words by twos, the first in the lower half.
inline uint32x4_t pairs(uint16x8_t a) { return vreinterpretq_u32_u16(a); }
inline Ints pairs(const Words& a) { OFFLOAD_EACH(Ints, pairs(a.x[i])); }
// Shifts that insert: the bits they leave free stay the first operand's.
inline Ints lower_and_left(const Ints& a, const Ints& b) { OFFLOAD_EACH(Ints, vsliq_n_u32(a.x[i], b.x[i], 16)); }
inline Ints upper_and_right(const Ints& a, const Ints& b) { OFFLOAD_EACH(Ints, vsriq_n_u32(a.x[i], b.x[i], 16)); }
inline Ints left_half(const Ints& a) { OFFLOAD_EACH(Ints, vshlq_n_u32(a.x[i], 16)); }
inline Words as_words(const Ints& a) { OFFLOAD_EACH(Words, vreinterpretq_u16_u32(a.x[i])); }

inline TwoInts joined(const Words& upper) {
  const Ints both = pairs(upper);
  return {left_half(both), both & ints(0xffff0000u)};
}
inline TwoInts joined(const Words& upper, const Words& lower) {
  const Ints high = pairs(upper), low = pairs(lower);
  return {lower_and_left(low, high), upper_and_right(high, low)};
}
inline Words upper_words(const TwoInts& a) { return as_words(upper_and_right(a.odd, a.even)); }
inline Words lower_words(const TwoInts& a) { return as_words(lower_and_left(a.even, a.odd)); }
inline Two load_two(const float* p) {
  Two r;
  for (int i = 0; i < kRegisters; ++i) {
    const float32x4_t a = read<float32x4_t>(p + 8 * i), b = read<float32x4_t>(p + 8 * i + 4);
    r.even.x[i] = vuzp1q_f32(a, b);
    r.odd.x[i] = vuzp2q_f32(a, b);
  }
  return r;
}
inline void store_two(float* p, const Two& a) {
  for (int i = 0; i < kRegisters; ++i) {
    write(p + 8 * i, vzip1q_f32(a.even.x[i], a.odd.x[i]));
    write(p + 8 * i + 4, vzip2q_f32(a.even.x[i], a.odd.x[i]));
  }
}

inline Doubles no_squares() {
  Doubles r;
  for (float64x2_t& x : r.x) x = vdupq_n_f64(0.0);
  return r;
}
inline void add_squares(Doubles& sums, const Floats& a) {
  for (int i = 0; i < kRegisters; ++i) {
    const float64x2_t lo = vcvt_f64_f32(vget_low_f32(a.x[i])), hi = vcvt_high_f64_f32(a.x[i]);
    sums.x[2 * i] = vfmaq_f64(sums.x[2 * i], lo, lo);
    sums.x[2 * i + 1] = vfmaq_f64(sums.x[2 * i + 1], hi, hi);
  }
}
inline void spill(double* to, const Doubles& a) { __builtin_memcpy(to, a.x, sizeof a.x); }
#undef OFFLOAD_EACH

// One line. No store past the caches: the CPU sees whole lines being written and does so by itself.
inline void stream(char* to, const char* from) { __builtin_memcpy(to, from, kLine); }
inline void stream_end() {}
