// Storage of masters and moments over any lanes, 32 elements at a time; see update.h. Included inside an unnamed
// namespace; see [Note: per-target code].

inline std::uint64_t mixed(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
  x = (x ^ x >> 27) * 0x94d049bb133111ebu;
  return x ^ x >> 31;
}

inline Two as_floats(const TwoInts& a) { return {as_floats(a.even), as_floats(a.odd)}; }
inline TwoInts as_ints(const Two& a) { return {as_ints(a.even), as_ints(a.odd)}; }
inline TwoInts add(const TwoInts& a, const TwoInts& b) { return {add(a.even, b.even), add(a.odd, b.odd)}; }

// Random words, one an element of a group: linear, from a random start by a random step.
struct Random {
  TwoInts word;
  Ints stride;

  void advance() { word = {add(word.even, stride), add(word.odd, stride)}; }
};
inline Random random_words(std::uint64_t key, std::uint64_t group) {
  const std::uint64_t bits = mixed(key ^ group);
  const auto start = static_cast<std::uint32_t>(bits), step = static_cast<std::uint32_t>(bits >> 32);
  const Ints even = add(ints(start), mul(lane_numbers(), ints(2 * step)));
  return {{even, add(even, ints(step))}, ints(kPair * step)};
}
template <unsigned kBits>
inline TwoInts lowest(const TwoInts& word) {
  return {word.even & ints((1u << kBits) - 1), word.odd & ints((1u << kBits) - 1)};
}
template <unsigned kBits>
inline TwoInts highest(const TwoInts& word) {
  return {right<32 - kBits>(word.even), right<32 - kBits>(word.odd)};
}

inline Two load_split(const void* high, const void* low) {
  const Words lower = load_words(low);
  return as_floats(joined(add(load_words(high), sign_mask(lower)), lower));
}
inline void store_split(void* high, void* low, const Two& p) {
  const TwoInts bits = as_ints(p);
  const Words lower = lower_words(bits);
  store_words(high, add(upper_words(bits), right<15>(lower)));
  store_words(low, lower);
}

constexpr std::uint32_t kSign = 0x80000000u;
constexpr std::uint32_t kInfinity = 0x7f800000u;
constexpr unsigned kDropped = 19;            // bits of a float below a code; 3 of its upper half
constexpr std::uint16_t kTwoWord = 0x4000u;  // the upper half of 2.0f, the offset of codes

struct Unpacking {
  Floats scale, minus_two;
};
inline Unpacking unpacking(const void* scale) {
  float s;
  __builtin_memcpy(&s, scale, sizeof s);
  return {all(s), all(-2.0f * s)};
}
template <bool kSigned>
inline Two unpack(const void* codes, const Unpacking& u) {
  const Words q = load_bytes<kSigned>(codes);
  if constexpr (!kSigned) {
    const Two f = as_floats(joined(add(left<3>(q), words(kTwoWord))));
    return {fma(f.even, u.scale, u.minus_two), fma(f.odd, u.scale, u.minus_two)};
  }
  const Two f = as_floats(joined(chosen(words(0x83f8u), left<3>(q), words(kTwoWord))));
  return {fma(f.even, u.scale, negative_as(u.minus_two, as_ints(f.even))),
          fma(f.odd, u.scale, negative_as(u.minus_two, as_ints(f.odd)))};
}

// The scale of a group whose greatest magnitude has the bits `most`, and its inverse: 0 where all codes are to be 0, as
// everything is or something is not finite, which the scale then says.
struct Packing {
  float scale, inverse;
};
template <bool kSigned>
inline Packing packing(std::uint32_t most) {
  if (most >= kInfinity) return {__builtin_nanf(""), 0.0f};
  if (most == 0) return {0.0f, 0.0f};
  float size;
  __builtin_memcpy(&size, &most, sizeof size);
  constexpr float kTop = kSigned ? 494.0f : 126974.0f, kRoom = 0x1.000008p0f;  // roundings do not pass the last code
  const float scale = size / kTop * kRoom;
  const float usable = scale > 0x1p-126f ? scale : 0x1p-126f;
  return {usable, 1.0f / usable};
}
// The floats of which codes are upper bits.
template <bool kSigned>
inline TwoInts offset(const Two& x, const Floats& inverse) {
  const Floats two = all(2.0f);
  if constexpr (!kSigned) return {as_ints(fma(x.even, inverse, two)), as_ints(fma(x.odd, inverse, two))};
  return {as_ints(fma(x.even, inverse, negative_as(two, as_ints(x.even)))),
          as_ints(fma(x.odd, inverse, negative_as(two, as_ints(x.odd))))};
}
template <bool kSigned>
inline void pack(void* codes, const TwoInts& rounded) {
  const Words w = upper_words(rounded);
  if constexpr (kSigned)
    store_bytes(codes, chosen(words(0x7fu), right<3>(w), right<8>(w)));
  else
    store_bytes(codes, larger(right<3>(w), words((kTwoWord >> 3) + 1)));
}

inline void set_scale(void* scale, float value) { __builtin_memcpy(scale, &value, sizeof value); }

// To nearest, ties up. Whole groups and, at the end, a part of one, as if zeros followed.
template <bool kSigned>
void encode_range(char* codes, char* scales, const float* src, std::size_t n) {
  for (std::size_t at = 0; at < n; at += kGroup) {
    const std::size_t count = n - at < kGroup ? n - at : kGroup;
    float x[kGroup] = {};
    char q[kGroup] = {};
    __builtin_memcpy(x, src + at, count * sizeof *x);
    Ints most = ints(0);
    for (std::size_t i = 0; i < kGroup; i += kLanes) {
      Floats value = canonical(load(x + i));
      if constexpr (!kSigned) value = at_least_zero(value);
      store(x + i, value);
      most = larger(most, as_ints(value) & ints(~kSign));
    }
    const Packing how = packing<kSigned>(largest(most));
    const Ints half = ints(1u << (kDropped - 1));
    for (std::size_t i = 0; i < kGroup && how.inverse > 0; i += kPair)
      pack<kSigned>(q + i, add(offset<kSigned>(load_two(x + i), all(how.inverse)), {half, half}));
    set_scale(scales + at / kGroup * sizeof(float), how.scale);
    __builtin_memcpy(codes + at, q, count);
  }
}
void encode(void* codes, void* scales, const float* src, bool with_sign, std::size_t n) {
  const auto range = with_sign ? &encode_range<true> : &encode_range<false>;
  range(static_cast<char*>(codes), static_cast<char*>(scales), src, n);
}

template <bool kSigned>
void decode_range(float* dst, const char* codes, const char* scales, std::size_t n) {
  for (std::size_t at = 0; at < n; at += kGroup) {
    const std::size_t count = n - at < kGroup ? n - at : kGroup;
    float x[kGroup];
    char q[kGroup] = {};
    __builtin_memcpy(q, codes + at, count);
    const Unpacking how = unpacking(scales + at / kGroup * sizeof(float));
    for (std::size_t i = 0; i < kGroup; i += kPair) {
      const Two value = unpack<kSigned>(q + i, how);
      store_two(x + i, {canonical(value.even), canonical(value.odd)});
    }
    __builtin_memcpy(dst + at, x, count * sizeof *x);
  }
}
void decode(float* dst, const void* codes, const void* scales, bool with_sign, std::size_t n) {
  const auto range = with_sign ? &decode_range<true> : &decode_range<false>;
  range(dst, static_cast<const char*>(codes), static_cast<const char*>(scales), n);
}

// Whole pairs are moved as they lie: a copy of what is left is a call, which takes several times as long as the rest.
void split(void* high, void* low, const float* src, std::size_t n) {
  char* const upper = static_cast<char*>(high);
  char* const lower = static_cast<char*>(low);
  const auto store = [](void* h, void* l, const float* x) {
    const Two value = load_two(x);
    store_split(h, l, {canonical(value.even), canonical(value.odd)});
  };
  std::size_t at = 0;
  for (; n - at >= kPair; at += kPair) store(upper + 2 * at, lower + 2 * at, src + at);
  if (at == n) return;
  float x[kPair] = {};
  std::uint16_t h[kPair], l[kPair];
  __builtin_memcpy(x, src + at, (n - at) * sizeof *x);
  store(h, l, x);
  __builtin_memcpy(upper + 2 * at, h, 2 * (n - at));
  __builtin_memcpy(lower + 2 * at, l, 2 * (n - at));
}
void join(float* dst, const void* high, const void* low, std::size_t n) {
  const char* const upper = static_cast<const char*>(high);
  const char* const lower = static_cast<const char*>(low);
  std::size_t at = 0;
  for (; n - at >= kPair; at += kPair) store_two(dst + at, load_split(upper + 2 * at, lower + 2 * at));
  if (at == n) return;
  float x[kPair];
  std::uint16_t h[kPair] = {}, l[kPair] = {};
  __builtin_memcpy(h, upper + 2 * at, 2 * (n - at));
  __builtin_memcpy(l, lower + 2 * at, 2 * (n - at));
  store_two(x, load_split(h, l));
  __builtin_memcpy(dst + at, x, (n - at) * sizeof *x);
}
