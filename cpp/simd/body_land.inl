// Landing, sums of squares, conversion and copy over any lanes. Included inside an unnamed namespace; see
// [Note: per-target code].

inline double total(const Doubles& sums) {
  double lane[kLanes];
  spill(lane, sums);
  for (int width = kLanes / 2; width; width /= 2)
    for (int i = 0; i < width; ++i) lane[i] += lane[i + width];
  return lane[0] == lane[0] ? lane[0] : __builtin_nan("");
}

template <bool kAccumulate, class Dst, class Src>
inline Floats landed(const Dst* dst, const Src* src, const Floats& factor) {
  Floats x = mul(load(src), factor);
  if constexpr (kAccumulate) x = add(load(dst), x);
  return canonical(x);
}

template <bool kAccumulate, bool kSums, class Dst, class Src>
void land_range(Dst* dst, const Src* src, std::size_t n, float scale, double* block_sums) {
  const Floats factor = all(scale);
  for (std::size_t start = 0; start < n; start += kBlock) {
    const std::size_t end = n - start < kBlock ? n : start + kBlock;
    Doubles sums = no_squares();
    std::size_t i = start;
    for (; i + kLanes <= end; i += kLanes) {
      ahead(src + i);
      ahead(dst + i);
      store(dst + i, landed<kAccumulate>(dst + i, src + i, factor));
      if constexpr (kSums) add_squares(sums, load(dst + i));
    }
    if (const std::size_t rest = end - i) {
      Dst old[kLanes] = {};
      Src now[kLanes] = {};
      __builtin_memcpy(old, dst + i, rest * sizeof(Dst));
      __builtin_memcpy(now, src + i, rest * sizeof(Src));
      store_some(dst + i, landed<kAccumulate>(old, now, factor), rest);
      if constexpr (kSums) add_squares(sums, load_some(dst + i, rest));
    }
    if constexpr (kSums) *block_sums++ = total(sums);
  }
}

// dst = src, bit by bit; the common case, at the speed of a copy.
template <bool kSums, class T>
void pass_range(T* dst, const T* src, std::size_t n, double* block_sums) {
  for (std::size_t start = 0; start < n; start += kBlock) {
    const std::size_t end = n - start < kBlock ? n : start + kBlock;
    Doubles sums = no_squares();
    std::size_t i = start;
    for (; i + kLanes <= end; i += kLanes) {
      ahead(src + i);
      ahead(dst + i);
      T raw[kLanes];
      __builtin_memcpy(raw, src + i, sizeof raw);
      __builtin_memcpy(dst + i, raw, sizeof raw);
      if constexpr (kSums) add_squares(sums, load(raw));
    }
    if (const std::size_t rest = end - i) {
      if constexpr (kSums) add_squares(sums, load_some(src + i, rest));
      if (dst != src) __builtin_memcpy(dst + i, src + i, rest * sizeof(T));
    }
    if constexpr (kSums) *block_sums++ = total(sums);
  }
}

void land(void* dst, Dtype dst_dtype, const void* src, Dtype src_dtype, std::size_t n, bool accumulate, float scale,
          double* block_sums) {
  typed(dst, dst_dtype, [&](auto* d) {
    typed(src, src_dtype, [&](const auto* s) {
      if constexpr (is_same<decltype(s), decltype(as_const(d))>) {
        if (!accumulate && scale == 1.0f) {
          block_sums ? pass_range<true>(d, s, n, block_sums) : pass_range<false>(d, s, n, nullptr);
          return;
        }
      }
      if (block_sums)
        accumulate ? land_range<true, true>(d, s, n, scale, block_sums)
                   : land_range<false, true>(d, s, n, scale, block_sums);
      else
        accumulate ? land_range<true, false>(d, s, n, scale, nullptr)
                   : land_range<false, false>(d, s, n, scale, nullptr);
    });
  });
}

template <class Src>
void sumsq_range(const Src* src, std::size_t n, double* block_sums) {
  for (std::size_t start = 0; start < n; start += kBlock) {
    const std::size_t end = n - start < kBlock ? n : start + kBlock;
    Doubles sums = no_squares();
    std::size_t i = start;
    for (; i + kLanes <= end; i += kLanes) {
      ahead(src + i);
      add_squares(sums, load(src + i));
    }
    if (end > i) add_squares(sums, load_some(src + i, end - i));
    *block_sums++ = total(sums);
  }
}

void sumsq(const void* src, Dtype dtype, std::size_t n, double* block_sums) {
  typed(src, dtype, [&](const auto* s) { sumsq_range(s, n, block_sums); });
}

template <class Dst, class Src>
void convert_range(Dst* dst, const Src* src, std::size_t n) {
  std::size_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    ahead(src + i);
    ahead(dst + i);
    store(dst + i, load(src + i));
  }
  if (n > i) store_some(dst + i, load_some(src + i, n - i), n - i);
}

void convert(void* dst, Dtype dst_dtype, const void* src, Dtype src_dtype, std::size_t n) {
  typed(dst, dst_dtype, [&](auto* d) { typed(src, src_dtype, [&](const auto* s) { convert_range(d, s, n); }); });
}

void stream_copy(void* dst, const void* src, std::size_t nbytes) {
  char* to = static_cast<char*>(dst);
  const char* from = static_cast<const char*>(src);
  const std::size_t head = (kLine - reinterpret_cast<std::uintptr_t>(to) % kLine) % kLine;
  if (nbytes < head + kLine) {
    __builtin_memcpy(to, from, nbytes);
    return;
  }
  __builtin_memcpy(to, from, head);
  std::size_t i = head;
  for (; i + kLine <= nbytes; i += kLine) {
    __builtin_prefetch(from + i + kAheadBytes);
    stream(to + i, from + i);
  }
  stream_end();
  __builtin_memcpy(to + i, from + i, nbytes - i);
}
