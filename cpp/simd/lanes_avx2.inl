// Sixteen lanes as two AVX2 registers. Included inside an unnamed namespace; see [Note: per-target code].

struct Floats {
  __m256 lo, hi;
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
