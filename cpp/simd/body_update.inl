// Updates of every form over any lanes, a group at a time; see update.h. Included inside an unnamed namespace; see
// [Note: per-target code].

// A rule is two steps: averages() makes the new moments from the gradient and the parameter, move() then the parameter.
// The first may leave what the second needs of its own in the gradient, if it says so by kKeepsGrad.
template <bool kCoupled>
struct AdamRule {
  static constexpr bool kKeepsM = true, kKeepsV = true, kKeepsGrad = false, kNeedsMaster = kCoupled;
  explicit AdamRule(const Coefficients& c) : s(adam_scalars(c)) {}
  void averages(const Floats& p, Floats& g, Floats& m, Floats& v) const {
    g = mul(g, s.grad_scale);
    if constexpr (kCoupled) g = fma(s.l2, p, g);
    adam_averages(s, g, m, v);
  }
  void move(Floats& p, const Floats&, const Floats& m, const Floats& v) const { adam_move(s, p, m, v); }

  AdamScalars s;
};

struct LionRule {
  static constexpr bool kKeepsM = true, kKeepsV = false, kKeepsGrad = true, kNeedsMaster = true;
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
  void averages(const Floats& p, Floats& g, Floats& m, Floats&) const {
    g = mul(g, grad_scale);
    if (coupled) g = fma(l2, p, g);
    const Floats change = sub(g, m), old = m;
    m = fma(lerp2, change, from_grad2 ? g : old);
    g = sign_of(fma(lerp1, change, from_grad ? g : old));
  }
  void move(Floats& p, const Floats& sign, const Floats&, const Floats&) const {
    p = canonical(fma(minus_lr, sign, mul(decay, p)));
  }

  Floats grad_scale, l2, decay, lerp1, lerp2, minus_lr;
  bool coupled, from_grad, from_grad2;
};

struct AdagradRule {
  static constexpr bool kKeepsM = false, kKeepsV = true, kKeepsGrad = true, kNeedsMaster = true;
  explicit AdagradRule(const Coefficients& c)
      : grad_scale(all(c.grad_scale)),
        l2(all(c.l2)),
        decay(all(c.decay)),
        eps(all(c.eps)),
        minus_lr(all(c.minus_lr)),
        coupled(c.coupled) {}
  void averages(const Floats& p, Floats& g, Floats&, Floats& v) const {
    g = mul(g, grad_scale);
    if (coupled) g = fma(l2, p, g);
    v = fma(g, g, v);
  }
  void move(Floats& p, const Floats& g, const Floats&, const Floats& v) const {
    p = canonical(fma(minus_lr, div(g, add(root(v), eps)), mul(decay, p)));
  }

  Floats grad_scale, l2, decay, eps, minus_lr;
  bool coupled;
};

template <class Rule>
inline void averages_of_two(const Rule& rule, const Two& p, Two& g, Two& m, Two& v) {
  rule.averages(p.even, g.even, m.even, v.even);
  rule.averages(p.odd, g.odd, m.odd, v.odd);
}
template <class Rule>
inline void move_two(const Rule& rule, Two& p, const Two& g, const Two& m, const Two& v) {
  rule.move(p.even, g.even, m.even, v.even);
  rule.move(p.odd, g.odd, m.odd, v.odd);
}
inline Two canonical(const Two& a) { return {canonical(a.even), canonical(a.odd)}; }

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

// The lines that 32 elements from the i-th will need some way down the stream.
inline void ahead_two(const void* p, std::size_t width, std::size_t i) {
  for (std::size_t byte = i * width; byte < (i + kPair) * width; byte += kLine) ahead(at(p, byte));
}
template <Master kMaster>
inline void ahead_of_master(const Form& form, const Arrays& a, std::size_t i) {
  ahead_two(a.master, bytes_of(kMaster), i);
  if (kMaster == Master::split) ahead_two(a.low, 2, i);
  if (a.out) ahead_two(a.out, bytes_of(form.out), i);
}

// One group, of fp32 or bf16 moments.
template <Master kMaster, Moments kMoments, class Rule>
inline void plain_group(const Rule& given, const Form& form, const Arrays& a, const Beside& b, Random random) {
  constexpr bool kBf16 = kMoments == Moments::bf16;
  const Rule rule = given;  // a copy, which no store can change
  const Two zero{all(0), all(0)};
  for (std::size_t i = 0; i < kGroup; i += kPair) {
    ahead_of_master<kMaster>(form, a, i);
    ahead_two(a.grad, bytes_of(form.grad), i);
    if (Rule::kKeepsM) ahead_two(a.exp_avg, bytes_of(kMoments), i);
    if (Rule::kKeepsV) ahead_two(a.exp_avg_sq, bytes_of(kMoments), i);
    Two p = load_master<kMaster>(a, i), g = load_two(b.grad, b.grad_bf16, i), m = zero, v = zero;
    if constexpr (Rule::kKeepsM) m = load_two(a.exp_avg, kBf16, i);
    if constexpr (Rule::kKeepsV) v = load_two(a.exp_avg_sq, kBf16, i);
    averages_of_two(rule, p, g, m, v);
    m = canonical(m), v = canonical(v);
    move_two(rule, p, g, m, v);
    if constexpr (Rule::kKeepsM) store_plain<kMoments>(a.exp_avg, i, m, lowest<16>(random.word));
    if constexpr (Rule::kKeepsV) store_plain<kMoments>(a.exp_avg_sq, i, v, highest<16>(random.word));
    if constexpr (kBf16) random.advance();
    store_master<kMaster>(a, i, p);
    if (b.copy) store_two(b.copy + i, p);
  }
}

// 32 values by 32 of a group, their lanes in any order.
struct Kept {
  alignas(64) float x[kGroup];

  void put(std::size_t i, const Two& value) {
    store(x + i, value.even);
    store(x + i + kLanes, value.odd);
  }
  Two get(std::size_t i) const { return {load(x + i), load(x + i + kLanes)}; }
};
// Becomes at least the bits of the magnitudes. What has no sign may be a NaN that has, which is above all then.
template <bool kSigned>
inline void raise(Ints& most, const Two& value) {
  TwoInts bits = as_ints(value);
  if constexpr (kSigned) bits = {bits.even & ints(~kSign), bits.odd & ints(~kSign)};
  most = larger(larger(most, bits.even), bits.odd);
}

struct KeptGroup {
  Kept m, v, g;
  Packing pack_m, pack_v;
};

// [Note: moments in bytes, two passes]
// A group can be packed only when all its new moments are known. The first pass makes them; the second packs them and
// moves the parameters, whose divisions and roots take their time beside the packing.
template <Master kMaster, class Rule>
inline void byte_averages(const Rule& given, const Form& form, const Arrays& a, const Beside& b, KeptGroup& kept) {
  const Rule rule = given;
  const Two zero{all(0), all(0)};
  Unpacking um{all(0), all(0)}, uv{all(0), all(0)};
  Ints most_m = ints(0), most_v = ints(0);
  if constexpr (Rule::kKeepsM) um = unpacking(a.exp_avg_scale);
  if constexpr (Rule::kKeepsV) uv = unpacking(a.exp_avg_sq_scale);
  for (std::size_t i = 0; i < kGroup; i += kPair) {
    ahead_two(a.grad, bytes_of(form.grad), i);
    if (Rule::kKeepsM && i % kLine == 0) ahead(at(a.exp_avg, i));
    if (Rule::kKeepsV && i % kLine == 0) ahead(at(a.exp_avg_sq, i));
    Two p = zero, g = load_two(b.grad, b.grad_bf16, i), m = zero, v = zero;
    if constexpr (Rule::kNeedsMaster) p = load_master<kMaster>(a, i);
    if constexpr (Rule::kKeepsM) m = unpack<true>(at(a.exp_avg, i), um);
    if constexpr (Rule::kKeepsV) v = unpack<false>(at(a.exp_avg_sq, i), uv);
    averages_of_two(rule, p, g, m, v);
    if constexpr (Rule::kKeepsM) kept.m.put(i, m), raise<true>(most_m, m);
    if constexpr (Rule::kKeepsV) kept.v.put(i, v), raise<false>(most_v, v);
    if constexpr (Rule::kKeepsGrad) kept.g.put(i, g);
  }
  if constexpr (Rule::kKeepsM) kept.pack_m = packing<true>(largest(most_m));
  if constexpr (Rule::kKeepsV) kept.pack_v = packing<false>(largest(most_v));
}

template <Master kMaster, class Rule>
inline void byte_moves(const Rule& given, const Form& form, const Arrays& a, const Beside& b, const KeptGroup& kept,
                       Random random) {
  const Rule rule = given;
  const Two zero{all(0), all(0)};
  const Packing pm = kept.pack_m, pv = kept.pack_v;
  if constexpr (Rule::kKeepsM) set_scale(a.exp_avg_scale, pm.scale);
  if constexpr (Rule::kKeepsV) set_scale(a.exp_avg_sq_scale, pv.scale);
  const Floats inverse_m = all(pm.inverse), inverse_v = all(pv.inverse);
  for (std::size_t i = 0; i < kGroup; i += kPair) {
    ahead_of_master<kMaster>(form, a, i);
    Two p = load_master<kMaster>(a, i), g = zero, m = zero, v = zero;
    if constexpr (Rule::kKeepsM) m = kept.m.get(i);
    if constexpr (Rule::kKeepsV) v = kept.v.get(i);
    if constexpr (Rule::kKeepsGrad) g = kept.g.get(i);
    move_two(rule, p, g, m, v);
    if constexpr (Rule::kKeepsM)
      pack<true>(at(a.exp_avg, i), add(offset<true>(m, inverse_m), lowest<kDropped>(random.word)));
    if constexpr (Rule::kKeepsV)
      pack<false>(at(a.exp_avg_sq, i), add(offset<false>(v, inverse_v), highest<kDropped>(random.word)));
    random.advance();
    store_master<kMaster>(a, i, p);
    if (b.copy) store_two(b.copy + i, p);
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
  if constexpr (kMoments == Moments::i8) {
    KeptGroup kept;
    byte_averages<kMaster>(rule, form, a, b, kept);
    byte_moves<kMaster>(rule, form, a, b, kept, random);
  } else {
    plain_group<kMaster, kMoments>(rule, form, a, b, random);
  }
  if (!a.out) return;
  typed(a.out, form.out, [&](auto* out) {
    for (std::size_t i = 0; i < kGroup; i += kLanes) store(out + i, load(copied + i));
  });
}

template <class Rule, Master kMaster, Moments kMoments>
void update_range(const Coefficients& c, const Form& form, const Arrays& arrays, std::uint64_t first, std::size_t n) {
  const Rule rule(c);
  Parts parts = parts_of(form, arrays);
  std::size_t group = 0;
  for (; n - group * kGroup >= kGroup; ++group) {
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
