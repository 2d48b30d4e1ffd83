// Sixteen lanes as two AVX2 registers. Included inside an unnamed namespace; see [Note: per-target code].

struct Floats {
  __m256 lo, hi;
};
struct Ints {
  __m256i lo, hi;
};
struct Words {
  __m256i lo, hi;
};
struct TwoInts {
  Ints even, odd;
};
struct Two {
  Floats even, odd;
};
struct Doubles {
  __m256d x[4];
};

inline Floats load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline __m256 widen_bf16(__m128i x) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16)); }
inline Floats load(const Bf16* p) {
  const __m128i* q = reinterpret_cast<const __m128i*>(p);
  return {widen_bf16(_mm_loadu_si128(q)), widen_bf16(_mm_loadu_si128(q + 1))};
}
inline Floats load(const Half* p) {
  const __m128i* q = reinterpret_cast<const __m128i*>(p);
  return {_mm256_cvtph_ps(_mm_loadu_si128(q)), _mm256_cvtph_ps(_mm_loadu_si128(q + 1))};
}

inline void store(float* p, Floats a) {
  _mm256_storeu_ps(p, a.lo);
  _mm256_storeu_ps(p + 8, a.hi);
}
// Rounded to the upper half of each lane, moved to the lower.
inline __m256i round_bf16(__m256 x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i sum = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  return _mm256_blendv_epi8(_mm256_srli_epi32(sum, 16), _mm256_set1_epi32(0x7fc0), nan);
}
inline void store(Bf16* p, Floats a) {
  const __m256i packed = _mm256_packus_epi32(round_bf16(a.lo), round_bf16(a.hi));  // interleaves 128-bit halves
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(packed, 0xd8));
}
inline void store(Half* p, Floats a) {
  __m128i* q = reinterpret_cast<__m128i*>(p);
  _mm_storeu_si128(q, _mm256_cvtps_ph(a.lo, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  _mm_storeu_si128(q + 1, _mm256_cvtps_ph(a.hi, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

inline Floats all(float value) { return {_mm256_set1_ps(value), _mm256_set1_ps(value)}; }
inline Floats add(Floats a, Floats b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
inline Floats sub(Floats a, Floats b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
inline Floats mul(Floats a, Floats b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
inline Floats div(Floats a, Floats b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
inline Floats root(Floats a) { return {_mm256_sqrt_ps(a.lo), _mm256_sqrt_ps(a.hi)}; }
inline Floats fma(Floats a, Floats b, Floats c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
inline __m256 canonical(__m256 x) {
  const __m256 nan = _mm256_castsi256_ps(_mm256_set1_epi32(kNaN));
  return _mm256_blendv_ps(x, nan, _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
}
inline Floats canonical(Floats a) { return {canonical(a.lo), canonical(a.hi)}; }

inline Ints ints(std::uint32_t value) {
  const __m256i x = _mm256_set1_epi32(static_cast<int>(value));
  return {x, x};
}
inline Ints lane_numbers() {
  return {_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15)};
}
inline Ints as_ints(Floats a) { return {_mm256_castps_si256(a.lo), _mm256_castps_si256(a.hi)}; }
inline Floats as_floats(Ints a) { return {_mm256_castsi256_ps(a.lo), _mm256_castsi256_ps(a.hi)}; }
inline Ints add(Ints a, Ints b) { return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)}; }
inline Ints mul(Ints a, Ints b) { return {_mm256_mullo_epi32(a.lo, b.lo), _mm256_mullo_epi32(a.hi, b.hi)}; }
inline Ints operator&(Ints a, Ints b) { return {_mm256_and_si256(a.lo, b.lo), _mm256_and_si256(a.hi, b.hi)}; }
template <unsigned kBits>
inline Ints right(Ints a) {
  return {_mm256_srli_epi32(a.lo, kBits), _mm256_srli_epi32(a.hi, kBits)};
}
inline Ints larger(Ints a, Ints b) { return {_mm256_max_epu32(a.lo, b.lo), _mm256_max_epu32(a.hi, b.hi)}; }
inline std::uint32_t largest(Ints a) {
  std::uint32_t x[8], most = 0;
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(x), _mm256_max_epu32(a.lo, a.hi));
  for (const std::uint32_t value : x) most = value > most ? value : most;
  return most;
}
inline __m256 negative_as(__m256 size, __m256i sign) {
  return _mm256_xor_ps(size, _mm256_and_ps(_mm256_castsi256_ps(sign), _mm256_set1_ps(-0.0f)));
}
inline Floats negative_as(Floats size, Ints sign) {
  return {negative_as(size.lo, sign.lo), negative_as(size.hi, sign.hi)};
}
inline __m256 at_least_zero(__m256 a) {
  return _mm256_castsi256_ps(_mm256_max_epi32(_mm256_castps_si256(a), _mm256_setzero_si256()));
}
inline Floats at_least_zero(Floats a) { return {at_least_zero(a.lo), at_least_zero(a.hi)}; }
inline __m256 sign_of(__m256 a) {
  const __m256 one = negative_as(_mm256_set1_ps(1.0f), _mm256_castps_si256(a));
  return _mm256_blendv_ps(a, one, _mm256_cmp_ps(a, _mm256_setzero_ps(), _CMP_NEQ_OQ));
}
inline Floats sign_of(Floats a) { return {sign_of(a.lo), sign_of(a.hi)}; }

inline Words words(std::uint16_t value) {
  const __m256i x = _mm256_set1_epi16(static_cast<short>(value));
  return {x, x};
}
inline Words load_words(const void* p) {
  const __m256i* q = static_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1)};
}
inline void store_words(void* p, Words a) {
  __m256i* q = static_cast<__m256i*>(p);
  _mm256_storeu_si256(q, a.lo);
  _mm256_storeu_si256(q + 1, a.hi);
}
template <bool kSigned>
inline __m256i load_bytes(const __m128i* p) {
  const __m128i x = _mm_loadu_si128(p);
  return kSigned ? _mm256_cvtepi8_epi16(x) : _mm256_cvtepu8_epi16(x);
}
template <bool kSigned>
inline Words load_bytes(const void* p) {
  const __m128i* q = static_cast<const __m128i*>(p);
  return {load_bytes<kSigned>(q), load_bytes<kSigned>(q + 1)};
}
inline void store_bytes(void* p, Words a) {
  const __m256i low = _mm256_set1_epi16(0xff);
  const __m256i packed = _mm256_packus_epi16(_mm256_and_si256(a.lo, low), _mm256_and_si256(a.hi, low));
  _mm256_storeu_si256(static_cast<__m256i*>(p), _mm256_permute4x64_epi64(packed, 0xd8));
}
inline Words add(Words a, Words b) { return {_mm256_add_epi16(a.lo, b.lo), _mm256_add_epi16(a.hi, b.hi)}; }
inline Words operator&(Words a, Words b) { return {_mm256_and_si256(a.lo, b.lo), _mm256_and_si256(a.hi, b.hi)}; }
inline Words larger(Words a, Words b) { return {_mm256_max_epi16(a.lo, b.lo), _mm256_max_epi16(a.hi, b.hi)}; }
inline __m256i chosen(__m256i mask, __m256i a, __m256i b) {
  return _mm256_or_si256(_mm256_and_si256(mask, a), _mm256_andnot_si256(mask, b));
}
inline Words chosen(Words mask, Words a, Words b) { return {chosen(mask.lo, a.lo, b.lo), chosen(mask.hi, a.hi, b.hi)}; }
inline Words sign_mask(Words a) { return {_mm256_srai_epi16(a.lo, 15), _mm256_srai_epi16(a.hi, 15)}; }
template <unsigned kBits>
inline Words left(Words a) {
  return {_mm256_slli_epi16(a.lo, kBits), _mm256_slli_epi16(a.hi, kBits)};
}
template <unsigned kBits>
inline Words right(Words a) {
  return {_mm256_srli_epi16(a.lo, kBits), _mm256_srli_epi16(a.hi, kBits)};
}
inline __m256i upper_half(__m256i a) { return _mm256_and_si256(a, _mm256_set1_epi32(-0x10000)); }
inline __m256i odd_from(__m256i even, __m256i odd) { return _mm256_blend_epi16(even, odd, 0xaa); }
inline TwoInts joined(Words upper) {
  return {{_mm256_slli_epi32(upper.lo, 16), _mm256_slli_epi32(upper.hi, 16)},
          {upper_half(upper.lo), upper_half(upper.hi)}};
}
inline TwoInts joined(Words upper, Words lower) {
  return {{odd_from(lower.lo, _mm256_slli_epi32(upper.lo, 16)), odd_from(lower.hi, _mm256_slli_epi32(upper.hi, 16))},
          {odd_from(_mm256_srli_epi32(lower.lo, 16), upper.lo), odd_from(_mm256_srli_epi32(lower.hi, 16), upper.hi)}};
}
inline Words upper_words(const TwoInts& a) {
  return {odd_from(_mm256_srli_epi32(a.even.lo, 16), a.odd.lo), odd_from(_mm256_srli_epi32(a.even.hi, 16), a.odd.hi)};
}
inline Words lower_words(const TwoInts& a) {
  return {odd_from(a.even.lo, _mm256_slli_epi32(a.odd.lo, 16)), odd_from(a.even.hi, _mm256_slli_epi32(a.odd.hi, 16))};
}
// Two registers' lanes, the even ones or the odd, in order.
template <int kWhich>
inline __m256 every_second(__m256 a, __m256 b) {
  return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(_mm256_shuffle_ps(a, b, kWhich)), 0xd8));
}
inline Two load_two(const float* p) {
  const Floats a = load(p), b = load(p + 16);
  return {{every_second<0x88>(a.lo, a.hi), every_second<0x88>(b.lo, b.hi)},
          {every_second<0xdd>(a.lo, a.hi), every_second<0xdd>(b.lo, b.hi)}};
}
inline void store_mixed(float* p, __m256 even, __m256 odd) {
  const __m256 low = _mm256_unpacklo_ps(even, odd), high = _mm256_unpackhi_ps(even, odd);
  _mm256_storeu_ps(p, _mm256_permute2f128_ps(low, high, 0x20));
  _mm256_storeu_ps(p + 8, _mm256_permute2f128_ps(low, high, 0x31));
}
inline void store_two(float* p, const Two& a) {
  store_mixed(p, a.even.lo, a.odd.lo);
  store_mixed(p + 16, a.even.hi, a.odd.hi);
}

inline Doubles no_squares() {
  const __m256d zero = _mm256_setzero_pd();
  return {{zero, zero, zero, zero}};
}
inline __m256d plus_square(__m256d sum, __m128 x) {
  const __m256d wide = _mm256_cvtps_pd(x);
  return _mm256_fmadd_pd(wide, wide, sum);
}
inline void add_squares(Doubles& sums, Floats a) {
  sums.x[0] = plus_square(sums.x[0], _mm256_castps256_ps128(a.lo));
  sums.x[1] = plus_square(sums.x[1], _mm256_extractf128_ps(a.lo, 1));
  sums.x[2] = plus_square(sums.x[2], _mm256_castps256_ps128(a.hi));
  sums.x[3] = plus_square(sums.x[3], _mm256_extractf128_ps(a.hi, 1));
}
inline void spill(double* to, const Doubles& a) {
  for (int i = 0; i < 4; ++i) _mm256_storeu_pd(to + 4 * i, a.x[i]);
}

// One line, to a 64-byte boundary.
inline void stream(char* to, const char* from) {
  const __m256i* q = reinterpret_cast<const __m256i*>(from);
  const __m256i lo = _mm256_loadu_si256(q), hi = _mm256_loadu_si256(q + 1);
  _mm256_stream_si256(reinterpret_cast<__m256i*>(to), lo);
  _mm256_stream_si256(reinterpret_cast<__m256i*>(to) + 1, hi);
}
inline void stream_end() { _mm_sfence(); }
