// Sixteen lanes as one AVX-512 register. Included inside an unnamed namespace; see [Note: per-target code].

struct Floats {
  __m512 x;
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
  const __mmask16 nan = _mm512_cmp_ps_mask(a.x, a.x, _CMP_UNORD_Q);
  return {_mm512_mask_mov_ps(a.x, nan, _mm512_castsi512_ps(_mm512_set1_epi32(kNaN)))};
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
