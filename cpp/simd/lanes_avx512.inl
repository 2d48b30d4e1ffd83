// Sixteen lanes as one AVX-512 register. Included inside an unnamed namespace; see [Note: per-target code].

struct Floats {
  __m512 x;
};
struct Ints {
  __m512i x;
};
struct Words {
  __m512i x;
};
struct TwoInts {
  Ints even, odd;
};
struct Two {
  Floats even, odd;
};
struct Doubles {
  __m512d lo, hi;
};

inline Floats load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline Floats load(const Bf16* p) {
  const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16))};
}
inline Floats load(const Half* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))}; }

inline void store(float* p, Floats a) { _mm512_storeu_ps(p, a.x); }
inline void store(Bf16* p, Floats a) {
  const __m512i bits = _mm512_castps_si512(a.x);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i sum = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __mmask16 nan = _mm512_cmp_ps_mask(a.x, a.x, _CMP_UNORD_Q);
  const __m512i rounded = _mm512_mask_mov_epi32(_mm512_srli_epi32(sum, 16), nan, _mm512_set1_epi32(0x7fc0));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(rounded));
}
inline void store(Half* p, Floats a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_cvtps_ph(a.x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

inline Floats all(float value) { return {_mm512_set1_ps(value)}; }
inline Floats add(Floats a, Floats b) { return {_mm512_add_ps(a.x, b.x)}; }
inline Floats sub(Floats a, Floats b) { return {_mm512_sub_ps(a.x, b.x)}; }
inline Floats mul(Floats a, Floats b) { return {_mm512_mul_ps(a.x, b.x)}; }
inline Floats div(Floats a, Floats b) { return {_mm512_div_ps(a.x, b.x)}; }
inline Floats root(Floats a) { return {_mm512_sqrt_ps(a.x)}; }
inline Floats fma(Floats a, Floats b, Floats c) { return {_mm512_fmadd_ps(a.x, b.x, c.x)}; }
inline Floats canonical(Floats a) {
  // Each 4 bits are for a class of number: 0 keeps the first operand where the second is NaN, 1 takes the second.
  const __m512 nan = _mm512_castsi512_ps(_mm512_set1_epi32(kNaN));
  return {_mm512_fixupimm_ps(nan, a.x, _mm512_set1_epi32(0x11111100), 0)};
}

inline Ints ints(std::uint32_t value) { return {_mm512_set1_epi32(static_cast<int>(value))}; }
inline Ints lane_numbers() { return {_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)}; }
inline Ints as_ints(Floats a) { return {_mm512_castps_si512(a.x)}; }
inline Floats as_floats(Ints a) { return {_mm512_castsi512_ps(a.x)}; }
inline Ints add(Ints a, Ints b) { return {_mm512_add_epi32(a.x, b.x)}; }
inline Ints mul(Ints a, Ints b) { return {_mm512_mullo_epi32(a.x, b.x)}; }
inline Ints operator&(Ints a, Ints b) { return {_mm512_and_si512(a.x, b.x)}; }
template <unsigned kBits>
inline Ints right(Ints a) {
  return {_mm512_srli_epi32(a.x, kBits)};
}
inline Ints larger(Ints a, Ints b) { return {_mm512_max_epu32(a.x, b.x)}; }
inline std::uint32_t largest(Ints a) { return _mm512_reduce_max_epu32(a.x); }
inline Floats negative_as(Floats size, Ints sign) {
  constexpr int kXorOfAnd = 0x78;
  return {_mm512_castsi512_ps(
      _mm512_ternarylogic_epi32(_mm512_castps_si512(size.x), sign.x, _mm512_set1_epi32(INT32_MIN), kXorOfAnd))};
}
inline Floats at_least_zero(Floats a) {
  return {_mm512_castsi512_ps(_mm512_max_epi32(_mm512_castps_si512(a.x), _mm512_setzero_si512()))};
}
inline Floats sign_of(Floats a) {
  const __m512 one = negative_as(all(1.0f), as_ints(a)).x;
  return {_mm512_mask_mov_ps(a.x, _mm512_cmp_ps_mask(a.x, _mm512_setzero_ps(), _CMP_NEQ_OQ), one)};
}

inline Words words(std::uint16_t value) { return {_mm512_set1_epi16(static_cast<short>(value))}; }
inline Words load_words(const void* p) { return {_mm512_loadu_si512(p)}; }
inline void store_words(void* p, Words a) { _mm512_storeu_si512(p, a.x); }
template <bool kSigned>
inline Words load_bytes(const void* p) {
  const __m256i x = _mm256_loadu_si256(static_cast<const __m256i*>(p));
  return {kSigned ? _mm512_cvtepi8_epi16(x) : _mm512_cvtepu8_epi16(x)};
}
inline void store_bytes(void* p, Words a) { _mm256_storeu_si256(static_cast<__m256i*>(p), _mm512_cvtepi16_epi8(a.x)); }
inline Words add(Words a, Words b) { return {_mm512_add_epi16(a.x, b.x)}; }
inline Words operator&(Words a, Words b) { return {_mm512_and_si512(a.x, b.x)}; }
inline Words larger(Words a, Words b) { return {_mm512_max_epi16(a.x, b.x)}; }
inline Words chosen(Words mask, Words a, Words b) {
  constexpr int kSelect = 0xca;
  return {_mm512_ternarylogic_epi32(mask.x, a.x, b.x, kSelect)};
}
template <unsigned kBits>
inline Words left(Words a) {
  return {_mm512_slli_epi16(a.x, kBits)};
}
template <unsigned kBits>
inline Words right(Words a) {
  return {_mm512_srli_epi16(a.x, kBits)};
}
inline Words sign_mask(Words a) { return {_mm512_srai_epi16(a.x, 15)}; }
constexpr __mmask32 kOdd = 0xaaaaaaaau;
inline TwoInts joined(Words upper) {
  return {{_mm512_slli_epi32(upper.x, 16)}, {_mm512_and_si512(upper.x, _mm512_set1_epi32(-0x10000))}};
}
inline TwoInts joined(Words upper, Words lower) {
  return {{_mm512_mask_blend_epi16(kOdd, lower.x, _mm512_slli_epi32(upper.x, 16))},
          {_mm512_mask_blend_epi16(kOdd, _mm512_srli_epi32(lower.x, 16), upper.x)}};
}
inline Words upper_words(const TwoInts& a) {
  return {_mm512_mask_blend_epi16(kOdd, _mm512_srli_epi32(a.even.x, 16), a.odd.x)};
}
inline Words lower_words(const TwoInts& a) {
  return {_mm512_mask_blend_epi16(kOdd, a.even.x, _mm512_slli_epi32(a.odd.x, 16))};
}
inline Two load_two(const float* p) {
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
  const __m512 a = _mm512_loadu_ps(p), b = _mm512_loadu_ps(p + 16);
  return {{_mm512_permutex2var_ps(a, even, b)}, {_mm512_permutex2var_ps(a, odd, b)}};
}
inline void store_two(float* p, const Two& a) {
  const __m512i first = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
  _mm512_storeu_ps(p, _mm512_permutex2var_ps(a.even.x, first, a.odd.x));
  _mm512_storeu_ps(p + 16, _mm512_permutex2var_ps(a.even.x, second, a.odd.x));
}

inline Doubles no_squares() { return {_mm512_setzero_pd(), _mm512_setzero_pd()}; }
inline void add_squares(Doubles& sums, Floats a) {
  const __m512d lo = _mm512_cvtps_pd(_mm512_castps512_ps256(a.x));
  const __m512d hi = _mm512_cvtps_pd(_mm512_extractf32x8_ps(a.x, 1));
  sums.lo = _mm512_fmadd_pd(lo, lo, sums.lo);
  sums.hi = _mm512_fmadd_pd(hi, hi, sums.hi);
}
inline void spill(double* to, const Doubles& a) {
  _mm512_storeu_pd(to, a.lo);
  _mm512_storeu_pd(to + 8, a.hi);
}

// One line, to a 64-byte boundary.
inline void stream(char* to, const char* from) {
  _mm512_stream_si512(reinterpret_cast<__m512i*>(to), _mm512_loadu_si512(from));
}
inline void stream_end() { _mm_sfence(); }
