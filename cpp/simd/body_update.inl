// Updates of every form over any lanes, a group at a time; see update.h. Included inside an unnamed namespace; see
// [Note: per-target code].

template <bool kCoupled>
struct AdamRule {
  static constexpr bool kKeepsM = true, kKeepsV = true;
  explicit AdamRule(const Coefficients& c) : s(adam_scalars(c)) {}
  template <bool kFinal>
  void step(Floats& p, const Floats& g, Floats& m, Floats& v) const {
    adam_step<kCoupled, kFinal>(s, p, g, m, v);
  }

  AdamScalars s;
};

struct LionRule {
  static constexpr bool kKeepsM = true, kKeepsV = false;
  explicit LionRule(const Coefficients& c)
      : grad_scale(all(c.grad_scale)),
        l2(all(c.l2)),
        decay(all(c.decay)),
        lerp1(all(c.lerp1)),
        lerp2(all(c.lerp2)),
        minus_lr(all(c.minus_lr)),
        coupled(c.coupled),
        from_grad(c.from_grad),
        from_grad2(c.from_grad2) {}
  template <bool kFinal>
  void step(Floats& p, Floats g, Floats& m, Floats&) const {
    g = mul(g, grad_scale);
    if (coupled) g = fma(l2, p, g);
    const Floats change = sub(g, m);
    const Floats sign = sign_of(fma(lerp1, change, from_grad ? g : m));
    m = fma(lerp2, change, from_grad2 ? g : m);
    if constexpr (kFinal) m = canonical(m);
    p = canonical(fma(minus_lr, sign, mul(decay, p)));
  }

  Floats grad_scale, l2, decay, lerp1, lerp2, minus_lr;
  bool coupled, from_grad, from_grad2;
};

struct AdagradRule {
  static constexpr bool kKeepsM = false, kKeepsV = true;
  explicit AdagradRule(const Coefficients& c)
      : grad_scale(all(c.grad_scale)),
        l2(all(c.l2)),
        decay(all(c.decay)),
        eps(all(c.eps)),
        minus_lr(all(c.minus_lr)),
        coupled(c.coupled) {}
  template <bool kFinal>
  void step(Floats& p, Floats g, Floats&, Floats& v) const {
    g = mul(g, grad_scale);
    if (coupled) g = fma(l2, p, g);
    v = fma(g, g, v);
    if constexpr (kFinal) v = canonical(v);
    p = canonical(fma(minus_lr, div(g, add(root(v), eps)), mul(decay, p)));
  }

  Floats grad_scale, l2, decay, eps, minus_lr;
  bool coupled;
};

template <class Rule, bool kFinal>
inline void step_two(const Rule& rule, Two& p, const Two& g, Two& m, Two& v) {
  rule.template step<kFinal>(p.even, g.even, m.even, v.even);
  rule.template step<kFinal>(p.odd, g.odd, m.odd, v.odd);
}

inline const char* at(const void* base, std::size_t bytes) { return static_cast<const char*>(base) + bytes; }
inline char* at(void* base, std::size_t bytes) { return static_cast<char*>(base) + bytes; }
inline float* floats(void* base) { return static_cast<float*>(base); }
inline const float* floats(const void* base) { return static_cast<const float*>(base); }

inline Two load_two(const void* p, bool in_bf16, std::size_t i) {
  return in_bf16 ? as_floats(joined(load_words(at(p, 2 * i)))) : load_two(floats(p) + i);
}
template <Master kMaster>
inline Two load_master(const Arrays& a, std::size_t i) {
  if constexpr (kMaster == Master::f32) return load_two(floats(as_const(a.master)) + i);
  return load_split(at(a.master, 2 * i), at(a.low, 2 * i));
}
template <Master kMaster>
inline void store_master(const Arrays& a, std::size_t i, const Two& p) {
  if constexpr (kMaster == Master::f32)
    store_two(floats(a.master) + i, p);
  else
    store_split(at(a.master, 2 * i), at(a.low, 2 * i), p);
}
template <Moments kMoments>
inline void store_plain(void* moment, std::size_t i, const Two& x, const TwoInts& random) {
  if constexpr (kMoments == Moments::f32)
    store_two(floats(moment) + i, x);
  else
    store_words(at(moment, 2 * i), upper_words(add(as_ints(x), random)));
}

// A group's gradient, in fp32 or bf16, and where a copy of the new master in fp32 goes; null for none.
struct Beside {
  const void* grad;
  bool grad_bf16;
  float* copy;
};

// One group, of fp32 or bf16 moments.
template <Master kMaster, Moments kMoments, class Rule>
inline void plain_group(const Rule& rule, const Arrays& a, const Beside& b, Random random) {
  constexpr bool kBf16 = kMoments == Moments::bf16;
  const Two zero{all(0), all(0)};
  for (std::size_t i = 0; i < kGroup; i += kPair) {
    Two p = load_master<kMaster>(a, i), m = zero, v = zero;
    if constexpr (Rule::kKeepsM) m = load_two(a.exp_avg, kBf16, i);
    if constexpr (Rule::kKeepsV) v = load_two(a.exp_avg_sq, kBf16, i);
    step_two<Rule, true>(rule, p, load_two(b.grad, b.grad_bf16, i), m, v);
    if constexpr (Rule::kKeepsM) store_plain<kMoments>(a.exp_avg, i, m, lowest<16>(random.word));
    if constexpr (Rule::kKeepsV) store_plain<kMoments>(a.exp_avg_sq, i, v, highest<16>(random.word));
    if constexpr (kBf16) random.advance();
    store_master<kMaster>(a, i, p);
    if (b.copy) store_two(b.copy + i, p);
  }
}

// A group's new moment before it is packed, its lanes in any order.
template <bool kSigned>
struct Kept {
  alignas(64) float x[kGroup];

  // `most` becomes at least the bits of the magnitudes.
  void put(std::size_t i, const Two& value, Ints& most) {
    store(x + i, value.even);
    store(x + i + kLanes, value.odd);
    TwoInts bits = as_ints(value);  // without a sign but for a NaN's, which is above all then
    if constexpr (kSigned) bits = {bits.even & ints(~kSign), bits.odd & ints(~kSign)};
    most = larger(larger(most, bits.even), bits.odd);
  }
  void pack_some(std::size_t i, void* codes, const Floats& inverse, const TwoInts& up) const {
    const Two value{load(x + i), load(x + i + kLanes)};
    pack<kSigned>(at(codes, i), add(offset<kSigned>(value, inverse), up));
  }
};

// One group, of moments in bytes, which can be packed only when all of the group has been updated.
template <Master kMaster, class Rule>
inline void byte_group(const Rule& given, const Arrays& a, const Beside& b, Random random) {
  const Rule rule = given;  // a copy, which no store can change
  Kept<true> kept_m;
  Kept<false> kept_v;
  const Two zero{all(0), all(0)};
  Unpacking um{all(0), all(0)}, uv{all(0), all(0)};
  Ints most_m = ints(0), most_v = ints(0);
  if constexpr (Rule::kKeepsM) um = unpacking(a.exp_avg_scale);
  if constexpr (Rule::kKeepsV) uv = unpacking(a.exp_avg_sq_scale);
  for (std::size_t i = 0; i < kGroup; i += kPair) {
    Two p = load_master<kMaster>(a, i), m = zero, v = zero;
    if constexpr (Rule::kKeepsM) m = unpack<true>(at(a.exp_avg, i), um);
    if constexpr (Rule::kKeepsV) v = unpack<false>(at(a.exp_avg_sq, i), uv);
    step_two<Rule, false>(rule, p, load_two(b.grad, b.grad_bf16, i), m, v);
    if constexpr (Rule::kKeepsM) kept_m.put(i, m, most_m);
    if constexpr (Rule::kKeepsV) kept_v.put(i, v, most_v);
    store_master<kMaster>(a, i, p);
    if (b.copy) store_two(b.copy + i, p);
  }
  Packing pm{0, 0}, pv{0, 0};
  if constexpr (Rule::kKeepsM) pm = packing<true>(largest(most_m)), set_scale(a.exp_avg_scale, pm.scale);
  if constexpr (Rule::kKeepsV) pv = packing<false>(largest(most_v)), set_scale(a.exp_avg_sq_scale, pv.scale);
  for (std::size_t i = 0; i < kGroup; i += kPair) {
    if constexpr (Rule::kKeepsM) kept_m.pack_some(i, a.exp_avg, all(pm.inverse), lowest<kDropped>(random.word));
    if constexpr (Rule::kKeepsV) kept_v.pack_some(i, a.exp_avg_sq, all(pv.inverse), highest<kDropped>(random.word));
    random.advance();
  }
  if (Rule::kKeepsM && pm.inverse == 0) __builtin_memset(a.exp_avg, 0, kGroup);
  if (Rule::kKeepsV && pv.inverse == 0) __builtin_memset(a.exp_avg_sq, 0, kGroup);
}

// The arrays in a fixed order with their bytes an element; scales have none, they go by groups.
struct Part {
  void* base;
  std::size_t width;
};
constexpr int kParts = 6;
struct Parts {
  Part part[kParts];
};
inline Parts parts_of(const Form& f, const Arrays& a) {
  const std::size_t moment = bytes_of(f.moments);
  return {{{a.master, bytes_of(f.master)},
           {a.low, 2},
           {const_cast<void*>(a.grad), bytes_of(f.grad)},
           {a.exp_avg, moment},
           {a.exp_avg_sq, moment},
           {a.out, bytes_of(f.out)}}};
}
inline Arrays arrays_of(const Parts& p, const Arrays& scales, std::size_t group) {
  const auto scale = [group](void* base) { return base ? static_cast<char*>(base) + group * sizeof(float) : nullptr; };
  return {p.part[0].base,
          p.part[1].base,
          p.part[2].base,
          p.part[3].base,
          scale(scales.exp_avg_scale),
          p.part[4].base,
          scale(scales.exp_avg_sq_scale),
          p.part[5].base};
}

template <Master kMaster, Moments kMoments, class Rule>
inline void whole_group(const Rule& rule, const Form& form, const Arrays& a, const Random& random) {
  alignas(64) float widened[kGroup], copied[kGroup];
  Beside b{a.grad, form.grad == Dtype::bf16, a.out ? copied : nullptr};
  if (form.grad == Dtype::f16) {
    for (std::size_t i = 0; i < kGroup; i += kLanes) store(widened + i, load(static_cast<const Half*>(a.grad) + i));
    b.grad = widened;
  }
  if constexpr (kMoments == Moments::i8)
    byte_group<kMaster>(rule, a, b, random);
  else
    plain_group<kMaster, kMoments>(rule, a, b, random);
  if (!a.out) return;
  typed(a.out, form.out, [&](auto* out) {
    for (std::size_t i = 0; i < kGroup; i += kLanes) store(out + i, load(copied + i));
  });
}

constexpr std::size_t kAheadGroups = 2;

template <class Rule, Master kMaster, Moments kMoments>
void update_range(const Coefficients& c, const Form& form, const Arrays& arrays, std::uint64_t first, std::size_t n) {
  const Rule rule(c);
  Parts parts = parts_of(form, arrays);
  std::size_t group = 0;
  for (; n - group * kGroup >= kGroup; ++group) {
    for (const Part& part : parts.part) {
      if (!part.base) continue;
      const char* next = static_cast<const char*>(part.base) + kAheadGroups * kGroup * part.width;
      for (std::size_t line = 0; line < kGroup * part.width; line += kLine) __builtin_prefetch(next + line);
    }
    const Random random = random_words(c.key, first / kGroup + group);
    whole_group<kMaster, kMoments>(rule, form, arrays_of(parts, arrays, group), random);
    for (Part& part : parts.part)
      if (part.base) part.base = static_cast<char*>(part.base) + kGroup * part.width;
  }
  const std::size_t rest = n - group * kGroup;
  if (rest == 0) return;
  alignas(64) char padded[kParts][kGroup * sizeof(float)] = {};
  Parts inside = parts;
  for (int i = 0; i < kParts; ++i) {
    if (!parts.part[i].base) continue;
    __builtin_memcpy(padded[i], parts.part[i].base, rest * parts.part[i].width);
    inside.part[i].base = padded[i];
  }
  const Random random = random_words(c.key, first / kGroup + group);
  whole_group<kMaster, kMoments>(rule, form, arrays_of(inside, arrays, group), random);
  for (int i = 0; i < kParts; ++i)
    if (parts.part[i].base && i != 2) __builtin_memcpy(parts.part[i].base, padded[i], rest * parts.part[i].width);
}

template <class Rule, Master kMaster>
void update_moments(const Coefficients& c, const Form& form, const Arrays& a, std::uint64_t first, std::size_t n) {
  switch (form.moments) {
    case Moments::f32:
      return update_range<Rule, kMaster, Moments::f32>(c, form, a, first, n);
    case Moments::bf16:
      return update_range<Rule, kMaster, Moments::bf16>(c, form, a, first, n);
    case Moments::i8:
      return update_range<Rule, kMaster, Moments::i8>(c, form, a, first, n);
  }
}
template <class Rule>
void update_rule(const Coefficients& c, const Form& form, const Arrays& a, std::uint64_t first, std::size_t n) {
  form.master == Master::split ? update_moments<Rule, Master::split>(c, form, a, first, n)
                               : update_moments<Rule, Master::f32>(c, form, a, first, n);
}
void update(const Coefficients& c, const Form& form, const Arrays& a, std::uint64_t first, std::size_t n) {
  switch (c.rule) {
    case Rule::adam:
      return c.coupled ? update_rule<AdamRule<true>>(c, form, a, first, n)
                       : update_rule<AdamRule<false>>(c, form, a, first, n);
    case Rule::lion:
      return update_rule<LionRule>(c, form, a, first, n);
    case Rule::adagrad:
      return update_rule<AdagradRule>(c, form, a, first, n);
  }
}
